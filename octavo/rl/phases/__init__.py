"""The phases of reinforcement learning and preference training."""
