"""Dynamic S2, step by step against loops over the published arithmetic."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import Image

from octavo import models
from octavo.models.custom import nvila
from octavo.models.custom.nvila.images import NvilaImages
from octavo.models.custom.nvila.scales import Cut, make_blocks, make_cut, stitch, used_tiles
from tests.models.conftest import some_image
from tests.models.three_folders import edit, split

SCALES = (8, 16, 24)


def images_of(**limits: int) -> NvilaImages:
    images = NvilaImages(size={"height": 8, "width": 8})
    images.configure(nvila.NvilaConfig(vision_config={"image_size": 8, "patch_size": 2}, s2_scales=SCALES, **limits))
    return images


@pytest.mark.parametrize(
    ("size", "limits", "grid"),
    [
        ((30, 30), {}, (2, 3, 3)),  # as small as it is, no fewer tiles than the largest square has
        ((10, 40), {}, (2, 2, 6)),
        ((40, 10), {}, (2, 6, 2)),
        ((30, 40), {}, (2, 3, 4)),
        ((30, 40), {"max_tiles": 8}, (1, 1, 1)),
    ],
)
def test_grids(size, limits, grid) -> None:
    assert images_of(**limits).grid(*size) == grid


def test_tiles_are_largest_scale_then_smaller_scales_then_padding() -> None:
    image = some_image(1, (40, 30))
    batch = images_of()(images=[image])
    tiles = np.stack(batch["pixel_values"])
    assert batch["grids"] == [(2, 3, 4)] and tiles.shape == (24, 3, 8, 8) and not tiles[17:].any()

    def cut(width: int, height: int) -> list[np.ndarray]:
        whole = np.asarray(image.convert("RGB").resize((width, height), Image.Resampling.BICUBIC), dtype=np.float64)
        whole = ((whole / 255 - 0.5) / 0.5).transpose(2, 0, 1)
        return [whole[:, y : y + 8, x : x + 8] for y in range(0, height, 8) for x in range(0, width, 8)]

    assert np.allclose(tiles[:17], [*cut(32, 24), *cut(8, 8), *cut(16, 16)], atol=1e-5)


def test_blocks_concatenate_all_scales() -> None:
    """The smallest scale's channels come first; maps are resized by area in fp32, also for BF16 features."""
    torch.manual_seed(0)
    one, other = make_cut((2, 2, 3), (1, 4)), make_cut((1, 1, 1), (1, 4))
    assert one == Cut(2, 3, (1, 2), 12) and used_tiles([one, other]) == [*range(11), 12]
    features = torch.randn(12, 4, 4, 5).bfloat16()
    wide, single = make_blocks(features, [one, other], 3)
    assert wide.shape == (6, 4, 4, 15) and torch.equal(single, features[11:].repeat(1, 1, 1, 3))
    largest = torch.cat([torch.cat(list(features[3 * row : 3 * row + 3]), 1) for row in range(2)], 0)  # [8, 12, 5]
    middle = torch.cat([torch.cat(list(features[7 + 2 * row : 9 + 2 * row]), 1) for row in range(2)], 0)
    for row in range(2):
        for column in range(3):
            block = wide[3 * row + column]
            here = slice(4 * row, 4 * row + 4), slice(4 * column, 4 * column + 4)
            assert torch.equal(block[..., 10:], largest[here])
            for small, channels in ((features[6], slice(0, 5)), (middle, slice(5, 10))):
                grown = F.adaptive_avg_pool2d(small.float().permute(2, 0, 1), (8, 12)).permute(1, 2, 0)
                assert torch.equal(block[..., channels], grown[here].bfloat16())


def test_tokens_of_blocks_are_read_row_by_row() -> None:
    """In row order of the image, not of blocks."""
    whole = torch.arange(4 * 6).reshape(4, 6)
    tokens = torch.stack([whole[y : y + 2, x : x + 2].flatten() for y in (0, 2) for x in (0, 2, 4)])[..., None]
    assert torch.equal(stitch(tokens, 2, 3)[:, 0], whole.flatten())


def test_an_image_has_its_blocks_tokens_and_one_line_break(checkpoint) -> None:
    model, processor = models.load(checkpoint("nvila")), models.load_processor(checkpoint("nvila"))
    assert model.config.projector_input == 2 * 64 and model.model.mm_projector.layers[2].in_features == 4 * 2 * 64
    images = [some_image(0, (60, 32)), some_image(1, (16, 16))]
    batch = processor(
        text=["<image><image>?"], images=images, return_tensors="pt", return_text_replacement_offsets=True
    )
    (offsets,) = batch.pop("text_replacement_offsets")
    assert [one["new_span"] for one in offsets] == [(0, 7 * 25), (7 * 25, 7 * 42)]
    assert batch["image_grid_thw"].tolist() == [[2, 2, 3], [2, 2, 2]]
    features = model.model.get_image_features(batch["pixel_values"], batch["image_grid_thw"]).pooler_output
    newline = model.get_input_embeddings().weight[model.config.newline_token_id]
    assert [len(one) for one in features] == [25, 17] and all(torch.equal(one[-1], newline) for one in features)
    changed = batch["pixel_values"].clone()
    changed[7:12] = 1.0  # what fills up the first image goes nowhere
    again = model.model.get_image_features(changed, batch["image_grid_thw"]).pooler_output
    assert all(torch.equal(one, other) for one, other in zip(features, again, strict=True))
    vision = models.vision_of(model.config)
    patches = vision.patches(batch)
    assert patches == [7 * 16, 5 * 16] and list(map(vision.features, patches)) == [24, 16]


def test_scales_of_three_folders(checkpoint, tmp_path) -> None:
    more = {"image_aspect_ratio": "dynamic_s2", "s2_scales": "32,16"}  # VILA sorts them
    folder = split(checkpoint("nvila"), tmp_path / "three", more)
    config = models.read_config(folder)
    assert (config.model_type, config.s2_scales, config.newlines) == ("nvila", (16, 32), 1)
    assert models.load_processor(folder).image_processor.scales == (16, 32)
    for stated in ("a,b", [16, 32]):
        edit(folder / "config.json", s2_scales=stated)
        with pytest.raises(models.ModelError, match="which must be sides in pixels, such as '448,896,1344'"):
            models.read_config(folder)
    with pytest.raises(ValueError, match="s2_scales is .448, 896.; it must begin with one tile, 16 pixels"):
        nvila.NvilaConfig(vision_config={"image_size": 16}, s2_scales=[448, 896])


@pytest.mark.parametrize("family", ["nvila", "nvila_lite"])
def test_ranks_that_share_images_count_their_placeholders(checkpoint, family) -> None:
    """Used to distribute images over ranks: features of each image or tile, including line breaks."""
    processor, config = models.load_processor(checkpoint(family)), models.read_config(checkpoint(family))
    images = [some_image(0, (60, 32)), some_image(1, (16, 16))]
    batch = processor(text=["<image>and<image>"], images=images, return_tensors="pt")
    vision = models.vision_of(config)
    places = sum(vision.features(patches) + vision.ends for patches in vision.patches(batch))
    assert places == int((batch["input_ids"] == processor.image_token_id).sum())
