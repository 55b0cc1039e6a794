"""Which layer, GEMM or feature breaks a run: a search by short runs over what FP8 and savings add to it."""

from octavo.bisect.find_culprits import bisect
from octavo.bisect.page import document
from octavo.bisect.search_result import UNSOLVED, Answer
from octavo.bisect.short_runs import BisectError

__all__ = ["UNSOLVED", "Answer", "BisectError", "bisect", "document"]
