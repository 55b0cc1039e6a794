"""Text files as documents for pretraining: a file is a row, `{"text": ..., "id": its name}`, read when it is used.

Nothing is converted: joined documents are tokenized once into the cache, and other documents are read one by one.
"""

from __future__ import annotations

import codecs
import os
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NoReturn

from octavo.base import suffixes
from octavo.base.byte_size import format_bytes
from octavo.base.safe_read import open_file, size_of
from octavo.data.errors import BadSample, DataError

MAX_BYTES = 1 << 28  # of a document: its tokens take several times as much memory
_ABOUT = ("readme", "license", "licence", "notice", "copying", "changelog", "citation", "contributing")


class TextFiles:
    """The documents of a text file, or of the files of a folder, which are named relative to it."""

    def __init__(self, path: Path, files: Sequence[Path]) -> None:
        self.path, self.files = path, files

    def __len__(self) -> int:
        return len(self.files)

    def keys(self) -> set[str]:
        return {"text", "id"}

    def __getitem__(self, row: int) -> dict[str, str]:
        file = self.files[row]
        name = file.name if file == self.path else str(file.relative_to(self.path))
        with open_file(file, DataError) as opened:
            if (size := size_of(opened)) > MAX_BYTES:
                most = format_bytes(MAX_BYTES)
                raise BadSample(
                    self.path, row, f"has {format_bytes(size)}, and a document at most {most}; split it", name
                )
            content = opened.read()
        try:
            return {"text": content.decode("utf-8-sig"), "id": name}
        except UnicodeDecodeError as cause:
            is_utf16 = content.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE))
            encoding = "UTF-16" if is_utf16 else "ENCODING"
            reason = f"is not UTF-8 (its byte {cause.start}); save it as UTF-8, for example with `iconv -f {encoding}"
            raise BadSample(self.path, row, f"{reason} -t UTF-8`", name) from cause


def is_text_file(name: str) -> bool:
    """Return True for the name of a text file."""
    return name.lower().endswith(suffixes.TEXT)


def is_about_data(name: str) -> bool:
    """Return True for the name of a file that usually describes the data next to it, such as README.md."""
    return Path(name).stem.lower() in _ABOUT


def find_text_files(folder: Path, row_suffixes: tuple[str, ...]) -> tuple[list[Path], Counter[str]]:
    """Return the text files in a folder and its subfolders, in the order of their names, and the number of other files
    by suffix. Hidden files and folders are skipped.

    Raises `DataError` for a folder that cannot be listed, for links to folders or missing files, and for files of rows
    in a subfolder of a folder with text files.
    """
    files, others = list[Path](), Counter[str]()
    row_file: Path | None = None
    for place, folders, names in os.walk(folder, onerror=_cannot_list):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        if link := next((path for name in folders if (path := Path(place, name)).is_symlink()), None):
            raise DataError(f"{link} is a link to a folder, which is not followed; name its target as a data set")
        for name in names:
            path = Path(place, name)
            if name.startswith("."):
                continue
            if not is_text_file(name):
                others[path.suffix.lower() or name] += 1
                row_file = path if path.suffix.lower() in row_suffixes else row_file
            elif not path.exists():
                raise DataError(f"{path} is a link to a missing file; restore the file, or remove the link")
            else:
                files.append(path)
    if files and row_file is not None:
        raise DataError(
            f"{folder} has text files and files of rows ({row_file.relative_to(folder)}); name the folders with texts "
            "and those with rows as separate data sets"
        )
    return sorted(files, key=lambda file: file.relative_to(folder).parts), others


def refuse_mixed_texts(folder: Path, rows: Iterable[str]) -> None:
    """Raise `DataError` if a folder whose files `rows` are read has text files, too, which would be left out. Files
    that describe the data are none of its documents."""
    texts = [name for name in sorted(os.listdir(folder)) if is_text_file(name) and name[0] != "."]
    if left_out := [name for name in texts if not is_about_data(name)]:
        raise DataError(
            f"{folder} has files of rows ({next(iter(rows))}) and text files ({left_out[0]}), which would be left out; "
            "move them to another folder, and name it as a data set"
        )


def _cannot_list(cause: OSError) -> NoReturn:
    raise DataError(f"{cause.filename} cannot be listed ({cause.strerror}); check its permissions") from cause
