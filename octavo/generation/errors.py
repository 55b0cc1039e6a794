"""The error of this package."""


class GenerationError(ValueError):
    """A prompt, a setting or a model that cannot generate as asked; the message names the fix."""
