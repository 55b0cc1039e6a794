"""Parses launch scripts and evaluates their words; independent of configurations."""
