"""FP8 for linear layers, in any training loop; needs only torch.

    from octavo import fp8

    plan = fp8.plan(model, "blockwise")     # which layers run in FP8, and why; print(plan) shows the table
    fp8.apply(model, plan)                  # in place; parameters, names and values stay
with fp8.count_gemms() as counts:       # counts the GEMMs that ran
        loss = model(**batch).loss; loss.backward()

The arithmetic is :mod:`octavo.fp8.arithmetic.cast` and :mod:`octavo.fp8.arithmetic.recipe`; the layer is
:mod:`octavo.fp8.dense.linear`. Two small modules are public as well: :mod:`octavo.fp8.metrics` (SQNR, underflow,
saturation) and :mod:`octavo.fp8.delayed` (amax histories).
"""

from typing import TYPE_CHECKING

from octavo.fp8.arithmetic.cast import CastError, CastSpec, Quantized, dequantize
from octavo.fp8.arithmetic.errors import Fp8Error, ProofError
from octavo.fp8.arithmetic.recipe import RECIPES, Gemm, Recipe, RecipeError, recipe
from octavo.fp8.dense.delayed import load_scaling_state, scaling_state
from octavo.fp8.dense.linear import Linear, linear
from octavo.fp8.invariance import InvarianceError
from octavo.fp8.kernels.registry import BackendError, quantize
from octavo.fp8.measuring.cases import MeasureError, Measurements
from octavo.fp8.measuring.invariant import batch_invariant, why_not_batch_invariant
from octavo.fp8.measuring.measure import MeasurementCache, measure
from octavo.fp8.measuring.precision import high_precision
from octavo.fp8.memory.chunked_loss import linear_cross_entropy, log_probs, token_log_probs
from octavo.fp8.memory.offload import offload as offload_activations
from octavo.fp8.memory.recompute import activation_checkpointing
from octavo.fp8.observe.counts import GemmCounts, count_gemms
from octavo.fp8.observe.health import health
from octavo.fp8.observe.recorder import HIGH
from octavo.fp8.optim.adamw import AdamW
from octavo.fp8.planning.apply import apply, fuse, switch_plan
from octavo.fp8.planning.decide import plan, schedule
from octavo.fp8.planning.file import load_plan, save_plan
from octavo.fp8.planning.plan import Plan
from octavo.fp8.planning.rows import PlanRow
from octavo.fp8.policy.policy import ComponentPolicy, PlanError, Policy, Rule
from octavo.fp8.policy.topology import describe_layers
from octavo.fp8.self_check.untested import SelfCheckError
from octavo.fp8.weights.cache import invalidate, weight_cache_bytes
from octavo.fp8.weights.finite import find_nonfinite
from octavo.fp8.weights.frozen import dequantize_weights, fingerprint, freeze_weight
from octavo.fp8.weights.state import fp8_state_dict, load_fp8_state_dict

__all__ = [
    "HIGH",
    "RECIPES",
    "AdamW",
    "BackendError",
    "CastError",
    "CastSpec",
    "ComponentPolicy",
    "Fp8Error",
    "Gemm",
    "GemmCounts",
    "InvarianceError",
    "Linear",
    "MeasureError",
    "MeasurementCache",
    "Measurements",
    "Plan",
    "PlanError",
    "PlanRow",
    "Policy",
    "ProofError",
    "Quantized",
    "Recipe",
    "RecipeError",
    "Rule",
    "SelfCheckError",
    "activation_checkpointing",
    "apply",
    "batch_invariant",
    "count_gemms",
    "dequantize",
    "dequantize_weights",
    "describe_layers",
    "find_nonfinite",
    "fingerprint",
    "fp8_state_dict",
    "freeze_weight",
    "fuse",
    "health",
    "high_precision",
    "invalidate",
    "linear",
    "linear_cross_entropy",
    "load_fp8_state_dict",
    "load_plan",
    "load_scaling_state",
    "log_probs",
    "measure",
    "offload_activations",
    "plan",
    "quantize",
    "recipe",
    "save_plan",
    "scaling_state",
    "schedule",
    "switch_plan",
    "token_log_probs",
    "weight_cache_bytes",
    "why_not_batch_invariant",
]

# Hidden from type checkers, so that they report renamed names.
if not TYPE_CHECKING:

    def __getattr__(name: str) -> object:
        """Return an object by its name in 0.4.0, with a DeprecationWarning."""
        # Imported here, so that current names do not pay for it.
        from octavo.fp8.old_names import look_up

        return look_up(name)
