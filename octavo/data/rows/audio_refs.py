"""Sound in rows: where they name it, or hold it (:mod:`octavo.data.rows.media`), under `audio` or `audios`.

What is in a file is read elsewhere (:mod:`octavo.data.encoding.audio`).
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from octavo.data.formats import media_kinds
from octavo.data.rows.media import Inline, Medium, Ref

PLACEHOLDER = "<audio>"


class Recording(Inline):
    """A file of sound whose bytes stand in the row itself."""

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
