"""Counted GEMMs against the plan, GEMMs computed again, what a measured plan predicts, whether two models agree."""

from octavo.fp8.proof.checking import Check, Site, drawn, sites, size_of
from octavo.fp8.proof.proof import ProofError

__all__ = ["Check", "ProofError", "Site", "drawn", "sites", "size_of"]
