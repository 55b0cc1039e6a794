"""The base of the errors of :mod:`octavo.fp8`, and the one whose package is loaded only when it is used."""

from __future__ import annotations


class Fp8Error(Exception):
    """An FP8 request that cannot be met. Each error of :mod:`octavo.fp8` derives from it and from a built-in error:
    ``except fp8.Fp8Error`` catches all of them, ``except ValueError`` those about arguments."""


# Here and not in octavo.fp8.proof, which an import of octavo.fp8 would load for this name only.
class ProofError(Fp8Error, RuntimeError):
    """FP8 GEMMs ran elsewhere, more or less often, or on other operands than the plan says."""
