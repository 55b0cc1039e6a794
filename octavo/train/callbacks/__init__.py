"""Callbacks of the training loop: metrics, checkpoints, evaluation, health, trackers."""
