"""Data: conversations in the usual formats, encoded by the model's own processor, in a reproducible order.

    read -> Source of Conversation -> Encoder -> Sample -> collate -> Loader / EvalSet
                                                        -> collate_pack -> PackLoader

`train_loader` and `eval_set` put these together as a configuration says. Prompts (`prompts.py`) and preferences
(`pairs.py`) are rows read, encoded and gathered in ways of their own, by the same Source and Loader.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from octavo.base import accelerator
from octavo.base.hub import is_name
from octavo.config.sections.text_types import is_url
from octavo.config.sections.video import VideoSection
from octavo.data.batching.collate import Boundaries, Meta, collate, collate_pack
from octavo.data.batching.mixture import Mixture
from octavo.data.batching.packing import pack, waste
from octavo.data.builtin import digits, text
from octavo.data.content import Content, content_of, digests
from octavo.data.encoding.encode import Encoder
from octavo.data.encoding.expansion import Mismatch
from octavo.data.encoding.sample import IGNORE, Sample
from octavo.data.encoding.video import FileLimits, Shot, look
from octavo.data.encoding.video import load as load_film
from octavo.data.errors import BadSample, DataError, LongSample
from octavo.data.loaders.eval_set import EvalSet
from octavo.data.loaders.loader import Gather, Loader, micro_batches
from octavo.data.loaders.pack_loader import PackLoader
from octavo.data.loaders.token_counts import counts
from octavo.data.rows.audio_refs import AudioRef
from octavo.data.rows.conversations import Conversation, ImageRef, Text, Turn, parse
from octavo.data.rows.video_refs import as_video
from octavo.data.skip_report import SkipReport
from octavo.data.storage.cache import Say, default_folder, files_of, quiet
from octavo.data.storage.remote import local_files, print_of
from octavo.data.tasks.concat import Joined, join, joins
from octavo.data.tasks.documents import Document, DocumentEncoder
from octavo.data.tasks.pairs import (
    HeldOutEncoder,
    LabelledEncoder,
    LabelledSample,
    Pair,
    PairEncoder,
    collate_labelled,
    collate_pairs,
    labelled_batches,
)
from octavo.data.tasks.prompts import COLUMNS, PromptEncoder, PromptSample, numbered, reward_columns
from octavo.data.tasks.sealed import Sealed, SealedEncoder, SealedHeldOut, SealedPairs, read_sealed
from octavo.data.tasks.sealed import check as check_sealed
from octavo.data.tasks.sources import Source, opened, preferences, read
from octavo.data.tasks.splitting import Split, split

if TYPE_CHECKING:
    from octavo.config import Config, Dataset

__all__ = [
    "IGNORE", "AudioRef", "BadSample", "Boundaries", "Content", "Conversation", "DataError", "Document",
    "DocumentEncoder", "Encoder", "EvalSet", "ImageRef", "Joined", "LabelledEncoder", "LabelledSample", "Loader",
    "LongSample", "Meta", "Mixture", "PackLoader", "Pair", "PairEncoder", "PromptEncoder", "PromptSample", "Sample",
    "SkipReport", "Source", "Say", "Sealed", "Split", "Text", "Turn", "check_sealed", "collate", "collate_pack",
    "compared", "content_of", "default_folder", "digests", "digits", "encoder", "local_files", "quiet", "eval_set",
    "file_limits", "files_of", "learned", "pack", "packs_of", "pair_loader", "pair_set", "parse", "prepare", "print_of",
    "prompt_columns", "prompt_loader", "prompt_set", "read", "reward_columns", "rows_of_an_epoch", "shots", "text",
    "train_loader", "waste", "workers_of",
]  # fmt: skip
E = TypeVar("E", bound=Encoder)
Rows = Source | Split | Joined | Sealed
PAIRED: Gather = partial(micro_batches, collate=collate_pairs)


WORKERS = 4  # beside a GPU, where nobody asks for a number


def workers_of(cfg: Config) -> int:
    """Processes that prepare the samples of this rank: as asked, else beside a GPU as many of :data:`WORKERS` as the
    cores of this machine leave each of its ranks, and none on a CPU."""
    if cfg.data.workers is not None:
        return cfg.data.workers
    if not accelerator.count():
        return 0
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(0, min(WORKERS, cores // int(os.environ.get("LOCAL_WORLD_SIZE", "1")) - 1))


def encoder(cfg: Config, processor: Any, kind: type[E] = Encoder, reserve: int = 0) -> E:  # type: ignore[assignment]
    """The encoder that a configuration asks for. Pixel limits and variables of the chat template belong to the
    processor (`models.load_processor`)."""
    data = cfg.data
    return kind(
        processor, cfg.train.seq_length, on_long=data.on_long, train_on_prompt=data.train_on_prompt,
        system=data.system, max_image_megapixels=data.max_image_megapixels, reserve=reserve,
        mask_empty_think=data.mask_empty_think, mask_reasoning=data.mask_reasoning,
        file_limits=file_limits(cfg),
    )  # fmt: skip


def file_limits(cfg: Config) -> FileLimits:
    """What files of video may be."""
    video = cfg.data.video or VideoSection()
    return FileLimits(video.max_seconds, video.max_megabytes, cfg.data.max_image_megapixels, video.folder_fps)


def shots(paths: Sequence[str], processor: Any, cfg: Config | None = None, fps: float | None = None) -> list[Shot]:
    """Videos by their names, decoded as a model of this processor takes them; `fps`: the rate of those that are folders
    of frames. Raises `DataError`."""
    videos = getattr(processor, "videos", None)
    if paths and videos is None:
        raise DataError(f"{paths[0]} is a video, and videos of this model are not taken here")
    limits = FileLimits() if cfg is None else file_limits(cfg)
    try:
        return [load_film(look(as_video(Path(path), fps), videos, limits), limits) for path in paths]
    except Mismatch as cause:
        raise DataError(str(cause)) from cause


def train_loader(
    cfg: Config,
    processor: Any,
    *,
    rank: int = 0,
    world: int = 1,
    start_row: int = 0,
    place: tuple[int, int, int] = (0, 0, 0),
    report_path: str | Path | None = None,
) -> Loader | PackLoader:
    """The training stream of a configuration: conversations, in phase pretrain documents too; with `data.packing` in
    packs, from `place` on in place of `start_row`. Raises `DataError`."""
    encodes, sources = _learned(cfg, processor, cfg.data.train, cfg.run.seed)
    mixture = Mixture(sources, [d.weight for d in cfg.data.train], cfg.run.seed)
    loader: Loader | PackLoader
    if cfg.data.packing:
        pairs = zip(sources, cfg.data.train, strict=True)
        known = [counts(source, encodes, _cache(cfg), _what(dataset)) for source, dataset in pairs]
        loader = PackLoader(
            mixture, encodes, known, cfg.data.window, cfg.train.global_batch, rank, world, place, workers_of(cfg),
            cfg.data.on_bad_sample, report_path, timeout=cfg.run.timeout, shared=cfg.parallel.context,
        )  # fmt: skip
    else:
        loader = Loader(
            mixture, encodes, cfg.train.micro_batch, cfg.train.global_batch, rank,
            world, start_row, workers_of(cfg), cfg.data.on_bad_sample, report_path, timeout=cfg.run.timeout,
        )  # fmt: skip
    _list(sources, loader.report)
    return loader


def learned(cfg: Config, processor: Any) -> tuple[Encoder, list[Rows]]:
    """The rows of `data.train` that SFT and pretraining learn from, and what makes them numbers. Raises `DataError`."""
    return _learned(cfg, processor, cfg.data.train, cfg.run.seed)


def compared(
    cfg: Config, processor: Any, datasets: Sequence[Dataset], kind: Literal["pairs", "labelled"] = "pairs"
) -> tuple[Any, list[Rows]]:
    """The rows of phase preference in these data sets, and what makes them numbers. Raises `DataError`."""
    if cfg.data.sealed:
        check_sealed(cfg)
        return SealedEncoder(processor, cfg.train.seq_length), [read_sealed(d) for d in datasets]
    encodes = encoder(cfg, processor, LabelledEncoder if kind == "labelled" else PairEncoder)
    return encodes, [read(d, kind, _cache(cfg)) for d in datasets]


def _told(cfg: Config, dataset: Dataset) -> str | None:
    """`preferences`, of sealed rows too."""
    if cfg.data.sealed:
        return "pairs" if isinstance(read_sealed(dataset), SealedPairs) else None
    return preferences(dataset, _cache(cfg))


def _learned(cfg: Config, processor: Any, datasets: Sequence[Dataset], seed: int | None) -> tuple[Any, list[Rows]]:
    check_sealed(cfg)
    if cfg.data.sealed:
        return SealedEncoder(processor, cfg.train.seq_length), [read_sealed(d) for d in datasets]
    if cfg.train.phase != "pretrain":
        return encoder(cfg, processor), [_conversations(cfg, d) for d in datasets]
    encodes = encoder(cfg, processor, DocumentEncoder)
    return encodes, [_documents(cfg, d, encodes, seed) for d in datasets]


def _conversations(cfg: Config, dataset: Dataset, say: Say = quiet) -> Source | Split:
    """A data set of phase sft, split at its questions where that is asked for."""
    source = read(dataset, cache=_cache(cfg))
    return split(source, _cache(cfg), say, _what(dataset)) if cfg.data.split_turns else source


def prepare(cfg: Config, processor: Any, say: Say) -> None:
    """Make what is made of data files once, and say so; whoever reads them finds it. Raises `DataError`."""
    check_sealed(cfg)
    if cfg.data.sealed:  # all that was made of them, when they were sealed
        return
    for dataset in (*cfg.data.train, *cfg.data.eval):
        opened(dataset, _cache(cfg), say)
        if cfg.train.phase == "pretrain":
            _documents(cfg, dataset, encoder(cfg, processor, DocumentEncoder), None, say)
        elif cfg.data.split_turns:
            _conversations(cfg, dataset, say)


def _documents(
    cfg: Config, dataset: Dataset, encodes: DocumentEncoder, seed: int | None, say: Say = quiet
) -> Source | Joined:
    """A data set of phase pretrain, its documents joined where they are plain text. `seed`: of their order."""
    source = read(dataset, "documents", _cache(cfg))
    if not cfg.data.join or not joins(source):
        return source
    if dataset.shuffle_buffer is not None:
        raise DataError(f"{source.name}: joined documents are shuffled whole, so shuffle_buffer means nothing to them; "
                        "remove it, or set data.join: false")  # fmt: skip
    return join(source, encodes, cfg.data.on_bad_sample, seed, _cache(cfg), say, _what(dataset))


def _what(dataset: Dataset) -> str:
    """What of a data set beside its file decides what its rows are."""
    of = [dataset.revision, dataset.split, dataset.subset] if is_name(dataset.path) else []
    of = [print_of(dataset.path)["sha256"]] if is_url(dataset.path) else of
    return json.dumps([dataset.columns, *of] if of else dataset.columns)


def _list(sources: Iterable[Rows], report: SkipReport) -> None:
    """Put what was found when documents were joined where it is told of other rows."""
    for record in (record for source in sources if isinstance(source, Joined) for record in source.records):
        report.add(record)


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
    sources = [read(d, "prompts", _cache(cfg)) for d in cfg.data.train]
    return Loader(
        _mixture(cfg, sources), encodes, prompts, prompts, rank, world, start_row, workers_of(cfg),
        cfg.data.on_bad_sample, report_path, timeout=cfg.run.timeout, gather=numbered,
    )  # fmt: skip


def prompt_columns(cfg: Config, datasets: Iterable[Dataset]) -> list[str]:
    """The columns that rewards are given of the rows of these data sets, where any of their rows has them. Raises
    `DataError`."""
    more = {name for dataset in datasets for name in read(dataset, "prompts", _cache(cfg)).columns()}
    return [*COLUMNS, *sorted(more - {*COLUMNS})]


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
    encodes, sources = compared(cfg, processor, cfg.data.train, kind)
    return Loader(
        _mixture(cfg, sources), encodes, cfg.train.micro_batch, cfg.train.global_batch, rank, world, start_row,
        workers_of(cfg), cfg.data.on_bad_sample, report_path, timeout=cfg.run.timeout,
        gather=partial(labelled_batches, longest=cfg.train.seq_length) if labelled else PAIRED, neighbours=labelled,
    )  # fmt: skip


def _mixture(cfg: Config, sources: Sequence[Rows]) -> Mixture:
    return Mixture(sources, [d.weight for d in cfg.data.train], cfg.run.seed)


def _cache(cfg: Config) -> Path | None:
    return None if cfg.data.cache is None else Path(cfg.data.cache)


def rows_of_an_epoch(cfg: Config, processor: Callable[[], Any]) -> int:
    """How many rows `data.train` has in all, which is a round of its mixture; of joined documents how many samples, of
    rows that are split how many questions.
    `processor` is called where that needs tokens. Raises `DataError`."""
    sources: Sequence[Rows]
    if cfg.data.sealed:
        sources = [read_sealed(d) for d in cfg.data.train]
    elif cfg.train.phase == "pretrain":
        sources = _learned(cfg, processor(), cfg.data.train, cfg.run.seed)[1]
    elif cfg.data.split_turns:
        sources = [_conversations(cfg, d) for d in cfg.data.train]
    else:
        of_pairs = cfg.train.phase == "preference"
        kinds = [(preferences(d, _cache(cfg)) if of_pairs else None) or "conversations" for d in cfg.data.train]
        sources = [read(d, kind, _cache(cfg)) for d, kind in zip(cfg.data.train, kinds, strict=True)]
    return sum(Mixture(sources, [d.weight for d in cfg.data.train]).draws)


def packs_of(cfg: Config, processor: Any, epochs: float) -> int:
    """How many packs so many epochs of `data.train` make (`PackLoader.count`): every row that they have is counted, by
    the ranks that share `data.cache` together. Raises `DataError`."""
    rank, world = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    loader = train_loader(cfg, processor, rank=rank, world=world)
    assert isinstance(loader, PackLoader)
    try:
        return loader.count(epochs)
    finally:
        loader.close()


def eval_set(
    cfg: Config,
    processor: Any,
    *,
    rank: int = 0,
    world: int = 1,
    report_path: str | Path | None = None,
    micro_batch: int | None = None,
) -> EvalSet | None:
    """The held-out data of a configuration; None where it names none. In phase pretrain rows may be documents; in phase
    rl `prompt` and `answer`; in phase preference preferences, whose chosen or good answers are the right ones. Raises
    `DataError`."""
    if not cfg.data.eval:
        return None
    encodes: Any
    sources: list[Rows]
    if cfg.train.phase == "preference" and cfg.data.sealed:
        check_sealed(cfg)
        encodes, sources = SealedHeldOut(processor, cfg.train.seq_length), [read_sealed(d) for d in cfg.data.eval]
    elif cfg.train.phase == "preference":
        encodes = encoder(cfg, processor, HeldOutEncoder)
        sources = [read(d, preferences(d, _cache(cfg)) or "conversations", _cache(cfg)) for d in cfg.data.eval]
    else:
        encodes, sources = _learned(cfg, processor, cfg.data.eval, None)
    found = EvalSet(
        sources, encodes, micro_batch or cfg.train.micro_batch, rank, world, cfg.data.on_bad_sample, report_path
    )
    _list(sources, found.report)
    return found


def prompt_set(
    cfg: Config, processor: Any, *, prompts: int | None, reserve: int, rank: int = 0, world: int = 1
) -> EvalSet:
    """This rank's part of the first `prompts` rows of the held-out data (None: of all), as `PromptSample`s that wait
    for their last answer, which may take `reserve` tokens: an iteration yields lists of a row each, or of none. Raises
    `DataError`."""
    encodes = encoder(cfg, processor, PromptEncoder, reserve)
    return EvalSet(
        [read(d, "prompts", _cache(cfg)) for d in cfg.data.eval], encodes, 1, rank, world, cfg.data.on_bad_sample,
        most=prompts, collate=lambda samples, pad_id: samples,
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
    found = [d for d in cfg.data.eval if _told(cfg, d) == kind]
    if not found:
        return None
    encodes, sources = compared(cfg, processor, found, kind)
    size, gather = cfg.train.micro_batch, collate_pairs
    if kind == "labelled":
        size, gather = max(2, size), partial(collate_labelled, longest=cfg.train.seq_length)
    return EvalSet(
        sources, encodes, size, rank, world, cfg.data.on_bad_sample, report_path, collate=gather,
    )  # fmt: skip
