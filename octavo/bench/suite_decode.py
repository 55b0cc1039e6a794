"""``decode``: a step of decoding, one token for each of 64 sequences of 1,024 tokens, as a rollout runs it.

A step is bound by what it has to read: the weights once, and the keys and values of all sequences. The share of the
bound is the time that these bytes take at the bandwidth of the data sheet, over the time of the step. Sampling, the
stop conditions and the copy of the tokens to the host are part of the step. Candidates are weights in high precision
and in each recipe, each with the cache in both formats. On a GPU steps are CUDA graphs.

Needs the packages of a run, which `octavo.generation` imports.
"""

from __future__ import annotations

import weakref
from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import torch
from transformers import PreTrainedModel

from octavo import fp8, models
from octavo.bench import peers
from octavo.bench.bench import Bench, Call, Unavailable, Work
from octavo.bench.profiles.kernel_profile import profile_call

if TYPE_CHECKING:
    from octavo.generation.batch import Batch

SHAPE, LAYERS = "qwen3_8b", 2  # layers: of the small form
SEQUENCES, TOKENS = 64, 1024
FEW, SHORT = 3, 24  # sequences and tokens of the small form
NEW = 64  # tokens that a sequence may get: more than the timed steps and their warm-up
CACHES = {"": "bf16", ", cache in FP8": "fp8"}


def run(bench: Bench) -> None:
    """Measure one case, a candidate at a time: the models do not fit in memory together."""
    sequences, tokens = (FEW, SHORT) if bench.small else (SEQUENCES, bench.tokens or TOKENS)
    shape = "tiny qwen3" if bench.small else bench.shape or SHAPE
    case = f"{shape}{f' ({bench.layers} blocks)' if bench.layers else ''}, {sequences} sequences of {tokens} tokens"
    recipes = [None, *(name for name in peers.RECIPES if peers.supported_backends(bench, name))]
    for recipe in recipes:
        for words, cache in CACHES.items():
            name = f"{recipe or bench.high}{words}"
            read = bytes_read(bench, recipe, cache, sequences, tokens)
            build = partial(_make_call, bench, recipe, cache, sequences, tokens)
            work = Work(bytes=sum(read.values()), tokens=sequences)
            profile = partial(profile_call, device=bench.device)
            bench.case("decode", case, bench.high, {name: build}, work, True, note=DecodeStep.note, profile=profile)


def _build_model(bench: Bench, recipe: str | None, device: torch.device) -> PreTrainedModel:
    """Build the model in eval mode. The head stays in high precision, as in a rollout."""
    config = models.tiny_config(SHAPE.partition("_")[0]) if bench.small else bench.shape or SHAPE
    model = models.random_model(config, device, bench.dtype, LAYERS if bench.small else bench.layers).eval()
    if recipe is not None:
        fp8.apply(model, fp8.plan(model, recipe, models.describe(model).components))
    return model


def bytes_read(bench: Bench, recipe: str | None, cache: str, sequences: int, tokens: int) -> dict[str, float]:
    """Return the bytes that a step has to read: `weights` and `cache`. FP8 weights count one byte a value, and their
    scales nothing; tokens in the cache count their keys and values, and 4 bytes a head for their scales in FP8."""
    model = _build_model(bench, recipe, torch.device("meta"))
    shape = models.cache_shape(model.config)
    size = bench.dtype.itemsize
    weights = float(shape.vocabulary * model.config.get_text_config().hidden_size * size)  # the head, tied or not
    embeddings = model.get_input_embeddings()
    for module in model.modules():
        if module in (embeddings, model.get_output_embeddings()):
            continue
        for parameter in module.parameters(recurse=False):
            weights += parameter.numel() * (1 if isinstance(module, fp8.Linear) and parameter.dim() == 2 else size)
    head = shape.dim + 4 if cache == "fp8" else shape.dim * size
    return {"weights": weights, "cache": 2.0 * shape.layers * shape.heads * head * sequences * tokens}


def _make_call(bench: Bench, recipe: str | None, cache: str, sequences: int, tokens: int) -> Call:
    try:
        from octavo.generation import Context, Prompt, Sampling, pages_needed
        from octavo.generation.batch import Batch
        from octavo.generation.caller import Caller
        from octavo.generation.kv_cache import PAGE, Cache
        from octavo.generation.sampling import StopConditions
    except ImportError as error:
        raise Unavailable(f"decoding needs the packages of a run: {error}") from error
    caller = Caller(_build_model(bench, recipe, bench.device), Context())
    pages = sequences * pages_needed(tokens, NEW)
    pool = Cache(caller.shape, pages, PAGE, cache, caller.dtype, caller.device)
    rng = np.random.default_rng(0)
    ids = rng.integers(0, min(caller.shape.vocabulary, 1000), (sequences, tokens))
    prompts = [Prompt(row, number) for number, row in enumerate(ids)]
    no_stops = StopConditions(np.zeros(0, dtype=np.int64), (), None)
    eager: list[str] = []  # why steps run without a graph
    return DecodeStep(Batch(caller, pool, sequences, prompts, Sampling(NEW), 1, no_stops, log=eager.append), eager)


class DecodeStep:
    """Decodes one token of each sequence of a batch; the first call runs the prompts too."""

    def __init__(self, batch: Batch, eager: list[str]) -> None:
        self.batch, self.eager = batch, eager
        # Entered once, as in a call of the engine: each entry visits every module. The registry of attention functions
        # keeps the model alive until it is left, with the last reference to this step.
        context = ExitStack()
        context.enter_context(batch.caller.generating())
        weakref.finalize(self, context.close)

    def note(self) -> str:
        """Return why steps ran without a CUDA graph, or nothing."""
        return "; ".join(self.eager)

    @torch.no_grad()
    def __call__(self) -> None:
        if not self.batch.advance() or self.batch.done:
            raise RuntimeError(f"the sequences have ended after {NEW} tokens, so there is no step to time")
