"""The one exception that this package raises for users."""


class ModelError(ValueError):
    """A model folder, family, component or shape that Octavo cannot use; the message names the fix."""
