"""FP8 folders written from small checkpoints by the published layouts, without Octavo's code, and reference
decoding."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from octavo import models

# names on disk of the linear layers of language models, experts one by one
LINEAR = re.compile(
    r"(layers\.\d+\.(self_attn\.[qkvo]_proj|mlp\.((experts\.\d+\.)?(gate|up|down)_proj))"
    r"|blocks\.\d+\.(attn\.(Wqkv|out_proj)|ffn\.(up|down)_proj))\.weight$"
)
TOWERS = ("visual", "audio_tower", "vision_tower", "vision_model", "multi_modal_projector", "mlp1", "mm_projector")
BLOCK = {
    "quant_method": "fp8",
    "fmt": "e4m3",
    "activation_scheme": "dynamic",
    "weight_block_size": [128, 128],
    "modules_to_not_convert": ["lm_head", *(f"model.{t}" for t in TOWERS), *TOWERS],
}


def compressed(strategy: str, activations: dict | None = None, **weights) -> dict:
    """Return the block that compressed-tensors 0.20 writes for FP8_DYNAMIC (channel), FP8 (tensor) and FP8_BLOCK
    (block)."""
    common = {"num_bits": 8, "type": "float", "symmetric": True, "group_size": None}
    inputs = {**common, "strategy": "token", "dynamic": True} if activations is None else {**common, **activations}
    group = {
        "targets": ["Linear"],
        "format": "float-quantized",
        "weights": {**common, "strategy": strategy, "dynamic": False, **weights},
        "input_activations": inputs,
        "output_activations": None,
    }
    return {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "quantization_status": "compressed",
        "global_compression_ratio": None,
        "kv_cache_scheme": None,
        "ignore": ["lm_head", *(f"re:.*{t}.*" for t in TOWERS)],
        "config_groups": {"group_0": group},
    }


CHANNEL = compressed("channel")
TENSOR = compressed("tensor", {"strategy": "tensor", "dynamic": False})
CT_BLOCK = compressed("block", {"strategy": "group", "dynamic": True, "group_size": 128}, block_structure=[128, 128])
CONFIGS = {"fp8": BLOCK, "channel": CHANNEL, "tensor": TENSOR, "block": CT_BLOCK}


def blocks(value: Tensor, rows: int, columns: int) -> tuple[Tensor, Tensor]:
    """Return (codes, scales) in blocks, scale = amax / 448; -1 is the full side."""
    n, k = value.shape
    rows, columns = (n if rows == -1 else rows), (k if columns == -1 else columns)
    scale = torch.empty(-(-n // rows), -(-k // columns))
    codes = torch.empty(n, k, dtype=torch.float8_e4m3fn)
    for i in range(scale.shape[0]):
        for j in range(scale.shape[1]):
            part = (slice(i * rows, (i + 1) * rows), slice(j * columns, (j + 1) * columns))
            scale[i, j] = value[part].abs().amax().float().clamp(min=1e-12) / 448
            codes[part] = (value[part].float() / scale[i, j]).to(torch.float8_e4m3fn)
    return codes, scale


SIZES = {"fp8": (128, 128), "block": (128, 128), "channel": (1, -1), "tensor": (-1, -1)}


def spell(scale: Tensor, method: str, dtype: torch.dtype) -> Tensor:
    """Return the scales as stored on disk: [N, 1] for channels, [1] for tensors."""
    return (scale.reshape(1) if method == "tensor" else scale).to(dtype)


def unfused(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Split fused experts like llm-compressor: X.experts.gate_up_proj -> X.experts.3.gate_proj.weight ..."""
    out = {}
    for name, value in weights.items():
        if name.endswith("experts.gate_up_proj"):
            for index, matrix in enumerate(value):
                gate, up = matrix.chunk(2)
                stem = name.removesuffix("gate_up_proj")
                out[f"{stem}{index}.gate_proj.weight"], out[f"{stem}{index}.up_proj.weight"] = gate, up
        elif name.endswith("experts.down_proj"):
            for index, matrix in enumerate(value):
                out[f"{name.removesuffix('down_proj')}{index}.down_proj.weight"] = matrix
        else:
            out[name] = value
    return out


def quantized(
    source: Path, target: Path, method: str, scale_dtype: torch.dtype = torch.float32
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Write an FP8 folder; return (codes, written fp32 scales) by the weights' names on disk."""
    shutil.copytree(source, target)
    weights = unfused(load_file(source / "model.safetensors"))
    codes, scales, out = {}, {}, {}
    for name, value in weights.items():
        if not LINEAR.search(name) or any(tower in name for tower in TOWERS):
            out[name] = value.bfloat16()
            continue
        code, scale = blocks(value.bfloat16(), *SIZES[method])
        if scale_dtype is not torch.float32:  # the scale is what is written, and codes are made with it
            if scale_dtype is torch.float8_e8m0fnu:
                scale = torch.exp2(scale.log2().ceil())
            scale = scale.to(scale_dtype).float()
            code = (value.bfloat16().float() / _spread(scale, value.shape)).clamp(-448, 448).to(torch.float8_e4m3fn)
        codes[name], scales[name] = code, scale
        out[name] = code
        out[name + ("_scale_inv" if method == "fp8" else "_scale")] = spell(scale, method, scale_dtype)
        if method == "tensor":
            out[name.removesuffix("weight") + "input_scale"] = torch.ones(1)
    save_file({n: v.contiguous() for n, v in out.items()}, target / "model.safetensors", metadata={"format": "pt"})
    edit_config(target, quantization_config=CONFIGS[method], dtype="bfloat16")
    assert codes
    return codes, scales


def _spread(scale: Tensor, shape: torch.Size) -> Tensor:
    """Expand each scale over its block of 128, its row, or the full matrix."""
    rows = {1: shape[0], shape[0]: 1}.get(scale.shape[0], 128)
    columns = {1: shape[1]}.get(scale.shape[1], 128)
    return scale.repeat_interleave(rows, 0)[: shape[0]].repeat_interleave(columns, 1)[:, : shape[1]]


def edit_config(folder: Path, **changes) -> None:
    file = folder / "config.json"
    merged = {**json.loads(file.read_text()), **changes}
    file.write_text(json.dumps({k: v for k, v in merged.items() if v is not None}))


def edit_weights(folder: Path, change: Callable[[dict[str, Tensor]], object]) -> None:
    file = folder / "model.safetensors"
    weights = load_file(file)
    change(weights)
    save_file({n: v.contiguous() for n, v in weights.items()}, file, metadata={"format": "pt"})


# What tests ask of them -----------------------------------------------------------------------------------------------


def same(one, other) -> bool:
    return torch.equal(one.view(torch.uint8), other.view(torch.uint8))


def refused(folder: Path, message: str, **arguments) -> None:
    with pytest.raises(models.ModelError, match=message):
        models.load(folder, torch.bfloat16, **arguments)
