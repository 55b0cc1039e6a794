"""Computes the FLOPs and bytes of one micro-batch of the ranks that share it, from a model, its plan and its tokens.

A token costs 6 FLOPs for each parameter that multiplies it: 2 in the forward and 4 in backward, or 2 in backward for a
frozen layer, which has no wgrad. Attention costs 6 L Hq D s, because a token attends to s / 2 tokens on average; s is
the length of a row, or sum(l^2) / sum(l) for packs. A patch costs 6 N, plus 12 L d s for attending to all s patches of
its image. These are the model's FLOPs, which publications count. A GPU computes more: flash attention recomputes scores
in backward (7 FLOPs for each 6), and recomputed blocks run a second forward.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from octavo import fp8
from octavo.config import Config
from octavo.parallel import Layout
from octavo.train.estimate.memory import MemoryEstimator, states
from octavo.train.estimate.step_time.groups import groups
from octavo.train.estimate.step_time.wire import CodedLayers, Decoder, Group, Rows
from octavo.train.setup.checks import count_coded_layers
from octavo.train.setup.token_counts import Tokens, attention_flops

FLASH = 7 / 6  # FLOPs that flash attention computes for each of attention's FLOPs, forward and backward
# The fraction of a block's forward (without attention) that `train.recompute: selective` repeats: norms and the MLP.
RECOMPUTED_FRACTION = {"none": 0.0, "selective": 0.65, "full": 1.0}


@dataclass(frozen=True)
class Work:
    """The work of a micro-batch, summed over all ranks that share its rows.

    ``flops`` of forward and backward are by kind: bf16 and fp8 (linear layers), experts_bf16, experts_fp8 and
    attention. ``forward`` are the FLOPs of one forward, and ``recomputed`` those that are computed again. ``elements``
    is the number of hidden-state values at block boundaries: tokens x width x blocks. ``groups`` returns the groups of
    FSDP2 for a layout, and ``update_bytes`` the bytes that an update reads and writes on a rank. ``two_backwards`` is
    True if backward runs twice, and ``compiled`` if blocks are compiled.
    """

    decoder: Decoder
    rows: Rows
    flops: Mapping[str, float]
    forward: Mapping[str, float]
    elements: float
    groups: Callable[[Layout], tuple[Group, ...]]
    update_bytes: Callable[[Layout], float]
    recomputed: Mapping[str, float] = field(default_factory=dict)
    two_backwards: bool = False
    compiled: bool = False

    @property
    def model_flops(self) -> float:
        """The model's FLOPs: 6 N + 6 L Hq D s per token, plus the vision tower."""
        return sum(self.flops.values())

    @property
    def computed(self) -> dict[str, float]:
        """The FLOPs that a GPU computes, by kind."""
        flops = {kind: size * (FLASH if kind == "attention" else 1) for kind, size in self.flops.items()}
        backwards = (
            {kind: size - self.forward.get(kind, 0.0) for kind, size in flops.items()} if self.two_backwards else {}
        )
        return {kind: size + self.recomputed.get(kind, 0.0) + backwards.get(kind, 0.0) for kind, size in flops.items()}


def estimate_work(sizes: MemoryEstimator, cfg: Config, micro_steps: int = 1) -> Work:
    """Return the work of a configuration whose memory ``sizes`` predicts."""
    tokens = sizes.tokens
    plan, config = sizes.get_plan(cfg), sizes.config
    flops, forward = linear_flops(plan.rows, tokens)
    text = (attention_flops(config, Tokens(tokens.counts, tokens.row, 0, tokens.sample)) or 0.0) / 3.5
    tower = (attention_flops(config, tokens) or 0.0) / 3.5 - text
    flops["attention"], forward["attention"] = 3 * (text + tower), text + tower
    sound = tower if tokens.sound and not tokens.image else 0.0  # no family is trained on both images and sounds
    recomputed = _recomputed_flops(
        cfg, plan, tokens, {"foundation": text, "image_encoder": tower - sound, "audio_encoder": sound}
    )
    decoder = describe_decoder(config, plan, cfg.train.exchange)
    in_16_bits = states.weight_width(cfg) == 2 or sizes.forward_dtypes(cfg)[1] is not None
    in_16_bits |= cfg.train.gather == "bf16"
    rows = Rows(
        tokens.counts.get("foundation", 0),
        tokens.counts.get("image_projector", 0),
        2 if in_16_bits else 4,
        recomputed_attention=int(cfg.train.recompute.foundation == "full"),
        recomputed_experts=int(cfg.train.recompute.foundation != "none"),
    )
    return Work(
        decoder, rows, flops, forward, _elements(config, tokens),
        lambda layout: groups(cfg, sizes.parameters, plan, sizes.reached, layout),
        lambda layout: _update_bytes(sizes, cfg, layout) / micro_steps,
        recomputed, cfg.optimizer.update == "backward" and cfg.train.clip > 0, cfg.train.compile,
    )  # fmt: skip


def linear_flops(rows: Iterable[fp8.PlanRow], tokens: Tokens) -> tuple[dict[str, float], dict[str, float]]:
    """Return the FLOPs of all linear layers by kind, for (forward and backward, forward only)."""
    flops: defaultdict[str, float] = defaultdict(float)
    forward: defaultdict[str, float] = defaultdict(float)
    for row in rows:
        prefix = "experts_" if row.kind == "experts" else ""
        gemm_flops = 2.0 * row.shape[0] * row.shape[1] * (row.row.experts_per_token or 1)
        gemm_flops *= tokens.counts.get(row.component, 0)
        gemms = 2 if row.row.frozen else 3
        fp8_gemms = gemms * row.fp8_flops / row.flops if row.flops else 0.0
        flops[prefix + "fp8"] += gemm_flops * fp8_gemms
        flops[prefix + "bf16"] += gemm_flops * (gemms - fp8_gemms)
        forward[prefix + ("fp8" if fp8_gemms else "bf16")] += gemm_flops
    return {kind: size for kind, size in flops.items() if size}, dict(forward)


def describe_decoder(config: Any, plan: fp8.Plan, exchange: str = "stored") -> Decoder:
    """Return the decoder of a model's configuration, with the exchanges of `train.exchange`."""
    text, vision = config.get_text_config(), getattr(config, "vision_config", None)
    experts = [row for row in plan.rows if row.kind == "experts"]
    size = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    deepstack = len(getattr(vision, "deepstack_visual_indexes", None) or ())
    return Decoder(
        text.num_hidden_layers, text.hidden_size, text.num_attention_heads,
        getattr(text, "num_key_value_heads", None) or text.num_attention_heads, size,
        len({row.row.module for row in experts}), max((row.row.experts or 0 for row in experts), default=0),
        max((row.row.experts_per_token or 0 for row in experts), default=0),
        text.hidden_size * (1 + deepstack) if vision is not None else 0,
        *(CodedLayers(*part) for part in count_coded_layers(plan, size, text.hidden_size) if exchange == "fp8"),
    )  # fmt: skip


def _recomputed_flops(cfg: Config, plan: fp8.Plan, tokens: Tokens, attention: Mapping[str, float]) -> dict[str, float]:
    """Return the FLOPs of forwards that are repeated in backward, by kind."""
    out: defaultdict[str, float] = defaultdict(float)
    for component, mode in cfg.train.recompute:
        rows = tuple(row for row in plan.rows if row.component == component and row.kind != "lm_head")
        for kind, size in linear_flops(rows, tokens)[1].items():
            out[kind] += RECOMPUTED_FRACTION[mode] * size
        out["attention"] += attention.get(component, 0.0) if mode == "full" else 0.0
    return {kind: size for kind, size in out.items() if size}


def _elements(config: Any, tokens: Tokens) -> float:
    """Return the number of hidden-state values at block boundaries, over all towers."""
    text, vision = config.get_text_config(), getattr(config, "vision_config", None)
    total = float(tokens.counts.get("foundation", 0) * text.hidden_size * text.num_hidden_layers)
    depth = getattr(vision, "depth", None) or getattr(vision, "num_hidden_layers", None) or 0
    total += tokens.counts.get("image_encoder", 0) * depth * getattr(vision, "hidden_size", 0)
    sound = getattr(config, "audio_config", None)
    positions = tokens.counts.get("audio_encoder", 0)
    return total + (positions * sound.hidden_size * sound.num_hidden_layers if sound is not None and positions else 0)


def _update_bytes(sizes: MemoryEstimator, cfg: Config, layout: Layout) -> float:
    """Return the bytes of an update: weights, master copies and moments read and written, gradients read."""
    persistent = sizes.persistent_kinds(cfg, layout)
    return 2.0 * (persistent["weights"] + persistent["master"] + persistent["optimizer"]) + persistent["gradients"]
