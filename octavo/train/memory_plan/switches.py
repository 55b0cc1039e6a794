"""Which setting buys how much memory: every switch turned over alone, the rest as it is."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from octavo.config import Config
from octavo.train.errors import TrainError
from octavo.train.memory_plan.footprint import Footprints, changed, refused, value_of
from octavo.train.tokens import Tokens, rows_of

# switch -> (values from the most memory to the least, or pairs of them; what it costs)
SWITCHES: dict[str, tuple[tuple[Any, ...], str]] = {
    "optimizer.states": (("fp32", "bf16", "fp8"), "moments in fewer bits"),  # coat: more bytes than fp8, and less exact
    "optimizer.master": (("fp32", "bf16+16", "bf16+sr"), "bf16+16 is exactly fp32; bf16+sr rounds weights at random"),
    "optimizer.update": (("step", "backward"), "one micro-batch a step; with train.clip a second backward"),
    "optimizer.offload": ((False, True), "states cross the bus twice a step"),
    "fp8.activations": (("bf16", "fp8"), "norm inputs, gate and up rounded to FP8"),
    "fp8.weight_codes": (("keep", "recast"), "a cast of each weight at each use"),
    "train.recompute": (("none", "selective", "full"), "up to another forward of the blocks"),
    "train.logits": (("full", "chunked"), "another GEMM of the head"),
    "train.offload_activations": ((False, True), "activations cross the bus twice a step"),
}


@dataclass(frozen=True)
class Switch:
    """``bytes``: how many fewer with the switch on than off. ``on``: whether it is; ``value``: what it is, or what it
    would be turned to."""

    key: str
    value: Any
    on: bool
    bytes: int
    cost: str

    def to_json(self) -> dict[str, Any]:
        return {"key": self.key, "value": self.value, "on": self.on, "bytes": self.bytes, "cost": self.cost}


def savings(sizes: Footprints, ranks: int = 1) -> Iterator[Switch]:
    """For each switch that is on, what it saves against off; for each other step down, what that would save."""
    cfg = sizes.cfg
    now = sizes.of(cfg, ranks).total
    for key, (values, cost) in SWITCHES.items():
        if key in ("fp8.activations", "fp8.weight_codes") and (cfg.fp8.plan is not None or not sizes.plan.share):
            continue
        found = value_of(cfg, key)
        if key == "train.recompute":
            ways = {how for _, how in found}
            found = ways.pop() if len(ways) == 1 else found.foundation
        at = values.index(found) if found in values else 0
        others = ([values[0]] if at else []) + list(values[at + 1 :])
        for other in others:
            tried = changed(cfg, {key: other})
            if key != "optimizer.update" and refused(tried):
                continue
            try:
                saved = sizes.of(tried, ranks).total - now
            except TrainError:  # nothing of this model could be run again so
                continue
            on = other == values[0] and at > 0
            yield Switch(key, found if on else other, on, saved if on else -saved, cost)


# --- tokens without data ----------------------------------------------------------------------------------------------

_PIXELS = 1024 * 1024  # of an image where data.max_pixels does not say


def assumed(cfg: Config, components: Any, config: Any) -> tuple[Tokens, str]:
    """The longest micro-batch that a configuration allows, and the sentence that says what was assumed.

    Rows of `train.seq_length` tokens; where the model sees, an image of `data.max_pixels` in each (1 megapixel where it
    says nothing), as far as the row has room.
    """
    rows, row, answer = rows_of(cfg), cfg.train.seq_length, 0
    message = f"assumed: train.micro_batch {cfg.train.micro_batch} x train.seq_length {row} tokens, rows of one length"
    if cfg.train.phase == "preference":
        message += ", two for each sample"
    if cfg.train.phase == "rl" and cfg.rl is not None:
        answer = cfg.rl.max_new_tokens
        message += f", {answer} of them (rl.max_new_tokens) a completion"
    counts = {"foundation": rows * row, "lm_head": rows * (answer or row)}
    image = 0
    vision = getattr(config, "vision_config", None)
    if "image_encoder" in components and vision is not None:
        pixels = cfg.data.max_pixels or _PIXELS
        if hasattr(vision, "spatial_merge_size"):
            merge = vision.spatial_merge_size**2
            image = min(pixels // vision.patch_size**2 // merge, row - answer - 2) * merge
            out = image // merge
        else:
            (height, width), (ph, pw) = vision.image_size, vision.patch_size
            cells = (height // ph) * (width // pw)
            length = int(cells * config.downsample_ratio**2)
            tiles = max(1, min(pixels // (height * width), (row - answer - 2) // (length + 1)))
            image, out = tiles * (cells + 1), tiles * length
        counts |= {"image_encoder": rows * max(0, image), "image_projector": rows * max(0, out)}
        message += f", in each an image of {max(0, image)} patches ({max(0, out)} of its tokens)"
    known = {name: n for name, n in counts.items() if name in components}
    return Tokens(known, row, max(0, image)), f"{message}; --tokens says otherwise"
