"""Estimates the GPU memory of a run, in bytes by kind, before any weight is read.

    weights       parameters, in the dtype of the model
    master        the extra bits that make a BF16 weight exactly fp32
    gradients     after backward
    optimizer     both moments
    codes         FP8 codes of weights, if kept from step to step
    reference     phases rl and preference: the frozen reference model (none with LoRA)
    kv_cache      phase rl, while completions are generated (`rollout`); gradients and activations do not exist then
    activations   tensors saved for backward, for the largest micro-batch
    logits        tensors saved by the head and the loss
    workspace     the peak of temporary memory within a step

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
from octavo.train.estimate.memory import states
from octavo.train.estimate.memory.activations import ForwardBytes, count_balance_loss, count_forward
from octavo.train.estimate.memory.mesh import key_value_bytes, make_layout, shard_forward
from octavo.train.estimate.memory.rollout import Rollout, Rollouts, make_copy_counter
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
CPU_CHUNK = 2**23
# Device memory of an optimizer in host memory: three buffers of a batch of states (octavo.fp8.optim.offload).
STREAM = 3 * (64 << 20)


@dataclass(frozen=True)
class Footprint:
    """The memory of one configuration.

    ``kinds`` maps each kind to its bytes on the rank with most. ``per_token`` gives the bytes of activations for
    a token of each component. ``host`` is the number of offloaded bytes in host memory. ``parts`` is the composition of
    the workspace. ``rollout`` is the other part of a step in the phase rl. ``staging`` is the size of the copy in host
    memory that is being saved (`run.save: async`).
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
        """The bytes of the larger part of a step: update or rollout."""
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


class MemoryEstimator:
    """Estimates the memory of one model under configurations that differ only in memory settings.

    Each forward is counted once.

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
        self._count_copy = make_copy_counter(self.config, family, plan) if copy else None
        # Replicas have their own memory, which free memory on their devices decides.
        generates = cfg.train.phase == "rl" and cfg.rl is not None and cfg.rl.engine.name == "octavo"
        self._rollouts = Rollouts(self.config, usable) if generates else None
        self.adapted_model = frozen_base.copy_with_adapters(
            model, family, cfg
        )  # the trained model, and the model that runs
        self.parameters = states.list_parameters(self.adapted_model, family)
        self.reached = states.reached_by_backward(self.adapted_model)
        self.frozen = states.frozen_names(self.parameters)
        self._forward_cache: dict[Any, ForwardBytes] = {}
        self._balance_cache: dict[object, int] = {}
        self._persistent_cache: dict[Any, int] = {}
        self._gather_cache: dict[Any, tuple[int, ...]] = {}
        self._plan_cache: dict[Any, fp8.Plan] = {_plan_key(cfg): plan}
        self._flops_cache: dict[Any, Mapping[str, float]] = {}

    @property
    def config(self) -> Any:
        return self.model.config

    def get_plan(self, cfg: Config) -> fp8.Plan:
        """Return the plan of a configuration: recipes and backends of ``self.cfg``, memory settings of ``cfg``."""
        key = _plan_key(cfg)
        if key not in self._plan_cache:
            policy = planning.policy_from(cfg)
            saving = components_saving_fp8(policy, self.family.components)
            inputs = self.plan.rows, policy.fuse == "on", saving, self.family.components
            self._plan_cache[key] = replace(self.plan, policy=policy, blocks=plan_blocks(self.model, *inputs))
        return self._plan_cache[key]

    def estimate_forward(self, cfg: Config, rows: int) -> ForwardBytes:
        """Return the bytes that a forward of this many rows keeps; one row is counted, and the result is scaled."""
        key = (_plan_key(cfg)[:-2], self.forward_dtypes(cfg), cfg.train.recompute, cfg.train.logits)
        if key not in self._forward_cache:
            saved = self._fake_forward(cfg)
            self._forward_cache[key] = replace(saved, recomputed=self._recomputed_bytes(cfg, saved))
        return self._forward_cache[key].scale(rows)

    def head_bytes(self, cfg: Config) -> int:
        """Return the bytes that the head and the loss keep for one row, without counting the blocks."""
        key = ("head", self.forward_dtypes(cfg), cfg.train.logits)
        if key not in self._forward_cache:
            plain = with_settings(cfg, {"train.recompute": "none", "fp8.activations": self.cfg.fp8.activations})
            self._forward_cache[key] = self._fake_forward(plain, head_only=True)
        return self._forward_cache[key].logits

    def uses_chunked_head(self, cfg: Config) -> bool:
        """Return True if losses are computed without full logits: configured, and possible with this model."""
        return cfg.train.logits == "chunked" and self._can_chunk_head

    @cached_property
    def _can_chunk_head(self) -> bool:
        return why_not_chunked(self.model) is None

    def forward_dtypes(self, cfg: Config) -> tuple[torch.dtype, torch.dtype | None]:
        """Return (dtype of the parameters, dtype of autocast or None if autocast is off)."""
        return model_dtype(cfg), autocast_dtype(cfg, torch.device(self.device))

    def _fake_forward(self, cfg: Config, head_only: bool = False) -> ForwardBytes:
        dtypes, tokens = self.forward_dtypes(cfg), _tokens_per_row(self.tokens)
        inputs = self.model, self.family, self.get_plan(cfg), tokens, cfg, dtypes[1]
        saved = count_forward(*inputs, head_only, self.adapted_model)
        if head_only:
            return saved
        key = dtypes, cfg.train.logits
        if key not in self._balance_cache:
            self._balance_cache[key] = count_balance_loss(*inputs, saved, self.adapted_model)
        return replace(saved, logits=saved.logits + self._balance_cache[key])

    def _recomputed_bytes(self, cfg: Config, saved: ForwardBytes) -> dict[str, int]:
        """Return the bytes that a recomputed block of each component keeps in addition during its backward."""
        recomputed = [
            component for component, how in cfg.train.recompute if how != "none" and saved.largest.get(component)
        ]
        if not recomputed:
            return {}
        full = self.estimate_forward(with_settings(cfg, {"train.recompute": "none"}), 1)
        return {component: full.largest[component] - saved.largest[component] for component in recomputed}

    def estimate(self, cfg: Config, ranks: int = 1) -> Footprint:
        """Return the footprint of a configuration that differs from ``self.cfg`` only in settings of memory."""
        rows = max(1, self.tokens.rows * cfg.train.micro_batch // self.cfg.train.micro_batch)
        return self.assemble(cfg, self.estimate_forward(self.single_process_config(cfg, ranks), rows), rows, ranks)

    def single_process_config(self, cfg: Config, ranks: int) -> Config:
        """Return a configuration whose single process computes like each of these ranks."""
        overrides = {
            "train.gather": "stored",
            "optimizer.master": "bf16+sr",
        }  # a forward keeps as much as with BF16 weights
        return with_settings(cfg, overrides) if gathers_bf16(cfg, ranks) else cfg

    def assemble(self, cfg: Config, saved: ForwardBytes, rows: int, ranks: int = 1) -> Footprint:
        """Return the footprint for the given bytes of a forward of ``rows`` rows."""
        plan, layout = self.get_plan(cfg), make_layout(cfg, ranks)
        saved, tokens = shard_forward(saved, _scale_rows(self.tokens, rows), layout.context)
        persistent = self.persistent_kinds(cfg, layout)
        activations = resident = saved.activations
        if cfg.train.offload_activations:  # one block's activations are being moved while the next block uses its own
            resident = sum(saved.outside.values()) + saved.copies + 2 * max(saved.largest.values(), default=0)
        parts = self._workspace(cfg, plan, saved, tokens, ranks, layout)
        kinds = {
            **persistent,
            "kv_cache": 0,
            "activations": min(activations, resident),
            "logits": saved.logits,
            "workspace": sum(parts.values()),
        }
        host = activations - kinds["activations"]
        if cfg.optimizer.offload:
            host += kinds["master"] + kinds["optimizer"]
            kinds["master"] = kinds["optimizer"] = 0
        by_component = {name: saved.blocks.get(name, 0) + saved.outside.get(name, 0) for name in tokens.counts}
        per_token = {
            name: by_component[name] / count for name, count in tokens.counts.items() if count and by_component[name]
        }
        rollout = None
        if self._rollouts is not None:
            held = {name: size for name, size in persistent.items() if name != "gradients" and kinds[name]}
            dtype, autocast = self.forward_dtypes(self.single_process_config(cfg, ranks))
            transient = sum(parts.get(name, 0) for name in ("codes", "values"))
            transient += self._gather_bytes(cfg, plan, layout.expert)[0] if ranks > 1 else 0
            rollout = self._rollouts.estimate(cfg, held, tokens, autocast or dtype, transient, ranks)
        staging = states.checkpoint_bytes(cfg, self.parameters, ranks) if cfg.run.save == "async" else 0
        return Footprint(kinds, per_token, host, parts, tokens, ranks, rollout, staging)

    def persistent_bytes(self, cfg: Config, ranks: int = 1) -> int:
        """Return the bytes on the device between steps, plus gradients."""
        persistent = self.persistent_kinds(cfg, make_layout(cfg, ranks))
        return sum(persistent.values()) - (
            persistent["master"] + persistent["optimizer"] if cfg.optimizer.offload else 0
        )

    def persistent_kinds(self, cfg: Config, layout: Layout) -> dict[str, int]:
        """Return the bytes by kind that are kept between steps, on the device or the host; results are cached."""
        plan, parameters, optimizer, ranks = self.get_plan(cfg), self.parameters, cfg.optimizer, layout.sharded
        widths, shared = (states.weight_width(cfg), states.trained_width(cfg)), layout.ranks > 1
        kinds: dict[str, tuple[Any, Callable[[], int]]] = {
            "weights": (widths, lambda: states.weight_bytes(cfg, parameters, ranks)),
            "master": ((widths, optimizer.master), lambda: states.master_bytes(cfg, parameters, ranks)),
            "gradients": ((widths, optimizer.update), lambda: states.gradient_bytes(cfg, parameters, ranks)),
            "optimizer": (optimizer.states, lambda: states.moment_bytes(cfg, parameters, ranks)),
            "codes": (
                (_plan_key(cfg), shared),
                lambda: states.code_bytes(plan, self.reached, ranks, self.frozen, shared),
            ),
            "reference": (
                (widths, _plan_key(cfg)),
                lambda: 0 if self._count_copy is None else self._count_copy(cfg, plan, ranks),
            ),
        }
        for kind, (key, count) in kinds.items():
            if (kind, ranks, key) not in self._persistent_cache:
                self._persistent_cache[kind, ranks, key] = count()
        return {kind: self._persistent_cache[kind, ranks, key] for kind, (key, _) in kinds.items()}

    def _workspace(
        self, cfg: Config, plan: fp8.Plan, saved: ForwardBytes, tokens: Tokens, ranks: int, layout: Layout
    ) -> dict[str, int]:  # fmt: skip
        """Return the peak of temporary memory while all activations are still kept, by part:

        loss       the current chunk of logits (as the GEMM returns it, in fp32, and its gradient in both dtypes) and
                   the fp32 gradient of the hidden states; with full logits, their gradient in both dtypes
        blocks     the gradients inside one block: three tensors of its widest layer in 16 bits (an MLP's product, gate
                   and up), each with codes for dgrad and wgrad; and the activations of the block if it is recomputed
        gradient   of one weight before it is added, or applied with `update: backward`
        codes      of one weight, if they are cast at each use
        values     of one frozen FP8 weight, if a GEMM uses values instead of codes
        gathered   under FSDP2: the whole weights and gradients of the root and of two blocks (one is prefetched)
        keys       of a layer, from the other ranks that share a row (octavo.train.estimate.memory.mesh)
        mask       of a tower that separates the images of a micro-batch by a mask over all their patches (Pixtral)
        stream     buffers of an optimizer whose states are in host memory

        A reference model's forward, while activations are kept, needs less than the backward. The first two parts
        never coincide, so the larger counts; with `update: backward` the head's gradient belongs to the first.
        """
        sizes = self._layer_sizes
        width = (autocast_dtype(cfg, torch.device(self.device)) or model_dtype(cfg)).itemsize
        positions = tokens.counts.get("lm_head", tokens.counts.get("foundation", 0))
        if self.uses_chunked_head(cfg):
            limit = CPU_CHUNK if self.device == "cpu" else CHUNK
            chunk = min(limit, positions * sizes.vocabulary)
            codes = 2 if "lm_head" in sizes.in_fp8 else 0  # codes of the chunk's gradient, for dgrad and wgrad
            loss = chunk * (width + 4 + 4 + width + codes) + 4 * positions * sizes.hidden
        else:
            loss = positions * sizes.vocabulary * (width + 4 + width)
        blocks = max(
            tokens.counts.get(name, 0) * wide * (3 * width + (6 if name in sizes.in_fp8 else 0))
            + saved.recomputed.get(name, 0)
            for name, wide in sizes.widest.items()
        )
        inner_gradient, outer_gradient = (states.trained_width(cfg) * n for n in (sizes.largest_inside, sizes.largest))
        parts: dict[str, int] = {}
        if cfg.optimizer.update == "backward":
            loss_is_larger = loss + outer_gradient > blocks + inner_gradient
            parts["loss" if loss_is_larger else "blocks"] = loss if loss_is_larger else blocks
            parts["gradient"] = outer_gradient if loss_is_larger else inner_gradient
        else:
            parts["loss" if loss > blocks else "blocks"] = max(loss, blocks)
            parts["gradient"] = outer_gradient if planning.count_micro_steps(cfg, ranks) > 1 else 0
        if plan.policy.weight_codes == "recast":
            parts["codes"] = sizes.codes
        if self.frozen:
            parts["values"] = width * self._dequantized
        if ranks > 1:
            parts["gathered"] = sum(self._gather_bytes(cfg, plan, layout.expert))
        if layout.context > 1:
            parts["keys"] = key_value_bytes(cfg, self.config, layout, tokens, width)
        if tokens.image and self._has_image_mask:
            parts["mask"] = width * tokens.counts.get("image_encoder", 0) ** 2
        if cfg.optimizer.offload:
            parts["stream"] = STREAM
        return {name: size for name, size in parts.items() if size}

    @cached_property
    def _dequantized(self) -> int:
        """The elements of the largest frozen FP8 weight that a GEMM uses as values, one expert at a time."""
        rows = {states.weight_name(row): row for row in self.plan.rows}
        sizes = [0]
        for p in self.parameters:
            row = rows.get(stock_name(p.name)) if p.codes is not None else None
            if row is not None and not states.multiplies_by_codes(row, p.codes):
                sizes.append(row.shape[0] * row.shape[1] * (1 if row.fp8 else row.row.experts or 1))
        return max(sizes)

    def _gather_bytes(self, cfg: Config, plan: fp8.Plan, expert_ranks: int = 1) -> tuple[int, ...]:
        """Return the bytes of whole (weights, gradients) of the root and two blocks.

        The experts of the blocks are split over ``expert_ranks`` ranks.
        """
        key = (
            states.sent_width(cfg, states.weight_width(cfg)),
            cfg.lora and cfg.lora.dtype,
            _plan_key(cfg),
            expert_ranks,
        )
        if key not in self._gather_cache:
            parameters, plan = states.shard_experts(self.parameters, plan, expert_ranks)
            by_block = states.gathered_bytes(cfg, parameters, plan), states.whole_gradient_bytes(cfg, parameters)
            self._gather_cache[key] = tuple(
                sizes.get("", 0) + 2 * max((size for name, size in sizes.items() if name), default=0)
                for sizes in by_block
            )
        return self._gather_cache[key]

    @cached_property
    def _has_image_mask(self) -> bool:
        return models.vision_of(self.config).kind == "whole"

    @cached_property
    def elements(self) -> int:
        """The number of trained parameters."""
        return sum(p.elements() for p in self.parameters if p.trained)

    @cached_property
    def counts(self) -> Mapping[str, int]:
        """The number of repeating blocks of each component."""
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
        """Return the FLOPs of each component in one forward of these tokens; attention counts as language model."""
        key = (tokens.row, tokens.image, tokens.sound, *tokens.counts.values())
        if key not in self._flops_cache:
            out = {component: flops * tokens.counts.get(component, 0) for component, flops in self.flops.items()}
            attention = attention_flops(self.model.config, tokens)
            out["foundation"] = out.get("foundation", 0.0) + (attention or 0.0) / 3.5
            self._flops_cache[key] = out
        return self._flops_cache[key]

    def block_input_bytes(self, component: str, cfg: Config) -> int:
        """Return the bytes of a row's hidden states between two blocks, which a fully recomputed block keeps."""
        config = self.model.config
        towers = {"image_encoder": "vision_config", "audio_encoder": "audio_config"}
        section = getattr(config, towers[component]) if component in towers else config.get_text_config()
        width = section.hidden_size
        return _tokens_per_row(self.tokens).counts.get(component, 0) * width * states.weight_width(cfg)

    @cached_property
    def _layer_sizes(self) -> _LayerSizes:
        return _LayerSizes.from_plan(self.parameters, self.plan)


@dataclass(frozen=True)
class _LayerSizes:
    """Sizes that the workspace depends on.

    ``vocabulary`` and ``hidden`` are the dimensions of the head. ``widest`` maps each component to the width of its
    widest layer, and ``in_fp8`` has the components with FP8 layers. ``largest`` and ``largest_inside`` are the numbers
    of elements of the largest weight and of the largest weight in a block. ``codes`` is the number of bytes of the
    largest layer's codes.
    """

    vocabulary: int
    hidden: int
    widest: Mapping[str, int]
    in_fp8: frozenset[str]
    largest: int
    largest_inside: int
    codes: int

    @classmethod
    def from_plan(cls, parameters: tuple[states.ParameterInfo, ...], plan: fp8.Plan) -> _LayerSizes:
        heads = [row.shape for row in plan.rows if row.component == "lm_head"]
        vocabulary, hidden = heads[0] if heads else (0, 0)
        widest: dict[str, int] = {}
        for row in plan.rows:
            if row.component != "lm_head":
                widest[row.component] = max(widest.get(row.component, 0), *row.shape)
        trained = [p for p in parameters if p.trained]
        return cls(
            vocabulary,
            hidden,
            widest,
            frozenset(row.component for row in plan.rows if row.fp8),
            max((p.elements() for p in trained), default=0),
            max((p.elements() for p in trained if p.block), default=0),
            max((states.layer_code_bytes(row, (row.recipe.fwd,)) for row in plan.rows if row.recipe), default=0),
        )


def value_of(cfg: Config, key: str) -> Any:
    """Return the value of a dotted key."""
    section, name = key.split(".")
    return getattr(getattr(cfg, section), name)


def breaks_rule(cfg: Config) -> bool:
    """Return True if config validation would reject the configuration."""
    return any(True for _ in check(cfg))


def with_settings(cfg: Config, settings: Mapping[str, Any]) -> Config:
    """Return a copy with different values for dotted keys.

    The result is not validated, so combinations that a run would reject can be estimated too.
    """
    for key, value in settings.items():
        section, name = key.split(".")
        if key == "train.recompute" and not isinstance(value, RecomputeSection):
            modes = dict.fromkeys(RecomputeSection.model_fields, value) if isinstance(value, str) else value
            value = RecomputeSection(**modes)
        cfg = cfg.model_copy(update={section: getattr(cfg, section).model_copy(update={name: value})})
    return cfg


def _plan_key(cfg: Config) -> Any:
    """Return the memory settings of a configuration that the plan depends on."""
    parts = [getattr(cfg.fp8, name) for name in COMPONENTS]
    return (cfg.fp8.activations, *(p and p.activations for p in parts), cfg.fp8.weight_codes, cfg.fp8.param)


def _tokens_per_row(tokens: Tokens) -> Tokens:
    return replace(tokens, counts={name: n // tokens.rows for name, n in tokens.counts.items()})


def _scale_rows(tokens: Tokens, rows: int) -> Tokens:
    return replace(tokens, counts={name: n * rows for name, n in _tokens_per_row(tokens).counts.items()})
