"""Plans the tensors of an export from shapes, before a weight is read.

In memory experts are one parameter [E, 2I, H]. In FP8 they are written one by one, `experts.3.gate_proj.weight`, as
DeepSeek and Qwen publish them and vLLM and SGLang read them. In BF16 they are written in the form of the family's
published folders (Qwen3-VL-MoE: one tensor, [E, H, 2I]).

Which layers become FP8: the linear layers of the foundation and of the components in `include`. A layer stays in BF16
if some loader could not read its codes (`_why_no_blocks`), and then so do all layers that engines run as one GEMM with
it, because vLLM refuses groups that are quantized in part.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path

import torch

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

#: format -> the kind of its scales (`fp8.weights.FROZEN` has their casts); bf16 has none
FORMATS: Mapping[str, str | None] = {"bf16": None, "fp8-block": "block", "fp8-dynamic": "row", "fp8-tensor": "tensor"}
#: components that may be written in FP8 in addition to the foundation
INCLUDABLE = ("image_encoder", "image_projector", "audio_encoder", "audio_projector")


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

    @property
    def kind(self) -> str | None:
        return FORMATS[self.format]

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
            return Quantization("fp8", "block", (BLOCK, BLOCK), names)
        return Quantization("compressed-tensors", self.kind, None, names)

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


def plan_layout(source: str | Path, format: str, include: Iterable[str] = ()) -> Layout:
    """Return the tensors of an export of the model in the folder `source`. Weights are not read.

    Raises CheckpointError for an unknown format or component, or a component that the model does not have; ModelError
    for the folder.
    """
    include = tuple(include)
    if format not in FORMATS:
        raise CheckpointError(f"there is no format {format!r}; there are {', '.join(FORMATS)}")
    if unknown := [name for name in include if name not in INCLUDABLE]:
        raise CheckpointError(
            f"{unknown[0]!r} cannot be included: FP8 is for the foundation and {', '.join(INCLUDABLE)}; "
            "embeddings, lm_head and routers stay in BF16"
        )
    stock = models.empty(source, dtype=torch.bfloat16)
    family = models.describe(stock)
    if absent := [name for name in include if name not in family.components]:
        raise CheckpointError(f"{absent[0]!r} cannot be included: a {family.name} has no such component")
    names = Matrices(stock)
    rows = fp8.describe_layers(stock, family.components)
    kind = FORMATS[format]
    stays, matrices = _choose_layers(rows, names, kind, {"foundation", *include})
    aliases = {row.module: names.aliases(row.module) for row in rows if row.name in stays}
    taken = {m.module for ms in matrices.values() for m in ms}
    # Servers refuse a folder that has a quantization_config and no FP8 weight.
    if kind is not None and not taken:
        reasons = sorted(set(stays.values()))
        raise CheckpointError(
            f"no layer of {source} could be written as {format}: {'; '.join(reasons[:4])}. Choose fp8-dynamic, which "
            "supports every shape, or bf16"
        )
    if kind is not None:
        _check_names(taken, names, aliases)
    plain, together = names.plain({name for name in names.weights if name not in matrices})
    return Layout(
        format,
        matrices,
        plain,
        {name: together.get(name, (name,)) for name in names.weights},
        names,
        frozenset(row.name for row in rows if row.kind == "experts" and names.is_transposed(row.name)),
        {row.module: stays[row.name] for row in rows if row.name in stays},
        aliases,
        {row.module: row.component for row in rows},
        family.name,
    )


def _choose_layers(
    rows: Sequence[Row], names: Matrices, kind: str | None, wanted: set[str]
) -> tuple[dict[str, str], dict[str, tuple[Matrix, ...]]]:
    """Return (row -> why it stays in high precision, parameter -> its FP8 weights)."""
    stays: dict[str, str] = {}
    chosen: dict[str, tuple[Matrix, ...]] = {}
    for row in rows:
        pieces: tuple[Matrix, ...] = ()
        reason = _why_unwanted(row, kind, wanted)
        if reason is None:
            reason, pieces = names.matrices(row)
        if reason is None and kind == "block":
            reason = next((why for piece in pieces if (why := _why_no_blocks(piece))), None)
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
    return stays, {parameters[name]: pieces for name, pieces in chosen.items()}


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
    if row.kind not in ("linear", "experts"):
        return {"lm_head": "the output projection", "patch_embed": "the patch embedding", "router": "a router"}.get(
            row.kind, f"a {row.type}, not a plain linear layer"
        )
    if row.component not in wanted:
        return f"part of the {row.component} (--include {row.component} writes it in FP8)"
    if row.tied:
        return f"its weight is also {row.tied[0]}"
    return None


def _why_no_blocks(m: Matrix) -> str | None:
    """Return why some loader cannot read this weight in blocks of 128 x 128, or None if all can.

    Inputs: engines quantize activations in groups of 128 along K. Outputs: transformers computes the height of a block
    as N / (number of scale rows), which is 128 only if 128 divides N or there is a single block. In a fused GEMM every
    part except the last must end at a block boundary (vLLM), which also divides an expert's matrices between ranks.
    """
    n, k = m.shape
    if k % BLOCK:
        return f"{k} inputs, not a multiple of {BLOCK}"
    if n % BLOCK and n > BLOCK:
        return f"{n} outputs, not a multiple of {BLOCK}"
    leaf = m.name.split(".")[-2]
    if n % BLOCK and (m.slot is not None or any(leaf in leaves[:-1] for leaves in FUSED)):
        return f"{n} outputs, not a multiple of {BLOCK}, in a GEMM that engines fuse"
    return None


def _check_names(taken: set[str], names: Matrices, aliases: Mapping[str, tuple[str, ...]]) -> None:
    """Raise CheckpointError if some loader's reading of the skip list would match a quantized layer.

    Full names of the known families never match. The check protects other families from a wrong export.
    """
    skipped = [alias for others in aliases.values() for alias in others]
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
                if (hit := next((other for other in skipped if rule(name, (other,))), None)) is not None:
                    raise CheckpointError(
                        f"{name} would be in FP8, but {loader} would mistake it for {hit}, which stays in BF16: a skip "
                        "list cannot distinguish the names. Use fp8-dynamic, or bf16"
                    )
