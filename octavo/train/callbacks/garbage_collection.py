"""``train.gc``: when Python's garbage collector looks through all objects of a training process.

What is no longer used is freed at once, by counting; the collector finds what refers to itself in a circle. Its oldest
generation holds every module, hook and string of a run, and looking through it takes as long as there are objects. It
runs when a rank has made enough of them, so each rank stops at a step of its own and the others wait for it.

    absent          Python's own thresholds, untouched
    700,10,1000     other thresholds: the oldest generation a hundredth as often as by 700,10,10
    freeze          after :data:`SETTLED` steps of a session, what is there is collected and never looked at again
    N               nothing is collected but after every N-th step, on all ranks alike, and what is there after the
                    first steps is frozen too, without which each time would look through everything; circles with
                    tensors live until then, so N is no number of thousands

Whatever a run sets is as it was when it ends: `train.run` may have been called by another program.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

from octavo.train.callbacks.callback import Callback, Run, Step

SETTLED = 5  # steps of a session after which its objects are there to stay
Gc = str | int | tuple[int, int, int] | None


@contextmanager
def collecting(how: Gc) -> Iterator[None]:
    """The collector as `train.gc` says inside, and as it was outside."""
    enabled, thresholds = gc.isenabled(), gc.get_threshold()
    freezes = how is not None and not isinstance(how, tuple)
    frozen = gc.get_freeze_count() if freezes else 0  # it goes through all that are: 50 ms for half a million
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
        if freezes and not frozen:  # what others froze before cannot be told from what was frozen here
            gc.unfreeze()


class Collecting(Callback):
    """Freezes, or collects every so many steps, behind the row of a step and before its checkpoint."""

    def end_step(self, run: Run, step: Step) -> None:
        how = run.cfg.train.gc
        if not isinstance(how, tuple) and step.number == run.first + SETTLED - 1:
            gc.collect()
            gc.freeze()
        elif isinstance(how, int) and step.number % how == 0:
            gc.collect()
