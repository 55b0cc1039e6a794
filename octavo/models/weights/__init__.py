"""Loads and initializes the weights of models: names, shards, FP8 codes."""
