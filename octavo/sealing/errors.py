"""The error of this package."""


class SealError(ValueError):
    """A key, a model or rows cannot be sealed or unsealed; the message has the reason and the fix, never the key."""
