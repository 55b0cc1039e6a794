"""Generation with the modules that train: continuous batching over a paged key-value cache."""

from octavo.generation.caller import Context
from octavo.generation.engine import Engine
from octavo.generation.errors import GenerationError
from octavo.generation.kv_cache import PAGE, pages_needed
from octavo.generation.memory import Bytes, Shape, bytes_of_token, most_that_fit, predict, sequences_that_fit
from octavo.generation.prompts import answers, prompt_of
from octavo.generation.request import Completion, Prompt, Sampling

__all__ = [
    "PAGE",
    "Bytes",
    "Completion",
    "Context",
    "Engine",
    "GenerationError",
    "Prompt",
    "Sampling",
    "Shape",
    "answers",
    "bytes_of_token",
    "most_that_fit",
    "pages_needed",
    "predict",
    "prompt_of",
    "sequences_that_fit",
]
