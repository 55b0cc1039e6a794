"""Reads untrusted files safely: only regular files, up to a size limit, as bytes, text or JSON.

A path may lead to a pipe (reading never returns), a device (which never ends), a socket or a folder; a file may be
empty, huge, binary, or JSON that crashes code which walks through it: brackets nested without end, numbers with
thousands of digits, lone surrogates. Each raises an error of the caller's class here, which names the
file and the fix. Configurations, rows, model folders, adapters, checkpoints and run directories are all opened with
this module.

An encrypted file (:mod:`octavo.base.encryption`) is recognized by its first bytes and read as its plain text.
"""

from __future__ import annotations

import errno
import json
import math
import os
import re
import stat
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, cast

from octavo.base import encryption

#: bytes of a file that is read whole; the largest published tokenizers and indices have about 40 MB
MAX_BYTES = 256 << 20
#: nested brackets; code that later copies or writes the JSON may recurse about ten times deeper
MAX_DEPTH = 64
#: digits of a whole number: a longer one does not even fit into a float
MAX_DIGITS = 300

_KINDS = {
    stat.S_IFIFO: "a named pipe", stat.S_IFSOCK: "a socket", stat.S_IFDIR: "a folder",
    stat.S_IFCHR: "a device", stat.S_IFBLK: "a device",
}  # fmt: skip
_SURROGATE_ESCAPE = re.compile(r"\\u[dD][89a-fA-F]")  # the JSON escape of a surrogate, lone or in a valid pair


class Unreadable(ValueError):
    """A file that cannot be read, or has the wrong content; the message names it and the fix."""


def printable(text: object) -> str:
    r"""Escape control and unprintable characters for a terminal: "a\x1b[2Jb" -> r"a\x1b[2Jb"."""
    text = str(text)
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape", "surrogatepass").decode() for c in text)


def first_line(error: BaseException) -> str:
    """Return ``TypeName: first line of the message``, or only the type if there is no message (``raise EOFError``)."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


def describe_file_type(path: str | os.PathLike[str]) -> str | None:
    """Return what a path is if not a regular file ("a named pipe", "a folder", ...), or None for a file. Links are
    followed.

    Raises OSError where the path does not exist.
    """
    mode = os.stat(path).st_mode
    return None if stat.S_ISREG(mode) else _KINDS.get(stat.S_IFMT(mode), "no file")


def open_file(path: str | os.PathLike[str], error: type[Exception] = Unreadable, buffering: int = -1) -> BinaryIO:
    """Return a regular file, opened for reading bytes; an encrypted one is decrypted.

    Raises `error` for a path that is missing, not a regular file, not permitted or not valid, and for an encrypted file
    that is damaged or has no key. A chunk that turns out to be damaged later raises VaultError, which is an OSError.
    """
    try:
        # Without O_NONBLOCK, opening a pipe without a writer never returns. All checks use the open handle, so that the
        # file cannot be exchanged between check and use.
        handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY)
    except FileNotFoundError as cause:
        what = "a link that leads nowhere" if os.path.islink(path) else "missing"
        raise error(f"{printable(path)} is {what}.") from cause
    except OSError as cause:
        if cause.errno == errno.ENXIO:  # the error of a socket, and of some devices
            raise error(f"{printable(path)} is a socket or a device, not a file. Put the file in its place.") from cause
        raise error(f"{printable(path)} cannot be read: {cause.strerror}.") from cause
    except ValueError as cause:  # a NUL or a lone surrogate
        raise error(f"{printable(path)} is not a path: it contains a character that file names cannot have.") from cause
    try:
        mode = os.fstat(handle).st_mode
        if not stat.S_ISREG(mode):
            what = _KINDS.get(stat.S_IFMT(mode), "something")
            raise error(f"{printable(path)} is {what}, not a file. Put the file in its place.")
        if encryption.has_magic(os.pread(handle, 8, 0)):
            try:
                return encryption.open_decrypted(handle, path, buffering, shown=printable(path))
            except encryption.VaultError as cause:
                raise error(f"{printable(cause)}.") from cause
        try:
            encryption.check_file(path, None)
        except encryption.VaultError as cause:
            raise error(f"{printable(cause)}.") from cause
        return cast(BinaryIO, open(handle, "rb", buffering=buffering))
    except BaseException:
        os.close(handle)
        raise


def size_of(file: BinaryIO) -> int:
    """Return the size of an open file in bytes (of the plain text if it is encrypted); the position does not change."""
    at = file.tell()
    size = file.seek(0, os.SEEK_END)
    file.seek(at)
    return size


def read_bytes(path: str | os.PathLike[str], error: type[Exception] = Unreadable, limit: int = MAX_BYTES) -> bytes:
    """Return a whole file of at most `limit` bytes. Raises `error` as `open_file` does, and for a longer file."""
    with open_file(path, error, buffering=0) as file:
        size = size_of(file)
        pieces, left = [], limit + 1
        try:
            while size <= limit and left and (piece := file.read(min(left, 1 << 24))):
                pieces.append(piece)
                left -= len(piece)
        except OSError as cause:
            raise error(f"{printable(path)} cannot be read: {cause.strerror}.") from cause
    if size > limit or not left:
        raise error(f"{printable(path)} has {max(size, limit + 1)} bytes or more; the limit is {limit}.")
    return b"".join(pieces)


def read_text(
    path: str | os.PathLike[str],
    error: type[Exception] = Unreadable,
    limit: int = MAX_BYTES,
    encoding: str = "utf-8",
) -> str:
    """Return the text of a file (`encoding`: utf-8, or utf-8-sig to drop a byte order mark). Raises `error`."""
    return decode(read_bytes(path, error, limit), path, error, encoding)


def decode(raw: bytes, where: object, error: type[Exception] = Unreadable, encoding: str = "utf-8") -> str:
    """Decode bytes as UTF-8; `where` names them in the message of `error`."""
    try:
        return raw.decode(encoding)
    except UnicodeDecodeError as cause:
        line = raw.count(b"\n", 0, cause.start) + 1
        raise error(
            f"{printable(where)} is not UTF-8 text: byte {cause.start} (line {line}) is 0x{raw[cause.start]:02x}. "
            "Save it as UTF-8, or download it again."
        ) from cause


def read_json(
    path: str | os.PathLike[str],
    error: type[Exception] = Unreadable,
    limit: int = MAX_BYTES,
    wanted: type | None = dict,
) -> Any:
    """Return the JSON value of a file, of the type `wanted` (None accepts any type). Raises `error`."""
    return parse_json(read_text(path, error, limit), path, error, wanted)


def parse_json(text: str, where: object, error: type[Exception] = Unreadable, wanted: type | None = dict) -> Any:
    """Return a JSON value that is safe to walk through, copy, convert and write again.

    Raises `error` with `where`: for text that is not JSON, with line and column; for brackets nested deeper than DEPTH,
    whole numbers of more than DIGITS digits and lone surrogates (which no file and no tokenizer accepts); and for a
    value that is not of the type `wanted` (dict, list).
    """
    shown = printable(where)
    try:
        value = json.loads(text, parse_int=_parse_int)
    except json.JSONDecodeError as cause:
        position = f"line {cause.lineno}, column {cause.colno}"
        raise error(
            f"{shown} is not JSON: {cause.msg} ({position}). Download or write it again." if text.strip() else
            f"{shown} is empty; expected JSON. Download or write it again."
        ) from cause  # fmt: skip
    except RecursionError as cause:
        raise error(f"{shown} nests brackets deeper than {MAX_DEPTH}; no file of this kind does.") from cause
    except _TooManyDigits as cause:
        raise error(f"{shown} contains a number of {cause} digits; a float holds {MAX_DIGITS}.") from cause
    # The walk is slow, so it runs only for texts that can have one of the faults it finds.
    if (text.count("[") + text.count("{") > MAX_DEPTH or _SURROGATE_ESCAPE.search(text)) and (
        why := _why_unsafe(value)
    ):
        raise error(f"{shown} {why}.")
    if wanted is not None and not isinstance(value, wanted):
        word = "an object" if wanted is dict else "a list" if wanted is list else wanted.__name__
        raise error(f"{shown} contains a {type(value).__name__}; expected {word}. Download or write it again.")
    return value


def json_lines(path: str | os.PathLike[str], error: type[Exception] = Unreadable) -> Iterator[tuple[int, Any]]:
    """Yield (number from 1, object) of each line that is not blank, in a file of JSON lines that a program appends to.

    An incomplete last line, as a kill leaves it, is left out. Raises `error`, with the number, for any other line that
    is not an object.
    """
    lines = read_text(path, error, 4 * MAX_BYTES).split("\n")
    for number, line in enumerate(lines, 1):
        if line.strip():
            try:
                yield number, parse_json(line, f"{path}:{number}", error)
            except error:
                if number == len(lines):
                    return
                raise


def replace_nonfinite(value: Any) -> Any:
    """Return the value with None in place of NaN and infinities, which JSON cannot represent."""
    if isinstance(value, Mapping):
        return {key: replace_nonfinite(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [replace_nonfinite(entry) for entry in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


class _TooManyDigits(Exception):
    """A whole number with too many digits; its argument is their number."""


def _parse_int(digits: str) -> int:
    if len(digits) > MAX_DIGITS:
        raise _TooManyDigits(len(digits.lstrip("-")))
    return int(digits)


def _why_unsafe(root: object) -> str | None:
    """Return why JSON would crash code that walks through it, or None. Walks by level, not by recursion."""
    level, depth = [root], 0
    while level:
        next_level: list[object] = []
        for value in level:
            if isinstance(value, dict):
                next_level += value
                next_level += value.values()
            elif isinstance(value, list):
                next_level += value
            elif isinstance(value, str) and not value.isascii():
                try:
                    value.encode()
                except UnicodeEncodeError as error:
                    return f"holds half a character (a lone \\u{ord(value[error.start]):04x}), which is not text"
        depth += any(isinstance(value, dict | list) for value in level)
        if depth > MAX_DEPTH:
            return f"nests brackets deeper than {MAX_DEPTH}; no file of this kind does"
        level = next_level
    return None


class ValueCheck(NamedTuple):
    """A check of a single value, and its description."""

    is_valid: Callable[[Any], bool]
    words: str


TEXT = ValueCheck(lambda value: isinstance(value, str), "text")
FLAG = ValueCheck(lambda value: isinstance(value, bool), "true or false")
COUNT = ValueCheck(lambda value: type(value) is int and 0 <= value < 1 << 62, "a whole number from 0")
NUMBER = ValueCheck(lambda value: type(value) in (int, float), "a number")
FINITE = ValueCheck(lambda value: type(value) in (int, float) and math.isfinite(value), "a finite number")


def check_schema(value: Any, schema: Any, where: object, error: type[Exception] = Unreadable, prefix: str = "") -> None:
    """Check a JSON value against a schema, so that its readers need no checks. Raises `error` with the key.

    A schema is a `ValueCheck`; a list with one schema for all entries; or a dict of key -> schema, in which a key
    "name!" is required and the key ... applies to all other keys (without it they are not checked). None accepts any
    value. A key that is not required may be null.
    """
    if isinstance(schema, ValueCheck):
        is_valid, words, inner = schema.is_valid(value), schema.words, []
    elif isinstance(schema, list):
        is_valid, words = isinstance(value, list), "a list"
        inner = [(str(i), entry, schema[0]) for i, entry in enumerate(value)] if is_valid else []
    else:
        is_valid, words = isinstance(value, dict), "an object"
        wanted = {
            key.rstrip("!") if isinstance(key, str) else key: inner_schema for key, inner_schema in schema.items()
        }
        inner = [(key, entry, wanted.get(key, wanted.get(...))) for key, entry in value.items()] if is_valid else []
        for key in [key[:-1] for key in schema if key is not ... and key.endswith("!")] if is_valid else []:
            if value.get(key) is None:
                raise error(
                    f"{printable(where)} has no key {prefix + key!r}; it was changed, or Octavo did not write it."
                )
    if not is_valid:
        shown = printable(json.dumps(value)[:80])
        raise error(f"{printable(where)}: {prefix.rstrip('.') or 'it'} is {shown}; expected {words}.")
    for key, entry, entry_schema in inner:
        if entry_schema is not None and entry is not None:
            check_schema(entry, entry_schema, where, error, f"{prefix}{printable(key)}.")


def link_target_outside(path: Path, folder: Path) -> Path | None:
    """Return the target of a path in a folder if links lead out of the folder, or None if it stays inside.

    A snapshot in the Hugging Face hub's cache consists of links into the blobs of the same repository
    (`REPO/snapshots/REVISION/config.json -> REPO/blobs/HASH`), which count as inside.
    """
    target, root = path.resolve(), folder.resolve()
    roots = [root, *([root.parent.parent / "blobs"] if root.parent.name == "snapshots" else [])]
    return None if any(target.is_relative_to(allowed) for allowed in roots) else target
