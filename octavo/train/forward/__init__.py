"""The forward of a batch and its loss."""
