"""Data that ships with Octavo or with Python."""
