"""Parses rows as conversations with references to their images, sounds and videos."""
