"""TODO dense."""
