"""Sounds in rows, by name or as bytes (:mod:`octavo.data.rows.media`), under `audio` or `audios`.

:mod:`octavo.data.encoding.audio` decodes the files.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from octavo.data.formats import media_kinds
from octavo.data.rows.media import Inline, Medium, Ref

PLACEHOLDER = "<audio>"


class Recording(Inline):
    """A sound file whose bytes are in the row."""

    what: ClassVar[str] = "sound"


SoundFile = Path | Recording


@dataclass(frozen=True)
class AudioRef(Ref):
    """The place of a sound."""


SOUND = Medium(
    "sound", PLACEHOLDER, media_kinds.SOUND.keys, ("audio", "audio_url"), ("audio", "path", "url", "audio_url"),
    AudioRef, Recording, "a wav or flac file",
)  # fmt: skip
UNNAMED = SOUND.unnamed
