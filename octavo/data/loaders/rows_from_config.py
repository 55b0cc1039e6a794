"""The rows of a configuration and their encoders by phase: conversations, which may be split at their questions, joined
documents, sealed rows."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from octavo.base.hub import is_name
from octavo.base.seal_note import check_adapter, read_note
from octavo.config.sections.text_types import is_url
from octavo.config.sections.video import VideoSection
from octavo.data.encoding.encode import Encoder
from octavo.data.encoding.video import FileLimits, Shot, select_frames
from octavo.data.encoding.video import load as load_film
from octavo.data.errors import DataError, Mismatch
from octavo.data.order import Mixture
from octavo.data.rows.video_refs import as_video
from octavo.data.storage.cache import Log, quiet
from octavo.data.storage.remote import fingerprint
from octavo.data.tasks.concat import Joined, is_plain_text, join
from octavo.data.tasks.documents import DocumentEncoder
from octavo.data.tasks.pairs import LabelledEncoder, PairEncoder
from octavo.data.tasks.prompts import COLUMNS
from octavo.data.tasks.sealed import Sealed, SealedEncoder, SealedPairs, read_sealed
from octavo.data.tasks.sealed import check_sealed_config as check_sealed
from octavo.data.tasks.sources import Source, open_dataset, preferences, read
from octavo.data.tasks.splitting import Split, split

if TYPE_CHECKING:
    from octavo.config import Config, Dataset

E = TypeVar("E", bound=Encoder)
Rows = Source | Split | Joined | Sealed


def check_seals(cfg: Config) -> None:
    """Check that model, adapter and data are all plain, or all sealed with one key. Raises `DataError`."""
    model = cfg.model.path
    if cfg.lora is not None and cfg.lora.adapter is not None and Path(cfg.lora.adapter).is_dir():
        check_adapter(cfg.lora.adapter, model, DataError, "lora.adapter: ")
    if cfg.data.sealed:
        check_sealed(cfg)
        return
    if Path(model).is_dir() and read_note(model, DataError) is not None:
        raise DataError(f"{model} is sealed, and to it plain rows are noise: set data.sealed: true, and name rows that "
                        "`octavo seal data` wrote")  # fmt: skip
    for path in (dataset.path for dataset in (*cfg.data.train, *cfg.data.eval)):
        if Path(path).is_dir() and read_note(path, DataError) is not None:
            raise DataError(f"{path} holds sealed rows; set data.sealed: true, and name the sealed model")


def cache_folder(cfg: Config) -> Path | None:
    """The folder of the data cache; None: the default."""
    return None if cfg.data.cache is None else Path(cfg.data.cache)


def encoder(cfg: Config, processor: Any, kind: type[E] = Encoder, reserve: int = 0) -> E:  # type: ignore[assignment]
    """The encoder of a configuration. Pixel limits and variables of the chat template are set in the processor
    (`models.load_processor`)."""
    data = cfg.data
    return kind(
        processor, cfg.train.seq_length, on_long=data.on_long, train_on_prompt=data.train_on_prompt,
        system=data.system, max_image_megapixels=data.max_image_megapixels, reserve=reserve,
        mask_empty_think=data.mask_empty_think, mask_reasoning=data.mask_reasoning,
        file_limits=file_limits(cfg),
    )  # fmt: skip


def file_limits(cfg: Config) -> FileLimits:
    """The limits of video files."""
    video = cfg.data.video or VideoSection()
    return FileLimits(video.max_seconds, video.max_megabytes, cfg.data.max_image_megapixels, video.folder_fps)


def decode_videos(
    paths: Sequence[str], processor: Any, cfg: Config | None = None, fps: float | None = None
) -> list[Shot]:
    """Videos by path, decoded for the model of this processor; `fps`: the rate of folders of frames. Raises
    `DataError`."""
    if not paths:
        return []
    videos = getattr(processor, "videos", None)
    if videos is None:
        raise DataError(f"{paths[0]} is a video, and videos of this model are not taken here")
    limits = FileLimits() if cfg is None else file_limits(cfg)
    try:
        return [load_film(select_frames(as_video(Path(path), fps), videos, limits), limits) for path in paths]
    except Mismatch as cause:
        raise DataError(str(cause)) from cause


def training_rows(cfg: Config, processor: Any) -> tuple[Encoder, list[Rows]]:
    """(encoder, rows) of `data.train` for SFT and pretraining. Raises `DataError`."""
    return rows_to_learn(cfg, processor, cfg.data.train, cfg.run.seed)


def rows_to_learn(cfg: Config, processor: Any, datasets: Sequence[Dataset], seed: int | None) -> tuple[Any, list[Rows]]:
    """(encoder, rows) of these data sets for SFT and pretraining; `seed`: of the order of joined documents (None: file
    order). Raises `DataError`."""
    check_seals(cfg)
    if cfg.data.sealed:
        return SealedEncoder(processor, cfg.train.seq_length), [read_sealed(d) for d in datasets]
    if cfg.train.phase != "pretrain":
        return encoder(cfg, processor), [conversation_rows(cfg, d) for d in datasets]
    encodes = encoder(cfg, processor, DocumentEncoder)
    return encodes, [document_rows(cfg, d, encodes, seed) for d in datasets]


def preference_rows(
    cfg: Config, processor: Any, datasets: Sequence[Dataset], kind: Literal["pairs", "labelled"] = "pairs"
) -> tuple[Any, list[Rows]]:
    """(encoder, rows) of these data sets for phase preference. Raises `DataError`."""
    if cfg.data.sealed:
        check_seals(cfg)
        return SealedEncoder(processor, cfg.train.seq_length), [read_sealed(d) for d in datasets]
    encodes = encoder(cfg, processor, LabelledEncoder if kind == "labelled" else PairEncoder)
    return encodes, [read(d, kind, cache_folder(cfg)) for d in datasets]


def preference_kind(cfg: Config, dataset: Dataset) -> str | None:
    """The kind of preferences of a data set, as `preferences` returns it, also for sealed rows."""
    if cfg.data.sealed:
        return "pairs" if isinstance(read_sealed(dataset), SealedPairs) else None
    return preferences(dataset, cache_folder(cfg))


def conversation_rows(cfg: Config, dataset: Dataset, log: Log = quiet) -> Source | Split:
    """The rows of a data set for phase sft, split at their questions with `data.split_turns`."""
    source = read(dataset, cache=cache_folder(cfg))
    return split(source, cache_folder(cfg), log, identity_of(dataset)) if cfg.data.split_turns else source


def document_rows(
    cfg: Config, dataset: Dataset, encodes: DocumentEncoder, seed: int | None, log: Log = quiet
) -> Source | Joined:
    """The rows of a data set for phase pretrain, joined if they are plain text. `seed`: of the order of documents."""
    source = read(dataset, "documents", cache_folder(cfg))
    if not cfg.data.join or not is_plain_text(source):
        return source
    if dataset.shuffle_buffer is not None:
        raise DataError(f"{source.name}: joined documents are shuffled whole, so shuffle_buffer means nothing to them; "
                        "remove it, or set data.join: false")  # fmt: skip
    return join(source, encodes, cfg.data.on_bad_sample, seed, cache_folder(cfg), log, identity_of(dataset))


def identity_of(dataset: Dataset) -> str:
    """A text of everything in a data set, except its file, that determines its rows."""
    of = [dataset.revision, dataset.split, dataset.subset] if is_name(dataset.path) else []
    of = [fingerprint(dataset.path)["sha256"]] if is_url(dataset.path) else of
    return json.dumps([dataset.columns, *of] if of else dataset.columns)


def prepare(cfg: Config, processor: Any, log: Log) -> None:
    """Write the cache files for the data sets, with progress messages, so that loaders find them. Raises
    `DataError`."""
    check_seals(cfg)
    if cfg.data.sealed:  # sealed rows need no cache files
        return
    for dataset in (*cfg.data.train, *cfg.data.eval):
        open_dataset(dataset, cache_folder(cfg), log)
        if cfg.train.phase == "pretrain":
            document_rows(cfg, dataset, encoder(cfg, processor, DocumentEncoder), None, log)
        elif cfg.data.split_turns:
            conversation_rows(cfg, dataset, log)


def prompt_columns(cfg: Config, datasets: Iterable[Dataset]) -> list[str]:
    """The columns that rewards receive for these data sets: the columns of every prompt, and the keys that any row has.
    Raises `DataError`."""
    of_rows = {name for dataset in datasets for name in read(dataset, "prompts", cache_folder(cfg)).columns()}
    return [*COLUMNS, *sorted(of_rows - {*COLUMNS})]


def count_epoch_rows(cfg: Config, processor: Callable[[], Any]) -> int:
    """The number of rows in a round of the mixture of `data.train`; for joined documents of samples, for split rows of
    questions. `processor` is called only if tokens are needed. Raises `DataError`."""
    sources: Sequence[Rows]
    if cfg.data.sealed:
        sources = [read_sealed(d) for d in cfg.data.train]
    elif cfg.train.phase == "pretrain":
        sources = rows_to_learn(cfg, processor(), cfg.data.train, cfg.run.seed)[1]
    elif cfg.data.split_turns:
        sources = [conversation_rows(cfg, d) for d in cfg.data.train]
    else:
        of_pairs = cfg.train.phase == "preference"
        kinds = [(preferences(d, cache_folder(cfg)) if of_pairs else None) or "conversations" for d in cfg.data.train]
        sources = [read(d, kind, cache_folder(cfg)) for d, kind in zip(cfg.data.train, kinds, strict=True)]
    return sum(Mixture(sources, [d.weight for d in cfg.data.train]).draws)
