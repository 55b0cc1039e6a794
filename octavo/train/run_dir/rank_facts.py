"""Settings that must be equal on all ranks, as key -> value, compared before the first step.

Ranks that differ would silently train a mixture of both (each updates its shard with its own learning rate), or wait
for each other until `run.timeout`. The values are everything that determines a run's numbers or its collectives: the
resolved configuration, the files of data and model, rewards, versions, and environment variables that change
arithmetic. Files are identified by name, size, and a digest of their first and last MiB (for safetensors the whole
header), so a model of a hundred shards takes a fraction of a second; a difference only in between is not detected.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import torch

import octavo
from octavo.base import accelerator, encryption, env_vars, environment
from octavo.config import Config
from octavo.data.storage.cache import files_of
from octavo.models.folder.folder import parts_of
from octavo.train.run_dir import input_fingerprints

#: Keys in which ranks may differ: paths on a host, what only rank 0 writes, and settings that change no numbers. Where
#: the content of a path determines numbers, that is compared instead (:data:`PLACES`).
LOCAL = (
    *("run.dir", "run.threads", "run.timeout", "run.tensorboard", "run.trackers*", "run.keep"),
    *("data.cache", "data.workers", "data.*.images", "data.*.fetch_gb", "rl.reward_timeout", "rl.show"),
    *("package.accelerate", "package.filelock", "package.fsspec", "package.huggingface-hub", "package.matplotlib"),
    *("package.rich", "package.scipy", "package.tensorboard", "package.torchao", "package.trl", "package.vllm"),
)

#: Keys whose value is a path on a host; the files there are compared.
PLACES = (
    *("model.path", "data.train.*.path", "data.eval.*.path", "rl.rewards.*.reward"),
    *("fp8.plan", "lora.adapter", "run.resume", "run.fork", "run.start_from"),
)

_END = 1 << 20  # bytes read at either end of a file
_ALL = 1 << 27  # bytes read of all files together: with more than 64 files, fewer of each
_HEADER = 1 << 26  # largest accepted header of a safetensors file, in bytes
_WEIGHTS = ("*.safetensors", "*.bin", "*.index.json")
_INSIDE = 4096  # most files compared of a data folder without rows directly in it (one of `datasets`)


def rank_facts(cfg: Config, fingerprints: Mapping[str, str], epochs: float | None = None) -> dict[str, str]:
    """Key -> value of everything that must be equal on all ranks. ``fingerprints``: digests of further inputs of the
    phase (:meth:`octavo.train.setup.phase.Phase.fingerprints`). ``epochs``: those from which `train.steps` was
    computed, if any."""
    settings = dict(_flat(cfg.model_dump(mode="json")))
    if epochs is not None:
        counted = f"train.steps (counted from train.epochs: {epochs:g}, with the token counts in data.cache)"
        settings[counted] = settings.pop("train.steps")
    places = {key: value for key, value in settings.items() if _any(key, PLACES) and isinstance(value, str)}
    facts = {key: json.dumps(value) for key, value in settings.items() if key not in places}
    facts |= _of_files(dict(_files(places)))
    # A value that is no path here (a built-in reward, a name of the hub, a URL, a keyword) is compared itself.
    facts |= {key: json.dumps(_name(key, value)) for key, value in places.items() if not os.path.exists(value)}
    facts |= {f"file of {name}": digest[:16] for name, digest in fingerprints.items()}
    facts |= _versions()
    facts["device"] = accelerator.here().type
    if cfg.run.encrypt:  # otherwise the first save would fail, after the steps before it
        facts["id of the key"] = encryption.find().id.hex()
    facts |= {f"variable {name}": os.environ[name] for name in env_vars.VARIABLES["numbers"] if name in os.environ}
    return {key: value if len(value) <= 80 else f"{value[:60]}... ({_digest(value.encode())})" for key, value in
            facts.items() if not _any(key, LOCAL)}  # fmt: skip


def _flat(value: Any, key: str = "") -> Iterator[tuple[str, Any]]:
    """The leaves of a configuration by dotted key; items of lists by index."""
    items = value.items() if isinstance(value, Mapping) else enumerate(value) if isinstance(value, list) else None
    if items is None or not value:
        yield key, value
        return
    for name, inner in items:
        yield from _flat(inner, f"{key}.{name}" if key else str(name))


def _any(key: str, globs: tuple[str, ...]) -> bool:
    return any(fnmatchcase(key, glob) for glob in globs)


def _name(key: str, value: str) -> str:
    """The value of a path that is compared: of a reward FILE:FUNCTION only the function, since the phase has a digest
    of the file."""
    return Path(value).name if key.startswith("rl.rewards.") else value


def _files(places: Mapping[str, str]) -> Iterator[tuple[str, Path]]:
    """(key and name, file) for every file at the paths of a configuration that determines numbers."""
    for key, value in places.items():
        path = Path(value)
        if path.is_file():
            yield f"{key}: {path.name}", path
        elif path.is_dir():
            yield from ((f"{key}: {file.relative_to(path)}", file) for file in _inside(key, path))


def _inside(key: str, folder: Path) -> list[Path]:
    if key == "model.path" or key.startswith("rl.rewards."):
        homes = (folder, *(folder / part for part in parts_of(folder)))
        weights = [file for home in homes for glob in _WEIGHTS for file in home.glob(glob)]
        return sorted({*(folder / name for name in input_fingerprints.files_of_model(folder)), *weights})
    if key == "lora.adapter":
        return sorted(file for file in folder.glob("adapter_*") if file.is_file())
    if key.startswith("run."):
        return [file for file in [folder / "state.json"] if file.is_file()]
    rows = files_of(folder)
    # In a folder of `datasets` only that library's own lists name the files with rows.
    return rows or sorted(file for file in folder.rglob("*") if file.is_file())[:_INSIDE]


def _of_files(files: Mapping[str, Path]) -> dict[str, str]:
    end = max(1 << 12, min(_END, _ALL // max(1, 2 * len(files))))
    with ThreadPoolExecutor(8, "facts") as threads:
        prints = threads.map(lambda file: _print(file, end), files.values())
        return dict(zip(files, prints, strict=True))


def _print(file: Path, end: int) -> str:
    """Size and digest of a file's two ends as text; for one that cannot be read, the reason."""
    try:
        with file.open("rb") as opened:
            size = os.fstat(opened.fileno()).st_size
            first = opened.read(end)
            if file.suffix == ".safetensors" and len(first) >= 8:
                header = 8 + min(int.from_bytes(first[:8], "little"), _HEADER)
                first += opened.read(max(0, header - len(first)))
            opened.seek(max(len(first), size - end))
            return f"{size} bytes ({_digest(first + opened.read(end))})"
    except OSError as error:
        return f"not read: {error.strerror}"


def _digest(raw: bytes) -> str:
    return hashlib.sha256(raw).hexdigest()[:12]


def _versions() -> dict[str, str]:
    """Versions of Python, of Octavo with a digest of its source, and of every package that it can use."""
    package = Path(octavo.__file__).parent
    source = hashlib.sha256()
    for file in sorted(package.rglob("*.py")):
        source.update(str(file.relative_to(package)).encode() + b"\0" + file.read_bytes())
    packages = {f"package.{name}": number for name, number in environment.versions().items()}
    return {
        "python": ".".join(platform.python_version_tuple()[:2]),
        "octavo": f"{octavo.__version__} (source {source.hexdigest()[:12]})",
        **packages,
        "package.torch": torch.__version__,
    }
