"""TODO observe."""
