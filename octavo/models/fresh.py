"""Models that begin with nothing: built from config.json alone, their weights drawn by their family's own rules."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from transformers import GenerationConfig, PreTrainedConfig, PreTrainedModel

from octavo import fp8
from octavo.models.assembly import dtypes_of
from octavo.models.errors import ModelError
from octavo.models.folder import at, check_companions, stock
from octavo.models.quantization import read_quantization
from octavo.models.skeleton import auto_class, empty, read_config

#: what configurations call the standard deviation of normal weights; the first that is there is the one that counts
SPREADS = ("initializer_range", "init_std")


def fresh(
    path: str | Path,
    dtype: torch.dtype = torch.float32,
    device: str | torch.device = "cpu",
    seed: int = 0,
    std: float | None = None,
) -> PreTrainedModel:
    """The model of a folder's config.json with weights drawn anew, as transformers initialises its family; weights in
    the folder are not read.

    seed  of the numbers, which are drawn in fp32 on the CPU: the same for any device and number of ranks
    std   standard deviation of normal weights, in place of the configuration's own (`initializer_range`)

    In eval mode, as `load` gives a model; the generator of the process is left as it was. Raises ModelError where the
    configuration is of FP8 weights, has no standard deviation to be changed, or the family leaves weights undrawn.
    """
    folder = Path(path)
    config = read_config(folder)
    check_companions(folder)
    if read_quantization(folder) is not None:
        raise ModelError(
            f"{folder}/config.json is of weights in FP8 (quantization_config), and weights that are drawn are in high "
            "precision. Remove that entry; what trains in FP8 is for the run to say."
        )
    if std is not None:
        _spread(folder, config, std)
    with stock(f"{folder}: no {config.model_type!r} can be initialised"), _drawing(seed):
        model = auto_class(config).from_config(config, dtype=torch.float32)
    if undrawn := fp8.not_finite(model.named_parameters()):
        raise ModelError(
            f"{folder}: transformers draws no values for {len(undrawn)} weights of {config.model_type!r}, first "
            f"{undrawn[0]}. Begin with a checkpoint."
        )
    if dtype != torch.float32:
        _narrow(model, empty(config, dtype), dtype)
    model.config.name_or_path = model.name_or_path = str(folder)
    if model.can_generate() and (settings := at(folder, "generation_config.json")).exists():
        model.generation_config = GenerationConfig.from_pretrained(settings.parent, local_files_only=True)
    return model.to(device).eval()


def _spread(folder: Path, config: PreTrainedConfig, std: float) -> None:
    parts = [config, *(getattr(config, name) for name in config.sub_configs)]
    places = [(part, name) for part in parts for name in SPREADS if hasattr(part, name)]
    if not places:
        raise ModelError(
            f"{folder}: a configuration of {config.model_type!r} has no {' or '.join(SPREADS)}, so model.init_std can "
            "change nothing. Leave it out."
        )
    for part, name in places:
        setattr(part, name, std)


@contextmanager
def _drawing(seed: int) -> Iterator[None]:
    """Numbers of a seed's, on the CPU; memory that nobody fills is NaN."""
    former = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    fills = torch.utils.deterministic.fill_uninitialized_memory
    with torch.random.fork_rng(devices=[]), torch.device("cpu"):
        torch.manual_seed(seed)
        torch.use_deterministic_algorithms(True, warn_only=True)
        torch.utils.deterministic.fill_uninitialized_memory = True
        try:
            yield
        finally:
            torch.use_deterministic_algorithms(former[0], warn_only=former[1])
            torch.utils.deterministic.fill_uninitialized_memory = fills


def _narrow(model: PreTrainedModel, stock: PreTrainedModel, dtype: torch.dtype) -> None:
    """In the dtypes of the `stock` model of `dtype`, tensor by tensor."""
    dtype_of, buffers = dtypes_of(stock, dtype), dict(stock.named_buffers())
    for name, parameter in model.named_parameters():
        parameter.data = parameter.data.to(dtype_of(name))
    for name, buffer in model.named_buffers():
        if name in buffers:
            buffer.data = buffer.data.to(buffers[name].dtype)
    for part in (model.config, *(getattr(model.config, name) for name in model.config.sub_configs)):
        part.dtype = dtype
