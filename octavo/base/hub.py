"""Resolves names of the Hugging Face hub (`org/name`) to local folders.

A name is resolved to the folder of one revision in the hub's cache (`~/.cache/huggingface/hub/models--ORG--NAME/
snapshots/SHA`), which all other code reads like any local folder. Code of a repository is never downloaded. Nothing
here imports torch: without a network a call returns at once, and if the hub does not answer, after `TIMEOUT_S`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from octavo.base import suffixes
from octavo.base.atomic_write import write_text
from octavo.base.recipe_specs import NAME_OF_KIND
from octavo.base.safe_read import first_line

TIMEOUT_S = 10.0  # for an answer of the hub
_NAME = re.compile(r"[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95}")
#: files of a model's repository that are downloaded: no pickles, no code
DOWNLOADED_FILES = ("*.safetensors", "*.json", "*.txt", "*.model", "*.jinja", "additional_chat_templates/*")
_WEIGHTS = "*.safetensors"
_SMALL_FILES = tuple(pattern for pattern in DOWNLOADED_FILES if pattern != _WEIGHTS)
#: kind of frozen weights -> suffixes of repositories that publish the same model with such weights
FP8_SUFFIXES = {
    "block": ("-FP8", "-FP8-block", "-FP8-Block", "-FP8-BLOCK"),
    "row": ("-FP8", "-FP8-dynamic", "-FP8-Dynamic"),
    "tensor": ("-FP8", "-FP8-tensor"),
}
#: organizations that publish models of others in formats that Octavo reads (NVIDIA's are in ModelOpt's format)
FP8_PUBLISHERS = ("RedHatAI", "unsloth")

Log = Callable[[str], None]


class HubError(ValueError):
    """A repository that is not available; the message says which one, why, and what to do."""


def is_name(text: str, folder: str | Path | None = None) -> bool:
    """Return whether a path is a repository's name: two words with a slash between, and no existing file or folder.
    With the `folder` of a configuration, a path into an existing folder is not a name either, but probably a misspelled
    path."""
    if not _NAME.fullmatch(text) or text.lower().endswith(suffixes.ALL_FILES) or ".." in text:
        return False
    return not (Path(text) if folder is None else Path(folder) / text.partition("/")[0]).exists()


def resolve_names(cfg: Any, log: Log) -> Any:
    """Return an `octavo.config.Config` with resolved names: `model.path` is a folder, and data sets have the newest
    revision. A configuration without names is returned unchanged.

    With `model.load_in_fp8`, a published FP8 repository of the same owner replaces quantization on this machine, unless
    `model.revision` pins the weights. With `model.fp8_twin`, which names one of any owner, `model.path` stays as it is
    (`octavo.models.structure.fp8_twin`). Raises HubError.
    """
    model, data = cfg.model, cfg.data
    if is_name(model.path) and (model.fp8_twin is None or model.fp8_twin.of is not None):
        kind = None if model.revision is not None else model.load_in_fp8.kinds.get("foundation")
        folder = model_folder(model.path, model.revision, kind, log)
        model = model.model_copy(update={"path": str(folder), "revision": None})
    parts = {split: tuple(_pin_revision(entry, log) for entry in getattr(data, split)) for split in ("train", "eval")}
    if model is cfg.model and parts == {split: getattr(data, split) for split in parts}:
        return cfg
    return cfg.model_copy(update={"model": model, "data": data.model_copy(update=parts)})


def model_folder(name: str, revision: str | None, kind: str | None, log: Log, key: str = "model.path") -> Path:
    """Return the folder of a model, or of its published FP8 twin with codes of `kind` (row, block, tensor; None
    disables the search for a twin). `key` is the setting that names it."""
    kind_name = NAME_OF_KIND.get(kind or "", kind)
    sha, why = _resolve_sha(name, revision, "model")
    for twin_name in (name + ending for ending in FP8_SUFFIXES.get(kind or "", ()) if "fp8" not in name.lower()):
        if (twin := _find_fp8_model(twin_name, str(kind), sha is not None, log)) is not None:
            log(f"{key} {name}: {describe_revision(twin)} is taken, its published FP8 twin ({kind_name}, load_in_fp8)")
            return twin
    if sha is not None:
        folder = _download(name, sha, revision)
    elif (cached := _cached_folder(name, revision)) is not None:
        folder = cached
        log(f"note: the hub does not answer ({why}); {name} is taken from its cache as it was last fetched")
    else:
        raise HubError(_unreachable_error(name, revision, "model", why))
    no_twin = (
        "" if kind is None else f"; no published FP8 twin of the kind {kind_name} was found{_searched(name, kind)}"
    )
    log(f"{key} {name}: {describe_revision(folder)} is taken{no_twin}")
    return folder


def twin_names(name: str, kind: str) -> list[str]:
    """Return the names under which other owners would publish a model with codes of `kind`, most likely first.

    Only `model.fp8_twin` takes weights of another owner. Some publishers drop `Meta-` from the names of Llama.
    """
    model = name.partition("/")[2]
    models = dict.fromkeys((model, model.removeprefix("Meta-")))
    owners = _other_publishers(name)
    return [f"{owner}/{one}{ending}" for owner in owners for one in models for ending in FP8_SUFFIXES[kind]]


def _searched(name: str, kind: str) -> str:
    """Return the end of the sentence that no twin was found: the names that were tried, and other owners' names."""
    if "fp8" in name.lower():
        return ", so it is quantized here"
    tried, others = ", ".join(FP8_SUFFIXES[kind]), twin_names(name, kind)
    owners = [next(other for other in others if other.startswith(f"{owner}/")) for owner in _other_publishers(name)]
    return (
        f" (suffixes {tried}), so it is quantized here. Other owners name it with the same suffixes "
        f"({', '.join(owners)}, ...): model.fp8_twin: ORG/NAME compares and uses one"
    )


def _other_publishers(name: str) -> list[str]:
    return [owner for owner in FP8_PUBLISHERS if owner != name.partition("/")[0]]


def split_revision(text: str) -> tuple[str, str | None]:
    """Split `ORG/NAME@REVISION`; a path is returned unchanged, without a revision."""
    name, at, revision = text.partition("@")
    return (name, revision or None) if at and is_name(name) else (text, None)


def fetch_without_weights(name: str, revision: str | None, key: str, log: Log) -> Path:
    """Return the folder of a model's revision with its configuration and tokenizer; its weights may be missing. `key`
    is the setting that names the model. If the hub does not answer, the cache is used. Raises HubError."""
    sha, why = _resolve_sha(name, revision, "model")
    if sha is not None:
        return _download(name, sha, revision, _SMALL_FILES)
    if (cached := _cached_folder(name, revision, weights=False)) is None:
        raise HubError(_unreachable_error(name, revision, "model", why, key))
    log(f"note: the hub does not answer ({why}); {name} is taken from its cache as it was last fetched")
    return cached


def fetch_weights(folder: Path) -> Path:
    """Download the weights that are missing in a folder of the hub's cache, and return the folder. Raises HubError."""
    source = origin(folder)
    assert source is not None
    return _download(source["name"], source["revision"], source["revision"])


def fetch_shapes(folder: Path) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Return tensor -> (safetensors' name of its dtype, shape) of a folder of the hub's cache without its weights.

    Only the headers of the weight files are fetched. They are kept in the hub's folder of assets, so that a start
    without a network finds them. Raises HubError.
    """
    from huggingface_hub import HfApi, cached_assets_path

    source = origin(folder)
    assert source is not None
    kept = cached_assets_path("octavo", "tensors", f"{source['name'].replace('/', '--')}--{source['revision']}")
    file = kept / "shapes.json"
    if not file.exists():
        try:
            metadata = HfApi().get_safetensors_metadata(source["name"], revision=source["revision"])
        except Exception as cause:
            raise HubError(
                f"the headers of {source['name']}'s weights could not be fetched from the Hugging Face hub "
                f"({first_line(cause)[:160]}). Start where the hub answers, or fetch the model with `hf download "
                f"{source['name']}`"
            ) from cause
        tables = (one.tensors for one in metadata.files_metadata.values())
        shapes = {name: (tensor.dtype, tensor.shape) for table in tables for name, tensor in table.items()}
        write_text(file, json.dumps(shapes), shared=True)  # by several ranks
    return {name: (dtype, tuple(shape)) for name, (dtype, shape) in json.loads(file.read_text()).items()}


def origin(folder: str | Path) -> dict[str, str] | None:
    """Return {"name", "revision"} of a folder in the hub's cache, or None for any other folder."""
    path = Path(folder)
    kind, _, name = path.parent.parent.name.partition("--")
    if path.parent.name != "snapshots" or kind != "models" or not name:
        return None
    return {"name": name.replace("--", "/"), "revision": path.name}


def describe_revision(folder: Path) -> str:
    """Return `ORG/NAME at SHA` (12 digits) of a folder in the hub's cache, or the path of any other."""
    source = origin(folder)
    return str(folder) if source is None else f"{source['name']} at {source['revision'][:12]}"


def _pin_revision(entry: Any, log: Log) -> Any:
    """Return a data set with the SHA of its revision."""
    if not is_name(entry.path) or (entry.revision is not None and re.fullmatch("[0-9a-f]{40}", entry.revision)):
        return entry
    sha, why = _resolve_sha(entry.path, entry.revision, "dataset")
    if sha is None:
        raise HubError(_unreachable_error(entry.path, entry.revision, "dataset", why))
    log(f"data set {entry.path}: revision {sha[:12]} is taken")
    return entry.model_copy(update={"revision": sha})


def _resolve_sha(name: str, revision: str | None, kind: str) -> tuple[str | None, str]:
    """Return (SHA of the revision, ""), or (None, reason) where the hub does not answer. Raises HubError where it does
    not exist or access is denied."""
    from huggingface_hub import HfApi, errors

    at_revision = "" if revision is None else f" at the revision {revision!r}"
    try:
        return HfApi().repo_info(name, repo_type=kind, revision=revision, timeout=TIMEOUT_S).sha, ""
    except errors.GatedRepoError as cause:
        raise HubError(
            f"{name} is gated: accept its terms at huggingface.co/{name}, then log in here with `hf auth login`"
        ) from cause
    except (errors.RepositoryNotFoundError, errors.RevisionNotFoundError) as cause:
        raise HubError(
            f"there is no {kind} {name}{at_revision} on the Hugging Face hub (or it is private and `hf auth login` was "
            f"not done here), and no folder {name} here. Check the name; a local path begins with ./ or /"
        ) from cause
    except Exception as cause:  # network errors, whose classes differ between versions of the library
        return None, first_line(cause)[:160]


def _download(name: str, sha: str, revision: str | None, patterns: tuple[str, ...] = DOWNLOADED_FILES) -> Path:
    """Return the folder of a model, with the files of these patterns; those that are not in the cache are downloaded.
    `revision` (None: main) is the name that had the commit `sha`."""
    from huggingface_hub import snapshot_download

    try:
        folder = Path(snapshot_download(name, repo_type="model", revision=sha, allow_patterns=list(patterns)))
    except Exception as cause:
        raise HubError(
            f"{name} could not be fetched from the Hugging Face hub ({first_line(cause)[:160]}). "
            "The finished files are kept: start again, or fetch it with `hf download` and use the folder"
        ) from cause
    if revision != sha:  # the library writes it only when it resolves the name itself; without it, no start is offline
        reference = folder.parent.parent / "refs" / (revision or "main")
        reference.parent.mkdir(parents=True, exist_ok=True)
        write_text(reference, sha, shared=True)
    return folder


def _cached_folder(name: str, revision: str | None = None, weights: bool = True) -> Path | None:
    """Return the folder of a model in the hub's cache, if it contains weights (or, with weights=False, a
    configuration)."""
    from huggingface_hub import errors, snapshot_download

    # Newer versions of the library refuse a snapshot that lacks a file of these patterns.
    patterns = list(DOWNLOADED_FILES if weights else _SMALL_FILES)
    try:
        folder = Path(snapshot_download(name, revision=revision, local_files_only=True, allow_patterns=patterns))
    except (errors.LocalEntryNotFoundError, OSError):
        return None
    return folder if next(folder.glob(_WEIGHTS if weights else "config.json"), None) else None


def _unreachable_error(name: str, revision: str | None, kind: str, why: str, key: str = "model.path") -> str:
    at_revision = "" if revision is None else f" at the revision {revision!r}"
    words, fix = "model", f"fetch it where there is a network (`hf download {name}`) and use the folder"
    if kind == "dataset":
        key, words, fix = "data", "data set", "give the `revision` (a commit) that `datasets` has fetched before"
    return (
        f"{key}: there is no folder {name} here, and the Hugging Face hub cannot be asked for the {words} "
        f"{name}{at_revision} ({why}); it is not in the cache either. Check the path (a local one begins with ./ or "
        f"/), or {fix}"
    )


def _find_fp8_model(name: str, kind: str, reachable: bool, log: Log) -> Path | None:
    """Return the folder of a repository whose weights are codes of `kind`, or None. If the hub is not
    `reachable`, only the cache is searched."""
    from huggingface_hub import errors, hf_hub_download

    cached, sha, why = None if reachable else _cached_folder(name), None, ""
    try:
        if reachable:
            sha, why = _resolve_sha(name, None, "model")
        if cached is None and sha is not None:
            config = Path(hf_hub_download(name, "config.json", revision=sha))
    except (HubError, errors.EntryNotFoundError):  # no such repository, or one without config.json
        return None
    except Exception as cause:  # network errors, as in `_resolve_sha`
        sha, why = None, first_line(cause)[:160]
    if cached is None and sha is None:
        if why:
            log(f"note: the hub did not answer whether {name} exists ({why}); it is not used")
        return None
    found_kind = declared_kind(config if cached is None else cached / "config.json")
    if found_kind != kind:
        log(
            f"note: {name} is not taken: its codes are "
            f"{'of an unsupported kind' if found_kind is None else NAME_OF_KIND[found_kind]}"
        )
        return None
    return cached or _download(name, str(sha), None)


def declared_kind(config: Path) -> str | None:
    """Return the kind of codes (row, block, tensor) that a model's config.json declares, or None for any other kind.
    Loading the model checks it in full."""
    try:
        values = json.loads(config.read_text())
        section = values.get("quantization_config") or (values.get("text_config") or {}).get("quantization_config")
        kinds = {*_declared_kinds(section)} if section else set()
    except (OSError, ValueError, AttributeError, TypeError, KeyError):
        return None
    return kinds.pop() if len(kinds) == 1 else None


def _declared_kinds(section: dict[str, Any]) -> Iterator[str | None]:
    if section.get("quant_method") == "fp8":  # DeepSeek's format
        is_deepseek = (
            section.get("weight_block_size") == [128, 128] and section.get("activation_scheme", "dynamic") == "dynamic"
        )
        yield "block" if is_deepseek else None
        return
    for group in (section.get("config_groups") or {}).values():  # compressed-tensors
        weights = group["weights"]
        fp8 = weights.get("num_bits") == 8 and weights.get("type") == "float"
        blocks = weights.get("block_structure") == [128, 128]
        strategy = {"channel": "row", "tensor": "tensor", "block": "block" if blocks else None}
        yield strategy.get(weights.get("strategy")) if fp8 else None
