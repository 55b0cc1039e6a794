"""Conversations become tokens and pixels, by the model's own processor and template."""
