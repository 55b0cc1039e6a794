"""Who watches: GEMM counts and health figures, which layers report to one recorder."""

from octavo.fp8.observe.counts import replayed, taped
from octavo.fp8.observe.recorder import Phase, muted, phase

__all__ = ["Phase", "muted", "phase", "replayed", "taped"]
