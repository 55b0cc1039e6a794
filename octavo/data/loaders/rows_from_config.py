"""Opens the rows of a configuration and makes their encoders, by phase: conversations (split at their questions if
configured), joined documents, sealed rows."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from octavo.base.hub import is_name
from octavo.base.seal_note import check_adapter, read_note
from octavo.config.sections.text_types import is_url, python_name
from octavo.config.sections.video import VideoSection
from octavo.data.encoding.encode import Encoder
from octavo.data.encoding.video import DecodedVideo, FileLimits, select_frames
from octavo.data.encoding.video import load as load_video
from octavo.data.errors import DataError, Mismatch
from octavo.data.order import Mixture
from octavo.data.rows.video_refs import as_video
from octavo.data.storage.cache import Log, no_log
from octavo.data.storage.python_rows import digest_of
from octavo.data.storage.remote import fingerprint
from octavo.data.tasks.concat import JoinedDocuments, is_plain_text, join
from octavo.data.tasks.documents import DocumentEncoder
from octavo.data.tasks.pairs import LabelledEncoder, PairEncoder
from octavo.data.tasks.prompts import COLUMNS
from octavo.data.tasks.sealed import SealedEncoder, SealedPairs, SealedRows, read_sealed
from octavo.data.tasks.sealed import check_sealed_config as check_sealed
from octavo.data.tasks.sources import Source, detect_preference_kind, open_dataset, read
from octavo.data.tasks.splitting import SplitRows, split

if TYPE_CHECKING:
    from octavo.config import Config, Dataset

E = TypeVar("E", bound=Encoder)
Rows = Source | SplitRows | JoinedDocuments | SealedRows


def check_seals(cfg: Config) -> None:
    """Check that model, adapter and data are all plain, or all sealed with one key. Raises `DataError`."""
    model = cfg.model.path
    if cfg.lora is not None and cfg.lora.adapter is not None and Path(cfg.lora.adapter).is_dir():
        check_adapter(cfg.lora.adapter, model, DataError, "lora.adapter: ")
    if cfg.data.sealed:
        check_sealed(cfg)
        return
    if Path(model).is_dir() and read_note(model, DataError) is not None:
        raise DataError(f"{model} is sealed, so plain rows are noise to it: set data.sealed: true, and name rows that "
                        "`octavo seal data` wrote")  # fmt: skip
    for path in (dataset.path for dataset in (*cfg.data.train, *cfg.data.eval)):
        if Path(path).is_dir() and read_note(path, DataError) is not None:
            raise DataError(f"{path} contains sealed rows; set data.sealed: true, and name the sealed model")


def cache_folder(cfg: Config) -> Path | None:
    """Return the configured folder of the data cache, or None for the default."""
    return None if cfg.data.cache is None else Path(cfg.data.cache)


def make_encoder(cfg: Config, processor: Any, kind: type[E] = Encoder, reserve: int = 0) -> E:  # type: ignore[assignment]
    """Return an encoder with the settings of a configuration. Pixel limits and chat template variables are set in the
    processor (`models.load_processor`)."""
    data = cfg.data
    return kind(
        processor, cfg.train.seq_length, on_long=data.on_long, train_on_prompt=data.train_on_prompt,
        system=data.system, max_image_megapixels=data.max_image_megapixels, reserve=reserve,
        mask_empty_think=data.mask_empty_think, mask_reasoning=data.mask_reasoning,
        file_limits=file_limits(cfg),
    )  # fmt: skip


def file_limits(cfg: Config) -> FileLimits:
    """Return the limits of video files, with defaults where `data.video` sets none."""
    video = cfg.data.video or VideoSection()
    return FileLimits(video.max_seconds, video.max_megabytes, cfg.data.max_image_megapixels, video.folder_fps)


def decode_videos(
    paths: Sequence[str], processor: Any, cfg: Config | None = None, fps: float | None = None
) -> list[DecodedVideo]:
    """Decode videos by path for the model of this processor. `fps` is the rate of folders of frames. Raises
    `DataError`."""
    if not paths:
        return []
    videos = getattr(processor, "videos", None)
    if videos is None:
        raise DataError(f"{paths[0]} is a video, and videos are not supported for this model")
    limits = FileLimits() if cfg is None else file_limits(cfg)
    try:
        return [load_video(select_frames(as_video(Path(path), fps), videos, limits), limits) for path in paths]
    except Mismatch as cause:
        raise DataError(str(cause)) from cause


def training_rows(cfg: Config, processor: Any) -> tuple[Encoder, list[Rows]]:
    """Return the encoder and the rows of each data set of `data.train`, for SFT and pretraining. Raises `DataError`."""
    return rows_for_phase(cfg, processor, cfg.data.train, cfg.run.seed)


def rows_for_phase(
    cfg: Config, processor: Any, datasets: Sequence[Dataset], seed: int | None
) -> tuple[Any, list[Rows]]:
    """Return the encoder and the rows of each data set, for SFT and pretraining. `seed` shuffles joined documents; None
    keeps the file order. Raises `DataError`."""
    check_seals(cfg)
    if cfg.data.sealed:
        return SealedEncoder(processor, cfg.train.seq_length), [read_sealed(d) for d in datasets]
    if cfg.train.phase != "pretrain":
        return make_encoder(cfg, processor), [conversation_rows(cfg, d) for d in datasets]
    encoder = make_encoder(cfg, processor, DocumentEncoder)
    return encoder, [document_rows(cfg, d, encoder, seed) for d in datasets]


def preference_rows(
    cfg: Config, processor: Any, datasets: Sequence[Dataset], kind: Literal["pairs", "labelled"] = "pairs"
) -> tuple[Any, list[Rows]]:
    """Return the encoder and the rows of each data set, for phase preference. Raises `DataError`."""
    if cfg.data.sealed:
        check_seals(cfg)
        return SealedEncoder(processor, cfg.train.seq_length), [read_sealed(d) for d in datasets]
    encoder = make_encoder(cfg, processor, LabelledEncoder if kind == "labelled" else PairEncoder)
    return encoder, [read(d, kind, cache_folder(cfg)) for d in datasets]


def preference_kind(cfg: Config, dataset: Dataset) -> str | None:
    """Return the kind of preferences of a data set, like `detect_preference_kind`, which does not read sealed rows."""
    if cfg.data.sealed:
        return "pairs" if isinstance(read_sealed(dataset), SealedPairs) else None
    return detect_preference_kind(dataset, cache_folder(cfg))


def conversation_rows(cfg: Config, dataset: Dataset, log: Log = no_log) -> Source | SplitRows:
    """Open a data set for phase sft; with `data.split_turns`, its rows are split at their questions."""
    source = read(dataset, cache=cache_folder(cfg))
    return split(source, cache_folder(cfg), log, dataset_identity(dataset)) if cfg.data.split_turns else source


def document_rows(
    cfg: Config, dataset: Dataset, encoder: DocumentEncoder, seed: int | None, log: Log = no_log
) -> Source | JoinedDocuments:
    """Open a data set for phase pretrain; plain text is joined unless `data.join` is false. `seed` shuffles the
    documents; None keeps the file order."""
    source = read(dataset, "documents", cache_folder(cfg))
    if not cfg.data.join or not is_plain_text(source):
        return source
    if dataset.shuffle_buffer is not None:
        raise DataError(f"{source.name}: joined documents are shuffled as a whole, so shuffle_buffer has no effect; "
                        "remove it, or set data.join: false")  # fmt: skip
    return join(source, encoder, cfg.data.on_bad_sample, seed, cache_folder(cfg), log, dataset_identity(dataset))


def dataset_identity(dataset: Dataset) -> str:
    """Return a text of all settings of a data set, except its path, that determine its rows."""
    origin = [dataset.revision, dataset.split, dataset.subset] if is_name(dataset.path) else []
    origin = [fingerprint(dataset.path)["sha256"]] if is_url(dataset.path) else origin
    origin = [digest_of(dataset.path).sha256] if python_name(dataset.path) is not None else origin
    return json.dumps([dataset.columns, *origin] if origin else dataset.columns)


def prepare_datasets(cfg: Config, processor: Any, log: Log) -> None:
    """Write the cache files for the data sets, with progress messages, so that loaders find them. Raises
    `DataError`."""
    check_seals(cfg)
    if cfg.data.sealed:  # sealed rows need no cache files
        return
    for dataset in (*cfg.data.train, *cfg.data.eval):
        open_dataset(dataset, cache_folder(cfg), log)
        if cfg.train.phase == "pretrain":
            document_rows(cfg, dataset, make_encoder(cfg, processor, DocumentEncoder), None, log)
        elif cfg.data.split_turns:
            conversation_rows(cfg, dataset, log)


def prompt_columns(cfg: Config, datasets: Iterable[Dataset]) -> list[str]:
    """Return the columns that rewards receive for these data sets: the columns of every prompt, and all further keys of
    rows. Raises `DataError`."""
    names = {name for dataset in datasets for name in read(dataset, "prompts", cache_folder(cfg)).columns()}
    return [*COLUMNS, *sorted(names - {*COLUMNS})]


def count_epoch_rows(cfg: Config, processor: Callable[[], Any]) -> int:
    """Return the number of rows in a round of the mixture of `data.train`. Joined documents count as samples, split
    rows as questions. `processor` is called only if tokens are needed. Raises `DataError`."""
    sources: Sequence[Rows]
    if cfg.data.sealed:
        sources = [read_sealed(d) for d in cfg.data.train]
    elif cfg.train.phase == "pretrain":
        sources = rows_for_phase(cfg, processor(), cfg.data.train, cfg.run.seed)[1]
    elif cfg.data.split_turns:
        sources = [conversation_rows(cfg, d) for d in cfg.data.train]
    else:
        is_preference = cfg.train.phase == "preference"
        kinds = [
            (detect_preference_kind(d, cache_folder(cfg)) if is_preference else None) or "conversations"
            for d in cfg.data.train
        ]
        sources = [read(d, kind, cache_folder(cfg)) for d, kind in zip(cfg.data.train, kinds, strict=True)]
    return sum(Mixture(sources, [d.weight for d in cfg.data.train]).draws)
