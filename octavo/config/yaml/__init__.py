"""A YAML file as text: keys with their lines, and problems that point at them."""
