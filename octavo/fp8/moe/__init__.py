"""FP8 mixture-of-experts layers."""

from octavo.fp8.moe.exchange import EXCHANGE, Exchange
from octavo.fp8.moe.experts import (
    ADAPTERS,
    PROJECTIONS,
    Experts,
    is_experts,
    matches_stock,
    run_mixture,
    stand_in_matches,
    why_not,
)
from octavo.fp8.moe.experts_high import enable_row_forward
from octavo.fp8.moe.grouped_high import bias_grad as grouped_bias_grad
from octavo.fp8.moe.grouped_high import dgrad as grouped_dgrad
from octavo.fp8.moe.grouped_high import fwd as grouped_fwd
from octavo.fp8.moe.grouped_high import wgrad as grouped_wgrad

__all__ = [
    "ADAPTERS",
    "EXCHANGE",
    "Exchange",
    "Experts",
    "PROJECTIONS",
    "enable_row_forward",
    "grouped_bias_grad",
    "grouped_dgrad",
    "grouped_fwd",
    "grouped_wgrad",
    "is_experts",
    "matches_stock",
    "run_mixture",
    "stand_in_matches",
    "why_not",
]
