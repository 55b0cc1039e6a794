"""Counted GEMMs against the plan, and what a measured plan promises."""

from octavo.fp8.proof.proof import ProofError

__all__ = ["ProofError"]
