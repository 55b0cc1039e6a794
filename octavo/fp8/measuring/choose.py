"""Choose the recipe of a layer by measurements, or by a fixed table.

**By measurements.** The fastest valid candidate, if it is faster than high precision by more than :data:`MARGIN`; among
candidates within :data:`TIE` of the fastest, the one with the finest scales. Otherwise high precision.

**By the table** (without measurements). The fastest recipe of the hardware, and sizes for which FP8 is known to be
slower: torchao measured these on an H100 and skips layers by the same rules (``_auto_filter_for_recipe``). The rules do
not take the number of tokens, fused casts or your GPU into account, so measure if possible.

========== ============ ================================================================
capability recipe       stays in high precision
========== ============ ================================================================
CPU        blockwise    nothing: FP8 is emulated there, for tests
below 8.9  none         everything: no tensor core multiplies FP8
8.9        rowwise      N <= 2048, K <= 1024, or (N <= 4096 and K <= 2048)
9.x        blockwise    the same
10.x, 11.x mxfp8        the same
12.x       rowwise      the same
any GPU                 N or K not a multiple of 16; tensorwise, if nothing else is allowed: K <= 4096 and N <= 1024
========== ============ ================================================================
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from octavo.base.recipe_specs import CANDIDATES, DEFAULT_RECIPE, RANKED, SPECS, fastest_on
from octavo.fp8.arithmetic.recipe import Recipe
from octavo.fp8.measuring.cases import Entry, Measured

MARGIN = 0.02  # minimum gain of FP8, because a tie costs accuracy
TIE = 0.03


class Choice(NamedTuple):
    """The entry to run, or None for high precision; the reason; and the best FP8 entry, even if it is not chosen."""

    entry: Entry | None
    reason: str
    best: tuple[str, Entry] | None


def choose_by_measurement(measured: Measured, allowed: Sequence[Recipe], micro_steps: int = 1) -> Choice:
    """Choose from the measured candidates of the allowed recipes."""
    names = {r.summary() for r in allowed}
    entries = {name: e for name, e in measured.entries.items() if e.recipe in names}
    healthy = {name: e for name, e in entries.items() if e.rejected is None}
    if not healthy:
        why = (
            "; ".join(f"{name}: {e.rejected}" for name, e in entries.items()) or "no backend supports an allowed recipe"
        )
        return Choice(None, f"measured: no FP8 candidate works ({why})", None)
    high = measured.high.cost(micro_steps)
    name, best = _choose_finest(healthy, high, micro_steps)
    cost = best.cost(micro_steps)
    reason = (
        f"measured: BF16 {_ms(high)}, FP8 {_ms(cost)} ({name}), {high / cost:.2f}x" if cost else f"measured: {name}"
    )
    if cost < high * (1 - MARGIN):
        return Choice(best, reason, (name, best))
    return Choice(None, f"measured: BF16 {_ms(high)}, best FP8 {_ms(cost)} ({name})", (name, best))


def _choose_finest(healthy: Mapping[str, Entry], high: float, micro_steps: int) -> tuple[str, Entry]:
    """Return the candidate with the finest scales among those that tie with the fastest."""
    fastest = min(e.cost(micro_steps) for e in healthy.values())
    close = {name: e for name, e in healthy.items() if e.cost(micro_steps) <= fastest * (1 + TIE)}
    if fastest < high * (1 - MARGIN):  # a finer candidate must also be faster than high precision
        close = {name: e for name, e in close.items() if e.cost(micro_steps) < high * (1 - MARGIN)}
    return min(close.items(), key=lambda item: (_recipe_rank(item[1].recipe), item[1].cost(micro_steps)))


def _recipe_rank(short: str) -> int:
    name = short.split(" ")[0]
    return RANKED.index(name) if name in RANKED else len(RANKED)


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.2f} ms" if seconds >= 1e-4 else f"{1e3 * seconds:.4f} ms"


def choose_by_table(
    sm: tuple[int, int] | None, shape: tuple[int, int], allowed: Mapping[str, Recipe]
) -> tuple[Recipe | None, str]:
    """Return (recipe or None, reason) by the table in the module docstring. ``sm`` is None on a CPU."""
    n, k = shape
    if sm is None:
        preferred = DEFAULT_RECIPE
    elif sm < (8, 9):
        return None, f"auto, not measured: no FP8 in hardware at compute capability {sm[0]}.{sm[1]}"
    else:
        preferred = fastest_on(sm[0])
    order = [preferred, *(name for name in CANDIDATES if SPECS[name].is_native_on_all), *allowed]
    name = next((r for r in order if r in allowed), None)
    if name is None:
        return None, "auto, not measured: no recipe is allowed"
    if sm is not None:
        small = _why_too_small(name, n, k)
        if small:
            return None, f"auto, not measured: {small}, where FP8 is known to be slower"
    return allowed[name], f"auto, not measured: {name} by the table"


def _why_too_small(name: str, n: int, k: int) -> str | None:
    if n % 16 or k % 16:
        return f"N={n} or K={k} is not a multiple of 16"
    if SPECS[name].has_tensor_scale and not SPECS[name].delayed:
        return f"K={k} <= 4096 and N={n} <= 1024" if k <= 4096 and n <= 1024 else None
    if n <= 2048:
        return f"N={n} <= 2048"
    if k <= 1024:
        return f"K={k} <= 1024"
    return f"N={n} <= 4096 and K={k} <= 2048" if n <= 4096 and k <= 2048 else None
