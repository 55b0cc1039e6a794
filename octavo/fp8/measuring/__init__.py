"""Measure layers on this machine, and choose recipes by the measurements."""

from octavo.fp8.measuring.invariant import find_shared_scales, first_compiled_module
from octavo.fp8.measuring.machine import Machine
from octavo.fp8.measuring.timing import time_calls

__all__ = ["Machine", "find_shared_scales", "first_compiled_module", "time_calls"]
