"""GEMM counts and health metrics, which layers report to one recorder."""

from octavo.fp8.observe.counts import record_gemms, report_replay
from octavo.fp8.observe.health import Health
from octavo.fp8.observe.recorder import Phase, mute_reports, phase, uncounted

__all__ = ["Health", "Phase", "mute_reports", "phase", "record_gemms", "report_replay", "uncounted"]
