"""Errors of the distributed setup."""


class WorldError(RuntimeError):
    """Raised if the ranks of a run cannot be set up, or one of them no longer answers."""
