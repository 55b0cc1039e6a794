"""Generates and scores completions, and compares their log-probabilities and weights with the trainer's."""
