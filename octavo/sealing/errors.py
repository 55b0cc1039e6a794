"""What sealing refuses."""


class SealError(ValueError):
    """A key, a model or rows that cannot be sealed or unsealed; says what, why and what helps. Never holds the key."""
