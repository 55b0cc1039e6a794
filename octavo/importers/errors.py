"""The one exception of this package."""


class TranslateError(ValueError):
    """A file that cannot be translated at all: what was asked, what was found, and what to do."""
