"""Fingerprints of the files, other than weights, that determine the numbers of a run: its data, and the configuration,
tokenizer, chat template and processor of its model folder. A resumed run checks that they have not changed."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from octavo.base.env_vars import cache_home
from octavo.checkpoint import compat
from octavo.config import Config
from octavo.config.sections.text_types import is_url, python_name
from octavo.data.file_digests import Content, compute_digests, digest_file
from octavo.data.storage.cache import Log, list_row_files, no_log
from octavo.data.storage.python_rows import digest_of
from octavo.data.storage.remote import fingerprint, local_files
from octavo.models.folder.folder import COMPANIONS, parts_of
from octavo.train.errors import TrainError

#: Files of a model folder that determine a run's numbers, except weights, which a checkpoint contains and the
#: fingerprint of a frozen base covers. generation_config.json may change, because evaluation is greedy without it;
#: phase rl has a fingerprint of the end tokens that it names.
_MODEL = ("config.json", *COMPANIONS, "*.model", "additional_chat_templates/*")
_EXCLUDED = "generation_config.json"

Fingerprints = Mapping[str, Mapping[str, Any]]
"""``data``, ``model``: path or name -> {"size", "sha256", "whole"}; ``phase``: name -> digest of further inputs that
determine the run's numbers."""


def fingerprints(cfg: Config, log: Log = no_log, with_urls: bool = True) -> dict[str, dict[str, Any]]:
    """Return {"data": files of data.train and data.eval by path, "model": files of the model folder by name}.

    Each file is {"size": bytes, "sha256": digest of the first 64 MiB, "whole": digest of the whole file}; a data folder
    has the same keys, computed over its files with rows. Digests of data files are cached
    (:mod:`octavo.data.file_digests`). Missing files are left out, because the code that reads them has better error
    messages. Image files are not included. Files at a URL are identified by their sizes and their server's metadata;
    ``with_urls`` False leaves them out.
    Rows of a program (`python:NAME`) have the same keys, computed over the rows and the images in them.
    """
    paths = dict.fromkeys(source.path for source in [*cfg.data.train, *cfg.data.eval])
    folder = cache_home() if cfg.data.cache is None else Path(cfg.data.cache)
    local_paths = [path for path in paths if Path(path).is_file() or Path(path).is_dir()]
    of_data = {path: _data_fingerprint(Path(path), folder, log) for path in local_paths}
    for url in filter(is_url, paths) if with_urls else ():
        of_data[url] = fingerprint(url)
        if files := local_files(url):
            of_data[url]["whole"] = _digest([content.sha256 for content in compute_digests(files, folder, log)])
    for path in paths:
        if python_name(path) is not None:
            rows = digest_of(path)
            of_data[path] = {"size": rows.size, "sha256": rows.sha256, "whole": rows.sha256}
    return {"data": of_data, "model": folder_fingerprints(Path(cfg.model.path))}


def folder_fingerprints(folder: Path) -> dict[str, Any]:
    """Return the fingerprints of the files of a model folder that determine a run's numbers, except weights, by
    name."""
    return {name: _file_fingerprint(digest_file(folder / name)) for name in model_files(folder)}


def model_files(folder: Path) -> list[str]:
    """Return the names of the files of a model folder that determine a run's numbers, except weights."""
    folders = (folder, *(folder / part for part in parts_of(folder)))
    matches = (file for parent in folders for pattern in _MODEL for file in parent.glob(pattern))
    return sorted({str(file.relative_to(folder)) for file in matches if file.is_file() and file.name != _EXCLUDED})


def check_same_inputs(saved: Fingerprints, now: Fingerprints, where: Path, folder: str) -> None:
    """Raise TrainError, with the names of the files, if data or files of the model `folder` have changed since the
    checkpoint `where`. A data file that is in only one of `saved` and `now` is ignored."""
    _check_same_data(saved.get("data", {}), now["data"], where)
    check_same_folder(saved.get("model"), now["model"], where, folder)
    before, current = saved.get("phase", {}), now.get("phase", {})
    if changed := [name for name in {**before, **current} if before.get(name) != current.get(name)]:
        raise TrainError(
            f"{where} was made with another {', '.join(changed)}: its contents have changed. A resumed run must use "
            "the same inputs; restore the previous contents, or start a new run in another run.dir"
        )


def check_same_folder(saved: Mapping[str, Any] | None, now: Mapping[str, Any], where: Path, folder: str) -> None:
    """Raise TrainError, with the names of the files, if a file of the model folder was added, removed or changed since
    the checkpoint `where`. ``saved`` is None for a checkpoint without these fingerprints."""
    if saved is None:
        return
    changed = [name for name in {**saved, **now} if compat.fingerprints_differ(saved.get(name), now.get(name))]
    if not changed:
        return
    how = [
        f"{name} {'is missing' if name not in now else 'is new' if name not in saved else 'has changed'}"
        for name in changed
    ]
    raise TrainError(
        f"{folder} is not the folder that {where} was made with: {', '.join(how)}. "
        "With another configuration, tokenizer, chat template or processor the same rows become different inputs of "
        "the model; restore the previous files, or start a new run in another run.dir"
    )


def _check_same_data(saved: Mapping[str, Any], now: Mapping[str, Any], where: Path) -> None:
    changed = [path for path, value in saved.items() if path in now and compat.fingerprints_differ(now[path], value)]
    if changed:
        sizes = "; ".join(f"{path} had {saved[path]['size']} bytes, has {now[path]['size']} now" for path in changed)
        of_program = all(python_name(path) is not None for path in changed)
        restore = "pass the rows of that time" if of_program else "restore the previous files"
        raise TrainError(
            f"{where} was made with different data: {sizes}, and the contents differ. A resumed run must read the same "
            f"rows in the same order; {restore}, or start a new run in another run.dir"
        )


def _data_fingerprint(path: Path, folder: Path, log: Log = no_log) -> dict[str, Any]:
    files = [path] if path.is_file() else list_row_files(path)
    # Text files may be in subfolders, other files are directly in the folder.
    names = [path.name] if path.is_file() else [str(file.relative_to(path)) for file in files]
    contents = dict(zip(names, compute_digests(files, folder, log), strict=True))
    if path.is_file():
        return _file_fingerprint(contents[path.name])
    heads = {name: {"size": content.size, "sha256": content.head} for name, content in contents.items()}
    return {
        "size": sum(content.size for content in contents.values()),
        "sha256": _digest(heads),
        "whole": _digest({name: content.sha256 for name, content in contents.items()}),
    }


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value).encode("utf-8", "surrogatepass")).hexdigest()


def _file_fingerprint(content: Content) -> dict[str, Any]:
    return {"size": content.size, "sha256": content.head, "whole": content.sha256}
