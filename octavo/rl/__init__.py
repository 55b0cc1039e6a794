"""Reinforcement learning and preferences: objectives, rewards, rollouts, and the phases of a run."""

from octavo.rl.phases.answer_prompts import evaluate_target
from octavo.rl.phases.summary import describe_step, reference_kind
from octavo.rl.run import phase_of, run

__all__ = ["evaluate_target", "phase_of", "reference_kind", "run", "describe_step"]
