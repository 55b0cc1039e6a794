"""Reports rewards that returned no number and count as 0 (`rl.on_bad_reward: zero`).

Each new kind of failure is logged once, with the message that would otherwise end the run. `rewards/NAME/bad` of each
step, and a line at the end, count them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from octavo.parallel import World
from octavo.rl.rewards import Rewards


class RewardErrors:
    """Failures of a run's rewards on all ranks after `step`. ``hide_messages``: log no messages, because they may quote
    a completion."""

    def __init__(
        self, rewards: Rewards, world: World, log: Callable[[str], None], step: int, hide_messages: bool = False
    ) -> None:
        self._rewards, self._world, self._log, self._since = rewards, world, log, step + 1
        self._hide_messages = hide_messages
        self._counts: Counter[str] = Counter()

    def report(self) -> None:
        """Log new kinds of failures since the last call. Collective call."""
        for sentences, counts in self._world.gather_objects(self._rewards.take_reports()):
            self._counts += counts
            for sentence in () if self._hide_messages else sentences:
                self._log(f"note: {sentence}")

    def close(self) -> None:
        """Log the number of failures."""
        for name, count in self._counts.items():
            self._log(f"note: reward {name} returned no number {count} times since step {self._since} and counted as 0")
