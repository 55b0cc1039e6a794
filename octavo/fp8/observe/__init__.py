"""Who watches: GEMM counts and health figures, which layers report to one recorder."""

from octavo.fp8.observe.recorder import Phase, phase

__all__ = ["Phase", "phase"]
