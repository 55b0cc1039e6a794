"""Seals data sets: encodes rows as a plain run would, and writes them permuted.

Tokenizer, chat template and images are the plain model's. The settings of a run that affect rows (`train.seq_length`,
`data.system`, `data.max_pixels`, ...) are given here. Rows keep their order, so plain and sealed runs with the same
seed have the same batches. Texts, names and ids of rows are not written.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from octavo import models
from octavo.base import atomic_write
from octavo.base.seal_note import Note, read_note, write_note
from octavo.config import Config, load_config
from octavo.data.encoding.sample import Input, Sample
from octavo.data.errors import BadSample, DataError, LongSample
from octavo.data.loaders.rows_from_config import preference_rows, training_rows
from octavo.data.tasks.pairs import Pair
from octavo.data.tasks.sealed import ROWS, SCHEMA, dropped_row, samples_of, to_row
from octavo.sealing import inputs
from octavo.sealing.check import patch_size
from octavo.sealing.errors import SealError
from octavo.sealing.key import Key
from octavo.sealing.permute import Orders
from octavo.sealing.structure import read_structure

BATCH_ROWS = 8  # rows per call of the processor, and per record batch
#: the model's name for sounds
_SOUND = "input_features"


@dataclass(frozen=True)
class SealedDataResult:
    """The result: the folder, its number of rows, and how many of them are left out."""

    directory: Path
    rows: int
    left: int


def seal_data(
    source: str | Path,
    target: str | Path,
    model: str | Path,
    key: Key,
    settings: Sequence[str] = (),
    *,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> SealedDataResult:
    """Write the sealed rows of a data set.

    source    as in `data.train`: a file, a folder, or a name of the hub
    model     the plain model's folder, with the tokenizer and processor that encode rows
    settings  `key=value` of the configuration: train.seq_length, train.phase (sft, pretrain, or preference for pairs)
              and the section data
    progress  called with rows done and total rows

    Raises SealError for an existing target and settings without sealed rows, DataError for the data, as training does;
    ConfigError for settings.
    """
    # Left-out rows are written too, as empty ones: a plain run counts them in its order, so a sealed run must.
    target, model = Path(target), Path(model)
    if target.exists():
        raise SealError(f"{target} exists, and nothing is overwritten. Choose another folder, or delete it")
    if read_note(model, SealError) is not None:
        raise SealError(f"{model} is sealed, so its tokenizer has no words. Use the plain model")
    cfg = _configuration(source, model, settings)
    processor = models.load_processor(model, cfg.data.max_pixels, cfg.data.min_pixels, cfg.data.template_args)
    empty = models.empty(model)
    orders, patch = read_structure(empty).draw(key), patch_size(empty.config)
    pairs = cfg.train.phase == "preference"
    encoder, (rows,) = preference_rows(cfg, processor, cfg.data.train) if pairs else training_rows(cfg, processor)
    left = 0
    with atomic_write.new_folder(target, SealError) as folder:
        with pa.OSFile(str(folder / ROWS), "wb") as file, pa.ipc.new_file(file, SCHEMA) as out:
            done = 0
            for samples in _encode_rows(rows, encoder, cfg.data.on_bad_sample):
                lines = [dropped_row(entry) if isinstance(entry, str) else to_row(_seal_sample(entry, orders, patch))
                         for row in samples for entry in _row_entries(row, pairs)]  # fmt: skip
                out.write_batch(pa.RecordBatch.from_pylist(lines, SCHEMA))
                done, left = done + len(samples), left + sum(isinstance(row, str) for row in samples)
                progress(done, len(rows))
        if left == len(rows):
            raise SealError(f"{source}: all {left} rows would be left out; nothing was written")
        about = {"rows": len(rows), "left_out": left, "seq_length": cfg.train.seq_length, "phase": cfg.train.phase}
        write_note(folder, Note("data", key.fingerprint, about))
        atomic_write.sync_tree(folder)
    return SealedDataResult(target, len(rows), left)


def _configuration(source: str | Path, model: Path, settings: Sequence[str]) -> Config:
    """Return the configuration of a run on the data; only its settings of rows are used."""
    pairs = [f"model.path={model}", "train.steps=1", "run.dir=unused", *settings]
    cfg = load_config(None, [*pairs, f"data.train=[{{path: {str(source)!r}}}]"])
    if cfg.train.phase not in ("sft", "pretrain", "preference"):
        raise SealError(f"train.phase={cfg.train.phase}: only rows of sft, pretrain and preference can be sealed")
    if cfg.preference is not None and cfg.preference.loss == "kto":
        raise SealError("preference.loss=kto: pairs can be sealed, but labelled answers cannot")
    if cfg.data.sealed:
        raise SealError("data.sealed=true means that rows are sealed already; leave it out")
    if cfg.train.phase == "pretrain":  # as in training: every token has a loss
        cfg = cfg.model_copy(update={"data": cfg.data.model_copy(update={"train_on_prompt": True})})
    return cfg


def _encode_rows(rows: Any, encoder: Any, on_bad: str) -> Iterator[list[Sample | Pair | str]]:
    """Yield the samples of all rows in order, a few at a time; for a row that is left out, the reason as a word."""
    for first in range(0, len(rows), BATCH_ROWS):
        read: list[Any] = []
        for number in range(first, min(first + BATCH_ROWS, len(rows))):
            try:
                read.append(rows[number])
            except BadSample as bad:
                read.append(bad)
        good = [row for row in read if not isinstance(row, DataError)]
        encoded = iter(encoder.encode_all(good))
        outcomes = [row if isinstance(row, DataError) else next(encoded) for row in read]
        yield [_drop_reason(row, on_bad) if isinstance(row, DataError) else row for row in outcomes]


def _drop_reason(bad: DataError, on_bad: str) -> str:
    """Return the reason for which a row is left out, as a word; raises the error if it may not be."""
    if not isinstance(bad, BadSample) or (on_bad == "error" and not isinstance(bad, LongSample)):
        raise bad
    return bad.action


def _row_entries(row: Sample | Pair | str, pairs: bool) -> Sequence[Sample | str]:
    """Return the entries of a row in the file; a pair has two, also if it is left out."""
    return (row,) * (1 + pairs) if isinstance(row, str) else samples_of(row)


def _seal_sample(sample: Sample, orders: Orders, patch: tuple[int, int]) -> Sample:
    pixels = sample.pixel_values
    for name, one in sample.extra.items():  # such values reveal the row's content and must not be written unpermuted
        if name != _SOUND and np.issubdtype(np.asarray(one.values).dtype, np.floating):
            what = "videos" if "video" in name else name
            where = f"{sample.file}, row {sample.row}"
            raise SealError(f"{where}: contains {what}, which cannot be sealed; leave such rows out")
    extra = {
        name: Input(one.per, inputs.permute_bins(one.values, orders["bins"])) if name == _SOUND else one
        for name, one in sample.extra.items()
    }
    return replace(
        sample,
        input_ids=inputs.permute_token_ids(sample.input_ids, orders["vocab"]),
        labels=inputs.permute_token_ids(sample.labels, orders["vocab"]),
        pixel_values=None if pixels is None else inputs.permute_pixels(pixels, orders["patch"], patch),
        extra=extra,
    )
