"""Data: conversations in the usual formats, encoded by the model's own processor, in a reproducible order.

    read -> Source of Conversation -> Encoder -> Sample -> collate -> Loader / EvalSet

`train_loader` and `eval_set` put these together as a configuration says. Prompts (`prompts.py`) and preferences
(`pairs.py`) are rows read, encoded and gathered in ways of their own, by the same Source and Loader.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from octavo.data import digits
from octavo.data.collate import Meta, collate
from octavo.data.conversations import Conversation, ImageRef, Text, Turn, parse
from octavo.data.encode import IGNORE, Encoder, Sample
from octavo.data.errors import BadSample, DataError, LongSample
from octavo.data.evalset import EvalSet
from octavo.data.loader import Gather, Loader, micro_batches
from octavo.data.mixture import Mixture
from octavo.data.pairs import (
    HeldOutEncoder,
    LabelledEncoder,
    LabelledSample,
    Pair,
    PairEncoder,
    collate_labelled,
    collate_pairs,
    labelled_batches,
)
from octavo.data.prompts import PromptEncoder, PromptSample, numbered, reward_columns
from octavo.data.report import SkipReport
from octavo.data.sources import Source, preferences, read

if TYPE_CHECKING:
    from octavo.config import Config

__all__ = [
    "IGNORE", "BadSample", "Conversation", "DataError", "Encoder", "EvalSet", "ImageRef", "LabelledEncoder",
    "LabelledSample", "Loader", "LongSample", "Meta", "Mixture", "Pair", "PairEncoder", "PromptEncoder", "PromptSample",
    "Sample", "SkipReport", "Source", "Text", "Turn", "collate", "digits", "encoder", "eval_set", "pair_loader",
    "pair_set", "parse", "prompt_loader", "prompt_set", "read", "reward_columns", "train_loader",
]  # fmt: skip
E = TypeVar("E", bound=Encoder)
PAIRED: Gather = partial(micro_batches, collate=collate_pairs)


def encoder(cfg: Config, processor: Any, kind: type[E] = Encoder, reserve: int = 0) -> E:  # type: ignore[assignment]
    """The encoder that a configuration asks for. Pixel limits belong to the processor (`models.load_processor`)."""
    data = cfg.data
    return kind(
        processor, cfg.train.seq_length, on_long=data.on_long, train_on_prompt=data.train_on_prompt,
        system=data.system, max_image_megapixels=data.max_image_megapixels, reserve=reserve,
    )  # fmt: skip


def train_loader(
    cfg: Config,
    processor: Any,
    *,
    rank: int = 0,
    world: int = 1,
    start_row: int = 0,
    report_path: str | Path | None = None,
) -> Loader:
    """The training stream of a configuration. Raises `DataError`."""
    return Loader(
        _mixture(cfg, "conversations"), encoder(cfg, processor), cfg.train.micro_batch, cfg.train.global_batch, rank,
        world, start_row, cfg.data.workers, cfg.data.on_bad_sample, report_path, timeout=cfg.run.timeout,
    )  # fmt: skip


def prompt_loader(
    cfg: Config,
    processor: Any,
    *,
    prompts: int,
    max_new_tokens: int,
    rank: int = 0,
    world: int = 1,
    start_row: int = 0,
    report_path: str | Path | None = None,
) -> Loader:
    """The stream of prompts of a configuration: a step is this rank's `PromptSample`s of the rows [t * `prompts`,
    (t + 1) * `prompts`), each with its number in the stream, without those left out. A prompt must leave room for
    `max_new_tokens` in `train.seq_length`. Raises `DataError`."""
    encodes = encoder(cfg, processor, PromptEncoder, max_new_tokens)
    return Loader(
        _mixture(cfg, "prompts"), encodes, prompts, prompts, rank, world, start_row, cfg.data.workers,
        cfg.data.on_bad_sample, report_path, timeout=cfg.run.timeout, gather=numbered,
    )  # fmt: skip


def pair_loader(
    cfg: Config,
    processor: Any,
    *,
    kind: Literal["pairs", "labelled"] = "pairs",
    rank: int = 0,
    world: int = 1,
    start_row: int = 0,
    report_path: str | Path | None = None,
) -> Loader:
    """The stream of preferences of a configuration: micro-batches of `train.micro_batch` pairs are 2 B rows, chosen
    before rejected (`collate_pairs`); of labelled rows, for KTO, see `labelled_batches`. Raises `DataError`."""
    labelled = kind == "labelled"
    if labelled and cfg.train.global_batch < 2:
        raise DataError(
            "train.global_batch is 1, and KTO compares the rows of a step with each other; give it 2 or more"
        )
    encodes: Encoder = encoder(cfg, processor, LabelledEncoder if labelled else PairEncoder)
    return Loader(
        _mixture(cfg, kind), encodes, cfg.train.micro_batch, cfg.train.global_batch, rank, world, start_row,
        cfg.data.workers, cfg.data.on_bad_sample, report_path, timeout=cfg.run.timeout,
        gather=partial(labelled_batches, longest=cfg.train.seq_length) if labelled else PAIRED, neighbours=labelled,
    )  # fmt: skip


def _mixture(cfg: Config, kind: str) -> Mixture:
    return Mixture([read(d, kind) for d in cfg.data.train], [d.weight for d in cfg.data.train], cfg.run.seed)


def eval_set(
    cfg: Config,
    processor: Any,
    *,
    rank: int = 0,
    world: int = 1,
    report_path: str | Path | None = None,
    micro_batch: int | None = None,
) -> EvalSet | None:
    """The held-out data of a configuration; None where it names none. In phase rl rows may be `prompt` and `answer`; in
    phase preference preferences, whose chosen or good answers are the right ones. Raises `DataError`."""
    if not cfg.data.eval:
        return None
    kinds = ["answered" if cfg.train.phase == "rl" else "conversations" for _ in cfg.data.eval]
    of: type[Encoder] = Encoder
    if cfg.train.phase == "preference":
        kinds, of = [preferences(d) or kind for d, kind in zip(cfg.data.eval, kinds, strict=True)], HeldOutEncoder
    return EvalSet(
        [read(d, kind) for d, kind in zip(cfg.data.eval, kinds, strict=True)], encoder(cfg, processor, of),
        micro_batch or cfg.train.micro_batch, rank, world, cfg.data.on_bad_sample, report_path,
    )  # fmt: skip


def prompt_set(
    cfg: Config, processor: Any, *, prompts: int | None, reserve: int, rank: int = 0, world: int = 1
) -> EvalSet:
    """This rank's part of the first `prompts` rows of the held-out data (None: of all), as `PromptSample`s that wait
    for their last answer, which may take `reserve` tokens: an iteration yields lists of a row each, or of none. Raises
    `DataError`."""
    encodes = encoder(cfg, processor, PromptEncoder, reserve)
    return EvalSet(
        [read(d, "prompts") for d in cfg.data.eval], encodes, 1, rank, world, cfg.data.on_bad_sample, most=prompts,
        collate=lambda samples, pad_id: samples,
    )  # fmt: skip


def pair_set(
    cfg: Config,
    processor: Any,
    *,
    kind: Literal["pairs", "labelled"] = "pairs",
    rank: int = 0,
    world: int = 1,
    report_path: str | Path | None = None,
) -> EvalSet | None:
    """The held-out preferences of a kind, batched as `pair_loader` does; None where the held-out data are none.
    Labelled rows are crossed within their micro-batch, which has at least two. Raises `DataError`."""
    found = [d for d in cfg.data.eval if preferences(d) == kind]
    if not found:
        return None
    of: type[Encoder] = PairEncoder
    size, gather = cfg.train.micro_batch, collate_pairs
    if kind == "labelled":
        of, size, gather = LabelledEncoder, max(2, size), partial(collate_labelled, longest=cfg.train.seq_length)
    return EvalSet(
        [read(d, kind) for d in found], encoder(cfg, processor, of), size, rank, world, cfg.data.on_bad_sample,
        report_path, collate=gather,
    )  # fmt: skip
