"""TODO blocks."""
