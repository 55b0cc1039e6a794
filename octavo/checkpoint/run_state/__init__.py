"""What a resumed run needs, in PyTorch's distributed checkpoints: written, listed and read back."""
