"""TODO arithmetic."""
