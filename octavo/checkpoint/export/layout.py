"""What a checkpoint in a format consists of, tensor by tensor, decided from shapes before a weight is read.

Experts lie in memory in one parameter [E, 2I, H]; in FP8 they are written one by one, `experts.3.gate_proj.weight`, as
DeepSeek and Qwen publish them and vLLM and SGLang read them. In BF16 they are written as the family's folders have
them (Qwen3-VL-MoE: in one tensor, [E, H, 2I]).

What stays in BF16. Asked for are the linear layers of the foundation, and of the components in `include`; of those, a
layer stays where a loader could not read its codes (`_why_not`), and then the whole group that engines run as one
GEMM stays: vLLM refuses half-quantized ones.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path

import torch

from octavo import fp8, models
from octavo.checkpoint.errors import CheckpointError
from octavo.checkpoint.export.names import BLOCK, Matrices, Matrix
from octavo.fp8.policy import Row
from octavo.models.folder.quantization import FUSED, Quantization, by_parts, by_pattern, by_target, exact

#: format -> the kind of its scales (`fp8.weights.FROZEN` has their casts); bf16 has none
FORMATS: Mapping[str, str | None] = {"bf16": None, "fp8-block": "block", "fp8-dynamic": "row", "fp8-tensor": "tensor"}
#: components that may be put into FP8 beside the foundation
INCLUDABLE = ("image_encoder", "image_projector", "audio_encoder", "audio_projector")


@dataclass(frozen=True)
class Layout:
    """What is written.

    format    of FORMATS
    matrices  parameter -> the FP8 weights that it becomes
    plain     parameters in high precision -> their names on disk, with dtype and shape; a group of parameters that is
              converted together stands under each of its names
    together  parameter -> the parameters that are converted with it (itself alone, usually); all parameters, in order
    names     the stock model, its parameters and their names on disk
    stored    parameters of experts that are stored as [E, K, N] in memory
    skipped   every linear layer in high precision, by the name in memory -> why
    aliases   the same layers -> the names under which loaders may look for them
    components  linear layers -> their component
    family    the family's name
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
        """The component that a parameter belongs to."""
        return self.components.get(parameter.rpartition(".")[0], "foundation")

    @cached_property
    def quantization(self) -> Quantization | None:
        """What config.json says of it; None in BF16."""
        if self.kind is None:
            return None
        names = tuple(sorted({alias for aliases in self.aliases.values() for alias in aliases}))
        if self.kind == "block":
            return Quantization("fp8", "block", (BLOCK, BLOCK), names)
        return Quantization("compressed-tensors", self.kind, None, names)

    def scale_shape(self, m: Matrix) -> tuple[int, ...]:
        """Of a weight's scales on disk: [n, k] blocks, [N, 1] rows, [1]."""
        assert self.quantization is not None
        return (1,) if self.kind == "tensor" else self.quantization.grid(*m.shape)

    def tensors(self) -> Iterator[tuple[str, torch.dtype, tuple[int, ...]]]:
        """(name, dtype, shape) of everything on disk, in the order of the model."""
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


def layout(source: str | Path, format: str, include: Iterable[str] = ()) -> Layout:
    """Decide what an export of the model in the folder `source` consists of; weights are not read.

    Raises CheckpointError for an unknown format or component, or one that the model lacks; ModelError for the folder.
    """
    include = tuple(include)
    if format not in FORMATS:
        raise CheckpointError(f"there is no format {format!r}; there are {', '.join(FORMATS)}")
    if strange := [name for name in include if name not in INCLUDABLE]:
        raise CheckpointError(
            f"{strange[0]!r} cannot be included: beside the foundation, FP8 is for {', '.join(INCLUDABLE)}; "
            "embeddings, lm_head and routers stay in BF16"
        )
    stock = models.empty(source, dtype=torch.bfloat16)
    family = models.describe(stock)
    if lacking := [name for name in include if name not in family.components]:
        raise CheckpointError(f"{lacking[0]!r} cannot be included: a {family.name} has no such component")
    names = Matrices(stock)
    rows = fp8.describe_layers(stock, family.components)
    kind = FORMATS[format]
    stays, matrices = _chosen(rows, names, kind, {"foundation", *include})
    aliases = {row.module: names.aliases(row.module) for row in rows if row.name in stays}
    taken = {m.module for ms in matrices.values() for m in ms}
    if kind is not None and not taken:
        reasons = sorted(set(stays.values()))
        raise CheckpointError(
            f"no layer of {source} could be written as {format}: {'; '.join(reasons[:4])}. Choose fp8-dynamic, which "
            "takes every shape, or bf16"
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
        frozenset(row.name for row in rows if row.kind == "experts" and names.transposed(row.name)),
        {row.module: stays[row.name] for row in rows if row.name in stays},
        aliases,
        {row.module: row.component for row in rows},
        family.name,
    )


def _chosen(
    rows: Sequence[Row], names: Matrices, kind: str | None, wanted: set[str]
) -> tuple[dict[str, str], dict[str, tuple[Matrix, ...]]]:
    """(row -> why it stays in high precision, parameter -> its FP8 weights)."""
    stays: dict[str, str] = {}
    found: dict[str, tuple[Matrix, ...]] = {}
    for row in rows:
        pieces: tuple[Matrix, ...] = ()
        reason = _unwanted(row, kind, wanted)
        if reason is None:
            reason, pieces = names.matrices(row)
        if reason is None and kind == "block":
            reason = next((why for piece in pieces if (why := _why_not(piece))), None)
        if reason is None:
            found[row.name] = pieces
        else:
            stays[row.name] = reason
    while halves := _halves(found, stays, names):
        for name, reason in halves.items():
            del found[name]
            stays[name] = reason
    parameters = {row.name: row.name if row.kind == "experts" else f"{row.name}.weight" for row in rows}
    return stays, {parameters[name]: pieces for name, pieces in found.items()}


def _halves(found: Mapping[str, tuple[Matrix, ...]], stays: Mapping[str, str], names: Matrices) -> dict[str, str]:
    """Chosen rows that run as one GEMM with one that stays -> that reason. Engines want all of them in FP8, or none."""
    groups = {m.group for pieces in found.values() for m in pieces}
    broken = {group: name for name in stays for group in names.groups(name) if group in groups}
    return {
        name: f"runs as one GEMM with {broken[m.group].rpartition('.')[2]}, which stays ({stays[broken[m.group]]})"
        for name, pieces in found.items()
        for m in pieces
        if m.group in broken
    }


def _unwanted(row: Row, kind: str | None, wanted: set[str]) -> str | None:
    if kind is None:
        return "the format is BF16"
    if row.kind not in ("linear", "experts"):
        return {"lm_head": "the output projection", "patch_embed": "the patch embedding", "router": "a router"}.get(
            row.kind, f"a {row.type}, no plain linear layer"
        )
    if row.component not in wanted:
        return f"part of the {row.component} (--include {row.component} writes it in FP8)"
    if row.tied:
        return f"its weight is also {row.tied[0]}"
    return None


def _why_not(m: Matrix) -> str | None:
    """Why this weight cannot be in blocks of 128 x 128 for every loader; None if it can.

    Inputs: engines quantize activations in groups of 128 along K. Outputs: transformers takes the height of a block as
    N / (number of scale rows), which is 128 only where 128 divides N (or one block is all there is). In a fused GEMM
    every part but the last must end where a block ends (vLLM); an expert's matrices are cut by rank there.
    """
    n, k = m.shape
    if k % BLOCK:
        return f"{k} inputs, no multiple of {BLOCK}"
    if n % BLOCK and n > BLOCK:
        return f"{n} outputs, no multiple of {BLOCK}"
    leaf = m.name.split(".")[-2]
    if n % BLOCK and (m.slot is not None or any(leaf in leaves[:-1] for leaves in FUSED)):
        return f"{n} outputs, no multiple of {BLOCK}, in a GEMM that engines fuse"
    return None


def _check_names(taken: set[str], names: Matrices, aliases: Mapping[str, tuple[str, ...]]) -> None:
    """That no loader's way of reading the skip list takes a quantized layer for one that stays. It cannot happen with
    full names of the families known; a family in which it did must not be written wrongly."""
    skipped = [alias for found in aliases.values() for alias in found]
    by_name = partial(by_target, types=())  # by no class: lists of an export hold full names
    rules = {"vLLM": exact, "SGLang": by_parts, "transformers": by_pattern, "compressed-tensors": by_name}
    for module in sorted(taken):
        for name in names.aliases(module):
            for loader, rule in rules.items():
                if (hit := next((other for other in skipped if rule(name, (other,))), None)) is not None:
                    raise CheckpointError(
                        f"{name} would be in FP8, and {loader} would take it for {hit}, which stays in BF16: the names "
                        "cannot be told apart in a skip list. Use fp8-dynamic, or bf16"
                    )
