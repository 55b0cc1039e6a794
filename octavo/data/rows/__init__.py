"""Rows become conversations with references to their images, sounds and videos."""
