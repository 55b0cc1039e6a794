"""The base class of the errors of :mod:`octavo.fp8`, ProofError, and values in messages."""

from __future__ import annotations


class Fp8Error(Exception):
    """The base class of all errors of :mod:`octavo.fp8`.

    Each error also derives from a built-in error: ``except fp8.Fp8Error`` catches all of them, ``except ValueError``
    those about arguments.
    """


# Not in octavo.fp8.proof, because importing octavo.fp8 would then load that package for this name only.
class ProofError(Fp8Error, RuntimeError):
    """The FP8 GEMMs that ran differ from the plan in their layers, number or operands."""


def short_repr(value: object) -> str:
    """Return the ``repr`` of a value for a message, with at most 60 characters."""
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
