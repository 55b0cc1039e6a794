"""List the linear maps of a model, one row each.

A row has the name of the module, its ``kind``, the part of the model that it belongs to (``component``) and its shape
(N, K), as in y[M, N] = x[M, K] wT. No weight is read, so models on the meta device are supported.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import nn

from octavo.fp8.arithmetic.cast import CastSpec
from octavo.fp8.dense.linear import Linear
from octavo.fp8.moe.experts import PROJECTIONS, is_experts
from octavo.fp8.policy.globs import covers
from octavo.fp8.weights.frozen import codes_cast

# Common module names in vision-language models; the families in octavo.models declare theirs explicitly.
_PROJECTORS = (
    *("merger", "merger_list", "deepstack_merger_list", "multi_modal_projector", "mm_projector", "image_projector"),
    *("visual_projection", "connector", "modality_projection", "aligner", "mlp1"),
)
_TOWERS = (
    "visual",
    "vision_tower",
    "vision_model",
    "vision_encoder",
    "vision_backbone",
    "image_encoder",
    "vision",
    "vit",
)
CONVENTIONS: Mapping[str, tuple[str, ...]] = {
    "lm_head": ("lm_head", "**.lm_head", "embed_out", "**.embed_out"),
    "image_projector": tuple(f"**.{part}" for part in _PROJECTORS),
    "image_encoder": tuple(f"**.{part}" for part in _TOWERS),
}
_HEADS = ("lm_head", "embed_out", "output_layer")
_PATCH_EMBEDDINGS = (
    *("patch_embed", "patch_embedding", "patch_embeddings", "patch_embedder", "patchify"),
    *("patch_projection", "video_patch_projection"),  # Kosmos 2.5's and Nemotron's, which are linear layers
)
_ROUTERS = ("gate", "router", "shared_expert_gate", "wg")
WRAPPED = ("base_layer", "original_module")
"""Names of the wrapped layer in PEFT's wrappers."""


@dataclass(frozen=True)
class Row:
    """One linear map of a model.

    ``shape`` is (N, K) = (outputs, inputs), per expert if the row has ``experts``, of which each token uses
    ``experts_per_token``. ``params`` counts all weights and biases of the row. ``tied`` has the other names of the
    weight. ``frozen``: the weight requires no gradient; ``codes``: the cast of a frozen FP8 weight
    (:mod:`octavo.fp8.weights.frozen`), or None for other weights. ``module``: name of the module that owns the weight;
    a row of experts is one of its parameters.
    """

    name: str
    kind: str
    component: str
    shape: tuple[int, int]
    experts: int | None = None
    experts_per_token: int | None = None
    bias: bool = False
    frozen: bool = False
    tied: tuple[str, ...] = ()
    params: int = 0
    type: str = "Linear"
    module: str = ""
    codes: CastSpec | None = None

    @property
    def parameter(self) -> str:
        """Name of the weight in ``model.named_parameters()``."""
        return self.name if self.kind == "experts" else f"{self.name}.weight" if self.name else "weight"

    def to_json(self) -> dict[str, Any]:
        out = {**asdict(self), "shape": list(self.shape), "tied": list(self.tied)}
        del out["codes"]
        return out if self.codes is None else {**out, "codes": str(self.codes)}


def describe_layers(model: nn.Module, components: Mapping[str, tuple[str, ...]] | None = None) -> tuple[Row, ...]:
    """Return the rows of a model in the order of ``named_modules``.

    ``components`` maps component names to globs of module names, which also cover child modules. The most specific glob
    wins, so a merger inside the tower can belong to the projector. Modules that no glob covers are ``foundation``. None
    uses common module names.
    """
    shared = _names_by_weight(model)
    head = _output_embeddings(model)
    modules = dict(model.named_modules())
    component = component_namer(components)
    rows: list[Row] = []
    for name, module in modules.items():
        for row in _make_rows(name, module, modules, head):
            weight = _get_weight(row, module)
            tied = tuple(n for n in shared[id(weight)] if n != row.parameter)
            where = "lm_head" if row.kind == "lm_head" else component(row.module)
            frozen = not weight.requires_grad
            codes = codes_cast(weight) if frozen else None
            rows.append(replace(row, component=where, tied=tied, frozen=frozen, codes=codes))
    return tuple(rows)


def unwrapped(name: str) -> str:
    """Return the name of a layer before PEFT wrapped it: ``gate`` for ``gate.base_layer``."""
    while name.rpartition(".")[2] in WRAPPED:
        name = name.rpartition(".")[0]
    return name


def _make_rows(name: str, module: nn.Module, modules: Mapping[str, nn.Module], head: nn.Module | None) -> Iterator[Row]:
    stock = unwrapped(name)
    last, kind_name = stock.rpartition(".")[2], type(module).__name__
    of_patches = any(s in _PATCH_EMBEDDINGS for s in name.split("."))
    if is_experts(module):
        yield from _make_expert_rows(name, module, modules)
    elif isinstance(module, nn.Linear):
        if any(child in module._modules for child in WRAPPED):
            return  # some PEFT wrappers (RandLora, VBLoRA) are nn.Linear subclasses that contain the layer
        if module is head or (head is None and last in _HEADS):
            kind = "lm_head"
        elif of_patches:
            kind = "patch_embed"
        elif _is_router(stock, modules):
            kind = "router"
        else:
            plain = getattr(module, "_stock", type(module))  # the class before fp8.apply replaced it to count
            kind = "linear" if plain is nn.Linear or isinstance(module, Linear) else "subclass"
        yield _make_row(name, kind, module, tuple(module.weight.shape), kind_name)
    elif isinstance(module, nn.Conv1d | nn.Conv2d | nn.Conv3d):
        if of_patches or module.kernel_size == module.stride != (1,) * len(module.stride):
            n, k = module.weight.shape[0], module.weight[0].numel()
            yield _make_row(name, "patch_embed", module, (n, k), kind_name)
    elif _is_router(stock, modules):
        weight = module._parameters.get("weight")
        if weight is not None and weight.dim() == 2:
            yield _make_row(name, "router", module, tuple(weight.shape), kind_name)


def _make_row(name: str, kind: str, module: nn.Module, shape: tuple[int, ...], type_name: str) -> Row:
    params = sum(p.numel() for p in module._parameters.values() if p is not None)
    bias = module._parameters.get("bias") is not None
    return Row(name, kind, "", (shape[0], shape[1]), bias=bias, params=params, type=type_name, module=name)


def _make_expert_rows(name: str, module: nn.Module, modules: Mapping[str, nn.Module]) -> Iterator[Row]:
    transposed = bool(getattr(module, "is_transposed", False))
    for which in PROJECTIONS:
        weight = module._parameters[which]
        assert weight is not None
        count, a, b = weight.shape
        bias = module._parameters.get(f"{which}_bias")
        params = weight.numel() + (bias.numel() if bias is not None else 0)
        yield Row(
            f"{name}.{which}" if name else which, "experts", "", (b, a) if transposed else (a, b), experts=count,
            experts_per_token=_find_top_k(name, module, modules), bias=bias is not None, params=params,
            type=type(module).__name__, module=name,
        )  # fmt: skip


def _find_top_k(name: str, module: nn.Module, modules: Mapping[str, nn.Module]) -> int | None:
    """Return the number of experts per token from the block, its router or the configuration, or None."""
    parent = modules.get(unwrapped(name).rpartition(".")[0]) if name else None
    owners: list[Any] = [module, parent, *(parent.children() if parent is not None else ())]
    owners += [c for c in (getattr(module, "config", None), getattr(parent, "config", None)) if c is not None]
    for owner in owners:
        for attribute in ("top_k", "num_experts_per_tok", "num_experts_per_token", "moe_top_k", "moe_k"):
            value = getattr(owner, attribute, None)
            if isinstance(value, int) and not isinstance(value, bool) and value > 0:
                return value
    return None


def _is_router(name: str, modules: Mapping[str, nn.Module]) -> bool:
    parent, _, last = name.rpartition(".")
    if last not in _ROUTERS or parent not in modules:
        return False
    return any("expert" in child for child, _ in modules[parent].named_children())


def _output_embeddings(model: nn.Module) -> nn.Module | None:
    get_head = getattr(model, "get_output_embeddings", None)
    if get_head is None:
        return None
    try:
        head = get_head()
    except (NotImplementedError, AttributeError):  # models without a head raise either
        return None
    while isinstance(head, nn.Module) and not isinstance(head, nn.Linear):  # a PEFT wrapper
        inner = next((head._modules[name] for name in WRAPPED if name in head._modules), None)
        if inner is None:
            break
        head = inner
    return head if isinstance(head, nn.Module) else None


def _names_by_weight(model: nn.Module) -> dict[int, list[str]]:
    names: dict[int, list[str]] = defaultdict(list)
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names[id(parameter)].append(name)
    return names


def _get_weight(row: Row, module: nn.Module) -> torch.Tensor:
    weight = module._parameters[row.name.rpartition(".")[2] if row.kind == "experts" else "weight"]
    assert weight is not None
    return weight


def component_namer(components: Mapping[str, tuple[str, ...]] | None) -> Callable[[str], str]:
    """Return a function from module name to component, by the globs of :func:`describe_layers`."""
    order = []
    for rank, (component, globs) in enumerate((CONVENTIONS if components is None else components).items()):
        for glob in globs:
            literal = sum(not set(s) & set("*?") for s in glob.split("."))
            # Common names are tried in order, so that a projector inside the tower is a projector.
            order.append(((0 if components is None else -literal), rank, glob, component))
    order.sort()
    return lambda name: next((c for _, _, glob, c in order if covers(glob, name)), "foundation")
