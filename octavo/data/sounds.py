"""Sound: where rows name it, and how it is opened without trusting it.

A row lists its sounds under `audio` or `audios` (a file's name, or several), and `<audio>` in its text, or a part
`{"type": "audio"}`, is the place of the next; or a part names its own file. Files are WAV or FLAC, read by soundfile
(the extra `audio`), and at the rate of the model: nothing is resampled here, since a poor filter teaches its own noise.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from octavo.data.errors import DataError, RowProblem, shown
from octavo.data.expansion import Mismatch

PLACEHOLDER = "<audio>"
FORMATS = ("WAV", "WAVEX", "FLAC")
_KEYS = ("audio", "audios")
_OF_PART = ("audio", "path", "url", "audio_url")


@dataclass(frozen=True)
class AudioRef:
    """The place of a sound, by the name of its file; "" before it is known which of the row's list it is."""

    name: str = ""


@dataclass(frozen=True)
class Limits:
    """What a model takes: `rate` in samples a second, and samples of the shortest and longest sound."""

    rate: int
    shortest: int
    longest: int


def sound_part(part: Any, number: int) -> AudioRef | None:
    """The sound that a part of turn `number` is; None for another part. Raises `RowProblem`."""
    if not isinstance(part, dict) or part.get("type") not in ("audio", "audio_url"):
        return None
    given = [part[key] for key in _OF_PART if part.get(key) is not None]
    if not given:
        return AudioRef()
    if len(given) > 1 or not isinstance(given[0], str) or not given[0]:
        raise RowProblem(f"turn {number} has the audio part {shown(part)}; expected one path in {', '.join(_OF_PART)}")
    return AudioRef(given[0])


def placed(raw: Any, turns: Sequence[Any], text: type) -> list[Any]:
    """Turns (:class:`octavo.data.Turn`) in which each sound of the row's list has its place; `text` is the type of a
    piece of text. Raises `RowProblem`."""
    names = _listed(raw) if isinstance(raw, dict) else []
    open_parts = sum(part == AudioRef() for turn in turns for part in turn.parts)
    if not names and not open_parts:
        return list(turns)
    if any(isinstance(part, AudioRef) and part.name for turn in turns for part in turn.parts):
        raise RowProblem("a turn names a sound, and the row has an audio list, or a part without a name; keep one way")
    left, out, places = iter(names), [], 0
    for turn in turns:
        parts: list[Any] = []
        for part in turn.parts:
            pieces = part.text.split(PLACEHOLDER) if isinstance(part, text) else [""] * (1 + (part == AudioRef()))
            if not isinstance(part, text | AudioRef):
                parts.append(part)
            for index, piece in enumerate(pieces):
                if index:
                    parts.append(AudioRef(next(left, "")))
                    places += 1
                if piece:
                    parts.append(text(piece))
        out.append(replace(turn, parts=tuple(parts)))
    if places != len(names):
        raise RowProblem(f"has {places} {PLACEHOLDER} placeholder(s) in its text and {len(names)} sound(s); they must "
                         "be as many")  # fmt: skip
    return out


def _listed(raw: dict[str, Any]) -> list[str]:
    given = {key: raw[key] for key in _KEYS if raw.get(key) not in (None, [], "")}
    if len(given) > 1:
        raise RowProblem("has both 'audio' and 'audios'; keep one of them")
    for key, value in given.items():
        names = value if isinstance(value, list) else [value]
        if not all(isinstance(name, str) and name for name in names):
            raise RowProblem(f"{key!r} is {shown(value)}; expected the name of a wav or flac file, or a list of them")
        return names
    return []


def load(path: Path, limits: Limits) -> np.ndarray:
    """The samples [T] float32 of a file, its channels averaged.

    Length and rate are read from the header and checked before a sample is decoded. Raises `Mismatch` for a file that
    is broken, no WAV or FLAC, at another rate, too short, too long, or holds what is no number; `DataError` where
    soundfile is not installed.
    """
    soundfile = _soundfile()
    try:
        with soundfile.SoundFile(path) as file:
            _check(path, file, limits)
            samples = file.read(dtype="float32", always_2d=True)
            expected = file.frames
    except Mismatch:
        raise
    except Exception as cause:  # libsndfile's, and the operating system's
        raise Mismatch(f"sound {path} cannot be decoded ({type(cause).__name__}: {cause})") from cause
    if len(samples) != expected:
        raise Mismatch(f"sound {path} is truncated: {len(samples)} of {expected} samples are there")
    if not np.isfinite(samples).all():
        raise Mismatch(f"sound {path} holds samples that are no numbers (NaN or infinite)")
    return np.ascontiguousarray(samples.mean(axis=1))


def _check(path: Path, file: Any, limits: Limits) -> None:
    if file.format not in FORMATS:
        raise Mismatch(f"sound {path} is {file.format}; convert it to wav or flac")
    if file.samplerate != limits.rate:
        raise Mismatch(f"sound {path} has {file.samplerate} samples a second, and the model hears {limits.rate}; "
                       f"resample it (ffmpeg -i IN -ar {limits.rate} OUT.wav)")  # fmt: skip
    if not limits.shortest <= file.frames <= limits.longest:
        what = "empty" if not file.frames else "too short" if file.frames < limits.shortest else "too long"
        raise Mismatch(f"sound {path} is {what}: {file.frames / limits.rate:.2f} s, and the model takes "
                       f"{limits.shortest / limits.rate:.2f} to {limits.longest / limits.rate:g} s")  # fmt: skip


def _soundfile() -> Any:
    try:
        import soundfile
    except (ImportError, OSError) as cause:  # OSError: the package without its library
        raise DataError(f"rows hold sound, which soundfile reads, and it cannot be imported ({cause}); "
                        "pip install 'octavo[audio]'") from cause  # fmt: skip
    return soundfile
