"""The one exception of this package."""


class CheckpointError(RuntimeError):
    """A checkpoint could not be written, found or trusted; the message names the file and the fix."""
