"""The one exception of this package."""


class TranslateError(ValueError):
    """A file cannot be translated at all; the message says what was asked, what was found, and what to do."""
