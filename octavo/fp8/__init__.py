"""FP8 for linear layers, inside anybody's training loop; needs torch alone.

    from octavo import fp8

    plan = fp8.plan(model, "blockwise")     # what will run in FP8, and why; print(plan.table())
    fp8.apply(model, plan)                  # in place; parameters, names and values stay
    with fp8.count_gemms() as counts:       # proof of use
        loss = model(**batch).loss; loss.backward()

The arithmetic is :mod:`octavo.fp8.arithmetic.cast` and :mod:`octavo.fp8.arithmetic.recipe`; the layer is
:mod:`octavo.fp8.dense.linear`.
"""

from octavo.fp8.arithmetic.cast import CastError, CastSpec, Quantized, dequantize, quantize_with_scale, scale_from_amax
from octavo.fp8.arithmetic.metrics import calc_diff, cosine, saturation, sqnr, underflow
from octavo.fp8.arithmetic.recipe import RECIPES, Gemm, Recipe, RecipeError, recipe
from octavo.fp8.blocks.attention import grouped_attention
from octavo.fp8.dense.delayed import (
    load_scaling_state,
    move_scaling,
    reduce_scaling_state,
    scale_gradient_histories,
    scaling_state,
)
from octavo.fp8.dense.linear import Linear, linear
from octavo.fp8.invariance import InvarianceError
from octavo.fp8.invariance import attention as invariant_attention
from octavo.fp8.kernels.registry import BackendError, Selection, quantize, select
from octavo.fp8.kernels.registry import names as backends
from octavo.fp8.kernels.self_check import SelfCheckError
from octavo.fp8.measuring.cases import MeasureError, Measurements
from octavo.fp8.measuring.invariant import compiled, invariant, not_invariant, shared_scales
from octavo.fp8.measuring.machine import Machine
from octavo.fp8.measuring.measure import Cache, measure
from octavo.fp8.measuring.precision import high_precision
from octavo.fp8.memory.chunked_head import ChunkedHead, chunked_head
from octavo.fp8.memory.chunked_loss import linear_cross_entropy, log_probs, token_log_probs
from octavo.fp8.memory.offload import offload as offload_activations
from octavo.fp8.memory.offload import synchronize_per_layer
from octavo.fp8.memory.recompute import recompute
from octavo.fp8.moe.experts import Experts
from octavo.fp8.observe.counts import GemmCounts, count_gemms
from octavo.fp8.observe.health import Health, health
from octavo.fp8.observe.recorder import HIGH, uncounted
from octavo.fp8.optim.adamw import AdamW
from octavo.fp8.optim.convert import copy_state, fp32_weight, set_low, to_torch
from octavo.fp8.planning.apply import Fusion, apply, fuse, turn, unfuse
from octavo.fp8.planning.decide import plan, schedule
from octavo.fp8.planning.file import load_plan, save_plan
from octavo.fp8.planning.plan import Plan, Schedule, Span
from octavo.fp8.planning.rows import PlanRow
from octavo.fp8.policy.policy import ComponentPolicy, PlanError, Policy, Rule
from octavo.fp8.policy.topology import Row, topology
from octavo.fp8.proof.prediction import Prediction, predict
from octavo.fp8.proof.proof import Proof, ProofError
from octavo.fp8.proof.reference import reference_note
from octavo.fp8.weights.cache import code_bytes, invalidate
from octavo.fp8.weights.finite import not_finite
from octavo.fp8.weights.frozen import (
    FROZEN,
    codes_of_frozen,
    fingerprint,
    freeze_weight,
    frozen,
    frozen_bytes,
    frozen_rows,
    frozen_weights,
    is_frozen,
    thaw,
)
from octavo.fp8.weights.shards import is_whole
from octavo.fp8.weights.state import fp8_state_dict, load_fp8_state_dict
from octavo.fp8.weights.sums import changed_weights, stale_codes, stale_sentence, weight_sums

__all__ = [
    "FROZEN",
    "HIGH",
    "InvarianceError",
    "RECIPES",
    "AdamW",
    "BackendError",
    "Cache",
    "CastError",
    "CastSpec",
    "ChunkedHead",
    "ComponentPolicy",
    "Experts",
    "Fusion",
    "Gemm",
    "GemmCounts",
    "Health",
    "Linear",
    "Machine",
    "MeasureError",
    "Measurements",
    "Plan",
    "PlanError",
    "PlanRow",
    "Policy",
    "Prediction",
    "Proof",
    "ProofError",
    "Quantized",
    "Recipe",
    "RecipeError",
    "Row",
    "Rule",
    "Schedule",
    "Selection",
    "SelfCheckError",
    "Span",
    "apply",
    "backends",
    "calc_diff",
    "changed_weights",
    "chunked_head",
    "code_bytes",
    "compiled",
    "codes_of_frozen",
    "copy_state",
    "cosine",
    "count_gemms",
    "dequantize",
    "fingerprint",
    "fp32_weight",
    "fp8_state_dict",
    "freeze_weight",
    "frozen",
    "frozen_bytes",
    "frozen_rows",
    "frozen_weights",
    "fuse",
    "grouped_attention",
    "health",
    "high_precision",
    "invalidate",
    "invariant",
    "invariant_attention",
    "is_frozen",
    "is_whole",
    "linear",
    "linear_cross_entropy",
    "load_fp8_state_dict",
    "load_plan",
    "load_scaling_state",
    "move_scaling",
    "log_probs",
    "measure",
    "not_finite",
    "not_invariant",
    "offload_activations",
    "plan",
    "predict",
    "quantize",
    "quantize_with_scale",
    "recipe",
    "recompute",
    "reduce_scaling_state",
    "reference_note",
    "saturation",
    "save_plan",
    "scale_from_amax",
    "scale_gradient_histories",
    "scaling_state",
    "schedule",
    "select",
    "shared_scales",
    "set_low",
    "sqnr",
    "stale_codes",
    "stale_sentence",
    "synchronize_per_layer",
    "thaw",
    "to_torch",
    "token_log_probs",
    "topology",
    "turn",
    "uncounted",
    "weight_sums",
    "underflow",
    "unfuse",
]
