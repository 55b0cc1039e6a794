"""Each objective as one function, readable next to its paper."""
