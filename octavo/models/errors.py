"""The exceptions that this package raises for users."""


class ModelError(ValueError):
    """Raised for a model folder, family, component or shape that Octavo cannot use; the message names the fix."""


class NoEndTokenError(ModelError):
    """Raised if the tokenizer has neither a token for padding nor one for the end of a text."""


class VocabularySizeError(ModelError):
    """Raised if config.json describes an embedding with another number of rows than the one on disk, before the
    tokenizer is judged by that number."""


class ForeignTokenizerError(ModelError):
    """Raised if the tokenizer belongs to a different model: its token ids are outside the embedding, or ids of media
    differ."""
