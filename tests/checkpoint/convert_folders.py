"""Folders to convert, and what tells whether they came through whole."""

from __future__ import annotations

import json
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file

from octavo import fp8
from octavo.checkpoint import SafeReader
from octavo.checkpoint.run_state.dcp_safe import TensorLoadPlanner
from octavo.fp8.weights import FROZEN

NAME = "model.language_model.layers.0.mlp.down_proj.weight"


def tensors(seed: int = 0) -> dict[str, torch.Tensor]:
    """Every kind that a checkpoint may hold: dtypes, a scalar, nothing at all, odd lengths, experts in one tensor."""
    generator = torch.Generator().manual_seed(seed)

    def values(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    return {
        "lm_head.weight": values(10, 6).bfloat16(),
        "model.language_model.embed_tokens.weight": values(10, 6).bfloat16(),
        "model.language_model.norm.weight": values(7),
        "model.language_model.layers.0.mlp.experts.gate_up_proj": values(3, 4, 6).bfloat16(),
        "model.language_model.layers.0.steps": torch.tensor(7),
        "model.language_model.layers.0.mask": torch.tensor([True, False, True]),
        "model.visual.patch_embed.weight": values(4, 3, 2, 2, 2).half(),
        "model.visual.nothing": torch.empty(0, 5),
        "model.visual.bytes": torch.arange(5, dtype=torch.uint8),
    }


def write(folder: Path, shards: list[dict[str, torch.Tensor]], config: dict | None = None) -> Path:
    """A folder as publishers leave it: shards, index, configuration, files of all sorts."""
    folder.mkdir(parents=True)
    names = {}
    for number, shard in enumerate(shards, 1):
        file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        save_file(shard, folder / file, metadata={"format": "pt", "made": "by a test"})
        names |= dict.fromkeys(shard, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": names}, indent=2))
    (folder / "config.json").write_text(json.dumps(config or {"model_type": "qwen3_vl", "dtype": "bfloat16"}))
    (folder / "tokenizer.json").write_text('{"a": "\\u00e9"}')
    (folder / "merges.txt").write_bytes(b"\xff\xfe\r\n")
    return folder


def quantized(seed: int = 1) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor], dict]:
    """An FP8 folder in DeepSeek's layout, two shards with a weight apart from its scales, and its configuration."""
    weight = torch.randn(200, 130, generator=torch.Generator().manual_seed(seed))
    q = fp8.quantize(weight, FROZEN["block"])
    other = fp8.quantize(weight[:128, :128].contiguous(), FROZEN["block"])
    head = torch.randn(4, 4)
    config = {
        "model_type": "qwen3",
        "torch_dtype": "bfloat16",
        "quantization_config": {
            "quant_method": "fp8",
            "activation_scheme": "dynamic",
            "weight_block_size": [128, 128],
            "modules_to_not_convert": ["lm_head"],
        },
    }
    first = {NAME: q.data, "lm_head.weight": head, "b.weight": other.data, "b.weight_scale_inv": other.scale}
    return first, {f"{NAME}_scale_inv": q.scale.to(torch.float8_e8m0fnu)}, config


def two_shards(folder: Path) -> Path:
    """A folder of :func:`tensors`, in two shards."""
    all_of = tensors()
    names = list(all_of)
    return write(folder, [{n: all_of[n] for n in names[:4]}, {n: all_of[n] for n in names[4:]}])


def same_files(one: Path, other: Path) -> None:
    names = sorted(p.name for p in one.iterdir() if p.is_file())
    assert names == sorted(p.name for p in other.iterdir())
    for name in names:
        assert (one / name).read_bytes() == (other / name).read_bytes(), name


def by_dcp(directory: Path, wanted: dict[str, torch.Tensor], safe: bool = False) -> dict[str, torch.Tensor]:
    """What DCP's own loader (or Octavo's safe one) finds, into empty tensors."""
    state = {key: torch.zeros_like(value) for key, value in wanted.items()}
    if safe:
        reader = SafeReader(directory, skip_byte_entries=True)
        dcp.load(state, storage_reader=reader, planner=TensorLoadPlanner(), no_dist=True)
    else:
        dcp.load({"model": state}, checkpoint_id=directory, no_dist=True)
        return state
    return state


def equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    def raw(t: torch.Tensor) -> torch.Tensor:
        return t.contiguous().flatten().view(torch.uint8) if t.numel() else t

    return one.dtype is other.dtype and one.shape == other.shape and bool(torch.equal(raw(one), raw(other)))


def adapter(tmp_path: Path) -> Path:
    folder = tmp_path / "adapter"
    folder.mkdir()
    prefix = "base_model.model.model.layers.0.self_attn.q_proj.lora_"
    save_file({f"{prefix}A.weight": torch.randn(2, 4), f"{prefix}B.weight": torch.randn(4, 2)},
              folder / "adapter_model.safetensors")  # fmt: skip
    (folder / "adapter_config.json").write_text('{"peft_type": "LORA"}')
    return folder
