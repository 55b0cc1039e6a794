"""Fingerprints of the files that, besides weights, determine a run's numbers: its data, and the configuration,
tokenizer, chat template and processor of its model folder. A resumed run checks that they have not changed."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from octavo.checkpoint import compat
from octavo.config import Config
from octavo.config.sections.text_types import is_url
from octavo.data.file_digests import Content, compute_digests, digest_file
from octavo.data.storage.cache import Log, default_folder, list_row_files, no_log
from octavo.data.storage.remote import fingerprint, local_files
from octavo.models.folder.folder import COMPANIONS, parts_of
from octavo.train.errors import TrainError

#: Files of a model folder that determine a run's numbers, except weights, which a checkpoint contains and the
#: fingerprint of a frozen base covers. generation_config.json may change, because evaluation is greedy without it;
#: phase rl has a fingerprint of the end tokens that it names.
_MODEL = ("config.json", *COMPANIONS, "*.model", "additional_chat_templates/*")
_NO_MATTER = "generation_config.json"

Prints = Mapping[str, Mapping[str, Any]]
"""``data``, ``model``: path or name -> {"size", "sha256", "whole"}; ``phase``: name -> digest of further inputs that
determine the run's numbers."""


def fingerprints(cfg: Config, log: Log = no_log) -> dict[str, dict[str, Any]]:
    """{"data": the files of data.train and data.eval by path, "model": those of the model folder by name}, each file
    as {"size": bytes, "sha256": of its first 64 MiB, "whole": of all}; a data folder likewise, over its files with
    rows. Digests of data files are computed once and cached (:mod:`octavo.data.file_digests`).

    Missing files are left out: the code that reads them has better error messages. Images are not included. Files at a
    URL are identified by their sizes and their server's metadata.
    """
    paths = dict.fromkeys(source.path for source in [*cfg.data.train, *cfg.data.eval])
    folder = default_folder() if cfg.data.cache is None else Path(cfg.data.cache)
    here = [path for path in paths if Path(path).is_file() or Path(path).is_dir()]
    of_data = {path: _of_data(Path(path), folder, log) for path in here}
    for url in filter(is_url, paths):
        of_data[url] = fingerprint(url)
        if files := local_files(url):
            of_data[url]["whole"] = _digest([one.sha256 for one in compute_digests(files, folder, log)])
    return {"data": of_data, "model": of_folder(Path(cfg.model.path))}


def of_folder(folder: Path) -> dict[str, Any]:
    """Name -> fingerprint of the files of a model folder that determine a run's numbers, except weights."""
    return {name: _printed(digest_file(folder / name)) for name in files_of_model(folder)}


def files_of_model(folder: Path) -> list[str]:
    """The names of the files of a model folder that determine a run's numbers, except weights."""
    homes = (folder, *(folder / part for part in parts_of(folder)))
    every = (file for home in homes for pattern in _MODEL for file in home.glob(pattern))
    return sorted({str(file.relative_to(folder)) for file in every if file.is_file() and file.name != _NO_MATTER})


def same(saved: Prints, now: Prints, where: Path, folder: str) -> None:
    """Refuse to continue `where` on changed data or with a changed model `folder`. Raises TrainError naming the files.
    A data file that is not in both is ignored."""
    _same_data(saved.get("data", {}), now["data"], where)
    same_folder(saved.get("model"), now["model"], where, folder)
    before, current = saved.get("phase", {}), now.get("phase", {})
    if changed := [name for name in {**before, **current} if before.get(name) != current.get(name)]:
        raise TrainError(
            f"{where} was made with another {', '.join(changed)}: its contents have changed. A resumed run must learn "
            "from the same; restore the former contents, or start a new run in another run.dir"
        )


def same_folder(saved: Mapping[str, Any] | None, now: Mapping[str, Any], where: Path, folder: str) -> None:
    """Refuse to continue from `where` with a model folder in which a file was added, removed or changed. None: a
    checkpoint without fingerprints of it. Raises TrainError naming the files."""
    if saved is None:
        return
    changed = [name for name in {**saved, **now} if compat.fingerprints_differ(saved.get(name), now.get(name))]
    if not changed:
        return
    how = [
        f"{name} {'is gone' if name not in now else 'is new' if name not in saved else 'holds something else'}"
        for name in changed
    ]
    raise TrainError(
        f"{folder} is not the folder that {where} was made with: {', '.join(how)}. "
        "With another configuration, tokenizer, chat template or processor the same rows become different inputs of "
        "the model; restore the former files, or start a new run in another run.dir"
    )


def _same_data(saved: Mapping[str, Any], now: Mapping[str, Any], where: Path) -> None:
    changed = [path for path, value in saved.items() if path in now and compat.fingerprints_differ(now[path], value)]
    if changed:
        sizes = "; ".join(f"{path} had {saved[path]['size']} bytes, has {now[path]['size']} now" for path in changed)
        raise TrainError(
            f"{where} was made with other data: {sizes}, and other contents. A resumed run sees the same rows in the "
            "same order, which changed files cannot give; restore the former files, or start a new run in another "
            "run.dir"
        )


def _of_data(path: Path, folder: Path, log: Log = no_log) -> dict[str, Any]:
    files = [path] if path.is_file() else list_row_files(path)
    every = {file.name: one for file, one in zip(files, compute_digests(files, folder, log), strict=True)}
    if path.is_file():
        return _printed(every[path.name])
    heads = {name: {"size": one.size, "sha256": one.head} for name, one in every.items()}
    return {
        "size": sum(one.size for one in every.values()),
        "sha256": _digest(heads),
        "whole": _digest({name: one.sha256 for name, one in every.items()}),
    }


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value).encode("utf-8", "surrogatepass")).hexdigest()


def _printed(content: Content) -> dict[str, Any]:
    return {"size": content.size, "sha256": content.head, "whole": content.sha256}
