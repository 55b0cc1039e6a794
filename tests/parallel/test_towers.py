"""A tower under FSDP2 when only one of two ranks has an image or sound: no hang, and the gradients of one process."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

from octavo import models
from octavo.models.forward.unused_towers import (
    attach_dummy_image,
    attach_dummy_sound,
    attach_idle_experts,
    dummy_image_inputs,
)
from octavo.models.tiny import tiny
from octavo.parallel import World, shard
from tests import ranks
from tests.parallel.differences import worst_difference

_BLOCKS = ("blocks", "layers")


def _vision(world: World, path: str) -> dict:
    return {f"{frozen}": _one_vision(world, path, frozen) for frozen in (True, False)}


def _one_vision(world: World, path: str, frozen: bool) -> dict:
    """Rank 1's row has no image. The reference processes both rows one after the other in one process."""
    sharded, whole = models.load(path), models.load(path)
    family = models.describe(sharded)
    rows = _rows(sharded, family)
    for model in (sharded, whole):
        if frozen:
            models.freeze(model, family, ["audio_encoder" if family.has_audio else "image_encoder"])
    shard(sharded, family, world)
    batch: dict = {}
    if family.has_audio:
        attach_dummy_sound(sharded, family, lambda: "input_features" not in batch)
    else:
        attach_dummy_image(sharded, family, lambda: "pixel_values" not in batch)
        attach_idle_experts(sharded, family)
    for row in rows:
        whole(**row).logits.float().logsumexp(-1).sum().div(100).backward()
    batch = rows[world.rank]
    sharded(**batch).logits.float().logsumexp(-1).sum().div(100).backward()
    tower = sharded.get_submodule(family.audio_tower or family.tower)
    return {
        "gap": worst_difference(sharded, whole),
        "tower_sharded": all(isinstance(p, DTensor) for p in tower.parameters()),
        "tower_trains": any(p.grad is not None for n, p in tower.named_parameters() if n.startswith(_BLOCKS)),
    }


def _rows(model: nn.Module, family: models.Family) -> list[dict]:
    generator = torch.Generator().manual_seed(1)
    if family.has_audio:
        return _heard(model, family, generator)
    image = dummy_image_inputs(model, family)
    image["pixel_values"] = torch.randn(image["pixel_values"].shape, generator=generator)
    ids = torch.randint(5, 40, (2, 1, 6), generator=generator)
    ids[0, 0, 2] = family.image_token_id
    kinds = (ids == family.image_token_id).long()
    names = ["mm_token_type_ids", "moe_mm_token_type_ids"][: 1 + family.name.startswith("ernie")]
    of = [{"input_ids": row, **dict.fromkeys(names, kind)} for row, kind in zip(ids, kinds, strict=True)]
    return [{**of[0], **image}, of[1]]


def _heard(model: nn.Module, family: models.Family, generator: torch.Generator) -> list[dict]:
    hearing = models.audio_of(model.config)
    ids = torch.randint(5, 40, (2, 1, 6), generator=generator)
    ids[0, 0, 2:4] = family.audio_token_id
    mask = torch.zeros(1, hearing.frames, dtype=torch.int64)
    mask[:, :7] = 1
    sound = torch.randn(1, hearing.bins, hearing.frames, generator=generator)
    options = {"attention_mask": torch.ones_like(ids[0])}
    heard = {"input_ids": ids[0], "input_features": sound, "feature_attention_mask": mask}
    return [{**heard, **options}, {"input_ids": ids[1], **options}]


@pytest.mark.long
@pytest.mark.parametrize(
    ("family", "axes"),
    [
        ("qwen3_vl", {}),
        ("qwen2_audio", {}),
        ("ernie4_5_vl_moe", {}),
        ("ernie4_5_vl_moe", {"replicate": 2}),
        ("ernie4_5_vl_moe", {"expert": 2}),
    ],
    ids=lambda value: value if isinstance(value, str) else "".join(value),
)
def test_a_rank_without_an_image_runs_the_tower_too(family, axes, tmp_path):
    """Also for experts that only images reach."""
    path = tiny.write(family, tmp_path / "model", size="mini")
    for answer in ranks.run(_vision, 2, str(path), **axes):
        for frozen, got in answer.items():
            assert got["gap"] < 1e-4, (frozen, got)
            assert got["tower_sharded"]
            assert got["tower_trains"] == (frozen == "False")
