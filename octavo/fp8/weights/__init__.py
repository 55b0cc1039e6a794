"""TODO weights."""
