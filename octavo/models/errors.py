"""The one exception that this package raises for users."""


class ModelError(ValueError):
    """A model folder, family, component or shape that Octavo cannot use; the message names the fix."""


class ForeignTokenizerError(ModelError):
    """The tokenizer is another model's: its tokens are beyond the embedding, or media have other numbers."""
