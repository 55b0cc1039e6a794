"""The state of a run in PyTorch's distributed checkpoints: saved, listed and loaded again."""
