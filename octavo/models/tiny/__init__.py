"""Creates small checkpoints of real architectures for tests and trials."""
