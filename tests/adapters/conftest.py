"""Mini models of every family, stock and with FP8 weights, that adapters are put beside."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

from octavo import fp8, models
from octavo.config import LoraSection
from octavo.fp8.kernels import registry
from tests.models.conftest import checkpoint as folder  # noqa: F401

FAMILIES = ("qwen3_vl", "qwen2_5_vl", "internvl", "llavaonevision1_5", "qwen3", "llama")
EVERYWHERE = ("foundation", "image_encoder", "image_projector")


def lora(**settings: object) -> LoraSection:
    return LoraSection(**{"rank": 4, "alpha": 8, **settings})


def components(family: models.Family) -> tuple[str, ...]:
    return EVERYWHERE if family.has_vision else EVERYWHERE[:1]


def quantized(model: nn.Module, kind: str = "block", recipe: str | None = None) -> nn.Module:
    """Freeze every linear layer and the experts as codes; with a recipe they multiply by them."""
    for row in fp8.describe_layers(model):
        module = model.get_submodule(row.module)
        name = row.name.rpartition(".")[2] if row.kind == "experts" else "weight"
        if row.kind == "linear" or row.kind == "experts":
            turned = bool(getattr(module, "is_transposed", False))
            module._parameters[name] = fp8.freeze_weight(module._parameters[name], kind, transposed=turned)
    if recipe is not None:
        fp8.apply(model, fp8.plan(model, recipe))
    return model


def inputs(model: nn.Module, family: models.Family, tokens: int = 24) -> dict[str, Tensor]:
    """Ids, labels, and an image in front of them where the family takes one."""
    generator = torch.Generator().manual_seed(1)
    config = model.config
    vocab = getattr(config, "text_config", config).vocab_size
    ids = torch.randint(10, min(vocab, 60), (1, tokens), generator=generator)
    batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    if not family.has_vision:
        return batch
    vision = config.vision_config
    if family.name == "internvl":
        side = vision.image_size[0]
        count = int((side // vision.patch_size[0]) ** 2 * config.downsample_ratio**2)
        batch["pixel_values"] = torch.randn(1, 3, side, side, generator=generator)
    else:
        grid, merge = 4, vision.spatial_merge_size
        count = grid * grid // merge**2
        width = 3 * vision.temporal_patch_size * vision.patch_size**2
        batch["pixel_values"] = torch.randn(grid * grid, width, generator=generator)
        batch["image_grid_thw"] = torch.tensor([[1, grid, grid]])
        batch["mm_token_type_ids"] = torch.zeros_like(ids)
        batch["mm_token_type_ids"][0, 1 : 1 + count] = 1
    ids[0, 1 : 1 + count] = family.image_token_id
    return batch


def train(model: nn.Module, batch: dict[str, Tensor], steps: int = 3, lr: float = 0.05) -> list[float]:
    """A few steps of the trainable parameters; the losses."""
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=lr)
    losses = []
    for _ in range(steps):
        loss = model(**batch, labels=batch["input_ids"]).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses


def logits(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    with torch.no_grad():
        return model.eval()(**batch).logits


@pytest.fixture
def casts(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[int, ...]]]:
    """The shapes of what the reference backend quantizes while the test runs."""
    seen: list[tuple[int, ...]] = []
    backend = type(registry.get("reference"))
    for name in ("quantize", "quantize_both"):
        stock = getattr(backend, name)

        def counted(self, x, *args, stock=stock, **kwargs):
            seen.append(tuple(x.shape))
            return stock(self, x, *args, **kwargs)

        monkeypatch.setattr(backend, name, counted)
    yield seen
