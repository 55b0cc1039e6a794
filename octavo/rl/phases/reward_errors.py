"""`rl.on_bad_reward: zero`: rewards that gave no number and count 0, told to people. A new way to fail is a sentence,
the one that would have ended the run; how often it happened is `rewards/NAME/bad` of each step, and a line at the end.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from octavo.parallel import World
from octavo.rl.rewards import Rewards


class RewardErrors:
    """Of a run's rewards on all ranks, after `step`, where they do not end the run; `say` takes lines for people.
    `withhold`: no sentences, which may quote a completion."""

    def __init__(
        self, rewards: Rewards, world: World, say: Callable[[str], None], step: int, withhold: bool = False
    ) -> None:
        self._rewards, self._world, self._say, self._since = rewards, world, say, step + 1
        self._withhold = withhold
        self._counts: Counter[str] = Counter()

    def tell(self) -> None:
        """Say what is new since the last call. A collective."""
        for sentences, counts in self._world.gather_objects(self._rewards.taken()):
            self._counts += counts
            for sentence in () if self._withhold else sentences:
                self._say(f"note: {sentence}")

    def close(self) -> None:
        """Say how many there were."""
        for name, count in self._counts.items():
            self._say(f"note: reward {name} gave no number {count} times since step {self._since}, and counted 0 there")
