"""The GPU memory that a run will need, in bytes by kind, computed before any weight is read.

    weights       parameters, in the dtype of the model
    master        the extra bits that make a BF16 weight exactly fp32
    gradients     as they are after backward
    optimizer     both moments
    codes         FP8 codes of weights that are kept from step to step
    reference     phases rl and preference: the frozen reference model (none with LoRA)
    kv_cache      phase rl, while completions are generated (`rollout`), when there are no gradients and no activations
    activations   what a forward keeps for its backward, for the tokens of the largest micro-batch
    logits        what the head and the loss keep
    workspace     the largest amount of temporary memory within a step

The first six follow exactly from shapes and the plan (`states`). Activations and logits are counted in a forward
without values (`activations`). The workspace is estimated here with formulas; none of it is measured. A run reports the
same kinds except the workspace (:mod:`octavo.train.step.memory_report`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch

from octavo import fp8, models
from octavo.adapters.experts import stock_name
from octavo.base import accelerator
from octavo.config import COMPONENTS, Config
from octavo.config.rules.general import check
from octavo.config.sections.train import RecomputeSection
from octavo.fp8.planning import components_saving_fp8, plan_blocks
from octavo.parallel import Layout
from octavo.train.errors import TrainError
from octavo.train.estimate.memory import states
from octavo.train.estimate.memory.activations import FakeForward, fake_forward
from octavo.train.estimate.memory.mesh import keys, layout_of, part
from octavo.train.estimate.memory.rollout import Rollout, Rollouts, copied
from octavo.train.forward.forward import autocast_dtype, gathers_bf16, model_dtype, why_not_chunked
from octavo.train.setup import frozen_base, planning
from octavo.train.setup.token_counts import Tokens, attention_flops

if TYPE_CHECKING:
    from transformers import PreTrainedModel

KINDS = (
    "weights", "master", "gradients", "optimizer", "codes", "reference", "kv_cache",
    "activations", "logits", "workspace",
)  # fmt: skip

# The largest number of logits in a chunk of the head (octavo.fp8.memory.chunked_loss).
CHUNK = 2**25
CHUNK_OF_CPU = 2**23
# Device memory of an optimizer in host memory: three buffers of a batch of states (octavo.fp8.optim.offload).
STREAM = 3 * (64 << 20)


@dataclass(frozen=True)
class Footprint:
    """The memory of one configuration.

    ``kinds`` maps each kind to its bytes on the rank that holds most. ``per_token`` gives the bytes of activations for
    a token of each component. ``host`` is the offloaded bytes in host memory. ``parts`` is the composition of the
    workspace. ``rollout`` is the other part of a step in the phase rl. ``staging`` is the bytes in host memory of the
    copy that is being saved (`run.save: async`).
    """

    kinds: Mapping[str, int]
    per_token: Mapping[str, float]
    host: int
    parts: Mapping[str, int]
    tokens: Tokens
    ranks: int
    rollout: Rollout | None = None
    staging: int = 0

    @property
    def update(self) -> int:
        return sum(self.kinds.values())

    @property
    def total(self) -> int:
        """The bytes of the part of a step that needs most."""
        return max(self.update, self.rollout.total if self.rollout else 0)

    def to_json(self) -> dict[str, Any]:
        by_moment = {} if self.rollout is None else {"update": self.update, "rollout": self.rollout.to_json()}
        return {
            "ranks": self.ranks,
            "tokens": {
                **self.tokens.counts,
                "row": self.tokens.row,
                "image": self.tokens.image,
                "sound": self.tokens.sound,
            },
            "bytes": dict(self.kinds),
            "total": self.total,
            "per_token": dict(self.per_token),
            "host": self.host,
            "staging": self.staging,
            "workspace": dict(self.parts),
            **by_moment,
        }


class Footprints:
    """Footprints of one model under configurations that differ only in memory settings; each forward is counted once.

    Args:
        cfg: the configuration as given; its recipes apply to all others.
        model: stock, on the meta device, frozen, with the frozen FP8 weights that the run will load.
        plan: the plan of ``cfg``.
        tokens: the tokens of one micro-batch of ``cfg``.
        device: the type of the training device.
        copy: whether there is also a frozen copy of the model, as a reference.
        usable: bytes of the card that rollouts must fit into; None sets no limit.
    """

    def __init__(
        self, cfg: Config, model: PreTrainedModel, family: models.Family, plan: fp8.Plan, tokens: Tokens,
        device: str = accelerator.ABSENT_GPU, copy: bool = False, usable: int | None = None,
    ) -> None:  # fmt: skip
        self.cfg, self.model, self.family, self.plan, self.tokens = cfg, model, family, plan, tokens
        self.device = device
        self._copied = copied(self.config, family, plan) if copy else None
        self._rollouts = Rollouts(self.config, usable) if cfg.train.phase == "rl" else None
        self.dressed = frozen_base.copy_with_adapters(model, family, cfg)  # the trained model, and the model that runs
        self.held = states.held(self.dressed, family)
        self.reached = states.backward_reaches(self.dressed)
        self.frozen = states.frozen_of(self.held)
        self._forwards: dict[Any, FakeForward] = {}
        self._standing: dict[Any, int] = {}
        self._gathered: dict[Any, tuple[int, ...]] = {}
        self._plans: dict[Any, fp8.Plan] = {_of_plan(cfg): plan}
        self._flops: dict[Any, Mapping[str, float]] = {}

    @property
    def config(self) -> Any:
        return self.model.config

    def plan_of(self, cfg: Config) -> fp8.Plan:
        """The plan of a configuration: the recipes and backends of the first one, with its own memory settings."""
        key = _of_plan(cfg)
        if key not in self._plans:
            policy = planning.policy_from(cfg)
            saving = components_saving_fp8(policy, self.family.components)
            inputs = self.plan.rows, policy.fuse == "on", saving, self.family.components
            self._plans[key] = replace(self.plan, policy=policy, blocks=plan_blocks(self.model, *inputs))
        return self._plans[key]

    def forward(self, cfg: Config, rows: int) -> FakeForward:
        """What a forward of this many rows keeps: one row is counted, and the others keep as much."""
        key = (_of_plan(cfg)[:-2], self.forward_of(cfg), cfg.train.recompute, cfg.train.logits)
        if key not in self._forwards:
            counted = self._fake_forward(cfg)
            self._forwards[key] = replace(counted, recomputed=self._recomputed(cfg, counted))
        return self._forwards[key].times(rows)

    def logits_of(self, cfg: Config) -> int:
        """What the head and the loss keep for one row, independently of the blocks."""
        key = ("head", self.forward_of(cfg), cfg.train.logits)
        if key not in self._forwards:
            plain = changed(cfg, {"train.recompute": "none", "fp8.activations": self.cfg.fp8.activations})
            self._forwards[key] = self._fake_forward(plain, head_alone=True)
        return self._forwards[key].logits

    def chunks(self, cfg: Config) -> bool:
        """Whether losses are computed without full logits: configured, and possible with this model."""
        return cfg.train.logits == "chunked" and why_not_chunked(self.model) is None

    def forward_of(self, cfg: Config) -> tuple[torch.dtype, torch.dtype | None]:
        """Return the dtypes of a forward's parameters and of autocast, or None instead if autocast is off."""
        return model_dtype(cfg), autocast_dtype(cfg, torch.device(self.device))

    def _fake_forward(self, cfg: Config, head_alone: bool = False) -> FakeForward:
        _, autocast = self.forward_of(cfg)
        tokens = _one_row(self.tokens)
        return fake_forward(self.model, self.family, self.plan_of(cfg), tokens, cfg, autocast, head_alone, self.dressed)

    def _recomputed(self, cfg: Config, counted: FakeForward) -> dict[str, int]:
        """What a recomputed block keeps in addition during its backward."""
        again = [
            component for component, how in cfg.train.recompute if how != "none" and counted.largest.get(component)
        ]
        if not again:
            return {}
        whole = self.forward(changed(cfg, {"train.recompute": "none"}), 1)
        return {component: whole.largest[component] - counted.largest[component] for component in again}

    def of(self, cfg: Config, ranks: int = 1) -> Footprint:
        """The footprint of a configuration that differs from the first only in memory switches and ``micro_batch``."""
        rows = max(1, self.tokens.rows * cfg.train.micro_batch // self.cfg.train.micro_batch)
        return self.put_together(cfg, self.forward(self.computing(cfg, ranks), rows), rows, ranks)

    def computing(self, cfg: Config, ranks: int) -> Config:
        """A configuration whose single process computes as each of these ranks does."""
        seen = {"train.gather": "stored", "optimizer.master": "bf16+sr"}  # a forward keeps as much as with BF16 weights
        return changed(cfg, seen) if gathers_bf16(cfg, ranks) else cfg

    def put_together(self, cfg: Config, counted: FakeForward, rows: int, ranks: int = 1) -> Footprint:
        """The footprint, with what a forward keeps already known."""
        plan, layout = self.plan_of(cfg), layout_of(cfg, ranks)
        counted, tokens = part(counted, _rows(self.tokens, rows), layout.context)
        still = self.still(cfg, layout)
        activations = resident = counted.activations
        if cfg.train.offload_activations:  # one block's are being moved while the next block's are in use
            resident = sum(counted.outside.values()) + counted.copies + 2 * max(counted.largest.values(), default=0)
        parts = self._workspace(cfg, plan, counted, tokens, ranks, layout)
        kinds = {
            **still,
            "kv_cache": 0,
            "activations": min(activations, resident),
            "logits": counted.logits,
            "workspace": sum(parts.values()),
        }
        host = activations - kinds["activations"]
        if cfg.optimizer.offload:
            host += kinds["master"] + kinds["optimizer"]
            kinds["master"] = kinds["optimizer"] = 0
        of = {name: counted.blocks.get(name, 0) + counted.outside.get(name, 0) for name in tokens.counts}
        per_token = {name: of[name] / count for name, count in tokens.counts.items() if count and of[name]}
        rollout = None
        if self._rollouts is not None:
            always = {name: size for name, size in still.items() if name != "gradients" and kinds[name]}
            dtype, autocast = self.forward_of(self.computing(cfg, ranks))
            transient = sum(parts.get(name, 0) for name in ("codes", "values"))
            transient += self._gather(cfg, plan, layout.expert)[0] if ranks > 1 else 0
            rollout = self._rollouts.of(cfg, always, tokens, autocast or dtype, transient, ranks)
        staging = states.saved(cfg, self.held, ranks) if cfg.run.save == "async" else 0
        return Footprint(kinds, per_token, host, parts, tokens, ranks, rollout, staging)

    def standing(self, cfg: Config, ranks: int = 1) -> int:
        """Bytes on the device between steps, plus gradients."""
        still = self.still(cfg, layout_of(cfg, ranks))
        return sum(still.values()) - (still["master"] + still["optimizer"] if cfg.optimizer.offload else 0)

    def still(self, cfg: Config, layout: Layout) -> dict[str, int]:
        """The kinds that are kept between steps, on the device or the host; each is computed once and cached."""
        plan, held, how, ranks = self.plan_of(cfg), self.held, cfg.optimizer, layout.sharded
        each, shared = (states.width(cfg), states.trained_width(cfg)), layout.ranks > 1
        kinds: dict[str, tuple[Any, Callable[[], int]]] = {
            "weights": (each, lambda: states.weights(cfg, held, ranks)),
            "master": ((each, how.master), lambda: states.master(cfg, held, ranks)),
            "gradients": ((each, how.update), lambda: states.gradients(cfg, held, ranks)),
            "optimizer": (how.states, lambda: states.states(cfg, held, ranks)),
            "codes": ((_of_plan(cfg), shared), lambda: states.codes(plan, self.reached, ranks, self.frozen, shared)),
            "reference": (
                (each, _of_plan(cfg)),
                lambda: 0 if self._copied is None else self._copied(cfg, plan, ranks),
            ),
        }
        for kind, (on, count) in kinds.items():
            if (kind, ranks, on) not in self._standing:
                self._standing[kind, ranks, on] = count()
        return {kind: self._standing[kind, ranks, on] for kind, (on, _) in kinds.items()}

    def _workspace(
        self, cfg: Config, plan: fp8.Plan, counted: FakeForward, tokens: Tokens, ranks: int, layout: Layout
    ) -> dict[str, int]:  # fmt: skip
        """The most temporary memory that exists while all activations are still kept, by part:

        loss       the current chunk of logits (as the GEMM returns it, in fp32, and its gradient in both dtypes) and
                   the fp32 gradient of the hidden states; with full logits, their gradient in both dtypes
        blocks     the gradients inside one block: three tensors of its widest layer in 16 bits (an MLP's product, gate
                   and up), each with codes for dgrad and wgrad; and the activations of the block if it is recomputed
        gradient   of one weight before it is added, or applied with `update: backward`
        codes      of one weight, where they are cast at each use
        values     of one frozen FP8 weight, where a GEMM uses values instead of codes
        gathered   under FSDP2: the whole weights and gradients of the root and of two blocks (one is prefetched)
        keys       of a layer, from the other ranks that share a row (octavo.train.estimate.memory.mesh)
        mask       of a tower that separates the images of a micro-batch by a mask over all their patches (Pixtral)
        stream     buffers of an optimizer whose states are in host memory

        A reference model's forward, while activations are kept, needs less than the backward. The first two parts
        never coincide, so the larger counts; with `update: backward` the head's gradient belongs to the first.
        """
        about = self._about
        low = (autocast_dtype(cfg, torch.device(self.device)) or model_dtype(cfg)).itemsize
        positions = tokens.counts.get("lm_head", tokens.counts.get("foundation", 0))
        if self.chunks(cfg):
            most = CHUNK_OF_CPU if self.device == "cpu" else CHUNK
            chunk = min(most, positions * about.vocabulary)
            codes = 2 if "lm_head" in about.in_fp8 else 0  # codes of the chunk's gradient, for dgrad and wgrad
            loss = chunk * (low + 4 + 4 + low + codes) + 4 * positions * about.hidden
        else:
            loss = positions * about.vocabulary * (low + 4 + low)
        blocks = max(
            tokens.counts.get(name, 0) * wide * (3 * low + (6 if name in about.in_fp8 else 0))
            + counted.recomputed.get(name, 0)
            for name, wide in about.widest.items()
        )
        inner, outer = (states.trained_width(cfg) * n for n in (about.largest_inside, about.largest))
        parts: dict[str, int] = {}
        if cfg.optimizer.update == "backward":
            first = loss + outer > blocks + inner
            parts["loss" if first else "blocks"] = loss if first else blocks
            parts["gradient"] = outer if first else inner
        else:
            parts["loss" if loss > blocks else "blocks"] = max(loss, blocks)
            parts["gradient"] = outer if planning.count_micro_steps(cfg, ranks) > 1 else 0
        if plan.policy.weight_codes == "recast":
            parts["codes"] = about.codes
        if self.frozen:
            parts["values"] = low * self._dequantized
        if ranks > 1:
            parts["gathered"] = sum(self._gather(cfg, plan, layout.expert))
        if layout.context > 1:
            parts["keys"] = keys(cfg, self.config, layout, tokens, low)
        if tokens.image and models.vision_of(self.config).kind == "whole":
            parts["mask"] = low * tokens.counts.get("image_encoder", 0) ** 2
        if cfg.optimizer.offload:
            parts["stream"] = STREAM
        return {name: size for name, size in parts.items() if size}

    @cached_property
    def _dequantized(self) -> int:
        """Elements of the largest frozen FP8 weight that some GEMM uses as values, one expert at a time."""
        rows = {states.weight_name(row): row for row in self.plan.rows}
        sizes = [0]
        for p in self.held:
            row = rows.get(stock_name(p.name)) if p.codes is not None else None
            if row is not None and not states.multiplies_by_codes(row, p.codes):
                sizes.append(row.shape[0] * row.shape[1] * (1 if row.fp8 else row.row.experts or 1))
        return max(sizes)

    def _gather(self, cfg: Config, plan: fp8.Plan, ways: int = 1) -> tuple[int, ...]:
        """Bytes of the whole (weights, gradients) of the root and of two blocks.

        The blocks' experts are split over ``ways`` ranks.
        """
        key = (states.sent_width(cfg, states.width(cfg)), cfg.lora and cfg.lora.dtype, _of_plan(cfg), ways)
        if key not in self._gathered:
            held, plan = states.dealt(self.held, plan, ways)
            both = states.gathered(cfg, held, plan), states.ungathered(cfg, held)
            self._gathered[key] = tuple(
                sizes.get("", 0) + 2 * max((size for name, size in sizes.items() if name), default=0) for sizes in both
            )
        return self._gathered[key]

    @cached_property
    def elements(self) -> int:
        """The number of trained parameters."""
        return sum(p.elements() for p in self.held if p.trained)

    @cached_property
    def counts(self) -> Mapping[str, int]:
        """The repeating blocks of each component."""
        return Counter(self.family.component_of(name) or "foundation" for name, _ in self.family.layers(self.model))

    @cached_property
    def flops(self) -> Mapping[str, float]:
        """The forward FLOPs of each component's linear layers, per token."""
        out: dict[str, float] = {}
        for row in self.plan.rows:
            n, k = row.shape
            out[row.component] = out.get(row.component, 0.0) + 2.0 * n * k * (row.row.experts_per_token or 1)
        return out

    def forward_flops(self, tokens: Tokens) -> Mapping[str, float]:
        """The FLOPs of each component in one forward of these tokens; attention counts for the language model."""
        key = (tokens.row, tokens.image, tokens.sound, *tokens.counts.values())
        if key not in self._flops:
            out = {component: each * tokens.counts.get(component, 0) for component, each in self.flops.items()}
            attention = attention_flops(self.model.config, tokens)
            out["foundation"] = out.get("foundation", 0.0) + (attention or 0.0) / 3.5
            self._flops[key] = out
        return self._flops[key]

    def input_of(self, component: str, cfg: Config) -> int:
        """Bytes of a row's hidden states between two blocks, which is what a fully recomputed block keeps."""
        config = self.model.config
        towers = {"image_encoder": "vision_config", "audio_encoder": "audio_config"}
        section = getattr(config, towers[component]) if component in towers else config.get_text_config()
        width = section.hidden_size
        return _one_row(self.tokens).counts.get(component, 0) * width * states.width(cfg)

    @cached_property
    def _about(self) -> _About:
        return _About.of(self.held, self.plan)


@dataclass(frozen=True)
class _About:
    """Sizes that the workspace depends on.

    ``vocabulary`` and ``hidden`` are the head's sizes. ``widest`` gives the widest layer of each component, and
    ``in_fp8`` the components with FP8 layers. ``largest`` and ``largest_inside`` are the elements of the largest weight
    and of the largest within a block. ``codes`` is the bytes of the largest layer's codes.
    """

    vocabulary: int
    hidden: int
    widest: Mapping[str, int]
    in_fp8: frozenset[str]
    largest: int
    largest_inside: int
    codes: int

    @classmethod
    def of(cls, held: tuple[states.Held, ...], plan: fp8.Plan) -> _About:
        heads = [row.shape for row in plan.rows if row.component == "lm_head"]
        vocabulary, hidden = heads[0] if heads else (0, 0)
        widest: dict[str, int] = {}
        for row in plan.rows:
            if row.component != "lm_head":
                widest[row.component] = max(widest.get(row.component, 0), *row.shape)
        trained = [p for p in held if p.trained]
        return cls(
            vocabulary,
            hidden,
            widest,
            frozenset(row.component for row in plan.rows if row.fp8),
            max((p.elements() for p in trained), default=0),
            max((p.elements() for p in trained if p.block), default=0),
            max((states.codes_of(row, (row.recipe.fwd,)) for row in plan.rows if row.recipe), default=0),
        )


def value_of(cfg: Config, key: str) -> Any:
    """The value under a dotted key."""
    section, name = key.split(".")
    return getattr(getattr(cfg, section), name)


def refused(cfg: Config) -> bool:
    """Whether the configuration breaks a rule, so that a run would refuse it."""
    return any(True for _ in check(cfg))


def changed(cfg: Config, settings: Mapping[str, Any]) -> Config:
    """Return a copy with other values under dotted keys.

    The rules are not checked, so that combinations that a run refuses can be sized too.
    """
    for key, value in settings.items():
        section, name = key.split(".")
        if key == "train.recompute" and not isinstance(value, RecomputeSection):
            ways = dict.fromkeys(RecomputeSection.model_fields, value) if isinstance(value, str) else value
            value = RecomputeSection(**ways)
        cfg = cfg.model_copy(update={section: getattr(cfg, section).model_copy(update={name: value})})
    return cfg


def _of_plan(cfg: Config) -> Any:
    """The memory settings of a configuration that the plan depends on."""
    parts = [getattr(cfg.fp8, name) for name in COMPONENTS]
    return (cfg.fp8.activations, *(p and p.activations for p in parts), cfg.fp8.weight_codes, cfg.fp8.param)


def _one_row(tokens: Tokens) -> Tokens:
    return replace(tokens, counts={name: n // tokens.rows for name, n in tokens.counts.items()})


def _rows(tokens: Tokens, rows: int) -> Tokens:
    return replace(tokens, counts={name: n * rows for name, n in _one_row(tokens).counts.items()})


# --- cards ------------------------------------------------------------------------------------------------------------

# Memory that belongs to no tensor: the CUDA context with its kernels and the workspaces of cuBLAS and NCCL (about
# 1 GB), and the share that the allocator loses to fragmentation. Both are assumptions until a run measures them.
CONTEXT, FRAGMENTS = 1.0e9, 0.02


@dataclass(frozen=True)
class Card:
    """A card; ``size`` is in bytes as given, so 80GB is 80e9, although such a card has 85e9 bytes."""

    name: str
    size: int

    @property
    def reserve(self) -> int:
        """Bytes that a run's tensors must leave free."""
        return int(CONTEXT + FRAGMENTS * self.size)

    @property
    def usable(self) -> int:
        return self.size - self.reserve

    @classmethod
    def parse(cls, text: str) -> Card:
        """Parse ``80GB``, ``24GiB`` or ``141``; raises TrainError for anything else."""
        words = text.strip().lower()
        number, unit = words, 1e9
        for ending, size in (("gib", 2.0**30), ("gb", 1e9)):
            if words.endswith(ending):
                number, unit = words[: -len(ending)], size
                break
        try:
            value = float(number)
        except ValueError:
            value = 0.0
        if not 1 <= value <= 10000:
            raise TrainError(f"a card is given by its memory, as in 80GB, 24GB or 141GB; found {text[:60]!r}")
        return cls(text.strip(), int(value * unit))
