"""The error that stops a run."""


class TrainError(RuntimeError):
    """A run cannot start or continue; the message names what was requested, what was found and the fix."""
