"""Files of sound to samples at the rate of a model, opened without trusting them.

WAV and FLAC are read by soundfile. What has another rate than the model is resampled by soxr, in its setting "HQ", as
transformers' `load_audio` and librosa do it: to ceil(samples x new rate / old rate) samples, all that the lower of the
two rates can hold kept and the rest filtered out. Both packages come with the extra `audio`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from io import SEEK_END, BytesIO
from pathlib import Path
from typing import Any, Literal

import numpy as np

from octavo.base.encryption import is_encrypted
from octavo.base.safe_read import open_file, read_bytes
from octavo.data.errors import DataError, Mismatch
from octavo.data.rows.audio_refs import Recording, SoundFile

FORMATS = ("WAV", "WAVEX", "FLAC")
RATES = (4_000, 384_000)  # of files, in samples a second; beyond them a header is broken, or means to cost much
UNKNOWN = 0x7FFF0000  # bytes of a WAV from which on its writer, into a pipe, could not know them
_BLOCK = 1 << 16  # samples that are decoded at a time, of all channels


@dataclass(frozen=True)
class Limits:
    """What a model takes: `rate` in samples a second, and samples at that rate of the shortest and longest sound."""

    rate: int
    shortest: int
    longest: int


def load(path: SoundFile, limits: Limits) -> np.ndarray:
    """The samples [T] float32 of a file at the model's rate, its channels averaged.

    Length and rate are read from the header and checked before a sample is decoded. Raises `Mismatch` for a file that
    is broken, no WAV or FLAC, at a rate outside `RATES`, too short, too long, or holds what is no number; `DataError`
    where a package that it needs is not installed.
    """
    with _optional_package("rows hold sound, which soundfile reads"):
        import soundfile
    try:
        with soundfile.SoundFile(_file(path)) as file:
            _check(path, file, limits)
            pieces = file.blocks(_BLOCK, dtype="float32", always_2d=True)
            samples = np.concatenate([piece.mean(axis=1) for piece in pieces])
            rate, expected = file.samplerate, file.frames
    except (Mismatch, DataError):
        raise
    except Exception as cause:  # libsndfile's, and the operating system's
        raise Mismatch(f"sound {path} cannot be decoded ({type(cause).__name__}: {cause})") from cause
    if len(samples) != expected:
        raise Mismatch(f"sound {path} is truncated: {len(samples)} of {expected} samples are there")
    if not np.isfinite(samples).all():
        raise Mismatch(f"sound {path} holds samples that are no numbers (NaN or infinite)")
    return samples if rate == limits.rate else _resample(path, samples, rate, limits.rate)


def _file(path: SoundFile) -> Path | BytesIO:
    """What soundfile opens. Raises DataError for an encrypted file that is damaged or whose key is not given."""
    if isinstance(path, Recording):
        return BytesIO(path.data)
    return BytesIO(read_bytes(path, DataError)) if is_encrypted(path) else path


def _resample(path: Path | Recording, samples: np.ndarray, rate: int, wanted: int) -> np.ndarray:
    """Samples at `rate` as ones at the rate that is `wanted`."""
    with _optional_package(f"sound {path} has {rate} samples a second, the model hears {wanted}, and soxr resamples"):
        import soxr
    made = soxr.resample(samples, rate, wanted, quality="HQ")
    length = _resampled_length(len(samples), rate, wanted)
    return np.ascontiguousarray(np.pad(made[:length], (0, max(0, length - len(made)))), np.float32)


def _resampled_length(samples: int, rate: int, wanted: int) -> int:
    """How many samples at the rate that is `wanted` so many at `rate` become."""
    return math.ceil(samples * wanted / rate)


def _check(path: Path | Recording, file: Any, limits: Limits) -> None:
    if file.format not in FORMATS:
        raise Mismatch(f"sound {path} is {file.format}; convert it to wav or flac")
    if file.format != "FLAC" and (lost := _missing_bytes(path)):
        raise Mismatch(f"sound {path} is truncated: {lost} bytes fewer are there than its header says")
    if file.frames == (1 << 63) - 1:
        raise Mismatch(f"sound {path} does not say how long it is, as what was written into a pipe; write it again")
    if not RATES[0] <= file.samplerate <= RATES[1]:
        raise Mismatch(f"sound {path} has {file.samplerate} samples a second, and {RATES[0]} to {RATES[1]} are read; "
                       "its header is broken, or it is no sound; write it again")  # fmt: skip
    length = _resampled_length(file.frames, file.samplerate, limits.rate)
    if not limits.shortest <= length <= limits.longest:
        what = "empty" if not file.frames else "too short" if length < limits.shortest else "too long"
        raise Mismatch(f"sound {path} is {what}: {file.frames / file.samplerate:.2f} s, and the model takes "
                       f"{limits.shortest / limits.rate:.2f} to {limits.longest / limits.rate:g} s")  # fmt: skip


def _missing_bytes(path: SoundFile) -> int:
    """How many bytes the header of a WAV promises that are not there: libsndfile reads what is, without a word."""
    with BytesIO(path.data) if isinstance(path, Recording) else open_file(path, DataError) as file:
        order: Literal["big", "little"] = "big" if file.read(12)[:4] == b"RIFX" else "little"
        while len(chunk := file.read(8)) == 8:
            size, start = int.from_bytes(chunk[4:], order), file.tell()
            if chunk[:4] == b"data":
                return max(0, start + size - file.seek(0, SEEK_END)) if size < UNKNOWN else 0
            file.seek(start + size + size % 2)
    return 0


@contextmanager
def _optional_package(why: str) -> Iterator[None]:
    """Inside, a package that cannot be imported is a `DataError`."""
    try:
        yield
    except (ImportError, OSError) as cause:  # OSError: the package without its library
        raise DataError(f"{why}, and it cannot be imported ({cause}); pip install 'octavo[audio]'") from cause
