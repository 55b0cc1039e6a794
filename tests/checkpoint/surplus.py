"""Model folders with tensors that the model class does not load."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from octavo.models.folder.folder import INDEX
from tests.checkpoint import folders

KEY = "num_nextn_predict_layers"
LAYERS = 2  # of the folders that `folders.write` makes


def tensors(layers: int = LAYERS) -> dict[str, Tensor]:
    """Layers for multi-token prediction under both forms of names, a reward head, and integers, in several dtypes."""
    drawn = torch.Generator().manual_seed(7)
    return {
        "mtp.fc.weight": torch.randn(256, 512, generator=drawn).bfloat16(),
        "mtp.norm.weight": torch.ones(256, dtype=torch.bfloat16),
        "mtp.layers.0.mlp.experts.down_proj": torch.randn(2, 256, 128, generator=drawn).half(),
        f"model.layers.{layers}.mlp.up_proj.weight": torch.randn(384, 256, generator=drawn),
        "score.weight": torch.full((1, 256), torch.nan, dtype=torch.float64),  # no value is judged
        "mtp.steps": torch.arange(3),
    }


def add(folder: Path, more: Mapping[str, Tensor], key: str | None = KEY) -> Path:
    """Put tensors into a shard of their own, next to the folder's weights, and announce them in config.json."""
    files = {"model-00001-of-00002.safetensors": weights(folder), "model-00002-of-00002.safetensors": dict(more)}
    for file in folder.glob("*.safetensors"):
        file.unlink()
    for file, content in files.items():
        save_file(content, folder / file, metadata={"format": "pt"})
    placed = {name: file for file, content in files.items() for name in content}
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": placed}))
    if key is not None:
        folders.edit_json(folder / "config.json", lambda raw: raw.get("text_config", raw).update({key: 1}))
    return folder


def copy(source: Path, target: Path, more: Mapping[str, Tensor] | None = None) -> Path:
    """A copy of a good folder with `tensors`."""
    return add(Path(shutil.copytree(source, target)), tensors() if more is None else more)


def weights(folder: Path) -> dict[str, Tensor]:
    """Every tensor of a folder, read by the index if there is one."""
    files = sorted(folder.glob("*.safetensors"))
    content = {name: tensor for file in files for name, tensor in load_file(file).items()}
    if (folder / INDEX).exists():
        assert json.loads((folder / INDEX).read_text())["weight_map"].keys() == content.keys()
    return content


def same(folder: Path, more: Mapping[str, Tensor]) -> bool:
    """Whether a folder holds these tensors, byte for byte."""
    content = weights(folder)
    return all(
        name in content
        and content[name].dtype == tensor.dtype
        and content[name].shape == tensor.shape
        and torch.equal(content[name].contiguous().view(torch.uint8), tensor.contiguous().view(torch.uint8))
        for name, tensor in more.items()
    )
