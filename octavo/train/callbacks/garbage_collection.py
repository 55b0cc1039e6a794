"""``train.gc``: controls when Python's garbage collector runs in a training process.

Reference counting frees unused objects at once; the collector finds reference cycles. Its oldest generation holds every
module, hook and string of a run, and a collection takes time proportional to their number. It runs after a number of
allocations, so each rank pauses at a different step and the others wait for it.

    absent          Python's own thresholds, unchanged
    700,10,1000     custom thresholds: the oldest generation is collected a hundredth as often as with 700,10,10
    freeze          after :data:`SETTLE_STEPS` steps of a session, collect once and exempt all existing objects
    N               collect only after every N-th step, on all ranks at once; objects that exist after the first steps
                    are exempt too, since each collection would visit them all. Cycles with tensors live until the
                    next collection, so N should not be in the thousands

The settings are restored when the run ends, because another program may have called `train.run`.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

from octavo.train.callbacks.callback import Callback, Run, Step

SETTLE_STEPS = 5  # steps of a session after which its long-lived objects exist
Gc = str | int | tuple[int, int, int] | None


@contextmanager
def gc_settings(how: Gc) -> Iterator[None]:
    """Context with the collector settings of `train.gc`; restores the previous ones."""
    enabled, thresholds = gc.isenabled(), gc.get_threshold()
    freezes = how is not None and not isinstance(how, tuple)
    frozen = gc.get_freeze_count() if freezes else 0  # visits all frozen objects: 50 ms for half a million
    if isinstance(how, tuple):
        gc.set_threshold(*how)
    elif isinstance(how, int):
        gc.disable()
    try:
        yield
    finally:
        gc.set_threshold(*thresholds)
        if enabled:
            gc.enable()
        if freezes and not frozen:  # objects that were frozen earlier cannot be distinguished
            gc.unfreeze()


class GarbageCollection(Callback):
    """Freezes the existing objects, or collects every N steps, after a step's row is written and before its
    checkpoint."""

    def end_step(self, run: Run, step: Step) -> None:
        how = run.cfg.train.gc
        if not isinstance(how, tuple) and step.number == run.first + SETTLE_STEPS - 1:
            gc.collect()
            gc.freeze()
        elif isinstance(how, int) and step.number % how == 0:
            gc.collect()
