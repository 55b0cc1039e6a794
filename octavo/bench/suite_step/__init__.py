"""``step``: whole training steps of a published size with random weights: tokens/s, TFLOP/s, MFU, peak memory."""

from octavo.bench.suite_step.suite import run

__all__ = ["run"]
