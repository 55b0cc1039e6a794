"""The iterables of a training loop, built from a configuration."""
