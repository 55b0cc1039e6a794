"""The one exception of this package."""


class AdapterError(RuntimeError):
    """An adapter could not be attached, read, written or merged; the message has the cause and the fix."""
