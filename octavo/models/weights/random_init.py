"""Models with random weights, built from config.json and initialized by the rules of their family, one part of the
model at a time, so that no process holds all weights.

transformers initializes modules one by one, the innermost first, by the `_init_weights` of the model that contains
them; a module may set parameters of its children. So a part is a block or a module without blocks. Parts are
initialized in transformers' order, so `initialize_weights` on the whole model draws the same numbers.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from octavo import fp8
from octavo.models.errors import ModelError
from octavo.models.folder.folder import check_companions, wrap_errors
from octavo.models.folder.quantization import read_quantization
from octavo.models.structure.describe import describe
from octavo.models.structure.skeleton import empty, read_config
from octavo.models.weights.assembly import dtype_lookup, finish_setup
from octavo.models.weights.deferred import PlaceFn, WindowFn, find_owners, move_buffers, replace_meta_parameter

#: configuration fields with the standard deviation of normal weights; the first one that exists is used
STD_FIELDS = ("initializer_range", "init_std")


def init_model(
    path: str | Path,
    dtype: torch.dtype = torch.float32,
    device: str | torch.device = "cpu",
    seed: int = 0,
    std: float | None = None,
) -> PreTrainedModel:
    """Create the model of a folder's config.json with random weights, initialized as in transformers. Weights in the
    folder are not read.

    seed  of the numbers, which are drawn in fp32 on the CPU: the same for every device and number of ranks
    std   standard deviation of normal weights, instead of the configuration's (`initializer_range`)

    The model is in eval mode, as from `load`; the generator of the process is not changed. Raises ModelError if the
    configuration describes FP8 weights, if it has no standard deviation that `std` could replace, or if the family does
    not initialize some weights.
    """
    drawn = init_deferred(path, dtype, device, seed, std)
    parameters: dict[int, nn.Parameter] = {}

    def place(name: str, module: nn.Module, leaf: str, values: Tensor, low: Tensor | None) -> None:
        meta_parameter = module._parameters[leaf]
        assert meta_parameter is not None
        parameters[id(meta_parameter)] = nn.Parameter(values, requires_grad=meta_parameter.requires_grad)

    drawn.fill(lambda module, leaf: (0, module.get_parameter(leaf).shape[0]), place, lambda amax: amax)
    for module in drawn.model.modules():  # tied ones too
        for leaf, parameter in module._parameters.items():
            if parameter is not None:
                module._parameters[leaf] = parameters[id(parameter)]
    return drawn.model


@dataclass
class DeferredInit:
    """A model with all parameters on the meta device, whose weights are drawn later. The model may be changed (classes,
    sharding) as long as each parameter stays in its module under its name."""

    model: PreTrainedModel
    owners: Mapping[str, tuple[nn.Module, str]]
    device: torch.device
    seed: int
    split: bool

    def fill(self, window: WindowFn, place: PlaceFn, reduce_max: Callable[[Tensor], Tensor]) -> int:
        """Draw all numbers, a block at a time, and pass the rows of `window` to `place`. Returns 0, the number of bytes
        read. With `split`, values are BF16 with their lower halves (int16). Raises ModelError for weights that the
        family does not initialize."""
        source = empty(copy.deepcopy(self.model.config), torch.float32)
        blocks = [name for name, _ in describe(source).layers(source)]
        for name, value in _initialize_all(source, blocks, self.seed):
            if name not in self.owners:  # tied to another
                continue
            module, leaf = self.owners[name]
            first, last = window(module, leaf)
            rows = value[first:last]
            low = None
            if self.split:
                rows, low = fp8.arithmetic.split_master(rows)
                low = low.to(self.device)
            parameter = module._parameters[leaf]
            assert parameter is not None
            place(name, module, leaf, rows.to(self.device, parameter.dtype, copy=True), low)
        return 0


def init_deferred(
    path: str | Path,
    dtype: torch.dtype = torch.float32,
    device: str | torch.device = "cpu",
    seed: int = 0,
    std: float | None = None,
    split: bool = False,
) -> DeferredInit:
    """Create the model of `init_model` without drawing its weights; with `split` in BF16 with lower halves. Raises
    ModelError for all errors that do not depend on weights."""
    folder = Path(path)
    config = read_config(folder)
    check_companions(folder)
    if read_quantization(folder) is not None:
        raise ModelError(
            f"{folder}/config.json describes FP8 weights (quantization_config), but random weights are in high "
            "precision. Remove that entry; the run's configuration selects the layers that train in FP8."
        )
    if std is not None:
        _set_std(folder, config, std)
    # Parameters get their dtypes on the meta device, where changing the dtype needs no memory.
    dtype = torch.bfloat16 if split else dtype
    with wrap_errors(f"{folder}: a {config.model_type!r} model cannot be initialized"):
        model = empty(config, dtype)
    dtype_of = dtype_lookup(model, dtype)
    owners = find_owners(model, [name for name, _ in model.named_parameters()])
    for name in owners:
        replace_meta_parameter(model, name, dtype if split else dtype_of(name), None)
    model.tie_weights()
    for part in (model.config, *(getattr(model.config, name) for name in model.config.sub_configs)):
        part.dtype = dtype
    on = torch.device(device)
    move_buffers(finish_setup(model, folder), on)
    return DeferredInit(model, owners, on, seed, split)


def _set_std(folder: Path, config: PreTrainedConfig, std: float) -> None:
    parts = [config, *(getattr(config, name) for name in config.sub_configs)]
    places = [(part, name) for part in parts for name in STD_FIELDS if hasattr(part, name)]
    if not places:
        raise ModelError(
            f"{folder}: a configuration of {config.model_type!r} has no {' or '.join(STD_FIELDS)}, so model.init_std "
            "has no effect. Remove it."
        )
    for part, name in places:
        setattr(part, name, std)


def _initialize_all(model: PreTrainedModel, blocks: Collection[str], seed: int) -> Iterator[tuple[str, Tensor]]:
    """Yield (name, fp32 values on the CPU) of every parameter of a model on the meta device; tied ones separately.

    Numbers come from a generator with this seed; the process' generator is not changed. Raises ModelError for a
    parameter that the family does not initialize, and for a module that sets parameters of a different part.
    """
    with torch.random.fork_rng(devices=[]), torch.device("cpu"), torch.no_grad():
        torch.manual_seed(seed)
        yield from _initialize_below("", model, model, frozenset(blocks))


def _initialize_below(
    name: str, module: nn.Module, owner: PreTrainedModel, blocks: frozenset[str]
) -> Iterator[tuple[str, Tensor]]:
    owner = module if isinstance(module, PreTrainedModel) else owner
    inside = any(block.startswith(f"{name}.") if name else True for block in blocks)
    if not inside or name in blocks:
        yield from _initialize_part(name, module, owner, recurse=True)
        return
    for leaf, child in module.named_children():
        yield from _initialize_below(f"{name}.{leaf}" if name else leaf, child, owner, blocks)
    yield from _initialize_part(name, module, owner, recurse=False)


def _initialize_part(
    name: str, module: nn.Module, owner: PreTrainedModel, recurse: bool
) -> Iterator[tuple[str, Tensor]]:
    """Initialize a module with all modules in it (`recurse`), or only its direct parameters."""
    # Parameters start as NaN, so that those that the family does not set can be recognized.
    owners = [(path, m) for path, m in module.named_modules() if recurse or m is module]
    values: dict[str, Tensor] = {}
    for path, home in owners:
        for leaf, parameter in home._parameters.items():
            if parameter is not None:
                drawn = nn.Parameter(torch.full(parameter.shape, torch.nan), requires_grad=False)
                home._parameters[leaf] = values[".".join(filter(None, (name, path, leaf)))] = drawn
    others = {} if recurse else {n: p._version for n, p in module.named_parameters() if p.is_meta}
    _initialize(module, owner) if recurse else owner._init_weights(module)
    touched = next((n for n, p in module.named_parameters() if p.is_meta and p._version != others.get(n)), None)
    if touched is not None:
        raise ModelError(
            f"{type(module).__name__} initializes {touched}, which is in a different part of the model. Start from a "
            "checkpoint"
        )
    for full, value in values.items():
        if value.isnan().any():
            raise ModelError(
                f"transformers draws no values for {full} of {owner.config.model_type!r}. Start from a checkpoint"
            )
    yield from ((full, value.data) for full, value in values.items())
    for _, home in owners:
        for leaf, parameter in home._parameters.items():
            if parameter is not None:
                home._parameters[leaf] = nn.Parameter(parameter.to("meta"), requires_grad=False)


def _initialize(module: nn.Module, owner: PreTrainedModel) -> None:
    for child in module.children():
        _initialize(child, child if isinstance(child, PreTrainedModel) else owner)
    owner._init_weights(module)
