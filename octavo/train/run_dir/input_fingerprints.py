"""What the files held that decide a run's numbers beside its weights: its data, and the configuration, tokenizer, chat
template and processor of its model folder. A resume notices when they hold something else."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from octavo.checkpoint import compat
from octavo.config import Config
from octavo.config.sections.text_types import is_url
from octavo.data.file_digests import Content, content_of, digests
from octavo.data.storage.cache import Say, default_folder, files_of, quiet
from octavo.data.storage.remote import fingerprint, local_files
from octavo.models.folder.folder import COMPANIONS, parts_of
from octavo.train.errors import TrainError

#: What of a model folder decides a run's numbers, weights aside: those of a checkpoint, and the fingerprint of a frozen
#: base, stand for themselves. generation_config.json decides none: it may change, as answers are greedy without it;
#: what it says of where answers end is a print of phase rl.
_MODEL = ("config.json", *COMPANIONS, "*.model", "additional_chat_templates/*")
_NO_MATTER = "generation_config.json"

Prints = Mapping[str, Mapping[str, Any]]
"""``data``, ``model``: path or name -> {"size", "sha256", "whole"}; ``phase``: name -> digest of what else decides
numbers."""


def fingerprints(cfg: Config, say: Say = quiet) -> dict[str, dict[str, Any]]:
    """{"data": the files of data.train and data.eval by path, "model": those of the model folder by name}, each file
    as {"size": bytes, "sha256": of its first 64 MiB, "whole": of all}; a data folder likewise, of its
    files that hold rows. Digests of data files are taken once and noted in the cache (:mod:`octavo.data.file_digests`).

    What is not there is left out: who reads it refuses it with better words. Images are not looked at. Files at a URL
    are known by their sizes and by what their server says of them.
    """
    paths = dict.fromkeys(source.path for source in [*cfg.data.train, *cfg.data.eval])
    folder = default_folder() if cfg.data.cache is None else Path(cfg.data.cache)
    here = [path for path in paths if Path(path).is_file() or Path(path).is_dir()]
    of_data = {path: _of_data(Path(path), folder, say) for path in here}
    for url in filter(is_url, paths):
        of_data[url] = fingerprint(url)
        if files := local_files(url):
            of_data[url]["whole"] = _digest([one.sha256 for one in digests(files, folder, say)])
    return {"data": of_data, "model": of_folder(Path(cfg.model.path))}


def of_folder(folder: Path) -> dict[str, Any]:
    """Name -> fingerprint of the files of a model folder that decide a run's numbers, weights aside."""
    return {name: _printed(content_of(folder / name)) for name in files_of_model(folder)}


def files_of_model(folder: Path) -> list[str]:
    """The files of a model folder that decide a run's numbers, weights aside, by their names in it."""
    homes = (folder, *(folder / part for part in parts_of(folder)))
    every = (file for home in homes for pattern in _MODEL for file in home.glob(pattern))
    return sorted({str(file.relative_to(folder)) for file in every if file.is_file() and file.name != _NO_MATTER})


def same(saved: Prints, now: Prints, where: Path, folder: str) -> None:
    """Refuse to continue `where` on changed data, or beside a changed model `folder`. Raises TrainError naming the
    files. A data file that is not in both is no matter."""
    _same_data(saved.get("data", {}), now["data"], where)
    same_folder(saved.get("model"), now["model"], where, folder)
    before, current = saved.get("phase", {}), now.get("phase", {})
    if changed := [name for name in {**before, **current} if before.get(name) != current.get(name)]:
        raise TrainError(
            f"{where} was made with another {', '.join(changed)}: its contents are not what they were. A resumed run "
            "learns from the same; put the former back, or start a new run in another run.dir"
        )


def same_folder(saved: Mapping[str, Any] | None, now: Mapping[str, Any], where: Path, folder: str) -> None:
    """Refuse to go on from `where` beside a model folder of which a file came, went or changed. None: a checkpoint that
    says nothing of it. Raises TrainError naming the files."""
    if saved is None:
        return
    changed = [name for name in {**saved, **now} if compat.prints_differ(saved.get(name), now.get(name))]
    if not changed:
        return
    how = [
        f"{name} {'is gone' if name not in now else 'is new' if name not in saved else 'holds something else'}"
        for name in changed
    ]
    raise TrainError(
        f"{folder} is not the folder that {where} was made with: {', '.join(how)}. "
        "With another configuration, tokenizer, chat template or processor the same rows are other numbers to the "
        "model; put the former files back, or start a new run in another run.dir"
    )


def _same_data(saved: Mapping[str, Any], now: Mapping[str, Any], where: Path) -> None:
    changed = [path for path, value in saved.items() if path in now and compat.prints_differ(now[path], value)]
    if changed:
        sizes = "; ".join(f"{path} had {saved[path]['size']} bytes, has {now[path]['size']} now" for path in changed)
        raise TrainError(
            f"{where} was made with other data: {sizes}, and other contents. A resumed run sees the same rows in the "
            "same order, which changed files cannot give; put the former files back, or start a new run in another "
            "run.dir"
        )


def _of_data(path: Path, folder: Path, say: Say = quiet) -> dict[str, Any]:
    files = [path] if path.is_file() else files_of(path)
    every = {file.name: one for file, one in zip(files, digests(files, folder, say), strict=True)}
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
