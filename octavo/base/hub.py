"""Names of the Hugging Face hub (`org/name`) in place of local folders: what is taken, and why something cannot be.

A name becomes a folder of the hub's own cache, at the very revision (`~/.cache/huggingface/hub/models--ORG--NAME/
snapshots/SHA`), and everything else reads that folder as any other. Code of a repository is never fetched. Nothing
here imports torch: without a network the answer comes at once, and with one that does not answer after `SECONDS`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from octavo.base import suffixes
from octavo.base.recipe_specs import NAME_OF_KIND
from octavo.base.safe_read import first_line

SECONDS = 10.0  # that the hub may take to answer
_NAME = re.compile(r"[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95}")
#: what of a model's repository is fetched: no pickles, no code
WANTED = ("*.safetensors", "*.json", "*.txt", "*.model", "*.jinja", "additional_chat_templates/*")
#: kind of frozen weights -> how twins in it are called
TWINS = {"block": ("-FP8", "-FP8-block"), "row": ("-FP8", "-FP8-dynamic"), "tensor": ("-FP8", "-FP8-tensor")}

Say = Callable[[str], None]


class HubError(ValueError):
    """A repository that cannot be had; says what was asked, why not, and what to do."""


def is_name(text: str, folder: str | Path | None = None) -> bool:
    """Whether a path is a repository's name: two words with a slash between, and no file or folder that is there; seen
    from the `folder` of a configuration, neither in a folder that is there, where it would be a slip of the pen."""
    if not _NAME.fullmatch(text) or text.lower().endswith(suffixes.NAMED) or ".." in text:
        return False
    return not (Path(text) if folder is None else Path(folder) / text.partition("/")[0]).exists()


def resolved(cfg: Any, say: Say) -> Any:
    """An `octavo.config.Config` whose names are what they stand for: `model.path` a folder, data sets at the revision
    that is the newest now. One without names is given back as it is.

    With `model.load_in_fp8` a published twin of the language model's kind is taken in place of what would be quantized
    here, unless `model.revision` says which revision of which weights is meant. Raises HubError.
    """
    model, data = cfg.model, cfg.data
    if is_name(model.path):
        kind = None if model.revision is not None else model.load_in_fp8.kinds.get("foundation")
        folder = model_folder(model.path, model.revision, kind, say)
        model = model.model_copy(update={"path": str(folder), "revision": None})
    parts = {of: tuple(_pinned(entry, say) for entry in getattr(data, of)) for of in ("train", "eval")}
    if model is cfg.model and parts == {of: getattr(data, of) for of in parts}:
        return cfg
    return cfg.model_copy(update={"model": model, "data": data.model_copy(update=parts)})


def model_folder(name: str, revision: str | None, kind: str | None, say: Say) -> Path:
    """The folder of a model, or of its twin whose codes are of `kind` (row, block, tensor; None: no twin is asked)."""
    called = NAME_OF_KIND.get(kind or "", kind)
    sha, why = _newest(name, revision, "model")
    for twin in (name + ending for ending in TWINS.get(kind or "", ()) if "fp8" not in name.lower()):
        if (taken := _twin(twin, str(kind), sha is not None, say)) is not None:
            say(f"model.path {name}: {_at(taken)} is taken, its published FP8 twin ({called}, load_in_fp8)")
            return taken
    if sha is not None:
        found = _fetched(name, sha)
    elif (kept := _in_cache(name, revision)) is not None:
        found = kept
        say(f"note: the hub does not answer ({why}); {name} is taken from its cache as it was last fetched")
    else:
        raise HubError(_unreachable(name, revision, "model", why))
    more = "" if kind is None else f"; no published FP8 twin of the kind {called} was found, so it is quantized here"
    say(f"model.path {name}: {_at(found)} is taken{more}")
    return found


def origin(folder: str | Path) -> dict[str, str] | None:
    """{"name", "revision"} of a folder of the hub's cache; None for any other."""
    path = Path(folder)
    kind, _, name = path.parent.parent.name.partition("--")
    if path.parent.name != "snapshots" or kind != "models" or not name:
        return None
    return {"name": name.replace("--", "/"), "revision": path.name}


def _at(folder: Path) -> str:
    found = origin(folder) or {"name": str(folder), "revision": ""}
    return f"{found['name']} at {found['revision'][:12]}"


def _pinned(entry: Any, say: Say) -> Any:
    """A data set with the revision that it has now."""
    if not is_name(entry.path) or (entry.revision is not None and re.fullmatch("[0-9a-f]{40}", entry.revision)):
        return entry
    sha, why = _newest(entry.path, entry.revision, "dataset")
    if sha is None:
        raise HubError(_unreachable(entry.path, entry.revision, "dataset", why))
    say(f"data set {entry.path}: revision {sha[:12]} is taken")
    return entry.model_copy(update={"revision": sha})


def _newest(name: str, revision: str | None, kind: str) -> tuple[str | None, str]:
    """The revision's SHA; or None, and why the hub does not say it. Raises HubError where it says there is none."""
    from huggingface_hub import HfApi, errors

    at = "" if revision is None else f" at the revision {revision!r}"
    try:
        return HfApi().repo_info(name, repo_type=kind, revision=revision, timeout=SECONDS).sha, ""
    except errors.GatedRepoError as cause:
        raise HubError(
            f"{name} is gated: accept its terms at huggingface.co/{name}, then log in here with `hf auth login`"
        ) from cause
    except (errors.RepositoryNotFoundError, errors.RevisionNotFoundError) as cause:
        raise HubError(
            f"there is no {kind} {name}{at} on the Hugging Face hub (or it is private and `hf auth login` was not done "
            f"here), and no folder {name} here. Check the name; a local path begins with ./ or /"
        ) from cause
    except Exception as cause:  # whatever a network can do: which classes of error these are differs by version
        return None, first_line(cause)[:160]


def _fetched(name: str, sha: str) -> Path:
    """The folder of a model, fetched now where the cache does not hold it."""
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(name, repo_type="model", revision=sha, allow_patterns=list(WANTED)))
    except Exception as cause:
        raise HubError(
            f"{name} could not be fetched from the Hugging Face hub ({first_line(cause)[:160]}). "
            "What has come is kept: start again, or fetch it with `hf download` and name the folder"
        ) from cause


def _in_cache(name: str, revision: str | None = None) -> Path | None:
    """The folder of a model in the hub's cache, if it holds weights."""
    from huggingface_hub import errors, snapshot_download

    try:
        found = Path(snapshot_download(name, repo_type="model", revision=revision, local_files_only=True))
    except (errors.LocalEntryNotFoundError, OSError):
        return None
    return found if next(found.glob("*.safetensors"), None) else None


def _unreachable(name: str, revision: str | None, kind: str, why: str) -> str:
    at = "" if revision is None else f" at the revision {revision!r}"
    key, words, fix = (
        "model.path",
        "model",
        f"fetch it where there is a network (`hf download {name}`) and name the folder",
    )
    if kind == "dataset":
        key, words, fix = "data", "data set", "give the `revision` (a commit) that `datasets` has fetched before"
    return (
        f"{key}: there is no folder {name} here, and the Hugging Face hub cannot be asked for the {words} {name}{at} "
        f"({why}); its cache does not hold it either. Check the path (a local one begins with ./ or /), or {fix}"
    )


def _twin(name: str, kind: str, reachable: bool, say: Say) -> Path | None:
    """The folder of a repository whose weights are codes of `kind`; None where there is none. The cache alone is asked
    where the hub is not `reachable`."""
    from huggingface_hub import errors, hf_hub_download

    kept, sha, why = None if reachable else _in_cache(name), None, ""
    try:
        if reachable:
            sha, why = _newest(name, None, "model")
        if kept is None and sha is not None:
            config = Path(hf_hub_download(name, "config.json", revision=sha))
    except (HubError, errors.EntryNotFoundError):  # there is no such repository, or it is none of a model
        return None
    except Exception as cause:  # of a network, as in `_newest`
        sha, why = None, first_line(cause)[:160]
    if kept is None and sha is None:
        if why:
            say(f"note: whether there is {name} cannot be asked now ({why}); it is not taken")
        return None
    held = kind_of(config if kept is None else kept / "config.json")
    if held != kind:
        say(
            f"note: {name} is not taken: its codes are "
            f"{'of no kind known here' if held is None else NAME_OF_KIND[held]}"
        )
        return None
    return kept or _fetched(name, str(sha))


def kind_of(config: Path) -> str | None:
    """The kind of codes (row, block, tensor) that a model's config.json announces; None for another or none. Loading
    judges it again, in full."""
    try:
        said = json.loads(config.read_text())
        said = said.get("quantization_config") or (said.get("text_config") or {}).get("quantization_config")
        kinds = {*_kinds(said)} if said else set()
    except (OSError, ValueError, AttributeError, TypeError, KeyError):
        return None
    return kinds.pop() if len(kinds) == 1 else None


def _kinds(said: dict[str, Any]) -> Iterator[str | None]:
    if said.get("quant_method") == "fp8":  # DeepSeek's
        usual = said.get("weight_block_size") == [128, 128] and said.get("activation_scheme", "dynamic") == "dynamic"
        yield "block" if usual else None
        return
    for group in (said.get("config_groups") or {}).values():  # compressed-tensors
        weights = group["weights"]
        fp8 = weights.get("num_bits") == 8 and weights.get("type") == "float"
        blocks = weights.get("block_structure") == [128, 128]
        strategy = {"channel": "row", "tensor": "tensor", "block": "block" if blocks else None}
        yield strategy.get(weights.get("strategy")) if fp8 else None
