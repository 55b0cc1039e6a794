"""Completions that the trainer can learn from: sampled, numbered, compared with the trainer's own."""
