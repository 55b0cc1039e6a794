"""Faults of NVILA: each changes numbers without a sign of it."""

from faults.fault import area

TESTS, SCALES, FOLDERS = (f"models/test_nvila{part}.py" for part in ("", "_scales", "_folders"))
area(
    "nvila",
    (
        "nvila-last-layer", "models/custom/nvila/tower.py",
        "nn.ModuleList([*layers[:-1], UnusedWeights(layers[-1])])", "nn.ModuleList(layers)",
        "the features are those of the last layer",
        TESTS,
    ),
    (
        "nvila-blocks-column-by-column", "models/custom/nvila/projector.py",
        "h // k, k, w // k, k, c).transpose(2, 3)", "h // k, k, w // k, k, c).transpose(2, 3).transpose(3, 4)",
        "the channels of a token are those of its patches column by column",
        TESTS,
    ),
    (
        "nvila-thumbnail-counted", "models/structure/vision_shapes.py",
        "config.max_tiles + (not squares and config.max_tiles > 1)", "config.max_tiles",
        "the whole image is not counted among the tiles that there may be",
        TESTS,
    ),
    (
        "nvila-scales-nearest", "models/custom/nvila/scales.py",
        'mode="area"', 'mode="nearest"',
        "features of small scales are resized otherwise",
        SCALES,
    ),
    (
        "nvila-largest-scale-first", "models/custom/nvila/scales.py",
        "[*maps, whole] if maps", "[whole, *maps] if maps",
        "the channels of the largest scale come first",
        SCALES,
    ),
    (
        "nvila-line-break-of-no-tile", "models/custom/nvila/three_folders.py",
        '{"dynamic": 1, "dynamic_s2": 0, "resize": 0}', '{"dynamic": 0, "dynamic_s2": 0, "resize": 0}',
        "the line break that a prompt writes behind each tile is missing",
        FOLDERS,
    ),
    (
        "nvila-smallest-scale-passed-over", "models/custom/nvila/three_folders.py",
        "top.get(key), (-1, len(scales) - 1))", "top.get(key), (0, -1, None, len(scales) - 1))",
        "a folder whose features are resized to the smallest scale is computed at the largest",
        FOLDERS,
    ),
    (
        "nvila-media-looked-up", "models/custom/nvila/model.py",
        "input_ids.masked_fill(is_placeholder, 0)", "input_ids",
        "places of images, which lie behind the table, are looked up in it",
        TESTS,
    ),
)  # fmt: skip
