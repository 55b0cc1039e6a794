"""Which tensors vLLM and SGLang read from the files of a folder, and which of two with the same name they keep.

vLLM 0.32, `_prepare_weights`, `filter_duplicate_safetensors_files` and `safetensors_weights_iterator`: with an index,
the files that it names, whole; without one, every *.safetensors. Files are read in the natural order of their names,
and a later tensor overwrites an earlier one.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, field
from pathlib import Path

from octavo.checkpoint.verify.findings import Findings
from octavo.checkpoint.verify.headers import FileTensor, Headers, read_file
from octavo.models.errors import ModelError
from octavo.models.folder.folder import weight_map

_INDEX = "model.safetensors.index.json"


@dataclass
class ServerFiles:
    """The tensors that a server reads: the last one of each name.

    others    the names of files that only servers read
    problems  a sentence for each tensor that is loaded instead of the right one
    """

    tensors: dict[str, FileTensor]
    others: tuple[str, ...] = ()
    problems: list[str] = field(default_factory=list)


def read_server_files(server: str, folder: Path, headers: Headers, quick: bool) -> ServerFiles:
    """Return what servers read from a folder.

    Args:
        server: "vLLM" or "SGLang".
        headers: what transformers reads.
        quick: tensors with the same name are taken for different ones instead of comparing their values.
    """
    try:
        placed = weight_map(folder / _INDEX) if os.path.lexists(folder / _INDEX) else None
    except (ModelError, OSError):
        return ServerFiles(headers.tensors)  # refused, which another finding says
    names = set(placed.values()) if placed else {path.name for path in folder.glob("*.safetensors")}
    mistral = {path.name for path in folder.glob("consolidated*.safetensors")}
    if mistral and server == "vLLM":  # load_format auto takes it for a folder in Mistral's own format
        names = mistral
    paths = [folder / name for name in sorted(names, key=_natural_order)]
    if {path.name for path in headers.files} == names and not headers.doubles:
        return ServerFiles(headers.tensors)
    files = ServerFiles({}, tuple(sorted(names - {path.name for path in headers.files})))
    for path in paths:
        if not path.is_file():  # missing, or not a regular file: another finding says so
            continue
        one = Headers(folder)
        read_file(one, path, Findings())
        for name, tensor in one.tensors.items():
            files.tensors[name] = tensor
    for name, tensor in files.tensors.items():
        right = (placed or {}).get(name) or (headers.tensors[name].file if name in headers.tensors else tensor.file)
        if tensor.file != right and (other := _find(folder / right, name)) and not _is_equal(tensor, other, quick):
            reason = f"of two tensors with the same name the one in the later file is used, {tensor.file}"
            files.problems.append(reason)
    return files


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
