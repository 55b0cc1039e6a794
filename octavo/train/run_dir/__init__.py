"""The run directory: its files, its lock, and the checks before a run enters it. Knows nothing of models."""
