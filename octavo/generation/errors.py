"""The error of this package."""


class GenerationError(ValueError):
    """A prompt, a setting or a model cannot be used for generation; the message names the fix."""
