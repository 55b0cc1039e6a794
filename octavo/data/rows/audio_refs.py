"""Sounds in rows, by name or as bytes (:mod:`octavo.data.rows.media`), under `audio` or `audios`.

:mod:`octavo.data.encoding.audio` decodes the files.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from octavo.data.formats import media_kinds
from octavo.data.rows.media import InlineFile, MediaRef, MediaType

PLACEHOLDER = "<audio>"


class InlineSound(InlineFile):
    """A sound file whose bytes are in the row."""

    what: ClassVar[str] = "sound"


SoundFile = Path | InlineSound


@dataclass(frozen=True)
class AudioRef(MediaRef):
    """The place of a sound."""


SOUND = MediaType(
    "sound", PLACEHOLDER, media_kinds.SOUND.keys, ("audio", "audio_url"), ("audio", "path", "url", "audio_url"),
    AudioRef, InlineSound, "a wav or flac file",
)  # fmt: skip
MISSING_FILE_TEXT = SOUND.missing_file_text
