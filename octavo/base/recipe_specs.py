"""The table of recipes, from which every list of recipe names is derived.

With x (M tokens x K), w (N x K), dy (M x N), a training step of a linear layer has three GEMMs::

    fwd    y  = x @ w.T      contracts K
    dgrad  dx = dy @ w       contracts N
    wgrad  dw = dy.T @ x     contracts M

A recipe defines for each of their six operands which elements share a scale, and how scales are stored. The rest
follows from that: which recipes cast a weight in two layouts, which have a scale that spans tokens, which multiply by
the codes of a frozen weight. To add a recipe, add a line to ``_TABLE``; configuration choices, candidates of
``auto``, fallback orders, notes of a plan, memory figures and benchmarks are derived from it.

This file needs neither torch nor pydantic: ``octavo.fp8`` and ``octavo.config`` both import it.
:mod:`octavo.fp8.arithmetic.recipe` builds the casts.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

Block = tuple[int, int]  # rows x columns of a tensor as stored that share one scale; -1 is the whole dimension

FORMATS = ("e4m3", "hybrid")
"""e4m3: E4M3 for all operands. hybrid: E5M2 for dy (more range, fewer digits)."""

TENSOR, ROW, COLUMN = (-1, -1), (1, -1), (-1, 1)


@dataclass(frozen=True)
class RecipeSpec:
    """One recipe.

    Args:
        name: as in configurations, plans and ``octavo.fp8.recipe``.
        blocks: of the operands x, w of fwd, dy, w of dgrad, and dy, x of wgrad.
        scale: how scales are stored: "fp32", "pow2" (fp32, rounded up to a power of two) or "e8m0" (one byte).
        formats: the supported :data:`FORMATS`, the default first.
        rank: the order among recipes of equal speed; the lowest is chosen, which is the one with the finest scales.
        delayed: x and dy get their scales from amax histories. A history belongs to a whole layer, so no single GEMM of
            another recipe can use these casts, and ``auto`` does not choose it.
        native: the lowest compute capability whose tensor cores multiply by such scales. Below it they are emulated.
        fastest_on: major compute capabilities for which it is the documented choice if nothing was measured.
        library_names: (library, its name for these casts), repeated if a library has several names.
        variant: it differs from another recipe in part, and is not chosen unless it is named.
    """

    name: str
    blocks: tuple[Block, Block, Block, Block, Block, Block]
    scale: str
    formats: tuple[str, ...]
    rank: int
    delayed: bool = False
    native: tuple[int, int] = (8, 9)
    fastest_on: tuple[int, ...] = ()
    library_names: tuple[tuple[str, str], ...] = ()
    variant: bool = False

    @property
    def layouts(self) -> int:
        """Number of casts of a weight, each one byte per parameter; 1 if fwd and dgrad share codes."""
        return len({self.blocks[1], self.blocks[3]})

    @property
    def has_tensor_scale(self) -> bool:
        """True if x or dy has one scale for the whole tensor, which differs between ranks."""
        return TENSOR in (self.blocks[0], self.blocks[2])

    @property
    def couples_rows(self) -> bool:
        """True if tokens share scales in the forward pass, so that a token's result depends on its batch."""
        return self.delayed or self.blocks[0][0] != 1

    @property
    def is_native_on_all(self) -> bool:
        """True if every GPU with FP8 hardware multiplies by its scales."""
        return self.native <= (8, 9)


_TILES = (1, 128), (128, 128), (1, 128), (128, 128), (128, 1), (128, 128)
_VECTORS = (*_TILES[:5], (128, 1))
_MX = (1, 32), (1, 32), (1, 32), (32, 1), (32, 1), (32, 1)
_E4M3, _WITH_HYBRID, _HYBRID = ("e4m3",), ("e4m3", "hybrid"), ("hybrid", "e4m3")

# From few scales, which are fast, to many; then recipes that do not scale by the current amax. dy never has
# two-dimensional blocks: they diverged in large training runs.
_TABLE = (
    # The fewest scales, and the fastest GEMMs.
    RecipeSpec(
        "tensorwise", (TENSOR,) * 6, "fp32", _HYBRID, rank=3,
        library_names=(("torchao", "tensorwise"), ("Megatron", "tensorwise")),
    ),
    # An outlier affects only its own row.
    RecipeSpec(
        "rowwise", (ROW, ROW, ROW, COLUMN, COLUMN, COLUMN), "pow2", _WITH_HYBRID, rank=2, fastest_on=(8, 12),
        library_names=(("torchao", "rowwise"), ("torchao", "rowwise_with_gw_hp")),
    ),
    # The default: DeepSeek-V3's recipe, but x of wgrad in tiles. Each GEMM then multiplies blocks of 1x128 by 128x128,
    # which is the form that cuBLAS is fastest in.
    RecipeSpec("blockwise", _TILES, "pow2", _WITH_HYBRID, rank=0, fastest_on=(9,)),
    # DeepSeek-V3's recipe; `blockwise` up to version 0.5.0.
    RecipeSpec(
        "blockwise_1d", _VECTORS, "pow2", _WITH_HYBRID, rank=5, library_names=(("Megatron", "blockwise"),), variant=True
    ),
    # OCP MX: blocks along each contraction. A block of 32 does not need the range of E5M2.
    RecipeSpec(
        "mxfp8", _MX, "e8m0", _E4M3, rank=1, native=(10, 0), fastest_on=(10, 11), library_names=(("Megatron", "mxfp8"),)
    ),
    # No cast has to wait for an amax.
    RecipeSpec("delayed", (TENSOR,) * 6, "fp32", _HYBRID, rank=4, delayed=True,
               library_names=(("Megatron", "delayed"),)),
)  # fmt: skip

SPECS: Mapping[str, RecipeSpec] = MappingProxyType({spec.name: spec for spec in _TABLE})
"""Name -> spec, in the order of the table."""

DEFAULT_RECIPE = "blockwise"
"""The FP8 recipe if none is named."""

NAMES = tuple(SPECS)
CURRENT_SCALING = tuple(name for name, spec in SPECS.items() if not spec.delayed)
"""Recipes that scale by the current amax; a GEMM of another recipe may use their casts."""

RANKED = tuple(sorted(NAMES, key=lambda name: SPECS[name].rank))
CANDIDATES = tuple(name for name in RANKED if name in CURRENT_SCALING and not SPECS[name].variant)
"""The recipes that ``auto`` chooses among; on a tie, the first."""

PER_TOKEN = tuple(name for name in NAMES if name in CANDIDATES and not SPECS[name].couples_rows)
"""Recipes, without variants, whose forward scales do not span tokens, the fastest first."""

COARSE_TO_FINE = tuple(name for name in reversed(CANDIDATES) if SPECS[name].is_native_on_all)
"""From coarse to fine: a GEMM that needs smaller blocks gets the next one."""

FROZEN_BLOCKS: Mapping[str, Block] = MappingProxyType({"row": ROW, "block": (128, 128), "tensor": TENSOR})
"""Kind of frozen FP8 weights -> block of their codes, which are E4M3 with scales in fp32."""

RECIPES_OF_KIND: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        kind: tuple(name for name, spec in SPECS.items() if spec.blocks[1] == block and spec.scale != "e8m0")
        for kind, block in FROZEN_BLOCKS.items()
    }
)
"""Kind of frozen FP8 weights -> recipes that multiply by such codes; the first one names the kind."""

NAME_OF_KIND: Mapping[str, str] = MappingProxyType({kind: names[0] for kind, names in RECIPES_OF_KIND.items()})
"""Kind of frozen FP8 weights -> recipe to set for it."""


def recipes_with_format(form: str) -> tuple[str, ...]:
    """Return the recipes with this default format."""
    return tuple(name for name, spec in SPECS.items() if spec.formats[0] == form)


def parse_kind(word: str) -> str:
    """Return the kind of frozen weights for a recipe's name or the kind itself; any other word unchanged."""
    return next((kind for kind, name in NAME_OF_KIND.items() if name == word), word)


def fastest_on(major: int) -> str:
    """Return the documented choice for GPUs of a major compute capability; newer ones than the table get its newest
    entry."""
    by_major = {number: name for name, spec in SPECS.items() for number in spec.fastest_on}
    return by_major.get(major, by_major[max(by_major)])


def names_in_library(library: str) -> dict[str, str]:
    """Return a library's names of recipes -> Octavo's names."""
    return {alias: name for name, spec in SPECS.items() for owner, alias in spec.library_names if owner == library}


def join_words(names: tuple[str, ...], last: str = "and") -> str:
    """Join names into a phrase: "a, b and c"."""
    return f" {last} ".join([", ".join(names[:-1]), names[-1]]) if len(names) > 1 else "".join(names)
