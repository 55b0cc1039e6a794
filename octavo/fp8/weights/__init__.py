"""Who holds a weight's bits: shards, versions, the cache of FP8 codes, and weights that are FP8 between steps."""

from octavo.fp8.weights.cache import CachesWeights, WeightSlice
from octavo.fp8.weights.fp8_ops import Fp8Weight
from octavo.fp8.weights.fp8_rows import Shards
from octavo.fp8.weights.fp8_tensor import filled, master_of, part_of
from octavo.fp8.weights.shards import distributed, full, is_whole, mesh_of, plain, reshard, rows_here, span

__all__ = [
    "Fp8Weight",
    "CachesWeights",
    "WeightSlice",
    "Shards",
    "distributed",
    "filled",
    "full",
    "is_whole",
    "master_of",
    "mesh_of",
    "part_of",
    "plain",
    "reshard",
    "rows_here",
    "span",
]
