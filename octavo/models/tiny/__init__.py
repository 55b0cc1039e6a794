"""Small checkpoints of real architectures, made for tests and trials."""
