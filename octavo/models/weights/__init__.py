"""Weights from files into models: names, shards, FP8 codes, loading and initialization."""
