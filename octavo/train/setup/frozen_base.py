"""The frozen base under a run's adapters: what is frozen, which weights are in FP8, and its fingerprint.

The base is loaded from its folder at every start and is not in checkpoints. Checkpoints have its fingerprint: SHA-256
of the bytes of every frozen weight as it was loaded, of codes and scales for weights in FP8. A resumed run compares its
base with the fingerprint, and every run does at its end, because nothing may have written to the base. base.json in the
run directory has the result.
"""

from __future__ import annotations

import copy
import hashlib
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from octavo import fp8, models
from octavo.adapters.experts import stock_name
from octavo.base.recipe_specs import RECIPES_OF_KIND
from octavo.config import Config
from octavo.config.sections.rl import BEYOND_SFT
from octavo.fp8.weights import FROZEN, codes_of_frozen, frozen_bytes, frozen_weights, full, is_frozen, master_of, plain
from octavo.parallel import World
from octavo.train.errors import TrainError
from octavo.train.forward import critic

FILE = "base.json"


def freeze(model: nn.Module, family: models.Family, cfg: Config) -> None:
    """Freeze what the run does not train: with LoRA the whole model, else what `model.freeze` names."""
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
    """A sentence about what :func:`switch_off_dropout` switched off; ``model`` may be without its adapters."""
    off = [*models.disabled_dropout(model)]
    if cfg.lora is not None and cfg.lora.dropout and cfg.train.phase in BEYOND_SFT:
        off.append(f"lora.dropout {cfg.lora.dropout:g}")
    if not off:
        return []
    return [f"dropout is off, since train.phase: {cfg.train.phase} compares log-probabilities: {', '.join(off)}"]


def prepare(model: nn.Module, family: models.Family, cfg: Config, folder: str | None = None) -> None:
    """Prepare a model on the meta device like the run's: frozen, with frozen FP8 weights where the run loads codes, and
    without dropout where the run has none. ``folder``: of the weights; None: a published shape, in BF16."""
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
    """Parameter -> the cast of its codes, for all parameters that the run loads as FP8 codes."""
    kinds = cfg.model.load_in_fp8.kinds
    if folder is not None:
        quantized = models.read_quantization(folder) is not None
        if not quantized and not kinds:
            return {}
        requested = models.frozen_casts(folder, model, kinds, keeps_codes(cfg))
        if quantized and kinds and not keeps_codes(cfg):
            _not_cast_twice(requested, models.frozen_casts(folder, model), folder)
        return requested
    lacking = [name for name in kinds if name not in family.components]
    if lacking:
        raise TrainError(f"model.load_in_fp8.{lacking[0]}: this {family.name} has no {lacking[0]}. Remove it")
    rows = fp8.describe_layers(model, family.components)
    return {
        row.name if row.kind == "experts" else f"{row.name}.weight": FROZEN[kinds[row.component]]
        for row in rows
        if row.component in kinds and row.kind in ("linear", "experts")
    }


def _not_cast_twice(requested: Mapping[str, fp8.CastSpec], stored: Mapping[str, fp8.CastSpec], folder: str) -> None:
    """Refuse to requantize: without `lora` a folder's codes are dequantized, and codes of another kind would round a
    second time."""
    for name, spec in requested.items():
        if name in stored and stored[name] != spec:
            raise TrainError(
                f"load_in_fp8 would cast {name} to FP8 ({spec}) a second time: {folder} holds it as codes already "
                f"({stored[name]}), and full fine-tuning dequantizes those. Use the folder's kind, use the BF16 "
                "checkpoint, leave load_in_fp8 out, or train adapters (lora), which keep the codes"
            )


def into_codes(model: nn.Module, plan: fp8.Plan) -> None:
    """Quantize the weights of all layers that a plan has in FP8 with a recipe for frozen codes; except the head, whose
    weight may be tied to the embedding."""
    kinds = {recipe: kind for kind, fitting in RECIPES_OF_KIND.items() for recipe in fitting}
    for row in plan.rows:
        if row.recipe is None or row.recipe.name not in kinds or row.kind not in ("linear", "experts"):
            continue
        path, _, name = (row.name if row.kind == "experts" else f"{row.name}.weight").rpartition(".")
        module = model.get_submodule(path)
        weight = module._parameters[name]
        assert weight is not None
        turned = weight.dim() == 3 and bool(getattr(module, "is_transposed", False))
        module._parameters[name] = fp8.freeze_weight(weight, FROZEN[kinds[row.recipe.name]], transposed=turned)


def keeps_codes(cfg: Config) -> bool:
    """Whether the codes of an FP8 checkpoint stay codes: only if its weights are not trained."""
    return cfg.lora is not None and cfg.model.keep_fp8


def adapter_sizes(cfg: Config, model: nn.Module, family: models.Family) -> dict[str, int]:
    """Layer -> trained parameters of its adapter; {} without `lora`. Raises AdapterError for everything that attaching
    would refuse, including `lora.adapter`, so that this fails before weights are read."""
    if cfg.lora is None:
        return {}
    from octavo import adapters

    names = set(adapters.check(model, family, cfg.lora))
    rows = [row for row in fp8.describe_layers(model, family.components) if row.name in names]
    rank, magnitudes = cfg.lora.rank, int(cfg.lora.dora)
    return {row.name: (row.experts or 1) * (rank * sum(row.shape) + magnitudes * row.shape[0]) for row in rows}


def with_adapters(model: nn.Module, family: models.Family, cfg: Config) -> nn.Module:
    """A copy of a model on the meta device with the run's adapters and critic; without any, the model itself."""
    if cfg.lora is None and not critic.wanted(cfg):
        return model
    dressed = copy.deepcopy(model)
    if cfg.lora is not None:
        from octavo import adapters

        adapters.attach(dressed, family, cfg.lora.model_copy(update={"adapter": None}))
    if critic.wanted(cfg):
        critic.attach(dressed, cfg)
    switch_off_dropout(dressed, cfg)
    return dressed


def dress(small: nn.Module, dressed: nn.Module, family: models.Family, cfg: Config) -> None:
    """Add to a part of a model the adapters that the whole model has in ``dressed``, and its critic."""
    if cfg.lora is not None:
        from octavo import adapters

        here = {row.name for row in fp8.describe_layers(small, family.components)}
        names = tuple(name for name in adapters.adapted_layers(dressed) if name in here)
        if names:
            section = cfg.lora.model_copy(update={"adapter": None, "targets": names, "exclude": ()})
            adapters.attach(small, family, section)
    if critic.wanted(cfg):
        critic.attach(small, cfg)
    switch_off_dropout(small, cfg)


def notes(cfg: Config, model: nn.Module, family: models.Family) -> list[str]:
    """Notes of a plan about the base; ``model`` is on the meta device, prepared."""
    if cfg.lora is None:
        return []
    sizes, of = adapter_sizes(cfg, model, family), sum(p.numel() for p in model.parameters())
    trained = sum(sizes.values())
    listed = ", ".join(f"{n} {kind}" for kind, n in Counter(name.rpartition(".")[2] for name in sizes).items())
    out = [
        f"lora: adapters of rank {cfg.lora.rank} on {len(sizes)} layers ({listed}): {trained / 1e6:.4g} M "
        f"parameters are trained, {100 * trained / of:.2g} % of the base's {of / 1e6:.4g} M; their own GEMMs are in "
        "high precision"
    ]
    if critic.wanted(cfg):
        out.append("the critic has equally large adapters on the same layers, and a value head")
    if cfg.model.freeze:
        out.append("model.freeze has no effect with lora: the whole base is frozen, and only adapters are trained")
    return out


# --- fingerprints -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Base:
    """The frozen weights of a run at its start, as name -> SHA-256.

    codes  of weights in FP8, the same on any number of ranks
    rest   of all others, the same on any number of ranks
    local  of this rank's shards of the rest
    taken  their bytes
    """

    codes: Mapping[str, str]
    rest: Mapping[str, str]
    local: Mapping[str, str]
    taken: Mapping[str, Any]

    @classmethod
    def of(cls, model: nn.Module, rest: Mapping[str, str], world: World) -> Base:
        """``rest``: :func:`digests` of whole weights. A collective."""
        local = rest if world.size == 1 else digests(model)
        return cls(fp8.fingerprint(model), rest, local, codes_of(model))

    @property
    def whole(self) -> dict[str, str]:
        return {**self.codes, **self.rest}

    def changed(self, model: nn.Module, world: World) -> str | None:
        """The first frozen weight that has changed, None if none has. A collective."""
        now = {**fp8.fingerprint(model), **digests(model)}
        before = {**self.codes, **self.local}
        mine = next((name for name in before if now.get(name) != before[name]), None)
        return next((name for name in world.gather_objects(mine) if name is not None), None)


def digests(model: nn.Module, world: World | None = None) -> dict[str, str]:
    """SHA-256 of each frozen parameter in high precision, by its stock name: of this rank's part or, with a `world`, of
    the whole weights. Then it is a collective, which gathers one weight at a time; each rank digests some of them.
    """
    frozen = [(n, p) for n, p in model.named_parameters() if not p.requires_grad and not is_frozen(p)]
    if world is None:
        return {stock_name(name): _digest(plain(p)) for name, p in frozen}
    mine = {}
    for number, (name, parameter) in enumerate(frozen):
        whole = full(master_of(parameter).detach())
        if number % world.size == world.rank:
            mine[stock_name(name)] = _digest(plain(whole))
    parts = world.gather_objects(mine)
    return {name: digest for part in parts for name, digest in part.items()}


def _digest(values: Tensor) -> str:
    return hashlib.sha256(values.detach().contiguous().cpu().view(-1).view(torch.uint8).numpy().data).hexdigest()


def codes_of(model: nn.Module) -> dict[str, Any]:
    """The frozen FP8 weights on this rank: their number, parameters, and bytes of codes and scales."""
    held = [codes_of_frozen(weight) for _, weight in frozen_weights(model)]
    parameters, size = sum(q.data.numel() for q in held), frozen_bytes(model)
    each = {"bytes_per_parameter": size / parameters} if parameters else {}
    return {"weights": len(held), "parameters": parameters, "bytes": size, **each}


def same(before: Mapping[str, str], now: Mapping[str, str], where: Path | str, folder: str) -> None:
    """Raise TrainError if the loaded base is not the one with which a checkpoint was trained."""
    if not before:
        raise TrainError(
            f"{where} cannot be continued: its state.json has no fingerprint of the base with which it was trained. "
            "Start a new run; lora.adapter continues from an adapter/ folder"
        )
    odd = next((name for name in (*now, *before) if before.get(name) != now.get(name)), None)
    if odd is None:
        return
    what = "is not in it" if odd not in now else "was not in it then" if odd not in before else "has other values"
    count = sum(before.get(name) != now.get(name) for name in {*before, *now})
    raise TrainError(
        f"the base in {folder} is not the one with which {where} was trained: {odd} {what} ({count} of {len(now)} "
        "weights differ). Adapters only fit the weights on which they were trained; restore that folder, or start a "
        "new run"
    )
