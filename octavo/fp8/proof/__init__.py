"""Counted GEMMs against the plan, what a measured plan predicts, and whether two models compute alike."""

from octavo.fp8.proof.proof import ProofError

__all__ = ["ProofError"]
