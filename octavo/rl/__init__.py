"""Reinforcement learning and preferences on the training modules themselves."""
