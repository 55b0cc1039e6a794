"""The frozen base under a run's adapters: what is frozen, which weights are in FP8, and its fingerprint.

The base is loaded from its folder at every start and is not stored in checkpoints. Checkpoints store its fingerprint:
SHA-256 of the bytes of every frozen weight as loaded (of codes and scales, for weights in FP8). A resumed run compares
its base with the fingerprint. At the end, every run checks that nothing has written to the base, and records the result
in base.json.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn

from octavo import fp8, models
from octavo.adapters.experts import stock_name
from octavo.base.recipe_specs import RECIPES_OF_KIND
from octavo.config import Config
from octavo.config.sections.rl import BEYOND_SFT
from octavo.fp8.arithmetic import CastSpec
from octavo.fp8.weights import FROZEN, codes_of_frozen, frozen_bytes, frozen_weights, full, is_frozen, master_of, plain
from octavo.generation.engines.manifest import sha256_of
from octavo.parallel import World
from octavo.train.errors import TrainError
from octavo.train.forward import critic

if TYPE_CHECKING:
    from transformers import PreTrainedModel

FILE = "base.json"


def freeze(model: nn.Module, family: models.Family, cfg: Config) -> None:
    """Freeze the weights that the run does not train: with LoRA the whole model, otherwise the parts in
    `model.freeze`."""
    if cfg.model.freeze:
        models.freeze(model, family, cfg.model.freeze)  # with LoRA too, so that unknown names are errors
    if cfg.lora is not None:
        model.requires_grad_(False)


def switch_off_dropout(model: nn.Module, cfg: Config) -> None:
    """Switch dropout off in phases that compare log-probabilities (policy with reference, trainer with rollout, a
    critic's values with returns): with dropout, a policy equal to its reference would differ from it randomly.

    Called before FP8 is applied, because a fused block has no dropout, and again after adapters are attached. Raises
    ModelError for a model with randomness that cannot be switched off.
    """
    if cfg.train.phase in BEYOND_SFT:
        models.disable_dropout(model)


def dropout_note(model: nn.Module, cfg: Config) -> list[str]:
    """Return a sentence about what :func:`switch_off_dropout` switched off; ``model`` may have no adapters yet."""
    off = [*models.disabled_dropout(model)]
    if cfg.lora is not None and cfg.lora.dropout and cfg.train.phase in BEYOND_SFT:
        off.append(f"lora.dropout {cfg.lora.dropout:g}")
    if not off:
        return []
    return [f"dropout is off, since train.phase: {cfg.train.phase} compares log-probabilities: {', '.join(off)}"]


def prepare_meta_model(model: nn.Module, family: models.Family, cfg: Config, folder: str | None = None) -> None:
    """Prepare a model on the meta device like the model of the run: frozen, with FP8 weights where the run loads codes,
    and without dropout if the run switches it off. ``folder`` has the weights; None stands for a published shape in
    BF16."""
    freeze(model, family, cfg)
    switch_off_dropout(model, cfg)
    for name, spec in frozen_names(model, family, cfg, folder).items():
        path, _, parameter = name.rpartition(".")
        module = model.get_submodule(path)
        old = module._parameters[parameter]
        assert old is not None
        turned = old.dim() == 3 and bool(getattr(module, "is_transposed", False))
        module._parameters[parameter] = fp8.freeze_weight(old, spec, transposed=turned)


def frozen_names(model: Any, family: models.Family, cfg: Config, folder: str | None) -> dict[str, fp8.CastSpec]:
    """Return the cast of each parameter that the run loads as FP8 codes, by name."""
    kinds = cfg.model.load_in_fp8.kinds
    if folder is not None:
        quantized = models.read_quantization(folder) is not None
        if not quantized and not kinds:
            return {}
        requested = models.frozen_casts(folder, model, kinds, keeps_codes(cfg))
        if quantized and kinds and not keeps_codes(cfg):
            _not_cast_twice(requested, models.frozen_casts(folder, model), folder)
        return requested
    missing = [name for name in kinds if name not in family.components]
    if missing:
        raise TrainError(f"model.load_in_fp8.{missing[0]}: this {family.name} has no {missing[0]}. Remove it")
    rows = fp8.describe_layers(model, family.components)
    return {
        row.name if row.kind == "experts" else f"{row.name}.weight": FROZEN[kinds[row.component]]
        for row in rows
        if row.component in kinds and row.kind in ("linear", "experts")
    }


def _not_cast_twice(requested: Mapping[str, fp8.CastSpec], stored: Mapping[str, fp8.CastSpec], folder: str) -> None:
    """Raise if weights would be quantized twice: without `lora` the folder's codes are dequantized, and casting them to
    codes of a different kind would round a second time."""
    for name, spec in requested.items():
        if name in stored and stored[name] != spec:
            raise TrainError(
                f"load_in_fp8 would cast {name} to FP8 ({spec}) a second time: {folder} already contains it as "
                f"codes ({stored[name]}), and full fine-tuning dequantizes those. Use the folder's kind, use the BF16 "
                "checkpoint, leave load_in_fp8 out, or train adapters (lora), which keep the codes"
            )


class FrozenCast(NamedTuple):
    """The cast of a weight whose layer can multiply by frozen codes; `transposed`: experts stored as [E, K, N]."""

    spec: CastSpec
    transposed: bool


def frozen_casts(model: nn.Module, plan: fp8.Plan) -> dict[str, FrozenCast]:
    """Return the casts of the weights of all layers whose recipe in the plan is one for frozen codes, by the
    parameter's name. The head is not among them, because its weight may be tied to the embedding."""
    kinds = {recipe: kind for kind, fitting in RECIPES_OF_KIND.items() for recipe in fitting}
    casts = {}
    for row in plan.rows:
        if row.recipe is None or row.recipe.name not in kinds or row.kind not in ("linear", "experts"):
            continue
        spec = FROZEN[kinds[row.recipe.name]]
        if row.recipe.fwd is None or row.recipe.fwd.b != spec:
            continue  # the forward multiplies by the weight itself, or by another cast of it
        name = row.name if row.kind == "experts" else f"{row.name}.weight"
        turned = bool(getattr(model.get_submodule(name.rpartition(".")[0]), "is_transposed", False))
        casts[name] = FrozenCast(spec, turned and model.get_parameter(name).dim() == 3)
    return casts


def quantize_frozen_weights(model: nn.Module, plan: fp8.Plan) -> None:
    """Quantize the weights of all layers in :func:`frozen_casts`."""
    for name, cast in frozen_casts(model, plan).items():
        path, _, key = name.rpartition(".")
        weight = model.get_parameter(name)
        model.get_submodule(path)._parameters[key] = fp8.freeze_weight(weight, cast.spec, transposed=cast.transposed)


def load_as_values(cfg: Config, dtype: torch.dtype, device: torch.device) -> PreTrainedModel:
    """Load the model folder as a run without adapters does, which dequantizes FP8 checkpoints."""
    if models.read_quantization(cfg.model.path) is not None:
        return models.load(cfg.model.path, dtype=dtype, device=device, keep_fp8=False)
    return models.load(cfg.model.path, dtype=dtype, device=device)


def freeze_copy(model: nn.Module, cfg: Config, plan_file: Path, components: Mapping[str, tuple[str, ...]]) -> None:
    """Make a model with the weights of a run a frozen copy of the run's, in place: without dropout, its FP8 layers as
    codes only, and the rest as in `plan_file`, the run's plan.json. Raises PlanError for another model's plan."""
    model.requires_grad_(False).eval()
    switch_off_dropout(model, cfg)  # blocks with dropout would not be fused like the policy's
    quantize_frozen_weights(model, fp8.load_plan(plan_file, model, components, other_machine=True))
    fp8.apply(model, fp8.load_plan(plan_file, model, components, other_machine=True))


def keeps_codes(cfg: Config) -> bool:
    """True if the codes of an FP8 checkpoint stay codes, which requires that its weights are not trained."""
    return cfg.lora is not None and cfg.model.keep_fp8


def adapter_sizes(cfg: Config, model: nn.Module, family: models.Family) -> dict[str, int]:
    """Return the number of trained parameters of each layer's adapter; {} if `lora` is not set. Raises AdapterError
    wherever attaching the adapters would raise, including for `lora.adapter`, so that it fails before weights are
    read."""
    if cfg.lora is None:
        return {}
    from octavo import adapters

    names = set(adapters.check(model, family, cfg.lora))
    rows = [row for row in fp8.describe_layers(model, family.components) if row.name in names]
    rank, magnitudes = cfg.lora.rank, int(cfg.lora.dora)
    return {row.name: (row.experts or 1) * (rank * sum(row.shape) + magnitudes * row.shape[0]) for row in rows}


def copy_with_adapters(model: nn.Module, family: models.Family, cfg: Config) -> nn.Module:
    """Return a copy of a model on the meta device with the run's adapters and critic, or the model itself if the run
    has neither."""
    if cfg.lora is None and not critic.is_enabled(cfg):
        return model
    adapted = copy.deepcopy(model)
    if cfg.lora is not None:
        from octavo import adapters

        adapters.attach(adapted, family, cfg.lora.model_copy(update={"adapter": None}))
    if critic.is_enabled(cfg):
        critic.attach(adapted, cfg)
    switch_off_dropout(adapted, cfg)
    return adapted


def attach_adapters_like(part: nn.Module, adapted: nn.Module, family: models.Family, cfg: Config) -> None:
    """Attach to a part of a model the adapters that the whole model ``adapted`` has there, and its critic."""
    if cfg.lora is not None:
        from octavo import adapters

        in_part = {row.name for row in fp8.describe_layers(part, family.components)}
        names = tuple(name for name in adapters.adapted_layers(adapted) if name in in_part)
        if names:
            section = cfg.lora.model_copy(update={"adapter": None, "targets": names, "exclude": ()})
            adapters.attach(part, family, section)
    if critic.is_enabled(cfg):
        critic.attach(part, cfg)
    switch_off_dropout(part, cfg)


def notes(cfg: Config, model: nn.Module, family: models.Family) -> list[str]:
    """Return the notes of a plan about the base; ``model`` is the result of :func:`prepare_meta_model`."""
    if cfg.lora is None:
        return []
    sizes, base_size = adapter_sizes(cfg, model, family), sum(p.numel() for p in model.parameters())
    trained = sum(sizes.values())
    listed = ", ".join(f"{n} {kind}" for kind, n in Counter(name.rpartition(".")[2] for name in sizes).items())
    out = [
        f"lora: adapters of rank {cfg.lora.rank} on {len(sizes)} layers ({listed}): {trained / 1e6:.4g} M "
        f"parameters are trained, {100 * trained / base_size:.2g} % of the base's {base_size / 1e6:.4g} M; their "
        "own GEMMs are in high precision"
    ]
    if critic.is_enabled(cfg):
        out.append("the critic has equally large adapters on the same layers, and a value head")
    if cfg.model.freeze:
        out.append("model.freeze has no effect with lora: the whole base is frozen, and only adapters are trained")
    return out


# --- fingerprints -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class FrozenBase:
    """The frozen weights of a run at its start, as name -> SHA-256.

    codes       digests of weights in FP8, the same on any number of ranks
    rest        digests of all other weights, the same on any number of ranks
    local       digests of this rank's shards of the other weights
    code_sizes  number and bytes of the weights in FP8 (:func:`code_sizes`)
    """

    codes: Mapping[str, str]
    rest: Mapping[str, str]
    local: Mapping[str, str]
    code_sizes: Mapping[str, Any]

    @classmethod
    def from_model(cls, model: nn.Module, rest: Mapping[str, str], world: World) -> FrozenBase:
        """Fingerprint a model; ``rest`` is the result of :func:`compute_digests` for whole weights. Collective call."""
        local = rest if world.size == 1 else compute_digests(model)
        return cls(fp8.fingerprint(model), rest, local, code_sizes(model))

    @property
    def fingerprint(self) -> dict[str, str]:
        return {**self.codes, **self.rest}

    def find_changed_weight(self, model: nn.Module, world: World) -> str | None:
        """Return the name of the first frozen weight that has changed, or None if none has. Collective call."""
        now = {**fp8.fingerprint(model), **compute_digests(model)}
        before = {**self.codes, **self.local}
        local_change = next((name for name in before if now.get(name) != before[name]), None)
        return next((name for name in world.gather_objects(local_change) if name is not None), None)


def compute_digests(model: nn.Module, world: World | None = None) -> dict[str, str]:
    """Return the SHA-256 of each frozen parameter in high precision, by its stock name.

    Digests this rank's part of each weight or, with a `world`, the whole weights. The latter is a collective call,
    which gathers one weight at a time; each rank digests some of the weights.
    """
    frozen = [(n, p) for n, p in model.named_parameters() if not p.requires_grad and not is_frozen(p)]
    if world is None:
        return {stock_name(name): sha256_of(plain(p)) for name, p in frozen}
    local_digests = {}
    for number, (name, parameter) in enumerate(frozen):
        whole = full(master_of(parameter).detach())
        if number % world.size == world.rank:
            local_digests[stock_name(name)] = sha256_of(plain(whole))
    parts = world.gather_objects(local_digests)
    return {name: digest for part in parts for name, digest in part.items()}


def code_sizes(model: nn.Module) -> dict[str, Any]:
    """Return the number of frozen FP8 weights on this rank, their parameters, and the bytes of codes and scales."""
    codes = [codes_of_frozen(weight) for _, weight in frozen_weights(model)]
    parameters, size = sum(q.data.numel() for q in codes), frozen_bytes(model)
    per_parameter = {"bytes_per_parameter": size / parameters} if parameters else {}
    return {"weights": len(codes), "parameters": parameters, "bytes": size, **per_parameter}


def check_same_base(before: Mapping[str, str], now: Mapping[str, str], where: Path | str, folder: str) -> None:
    """Raise TrainError if the loaded base is not the base with which a checkpoint was trained."""
    if not before:
        raise TrainError(
            f"{where} cannot be continued: its state.json has no fingerprint of the base with which it was trained. "
            "Start a new run; lora.adapter continues from an adapter/ folder"
        )
    differing = next((name for name in (*now, *before) if before.get(name) != now.get(name)), None)
    if differing is None:
        return
    if differing not in now:
        difference = "is missing"
    elif differing not in before:
        difference = "was not in the base then"
    else:
        difference = "has different values"
    count = sum(before.get(name) != now.get(name) for name in {*before, *now})
    raise TrainError(
        f"the base in {folder} is not the one with which {where} was trained: {differing} {difference} ({count} of "
        f"{len(now)} weights differ). Adapters only fit the weights on which they were trained; restore that folder, "
        "or start a new run"
    )
