"""Loading a model from a folder when FP8 is involved: on disk, in the model, or both.

In order: select the requested layers, map tensors to parameters, check that codes have scales and agree with the
configuration, load the parameters one by one, and do the remaining work of from_pretrained (ties, buffers, generation
settings). Everything except the values is checked before the first weight is read.
"""

from __future__ import annotations

import ctypes
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import GenerationConfig, PreTrainedModel

from octavo import fp8
from octavo.base import accelerator
from octavo.base.recipe_specs import NAME_OF_KIND, parse_kind
from octavo.fp8.policy import Row
from octavo.fp8.weights import FROZEN
from octavo.models.errors import ModelError
from octavo.models.folder.folder import find_file, open_plain
from octavo.models.folder.quantization import Quantization, read_quantization
from octavo.models.structure.describe import WITHOUT_HEAD, describe
from octavo.models.weights.fp8_codes import PairedWeights, pair_scales
from octavo.models.weights.name_mapping import Origin, Sources, is_transposed, map_sources
from octavo.models.weights.shards import Shards, open_weights
from octavo.models.weights.streaming import WeightStream
from octavo.models.weights.unloaded import describe_names, is_unloaded, loaders_ignore

_QUANTIZED = ("linear", "experts")
_CODE_KINDS = (*_QUANTIZED, "lm_head")


def requested_kinds(load_in_fp8: str | bool | Mapping[str, str | None] | None) -> dict[str, str]:
    """Return component -> kind (of `fp8.weights.FROZEN`, by its name or its recipe's name: row or rowwise). A single
    word applies to the language model, and True means `row`. Raises ModelError for unknown names."""
    names = ", ".join(NAME_OF_KIND.values())
    if isinstance(load_in_fp8, bool):
        load_in_fp8 = "row" if load_in_fp8 else None
    if load_in_fp8 is not None and not isinstance(load_in_fp8, str | Mapping):
        raise ModelError(f"load_in_fp8 is {load_in_fp8!r}; it must be {names}, or a mapping from components to these.")
    stated = {"foundation": load_in_fp8} if isinstance(load_in_fp8, str) else dict(load_in_fp8 or {})
    kinds = {component: parse_kind(str(kind)) for component, kind in stated.items() if kind is not None}
    for component, kind in kinds.items():
        if component not in WITHOUT_HEAD:
            raise ModelError(f"load_in_fp8 names {component!r}; the components are {', '.join(WITHOUT_HEAD)}.")
        if kind not in FROZEN:
            raise ModelError(f"load_in_fp8 has {stated[component]!r} for {component}; it must be {names}.")
    return kinds


@dataclass
class PreparedModel:
    """A model on the meta device, the tensors of its parameters, and the stream that reads them; nothing is read
    yet."""

    model: PreTrainedModel
    sources: Sources
    stream: WeightStream

    def casts(self) -> dict[str, fp8.CastSpec]:
        """Return parameter -> cast of its codes for all parameters that become frozen FP8 weights. Reads scales."""
        specs = {name: FROZEN[kind] for name, kind in self.stream.kinds.items()}
        if self.stream.keep_fp8:
            codes = [o for o in self.sources.origins if any(e.is_codes for e in o.stored) and o.converter is None]
            specs |= {origin.name: self.stream.scales_of(origin)[0] for origin in codes}
        return specs


def prepare(
    folder: Path,
    build: Callable[[], PreTrainedModel],
    shards: Shards,
    quantization: Quantization | None,
    wanted: Mapping[str, str],
    dtype: torch.dtype,
    device: torch.device,
    keep_fp8: bool,
    log: Callable[[str], None],
) -> PreparedModel:
    """Build the model of a folder without its weights; arguments as for `octavo.models.load`. Raises ModelError for all
    errors that are visible in headers."""
    # All checks run before the stream is created, so that errors are found before weights are read.
    model = build()
    paired, mapping, weights = map_tensors(folder, model, shards, quantization, keep_fp8)
    kinds = _select_kinds(folder, weights, mapping, wanted, quantization, keep_fp8)
    for note in paired.notes:
        log(note)
    for used, other in mapping.duplicates:
        log(f"{folder} has two tensors for one parameter: using {used} ({used.dtype}), not {other} ({other.dtype})")
    note_unloaded(folder, model, [entry.name for entry in mapping.unknown], log)
    if wanted and not keep_fp8 and quantization is not None:
        log("keep_fp8=False: codes on disk are dequantized, and the layers of load_in_fp8 are quantized again")
    dtypes = dtype_lookup(model, dtype)
    return PreparedModel(
        model,
        mapping,
        WeightStream(shards, model, paired.scales, quantization, kinds, dtypes, device, keep_fp8=keep_fp8),
    )


def assemble(
    folder: Path, prepared: PreparedModel, device: torch.device, log: Callable[[str], None],
    progress: Callable[[int, int], None] | None,
) -> PreTrainedModel:  # fmt: skip
    """Read the weights as a stream and return the model. Raises ModelError for errors that are visible only in
    values."""
    _fill(prepared.stream, prepared.sources.origins, progress)
    for note in prepared.stream.notes:
        log(note)
    model = finish_loading(prepared.model, folder, prepared.sources)
    if unfilled := [name for name, tensor in model.named_parameters() if tensor.is_meta]:
        raise ModelError(_unfilled_error(folder, unfilled))
    return accelerator.move(model, device)


def map_tensors(
    folder: Path, model: PreTrainedModel, shards: Shards, quantization: Quantization | None, keep_fp8: bool
) -> tuple[PairedWeights, Sources, dict[str, Row]]:
    """Return (codes with their scales, sources of each parameter, linear layers by parameter) for a folder's tensors.
    Raises ModelError if they do not fit the model."""
    paired = pair_scales(shards.stored.values(), quantization, folder)
    rows = fp8.describe_layers(model, describe(model).components)
    weights = {row.parameter: row for row in rows}
    experts = {name for name, row in weights.items() if row.kind == "experts"}
    mapping = map_sources(model, paired.weights, experts)
    _check_complete(folder, model, mapping)
    _check_configured(folder, model, mapping, weights, quantization, keep_fp8)
    return paired, mapping, weights


def frozen_casts(
    path: str | Path,
    model: PreTrainedModel,
    load_in_fp8: str | bool | Mapping[str, str | None] | None = None,
    keep_fp8: bool = True,
) -> dict[str, fp8.CastSpec]:
    """Return parameter -> cast of its codes for all parameters that `load` would turn into frozen FP8 weights. Reads
    only headers and scales. `model` is the folder's model on the meta device. Raises the ModelErrors that `load` raises
    before it reads a weight."""
    folder, wanted = Path(path), requested_kinds(load_in_fp8)
    quantization = read_quantization(folder)
    with open_weights(folder, quantization is not None)[0] as shards:
        cpu, silent = torch.device("cpu"), lambda text: None
        return prepare(
            folder, lambda: model, shards, quantization, wanted, torch.bfloat16, cpu, keep_fp8, silent
        ).casts()


def _check_complete(folder: Path, model: PreTrainedModel, mapping: Sources) -> None:
    """Raise ModelError for missing, unknown and mis-shaped tensors, with the report of from_pretrained."""
    loaded = {name for origin in mapping.origins for name in (origin.targets or (origin.name,))}
    missing = set(model.state_dict()) - loaded
    ties: dict[str, str] = dict(getattr(model, "all_tied_weights_keys", None) or {})
    for one, other in [*ties.items(), *((b, a) for a, b in ties.items())]:
        if one in missing and other not in missing:
            missing.discard(one)
    missing = _filter_names(missing, getattr(model, "_keys_to_ignore_on_load_missing", None))
    buffers = [name for name, _ in model.named_buffers()]  # older checkpoints contain some that models now compute
    ignored = {pattern for end, pattern in _OLD_BUFFERS.items() if any(name.endswith(end) for name in buffers)}
    unplaced = {str(entry) for entry in mapping.unknown if not is_unloaded(model, entry.name)}
    unknown = _filter_names(unplaced, ignored, lambda text: text.split(" ", 1)[0])
    missing_names = {name for origin in mapping.origins for name in origin.missing_names}
    shapes = (
        [] if missing or missing_names else [misfit for o in mapping.origins for misfit in _shape_mismatches(model, o)]
    )
    info = {"missing_keys": missing | missing_names, "unexpected_keys": unknown, "mismatched_keys": shapes}
    check_loading_report(folder, info)
    check_dtype_kinds(folder, model, mapping.origins)


def check_dtype_kinds(folder: Path, model: PreTrainedModel, origins: Iterable[Origin]) -> None:
    """Raise ModelError for integers on disk for floating-point parameters, and the reverse: transformers would cast
    them."""
    for origin in origins:
        wanted = model.get_parameter_or_buffer(origin.name).dtype
        for entry in origin.stored:
            if entry.dtype.is_floating_point != wanted.is_floating_point:
                raise ModelError(
                    f"{folder}: {entry} is {entry.dtype}, but {origin.name} is {wanted} in the model. Write or "
                    "download the checkpoint again."
                )


_OLD_BUFFERS = {"rotary_emb.inv_freq": r"rotary_emb\.inv_freq", "position_ids": r"(^|\.)position_ids$"}


def _filter_names(
    names: set[str], patterns: Iterable[str] | None, name_of: Callable[[str], str] = lambda text: text
) -> set[str]:
    if not patterns:
        return names
    return {name for name in names if not any(re.search(pattern, name_of(name)) for pattern in patterns)}


def _shape_mismatches(model: PreTrainedModel, origin: Origin) -> list[tuple[str, tuple[int, ...], tuple[int, ...]]]:
    """Return (tensors on disk, their shape, the expected shape) of an origin that does not fit; conversion rules raise
    their own errors."""
    if origin.converter is not None:
        return []
    wanted = tuple(model.get_parameter_or_buffer(origin.name).shape)
    if not origin.experts:
        entry = origin.slots[0][0].stored
        return [] if entry.shape == wanted else [(str(entry), entry.shape, wanted)]
    if len(origin.slots) != wanted[0]:
        extra = origin.slots[-1][0].stored
        return [(str(extra), (len(origin.slots), *extra.shape[-2:]), wanted)]
    turned = is_transposed(model.get_submodule(origin.name.rpartition(".")[0]))
    height, width = wanted[:0:-1] if turned else wanted[1:]
    for pieces in origin.slots:
        if sum(piece.shape[0] for piece in pieces) != height or {piece.shape[1] for piece in pieces} != {width}:
            return [(str(pieces[0].stored), pieces[0].stored.shape, wanted)]
    return []


def check_loading_report(folder: Path, info: Mapping[str, Iterable[object]]) -> None:
    """Raise ModelError if a loading report has keys that are missing, unexpected or mis-shaped, or errors."""
    wrong = []
    for key, what in (
        ("missing_keys", "missing in the folder (transformers would initialize them randomly)"),
        ("unexpected_keys", "in the folder but unknown to the model"),
        ("mismatched_keys", "with a different shape in the model"),
        ("error_msgs", "reported while loading"),
    ):
        if names := sorted(_format_entry(item) for item in info.get(key, ())):
            wrong.append(f"{len(names)} {what}: {', '.join(names[:3])}{' ...' if len(names) > 3 else ''}")
    if wrong:
        raise ModelError(
            f"{folder}: tensors do not match the model that config.json describes. {'; '.join(wrong)}. Check that "
            "config.json and the weights belong together, or download them again."
        )


def note_unloaded(folder: Path, model: nn.Module, unknown: Iterable[str], log: Callable[[str], None]) -> None:
    """Log the tensors that Octavo leaves out and of which transformers would warn, such as the head of a reward
    model."""
    unloaded = [name for name in unknown if is_unloaded(model, name) and not loaders_ignore(model, name)]
    if unloaded:
        log(f"{folder}: the model does not load {len(unloaded)} of its tensors ({describe_names(unloaded)})")


def _format_entry(item: object) -> str:
    """Return a loading report's entry: a name, or (name, shape on disk, shape of the model)."""
    if isinstance(item, tuple) and len(item) == 3:
        name, disk, model = item
        return f"{name} {tuple(disk)} instead of {tuple(model)}"
    return str(item)


def _check_configured(
    folder: Path,
    model: PreTrainedModel,
    mapping: Sources,
    rows: Mapping[str, Row],
    quantization: Quantization | None,
    keep_fp8: bool,
) -> None:
    """Raise ModelError if codes and the configuration disagree, or for codes of layers that cannot hold them: loaders
    that follow the configuration would misread them."""
    if quantization is None:
        return
    # Both names are looked up: the list may have the name on disk or the name in the model.
    for origin in mapping.origins:
        row = rows.get(origin.name)
        for entry in origin.stored:
            names = {entry.name.removesuffix(".weight"), origin.name.removesuffix(".weight")}
            covered = all(quantization.covers(name) for name in names)
            if entry.is_codes and not covered:
                raise ModelError(
                    f"{folder}: {entry} has FP8 codes, but according to config.json that layer is not quantized: "
                    "loaders that follow the list would misread the codes as values. Correct the list, or write the "
                    "checkpoint again."
                )
            if covered and not entry.is_codes and row is not None and row.kind in _QUANTIZED:
                raise ModelError(
                    f"{folder}: {entry} is {entry.dtype}, but according to config.json that layer is in FP8 "
                    f"({quantization.method}): other loaders would look for its scales. Add "
                    f"{entry.name.removesuffix('.weight')!r} to the list of layers that are not quantized, or "
                    "write the checkpoint again."
                )
            if entry.is_codes and keep_fp8 and (row is None or row.kind not in _CODE_KINDS):
                raise ModelError(
                    f"{folder}: {entry} has FP8 codes, but {origin.name} is not a linear layer or experts, which are "
                    "the only ones that support codes. Load with keep_fp8=False to dequantize them."
                )


def _select_kinds(
    folder: Path,
    rows: Mapping[str, Row],
    mapping: Sources,
    wanted: Mapping[str, str],
    quantization: Quantization | None,
    keep_fp8: bool,
) -> dict[str, str]:
    """Return parameter -> kind for parameters that are quantized during loading. Raises ModelError if codes on disk
    have a different kind."""
    in_fp8 = {origin.name for origin in mapping.origins if keep_fp8 and any(e.is_codes for e in origin.stored)}
    # Codes on disk are kept: requantizing them to a different kind would add a second rounding error.
    kinds: dict[str, str] = {}
    for component, kind in wanted.items():
        selected = [n for n, row in rows.items() if row.component == component and row.kind in _QUANTIZED]
        if not selected:
            known = sorted({row.component for row in rows.values() if row.kind in _QUANTIZED})
            raise ModelError(
                f"load_in_fp8 names {component}, but {folder} has no linear layers there; it has them in "
                f"{', '.join(known) or 'no component'}."
            )
        in_folder = [name for name in selected if name in in_fp8]
        if in_folder and quantization is not None and quantization.spec.block != FROZEN[kind].block:
            raise ModelError(
                f"load_in_fp8 has {NAME_OF_KIND[kind]} for {component}, but {folder} has FP8 codes of "
                f"{quantization} ({in_folder[0]} and {len(in_folder) - 1} more). Remove load_in_fp8 to use these "
                "codes, or use the BF16 checkpoint."
            )
        kinds.update({name: kind for name in selected if name not in in_fp8})
    return kinds


def dtype_lookup(model: PreTrainedModel, dtype: torch.dtype) -> Callable[[str], torch.dtype]:
    """Return a function from a parameter of a model on the meta device to its dtype, or fp32 if its family requires
    it."""
    plan: Mapping[str, torch.dtype] = model._get_dtype_plan(dtype) if hasattr(model, "_get_dtype_plan") else {}
    patterns = [(re.compile(glob.replace("*", ".*")), wanted) for glob, wanted in plan.items()]

    def dtype_of(name: str) -> torch.dtype:
        required = next((wanted for pattern, wanted in patterns if pattern.search(name)), None)
        return required or model.get_parameter_or_buffer(name).dtype

    return dtype_of


def sort_by_offset(origins: Iterable[Origin]) -> list[Origin]:
    """Sort origins by their position in the files, so that files are read sequentially."""
    return sorted(origins, key=lambda origin: (origin.stored[0].file, origin.stored[0].begin))


def _fill(stream: WeightStream, origins: list[Origin], progress: Callable[[int, int], None] | None) -> None:
    total, done, trimmed = sum(entry.nbytes for origin in origins for entry in origin.stored), 0, 0
    for origin in sort_by_offset(origins):
        stream.fill(origin)
        done += sum(entry.nbytes for entry in origin.stored)
        trimmed = trim_heap_if_due(done, trimmed, done == total)
        if progress is not None:
            progress(done, total)
    stream.finish()


_TRIM_BYTES = 32 << 20  # bytes to read between two trims of the heap


def trim_heap_if_due(done: int, trimmed: int, last: bool = False) -> int:
    """Trim the heap if enough was read since the last trim, or at the end. Returns the bytes read at the last trim."""
    if done - trimmed < _TRIM_BYTES and not last:
        return trimmed
    _trim_heap()
    return done


def _trim_heap() -> None:
    """Return free memory of the C heap to the system. Weights are allocated between temporary buffers, and glibc keeps
    the gaps that these leave: 0.5 GB for a model of 1.1 GB. Other allocators have no such call and do not need it."""
    try:
        ctypes.CDLL(None).malloc_trim(0)
    except (AttributeError, OSError, TypeError):
        return


def finish_loading(model: PreTrainedModel, folder: Path, mapping: Sources) -> PreTrainedModel:
    """Do the work of from_pretrained other than reading weights: ties, buffers, generation settings, eval mode. Weights
    may be read before or after it."""
    loaded = {name for origin in mapping.origins for name in (origin.targets or (origin.name,))}
    model.tie_weights(missing_keys=set(model.state_dict()) - loaded, recompute_mapping=False)
    model._weight_conversions = mapping.rules  # type: ignore[assignment]
    return finish_setup(model, folder)


def finish_setup(model: PreTrainedModel, folder: Path) -> PreTrainedModel:
    """Set buffers, generation settings and eval mode. Raises ModelError for buffers without values."""
    keep_single_features(model)
    _make_buffers(model)
    if unfilled := [name for name, tensor in model.named_buffers() if tensor.is_meta]:
        raise ModelError(_unfilled_error(folder, unfilled))
    model.config.name_or_path = model.name_or_path = str(folder)
    if model.can_generate() and (settings := find_file(folder, "generation_config.json")).exists():
        with open_plain(settings.parent) as plain:
            model.generation_config = GenerationConfig.from_pretrained(plain, local_files_only=True)
    return model.eval()


def _unfilled_error(folder: Path, left: list[str]) -> str:
    return (
        f"{folder}: {len(left)} tensors have no values, first {left[0]}: this version of transformers initializes "
        "them in a way that Octavo does not support. Load without FP8 in one process, or use transformers 5.23."
    )


def _make_buffers(model: PreTrainedModel) -> None:
    """Compute the buffers that no checkpoint contains (rotary tables, position ids) by `_init_weights` of each model,
    module by module. Nothing else changes, because only modules with such buffers are passed to it."""

    def visit(module: nn.Module, name: str, pretrained: PreTrainedModel) -> None:
        pretrained = module if isinstance(module, PreTrainedModel) else pretrained
        for child_name, child in module.named_children():
            visit(child, f"{name}.{child_name}" if name else child_name, pretrained)
        meta_buffers = {n: b for n, b in module._buffers.items() if b is not None and b.is_meta}
        if not meta_buffers:
            return
        for buffer_name, buffer in meta_buffers.items():
            module._buffers[buffer_name] = torch.empty_like(buffer, device="cpu")
        # Hide parameters from `_init_weights`, which would initialize them again; SigLIP's also draws a child's.
        hidden = [(part, dict(part._parameters)) for part in module.modules()]
        for part, parameters in hidden:
            for parameter, value in parameters.items():
                if value is not None:
                    meta = torch.empty_like(value, device="meta")
                    part._parameters[parameter] = nn.Parameter(meta, value.requires_grad)
        with torch.no_grad():
            pretrained._init_weights(module)
        for part, parameters in hidden:
            part._parameters.update(parameters)

    visit(model, "", model)


def keep_single_features(model: nn.Module) -> None:
    """Make the projector of Mistral 3 return a single feature as [1, 1, width]. Other families and several features are
    not changed.

    Its `get_image_features` squeezes the first dimension of the projector's output, [features, width], to remove a
    batch dimension. With a single feature this removes the feature's dimension, and the width is split afterwards.
    """
    if getattr(model.config, "model_type", None) == "mistral3":
        for name, module in model.named_modules():
            if name.endswith("multi_modal_projector"):
                module.register_forward_hook(_keep_batch_dim)


def _keep_batch_dim(projector: nn.Module, args: tuple[object, ...], features: Tensor) -> Tensor | None:
    return features[None] if len(features) == 1 else None
