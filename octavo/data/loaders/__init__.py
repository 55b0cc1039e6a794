"""Loaders of training data and evaluation sets, built from a configuration."""
