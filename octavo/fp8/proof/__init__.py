"""Counted GEMMs against the plan, GEMMs computed again, what a measured plan predicts, whether two models agree."""

from octavo.fp8.proof.checking import Check, Site, sites, sites_of_check, size_of
from octavo.fp8.proof.prediction import Prediction, predict
from octavo.fp8.proof.proof import Proof
from octavo.fp8.proof.reference import reference_note

__all__ = [
    "Check",
    "Prediction",
    "Proof",
    "Site",
    "sites_of_check",
    "predict",
    "reference_note",
    "sites",
    "size_of",
]
