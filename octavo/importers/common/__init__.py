"""Code that the translations from all frameworks share."""
