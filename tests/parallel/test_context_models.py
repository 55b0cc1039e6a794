"""Whole models on rows that ranks share, images and all: logits of each rank's tokens, and gradients summed over ranks,
against one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from octavo import fp8, models
from octavo.data import Sample, collate_pack
from octavo.data.encoding.sample import Input, concatenate
from octavo.models.forward.unused_towers import attach_dummy_image, attach_idle_experts
from octavo.models.structure import anyres
from octavo.models.tiny import tiny
from octavo.parallel import ImageSharding, World, make_context
from octavo.parallel.images import assign_images, make_assignment
from octavo.train.forward.forward import Forward
from tests import ranks

FAMILIES = ("qwen3", "qwen3_vl", "qwen2_5_vl", "internvl", "qwen3_vl_moe", "mistral3", "llavaonevision1_5",
            "llava_onevision", "ernie4_5_vl_moe")  # fmt: skip
FP8 = "qwen3_fp8"
BALANCE = 0.1
WITHOUT = ("vision_tower.post_layernorm.weight", "vision_tower.post_layernorm.bias", "e_score_correction_bias")
"""What has no gradient: a norm behind the features of LLaVA-OneVision, a correction of Ernie's routers."""


def sample(config: Any, before: int, images: tuple[tuple[int, int], ...], after: int, seed: int) -> Sample:
    """A text with images of given heights and widths in tokens, separated by 3 tokens."""
    random = np.random.default_rng(seed)
    vision, ids, pixels, grid, sizes = getattr(config, "vision_config", None), [], [], [], []
    for high, wide in images if vision is not None else ():
        places = high * wide
        if hasattr(vision, "spatial_merge_size"):
            merge = vision.spatial_merge_size
            grid.append((1, high * merge, wide * merge))
            width = models.vision_of(config).channels * vision.patch_size**2
            pixels.append(random.normal(size=(high * wide * merge**2, width)))
        elif vision.model_type == "pixtral":
            cell = config.spatial_merge_size * vision.patch_size
            sizes.append((high * cell, wide * cell))
            pixels.append(random.normal(size=(1, vision.num_channels, *sizes[-1])))
        elif config.model_type == "llava_onevision":
            sizes.append((high * vision.patch_size, wide * vision.patch_size))
            of = (config, sizes[-1], len(images) == 1)
            places, side = anyres.count_tokens(*of), vision.image_size
            pixels.append(random.normal(size=(1, anyres.count_tiles(*of), vision.num_channels, side, side)))
        else:  # tiles of 4 tokens
            tile = (vision.num_channels, *vision.image_size)
            pixels.append(random.normal(size=(high * wide // 4, *tile)))
        ids += [*random.integers(5, 40, 3), *[config.image_token_id] * places]
    ids = np.array([*random.integers(5, 40, before), *ids, *random.integers(5, 40, after)])
    kinds = (ids == getattr(config, "image_token_id", -1)).astype(np.int64) if pixels else None
    more = {"image_sizes": Input("image", np.array(sizes))} if sizes else {}
    if config.model_type == "llava_onevision" and pixels:
        more["batch_num_images"] = Input("row", np.array([len(images)]))
    if config.model_type == "ernie4_5_vl_moe" and pixels:
        more["moe_mm_token_type_ids"] = Input("token", kinds)
    return Sample(
        ids, ids, kinds, concatenate(pixels).astype(np.float32) if pixels else None, np.array(grid) if grid else None,
        len(pixels), extra=more,
    )  # fmt: skip


def packs(config: Any, size: int) -> list[dict[str, Any]]:
    """Of 128 tokens a rank: images cut by the border of two ranks, and more of them than ranks; one image, of tokens
    that the rank which encodes it does not have."""
    end = 128 * size
    cut = [(90, (), 0), (14, ((6, 6), (2, 4), (2, 2)), 0), (end - 249, ((4, 6), (2, 2)), 0), (1, ((2, 2),), 2)]
    far = [(end - 120, (), 1), (3, ((4, 4),), 9)]
    created = []
    for rows in (cut, far):
        samples = [sample(config, *row, seed=n) for n, row in enumerate(rows)]
        created.append(collate_pack(samples, 0, end, ranks=size))
        assert created[-1]["boundaries"].length == end
    return created


def _wide(model: Any, path: str) -> Any:
    """In float64, except for FP8, because the error of fp32 sums depends on the CPU. Grouped experts do not support
    it."""
    if Path(path).name == FP8:
        return model
    model.set_experts_implementation("eager")
    return model.double()


def _models(world: World, ulysses: int, paths: list[str]) -> dict[str, Any]:
    answer = {}
    for path in paths:
        one, octavo_model = (_wide(models.load(path).train(), path) for _ in range(2))
        family = models.describe(octavo_model)
        if path.endswith(FP8):
            for model in (one, octavo_model):
                fp8.apply(model, fp8.plan(model, "blockwise", components={"foundation": ("model.layers.**",)}))
        context = make_context(world, ulysses, octavo_model.config.get_text_config().num_attention_heads)
        assert context is not None
        images = ImageSharding(octavo_model, family, context) if family.has_vision else None
        alone = Forward(one, World(), None, packed=models.Packed(one, family))
        shared = Forward(
            octavo_model,
            world,
            None,
            packed=models.Packed(octavo_model, family, context),
            context=context,
            image_sharding=images,
        )
        attach_dummy_image(octavo_model, family, lambda: False) if images else None
        for model in (one, octavo_model):
            attach_idle_experts(model, family) if images else None
        gaps, sees, routed = [], [], family.name.endswith("moe")
        for batch in packs(octavo_model.config, world.size):
            part = shared.part(batch)
            pairs = []
            for forward in (alone, shared):
                logits, aux = forward.balanced(batch) if routed else (forward(batch), torch.zeros(()))
                (logits.square().sum() / 1e4 + BALANCE * aux).backward()
                pairs.append((logits.detach(), aux.detach()))
            (whole, balance), (actual, part_of_it) = pairs
            gaps += [float((actual - whole[:, part]).abs().max()), abs(float(world.sum(part_of_it) - balance))]
            sees.append(shared.has_images_here(batch))
        worst = 0.0
        for (name, a), b in zip(one.named_parameters(), octavo_model.parameters(), strict=True):
            if name.endswith(WITHOUT) and a.grad is None and b.grad is None:
                continue
            assert a.grad is not None, name
            total = world.sum(torch.zeros_like(b) if b.grad is None else b.grad)
            worst = max(worst, float((total - a.grad).abs().max() / a.grad.abs().max().clamp(min=1e-3)))
        answer[Path(path).name] = {"gaps": gaps, "grad": worst, "sees": sees}
    return answer


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    folder = tmp_path_factory.mktemp("families")
    made = [str(tiny.write(family, folder / family, size="mini")) for family in FAMILIES]
    (folder / FP8).symlink_to(made[0])
    return [*made, str(folder / FP8)]


LAYOUTS = {
    (2, 1): ("qwen3_vl_moe",),
    (2, 2): ("internvl", "qwen2_5_vl", "qwen3_vl_moe", "llavaonevision1_5", "mistral3", "llava_onevision"),
    (4, 4): ("llavaonevision1_5", "llava_onevision"),
    (4, 2): ("ernie4_5_vl_moe", "internvl"),
    (4, 1): ("qwen2_5_vl", "ernie4_5_vl_moe", "mistral3"),
}
"""(ranks, ulysses) -> whose images and routers are tried beside a text, alone and in FP8, and Qwen3-VL. How rows are
cut is one question and what a family needs of them another: families take turns, each in two layouts."""


@pytest.mark.parametrize(
    ("size", "ulysses"),
    [pytest.param(*layout, marks=[pytest.mark.long] if layout != (2, 1) else []) for layout in LAYOUTS],
    ids=lambda n: str(n),
)
def test_models_give_the_logits_and_gradients_of_one_process(paths: list[str], size: int, ulysses: int):
    options = {"qwen3", "qwen3_vl", FP8, *LAYOUTS[size, ulysses]}
    answers = ranks.run(_models, size, ulysses, [path for path in paths if Path(path).name in options], context=size)
    assert all(answer.keys() == options for answer in answers)
    for answer in answers:
        for family, actual in answer.items():
            exact = ulysses == size and family in ("qwen3", FP8)  # in FP8: every code of a forward is the same
            if family == FP8 and not exact:
                continue  # a code flips where a sum is rounded otherwise
            assert max(actual["gaps"]) <= (0 if exact else 3e-6), (family, actual)
            assert actual["grad"] < (1e-3 if family == FP8 else 2e-6), (family, actual)
    first, *others = (answer["qwen3_vl"]["sees"] for answer in answers)
    assert first == [True, True] and all(sees == [True, False] for sees in others)


def test_images_are_distributed_by_cost():
    assert assign_images([4, 4, 4, 4], 2) == (0, 1, 0, 1)
    assert assign_images([100, 9000, 8000, 900], 2) == (1, 0, 1, 1)
    assert assign_images([], 2) == () and assign_images([7], 4) == (0,)


def test_features_are_in_placeholder_order():
    places, tokens = torch.tensor([2, 3, 4, 9, 10, 11, 12, 13, 14]), (3, 4, 2)
    seen = [make_assignment(places, tokens, (3, 50, 2), 8, 2, rank) for rank in range(2)]
    assert [d.images for d in seen] == [(1,), (0, 2)]
    assert [d.sent for d in seen] == [(0, 4), (3, 2)] and [d.got for d in seen] == [(0, 3), (4, 2)]
    came = torch.tensor([9, 10, 11, 12, 13, 14])  # rank 0's image, then rank 1's
    assert torch.equal(came[seen[1].order], places[3:])
