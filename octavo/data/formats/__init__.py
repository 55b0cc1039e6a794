"""Decoding of file bytes to rows, one entry for each format; without cache and network."""
