"""The error of this package."""


class WorldError(RuntimeError):
    """The ranks of a run could not be set up, or one of them no longer answers."""
