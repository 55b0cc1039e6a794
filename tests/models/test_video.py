"""Videos to tensors, held against the stock video processors: indices, sizes, patches and times equal exactly. Their
formulas run without torchvision, in whose place an empty module is imported."""

from __future__ import annotations

import importlib
import importlib.util
import json
import sys
import types
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image
from transformers.video_utils import VideoMetadata

from octavo import models
from octavo.base.model_families import RECORDS
from octavo.models import ModelError
from octavo.models.processors.video import VideoProcessor, metadata
from octavo.models.tiny import tiny

KINDS = ("qwen3_vl", "qwen2_5_vl", "internvl")
FILES = {
    "qwen3_vl": ("qwen3_vl", "Qwen3VL"),
    "qwen2_5_vl": ("qwen2_vl", "Qwen2VL"),
    "internvl": ("internvl", "InternVL"),
}
LENGTHS = [(2, 30.0), (5, 8.0), (24, 8.0), (97, 29.97), (300, 30.0), (1000, 23.976), (20000, 25.0)]
SIZES = [(480, 640), (1080, 1920), (100, 37), (20, 30), (2160, 3840)]


@pytest.fixture(scope="module")
def stock():
    """kind -> (module, class) of the stock video processors."""
    names = [f"transformers.models.{folder}.video_processing_{folder}" for folder, _ in FILES.values()]
    empty = {}
    if importlib.util.find_spec("torchvision") is None:
        for name in ("torchvision", "torchvision.transforms", "torchvision.transforms.v2"):
            empty[name] = types.ModuleType(name)
        empty["torchvision.transforms.v2.functional"] = types.ModuleType("torchvision.transforms.v2.functional")
        empty["torchvision.transforms.v2"].functional = empty["torchvision.transforms.v2.functional"]
    before = {name: sys.modules.pop(name, None) for name in [*names, *empty]}
    sys.modules.update(empty)
    try:
        actual = {
            kind: (module := importlib.import_module(name), getattr(module, f"{FILES[kind][1]}VideoProcessor"))
            for kind, name in zip(FILES, names, strict=True)
        }
    finally:
        for name, module in before.items():
            sys.modules.pop(name, None)
            if module is not None:
                sys.modules[name] = module
    return actual


def videos(kind: str, **more) -> VideoProcessor:
    """The published settings."""
    patch = {"qwen3_vl": {"patch": 16, "merge": 2, "depth": 2}, "qwen2_5_vl": {"patch": 14, "merge": 2, "depth": 2}}
    sizes = patch.get(kind, {"tile": (448, 448), "tile_tokens": 256})
    return VideoProcessor(kind, **{**RECORDS[kind].video.settings, **sizes, **more})


@pytest.mark.parametrize("kind", KINDS)
def test_stock_fields_equal_transformers(stock, kind):
    own, stock_class = RECORDS[kind].video.settings, stock[kind][1]
    if kind != "internvl":
        assert (own["min_pixels"], own["max_pixels"]) == (
            stock_class.size["shortest_edge"],
            stock_class.size["longest_edge"],
        )
        assert {n: own[n] for n in ("min_frames", "max_frames", "max_video_tokens")} == {
            n: getattr(stock_class, n) for n in ("min_frames", "max_frames", "max_video_tokens")
        }
    assert np.allclose(own["mean"], stock_class.image_mean) and np.allclose(own["std"], stock_class.image_std)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("fps", [0.5, 2.0, 7.3, 30.0])
def test_frames_equal_stock_class(stock, kind, fps):
    own, stock_class = videos(kind, fps=fps), stock[kind][1]
    bare = SimpleNamespace(
        fps=None, num_frames=None, min_frames=own.min_frames, max_frames=own.max_frames, temporal_patch_size=2,
        initial_shift=True,
    )  # fmt: skip
    for total, rate in LENGTHS:
        if kind == "internvl" and not 1 <= int(total / rate * fps) <= min(total, own.max_frames):
            continue  # the stock class refuses, and has no upper limit
        actual = stock_class.sample_frames(bare, VideoMetadata(total_num_frames=total, fps=rate), fps=fps)
        assert own.indices(total, rate) == [int(number) for number in actual], (total, rate)


def test_videos_too_short_for_a_step_are_refused_and_short_ones_of_internvl_have_a_frame():
    with pytest.raises(ValueError, match="has 1 frame.s., but the model needs at least 2"):
        videos("qwen3_vl").indices(1, 30.0)
    assert videos("internvl").indices(9, 30.0) == [4]
    assert len(videos("internvl", fps=30.0).indices(9999, 30.0)) == 768


@pytest.mark.parametrize("cap", [False, True])
@pytest.mark.parametrize("kind", KINDS[:2])
def test_sizes_equal_stock_class(stock, kind, cap, monkeypatch):
    module, stock_class = stock[kind]
    own = videos(kind, cap_pixels_per_frame=cap)
    monkeypatch.setattr(module.BaseVideoProcessor, "resize", lambda self, image, size, resample: size)
    bare = stock_class.__new__(stock_class)
    bare.max_video_tokens = own.max_video_tokens
    size = SimpleNamespace(shortest_edge=own.min_pixels, longest_edge=own.max_pixels)
    for frames in (2, 5, 12, 768):
        for height, width in SIZES:
            clip = torch.empty(1, frames, 3, height, width, device="meta")
            factor = own.patch * own.merge
            expected = stock_class.resize(
                bare, clip, size, None, factor=factor, temporal_factor=2, cap_pixels_per_frame=cap
            )
            assert own.size(frames, height, width) == (expected.height, expected.width), (frames, height, width)
    with pytest.raises(ValueError, match="is a strip of"):
        own.size(4, 10, 3000)


@pytest.mark.parametrize("kind", KINDS[:2])
@pytest.mark.parametrize("frames", [2, 5])
def test_patches_equal_stock_class(stock, kind, frames):
    own, stock_class = videos(kind), stock[kind][1]
    unit = own.patch * own.merge
    clip = np.random.RandomState(0).randint(0, 256, (frames, 2 * unit, 3 * unit, 3), np.uint8)
    result = own([clip], [metadata(frames, 2.0, range(frames))])
    scaled = torch.from_numpy(own._normalize(clip))[None]
    expected, *grid = stock_class.patchify(None, scaled, own.patch, own.merge, own.depth)
    assert torch.equal(result["pixel_values_videos"], expected[0])
    assert result["video_grid_thw"].tolist() == [grid] == [own.grid(frames, *clip.shape[1:3])]
    high = torch.from_numpy(clip).double().permute(0, 3, 1, 2) / 255
    mean, std = (torch.tensor(values, dtype=torch.float64)[:, None, None] for values in (own.mean, own.std))
    assert torch.allclose(scaled[0].double(), (high - mean) / std, atol=1e-6)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    folder = tmp_path_factory.mktemp("videos")
    return {kind: tiny.write(kind, folder / kind, size="mini") for kind in KINDS}


@pytest.fixture(scope="module")
def film():
    """Five of twenty frames at 8 per second."""
    frames = np.random.RandomState(1).randint(0, 256, (5, 16, 16, 3), np.uint8)
    return SimpleNamespace(total=20, fps=8.0, indices=[0, 5, 10, 14, 19], size=(16, 16), frames=frames)


def test_video_timestamps_equal_stock_code(folders, film):
    expected = {}
    for kind, folder in folders.items():
        processor = models.load_processor(folder)
        text = processor.apply_chat_template(
            [{"role": "user", "content": [{"type": "video"}, {"type": "text", "text": "hi"}]}], tokenize=False
        )
        batch = processor(text=[text], **processor.video_inputs([film]))
        grown = text.replace(processor.video_token, processor.video_text(film))
        assert batch["input_ids"][0] == processor.tokenizer(grown)["input_ids"]
        expected[kind] = grown, batch
    step = "<|vision_start|>" + "<|video_pad|>" * 4 + "<|vision_end|>"
    times = "".join(f"<{seconds} seconds>{step}" for seconds in ("0.3", "1.5", "2.4"))
    assert times in expected["qwen3_vl"][0] and expected["qwen3_vl"][1]["video_grid_thw"].tolist() == [[3, 4, 4]]
    assert set(expected["qwen3_vl"][1]["mm_token_type_ids"][0]) == {0, 2}
    assert expected["qwen2_5_vl"][0].count("<|video_pad|>") == 12 and "seconds" not in expected["qwen2_5_vl"][0]
    assert expected["qwen2_5_vl"][1]["second_per_grid_ts"] == [2 / (5 / 20 * 8)]
    assert "Frame5: <img><IMG_CONTEXT><IMG_CONTEXT><IMG_CONTEXT><IMG_CONTEXT></img>\nhi" in expected["internvl"][0]
    assert np.shape(expected["internvl"][1]["pixel_values"]) == (5, 3, 16, 16)


def test_internvl_images_and_videos_keep_their_order(folders, film):
    processor = models.load_processor(folders["internvl"])
    short = SimpleNamespace(**{**vars(film), "indices": [0, 19], "frames": film.frames[:2]})
    image, video = processor.image_token, processor.video_token
    batch = processor(
        text=[f"{video}{image}", video], images=[Image.new("RGB", (32, 16))], **processor.video_inputs([film, short])
    )
    pixels = np.asarray(batch["pixel_values"])
    own = np.asarray(processor.videos([film.frames, short.frames])["pixel_values_videos"][0])
    assert np.array_equal(pixels[:5], own) and np.array_equal(pixels[-2:], own[:2]) and len(pixels) > 8
    given = {"images": [Image.new("RGB", (32, 16))], "return_tensors": "pt", **processor.video_inputs([film, short])}
    options = processor(text=[f"{video}{image}{video}"], **given)  # several lengths in one question
    assert np.array_equal(options["pixel_values"].numpy(), pixels) and options["input_ids"].ndim == 2


def test_values_come_from_the_run_the_folder_and_then_the_table(folders, tmp_path):
    import shutil

    folder = tmp_path / "m"
    shutil.copytree(folders["qwen3_vl"], folder)
    file = folder / "video_preprocessor_config.json"
    own = json.loads(file.read_text())
    assert models.load_processor(folder).videos.max_pixels == own["size"]["longest_edge"]
    file.write_text(json.dumps({**own, "fps": 3, "max_frames": 32}))
    actual = models.load_processor(folder, video={"max_frames": 16, "fps": None}).videos
    assert (actual.fps, actual.max_frames, actual.min_frames) == (3, 16, 4)
    file.unlink()
    assert models.load_processor(folder).videos.max_pixels == 768 * 32 * 32
    file.write_text(json.dumps({**own, "fps": "fast"}))
    with pytest.raises(ModelError, match="gives fps 'fast'; it must be a number above 0"):
        models.load_processor(folder)
    file.write_text(json.dumps(own))
    for value, message in (
        ({"min_frames": 9, "max_frames": 8}, "min_frames is 9, larger than max_frames 8"),
        ({"max_pixels": 63, "min_pixels": 1}, "smaller than one token. Use at least 64"),
        ({"max_frames": 1, "min_frames": 1}, "the model needs at least 2"),
    ):
        with pytest.raises(ModelError, match=message):
            models.load_processor(folder, video=value)
    with pytest.raises(ModelError, match="uses one tile of fixed size for every frame"):
        models.load_processor(folders["internvl"], video={"max_pixels": 9999})


def test_unsupported_families_are_rejected(tmp_path):
    folder = tiny.write("glm4v", tmp_path / "glm", size="mini")
    with pytest.raises(ModelError, match="Octavo does not support videos for model_type 'glm4v', only for qwen3_vl"):
        models.load_processor(folder, video={})
