"""Compares published FP8 weights with the model that they are a copy of (`model.fp8_twin`).

A repository of another owner may have the name of a model and other contents: another size, a fine-tuned tokenizer, a
format that Octavo does not read. So before such weights are used, four things must agree with the folder of
`model.path`: the names of the tensors (without scales), their shapes, the tokenizer, and the configuration. Only
headers and small files are read, so the high-precision weights need not be downloaded. The values are not compared;
`octavo verify TWIN --against MODEL` does that.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from octavo.base import hub, safe_read
from octavo.base.recipe_specs import NAME_OF_KIND
from octavo.base.wording import count_noun
from octavo.models.errors import ModelError
from octavo.models.folder.folder import QUANTIZED_KEYS, check_weight_files, find_file, read_companion, read_json
from octavo.models.folder.quantization import Quantization, read_quantization
from octavo.models.structure.skeleton import stock_config

if TYPE_CHECKING:
    from collections.abc import Callable

    from octavo.config import Config

#: keys of config.json that say how, when and by what a folder was written, at any level. pad_token_id, which publishers
#: change, is masked in every forward, and its row of the embedding is frozen with the others.
IGNORED_KEYS = (
    *("dtype", "torch_dtype", *QUANTIZED_KEYS, "transformers_version", "_name_or_path", "_commit_hash"),
    *("unsloth_fixed", "unsloth_version", "use_cache", "pad_token_id"),
)
_TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json")
#: parts of tokenizer.json that only the last call of the program that saved it has set
_STATE_OF_TOKENIZER = ("padding", "truncation")
_INPUT_FILES = ("chat_template.jinja", "preprocessor_config.json", "video_preprocessor_config.json")
_HEAD = "lm_head.weight"
_COMMIT = re.compile(r"[0-9a-f]{40}")
_LISTED = 8  # disagreements that a message lists

Tensors = Mapping[str, tuple[str, tuple[int, ...]]]


@dataclass(frozen=True)
class _Model:
    """A model to compare: what the user calls it, its folder, and its tensors (dtype and shape)."""

    name: str
    folder: Path
    tensors: Tensors


def resolve_twin(cfg: Config, log: Callable[[str], None]) -> Config:
    """Return a configuration whose `model.path` is the folder of `model.fp8_twin`, downloaded if it is on the hub.

    `fp8_twin` then has the commit that was used, and the model with which it was compared (`of`). Such an `fp8_twin` is
    checked, and the configuration is returned unchanged, as it is without one. Raises HubError if one of the two cannot
    be fetched, and ModelError if it is not in FP8, not of the kind of `load_in_fp8`, not a copy of `model.path`, or if
    no run can have recorded its `of`.
    """
    model = cfg.model
    twin_setting = model.fp8_twin
    if twin_setting is None:
        return cfg
    if twin_setting.of is not None:
        _check_record(model.path, twin_setting.name, twin_setting.of)
        return cfg
    kind = model.load_in_fp8.kinds["foundation"]
    base_folder = _fetch(model.path, model.revision, "model.path", log)
    twin_folder = _fetch(*hub.split_revision(twin_setting.name), "model.fp8_twin", log)
    quantization = _check_kind(twin_folder, twin_setting.name, kind)
    base, twin = _open(model.path, base_folder), _open(twin_setting.name, twin_folder)
    if problems := list(disagreements(base, twin)):
        raise ModelError(_refusal(twin.name, base.name, problems))
    for note in _different_inputs(base, twin):
        log(f"note: {note}")
    # A folder on this machine is checked where its weights are read.
    if hub.origin(twin.folder) is not None:
        check_weight_files(hub.fetch_weights(twin.folder))
    log(
        f"model.fp8_twin: {hub.describe_revision(twin.folder)} ({quantization}) replaces the weights of "
        f"{hub.describe_revision(base.folder)}; {count_noun(len(base.tensors), 'tensor')}, tokenizer and "
        "configuration agree"
    )
    resolved = twin_setting.model_copy(update={"name": _pinned_folder(twin.folder), "of": _pinned_folder(base.folder)})
    update = {"path": str(twin.folder), "revision": None, "fp8_twin": resolved}
    return cfg.model_copy(update={"model": model.model_copy(update=update)})


def _check_record(path: str, name: str, of: str) -> None:
    """Raise ModelError unless `of` can be what a run recorded: `path` is the folder of the twin, which is in FP8, and
    a copy of `of` as far as that is on this machine."""
    how = (
        "Octavo writes `of` to the config.yaml of a run, with the compared twin as model.path; remove it, with "
        "model.path the model that the twin is a copy of, and the two are compared"
    )
    folder, base = Path(path), Path(of)
    if not folder.is_dir() or _pinned_folder(folder) != name:
        raise ModelError(
            f"model.fp8_twin.of is {of}, but model.path {path} is not the folder of the twin {name}: {how}."
        )
    if read_quantization(folder) is None:
        raise ModelError(f"model.fp8_twin.of is {of}, but the twin {path} is not in FP8: {how}.")
    if base.is_dir():
        if problems := list(disagreements(_open(of, base), _open(name, folder))):
            raise ModelError(_refusal(name, of, problems))
    elif not base.is_absolute() and not _COMMIT.fullmatch(hub.split_revision(of)[1] or ""):
        raise ModelError(f"model.fp8_twin.of is {of}, which is neither ORG/NAME@COMMIT nor a folder: {how}.")


def describe_twin(cfg: Config) -> dict[str, str] | None:
    """Return {"name", "revision", "format", "of"} of the twin that a resolved configuration uses, or None."""
    twin = cfg.model.fp8_twin
    if twin is None or twin.of is None:
        return None
    name, revision = hub.split_revision(twin.name)
    return {"name": name, "revision": revision or "", "format": str(read_quantization(cfg.model.path)), "of": twin.of}


def disagreements(base: _Model, twin: _Model) -> Iterator[str]:
    """Yield a sentence for each way in which a twin differs from the model, worst first."""
    yield from _different_configs(base, twin)
    yield from _different_tensors(base, twin)
    yield from _different_tokenizers(base, twin)


def _fetch(name: str, revision: str | None, key: str, log: Callable[[str], None]) -> Path:
    if hub.is_name(name):
        try:
            return hub.fetch_without_weights(name, revision, key, log)
        except hub.HubError as cause:
            sentence = str(cause)
            raise hub.HubError(sentence if sentence.startswith(key) else f"{key}: {sentence}") from cause
    folder = Path(name)
    if not folder.is_dir():
        raise ModelError(
            f"{key}: there is no folder {name}, and it is not a name of the Hugging Face hub (ORG/NAME, or "
            "ORG/NAME@REVISION). Correct it."
        )
    return folder


def _check_kind(folder: Path, name: str, kind: str) -> Quantization:
    quantization = read_quantization(folder)  # raises for AWQ, GPTQ and others
    if quantization is None:
        raise ModelError(
            f"model.fp8_twin: {name} is not in FP8: its config.json has no quantization_config. Name a folder or "
            "repository with FP8 codes, or remove the key; load_in_fp8 then quantizes the model here."
        )
    if quantization.kind != kind:
        raise ModelError(
            f"model.fp8_twin: {name} has {NAME_OF_KIND[quantization.kind]} codes ({quantization}), and "
            f"model.load_in_fp8 is {NAME_OF_KIND[kind]}. Set load_in_fp8: {NAME_OF_KIND[quantization.kind]}, or name "
            "another twin."
        )
    return quantization


def _open(name: str, folder: Path) -> _Model:
    """Return a model with its tensors, from the weight files or, where the hub's cache lacks some, from their headers
    on the hub."""
    try:
        headers = check_weight_files(folder)
    except ModelError:
        if hub.origin(folder) is None:
            raise
        return _Model(name, folder, hub.fetch_shapes(folder))
    return _Model(name, folder, {e.name: (e.dtype, e.shape) for header in headers for e in header.entries})


def _different_configs(base: _Model, twin: _Model) -> Iterator[str]:
    # Values are compared as the model's class reads them: a key that a program left out has its default.
    before, after = (dict(_flat(stock_config(one.folder).to_dict())) for one in (base, twin))
    for key in {**before, **after}:
        if before.get(key) != after.get(key):
            values = (json.dumps(values.get(key), default=str)[:60] for values in (after, before))
            yield f"config.json: {key} is {' and not '.join(values)}"


def _flat(values: Mapping[str, object], prefix: str = "") -> Iterator[tuple[str, object]]:
    for key, value in values.items():
        if key in IGNORED_KEYS:
            continue
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", list(value) if isinstance(value, tuple) else value


def _different_tensors(base: _Model, twin: _Model) -> Iterator[str]:
    tied = {_HEAD} if getattr(stock_config(base.folder).get_text_config(), "tie_word_embeddings", False) else set()
    scales = {name for name in twin.tensors if name not in base.tensors and name.endswith(("_scale", "_scale_inv"))}
    names = twin.tensors.keys() - scales
    if missing := sorted(base.tensors.keys() - names - tied):
        yield f"{len(missing)} of {len(base.tensors)} tensors are missing, first {missing[0]}"
    if extra := sorted(names - base.tensors.keys() - tied):
        yield f"{count_noun(len(extra), 'tensor')} not in the model, first {extra[0]}"
    shapes = {name: (base.tensors[name][1], twin.tensors[name][1]) for name in sorted(names & base.tensors.keys())}
    if differing := [name for name, (one, other) in shapes.items() if one != other]:
        one, other = shapes[differing[0]]
        many = count_noun(len(differing), "tensor")
        yield f"{many} of another shape, first {differing[0]}: {[*other]} and not {[*one]}"
    if not any(dtype == "F8_E4M3" for dtype, _ in twin.tensors.values()):
        yield "no tensor has FP8 codes (F8_E4M3), although config.json announces them"


def _different_tokenizers(base: _Model, twin: _Model) -> Iterator[str]:
    file = next((name for name in _TOKENIZERS if find_file(base.folder, name).is_file()), None)
    if file is None:
        yield f"tokenizer: {base.name} has none of {', '.join(_TOKENIZERS)} with which it could be compared"
        return
    if not find_file(twin.folder, file).is_file():
        yield f"tokenizer: {file} is missing"
        return
    before, after = (_digest_tokenizer(find_file(one.folder, file)) for one in (base, twin))
    if before != after:
        yield f"tokenizer: the content of {file} differs (SHA-256 {after[:12]} and not {before[:12]})"


def _digest_tokenizer(file: Path) -> str:
    raw = read_companion(file)
    if file.name == "tokenizer.json":
        content = safe_read.parse_json(raw.decode(), file, ModelError)
        content = {key: value for key, value in content.items() if key not in _STATE_OF_TOKENIZER}
        raw = json.dumps(content, sort_keys=True).encode()
    return hashlib.sha256(raw).hexdigest()


def _different_inputs(base: _Model, twin: _Model) -> Iterator[str]:
    """Yield a sentence for files that change inputs and not weights. The twin's are used, and exported with it."""
    if _chat_template(base.folder) != _chat_template(twin.folder):
        yield f"{twin.name} has a different chat template from {base.name}; the twin's is used"
    for name in _INPUT_FILES[1:]:
        before, after = (find_file(one.folder, name) for one in (base, twin))
        contents = [read_json(file) if file.is_file() else None for file in (before, after)]
        if contents[0] != contents[1]:
            yield f"{twin.name} has a different {name} from {base.name}; the twin's is used"


def _chat_template(folder: Path) -> object:
    file, settings = (find_file(folder, name) for name in (_INPUT_FILES[0], "tokenizer_config.json"))
    if file.is_file():
        return read_companion(file).decode()
    return read_json(settings).get("chat_template") if settings.is_file() else None


def _refusal(twin: str, base: str, problems: list[str]) -> str:
    listed = [f"\n  - {problem}" for problem in problems[:_LISTED]]
    others = f"\n  - and {len(problems) - _LISTED} more" if len(problems) > _LISTED else ""
    return (
        f"model.fp8_twin: {twin} is not a copy of {base}; {len(problems)} thing{'s' * (len(problems) > 1)} differ"
        f"{'s' * (len(problems) == 1)}. Name its FP8 version, or train on the other model itself (model.path: "
        f"{twin}):{''.join(listed)}{others}"
    )


def _pinned_folder(folder: Path) -> str:
    source = hub.origin(folder)
    return str(folder) if source is None else f"{source['name']}@{source['revision']}"
