"""Finds the layer, GEMM or feature that breaks a run, with short runs in which parts of its FP8 and savings are off."""

from octavo.bisect.find_culprits import bisect
from octavo.bisect.page import document
from octavo.bisect.search_result import UNSOLVED, Answer
from octavo.bisect.short_runs import BisectError

__all__ = ["UNSOLVED", "Answer", "BisectError", "bisect", "document"]
