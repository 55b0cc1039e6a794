"""Storage of weights: shards, versions, the cache of FP8 codes, and weights that are FP8 between steps."""

from octavo.fp8.weights.cache import CachesWeights, WeightSlice
from octavo.fp8.weights.fp8_ops import Fp8Weight
from octavo.fp8.weights.fp8_rows import Shards
from octavo.fp8.weights.fp8_tensor import fill_parameter, master_of, part_of
from octavo.fp8.weights.frozen import (
    FROZEN,
    codes_of_frozen,
    frozen_bytes,
    frozen_from_codes,
    frozen_rows,
    frozen_weights,
    is_frozen,
)
from octavo.fp8.weights.shards import distribute_like, full, is_whole, local_rows, mesh_of, plain, reshard, span
from octavo.fp8.weights.state import forward_codes
from octavo.fp8.weights.sums import changed_weights, stale_codes, stale_codes_message, weight_sums

__all__ = [
    "CachesWeights", "FROZEN", "Fp8Weight", "Shards", "WeightSlice", "changed_weights", "codes_of_frozen",
    "distribute_like", "fill_parameter", "forward_codes", "frozen_bytes", "frozen_from_codes", "frozen_rows",
    "frozen_weights", "full",
    "is_frozen", "is_whole", "master_of", "mesh_of", "part_of", "plain", "reshard", "local_rows", "span",
    "stale_codes", "stale_codes_message", "weight_sums",
]  # fmt: skip
