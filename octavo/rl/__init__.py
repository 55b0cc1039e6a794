"""Reinforcement learning and preferences: objectives as papers write them, rewards, roles and the phase of a run."""
