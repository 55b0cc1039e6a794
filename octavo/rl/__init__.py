"""Reinforcement learning and preferences: objectives as papers write them, rewards, roles and the phases of a run."""

from octavo.rl.run import phase_of, run

__all__ = ["phase_of", "run"]
