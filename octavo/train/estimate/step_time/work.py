"""FLOPs and bytes of one micro-batch of the ranks that share it, from a model, its plan and its tokens.

A token costs 6 FLOPs for each parameter that multiplies it: 2 in the forward and 4 in backward, or 2 in backward for a
frozen layer, which has no wgrad. Attention costs 6 L Hq D s, because a token attends to s / 2 others on average; s is
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
from octavo.train.estimate.memory import Footprints, states
from octavo.train.estimate.step_time.groups import groups
from octavo.train.estimate.step_time.wire import Coded, Decoder, Group, Rows
from octavo.train.setup.parallel_limits import count_coded_layers
from octavo.train.setup.token_counts import Tokens, attention_flops

FLASH = 7 / 6  # FLOPs that flash attention computes for each of attention's FLOPs, forward and backward
# The fraction of a block's forward (without attention) that `train.recompute: selective` repeats: norms and the MLP.
AGAIN = {"none": 0.0, "selective": 0.65, "full": 1.0}


@dataclass(frozen=True)
class Work:
    """The work of a micro-batch, for all ranks that share its rows together.

    ``flops`` counts forward and backward by kind: bf16 and fp8 (linear layers), experts_bf16, experts_fp8 and
    attention. ``forward`` counts one forward, and ``again`` the FLOPs computed a second time. ``elements`` is the
    number of hidden-state values at block boundaries: tokens x width x blocks. ``groups`` returns what FSDP2 gathers
    under a layout, and ``updated`` the bytes that an update reads and writes on a rank. ``twice`` says whether backward
    runs twice, and ``compiled`` whether blocks are compiled.
    """

    decoder: Decoder
    rows: Rows
    flops: Mapping[str, float]
    forward: Mapping[str, float]
    elements: float
    groups: Callable[[Layout], tuple[Group, ...]]
    updated: Callable[[Layout], float]
    again: Mapping[str, float] = field(default_factory=dict)
    twice: bool = False
    compiled: bool = False

    @property
    def model_flops(self) -> float:
        """The model's FLOPs: 6 N + 6 L Hq D s for each token, plus the FLOPs of vision."""
        return sum(self.flops.values())

    @property
    def computed(self) -> dict[str, float]:
        """The FLOPs that a GPU computes, by kind."""
        flops = {kind: size * (FLASH if kind == "attention" else 1) for kind, size in self.flops.items()}
        backwards = {kind: size - self.forward.get(kind, 0.0) for kind, size in flops.items()} if self.twice else {}
        return {kind: size + self.again.get(kind, 0.0) + backwards.get(kind, 0.0) for kind, size in flops.items()}


def work_of(sizes: Footprints, cfg: Config, micro_steps: int = 1) -> Work:
    """Return the work of a configuration whose memory ``sizes`` predicts."""
    tokens = sizes.tokens
    plan, config = sizes.plan_of(cfg), sizes.config
    flops, forward = linear_flops(plan.rows, tokens)
    text = (attention_flops(config, Tokens(tokens.counts, tokens.row, 0, tokens.sample)) or 0.0) / 3.5
    tower = (attention_flops(config, tokens) or 0.0) / 3.5 - text
    flops["attention"], forward["attention"] = 3 * (text + tower), text + tower
    sound = tower if tokens.sound and not tokens.image else 0.0  # no family is trained on both images and sounds
    again = _again(cfg, plan, tokens, {"foundation": text, "image_encoder": tower - sound, "audio_encoder": sound})
    decoder = decoder_of(config, plan, cfg.train.exchange)
    low = 2 if cfg.train.gather == "bf16" or states.width(cfg) == 2 or sizes.forward_of(cfg)[1] is not None else 4
    rows = Rows(
        tokens.counts.get("foundation", 0),
        tokens.counts.get("image_projector", 0),
        low,
        again=int(cfg.train.recompute.foundation == "full"),
        again_experts=int(cfg.train.recompute.foundation != "none"),
    )
    return Work(
        decoder, rows, flops, forward, _elements(config, tokens),
        lambda layout: groups(cfg, sizes.held, plan, sizes.reached, layout),
        lambda layout: _updated(sizes, cfg, layout) / micro_steps,
        again, cfg.optimizer.update == "backward" and cfg.train.clip > 0, cfg.train.compile,
    )  # fmt: skip


def linear_flops(rows: Iterable[fp8.PlanRow], tokens: Tokens) -> tuple[dict[str, float], dict[str, float]]:
    """Return the FLOPs of all linear layers by kind, for (forward and backward, forward alone)."""
    flops: defaultdict[str, float] = defaultdict(float)
    forward: defaultdict[str, float] = defaultdict(float)
    for row in rows:
        of = "experts_" if row.kind == "experts" else ""
        one = 2.0 * row.shape[0] * row.shape[1] * (row.row.experts_per_token or 1)
        one *= tokens.counts.get(row.component, 0)
        gemms = 2 if row.row.frozen else 3
        low = gemms * row.fp8_flops / row.flops if row.flops else 0.0
        flops[of + "fp8"] += one * low
        flops[of + "bf16"] += one * (gemms - low)
        forward[of + ("fp8" if low else "bf16")] += one
    return {kind: size for kind, size in flops.items() if size}, dict(forward)


def decoder_of(config: Any, plan: fp8.Plan, exchange: str = "stored") -> Decoder:
    """Return the decoder of a model's configuration, with the exchanges of `train.exchange`."""
    text, vision = config.get_text_config(), getattr(config, "vision_config", None)
    experts = [row for row in plan.rows if row.kind == "experts"]
    size = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    deep = len(getattr(vision, "deepstack_visual_indexes", None) or ())
    return Decoder(
        text.num_hidden_layers, text.hidden_size, text.num_attention_heads,
        getattr(text, "num_key_value_heads", None) or text.num_attention_heads, size,
        len({row.row.module for row in experts}), max((row.row.experts or 0 for row in experts), default=0),
        max((row.row.experts_per_token or 0 for row in experts), default=0),
        text.hidden_size * (1 + deep) if vision is not None else 0,
        *(Coded(*part) for part in count_coded_layers(plan, size, text.hidden_size) if exchange == "fp8"),
    )  # fmt: skip


def _again(cfg: Config, plan: fp8.Plan, tokens: Tokens, attention: Mapping[str, float]) -> dict[str, float]:
    """The FLOPs of forwards repeated in backward, by kind."""
    out: defaultdict[str, float] = defaultdict(float)
    for component, how in cfg.train.recompute:
        rows = tuple(row for row in plan.rows if row.component == component and row.kind != "lm_head")
        for kind, size in linear_flops(rows, tokens)[1].items():
            out[kind] += AGAIN[how] * size
        out["attention"] += attention.get(component, 0.0) if how == "full" else 0.0
    return {kind: size for kind, size in out.items() if size}


def _elements(config: Any, tokens: Tokens) -> float:
    """The number of hidden-state values at block boundaries, over all towers."""
    text, vision = config.get_text_config(), getattr(config, "vision_config", None)
    total = float(tokens.counts.get("foundation", 0) * text.hidden_size * text.num_hidden_layers)
    depth = getattr(vision, "depth", None) or getattr(vision, "num_hidden_layers", None) or 0
    total += tokens.counts.get("image_encoder", 0) * depth * getattr(vision, "hidden_size", 0)
    sound = getattr(config, "audio_config", None)
    places = tokens.counts.get("audio_encoder", 0)
    return total + (places * sound.hidden_size * sound.num_hidden_layers if sound is not None and places else 0)


def _updated(sizes: Footprints, cfg: Config, layout: Layout) -> float:
    """Bytes of an update: weights, master copies and moments read and written, gradients read."""
    sizes_held = sizes.still(cfg, layout)
    return 2.0 * (sizes_held["weights"] + sizes_held["master"] + sizes_held["optimizer"]) + sizes_held["gradients"]
