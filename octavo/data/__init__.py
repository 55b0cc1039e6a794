"""Data: conversations in the usual formats, encoded by the model's own processor, in a reproducible order.

    read -> Source of Conversation -> Encoder -> Sample -> collate -> Loader / EvalSet

`train_loader` and `eval_set` put these together as a configuration says.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from octavo.data import digits
from octavo.data.collate import Meta, collate
from octavo.data.conversations import Conversation, ImageRef, Text, Turn, parse
from octavo.data.encode import IGNORE, Encoder, Sample
from octavo.data.errors import BadSample, DataError, LongSample
from octavo.data.evalset import EvalSet
from octavo.data.loader import Loader
from octavo.data.mixture import Mixture
from octavo.data.report import SkipReport
from octavo.data.sources import Source, read

if TYPE_CHECKING:
    from octavo.config import Config

__all__ = [
    "IGNORE", "BadSample", "Conversation", "DataError", "Encoder", "EvalSet", "ImageRef", "Loader", "LongSample",
    "Meta", "Mixture", "Sample", "SkipReport", "Source", "Text", "Turn", "collate", "digits", "encoder", "eval_set",
    "parse", "read", "train_loader",
]  # fmt: skip


def encoder(cfg: Config, processor: Any) -> Encoder:
    """The encoder that a configuration asks for. Pixel limits belong to the processor (`models.load_processor`)."""
    data = cfg.data
    return Encoder(
        processor, cfg.train.seq_length, on_long=data.on_long, train_on_prompt=data.train_on_prompt,
        system=data.system, max_image_megapixels=data.max_image_megapixels,
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
    mixture = Mixture([read(d) for d in cfg.data.train], [d.weight for d in cfg.data.train], cfg.run.seed)
    return Loader(
        mixture, encoder(cfg, processor), cfg.train.micro_batch, cfg.train.global_batch, rank, world, start_row,
        cfg.data.workers, cfg.data.on_bad_sample, report_path, timeout=cfg.run.timeout,
    )  # fmt: skip


def eval_set(
    cfg: Config,
    processor: Any,
    *,
    rank: int = 0,
    world: int = 1,
    report_path: str | Path | None = None,
    micro_batch: int | None = None,
) -> EvalSet | None:
    """The held-out data of a configuration; None where it names none. Raises `DataError`."""
    if not cfg.data.eval:
        return None
    return EvalSet(
        [read(d) for d in cfg.data.eval], encoder(cfg, processor), micro_batch or cfg.train.micro_batch, rank, world,
        cfg.data.on_bad_sample, report_path,
    )  # fmt: skip
