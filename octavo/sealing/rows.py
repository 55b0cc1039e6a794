"""Data sets sealed: rows made numbers in the plain world, as a run would, and written in the sealed one.

Tokenizer, chat template and images are the plain model's; what a run would be told of rows (`train.seq_length`,
`data.system`, `data.max_pixels`, ...) is told here. Rows keep their order, so that plain and sealed runs of one seed
see the same batches. Nothing of a row's text, names or ids is written.
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
from octavo.sealing.check import patch_of
from octavo.sealing.errors import SealError
from octavo.sealing.key import Key
from octavo.sealing.permute import Orders
from octavo.sealing.structure import structure

AT_ONCE = 8  # rows that the processor makes in one call, and that a record batch has
#: pixels and sounds by the names under which models take them
_SOUND = "input_features"


@dataclass(frozen=True)
class Rows:
    """What was written: the folder, its rows, and how many of them are left out."""

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
) -> Rows:
    """Write the sealed rows of a data set.

    source    as `data.train` names one: a file, a folder, a name of the hub
    model     the plain model's folder, whose tokenizer and processor make rows numbers
    settings  `key=value` of the configuration: train.seq_length, train.phase (sft, pretrain, or preference for pairs)
              and what data says
    progress  called with rows done and rows in all

    Raises SealError for a target that is there and settings that mean no sealed rows, DataError for the data, as
    training would; ConfigError for settings.
    """
    target, model = Path(target), Path(model)
    if target.exists():
        raise SealError(f"{target} exists, and nothing is overwritten. Name another folder, or delete it")
    if read_note(model, SealError) is not None:
        raise SealError(f"{model} is sealed, and its tokenizer knows no words. Name the plain model")
    cfg = _configuration(source, model, settings)
    processor = models.load_processor(model, cfg.data.max_pixels, cfg.data.min_pixels, cfg.data.template_args)
    empty = models.empty(model)
    orders, patch = structure(empty).draw(key), patch_of(empty.config)
    pairs = cfg.train.phase == "preference"
    encoder, (rows,) = preference_rows(cfg, processor, cfg.data.train) if pairs else training_rows(cfg, processor)
    left = 0
    with atomic_write.folder(target, SealError) as folder:
        with pa.OSFile(str(folder / ROWS), "wb") as file, pa.ipc.new_file(file, SCHEMA) as out:
            done = 0
            for samples in _made(rows, encoder, cfg.data.on_bad_sample):
                lines = [dropped_row(one) if isinstance(one, str) else to_row(_sealed(one, orders, patch))
                         for row in samples for one in _parts(row, pairs)]  # fmt: skip
                out.write_batch(pa.RecordBatch.from_pylist(lines, SCHEMA))
                done, left = done + len(samples), left + sum(isinstance(one, str) for one in samples)
                progress(done, len(rows))
        if left == len(rows):
            raise SealError(f"{source}: every one of its {left} rows would be left out; nothing was written")
        about = {"rows": len(rows), "left_out": left, "seq_length": cfg.train.seq_length, "phase": cfg.train.phase}
        write_note(folder, Note("data", key.fingerprint, about))
        atomic_write.sync_tree(folder)
    return Rows(target, len(rows), left)


def _configuration(source: str | Path, model: Path, settings: Sequence[str]) -> Config:
    """A configuration of a run on the data, of which the section data is what matters."""
    pairs = [f"model.path={model}", "train.steps=1", "run.dir=unused", *settings]
    cfg = load_config(None, [*pairs, f"data.train=[{{path: {str(source)!r}}}]"])
    if cfg.train.phase not in ("sft", "pretrain", "preference"):
        raise SealError(
            f"train.phase={cfg.train.phase}: rows of sft, pretrain and preference are sealed, and no others"
        )
    if cfg.preference is not None and cfg.preference.loss == "kto":
        raise SealError("preference.loss=kto: of preferences pairs are sealed, and labelled answers are not")
    if cfg.data.sealed:
        raise SealError("data.sealed=true says that rows are sealed already; leave it out")
    if cfg.train.phase == "pretrain":  # as training has it: every token is learned
        cfg = cfg.model_copy(update={"data": cfg.data.model_copy(update={"train_on_prompt": True})})
    return cfg


def _made(rows: Any, encoder: Any, on_bad: str) -> Iterator[list[Sample | Pair | str]]:
    """The samples of all rows in order, some at a time; of a row that is left out the word for it."""
    for first in range(0, len(rows), AT_ONCE):
        read: list[Any] = []
        for number in range(first, min(first + AT_ONCE, len(rows))):
            try:
                read.append(rows[number])
            except BadSample as bad:
                read.append(bad)
        good = [one for one in read if not isinstance(one, DataError)]
        encoded = iter(encoder.encode_all(good))
        outcomes = [one if isinstance(one, DataError) else next(encoded) for one in read]
        yield [_word(one, on_bad) if isinstance(one, DataError) else one for one in outcomes]


def _word(bad: DataError, on_bad: str) -> str:
    """What a row that is left out is called; the error of one that may not be."""
    if not isinstance(bad, BadSample) or (on_bad == "error" and not isinstance(bad, LongSample)):
        raise bad
    return bad.action


def _parts(row: Sample | Pair | str, pairs: bool) -> Sequence[Sample | str]:
    """What a row is in the file: of a pair that is left out as many rows as of one that is not."""
    return (row,) * (1 + pairs) if isinstance(row, str) else samples_of(row)


def _sealed(sample: Sample, orders: Orders, patch: tuple[int, int]) -> Sample:
    pixels = sample.pixel_values
    for name, one in sample.extra.items():  # numbers of whatever a row shows: none is written as it is
        if name != _SOUND and np.issubdtype(np.asarray(one.values).dtype, np.floating):
            what = "videos" if "video" in name else name
            where = f"{sample.file}, row {sample.row}"
            raise SealError(f"{where}: holds {what}, which no key puts into another order; leave such rows out")
    extra = {
        name: Input(one.per, inputs.spectrum(one.values, orders["bins"])) if name == _SOUND else one
        for name, one in sample.extra.items()
    }
    return replace(
        sample,
        input_ids=inputs.tokens(sample.input_ids, orders["vocab"]),
        labels=inputs.tokens(sample.labels, orders["vocab"]),
        pixel_values=None if pixels is None else inputs.pixels(pixels, orders["patch"], patch),
        extra=extra,
    )
