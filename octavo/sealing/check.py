"""Checks a structure before anything is written: plain and sealed models with random weights must agree.

Both are built from the configurations on the CPU in fp32, with the fewest blocks that include every kind of block. They
get the same random tokens, and an image or a sound if the processor can be loaded. Their logits, compared in plain
order, may differ by the order of sums: up to 1e-3 of the largest, which is ten times the largest difference seen (with
recurrences; otherwise 1e-5), and far below the effect of one wrong axis.
"""

from __future__ import annotations

import copy
import os
import re
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from octavo import models
from octavo.models.structure.shapes import shorten_config
from octavo.sealing import inputs, permute
from octavo.sealing.errors import SealError
from octavo.sealing.inputs import replace_token_ids
from octavo.sealing.key import Key
from octavo.sealing.structure import read_structure

TOLERANCE = 1e-3
SHARE = 4  # each of the two models may take 1 / SHARE of this machine's memory
_TOKENS = 12
_FORWARD = {"input_ids", "attention_mask", "mm_token_type_ids", "pixel_values", "image_grid_thw", "token_type_ids"}


def check_structure(folder: Path, key: Key, largest: int | None = None) -> float | None:
    """Return the largest difference of logits relative to the largest logit, or None if even the few blocks take more
    than `largest` bytes (by default a quarter of this machine's memory). Raises SealError if plain and sealed
    differ."""
    if largest is None:
        largest = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // SHARE
    config = _shorten(models.read_config(folder))
    if 4 * models.parameter_count(models.empty(config)) > largest:
        return None
    axes = read_structure(models.empty(config))
    orders = axes.draw(key)
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(0)
        plain = models.random_model(config, "cpu", torch.float32).eval()
        for name, tensor in plain.state_dict().items():
            if name in axes.layouts and tensor.is_floating_point():
                tensor += (0.1 if tensor.dim() == 1 else tensor.shape[-1] ** -0.5) * torch.randn(tensor.shape)
        twin = models.random_model(seal_config(config, orders["vocab"]), "cpu", torch.float32).eval()
        state = plain.state_dict()
        for name, tensor in twin.state_dict().items():
            if name in axes.layouts:
                tensor.copy_(permute.seal_tensor(state[name], axes.layouts[name], orders))
        plain_inputs = _random_inputs(folder, config, len(orders["vocab"]))
        sealed_inputs = inputs.seal_batch(plain_inputs, orders, patch_size(config))
        expected, actual = (
            model(**{name: torch.from_numpy(np.ascontiguousarray(x)) for name, x in batch.items()}).logits
            for model, batch in ((plain, plain_inputs), (twin, sealed_inputs))
        )
    expected = expected[..., torch.from_numpy(orders["vocab"])]
    difference = float((expected - actual).abs().max() / expected.abs().max())
    if not difference <= TOLERANCE:  # NaN too
        raise SealError(
            f"a sealed {config.model_type} with random weights differs from the plain one (logits differ by "
            f"{difference:.1e} of the largest): its structure differs from what its names suggest. Nothing was written"
        )
    return difference


def patch_size(config: Any) -> tuple[int, int]:
    """Return (height, width) of a patch in pixels; (1, 1) for a model without vision."""
    return models.vision_of(config).patch if getattr(config, "vision_config", None) is not None else (1, 1)


def seal_config(config: Any, vocab: np.ndarray) -> Any:
    """Return the configuration with token ids of the sealed vocabulary."""
    return type(config).from_dict(replace_token_ids(config.to_dict(), vocab))


def _shorten(config: Any) -> Any:
    """Return the configuration with the fewest blocks that include every kind of parameter."""
    all_kinds = _parameter_kinds(config)
    for layers in (2, 4, 8, 16):
        try:
            short = shorten_config(copy.deepcopy(config), layers, layers)
            if _parameter_kinds(short) == all_kinds:
                return short
        except models.ModelError:  # too few layers for this family
            continue
    return config


def _parameter_kinds(config: Any) -> set[str]:
    return {re.sub(r"\.\d+\.", ".*.", name) for name in models.empty(copy.deepcopy(config)).state_dict()}


def _random_inputs(folder: Path, config: Any, rows: int) -> dict[str, np.ndarray]:
    """Return random tokens; for a model with vision or audio, the processor's outputs for a conversation with a random
    image or sound."""
    generator = np.random.default_rng(0)
    has_vision, has_audio = (getattr(config, f"{part}_config", None) is not None for part in ("vision", "audio"))
    if not has_vision and not has_audio:
        ids = generator.integers(0, rows, (2, _TOKENS))
        return {"input_ids": ids, "attention_mask": np.ones_like(ids)}
    processor: Any = models.load_processor(folder)
    kind = "image" if has_vision else "audio"
    turns = [{"role": "user", "content": [{"type": kind}, {"type": "text", "text": "What is this?"}]}]
    text = processor.apply_chat_template(turns, tokenize=False)
    noise = Image.fromarray(generator.integers(0, 256, (64, 96, 3), dtype=np.uint8))
    media = {"images": [noise]} if has_vision else {"audio": [generator.standard_normal(4000).astype(np.float32)]}
    outputs = processor(text=[text], return_tensors="np", add_special_tokens=False, **media)
    known = _FORWARD | set(getattr(processor, "inputs", {}))
    return {name: np.asarray(values) for name, values in outputs.items() if name in known}
