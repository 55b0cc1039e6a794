"""A model folder written from a model in training."""
