"""The phases of RL and preference training: what a step of each does."""
