"""The loop over steps, and what is printed of it."""
