"""The one exception of this package."""


class CheckpointError(RuntimeError):
    """A checkpoint could not be written, was not found or cannot be trusted; the message names the file and the fix."""
