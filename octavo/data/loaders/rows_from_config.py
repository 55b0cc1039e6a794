"""The rows that a configuration names, and what makes them numbers: encoders by phase, documents joined, conversations
split at their questions, sealed rows as they are."""

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
from octavo.data.storage.cache import Say, quiet
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
    """That model, adapter and data are of one world: all plain, or all sealed with one key. Raises `DataError`."""
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
    """Where a configuration keeps what is made of data files; None: in the default folder."""
    return None if cfg.data.cache is None else Path(cfg.data.cache)


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


def decode_videos(
    paths: Sequence[str], processor: Any, cfg: Config | None = None, fps: float | None = None
) -> list[Shot]:
    """Videos by their names, decoded as a model of this processor takes them; `fps`: the rate of those that are folders
    of frames. Raises `DataError`."""
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
    """The rows of `data.train` that SFT and pretraining learn from, and what makes them numbers. Raises `DataError`."""
    return rows_to_learn(cfg, processor, cfg.data.train, cfg.run.seed)


def rows_to_learn(cfg: Config, processor: Any, datasets: Sequence[Dataset], seed: int | None) -> tuple[Any, list[Rows]]:
    """What SFT and pretraining learn from in these data sets; `seed`: of the order of joined documents (None: none)."""
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
    """The rows of phase preference in these data sets, and what makes them numbers. Raises `DataError`."""
    if cfg.data.sealed:
        check_seals(cfg)
        return SealedEncoder(processor, cfg.train.seq_length), [read_sealed(d) for d in datasets]
    encodes = encoder(cfg, processor, LabelledEncoder if kind == "labelled" else PairEncoder)
    return encodes, [read(d, kind, cache_folder(cfg)) for d in datasets]


def preference_kind(cfg: Config, dataset: Dataset) -> str | None:
    """`preferences`, of sealed rows too."""
    if cfg.data.sealed:
        return "pairs" if isinstance(read_sealed(dataset), SealedPairs) else None
    return preferences(dataset, cache_folder(cfg))


def conversation_rows(cfg: Config, dataset: Dataset, say: Say = quiet) -> Source | Split:
    """A data set of phase sft, split at its questions where that is asked for."""
    source = read(dataset, cache=cache_folder(cfg))
    return split(source, cache_folder(cfg), say, identity_of(dataset)) if cfg.data.split_turns else source


def document_rows(
    cfg: Config, dataset: Dataset, encodes: DocumentEncoder, seed: int | None, say: Say = quiet
) -> Source | Joined:
    """A data set of phase pretrain, its documents joined where they are plain text. `seed`: of their order."""
    source = read(dataset, "documents", cache_folder(cfg))
    if not cfg.data.join or not is_plain_text(source):
        return source
    if dataset.shuffle_buffer is not None:
        raise DataError(f"{source.name}: joined documents are shuffled whole, so shuffle_buffer means nothing to them; "
                        "remove it, or set data.join: false")  # fmt: skip
    return join(source, encodes, cfg.data.on_bad_sample, seed, cache_folder(cfg), say, identity_of(dataset))


def identity_of(dataset: Dataset) -> str:
    """What of a data set, other than its file, decides what its rows are."""
    of = [dataset.revision, dataset.split, dataset.subset] if is_name(dataset.path) else []
    of = [fingerprint(dataset.path)["sha256"]] if is_url(dataset.path) else of
    return json.dumps([dataset.columns, *of] if of else dataset.columns)


def prepare(cfg: Config, processor: Any, say: Say) -> None:
    """Make what is made of data files once, and report it; loaders find it there. Raises `DataError`."""
    check_seals(cfg)
    if cfg.data.sealed:  # all that was made of them, when they were sealed
        return
    for dataset in (*cfg.data.train, *cfg.data.eval):
        open_dataset(dataset, cache_folder(cfg), say)
        if cfg.train.phase == "pretrain":
            document_rows(cfg, dataset, encoder(cfg, processor, DocumentEncoder), None, say)
        elif cfg.data.split_turns:
            conversation_rows(cfg, dataset, say)


def prompt_columns(cfg: Config, datasets: Iterable[Dataset]) -> list[str]:
    """The columns that rewards are given of the rows of these data sets, where any of their rows has them. Raises
    `DataError`."""
    of_rows = {name for dataset in datasets for name in read(dataset, "prompts", cache_folder(cfg)).columns()}
    return [*COLUMNS, *sorted(of_rows - {*COLUMNS})]


def count_epoch_rows(cfg: Config, processor: Callable[[], Any]) -> int:
    """How many rows `data.train` has in all, which is a round of its mixture; of joined documents how many samples, of
    rows that are split how many questions.
    `processor` is called where that needs tokens. Raises `DataError`."""
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
