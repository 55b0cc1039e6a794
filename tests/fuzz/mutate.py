"""Seeded damage: to bytes, to JSON and to files in a folder. Pure functions of a generator, except `replace_file`."""

from __future__ import annotations

import copy
import json
import os
import random
import shutil
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

#: replacement values: of other types, at the limits of their type, and unexpected ones
STRANGE: tuple[Any, ...] = (
    None, True, False, 0, -1, 1, 2**31, 2**63, 10**30, -(2**63), 0.5, 1e308, float("nan"), float("inf"), "", " ", "x",
    "../../etc/passwd", "a\x00b", "\x1b[2J", "é" * 50, "9" * 400, [], {}, [[]], [None], [0], {"": None}, ["a", 1, {}],
)  # fmt: skip


def flip(rng: random.Random, raw: bytes) -> bytes:
    """Flip one bit."""
    if not raw:
        return raw
    at = rng.randrange(len(raw))
    return raw[:at] + bytes([raw[at] ^ (1 << rng.randrange(8))]) + raw[at + 1 :]


def truncate(rng: random.Random, raw: bytes) -> bytes:
    return raw[: rng.randrange(len(raw))] if raw else raw


def insert(rng: random.Random, raw: bytes) -> bytes:
    """Insert up to eight bytes, random ones or ones with a meaning for readers."""
    at = rng.randrange(len(raw) + 1)
    more = rng.choice(
        (rng.randbytes(rng.randrange(1, 9)), b"\x00", b"\xff\xfe", b'"', b"{", b"[" * 8, b"\\ud800", b"{%")
    )
    return raw[:at] + more + raw[at:]


def overwrite(rng: random.Random, raw: bytes) -> bytes:
    """Overwrite up to 64 bytes with random bytes or zeros."""
    if not raw:
        return raw
    at = rng.randrange(len(raw))
    count = min(rng.randrange(1, 65), len(raw) - at)
    return raw[:at] + (bytes(count) if rng.random() < 0.5 else rng.randbytes(count)) + raw[at + count :]


def remove(rng: random.Random, raw: bytes) -> bytes:
    """Remove up to 64 bytes."""
    at = rng.randrange(len(raw) + 1)
    return raw[:at] + raw[at + rng.randrange(1, 65) :]


BYTES = (flip, flip, truncate, insert, overwrite, remove)


def damage(rng: random.Random, raw: bytes) -> bytes:
    """Apply one or two of the above."""
    for _ in range(rng.choice((1, 1, 1, 2))):
        raw = rng.choice(BYTES)(rng, raw)
    return raw


def places(tree: Any) -> list[tuple[Any, Any]]:
    """Return (container, key or index) of every value in a tree of dicts and lists."""
    found: list[tuple[Any, Any]] = []
    level = [tree]
    while level:
        here = level.pop()
        keys = list(here) if isinstance(here, dict) else range(len(here)) if isinstance(here, list) else ()
        for key in keys:
            found.append((here, key))
            level.append(here[key])
    return found


def strange(rng: random.Random, tree: Any) -> Any:
    """Copy JSON values, with one of them changed, dropped, duplicated, renamed, or nested in brackets."""
    tree = copy.deepcopy(tree)
    there = places(tree)
    if not there:
        return rng.choice(STRANGE)
    holder, key = rng.choice(there)
    kind = rng.randrange(10)
    if kind < 6:
        holder[key] = copy.deepcopy(rng.choice(STRANGE))
    elif kind == 6:
        del holder[key]
    elif kind == 7:
        other_holder, other_key = rng.choice(there)
        holder[key] = copy.deepcopy(other_holder[other_key])
    elif kind == 8 and isinstance(holder, dict):
        holder[str(rng.choice(STRANGE))[:40]] = holder.pop(key)
    else:
        for _ in range(rng.choice((1, 3, 70))):
            holder[key] = [holder[key]]
    return tree


def damage_json(rng: random.Random, text: str) -> str:
    """Damage a value in JSON text, which stays valid JSON."""
    return json.dumps(strange(rng, json.loads(text)))


#: replacements of a file; "device" is a file without an end
PLACES = ("pipe", "device", "folder", "socket", "empty", "broken link", "loop", "outside", "missing")


def replace_file(rng: random.Random, file: Path, what: str | None = None) -> str:
    """Replace a file by something else; returns its name."""
    what = what or rng.choice(PLACES)
    file.unlink()
    if what == "pipe":
        os.mkfifo(file)
    elif what == "device":
        file.symlink_to("/dev/zero")
    elif what == "folder":
        file.mkdir()
    elif what == "socket":
        here = os.open(file.parent, os.O_RDONLY)  # a socket's path is short; its folder's need not be
        try:
            with socket.socket(socket.AF_UNIX) as bound:
                bound.bind(f"/proc/self/fd/{here}/{file.name}")
        finally:
            os.close(here)
    elif what == "empty":
        file.touch()
    elif what == "broken link":
        file.symlink_to("nowhere")
    elif what == "loop":
        file.symlink_to(file.name)
    elif what == "outside":
        file.symlink_to("/etc/passwd")
    return what


def damage_file(rng: random.Random, folder: Path, fields: Callable[[Path, bytes, float], str | None]) -> str:
    """Damage one file of a folder; returns what was done: a replacement, the change of ``fields(file, its bytes, a
    number in [0.15, 1))`` for files of this kind, or, if that returns None, damaged bytes."""
    file = rng.choice(sorted(p for p in folder.iterdir() if p.is_file()))
    raw = file.read_bytes()
    how = rng.random()
    if how < 0.15:
        return f"{file.name}: {replace_file(rng, file)}"
    if (done := fields(file, raw, how)) is None:
        write(file, damage(rng, raw))
    return f"{file.name}: {done or 'bytes'}"


def copy_tree(source: Path, target: Path) -> Path:
    """Copy a folder with hard links: damage must replace files (`write`), never write into them."""
    shutil.rmtree(target, ignore_errors=True)
    return Path(shutil.copytree(source, target, copy_function=os.link, symlinks=True))


def write(file: Path, raw: bytes) -> None:
    """Replace a file, or anything else at its path."""
    file.unlink(missing_ok=True)
    file.write_bytes(raw)
