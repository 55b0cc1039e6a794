"""Counted GEMMs against the plan, and what a measured plan predicts."""

from octavo.fp8.proof.proof import ProofError

__all__ = ["ProofError"]
