"""`rl.on_bad_reward: zero`: reports of rewards that returned no number and count 0. Each new kind of failure is printed
once, with the sentence that would have ended the run; `rewards/NAME/bad` of each step, and a line at the end, count
them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from octavo.parallel import World
from octavo.rl.rewards import Rewards


class RewardErrors:
    """Failures of a run's rewards on all ranks after `step`; `log` prints lines. `withhold`: print no sentences,
    because they may quote a completion."""

    def __init__(
        self, rewards: Rewards, world: World, log: Callable[[str], None], step: int, withhold: bool = False
    ) -> None:
        self._rewards, self._world, self._log, self._since = rewards, world, log, step + 1
        self._withhold = withhold
        self._counts: Counter[str] = Counter()

    def report(self) -> None:
        """Print the new kinds of failures since the last call. A collective."""
        for sentences, counts in self._world.gather_objects(self._rewards.take_reports()):
            self._counts += counts
            for sentence in () if self._withhold else sentences:
                self._log(f"note: {sentence}")

    def close(self) -> None:
        """Print how many there were."""
        for name, count in self._counts.items():
            self._log(f"note: reward {name} gave no number {count} times since step {self._since}, and counted 0 there")
