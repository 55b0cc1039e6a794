"""Sealed rows: samples that were encoded on a machine with the plain tokenizer and the key, and are read unchanged.

    FOLDER/sealed.json      the fingerprint of the key, and the purpose of the rows (`octavo.base.seal_note`)
    FOLDER/rows.arrow       rows of `SCHEMA`, in the order of the data set that was sealed; for a pair of phase
                            preference two rows, the chosen answer and the rejected one

No row contains text, names or ids of the plain data. A row that had to be left out is stored without tokens, so that
the order of an epoch is the same as for the plain data. :mod:`octavo.sealing.rows` writes them.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from octavo.base import safe_read
from octavo.base.encryption import check_plain, is_encrypted
from octavo.base.env_vars import cache_home
from octavo.base.seal_note import NOTE, Note, read_note
from octavo.data.encoding.sample import COUNTED, IGNORE, Input, Sample
from octavo.data.errors import BadSample, DataError, LongSample
from octavo.data.formats.arrow_rows import MappedTable
from octavo.data.formats.columnar import error_line
from octavo.data.storage.cache import cached_file
from octavo.data.tasks.pairs import Pair

if TYPE_CHECKING:
    from octavo.config import Config, Dataset

ROWS = "rows.arrow"
TENSOR = pa.struct(
    [("name", pa.string()), ("per", pa.string()), ("dtype", pa.string()), ("shape", pa.list_(pa.int64())),
     ("data", pa.large_binary())]
)  # fmt: skip
SCHEMA = pa.schema(
    [
        ("left", pa.string()),  # "dropped" or "skipped" for a row that was left out; null for the others
        ("input_ids", pa.list_(pa.int32())),
        ("labels", pa.list_(pa.int32())),
        ("answers", pa.list_(pa.int32())),  # start, end, start, end, ...
        ("places", pa.list_(pa.int32())),
        *((name, pa.int32()) for name in ("length", "images", "sounds", "lost")),
        ("tensors", pa.list_(TENSOR)),
    ]
)
SAMPLE_FIELDS = ("mm_token_type_ids", "pixel_values", "image_grid_thw")
"""Tensors that are fields of a `Sample`; the others are in its `extra`."""
_DTYPES = {"int64": np.int64, "float32": np.float32}


def to_row(sample: Sample) -> dict[str, Any]:
    """Convert a sample to a row, without its file, row number, id and notes about its text."""
    fields = ((name, "", getattr(sample, name)) for name in SAMPLE_FIELDS)
    extra = ((name, tensor.per, tensor.values) for name, tensor in sample.extra.items())
    return {
        "left": None,
        "input_ids": sample.input_ids.astype(np.int32),
        "labels": sample.labels.astype(np.int32),
        "answers": [end for answer in sample.answers for end in answer],
        "places": [end for place in sample.places for end in place],
        **{name: getattr(sample, name) for name in ("length", "images", "sounds", "lost")},
        "tensors": [
            {"name": name, "per": per, "dtype": str(x.dtype), "shape": list(x.shape), "data": x.tobytes()}
            for name, per, x in (*fields, *extra)
            if x is not None
        ],
    }


def dropped_row(action: str) -> dict[str, Any]:
    """Return the sealed row in place of a row that was left out."""
    return dict.fromkeys(SCHEMA.names) | {"left": action}


class SealedRows(MappedTable):
    """The rows of a sealed folder: `len(rows)`, `rows[i]` (a `Sample`; raises `BadSample`), `rows.name`."""

    each = 1
    """Rows in the file for one row of the data set."""
    window: int | None = None
    shards: Sequence[int] | None = None

    def __init__(self, folder: Path, limit: int | None = None) -> None:
        super().__init__(folder, _plain_file(folder / ROWS))
        if (schema := self._table.schema) != SCHEMA:
            raise DataError(f"{folder / ROWS} has no sealed rows (columns {', '.join(schema.names)[:200]})")
        self.name, self._limit = str(folder), limit

    def _damaged(self, cause: Exception) -> DataError:
        return DataError(
            f"{Path(self.path) / ROWS} is not a valid Arrow file ({error_line(cause)}); seal the data again"
        )

    def _notes_in(self, file: Path) -> Path:
        return cache_home()  # nothing is written into a folder of data

    def __len__(self) -> int:
        rows = len(self._table) // self.each
        return rows if self._limit is None else min(self._limit, rows)

    def __getitem__(self, row: int) -> Any:
        return self._read(row, 0)

    def _read(self, row: int, part: int) -> Sample:
        """Part `part` of a row. Raises `BadSample` for a row that was left out, `DataError` for a damaged one."""
        if not 0 <= row < len(self):
            raise IndexError(f"{self.name} has {len(self)} rows; row {row} was requested")
        columns = self._row(row * self.each + part).columns
        values = {name: column[0].as_py() for name, column in zip(SCHEMA.names, columns, strict=True)}
        if values["left"] is not None:
            kind = LongSample if values["left"] == LongSample.action else BadSample
            raise kind(self.name, row, f"was left out ({values['left']}) when it was sealed")
        try:
            return self._sample(row, values)
        except (KeyError, TypeError, ValueError) as cause:
            raise DataError(f"{self.kept}, row {row}: {cause}; the file is damaged, seal the data again") from cause

    def _sample(self, row: int, fields: dict[str, Any]) -> Sample:
        ids, labels = (np.asarray(fields[name], np.int64) for name in ("input_ids", "labels"))
        if len(ids) != len(labels) or ((labels != ids) & (labels != IGNORE)).any():
            raise ValueError("its labels are not its tokens")
        arrays: dict[str, np.ndarray] = {}
        extra: dict[str, Input] = {}
        for tensor in fields["tensors"]:
            values = np.frombuffer(tensor["data"], _DTYPES[tensor["dtype"]]).reshape(tensor["shape"]).copy()
            if tensor["name"] in SAMPLE_FIELDS:
                arrays[tensor["name"]] = values
            elif tensor["per"] in COUNTED:
                extra[tensor["name"]] = Input(tensor["per"], values)
            else:
                raise ValueError(f"{tensor['name']!r} counts {tensor['per']!r}")
        return Sample(
            ids, labels, images=fields["images"], answers=_pairs(fields["answers"]), length=fields["length"],
            lost=fields["lost"], extra=extra, places=_pairs(fields["places"]), file=self.name, row=row,
            sounds=fields["sounds"], mm_token_type_ids=arrays.get("mm_token_type_ids"),
            pixel_values=arrays.get("pixel_values"), image_grid_thw=arrays.get("image_grid_thw"),
        )  # fmt: skip


class SealedPairs(SealedRows):
    """The pairs of a sealed folder of phase preference: `rows[i]` is a `Pair`."""

    each = 2

    def __getitem__(self, row: int) -> Pair:
        return Pair(self._read(row, 0), self._read(row, 1))


def _pairs(ends: Sequence[int]) -> tuple[tuple[int, int], ...]:
    return tuple(zip(ends[::2], ends[1::2], strict=True))


def _plain_file(file: Path) -> Path:
    """Return the path of the file, or for an encrypted one of its plain text in memory. Raises `DataError`."""

    def decrypt(target: Path, progress: Callable[[float], None]) -> None:
        with safe_read.open_file(file, DataError) as stored, target.open("wb") as out:
            shutil.copyfileobj(stored, out, 1 << 22)

    if is_encrypted(file):
        return cached_file(None, file, decrypt)
    check_plain(file, DataError)
    return file


class SealedEncoder:
    """The encoder for rows that are encoded already. A row of more than `seq_length` tokens, which was sealed for a
    longer `seq_length`, is left out."""

    on_long = on_long_options = "drop"
    rows_kind = "sealed rows"
    reserve = 0

    def __init__(self, processor: Any, seq_length: int) -> None:
        self.processor, self.tokenizer, self.seq_length = processor, processor.tokenizer, seq_length

    @property
    def pad_id(self) -> int:
        """The token that pads short rows."""
        ids = (self.tokenizer.pad_token_id, self.tokenizer.eos_token_id)
        return next((token for token in ids if token is not None), 0)

    def encode_all(self, rows: Sequence[Sample | Pair]) -> list[Sample | Pair | LongSample]:
        """Return the rows, with a `LongSample` in place of each that is too long."""
        return [self._check_length(row) for row in rows]

    def _check_length(self, row: Sample | Pair) -> Sample | Pair | LongSample:
        longest = max(len(tensor.input_ids) for tensor in samples_of(row))
        if longest <= self.seq_length:
            return row
        reason = f"is {longest} tokens long, train.seq_length is {self.seq_length}"
        return LongSample(row.file, row.row, f"{reason}; sealed rows are not cut: seal them with that seq_length")


class SealedHeldOut(SealedEncoder):
    """The encoder for held-out rows of phase preference: the chosen answer of a pair."""

    def _check_length(self, row: Sample | Pair) -> Sample | Pair | LongSample:
        return super()._check_length(samples_of(row)[0])


def samples_of(row: Sample | Pair) -> tuple[Sample, ...]:
    """Return the sample, or the chosen and the rejected sample of a pair."""
    return (row.chosen, row.rejected) if isinstance(row, Pair) else (row,)


def contains_pairs(note: Note | None) -> bool:
    """Return True if a sealed data set contains pairs."""
    return note is not None and note.details.get("phase") == "preference"


def read_sealed(dataset: Dataset) -> SealedRows:
    """Open the rows of a sealed data set of the configuration. Raises `DataError`."""
    folder = Path(dataset.path)
    if not (folder / ROWS).is_file():
        raise DataError(f"{folder} has no {ROWS}, but data.sealed is true. `octavo seal data` writes such folders")
    kind = SealedPairs if contains_pairs(read_note(folder, DataError)) else SealedRows
    return kind(folder, dataset.max_samples)


def check_sealed_config(cfg: Config) -> None:
    """Check that model and data are sealed with one key, and the data for this phase. Raises `DataError`."""
    model = read_note(cfg.model.path, DataError) if Path(cfg.model.path).is_dir() else None
    notes = list(_notes([*cfg.data.train, *cfg.data.eval]))
    if model is None:
        raise DataError(f"data.sealed is true, and {cfg.model.path} is not sealed (it has no {NOTE}), so sealed "
                        "rows are noise to it. Name a folder that `octavo seal model` wrote")  # fmt: skip
    for path, note in notes:
        if note is None:
            raise DataError(f"data.sealed is true, and {path} is not sealed: it has no {NOTE}. `octavo seal data`")
        if note.of != "data":
            raise DataError(f"{path} is a sealed {note.of}, not a data set")
        if note.key != model.key:
            raise DataError(f"{path} was sealed with the key {note.key}, and {cfg.model.path} with {model.key}, so to "
                            "each other they are noise. Seal one of them again")  # fmt: skip
    preference = cfg.train.phase == "preference"
    for number, (path, note) in enumerate(notes):
        if contains_pairs(note) != preference and (contains_pairs(note) or number < len(cfg.data.train)):
            content = "pairs" if contains_pairs(note) else "no pairs"
            raise DataError(f"{path} has {content}, but this run is of phase {cfg.train.phase}. `octavo seal data` "
                            f"makes rows of a phase: give it train.phase={cfg.train.phase}")  # fmt: skip


def _notes(datasets: Sequence[Dataset]) -> Iterator[tuple[str, Note | None]]:
    for dataset in datasets:
        yield dataset.path, read_note(dataset.path, DataError) if Path(dataset.path).is_dir() else None
