"""Builds loaders and evaluation sets of training rows, prompts and preferences from a configuration."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from octavo.base import accelerator
from octavo.data.batching.collate import Gather, make_micro_batches
from octavo.data.errors import DataError
from octavo.data.loaders.eval_set import EvalSet
from octavo.data.loaders.loader import Loader
from octavo.data.loaders.pack_loader import PackLoader
from octavo.data.loaders.rows_from_config import (
    Rows,
    cache_folder,
    check_seals,
    dataset_identity,
    make_encoder,
    preference_kind,
    preference_rows,
    rows_for_phase,
)
from octavo.data.loaders.token_counts import open_counts
from octavo.data.loaders.usable_rows import check_held_out_rows, check_training_rows
from octavo.data.order import Mixture
from octavo.data.skip_report import SkipReport
from octavo.data.tasks.concat import JoinedDocuments
from octavo.data.tasks.pairs import HeldOutEncoder, collate_labelled, collate_pairs, labelled_batches
from octavo.data.tasks.prompts import PromptEncoder, number_prompts
from octavo.data.tasks.sealed import SealedHeldOut, read_sealed
from octavo.data.tasks.sources import detect_preference_kind, read

if TYPE_CHECKING:
    from octavo.config import Config

GATHER_PAIRS: Gather = partial(make_micro_batches, collate=collate_pairs)
WORKERS = 4  # the default with a GPU


def worker_count(cfg: Config) -> int:
    """Return the number of data worker processes of this rank: `data.workers` if it is set. The default is
    :data:`WORKERS` with a GPU, or fewer if the machine has fewer cores per rank, and 0 on a CPU."""
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
    pack_position: tuple[int, int, int] = (0, 0, 0),
    report_path: str | Path | None = None,
) -> Loader | PackLoader:
    """Return the loader of training rows: conversations, and in phase pretrain also documents. With `data.packing` it
    yields packs and starts at `pack_position` instead of `start_row`. Raises `DataError`."""
    encoder, sources = rows_for_phase(cfg, processor, cfg.data.train, cfg.run.seed)
    mixture = Mixture(sources, [d.weight for d in cfg.data.train], cfg.run.seed)
    loader: Loader | PackLoader
    if cfg.data.packing:  # packs are planned from token counts, which the cache shares between ranks and runs
        pairs = zip(sources, cfg.data.train, strict=True)
        counts = [
            open_counts(source, encoder, cache_folder(cfg), dataset_identity(dataset)) for source, dataset in pairs
        ]
        loader = PackLoader(
            mixture, encoder, counts, cfg.data.window, cfg.train.global_batch, rank, world, pack_position,
            worker_count(cfg), cfg.data.on_bad_sample, report_path, timeout=cfg.run.timeout,
            context_ranks=cfg.parallel.context,
        )  # fmt: skip
    else:
        loader = Loader(
            mixture, encoder, cfg.train.micro_batch, cfg.train.global_batch, rank,
            world, start_row, worker_count(cfg), cfg.data.on_bad_sample, report_path, timeout=cfg.run.timeout,
        )  # fmt: skip
    _report_documents(sources, loader.report)
    if not start_row and not any(pack_position):
        _check(loader)
    return loader


def count_packs(cfg: Config, processor: Any, epochs: float) -> int:
    """Return the number of packs in these epochs of `data.train` (`PackLoader.count`). All rows are tokenized; the
    ranks that share `data.cache` divide the work. Raises `DataError`."""
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
    """Return the loader of prompts. Step t is a list of this rank's `PromptSample`s of the rows [t * `prompts`,
    (t + 1) * `prompts`), each with its number in the stream; rows that are left out are missing. A prompt must leave
    space for `max_new_tokens` in `train.seq_length`. Raises `DataError`."""
    encoder = make_encoder(cfg, processor, PromptEncoder, max_new_tokens)
    sources = [read(d, "prompts", cache_folder(cfg)) for d in cfg.data.train]
    loader = Loader(
        _mixture(cfg, sources), encoder, prompts, prompts, rank, world, start_row, worker_count(cfg),
        cfg.data.on_bad_sample, report_path, timeout=cfg.run.timeout, gather=number_prompts,
    )  # fmt: skip
    if not start_row:
        _check(loader)
    return loader


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
    """Return the loader of preferences. A micro-batch of B = `train.micro_batch` pairs has 2 B rows, chosen before
    rejected (`collate_pairs`); for labelled rows (KTO) see `labelled_batches`. Raises `DataError`."""
    labelled = kind == "labelled"
    if labelled and cfg.train.global_batch < 2:
        raise DataError(
            "train.global_batch is 1, but KTO compares the rows of a step with each other; set it to 2 or more"
        )
    encoder, sources = preference_rows(cfg, processor, cfg.data.train, kind)
    loader = Loader(
        _mixture(cfg, sources), encoder, cfg.train.micro_batch, cfg.train.global_batch, rank, world, start_row,
        worker_count(cfg), cfg.data.on_bad_sample, report_path, timeout=cfg.run.timeout,
        gather=partial(labelled_batches, longest=cfg.train.seq_length) if labelled else GATHER_PAIRS,
        needs_previous=labelled,
    )  # fmt: skip
    if not start_row:
        _check(loader)
    return loader


def _check(loader: Loader | PackLoader) -> None:
    """Check the rows of a run that has not begun, and close the loader if it has none to train on."""
    try:
        check_training_rows(loader)
    except BaseException:
        loader.close()
        raise


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
    """Return the evaluation set of a configuration, or None if `data.eval` is empty. In phase pretrain rows may be
    documents; in phase rl they have `prompt` and `answer`; in phase preference they are preferences, of which the
    chosen or good answers are used. Raises `DataError`."""
    # The encoder decides which answers get labels; the sources only parse rows.
    if not cfg.data.eval:
        return None
    encoder: Any
    sources: list[Rows]
    if cfg.train.phase == "preference" and cfg.data.sealed:
        check_seals(cfg)
        encoder, sources = SealedHeldOut(processor, cfg.train.seq_length), [read_sealed(d) for d in cfg.data.eval]
    elif cfg.train.phase == "preference":
        encoder = make_encoder(cfg, processor, HeldOutEncoder)
        cache = cache_folder(cfg)
        sources = [read(d, detect_preference_kind(d, cache) or "conversations", cache) for d in cfg.data.eval]
    else:
        encoder, sources = rows_for_phase(cfg, processor, cfg.data.eval, None)
    held_out = EvalSet(
        sources, encoder, micro_batch or cfg.train.micro_batch, rank, world, cfg.data.on_bad_sample, report_path
    )
    _report_documents(sources, held_out.report)
    check_held_out_rows(held_out)
    return held_out


def prompt_set(
    cfg: Config, processor: Any, *, prompts: int | None, reserve: int, rank: int = 0, world: int = 1
) -> EvalSet:
    """Return the evaluation set of prompts: this rank's part of the first `prompts` rows of `data.eval` (all rows if
    None), encoded as `PromptSample`s that leave `reserve` tokens for the answer. An iteration yields lists of one
    sample, or empty lists. Raises `DataError`."""
    encoder = make_encoder(cfg, processor, PromptEncoder, reserve)
    held_out = EvalSet(
        [read(d, "prompts", cache_folder(cfg)) for d in cfg.data.eval], encoder, 1, rank, world, cfg.data.on_bad_sample,
        max_rows=prompts, collate=lambda samples, pad_id: samples,
    )  # fmt: skip
    check_held_out_rows(held_out)
    return held_out


def pair_set(
    cfg: Config,
    processor: Any,
    *,
    kind: Literal["pairs", "labelled"] = "pairs",
    rank: int = 0,
    world: int = 1,
    report_path: str | Path | None = None,
) -> EvalSet | None:
    """Return the evaluation set of preferences of one kind, batched as by `pair_loader`, or None if there are none.
    Labelled rows are crossed within their micro-batch, which has at least two rows. Raises `DataError`."""
    datasets = [d for d in cfg.data.eval if preference_kind(cfg, d) == kind]
    if not datasets:
        return None
    encoder, sources = preference_rows(cfg, processor, datasets, kind)
    size, gather = cfg.train.micro_batch, collate_pairs
    if kind == "labelled":
        size, gather = max(2, size), partial(collate_labelled, longest=cfg.train.seq_length)
    held_out = EvalSet(
        sources, encoder, size, rank, world, cfg.data.on_bad_sample, report_path, collate=gather,
    )  # fmt: skip
    check_held_out_rows(held_out)
    return held_out


def _report_documents(sources: Iterable[Rows], report: SkipReport) -> None:
    """Add the records of joined documents to the report."""
    for record in (record for source in sources if isinstance(source, JoinedDocuments) for record in source.records):
        report.add(record)
