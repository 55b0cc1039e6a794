"""Counted GEMMs against the plan, GEMMs computed again, what a measured plan predicts, whether two models agree."""

from octavo.fp8.proof.checking import Check, Site, drawn, sites, size_of
from octavo.fp8.proof.prediction import Prediction, predict
from octavo.fp8.proof.proof import Proof
from octavo.fp8.proof.reference import reference_note

__all__ = [
    "Check",
    "Prediction",
    "Proof",
    "Site",
    "drawn",
    "predict",
    "reference_note",
    "sites",
    "size_of",
]
