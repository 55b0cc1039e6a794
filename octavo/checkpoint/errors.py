"""The one exception of this room."""


class CheckpointError(RuntimeError):
    """A checkpoint could not be written, found or trusted; the message names the file and the cure."""
