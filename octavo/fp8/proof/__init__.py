"""Counted GEMMs against the plan, GEMMs computed again, what a measured plan predicts, whether two models agree."""

from octavo.fp8.proof.checking import CheckedGemm, CorruptionChecker, check_size, fp8_gemms, select_gemms
from octavo.fp8.proof.prediction import Prediction, predict
from octavo.fp8.proof.proof import Proof
from octavo.fp8.proof.reference import reference_note

__all__ = [
    "CorruptionChecker",
    "Prediction",
    "Proof",
    "CheckedGemm",
    "select_gemms",
    "predict",
    "reference_note",
    "fp8_gemms",
    "check_size",
]
