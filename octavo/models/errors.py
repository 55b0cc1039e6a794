"""The exceptions that this package raises for users."""


class ModelError(ValueError):
    """Raised for a model folder, family, component or shape that Octavo cannot use; the message names the fix."""


class NoEndTokenError(ModelError):
    """Raised if the tokenizer has neither a token for padding nor one for the end of a text."""


class ForeignTokenizerError(ModelError):
    """Raised if the tokenizer belongs to a different model: its token ids are outside the embedding, or ids of media
    differ."""
