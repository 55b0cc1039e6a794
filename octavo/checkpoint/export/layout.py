"""Plans the tensors of an export from shapes, before a weight is read.

In memory experts are one parameter [E, 2I, H]. In FP8 they are written one by one, `experts.3.gate_proj.weight`, as
DeepSeek and Qwen publish them and vLLM and SGLang read them. In BF16 they are written in the form of the family's
published folders (Qwen3-VL-MoE: one tensor, [E, H, 2I]).

Which layers become FP8: the linear layers of the foundation and of the components in `include`. A layer stays in BF16
if some loader could not read its codes (`_why_no_blocks`), and then so do all layers that engines run as one GEMM with
it, because vLLM refuses groups that are quantized in part. `octavo.checkpoint.export.formats` compares the formats by
the same functions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path

import torch
from transformers import PreTrainedModel

from octavo import fp8, models
from octavo.checkpoint.errors import CheckpointError
from octavo.checkpoint.export.names import BLOCK, Matrices, Matrix
from octavo.fp8.policy import Row
from octavo.models.folder.quantization import (
    FUSED,
    Quantization,
    matches_exactly,
    matches_parts,
    matches_pattern,
    matches_target,
)
from octavo.models.structure.skeleton import config_ties
from octavo.models.weights.ties import empty_like_load, empty_without_ties

#: format -> the kind of its scales (`fp8.weights.FROZEN` has their casts); bf16 has none
FORMATS: Mapping[str, str | None] = {"bf16": None, "fp8-block": "block", "fp8-dynamic": "row", "fp8-tensor": "tensor"}
#: components that may be written in FP8 in addition to the foundation
INCLUDABLE = ("image_encoder", "image_projector", "audio_encoder", "audio_projector")
#: kinds of rows of a plan that some format can write in FP8: linear layers, and stacks of experts
LINEAR = ("linear", "experts")
#: last parts of names of layers that servers never fuse with others, on disk or in memory
_UNFUSED = ("o_proj", "out_proj", "down_proj", "w2")


@dataclass(frozen=True)
class Layout:
    """The tensors of an export.

    format    one of FORMATS
    matrices  parameter -> the FP8 weights that it becomes
    plain     parameter in high precision -> its names on disk, with dtype and shape; of parameters that are converted
              together, each has the entries of all
    together  parameter -> the parameters that are converted with it (usually only itself); all parameters, in order
    names     the stock model, its parameters and their names on disk
    stored    parameters of experts that are [E, K, N] in memory
    skipped   every linear layer in high precision, by its name in memory -> the reason
    aliases   the same layers -> the names under which loaders may look for them
    components  linear layer -> its component
    family    the name of the model family
    linear    number of linear layers and stacks of experts in the model, without lm_head, patch embeddings and routers
    """

    format: str
    matrices: Mapping[str, tuple[Matrix, ...]]
    plain: Mapping[str, Mapping[str, tuple[torch.dtype, tuple[int, ...]]]]
    together: Mapping[str, tuple[str, ...]]
    names: Matrices
    stored: frozenset[str]
    skipped: Mapping[str, str]
    aliases: Mapping[str, tuple[str, ...]]
    components: Mapping[str, str]
    family: str
    linear: int

    @property
    def kind(self) -> str | None:
        return FORMATS[self.format]

    def drops_ties(self, source: Path) -> bool:
        """Return whether config.json of the source ties weights that this export keeps separate."""
        return not config_ties(self.names.model.config) and config_ties(models.read_config(source))

    @property
    def layers(self) -> tuple[int, int]:
        """(layers in FP8, linear layers of the model)."""
        return len(self.matrices), self.linear

    def component_of(self, parameter: str) -> str:
        """Return the component of a parameter."""
        return self.components.get(parameter.rpartition(".")[0], "foundation")

    @cached_property
    def quantization(self) -> Quantization | None:
        """The quantization_config of config.json, or None in BF16."""
        if self.kind is None:
            return None
        names = tuple(sorted({alias for aliases in self.aliases.values() for alias in aliases}))
        if self.kind == "block":
            method = "compressed-tensors" if self._has_ragged_rows else "fp8"
            return Quantization(method, "block", (BLOCK, BLOCK), names)
        return Quantization("compressed-tensors", self.kind, None, names)

    @property
    def _has_ragged_rows(self) -> bool:
        """Whether the last block of rows of a weight is not whole. transformers refuses such a weight of method fp8, or
        reads it in blocks of another height, where it dequantizes; compressed-tensors pads it."""
        return any(m.shape[0] % BLOCK and m.shape[0] > BLOCK for pieces in self.matrices.values() for m in pieces)

    @property
    def fused(self) -> frozenset[str]:
        """The GEMMs that engines fuse and that have FP8 weights."""
        return frozenset(m.group for matrices in self.matrices.values() for m in matrices)

    def scale_shape(self, m: Matrix) -> tuple[int, ...]:
        """Return the shape of a weight's scales on disk: the grid of blocks, (N, 1) for rows, (1,) for a tensor."""
        assert self.quantization is not None
        return (1,) if self.kind == "tensor" else self.quantization.grid(*m.shape)

    def tensors(self) -> Iterator[tuple[str, torch.dtype, tuple[int, ...]]]:
        """Yield (name, dtype, shape) of every tensor on disk, in the order of the model."""
        seen: set[str] = set()
        for parameter in self.together:
            for m in self.matrices.get(parameter, ()):
                assert self.quantization is not None
                yield m.name, torch.float8_e4m3fn, m.shape
                yield m.name + self.quantization.scale_suffix, torch.float32, self.scale_shape(m)
            for name, (dtype, shape) in self.plain.get(parameter, {}).items():
                if name not in seen:
                    seen.add(name)
                    yield name, dtype, shape


@dataclass(frozen=True)
class ExportModel:
    """A model without weights, from which the layout of each format is derived.

    where   the folder or the name of the model, for messages
    names   the stock model, its parameters and their names on disk
    family  its components
    rows    its linear layers
    """

    where: str
    names: Matrices
    family: models.Family
    rows: tuple[Row, ...]

    @classmethod
    def read(cls, source: str | Path, untied: bool | None = None) -> ExportModel:
        """Return the model of a folder, without tied weights or as config.json ties them; None: as the weights of the
        folder are. Raises ModelError."""
        build = empty_like_load if untied is None else empty_without_ties if untied else models.empty
        return cls.of(build(source, torch.bfloat16), str(source))

    @classmethod
    def of(cls, stock: PreTrainedModel, where: str) -> ExportModel:
        """Return a stock model on the meta device."""
        family = models.describe(stock)
        return cls(where, Matrices(stock), family, tuple(fp8.describe_layers(stock, family.components)))

    @property
    def linear(self) -> int:
        """The number of linear layers and stacks of experts, without lm_head, patch embeddings and routers."""
        return sum(row.kind in LINEAR for row in self.rows)


@dataclass(frozen=True)
class LayerChoice:
    """The layers of a model that a format writes in FP8.

    stays     row -> why it stays in high precision
    ragged    those of them whose sizes the format cannot hold
    matrices  parameter -> its FP8 weights
    aliases   module in high precision -> the names under which loaders may look for it
    """

    stays: Mapping[str, str]
    ragged: frozenset[str]
    matrices: Mapping[str, tuple[Matrix, ...]]
    aliases: Mapping[str, tuple[str, ...]]


def choose_layers(model: ExportModel, format: str, include: Iterable[str] = ()) -> LayerChoice:
    """Return the layers that a format writes in FP8, and why the others stay in high precision.

    Raises CheckpointError for an unknown format or component, a component that the model does not have, and for names
    that skip lists cannot distinguish.
    """
    include, names = tuple(include), model.names
    if format not in FORMATS:
        raise CheckpointError(f"there is no format {format!r}; there are {', '.join(FORMATS)}")
    check_include(model, include)
    kind = FORMATS[format]
    stays, ragged, matrices = _choose_layers(model.rows, names, kind, {"foundation", *include})
    aliases = {row.module: names.aliases(row.module) for row in model.rows if row.name in stays}
    if kind is not None:
        _check_names({m.module for ms in matrices.values() for m in ms}, names, aliases)
    return LayerChoice(stays, ragged, matrices, aliases)


def check_include(model: ExportModel, include: Iterable[str]) -> None:
    """Raise CheckpointError for components that cannot be in FP8, or that the model does not have."""
    for name in include:
        if name not in INCLUDABLE:
            raise CheckpointError(
                f"{name!r} cannot be included: FP8 is for the foundation and {', '.join(INCLUDABLE)}; "
                "embeddings, lm_head and routers stay in BF16"
            )
        if name not in model.family.components:
            raise CheckpointError(f"{name!r} cannot be included: a {model.family.name} has no such component")


def plan_layout(source: str | Path, format: str, include: Iterable[str] = (), untied: bool | None = None) -> Layout:
    """Return the tensors of an export of the model in the folder `source`, whose weights are not read, except to find
    whether they are tied (`untied`, see `ExportModel.read`).

    Raises CheckpointError for an unknown format or component, a component that the model does not have, or a format in
    which no layer can be written; ModelError for the folder.
    """
    model, include = ExportModel.read(source, untied), tuple(include)
    chosen = choose_layers(model, format, include)
    _check_taken(model, format, include, chosen)
    names, rows = model.names, model.rows
    plain, together = names.plain({name for name in names.weights if name not in chosen.matrices})
    return Layout(
        format,
        chosen.matrices,
        plain,
        {name: together.get(name, (name,)) for name in names.weights},
        names,
        frozenset(row.name for row in rows if row.kind == "experts" and names.is_transposed(row.name)),
        {row.module: chosen.stays[row.name] for row in rows if row.name in chosen.stays},
        chosen.aliases,
        {row.module: row.component for row in rows},
        model.family.name,
        model.linear,
    )


def _check_taken(model: ExportModel, format: str, include: tuple[str, ...], chosen: LayerChoice) -> None:
    """Raise CheckpointError for an FP8 format that takes no layer, because servers refuse a folder that has a
    quantization_config and no FP8 weight."""
    if FORMATS[format] is None or chosen.matrices:
        return
    taken = {name: len(choose_layers(model, name, include).matrices) for name, kind in FORMATS.items() if kind}
    best = max(taken, key=lambda name: taken[name])
    advice = f"{best}, which takes {taken[best]} of {model.linear} linear layers, or bf16" if taken[best] else "bf16"
    reasons = sorted(set(chosen.stays.values()))
    raise CheckpointError(
        f"no layer of {model.where} could be written as {format}: {'; '.join(reasons[:4])}. Choose {advice}"
    )


def _choose_layers(
    rows: Sequence[Row], names: Matrices, kind: str | None, wanted: set[str]
) -> tuple[dict[str, str], frozenset[str], dict[str, tuple[Matrix, ...]]]:
    """Return (row -> why it stays in high precision, rows whose sizes are the reason, parameter -> its FP8 weights)."""
    stays: dict[str, str] = {}
    ragged: set[str] = set()
    chosen: dict[str, tuple[Matrix, ...]] = {}
    # Whether servers read compressed-tensors' blocks of experts was not checked, so that no other layer may need them.
    has_experts = any(row.kind == "experts" for row in rows)
    for row in rows:
        pieces: tuple[Matrix, ...] = ()
        reason = _why_unwanted(row, kind, wanted)
        if reason is None:
            reason, pieces = names.matrices(row)
        if reason is None and kind == "block":
            reason = next((why for piece in pieces if (why := _why_no_blocks(piece, has_experts))), None)
            ragged |= {row.name} if reason else set()
        if reason is None:
            chosen[row.name] = pieces
        else:
            stays[row.name] = reason
    # Repeated, because a layer that leaves one group may be part of another, which is then incomplete as well.
    while partial_rows := _half_quantized(chosen, stays, names):
        for name, reason in partial_rows.items():
            del chosen[name]
            stays[name] = reason
    parameters = {row.name: row.name if row.kind == "experts" else f"{row.name}.weight" for row in rows}
    return stays, frozenset(ragged), {parameters[name]: pieces for name, pieces in chosen.items()}


def _half_quantized(
    chosen: Mapping[str, tuple[Matrix, ...]], stays: Mapping[str, str], names: Matrices
) -> dict[str, str]:
    """Return chosen rows that engines run as one GEMM with a row that stays -> the reason why they must stay too."""
    groups = {m.group for pieces in chosen.values() for m in pieces}
    broken = {group: name for name in stays for group in names.groups(name) if group in groups}
    return {
        name: f"runs as one GEMM with {broken[m.group].rpartition('.')[2]}, which stays ({stays[broken[m.group]]})"
        for name, pieces in chosen.items()
        for m in pieces
        if m.group in broken
    }


def _why_unwanted(row: Row, kind: str | None, wanted: set[str]) -> str | None:
    if kind is None:
        return "the format is BF16"
    if row.kind not in LINEAR:
        return {"lm_head": "the output projection", "patch_embed": "the patch embedding", "router": "a router"}.get(
            row.kind, f"a {row.type}, not a plain linear layer"
        )
    if row.component not in wanted:
        return f"part of the {row.component} (--include {row.component} writes it in FP8)"
    if row.tied:
        return f"its weight is also {row.tied[0]}"
    return None


def _why_no_blocks(m: Matrix, has_experts: bool) -> str | None:
    """Return why some loader cannot read this weight in blocks of 128 x 128, or None if all can.

    Inputs: servers quantize activations in groups of 128 along K, and `per_token_group_quant_fp8` (vLLM 0.32) refuses
    other sizes on a GPU. Outputs: in a fused GEMM every part except the last must end at a block boundary, which also
    divides an expert's matrices between ranks. vLLM refuses other parts in compressed-tensors
    (`validate_fp8_block_shape`), and misplaces their scales without an error under quant_method fp8
    (`_maybe_allow_fp8_block_shape_mismatch`). A GEMM that is not fused may have a ragged last block in vLLM and SGLang
    (their scales are ceil(N / 128)) and in compressed-tensors, which pads, but not in transformers' method fp8, which
    computes the height of a block as N / (number of scale rows) where it dequantizes: see `Layout.quantization`.
    """
    n, k = m.shape
    if k % BLOCK:
        return f"{k} inputs, not a multiple of {BLOCK}"
    leaf = m.name.split(".")[-2]
    if n % BLOCK and n > BLOCK and (has_experts or leaf not in _UNFUSED):
        return f"{n} outputs, not a multiple of {BLOCK}"
    if n % BLOCK and (m.slot is not None or any(leaf in leaves[:-1] for leaves in FUSED)):
        return f"{n} outputs, not a multiple of {BLOCK}, in a GEMM that engines fuse"
    return None


def _check_names(taken: set[str], names: Matrices, aliases: Mapping[str, tuple[str, ...]]) -> None:
    """Raise CheckpointError if some loader's reading of the skip list would match a quantized layer.

    Full names of the known families never match. The check protects other families from a wrong export.
    """
    skipped = tuple(alias for others in aliases.values() for alias in others)
    by_name = partial(matches_target, types=())  # no class names: the list of an export holds full names
    rules: dict[str, Callable[[str, Iterable[str]], bool]] = {
        "vLLM": matches_exactly,
        "SGLang": matches_parts,
        "transformers": matches_pattern,
        "compressed-tensors": by_name,
    }
    for module in sorted(taken):
        for name in names.aliases(module):
            for loader, rule in rules.items():
                if not rule(name, skipped):  # all at once: a large model has thousands of names
                    continue
                hit = next(other for other in skipped if rule(name, (other,)))
                raise CheckpointError(
                    f"{name} would be in FP8, but {loader} would mistake it for {hit}, which stays in BF16: a skip "
                    "list cannot distinguish the names. Choose another format, or bf16"
                )
