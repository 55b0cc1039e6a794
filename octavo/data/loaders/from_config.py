"""Loaders and held-out sets from a configuration: of training rows, prompts and preferences."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from octavo.base import accelerator
from octavo.data.batching.collate import Gather, micro_batches
from octavo.data.errors import DataError
from octavo.data.loaders.eval_set import EvalSet
from octavo.data.loaders.loader import Loader
from octavo.data.loaders.pack_loader import PackLoader
from octavo.data.loaders.rows_from_config import (
    Rows,
    cache_folder,
    check_seals,
    encoder,
    identity_of,
    preference_kind,
    preference_rows,
    rows_to_learn,
)
from octavo.data.loaders.token_counts import open_counts
from octavo.data.order import Mixture
from octavo.data.skip_report import SkipReport
from octavo.data.tasks.concat import Joined
from octavo.data.tasks.pairs import HeldOutEncoder, collate_labelled, collate_pairs, labelled_batches
from octavo.data.tasks.prompts import PromptEncoder, number_prompts
from octavo.data.tasks.sealed import SealedHeldOut, read_sealed
from octavo.data.tasks.sources import preferences, read

if TYPE_CHECKING:
    from octavo.config import Config

PAIRED: Gather = partial(micro_batches, collate=collate_pairs)
WORKERS = 4  # the default with a GPU


def worker_count(cfg: Config) -> int:
    """The number of processes that prepare the samples of this rank: `data.workers`; by default with a GPU
    :data:`WORKERS`, or fewer if the machine has fewer cores for each of its ranks, and 0 on a CPU."""
    if cfg.data.workers is not None:
        return cfg.data.workers
    if not accelerator.device_count():
        return 0
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(0, min(WORKERS, cores // int(os.environ.get("LOCAL_WORLD_SIZE", "1")) - 1))


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
    """The training stream of a configuration: conversations, in phase pretrain also documents; with `data.packing` a
    stream of packs, which starts at `place` instead of `start_row`. Raises `DataError`."""
    encodes, sources = rows_to_learn(cfg, processor, cfg.data.train, cfg.run.seed)
    mixture = Mixture(sources, [d.weight for d in cfg.data.train], cfg.run.seed)
    loader: Loader | PackLoader
    if cfg.data.packing:  # packs are planned from token counts, which the cache shares between ranks and runs
        pairs = zip(sources, cfg.data.train, strict=True)
        known = [open_counts(source, encodes, cache_folder(cfg), identity_of(dataset)) for source, dataset in pairs]
        loader = PackLoader(
            mixture, encodes, known, cfg.data.window, cfg.train.global_batch, rank, world, place, worker_count(cfg),
            cfg.data.on_bad_sample, report_path, timeout=cfg.run.timeout, shared=cfg.parallel.context,
        )  # fmt: skip
    else:
        loader = Loader(
            mixture, encodes, cfg.train.micro_batch, cfg.train.global_batch, rank,
            world, start_row, worker_count(cfg), cfg.data.on_bad_sample, report_path, timeout=cfg.run.timeout,
        )  # fmt: skip
    _report_joined(sources, loader.report)
    return loader


def count_packs(cfg: Config, processor: Any, epochs: float) -> int:
    """The number of packs in these epochs of `data.train` (`PackLoader.count`): all their rows are tokenized, divided
    among the ranks that share `data.cache`. Raises `DataError`."""
    rank, world = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    loader = train_loader(cfg, processor, rank=rank, world=world)
    assert isinstance(loader, PackLoader)
    try:
        return loader.count(epochs)
    finally:
        loader.close()


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
    (t + 1) * `prompts`), each with its number in the stream, without those left out. A prompt must leave space for
    `max_new_tokens` in `train.seq_length`. Raises `DataError`."""
    encodes = encoder(cfg, processor, PromptEncoder, max_new_tokens)
    sources = [read(d, "prompts", cache_folder(cfg)) for d in cfg.data.train]
    return Loader(
        _mixture(cfg, sources), encodes, prompts, prompts, rank, world, start_row, worker_count(cfg),
        cfg.data.on_bad_sample, report_path, timeout=cfg.run.timeout, gather=number_prompts,
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
    """The stream of preferences of a configuration: a micro-batch of `train.micro_batch` pairs has 2 B rows, chosen
    before rejected (`collate_pairs`); for labelled rows (KTO) see `labelled_batches`. Raises `DataError`."""
    labelled = kind == "labelled"
    if labelled and cfg.train.global_batch < 2:
        raise DataError(
            "train.global_batch is 1, and KTO compares the rows of a step with each other; give it 2 or more"
        )
    encodes, sources = preference_rows(cfg, processor, cfg.data.train, kind)
    return Loader(
        _mixture(cfg, sources), encodes, cfg.train.micro_batch, cfg.train.global_batch, rank, world, start_row,
        worker_count(cfg), cfg.data.on_bad_sample, report_path, timeout=cfg.run.timeout,
        gather=partial(labelled_batches, longest=cfg.train.seq_length) if labelled else PAIRED, neighbours=labelled,
    )  # fmt: skip


def _mixture(cfg: Config, sources: Sequence[Rows]) -> Mixture:
    return Mixture(sources, [d.weight for d in cfg.data.train], cfg.run.seed)


def eval_set(
    cfg: Config,
    processor: Any,
    *,
    rank: int = 0,
    world: int = 1,
    report_path: str | Path | None = None,
    micro_batch: int | None = None,
) -> EvalSet | None:
    """The held-out data of a configuration; None if it names none. In phase pretrain rows may be documents; in phase rl
    `prompt` and `answer`; in phase preference preferences, of which the chosen or good answers are used. Raises
    `DataError`."""
    # The encoder decides which answers get labels; the sources only parse rows.
    if not cfg.data.eval:
        return None
    encodes: Any
    sources: list[Rows]
    if cfg.train.phase == "preference" and cfg.data.sealed:
        check_seals(cfg)
        encodes, sources = SealedHeldOut(processor, cfg.train.seq_length), [read_sealed(d) for d in cfg.data.eval]
    elif cfg.train.phase == "preference":
        encodes = encoder(cfg, processor, HeldOutEncoder)
        cache = cache_folder(cfg)
        sources = [read(d, preferences(d, cache) or "conversations", cache) for d in cfg.data.eval]
    else:
        encodes, sources = rows_to_learn(cfg, processor, cfg.data.eval, None)
    held_out = EvalSet(
        sources, encodes, micro_batch or cfg.train.micro_batch, rank, world, cfg.data.on_bad_sample, report_path
    )
    _report_joined(sources, held_out.report)
    return held_out


def prompt_set(
    cfg: Config, processor: Any, *, prompts: int | None, reserve: int, rank: int = 0, world: int = 1
) -> EvalSet:
    """This rank's part of the first `prompts` rows of the held-out data (None: of all), as `PromptSample`s for answers
    of up to `reserve` tokens: an iteration yields lists of one row, or empty ones. Raises `DataError`."""
    encodes = encoder(cfg, processor, PromptEncoder, reserve)
    return EvalSet(
        [read(d, "prompts", cache_folder(cfg)) for d in cfg.data.eval], encodes, 1, rank, world, cfg.data.on_bad_sample,
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
    """The held-out preferences of a kind, batched as by `pair_loader`; None if there are none. Labelled rows are
    crossed within their micro-batch, which has at least two rows. Raises `DataError`."""
    of_kind = [d for d in cfg.data.eval if preference_kind(cfg, d) == kind]
    if not of_kind:
        return None
    encodes, sources = preference_rows(cfg, processor, of_kind, kind)
    size, gather = cfg.train.micro_batch, collate_pairs
    if kind == "labelled":
        size, gather = max(2, size), partial(collate_labelled, longest=cfg.train.seq_length)
    return EvalSet(
        sources, encodes, size, rank, world, cfg.data.on_bad_sample, report_path, collate=gather,
    )  # fmt: skip


def _report_joined(sources: Iterable[Rows], report: SkipReport) -> None:
    """Add the records of joined documents to the report of rows."""
    for record in (record for source in sources if isinstance(source, Joined) for record in source.records):
        report.add(record)
