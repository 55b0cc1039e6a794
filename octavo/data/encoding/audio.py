"""Decodes untrusted audio files to samples at the rate of a model.

soundfile reads WAV and FLAC. A file whose rate differs from the model's is resampled by soxr with quality "HQ", as
transformers' `load_audio` and librosa do: to ceil(samples x new rate / old rate) samples, with all frequencies that the
lower of the two rates can represent. Both packages come with the extra `audio`.
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
from octavo.data.rows.audio_refs import InlineSound, SoundFile

FORMATS = ("WAV", "WAVEX", "FLAC")
RATES = (4_000, 384_000)  # accepted samples per second; a rate outside this range means a broken or malicious header
UNKNOWN = 0x7FFF0000  # a data size in a WAV header of at least this means an unknown size: it was written into a pipe
_BLOCK = 1 << 16  # samples decoded at a time, of all channels


@dataclass(frozen=True)
class Limits:
    """Limits of a model: `rate` in samples per second, and the shortest and longest sound in samples at that rate."""

    rate: int
    shortest: int
    longest: int


def load(path: SoundFile, limits: Limits) -> np.ndarray:
    """Return the samples [T] float32 of a file at the model's rate, averaged over channels.

    Length and rate are read from the header and checked before a sample is decoded. Raises `Mismatch` if the file is
    broken, not WAV or FLAC, too short or too long, has a rate outside `RATES`, or contains NaN or infinities;
    `DataError` if a required package is not installed.
    """
    with _optional_package("soundfile, which reads the audio files of rows,"):
        import soundfile
    # The broad except: libsndfile and the operating system raise errors of many classes for a broken file.
    try:
        with soundfile.SoundFile(_source(path)) as file:
            _check(path, file, limits)
            pieces = file.blocks(_BLOCK, dtype="float32", always_2d=True)
            samples = np.concatenate([piece.mean(axis=1) for piece in pieces])
            rate, expected = file.samplerate, file.frames
    except (Mismatch, DataError):
        raise
    except Exception as cause:
        raise Mismatch(f"sound {path} cannot be decoded ({type(cause).__name__}: {cause})") from cause
    if len(samples) != expected:
        raise Mismatch(f"sound {path} is truncated: it has {len(samples)} of {expected} samples")
    if not np.isfinite(samples).all():
        raise Mismatch(f"sound {path} has samples that are not finite (NaN or infinity)")
    return samples if rate == limits.rate else _resample(path, samples, rate, limits.rate)


def _source(path: SoundFile) -> Path | BytesIO:
    """Return the argument for soundfile: a path, or an in-memory file for bytes. Raises DataError for an encrypted file
    that is damaged or whose key is missing."""
    if isinstance(path, InlineSound):
        return BytesIO(path.data)
    return BytesIO(read_bytes(path, DataError)) if is_encrypted(path) else path


def _resample(path: Path | InlineSound, samples: np.ndarray, rate: int, new_rate: int) -> np.ndarray:
    """Resample to `new_rate`. The result has exactly `_resampled_length` samples, float32."""
    with _optional_package(f"soxr, which resamples sound {path} from {rate} to {new_rate} samples per second,"):
        import soxr
    resampled = soxr.resample(samples, rate, new_rate, quality="HQ")
    length = _resampled_length(len(samples), rate, new_rate)
    return np.ascontiguousarray(np.pad(resampled[:length], (0, max(0, length - len(resampled)))), np.float32)


def _resampled_length(samples: int, rate: int, new_rate: int) -> int:
    """Return the number of samples after resampling from `rate` to `new_rate`."""
    return math.ceil(samples * new_rate / rate)


def _check(path: Path | InlineSound, file: Any, limits: Limits) -> None:
    if file.format not in FORMATS:
        raise Mismatch(f"sound {path} is {file.format}; convert it to wav or flac")
    if file.format != "FLAC" and (missing := _missing_bytes(path)):
        raise Mismatch(f"sound {path} is truncated: it has {missing} bytes fewer than its header says")
    if file.frames == (1 << 63) - 1:
        raise Mismatch(f"sound {path} has no length in its header, as if written into a pipe; write it again")
    if not RATES[0] <= file.samplerate <= RATES[1]:
        raise Mismatch(f"sound {path} has {file.samplerate} samples per second, outside the range of {RATES[0]} to "
                       f"{RATES[1]}: its header is broken, or it is not an audio file; write it again")  # fmt: skip
    length = _resampled_length(file.frames, file.samplerate, limits.rate)
    if not limits.shortest <= length <= limits.longest:
        what = "empty" if not file.frames else "too short" if length < limits.shortest else "too long"
        raise Mismatch(f"sound {path} is {what}: {file.frames / file.samplerate:.2f} s; the model takes "
                       f"{limits.shortest / limits.rate:.2f} to {limits.longest / limits.rate:g} s")  # fmt: skip


def _missing_bytes(path: SoundFile) -> int:
    """Return the number of missing bytes of a WAV file by its header: libsndfile reads a truncated file without
    error."""
    with BytesIO(path.data) if isinstance(path, InlineSound) else open_file(path, DataError) as file:
        order: Literal["big", "little"] = "big" if file.read(12)[:4] == b"RIFX" else "little"
        while len(chunk := file.read(8)) == 8:
            size, start = int.from_bytes(chunk[4:], order), file.tell()
            if chunk[:4] == b"data":
                return max(0, start + size - file.seek(0, SEEK_END)) if size < UNKNOWN else 0
            file.seek(start + size + size % 2)
    return 0


@contextmanager
def _optional_package(subject: str) -> Iterator[None]:
    """Raise `DataError` if a package cannot be imported in the block. `subject` begins the message."""
    try:
        yield
    except (ImportError, OSError) as cause:  # OSError: the package is installed without its native library
        raise DataError(f"{subject} cannot be imported ({cause}); pip install 'octavo[audio]'") from cause
