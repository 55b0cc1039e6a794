"""TODO moe."""
