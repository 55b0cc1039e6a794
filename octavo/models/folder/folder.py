"""The files of a Hugging Face folder: config.json and safetensors, checked for completeness before a model is built.

Only data is read, with `octavo.base.safe_read`; pickled weights are rejected. The files that transformers opens itself
(tokenizer, processor, template, generation settings) are read here first, so that transformers never opens pipes or
broken JSON.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from types import MappingProxyType
from typing import Any

import torch
from transformers import GenerationConfig
from transformers.utils import logging as transformers_logging

from octavo.base import encryption, safe_read
from octavo.base.encryption.anonymous_file import plain_path
from octavo.models.errors import ModelError
from octavo.models.folder import headers

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")  # common suffixes of pickle files
QUANTIZED_KEYS = ("quantization_config", "compression_config")  # of a config.json; the second is an older name
#: files of a model other than config.json and weights: tokenizer, processor, chat template, generation settings, and
#: for a sealed model the note of its key (octavo.base.seal_note)
COMPANIONS = (
    "generation_config.json",
    "tokenizer*",
    "vocab*",
    "merges.txt",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template*",
    "preprocessor_config.json",
    "video_preprocessor_config.json",
    "processor_config.json",
    "sealed.json",
)
#: key of config.json that ties the output projection to the embeddings
TIED = "tie_word_embeddings"
#: the folders of a model that is stored in three (VILA, NVILA), each with its config.json and weights
PARTS = ("llm", "vision_tower", "mm_projector")
#: words in keys of config.json and of an image processor's settings -> the largest accepted value; the first match
#: counts
_MAX_VALUES = {
    "depthwise": 1 << 24, "num_patches": 1 << 16, "vocab_size": 1 << 26,  # before words that they contain
    "layers": 1000, "depth": 1000, "n_layer": 1000, "experts": 1 << 15, "head": 1 << 16, "labels": 1 << 16,
    "classes": 1 << 16, "patch_size": 1 << 8, "merge_size": 1 << 5, "shortest_edge": 1 << 22, "min_pixels": 1 << 22,
    "_patches": 1 << 10, "height": 1 << 13, "width": 1 << 13, "seq_length": 1 << 16, "size": 1 << 24, "dim": 1 << 24,
}  # fmt: skip
_MAX_INTEGER = 1 << 31  # the largest accepted integer under other keys
#: keys of config.json (and ends of keys) whose values must be above zero, and those that must not be below it: with
#: invalid numbers a model loads but computes wrong results: a window of -3 hides all tokens, a base of 0 makes angles
#: infinite
_ABOVE_ZERO = ("theta", "sliding_window", "rope_local_base_freq", "max_position_embeddings", "experts_per_tok",
               "moe_k", "partial_rotary_factor", "query_pre_attn_scalar", "low_freq_factor", "high_freq_factor",
               "long_factor", "short_factor")  # fmt: skip
_NOT_BELOW_ZERO = ("_eps", "_epsilon", "dropout", "_jitter_noise", "mrope_section", "layer_rope_theta")
_PER_LAYER_KEY = "layer_rope_theta"  # 0 means that the layer has no rotary embedding (granitemoe_swa)
#: and those that must be at most 1, because they are fractions
_AT_MOST_ONE = ("dropout", "partial_rotary_factor")
#: keys of the number of experts for each token, and of the number of experts
_EXPERTS_PER_TOKEN = ("num_experts_per_tok", "moe_k")
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
#: settings of rotary embeddings: `factor` must be above zero only in these
_ROPE = ("rope_scaling", "rope_parameters")
_MAY_BE_INFINITE = "time_step_limit"  # of Mamba's layers; transformers writes infinity
_WHOLE = safe_read.ValueCheck(lambda value: type(value) is int, "a whole number")
_POSITIVE = safe_read.ValueCheck(
    lambda value: type(value) is int and 0 < value <= _MAX_INTEGER, "a whole number from 1"
)
#: fields of generation_config.json that transformers checks only when it generates
_GENERATION = {
    **dict.fromkeys(("num_beams", "num_return_sequences", "max_new_tokens", "max_length"), _POSITIVE),
    **dict.fromkeys(("temperature", "top_p", "repetition_penalty"), safe_read.FINITE),
    "top_k": _WHOLE,
}
_TOKENS = ("eos_token_id", "bos_token_id", "pad_token_id", "suppress_tokens", "begin_suppress_tokens")


def is_weights(file: Path) -> bool:
    """Return whether a file is a weights file, by its name."""
    return file.name.endswith(".safetensors")


@contextmanager
def silence_transformers() -> Iterator[None]:
    """Context without progress bars and warnings of transformers: Octavo runs the checks that the warnings are
    about."""
    bars, level = transformers_logging.is_progress_bar_enabled(), transformers_logging.get_verbosity()
    is_verbose = level < transformers_logging.ERROR  # only if needed: setting a level visits all loggers of the process
    transformers_logging.disable_progress_bar()
    if is_verbose:
        transformers_logging.set_verbosity_error()
    try:
        yield
    finally:
        if is_verbose:
            transformers_logging.set_verbosity(level)
        if bars:
            transformers_logging.enable_progress_bar()


@contextmanager
def wrap_errors(subject: str | Callable[[], str]) -> Iterator[None]:
    """Quiet context for transformers and its libraries: all their errors become a ModelError that begins with
    `subject` ("FILE: the tokenizer cannot be loaded"), which may be a function that finds the file at fault. A field of
    a wrong type can raise any exception, and panics of tokenizers' Rust code are not even subclasses of Exception."""
    try:
        with silence_transformers():
            yield
    except ModelError:
        raise
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        begin = subject if isinstance(subject, str) else subject()
        raise ModelError(f"{begin}: {safe_read.printable(shorten_error(error))}") from error


@contextmanager
def open_plain(folder: Path) -> Iterator[Path]:
    """Context that yields a model folder for libraries that open its files by name (configuration, tokenizer,
    processor, templates): the folder itself or, if such files are encrypted, a temporary folder of links to plain text
    in memory. It contains no weights, which Octavo reads piece by piece.

    Raises ModelError if a file is damaged, or if its key is not set.
    """
    try:
        encryption.check_folder(folder)
    except encryption.VaultError as cause:
        raise ModelError(f"{cause}.") from cause
    files = [file for file in sorted(folder.iterdir()) if file.is_file() and not is_weights(file)]
    files = [file for file in files if file.name != encryption.LIST]
    if not any(map(encryption.is_encrypted, files)):
        yield folder
        return
    with ExitStack() as stack:
        links = Path(stack.enter_context(TemporaryDirectory(prefix="octavo-")))
        try:
            for file in files:
                (links / file.name).symlink_to(stack.enter_context(plain_path(file.absolute())))
        except encryption.VaultError as cause:
            raise ModelError(f"{cause}.") from cause
        yield links


def parts_of(folder: Path) -> tuple[str, ...]:
    """Return `PARTS` for a model that is stored in three folders, else ()."""
    return PARTS if all((folder / part / "config.json").is_file() for part in PARTS) else ()


def require_one_folder(folder: Path, what: str) -> None:
    """Raise ModelError for a model that is stored in three folders; `what` names the command that does not support
    it."""
    if parts := parts_of(folder):
        raise ModelError(
            f"{folder} is stored in three folders ({', '.join(parts)}), but {what} supports only models in one folder. "
            f"`octavo export {folder} DIR --format bf16` writes it as one."
        )


def find_file(folder: Path, name: str) -> Path:
    """Find the path of a file of a model: in its folder, else in one of its three folders; the file may not exist."""
    candidates = (folder / name, *(folder / part / name for part in parts_of(folder)))
    return next((file for file in candidates if os.path.lexists(file)), candidates[0])


def read_json(file: Path) -> dict:
    """Read a JSON object from a file. Raises ModelError if it is missing, invalid or not an object."""
    if not os.path.lexists(file):
        raise ModelError(f"{file} is missing: {file.parent} is {describe_folder(file.parent)}")
    return safe_read.read_json(file, ModelError)


def check_sizes(file: Path) -> None:
    """Raise ModelError for numbers in a configuration that no model can have: numbers of modules that would take
    forever to build, image sizes that do not fit into memory, numbers that are not finite or below the minimum of their
    field; and for a `model_type` that is not a string."""
    level: list[tuple[str, Any]] = [("", read_json(file))]
    while level:
        key, node = level.pop()
        if isinstance(node, dict):
            _check_experts(file, node)
            _check_heads(file, node)
            level += [(f"{key}.{name}" if key in _ROPE else name, one) for name, one in node.items()]
        elif isinstance(node, list):
            level += [(key, one) for one in node]
        elif isinstance(node, int | float) and not isinstance(node, bool):
            if not math.isfinite(node) and (math.isnan(node) or key != _MAY_BE_INFINITE):
                raise ModelError(f"{file} has {key}={node}, which is not a finite number. Correct the field.")
            _check_sign(file, key, node)
            most = next((most for word, most in _MAX_VALUES.items() if word in key), None)
            if most is None and isinstance(node, int) and "theta" not in key:
                most = _MAX_INTEGER
            if most is not None and not abs(node) <= most:
                raise ModelError(f"{file} has {key}={node}, but the maximum is {most}. Correct the field.")
        if key == "model_type" and not isinstance(node, str):
            raise ModelError(f"{file} has model_type={node!r:.80}, which is not a string. Correct the field.")


def _check_sign(file: Path, key: str, value: float) -> None:
    """Raise ModelError for a number outside the range of its field."""
    above = key.endswith((*_ABOVE_ZERO, *(f"{rope}.factor" for rope in _ROPE))) and not key.endswith(_PER_LAYER_KEY)
    if (above and value <= 0) or (key.endswith(_NOT_BELOW_ZERO) and value < 0):
        least = "above 0" if above else "0 or above"
        raise ModelError(f"{file} gives {key.rpartition('.')[2]}={value}; it must be {least}. Correct the field.")
    if key.endswith(_AT_MOST_ONE) and value > 1:
        raise ModelError(f"{file} gives {key.rpartition('.')[2]}={value}; it must be at most 1. Correct the field.")


def _check_experts(file: Path, part: Mapping[str, Any]) -> None:
    """Raise ModelError if a token uses more experts than there are, because no forward would complete."""
    counts = [part[key] for key in _EXPERTS if type(part.get(key)) is int]
    for key in _EXPERTS_PER_TOKEN:
        if type(taken := part.get(key)) is int and taken > max(counts, default=0) > 1:  # dense siblings have 0 or 1
            raise ModelError(
                f"{file} gives {key}={taken}; it must be at most {max(counts)}, the number of experts. Correct it."
            )


def _check_heads(file: Path, part: Mapping[str, object]) -> None:
    """Raise ModelError if attention heads cannot be divided among the heads of keys and values."""
    heads, shared = part.get("num_attention_heads"), part.get("num_key_value_heads")
    if type(heads) is int and type(shared) is int and 0 < shared <= heads and heads % shared:
        raise ModelError(
            f"{file} gives num_attention_heads={heads}; it must be a multiple of num_key_value_heads={shared}. Correct "
            "the field."
        )


def check_generation_config(folder: Path) -> None:
    """Raise ModelError for a generation_config.json that transformers rejects when it loads it or when it generates: a
    field of a wrong type, token ids that are not integers or outside the vocabulary."""
    file = find_file(folder, "generation_config.json")
    if not os.path.lexists(file):
        return
    settings, config = read_json(file), file.parent / "config.json"
    raw = read_json(config) if os.path.lexists(config) else {}
    text = raw.get("text_config")
    rows = (text if isinstance(text, dict) else raw).get("vocab_size")
    for key in _TOKENS:
        named = settings.get(key)
        for one in named if isinstance(named, list) else [] if named is None else [named]:
            if type(one) is not int:
                raise ModelError(f"{file}: {key} is {named!r:.80}; it must be a token id, or a list of token ids.")
            if type(rows) is int and one >= rows:
                # Either file may be the wrong one.
                raise ModelError(f"{config} gives vocab_size={rows}, but {key} in {file.name} has token {one}.")
    safe_read.check_schema(settings, _GENERATION, file, ModelError)
    with wrap_errors(f"{file} cannot be used"):
        GenerationConfig.from_dict(settings).validate()


def describe_folder(folder: Path) -> str:
    """Describe a folder in which files of a model are missing, with the fix, as the end of a sentence."""
    if (folder / "adapter_config.json").is_file():
        return (
            "a PEFT adapter. Pass its base here and the adapter separately (`lora.adapter` continues to train it), or "
            "merge both into one model: octavo merge."
        )
    if (folder / "config.yaml").is_file() and (folder / "checkpoints").is_dir():
        return f"a run of octavo train. {_find_output(folder)}"
    return "not a complete Hugging Face folder."


def _find_output(run: Path) -> str:
    """Return a sentence on the model or adapter that a run has written, or on the command that writes one."""
    if (run / "hf" / "config.json").is_file():
        return f"Its model is {run / 'hf'}."
    if (run / "adapter").is_dir():
        return f"Its adapter is {run / 'adapter'}; octavo merge writes a Hugging Face folder."
    return "Write a Hugging Face folder from it: octavo export, or octavo merge for LoRA."


def check_weight_files(folder: Path, indexed: bool | None = None) -> list[headers.Header]:
    """Return the headers of a folder's safetensors files, checked for completeness; no tensor is read.

    indexed: whether to use the index, or None to use it only if there is no model.safetensors.

    Raises ModelError if there are no such files (mentioning pickles if there are any), if a shard of the index is
    missing or truncated, or if a tensor is not in the shard that the index names.
    """
    if parts := parts_of(folder):
        return [_add_prefix(part, header) for part in parts for header in check_weight_files(folder / part)]
    index = folder / INDEX
    if indexed is None:
        indexed = index.exists() and not (folder / SINGLE).exists()  # transformers, too, prefers the single file
    tensor_files = weight_map(index) if indexed else {}
    file_headers = []
    for name in sorted(set(tensor_files.values())) or [SINGLE]:
        file = folder / name
        if not os.path.lexists(file):
            raise ModelError(missing_weights_error(file, indexed))
        try:
            header = headers.read(file)
        except headers.HeaderError as error:
            if error.kind == "unread":
                raise ModelError(f"{error}.") from error
            raise ModelError(f"{file} is damaged or truncated ({file.stat().st_size} bytes): {error}.") from error
        present = {entry.name for entry in header.entries}
        if missing := sorted(
            tensor for tensor, shard in tensor_files.items() if shard == name and tensor not in present
        ):
            raise ModelError(
                f"{file} does not contain {missing[0]!r} ({len(missing)} such tensors), although {index.name} lists it "
                "there. Download both again."
            )
        file_headers.append(header)
    return file_headers


def _add_prefix(part: str, header: headers.Header) -> headers.Header:
    """Return the header of a file in one of three folders, with the folder's name as prefix of its tensors."""
    entries = tuple(replace(entry, name=f"{part}.{entry.name}") for entry in header.entries)
    return replace(header, file=f"{part}/{header.file}", entries=entries)


def weight_map(index: Path) -> dict[str, str]:
    """Return the mapping of an index from tensor names to files. Raises ModelError if it is damaged or names files
    outside the folder."""
    tensor_files = read_json(index).get("weight_map")
    if (
        not isinstance(tensor_files, dict)
        or not tensor_files
        or not all(isinstance(file, str) for file in tensor_files.values())
    ):
        raise ModelError(f"{index} has no weight_map of tensor names to files. Download or write the file again.")
    if outside := [name for name in tensor_files.values() if Path(name).name != name]:
        raise ModelError(f"{index} names {outside[0]!r}, which is not a file of this folder. Write the index again.")
    return tensor_files


def find_pickles(folder: Path) -> list[str]:
    """Return the names of files in a folder that have a suffix of pickles."""
    return sorted(p.name for p in folder.glob("*") if p.name.endswith(PICKLES) and p.is_file())


def missing_weights_error(file: Path, indexed: bool) -> str:
    """Return the error message for a folder in which this weights file is missing."""
    folder = file.parent
    if indexed:
        return f"{file} is missing, although {INDEX} names it. Download the shard again."
    if pickled := find_pickles(folder):
        return (
            f"{folder} contains only pickled weights ({', '.join(pickled[:3])}); a pickle can run code when it is "
            "read, so Octavo reads only safetensors. Save the model with save_pretrained (safetensors is its format) "
            "first."
        )
    text = f"{folder} contains no {file.name} and no {INDEX}: there are no weights to load."
    if (folder / "config.json").is_file():
        return text
    return f"{text} {folder} is {describe_folder(folder)}"


def companions(folder: Path) -> list[Path]:
    """Return the files of COMPANIONS in a folder, including broken links; for a model in three folders, those in
    each."""
    folders = (folder, *(folder / part for part in parts_of(folder)))
    return sorted({file for home in folders for pattern in COMPANIONS for file in home.glob(pattern)})


def check_companions(folder: Path, copied: bool = False) -> None:
    """Raise ModelError, naming the file, unless all files of COMPANIONS can be read: JSON objects, UTF-8 text, regular
    files.

    copied: the files will be copied, so links out of the folder are refused too: they might publish other files. The
    blobs of a hub's cache count as inside (`safe_read.link_target_outside`).
    """
    for file in companions(folder):
        if copied:
            refuse_outside(file, folder)
        read_companion(file)
    check_generation_config(folder)


def refuse_outside(file: Path, folder: Path) -> None:
    """Raise ModelError for a file that is a link out of the folder and would be copied."""
    if (target := safe_read.link_target_outside(file, folder)) is not None:
        raise ModelError(
            f"{safe_read.printable(file)} is a link to a file outside its folder, {safe_read.printable(target)}, which "
            "is not copied. Replace the link by the file if it should be copied."
        )


def read_companion(file: Path) -> bytes:
    """Return the contents of one of COMPANIONS after parsing it to check its format. Raises ModelError."""
    raw = safe_read.read_bytes(file, ModelError)
    if file.suffix in (".json", ".jinja", ".txt"):
        text = safe_read.decode(raw, file, ModelError)
        if file.suffix == ".json":
            safe_read.parse_json(text, file, ModelError)
    return raw


def copy_companions(source: Path, target: Path, encrypted: encryption.Folder | None = None) -> None:
    """Copy tokenizer, processor, chat template and generation settings from one model folder to another. Raises
    ModelError for a file that cannot be read or that is a link out of the source (`check_companions`)."""
    check_companions(source, copied=True)
    for file in companions(source):
        copied = target / file.relative_to(source)
        copied.parent.mkdir(exist_ok=True)
        raw = read_companion(file)
        encryption.write_file(copied, raw, encrypted)


def write_config(
    source: Path,
    target: Path,
    dtype: torch.dtype,
    quantization: Mapping[str, object] | None = None,
    encrypted: encryption.Folder | None = None,
    changes: Mapping[str, object] = MappingProxyType({}),
    untied: bool = False,
) -> None:
    """Write the source's config.json to `target` with the dtype and the quantization of the written weights, and
    without the names of code (`auto_map`), which is not copied. For a model in three folders, this is done in each of
    them.

    changes  new values of keys that config.json or a part of it has; None removes the key
    untied   the model has no tied weights: `tie_word_embeddings` is false, also where a family's default is true
    """
    for part in parts_of(source):
        (target / part).mkdir(exist_ok=True)
        has_ties = untied and part == PARTS[0]
        write_config(source / part, target / part, dtype, encrypted=encrypted, changes=changes, untied=has_ties)
    changes = {**changes, TIED: False} if untied else changes
    config = read_json(source / "config.json")
    config.pop("auto_map", None)
    name = str(dtype).removeprefix("torch.")
    removed = {*QUANTIZED_KEYS, *(key for key, value in changes.items() if value is None)}

    def rewrite(node: Any) -> Any:  # parts of a model have their dtypes and quantization in nested objects
        if not isinstance(node, dict):
            return node
        fields = {key: changes.get(key, value) for key, value in node.items() if key not in removed}
        return {key: name if key in ("dtype", "torch_dtype") else rewrite(value) for key, value in fields.items()}

    config = rewrite(config)
    if "torch_dtype" not in config:
        config["dtype"] = name
    if untied and not parts_of(source):
        config[TIED] = False
    if quantization is not None:
        config["quantization_config"] = dict(quantization)
    encryption.write_file(target / "config.json", (json.dumps(config, indent=2) + "\n").encode(), encrypted)


def shorten_error(error: BaseException) -> str:
    text = " ".join(str(error).split())
    if isinstance(error, KeyError):  # whose text is only the key
        text = f"no entry for {text}"
    return text if len(text) <= 600 else text[:600] + " ..."
