"""Rewards of completions: built-in functions, functions in a user's file, and reward models.

entries -> Rewards.score(completions, columns) -> RewardTable (totals, each reward, errors by row)
"""

from octavo.rl.rewards.entry import Entry, RewardError, read_entries
from octavo.rl.rewards.rewards import Rewards, RewardTable, changed

__all__ = ["Entry", "RewardError", "RewardTable", "Rewards", "changed", "read_entries"]
