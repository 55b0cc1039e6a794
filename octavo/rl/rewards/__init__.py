"""Rewards: what completions are worth, by built-in functions, functions of a user's file, or reward models.

entries -> Rewards.score(completions, columns) -> RewardTable (totals, each reward, what went wrong by row)
"""

from octavo.rl.rewards.entry import Entry, RewardError, read_entries
from octavo.rl.rewards.rewards import Rewards, RewardTable, changed

__all__ = ["Entry", "RewardError", "RewardTable", "Rewards", "changed", "read_entries"]
