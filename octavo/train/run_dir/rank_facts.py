"""Settings that must be equal on all ranks, as key -> value, compared before the first step.

Ranks that differ would silently train a mixture of both (each updates its shard with its own learning rate), or wait
for each other until `run.timeout`. The values are everything that determines a run's numbers or its collectives: the
resolved configuration, the files of data and model, rewards, versions, and environment variables that change
arithmetic. Files are identified by name, size, and a digest of their first and last MiB (for safetensors the whole
header), so a model of a hundred shards takes a fraction of a second; a difference in the middle is not detected.
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

from octavo import version as octavo_version
from octavo.base import accelerator, encryption, env_vars, environment
from octavo.config import Config
from octavo.config.sections.text_types import python_name
from octavo.data.storage.cache import list_row_files
from octavo.data.storage.python_rows import digest_of
from octavo.models.folder.folder import parts_of
from octavo.train.run_dir import input_fingerprints

#: Keys in which ranks may differ: paths on a host, settings of files that only rank 0 writes, and settings that do not
#: change numbers. If the content of a path determines numbers, the content is compared instead (:data:`PATH_KEYS`).
LOCAL_KEYS = (
    # model.path has what the parts are composed to
    *("model.image_encoder*", "model.image_projector*", "model.foundation*"),
    "train.stages*",  # each stage is compared as it begins
    *("model.fp8_twin*", "run.dir", "run.threads", "run.timeout", "run.tensorboard", "run.trackers*", "run.keep"),
    *("data.cache", "data.workers", "data.*.images", "data.*.fetch_gb", "rl.reward_timeout", "rl.show"),
    *("package.accelerate", "package.filelock", "package.fsspec", "package.huggingface-hub", "package.matplotlib"),
    *("package.rich", "package.scipy", "package.tensorboard", "package.torchao", "package.trl", "package.vllm"),
)

#: Keys whose value is a path on a host; the files there are compared.
PATH_KEYS = (
    *("model.path", "data.train.*.path", "data.eval.*.path", "rl.rewards.*.reward"),
    *("fp8.plan", "lora.adapter", "run.resume", "run.fork", "run.start_from"),
)

_END_BYTES = 1 << 20  # bytes read at each end of a file
_TOTAL_BYTES = 1 << 27  # bytes read of all files together; with more than 64 files, less is read of each
_MAX_HEADER = 1 << 26  # largest accepted header of a safetensors file, in bytes
_WEIGHTS = ("*.safetensors", "*.bin", "*.index.json")
_MAX_FILES = 4096  # maximum number of compared files in a folder written by the library `datasets`


def rank_facts(cfg: Config, fingerprints: Mapping[str, str], epochs: float | None = None) -> dict[str, str]:
    """Return everything that must be equal on all ranks, as key -> value.

    ``fingerprints`` are the digests of the phase's inputs (:meth:`octavo.train.setup.phase.Phase.fingerprints`).
    ``epochs`` is the value of `train.epochs` from which `train.steps` was computed, if it was set.
    """
    settings = dict(_flat(cfg.model_dump(mode="json")))
    if epochs is not None:
        counted = f"train.steps (counted from train.epochs: {epochs:g}, with the token counts in data.cache)"
        settings[counted] = settings.pop("train.steps")
    paths = {key: value for key, value in settings.items() if _matches_any(key, PATH_KEYS) and isinstance(value, str)}
    facts = {key: json.dumps(value) for key, value in settings.items() if key not in paths}
    facts |= _file_digests(dict(_files(paths)))
    # A value that is not a path here (a built-in reward, a hub name, a URL, a keyword) is compared as text.
    missing = {key: value for key, value in paths.items() if not os.path.exists(value)}
    facts |= {key: json.dumps(_comparable_name(key, value)) for key, value in missing.items()}
    facts |= {f"file of {name}": digest[:16] for name, digest in fingerprints.items()}
    for path in (entry.path for entry in (*cfg.data.train, *cfg.data.eval)):
        if python_name(path) is not None:
            facts[f"rows of {path}"] = digest_of(path).sha256[:16]
    facts |= _versions()
    facts["device"] = accelerator.default_device().type
    if cfg.run.encrypt:  # otherwise the run would fail at its first save
        facts["id of the key"] = encryption.find_key().id.hex()
    facts |= {f"variable {name}": os.environ[name] for name in env_vars.VARIABLES["numbers"] if name in os.environ}
    return {key: value if len(value) <= 80 else f"{value[:60]}... ({_digest(value.encode())})" for key, value in
            facts.items() if not _matches_any(key, LOCAL_KEYS)}  # fmt: skip


def _flat(value: Any, key: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the leaves of a configuration as (dotted key, value); list items have their index as key."""
    items = value.items() if isinstance(value, Mapping) else enumerate(value) if isinstance(value, list) else None
    if items is None or not value:
        yield key, value
        return
    for name, inner in items:
        yield from _flat(inner, f"{key}.{name}" if key else str(name))


def _matches_any(key: str, globs: tuple[str, ...]) -> bool:
    return any(fnmatchcase(key, glob) for glob in globs)


def _comparable_name(key: str, value: str) -> str:
    """Return the text to compare for a path. For a reward FILE:FUNCTION this is the function, because the phase
    compares a digest of the file."""
    return Path(value).name if key.startswith("rl.rewards.") else value


def _files(paths: Mapping[str, str]) -> Iterator[tuple[str, Path]]:
    """Yield (key and name, file) for every file at these paths whose content determines numbers."""
    for key, value in paths.items():
        path = Path(value)
        if path.is_file():
            yield f"{key}: {path.name}", path
        elif path.is_dir():
            yield from ((f"{key}: {file.relative_to(path)}", file) for file in _files_of_folder(key, path))


def _files_of_folder(key: str, folder: Path) -> list[Path]:
    if key == "model.path" or key.startswith("rl.rewards."):
        homes = (folder, *(folder / part for part in parts_of(folder)))
        weights = [file for home in homes for glob in _WEIGHTS for file in home.glob(glob)]
        return sorted({*(folder / name for name in input_fingerprints.model_files(folder)), *weights})
    if key == "lora.adapter":
        return sorted(file for file in folder.glob("adapter_*") if file.is_file())
    if key.startswith("run."):
        return [file for file in [folder / "state.json"] if file.is_file()]
    rows = list_row_files(folder)
    # In a folder written by `datasets`, only the library itself knows which files contain rows.
    return rows or sorted(file for file in folder.rglob("*") if file.is_file())[:_MAX_FILES]


def _file_digests(files: Mapping[str, Path]) -> dict[str, str]:
    end = max(1 << 12, min(_END_BYTES, _TOTAL_BYTES // max(1, 2 * len(files))))
    with ThreadPoolExecutor(8, "facts") as threads:
        file_digests = threads.map(lambda file: _file_digest(file, end), files.values())
        return dict(zip(files, file_digests, strict=True))


def _file_digest(file: Path, end: int) -> str:
    """Return the size of a file and the digest of its two ends as text, or the reason why it cannot be read."""
    try:
        with file.open("rb") as opened:
            size = os.fstat(opened.fileno()).st_size
            first = opened.read(end)
            if file.suffix == ".safetensors" and len(first) >= 8:
                header = 8 + min(int.from_bytes(first[:8], "little"), _MAX_HEADER)
                first += opened.read(max(0, header - len(first)))
            opened.seek(max(len(first), size - end))
            return f"{size} bytes ({_digest(first + opened.read(end))})"
    except OSError as error:
        return f"not read: {error.strerror}"


def _digest(raw: bytes) -> str:
    return hashlib.sha256(raw).hexdigest()[:12]


def _versions() -> dict[str, str]:
    """Return the versions of Python, of Octavo with a digest of its source, and of all optional packages."""
    package = Path(octavo_version.__file__).parent
    source = hashlib.sha256()
    for file in sorted(package.rglob("*.py")):
        source.update(str(file.relative_to(package)).encode() + b"\0" + file.read_bytes())
    packages = {f"package.{name}": number for name, number in environment.versions().items()}
    return {
        "python": ".".join(platform.python_version_tuple()[:2]),
        "octavo": f"{octavo_version.__version__} (source {source.hexdigest()[:12]})",
        **packages,
        "package.torch": torch.__version__,
    }
