"""Reads and writes the block `quantization_config` of an FP8 checkpoint's config.json.

    method              on disk, with X.weight (float8_e4m3fn, [N, K])           written by
    ------------------  -------------------------------------------------------  -------------------------------------
    fp8                 X.weight_scale_inv [ceil(N / r), ceil(K / c)]            DeepSeek, Qwen's -FP8, transformers
    compressed-tensors  X.weight_scale [N, 1], [1], or as above: `channel`,      llm-compressor (`FP8_DYNAMIC`, `FP8`,
                        `tensor`, `block`; format `float-quantized`              `FP8_BLOCK`), vLLM's family

Every scale is a dequantization multiplier, value = code * scale, with or without "inv" in its name. Experts are
separate tensors on disk, `mlp.experts.3.up_proj.weight`. The kinds, as in `fp8.weights.FROZEN`, are row (= channel),
block and tensor.

Two lists determine which layers are in FP8, and loaders interpret them differently: by `matches_exactly`,
`matches_parts`, `matches_pattern` or `matches_target`. Checkpoints should therefore list full names, which all loaders
understand.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from octavo import fp8
from octavo.base.recipe_specs import FROZEN_BLOCKS
from octavo.models.errors import ModelError
from octavo.models.folder.folder import QUANTIZED_KEYS, read_json, wrap_errors

METHODS = ("fp8", "compressed-tensors")
#: tensors that servers concatenate to one matrix, by the last part of their names on disk, in the matrix' order
FUSED: tuple[tuple[str, ...], ...] = (
    ("q_proj", "k_proj", "v_proj"),
    ("gate_proj", "up_proj"),
    ("w1", "w3"),
    ("in_proj_b", "in_proj_a"),
    ("in_proj_qkv", "in_proj_z"),
)
#: names of the scales of an FP8 KV cache (`octavo.checkpoint.verify.cache_scales` lists the programs that write them)
_CACHE_SCALE = re.compile(r"(^|\.)((q|k|v|kv|prob)_scale|kv_cache_scale|(q|k|v|kv)_proj\.output_scale)$")
_STRATEGIES = {"channel": "row", "tensor": "tensor", "block": "block"}
_FORMATS = ("float-quantized", "naive-quantized")  # older versions use the second name for the same format
_FIX = (
    "Use the checkpoint in BF16 (`load_in_fp8` quantizes it while loading), or one in DeepSeek's block format or "
    "compressed-tensors `float-quantized`."
)


@dataclass(frozen=True)
class Quantization:
    """How the weights of a folder are quantized.

    method        "fp8" (DeepSeek, Qwen, transformers) or "compressed-tensors" (llm-compressor)
    kind          "row", "block" or "tensor": the unit that shares one scale
    block         (rows, columns) of a block, None for the other kinds
    skipped       layers in high precision: names, and for compressed-tensors also classes and `re:` patterns
    targets       quantized layers (only compressed-tensors): classes, names, `re:` patterns
    activations   "dynamic", "static" (the folder has an `input_scale` for each layer) or "none" (only weights)
    scale_format  "float" (fp32 or bf16 on disk) or "ue8m0" (powers of two, one byte; only method "fp8")
    """

    method: str
    kind: str
    block: tuple[int, int] | None = None
    skipped: tuple[str, ...] = ()
    targets: tuple[str, ...] = ("Linear",)
    activations: str = "dynamic"
    scale_format: str = "float"

    @property
    def scale_suffix(self) -> str:
        """The suffix after `X.weight` in the name of its scales."""
        return "_scale_inv" if self.method == "fp8" and self.kind == "block" else "_scale"

    @property
    def spec(self) -> fp8.CastSpec:
        """The cast of frozen weights of these codes: scales of any value ("fp32")."""
        block = self.block if self.kind == "block" else FROZEN_BLOCKS[self.kind]
        assert block is not None
        return fp8.CastSpec("e4m3", block, "fp32")

    def grid(self, n: int, k: int) -> tuple[int, int]:
        """Return the shape of the scales of a weight [n, k] in frozen weights: [n, 1], [1, 1] or blocks."""
        if self.kind == "tensor":
            return (1, 1)
        if self.block is None:
            return (n, 1)
        return (-(-n // self.block[0]), -(-k // self.block[1]))

    def covers(self, name: str, types: Iterable[str] = ("Linear",)) -> bool:
        """Return whether the linear layer of this name is in FP8 by the rule of the method's library (for fp8:
        transformers). `types`: the names of the module's class and its base classes."""
        if self.method == "fp8":
            return not matches_pattern(name, self.skipped)
        types = tuple(types)
        return matches_target(name, self.targets, types) and not matches_target(name, self.skipped, types)

    def __str__(self) -> str:
        size = f" {self.block[0]}x{self.block[1]}" if self.block else ""
        return f"{self.method} {self.kind}{size}"


def is_cache_scale(name: str) -> bool:
    """Return whether a tensor of this name is a scale of an FP8 KV cache, which only servers use."""
    return _CACHE_SCALE.search(name) is not None


def matches_exactly(name: str, names: Iterable[str]) -> bool:
    """Apply vLLM's rule for `fp8`: the full name is in the list, or for experts the name of one of them."""
    names = tuple(names)
    if name.endswith(".experts"):
        return any(name in other for other in names if "experts" in other)
    return name in names


def matches_parts(name: str, names: Iterable[str]) -> bool:
    """Apply SGLang's rule for `fp8` (since 2026-04): an entry matches consecutive whole parts of the name: `mlp.gate`
    matches `layers.0.mlp.gate` and not `layers.0.mlp.gate_up_proj`; with or without the prefix `model.`."""
    return any(
        f".{form}." in f".{name}." for other in names for form in (other.strip("."), other.removeprefix("model."))
    )


def matches_pattern(name: str, patterns: Iterable[str]) -> bool:
    """Apply transformers' rule for `fp8`: a regular expression that matches from the start to a dot or the end, or a
    suffix of the name.

    In earlier versions (5.17) a match may end anywhere, so `layers.1` also matches `layers.11`: only full names mean
    the same in all versions.
    """
    patterns = tuple(patterns)
    if not patterns:
        return False
    return name.endswith(patterns) or _compile_patterns(patterns).match(name) is not None


@lru_cache(maxsize=64)
def _compile_patterns(patterns: tuple[str, ...]) -> re.Pattern[str]:
    """Compile all patterns to one expression, for speed: a list may have thousands of layer names."""
    boundary = r"(?:(?<=\.)|(?=\.|$))"
    return re.compile(f"(?:{'|'.join(f'(?:{p})' for p in patterns)}){boundary}")


def matches_target(name: str, targets: Iterable[str], types: Iterable[str] = ("Linear",)) -> bool:
    """Apply compressed-tensors' rule: the full name, `re:` with an expression that matches from the start, or a class
    of the module."""
    literals, expressions = _split_targets(tuple(targets))
    return name in literals or any(t in literals for t in types) or any(one.match(name) for one in expressions)


@lru_cache(maxsize=64)
def _split_targets(targets: tuple[str, ...]) -> tuple[frozenset[str], tuple[re.Pattern[str], ...]]:
    marked = tuple(t for t in targets if t.startswith("re:"))
    return frozenset(targets) - frozenset(marked), tuple(re.compile(t.removeprefix("re:")) for t in marked)


def read_quantization(folder: str | Path) -> Quantization | None:
    """Read the quantization of a folder from its config.json; None for a folder in high precision.

    Raises ModelError, with the fix, for a method, a format or a layout that Octavo does not read.
    """
    file = Path(folder) / "config.json"
    block = quantization_block(read_json(file))
    if block is None:
        if (other := file.with_name("hf_quant_config.json")).exists():
            raise ModelError(
                f"{other} describes weights quantized by NVIDIA's ModelOpt, but {file} has no quantization; Octavo "
                f"does not read that format. {_FIX}"
            )
        return None
    return parse(block, str(file))


def quantization_block(config: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Return the quantization block of a config.json, at the top level or in `text_config`, or None if there is
    none."""
    text = config.get("text_config")
    for place in (config, text if isinstance(text, Mapping) else {}):
        for key in QUANTIZED_KEYS:
            if place.get(key) is not None:
                return place[key]
    return None


def check_mapping(block: object, where: str = "quantization_config") -> Mapping[str, object]:
    """Return a `quantization_config`. Raises ModelError if it is no mapping, of which transformers says only which
    attribute of Python it lacks."""
    if not isinstance(block, Mapping):
        raise ModelError(f"{where}: quantization_config must be a mapping, and is {block!r:.80}. Write it again.")
    return block


def parse(block: object, where: str = "quantization_config") -> Quantization:
    """Parse a `quantization_config`; `where`: the file, for error messages. Raises ModelError."""
    block = check_mapping(block, where)
    method = block.get("quant_method", "compressed-tensors" if "config_groups" in block else None)
    with wrap_errors(f"{where}: quantization_config has a field of a wrong type"):
        if method == "fp8":
            return _parse_fp8(block, where)
        if method == "compressed-tensors":
            return _parse_compressed(block, where)
    raise ModelError(
        f"{where} has quantized weights (quant_method {method!r}); Octavo reads only FP8 checkpoints of "
        f"{' and '.join(METHODS)}. {_FIX}"
    )


def parse_autofp8(block: object, where: str = "quantization_config") -> Quantization | None:
    """Parse a `quantization_config` of AutoFP8; return None for any other.

    It is method fp8 with one scale for each tensor: `X.weight_scale`, and with activation_scheme static also
    `X.input_scale`. vLLM and SGLang read it. transformers, which reads only `weight_scale_inv`, does not, and Octavo
    only verifies it. Raises ModelError for fields of a wrong type.
    """
    if not isinstance(block, Mapping) or block.get("quant_method") != "fp8" or block.get("weight_block_size"):
        return None
    scheme = block.get("activation_scheme", "dynamic")
    if scheme not in ("dynamic", "static"):
        return None
    skipped = block.get("ignored_layers")
    if skipped is None:
        skipped = block.get("modules_to_not_convert")
    return Quantization("fp8", "tensor", None, _parse_names(skipped, f"{where}: ignored_layers"), activations=scheme)


def _parse_fp8(block: Mapping[str, Any], where: str) -> Quantization:
    # Every field that changes the meaning of codes or scales must have the one supported value.
    size = block.get("weight_block_size")
    if size is None:
        raise ModelError(
            f"{where}: quant_method 'fp8' without weight_block_size means one scale for each tensor, and loaders "
            "disagree about its name (weight_scale or weight_scale_inv). Per-tensor weights are written by "
            f"compressed-tensors (strategy tensor). {_FIX}"
        )
    scheme = str(block.get("activation_scheme", "dynamic")).lower()
    if scheme != "dynamic":
        raise ModelError(
            f"{where}: quant_method 'fp8' with activation_scheme {scheme!r} needs fixed scales for activations; Octavo "
            f"reads it only with 'dynamic'. {_FIX}"
        )
    formats = {"fmt": ("e4m3", "float8_e4m3fn"), "scale_fmt": ("float", "ue8m0"), "expert_dtype": ("fp8",)}
    for key, known in formats.items():
        if block.get(key) is not None and block[key] not in known:
            raise ModelError(f"{where}: {key} is {block[key]!r}; Octavo reads {' and '.join(known)}. {_FIX}")
    if block.get("modules_to_convert"):
        raise ModelError(
            f"{where}: modules_to_convert {block['modules_to_convert']} puts layers other than linear ones into FP8, "
            f"which Octavo does not read. {_FIX}"
        )
    skipped = block.get("modules_to_not_convert")
    if skipped is None:
        skipped = block.get("ignored_layers")
    return Quantization(
        "fp8",
        "block",
        _parse_pair(size, f"{where}: weight_block_size"),
        _parse_names(skipped, f"{where}: modules_to_not_convert"),
        scale_format=block.get("scale_fmt") or "float",
    )


def _parse_compressed(block: Mapping[str, Any], where: str) -> Quantization:
    status = block.get("quantization_status", "compressed")
    if status != "compressed":
        raise ModelError(f"{where}: quantization_status is {status!r}; only 'compressed' has codes. {_FIX}")
    sparse = block.get("sparsity_config") or {}
    if isinstance(sparse, Mapping) and sparse.get("format", "dense") != "dense":
        raise ModelError(
            f"{where}: sparsity_config has format {sparse['format']!r}; Octavo reads only dense weights. {_FIX}"
        )
    groups = block.get("config_groups")
    if not isinstance(groups, Mapping) or not groups:
        raise ModelError(f"{where}: config_groups is missing or empty, so no layer is named as quantized. {_FIX}")
    layouts: dict[tuple[str, tuple[int, int] | None], list[str]] = {}
    activations = set()
    for name, group in groups.items():
        at = f"{where}: config_groups.{name}"
        if not isinstance(group, Mapping):
            raise ModelError(f"{at} is {group!r}, not an object. Write it again.")
        if group.get("weights") is None:
            continue  # a group that has only activations or the KV cache
        form = group.get("format") or block.get("format")
        if form not in _FORMATS:
            raise ModelError(
                f"{at} has format {form!r}; Octavo reads only 'float-quantized' of compressed-tensors. {_FIX}"
            )
        layout = _parse_weights(group["weights"], at)
        layouts.setdefault(layout, []).extend(_parse_names(group.get("targets"), f"{at}.targets"))
        inputs = group.get("input_activations")
        activations.add("none" if inputs is None else "dynamic" if inputs.get("dynamic") else "static")
    if len(layouts) != 1:
        raise ModelError(
            f"{where}: config_groups quantize weights in {len(layouts)} ways "
            f"({', '.join(k for k, _ in layouts) or 'none'}); Octavo reads only checkpoints with one. {_FIX}"
        )
    ((kind, size), targets), *_ = layouts.items()
    skipped = _parse_names(block.get("ignore"), f"{where}: ignore")
    for pattern in (*targets, *skipped):
        _check_pattern(pattern, where)
    activation = "static" if "static" in activations else "dynamic" if "dynamic" in activations else "none"
    return Quantization("compressed-tensors", kind, size, skipped, tuple(targets), activation)


def _parse_weights(weights: object, at: str) -> tuple[str, tuple[int, int] | None]:
    """Return (kind, block) of the scheme of a group's weights."""
    if not isinstance(weights, Mapping):
        raise ModelError(f"{at}.weights is {weights!r}, not an object. Write it again.")
    wanted = {"num_bits": 8, "type": "float", "symmetric": True, "dynamic": False}
    defaults = {"num_bits": 8, "type": "int", "symmetric": True, "dynamic": False}
    for key, value in wanted.items():
        if (stated := weights.get(key, defaults[key])) != value:
            raise ModelError(f"{at}.weights.{key} is {stated!r}, but Octavo reads only {value!r} (FP8). {_FIX}")
    strategy = weights.get("strategy")
    if strategy not in _STRATEGIES:
        raise ModelError(f"{at}.weights.strategy is {strategy!r}; Octavo reads {', '.join(_STRATEGIES)}. {_FIX}")
    if strategy != "block":
        return _STRATEGIES[strategy], None
    size = weights.get("block_structure")
    if isinstance(size, str) and re.fullmatch(r"\d+x\d+", size):
        size = [int(part) for part in size.split("x")]
    return "block", _parse_pair(size, f"{at}.weights.block_structure")


def _parse_pair(value: Any, where: str) -> tuple[int, int]:
    is_pair = isinstance(value, list | tuple) and len(value) == 2 and all(type(side) is int for side in value)
    if not is_pair or any(side < 1 for side in value):
        raise ModelError(f"{where} is {value!r}; it must be two integers, such as [128, 128]. Correct it.")
    return value[0], value[1]


def _parse_names(value: object, where: str) -> tuple[str, ...]:
    if value is None:
        return ()
    if not isinstance(value, list | tuple) or not all(isinstance(name, str) for name in value):
        raise ModelError(f"{where} is {value!r}, not a list of names. Write it again.")
    for name in value if "modules_to_not_convert" in where else ():
        _check_pattern(f"re:{name}", where)
    return tuple(value)


def _check_pattern(pattern: str, where: str) -> None:
    if pattern.startswith("re:"):
        try:
            re.compile(pattern.removeprefix("re:"))
        except re.error as error:
            raise ModelError(f"{where}: {pattern!r} is not a regular expression: {error}. Write it again.") from error


def to_config(quantization: Quantization) -> dict[str, Any]:
    """Return the `quantization_config` of a Quantization; `parse` inverts this.

    fp8 has every key that vLLM, SGLang and transformers read, compressed-tensors the keys that its version 0.20 writes.
    Raises ModelError for a Quantization that the method cannot express.
    """
    q = quantization
    # Keys that are None are also written, as in compressed-tensors.
    if q.method == "fp8":
        if q.kind != "block" or q.block is None or q.activations != "dynamic" or q.targets != ("Linear",):
            raise ModelError(
                f"quant_method 'fp8' supports only blocks with dynamic activations, not {q}; use compressed-tensors."
            )
        block: dict[str, Any] = {
            "quant_method": "fp8",
            "fmt": "e4m3",
            "activation_scheme": "dynamic",
            "weight_block_size": list(q.block),
            "modules_to_not_convert": list(q.skipped),
        }
        return block if q.scale_format == "float" else {**block, "scale_fmt": q.scale_format}
    if q.scale_format != "float":
        raise ModelError(
            f"compressed-tensors does not support {q.scale_format} scales; use method 'fp8', or float scales."
        )
    weights = _quantization_arguments({"row": "channel"}.get(q.kind, q.kind), dynamic=False)
    if q.block is not None:
        weights["block_structure"] = list(q.block)
    return {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "quantization_status": "compressed",
        "global_compression_ratio": None,
        "kv_cache_scheme": None,
        "ignore": list(q.skipped),
        "config_groups": {
            "group_0": {
                "targets": list(q.targets),
                "format": "float-quantized",
                "weights": weights,
                "input_activations": _activation_arguments(q),
                "output_activations": None,
            }
        },
    }


def _activation_arguments(q: Quantization) -> dict[str, object] | None:
    if q.activations == "none":
        return None
    if q.activations == "static":
        return _quantization_arguments("tensor", dynamic=False)
    if q.block is not None:
        return {**_quantization_arguments("group", dynamic=True), "group_size": q.block[1]}
    return _quantization_arguments("token", dynamic=True)


def _quantization_arguments(strategy: str, dynamic: bool) -> dict[str, object]:
    fp8_words = {"num_bits": 8, "type": "float", "symmetric": True}
    return {**fp8_words, "group_size": None, "strategy": strategy, "dynamic": dynamic}
