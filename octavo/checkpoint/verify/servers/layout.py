"""Reads a quantization_config as vLLM and SGLang do: what they quantize, which scales they expect, what they refuse.

Octavo itself reads fewer layouts (`octavo.models.folder.quantization`). Sources: vLLM 0.32, `Fp8Config.from_config`,
`CompressedTensorsConfig.from_config` and `_get_scheme_from_parts`; SGLang's files of the same names, which came from
vLLM's.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

#: methods that vLLM 0.32 knows (its `QuantizationMethods`); others are refused
METHODS = (
    "awq",
    "auto_awq",
    "fp8",
    "fbgemm_fp8",
    "fp_quant",
    "modelopt",
    "modelopt_fp4",
    "modelopt_mxfp8",
    "modelopt_mixed",
    "auto_gptq",
    "gptq",
    "gptq_marlin",
    "awq_marlin",
    "humming",
    "compressed-tensors",
    "experts_int8",
    "quark",
    "moe_wna16",
    "torchao",
    "inc",
    "mxfp4",
    "gpt_oss_mxfp4",
    "deepseek_v4_fp8",
    "online",
    "fp8_per_tensor",
    "fp8_per_block",
    "fp8_per_channel",
    "int8_per_channel_weight_only",
    "nvfp4_per_token",
    "mxfp8",
)
_CHECKS = {"num_bits": (8, 8), "type": ("float", "int"), "symmetric": (True, True), "dynamic": (False, False)}
_FORMATS = ("naive-quantized", "int-quantized", "float-quantized", "nvfp4-pack-quantized")
_STRATEGIES = ("tensor", "channel", "group", "block", "token", "tensor_group", "attn_head")

_Block = Mapping[str, Any]


class Refusal(Exception):
    """A server refuses the quantization_config; the text is the reason."""


@dataclass(frozen=True)
class Layout:
    """What a server expects of the quantized layers.

    method   "fp8" or "compressed-tensors"
    kind     "channel", "tensor" or "block": what shares one scale; "none" if no layer is quantized
    block    (rows, columns) of a block, None for the other kinds
    static   whether every layer has an `input_scale`
    skipped  layers that are not quantized: names, for compressed-tensors also `re:` patterns
    targets  quantized layers (only compressed-tensors): names, `re:` patterns, parts of class names
    weights_only  whether activations stay in high precision, for which other kernels exist
    """

    method: str
    kind: str
    block: tuple[int, int] | None = None
    static: bool = False
    skipped: tuple[str, ...] = ()
    targets: tuple[str, ...] = ("Linear",)
    weights_only: bool = False

    @property
    def scale_suffix(self) -> str:
        """The suffix after `X.weight` in the name of its scales."""
        return "_scale_inv" if self.method == "fp8" and self.kind == "block" else "_scale"

    def grid(self, n: int, k: int) -> tuple[int, ...]:
        """Return the shape of the scales of a weight [n, k]; () is one scale, stored as [] or [1]."""
        if self.kind == "tensor":
            return ()
        return (n, 1) if self.block is None else (-(-n // self.block[0]), -(-k // self.block[1]))


def read_layout(block: object) -> Layout | None:
    """Return the layout of a quantization_config; None for a form that is not predicted.

    Raises Refusal for a form that the servers refuse.
    """
    if not isinstance(block, Mapping):
        return None
    method = str(block.get("quant_method") or "").lower().replace("compressed_tensors", "compressed-tensors")
    if method == "fp8":
        return _read_fp8(block)
    if method == "compressed-tensors":
        return _read_compressed(block)
    if not method:
        return Layout("fp8", "none")  # vLLM takes the folder for one without quantization
    if method not in METHODS:
        raise Refusal(f"quant_method {method!r} is unknown")
    return None


def takes_integers(block: object) -> bool:
    """Whether a quantization_config of compressed-tensors makes servers build int8 parameters for weights and
    activations of 8 bits (`_is_static_tensor_w8a8`, `_is_dynamic_token_w8a8`)."""
    groups = block.get("config_groups") if isinstance(block, Mapping) else None
    if not isinstance(block, Mapping) or not isinstance(groups, Mapping) or not groups:
        return False
    return all(_takes_integers(group, group.get("format") or block.get("format")) for group in groups.values())


def _takes_integers(group: object, form: object) -> bool:
    weights, inputs = (
        group.get(key) if isinstance(group, Mapping) else None for key in ("weights", "input_activations")
    )
    if not isinstance(weights, Mapping) or not isinstance(inputs, Mapping):
        return False
    wanted = {**_CHECKS, "type": ("int", "int")}
    return (
        form in ("naive-quantized", "int-quantized", "float-quantized")
        and weights.get("strategy") in ("tensor", "channel")
        and all(weights.get(key, default) == value for key, (value, default) in wanted.items())
        and inputs.get("num_bits", 8) == 8
        and inputs.get("strategy") == ("token" if inputs.get("dynamic") else "tensor")
    )


def _read_fp8(block: _Block) -> Layout:
    if "activation_scheme" not in block:
        raise Refusal("quantization_config has no activation_scheme")
    scheme, size = block["activation_scheme"], block.get("weight_block_size")
    if scheme not in ("static", "dynamic"):
        raise Refusal(f"activation_scheme {scheme!r} is unknown")
    if size is not None and (not isinstance(size, list | tuple) or len(size) != 2):
        raise Refusal("weight_block_size has not two numbers")
    if size is not None and scheme == "static":
        raise Refusal("blocks are read only with dynamic activations")
    skipped = tuple(block.get("ignored_layers") or block.get("modules_to_not_convert") or ())
    if size is None:
        return Layout("fp8", "tensor", None, scheme == "static", skipped)
    return Layout("fp8", "block", (int(size[0]), int(size[1])), False, skipped)


def _read_compressed(block: _Block) -> Layout | None:
    ignore = block.get("ignore", [])
    groups = block.get("config_groups") or {}
    if not isinstance(groups, Mapping) or not isinstance(ignore, list | tuple):
        raise Refusal("quantization_config has a field of a wrong type")
    schemes: set[tuple[str, tuple[int, int] | None, bool]] = set()
    targets: list[str] = []
    for group in groups.values():
        if not isinstance(group, Mapping) or not isinstance(group.get("weights"), Mapping):
            return None
        scheme = _read_scheme(group, group.get("format") or block.get("format"))
        if scheme is None:
            return None
        schemes.add(scheme)
        targets += group.get("targets") or ()
    if not schemes:
        return Layout("compressed-tensors", "none", skipped=tuple(ignore), targets=())
    if len(schemes) > 1:
        return None
    ((kind, size, static),) = schemes
    without_inputs = not all(group.get("input_activations") for group in groups.values())
    return Layout("compressed-tensors", kind, size, static, tuple(ignore), tuple(targets), without_inputs)


def _read_scheme(group: _Block, form: object) -> tuple[str, tuple[int, int] | None, bool] | None:
    """Return (kind, block, static) of a group of FP8 weights; None for weights of another kind. Raises Refusal."""
    weights, inputs = group["weights"], group.get("input_activations")
    strategy = weights.get("strategy")
    if strategy not in _STRATEGIES:
        raise Refusal(f"strategy {strategy!r} of the weights is unknown")
    if form not in _FORMATS and (weights.get("type") == "float" or form is None):
        raise Refusal(f"no scheme fits FP8 weights of format {form!r}")
    if any(weights.get(key, default) != wanted for key, (wanted, default) in _CHECKS.items()):
        if weights.get("type") == "float" and weights.get("num_bits", 8) == 8:
            raise Refusal("no scheme fits these weights: FP8 weights are symmetric and not dynamic")
        return None
    if strategy not in ("tensor", "channel", "block"):
        raise Refusal(f"no scheme fits FP8 weights with strategy {strategy!r}")
    static = isinstance(inputs, Mapping) and not inputs.get("dynamic")
    size = weights.get("block_structure")
    if isinstance(size, str):
        size = [int(side) for side in size.split("x")]
    if strategy == "block" and (static or not isinstance(size, list | tuple) or len(size) != 2):
        raise Refusal("blocks are read only with a block_structure of two numbers and dynamic activations")
    return strategy, (int(size[0]), int(size[1])) if strategy == "block" else None, static
