"""What can stop a run."""


class TrainError(RuntimeError):
    """A run that cannot start, continue or go on; the message names what was asked, what was found and the fix."""
