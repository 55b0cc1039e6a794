"""Encodes conversations as tokens and pixels, with the model's own processor and chat template."""
