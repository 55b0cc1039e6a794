"""Names that ``octavo.fp8`` exported in 0.4.0, with their replacements. They will be removed in 0.7.

The ``__getattr__`` of :mod:`octavo.fp8` imports this module when one of them is used.
"""

from __future__ import annotations

import sys
import warnings

from octavo.fp8 import (
    arithmetic,
    blocks,
    delayed,
    invariance,
    kernels,
    measuring,
    memory,
    metrics,
    moe,
    observe,
    optim,
    planning,
    policy,
    weights,
)
from octavo.fp8.measuring.invariant import batch_invariant, why_not_batch_invariant
from octavo.fp8.measuring.measure import MeasurementCache
from octavo.fp8.memory.recompute import activation_checkpointing
from octavo.fp8.optim.adamw import AdamW
from octavo.fp8.planning.apply import switch_plan
from octavo.fp8.policy.topology import describe_layers

# Imported by name: `from octavo.fp8 import proof` would call the __getattr__ that imports this file.
from octavo.fp8.proof import Prediction, Proof, predict, reference_note
from octavo.fp8.weights.cache import weight_cache_bytes
from octavo.fp8.weights.finite import find_nonfinite
from octavo.fp8.weights.frozen import dequantize_weights

OLD_NAMES: dict[str, tuple[str, object]] = {
    # renamed
    "Cache": ("fp8.MeasurementCache", MeasurementCache),
    "code_bytes": ("fp8.weight_cache_bytes", weight_cache_bytes),
    "invariant": ("fp8.batch_invariant", batch_invariant),
    "not_finite": ("fp8.find_nonfinite", find_nonfinite),
    "not_invariant": ("fp8.why_not_batch_invariant", why_not_batch_invariant),
    "recompute": ("fp8.activation_checkpointing", activation_checkpointing),
    "thaw": ("fp8.dequantize_weights", dequantize_weights),
    "topology": ("fp8.describe_layers", describe_layers),
    "turn": ("fp8.switch_plan", switch_plan),
    # moved to public places
    "calc_diff": ("fp8.metrics.calc_diff", metrics.calc_diff),
    "cosine": ("fp8.metrics.cosine", metrics.cosine),
    "saturation": ("fp8.metrics.saturation", metrics.saturation),
    "sqnr": ("fp8.metrics.sqnr", metrics.sqnr),
    "underflow": ("fp8.metrics.underflow", metrics.underflow),
    "move_scaling": ("fp8.delayed.move_scaling", delayed.move_scaling),
    "reduce_scaling_state": ("fp8.delayed.reduce_scaling_state", delayed.reduce_scaling_state),
    "scale_gradient_histories": ("fp8.delayed.scale_gradient_histories", delayed.scale_gradient_histories),
    "copy_state": ("fp8.AdamW.copy_state", AdamW.copy_state),
    "set_low": ("fp8.AdamW.set_low", AdamW.set_low),
    "to_torch": ("fp8.AdamW.to_torch", AdamW.to_torch),
    # no longer public: parts of the subpackages
    "ChunkedHead": ("fp8.memory.ChunkedHead", memory.ChunkedHead),
    "Experts": ("fp8.moe.Experts", moe.Experts),
    "FROZEN": ("fp8.weights.FROZEN", weights.FROZEN),
    "Fusion": ("fp8.planning.Fusion", planning.Fusion),
    "Health": ("fp8.observe.Health", observe.Health),
    "Machine": ("fp8.measuring.Machine", measuring.Machine),
    "Prediction": ("fp8.proof.Prediction", Prediction),
    "Proof": ("fp8.proof.Proof", Proof),
    "Row": ("fp8.policy.Row", policy.Row),
    "Schedule": ("fp8.planning.Schedule", planning.Schedule),
    "Selection": ("fp8.kernels.Selection", kernels.Selection),
    "Span": ("fp8.planning.Span", planning.Span),
    "backends": ("fp8.kernels.names", kernels.names),
    "changed_weights": ("fp8.weights.changed_weights", weights.changed_weights),
    "chunked_head": ("fp8.memory.chunk_head", memory.chunk_head),
    "codes_of_frozen": ("fp8.weights.codes_of_frozen", weights.codes_of_frozen),
    "compiled": ("fp8.measuring.first_compiled_module", measuring.first_compiled_module),
    "fp32_weight": ("fp8.optim.fp32_weight", optim.fp32_weight),
    "frozen": ("fp8.weights.frozen_from_codes", weights.frozen_from_codes),
    "frozen_bytes": ("fp8.weights.frozen_bytes", weights.frozen_bytes),
    "frozen_rows": ("fp8.weights.frozen_rows", weights.frozen_rows),
    "frozen_weights": ("fp8.weights.frozen_weights", weights.frozen_weights),
    "grouped_attention": ("fp8.blocks.grouped_attention", blocks.grouped_attention),
    "invariant_attention": ("fp8.invariance.batch_invariant_attention", invariance.batch_invariant_attention),
    "is_frozen": ("fp8.weights.is_frozen", weights.is_frozen),
    "is_whole": ("fp8.weights.is_whole", weights.is_whole),
    "predict": ("fp8.proof.predict", predict),
    "quantize_with_scale": ("fp8.arithmetic.quantize_with_scale", arithmetic.quantize_with_scale),
    "reference_note": ("fp8.proof.reference_note", reference_note),
    "scale_from_amax": ("fp8.arithmetic.scale_from_amax", arithmetic.scale_from_amax),
    "select": ("fp8.kernels.select", kernels.select),
    "shared_scales": ("fp8.measuring.find_shared_scales", measuring.find_shared_scales),
    "stale_codes": ("fp8.weights.stale_codes", weights.stale_codes),
    "stale_sentence": ("fp8.weights.stale_codes_message", weights.stale_codes_message),
    "synchronize_per_layer": ("fp8.memory.synchronize_per_layer", memory.synchronize_per_layer),
    "uncounted": ("fp8.observe.uncounted", observe.uncounted),
    "unfuse": ("fp8.planning.unfuse", planning.unfuse),
    "weight_sums": ("fp8.weights.weight_sums", weights.weight_sums),
}
"""Old name -> (current name as users write it, object)."""


def look_up(name: str) -> object:
    """Return the object of an old name and warn at the caller's line. Raises AttributeError for other names."""
    if name not in OLD_NAMES:
        raise AttributeError(f"module 'octavo.fp8' has no attribute {name!r}")
    place, value = OLD_NAMES[name]
    # `from octavo.fp8 import turn` looks the name up twice: importlib checks whether it exists, then the statement
    # reads it. Only the second lookup is in a user's frame. The frames are this function, __getattr__ and the caller.
    if sys._getframe(2).f_globals.get("__name__") != "importlib._bootstrap":
        text = f"fp8.{name} is now {place}. The old name works through 0.6 and is removed in 0.7."
        warnings.warn(text, DeprecationWarning, stacklevel=3)
    return value
