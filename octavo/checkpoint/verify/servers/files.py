"""Which tensors vLLM and SGLang read from the files of a folder, and which of two with the same name they keep.

vLLM 0.32, `_prepare_weights`, `filter_duplicate_safetensors_files` and `safetensors_weights_iterator`: with an index,
the files that it names, whole, and all of them must exist; without one, every *.safetensors except hidden ones. Files
are read in the natural order of their names, and a later tensor overwrites an earlier one. Two other rules:

    consolidated  if any file is named consolidated*.safetensors, in a subfolder too, the folder counts as one in
                  Mistral's own format: only such files are read, by consolidated.safetensors.index.json
    tied head     `checkpoint_has_lm_head` reads the header of every *.safetensors, hidden and unindexed ones as well
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, field
from fnmatch import fnmatch
from pathlib import Path
from typing import NamedTuple

from octavo.base import safe_read
from octavo.checkpoint.verify.findings import GARBAGE, REFUSES, Findings
from octavo.checkpoint.verify.headers import FileTensor, Headers, read_file
from octavo.models.errors import ModelError
from octavo.models.folder.folder import weight_map

_INDEX = "model.safetensors.index.json"
_CONSOLIDATED, _CONSOLIDATED_INDEX = "consolidated*.safetensors", "consolidated.safetensors.index.json"
_MISTRAL_NAME = re.compile(r"layers\.\d+\.(attention|feed_forward)\.w\w+\.|tok_embeddings\.")


class FileProblem(NamedTuple):
    """A verdict that follows from the choice of files, its reason, and the fix."""

    verdict: str
    reason: str
    fix: str = ""


@dataclass
class ServerFiles:
    """The tensors that a server reads: the last one of each name.

    others    the names of files that only servers read
    problems  of the choice of files
    only      a consolidated file, if it and others named like it are read instead of the files of the model
    head      (file, tensor) with a name that unties a tied head, or None
    """

    tensors: dict[str, FileTensor]
    others: tuple[str, ...] = ()
    problems: list[FileProblem] = field(default_factory=list)
    only: str = ""
    head: tuple[str, str] | None = None

    @property
    def in_mistral_format(self) -> bool:
        """Whether the tensors have the names of Mistral's own format, which vLLM translates."""
        return any(_MISTRAL_NAME.match(name) for name in self.tensors)


def read_server_files(server: str, folder: Path, headers: Headers, quick: bool, tied: bool) -> ServerFiles:
    """Return what servers read from a folder.

    Args:
        server: "vLLM" or "SGLang".
        headers: what transformers reads.
        quick: tensors with the same name are taken for different ones instead of comparing their values.
        tied: whether config.json ties the output projection to the embeddings.
    """
    files = _read_chosen_files(server, folder, headers, quick)
    if tied and server == "vLLM":
        _find_head(folder, headers, files)
    return files


def _read_chosen_files(server: str, folder: Path, headers: Headers, quick: bool) -> ServerFiles:
    files = ServerFiles({})
    # glob.glob of the loaders leaves out hidden files, and list_filtered_repo_files looks into subfolders.
    names = {path.name for path in folder.glob("*.safetensors") if not path.name.startswith(".")}
    consolidated = [path for path in folder.rglob(_CONSOLIDATED) if path.is_file()] if server == "vLLM" else []
    index = _CONSOLIDATED_INDEX if consolidated else _INDEX
    if consolidated:
        names = {name for name in names if fnmatch(name, _CONSOLIDATED)}
        if not names:
            where = str(consolidated[0].relative_to(folder))
            files.problems.append(
                FileProblem(REFUSES, f"{where} makes it look only for such files in the folder", f"move {where}")
            )
    try:
        placed = weight_map(folder / index) if os.path.lexists(folder / index) else None
    except (ModelError, OSError):
        if consolidated:
            files.problems.append(FileProblem(REFUSES, f"{index} cannot be read", f"delete {index}"))
            return files
        return ServerFiles(headers.tensors)  # refused, which another finding says
    if placed is not None:
        _check_index(server, index, names, set(placed.values()), files)
        names &= set(placed.values())
    read = {path.name for path in headers.files}
    if read == names and not headers.doubles:
        files.tensors = headers.tensors
        return files
    files.only = min(names, default="") if consolidated else ""
    files.others = tuple(sorted(names - read))
    for path in sorted((folder / name for name in names), key=lambda path: _natural_order(path.name)):
        if not path.is_file():  # not a regular file: another finding says so
            continue
        one = Headers(folder)
        read_file(one, path, Findings())
        files.tensors |= one.tensors
    _compare_doubles(folder, headers, placed or {}, files, quick)
    return files


def _check_index(server: str, index: str, names: set[str], placed: set[str], files: ServerFiles) -> None:
    missing = sorted(placed - names)
    if missing and (server == "vLLM" or not placed & names):
        shown = ", ".join(missing[:2]) + (f" and {len(missing) - 2} more" if len(missing) > 2 else "")
        reason = f"{index} names files that do not exist: {shown}"
        files.problems.append(FileProblem(REFUSES, reason, f"download them, or delete {index} if it is an old one"))


def _compare_doubles(folder: Path, headers: Headers, placed: dict[str, str], files: ServerFiles, quick: bool) -> None:
    """Add a problem if a tensor is read from another file than the one that it belongs to, with other values."""
    for name, tensor in files.tensors.items():
        right = headers.tensors[name].file if name in headers.tensors else tensor.file
        right = right if files.only else placed.get(name, right)
        if tensor.file == right or not (other := _find(folder / right, name)) or _is_equal(tensor, other, quick):
            continue
        if files.only:
            reason = f"{name!r} in it differs from the one in {right}"
        else:
            reason = f"of two tensors with the same name the one in the later file is used, {tensor.file}"
        files.problems.append(FileProblem(GARBAGE, reason))
        return


def _find_head(folder: Path, headers: Headers, files: ServerFiles) -> None:
    """Look for the name of a head in the headers of all files, as vLLM does if config.json ties the head."""
    read = {path.name for path in headers.files}
    for path in sorted(folder.glob("*.safetensors")):
        if not path.is_file():
            continue
        try:
            head = next((name for name in _header_names(path) if name.endswith("lm_head.weight")), None)
        except (safe_read.Unreadable, OSError, UnicodeDecodeError):
            if path.name not in read:  # other findings report damage of the files that are read
                reason = f"it reads the header of every *.safetensors of a tied model, and {path.name} has none"
                files.problems.append(FileProblem(REFUSES, reason, f"delete {path.name}"))
            continue
        if head is not None:
            files.head = files.head or (path.name, head)


def _header_names(path: Path) -> list[str]:
    """The names in a header, read as leniently as vLLM does. Raises Unreadable, OSError or UnicodeDecodeError."""
    with safe_read.open_file(path) as file:
        length = int.from_bytes(file.read(8), "little")
        if length > safe_read.size_of(file) - 8:
            raise safe_read.Unreadable(f"{path} declares a header of {length} bytes, which it does not have.")
        return list(safe_read.parse_json(file.read(length).decode(), path))


def _natural_order(name: str) -> list[tuple[int, str]]:
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", name)]


def _find(path: Path, name: str) -> FileTensor | None:
    headers = Headers(path.parent)
    if path.is_file():
        read_file(headers, path, Findings())
    return headers.tensors.get(name)


def _is_equal(one: FileTensor, other: FileTensor, quick: bool) -> bool:
    if (one.dtype, one.shape) != (other.dtype, other.shape) or quick:
        return False
    pieces = zip(one.rows(), other.rows(), strict=True)
    return all(a.equal(b) for (_, a), (_, b) in pieces)
