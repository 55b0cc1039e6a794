"""Which layer, GEMM or feature breaks a run: a search by short runs over what FP8 and savings add to it."""

from octavo.bisect.answer import UNSOLVED, Answer
from octavo.bisect.find import bisect
from octavo.bisect.page import document
from octavo.bisect.trials import BisectError

__all__ = ["UNSOLVED", "Answer", "BisectError", "bisect", "document"]
