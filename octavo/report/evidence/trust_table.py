"""The trust table of ``docs/numerics.md`` as functions: each row takes figures and returns pass, warn or fail, and why.
The claims of a trial about the training itself are in :mod:`octavo.report.evidence.claims`.

A row returns a ``Check``: the figure, its threshold, the status and a sentence. The verdict is the worst status.
Shares are 0..1 here and per cent in the sentences; SQNR is in dB; losses are in nats per token.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from octavo.base.wording import count_noun

PASS, WARN, UNDECIDED, FAIL = "pass", "warn", "undecided", "fail"
UNTRIED = "untried"  # a claim that was not tested, with instructions for testing it; it does not count
REPORTED = "reported"  # a figure with its interval and no margin: it does not count either
_RANK = {PASS: 0, WARN: 1, UNDECIDED: 2, FAIL: 3}

# Segments that a run is split into to estimate the noise -> standard deviations of a 95 % interval, by Student's t for
# that many differences whose mean is known to be zero.
SEGMENTS = {6: 2.45, 20: 2.09}
UNDERFLOW_WARN, UNDERFLOW_FAIL = 0.01, 0.05  # operands of fwd and dgrad
UNDERFLOW_WARN_WGRAD = 0.20  # operands of wgrad
SQNR_WARN = {"e4m3": 25.0, "e5m2": 20.0}
COSINE_MEDIAN, COSINE_MIN = 0.99, 0.95
COSINE_FAIL = 0.5  # if half of the layers are below it, the gradients are unrelated to high precision's
SKIPPED_WARN = 0.01  # of the steps


@dataclass(frozen=True)
class Check:
    """One row of the trust table for one run. A claim (:mod:`octavo.report.evidence.claims`) also has its 95 %
    interval, ``low`` to ``high``, and the ``margin`` that it must stay within."""

    name: str
    title: str
    run: str
    figure: float | None
    shown: str
    threshold: str
    status: str
    sentence: str
    low: float | None = None
    high: float | None = None
    margin: float | None = None

    def to_json(self) -> dict[str, Any]:
        """Return the row of ``report.json``, which calls a run an arm."""
        return {"arm" if key == "run" else key: value for key, value in asdict(self).items()}


def worst_status(statuses: Sequence[str]) -> str:
    """Return the worst of several statuses, or pass if there is none."""
    return max((s for s in statuses if s not in (UNTRIED, REPORTED)), key=_RANK.__getitem__, default=PASS)


def percent(value: float, digits: int = 2) -> str:
    """Format a share in per cent, with enough digits that a nonzero share is not shown as zero."""
    if value == 0 or not math.isfinite(value):
        return f"{100 * value:.{digits}f} %"
    while abs(100 * value) < 0.5 * 10**-digits and digits < 6:
        digits += 2
    return f"{100 * value:.{digits}f} %"


def loss_gap(losses: np.ndarray, reference: np.ndarray) -> float:
    """Return the signed relative gap of two runs at the same steps: (mean loss - mean reference loss) / mean reference
    loss.

    Steps in which either loss is not finite are excluded from both means. NaN if no step is left or the mean is 0.
    """
    finite = np.isfinite(losses) & np.isfinite(reference)
    if not finite.any() or reference[finite].mean() == 0:
        return math.nan
    return float((losses[finite].mean() - reference[finite].mean()) / abs(reference[finite].mean()))


def seed_noise(losses: np.ndarray, reference: np.ndarray, steps: int | None = None) -> float:
    """Return how far the mean losses of two high-precision runs may differ because of the seed, relative to the mean
    loss.

    One pair of seeds gives one sample of that gap, which is small by chance as often as large. So the run is split into
    segments whose differences D count as independent samples: the gap of the means then has the standard deviation
    sqrt(sum D^2) / sum loss, and stays within t of them 19 times out of 20. Two seeds drift apart for many steps at a
    time, so segments must be long, but few segments give a rough estimate. The larger result of two splits is used, and
    the pair's own gap if that is larger still. In short runs the bound is still too narrow (docs/lab/demo.md).

    ``steps``: the length of the whole run if the curves are its beginning. NaN without finite losses.
    """
    finite = np.isfinite(losses) & np.isfinite(reference)
    total = float(np.abs(reference[finite]).sum())
    if not total:
        return math.nan
    difference = np.where(finite, losses - reference, 0.0)
    bounds = [abs(float(difference.sum()))]
    for segments, deviations in SEGMENTS.items():
        length = max(1, -(-(steps or len(losses)) // segments))
        sums = np.add.reduceat(difference, np.arange(0, len(losses), length))
        bounds.append(deviations * math.sqrt(float((sums**2).sum())))
    return max(bounds) / total


def _worst_layer(by_layer: Mapping[str, float], largest: bool) -> tuple[str, float]:
    pick = max if largest else min
    layer = pick(by_layer, key=by_layer.__getitem__)
    return layer, by_layer[layer]


def _unmeasured(name: str, title: str, run: str, threshold: str) -> Check:
    return Check(
        name, title, run, None, "not measured", threshold, WARN,
        "no health figures were recorded; set run.health_every to at most the number of steps",
    )  # fmt: skip


def mark_no_wgrad(check: Check) -> Check:
    """Return a check of weight gradients for a run that has none: it passes."""
    sentence = "no weight gradients: every FP8 layer is frozen"
    return replace(check, figure=None, shown="none", status=PASS, sentence=sentence)


def check_underflow(run: str, by_operand: Mapping[str, float], wgrad: bool) -> Check:
    """Check the share of non-zero values that became zero; ``by_operand`` maps "layer role" to the mean of a run."""
    name, gemms = ("underflow_wgrad", "wgrad") if wgrad else ("underflow", "fwd and dgrad")
    title = f"Underflow, {gemms} operands"
    threshold = "below 20 %" if wgrad else "below 1 %; fails above 5 %"
    if not by_operand:
        return _unmeasured(name, title, run, threshold)
    layer, share = _worst_layer(by_operand, largest=True)
    if wgrad:
        status = WARN if share > UNDERFLOW_WARN_WGRAD else PASS
    else:
        status = FAIL if share > UNDERFLOW_FAIL else WARN if share > UNDERFLOW_WARN else PASS
    sentence = f"at most {percent(share)} of the non-zero values became zero, most in {layer}"
    return Check(name, title, run, share, percent(share), threshold, status, sentence)


def check_sqnr(run: str, fmt: str, by_operand: Mapping[str, float]) -> Check:
    """Check the lowest SQNR in dB of the operands cast to ``fmt`` (e4m3 or e5m2)."""
    limit, label = SQNR_WARN[fmt], fmt.upper()
    name, title, threshold = f"sqnr_{fmt}", f"SQNR, {label} operands", f"at least {limit:.0f} dB"
    if not by_operand:
        return _unmeasured(name, title, run, threshold)
    layer, level = _worst_layer(by_operand, largest=False)
    middle = float(np.median(list(by_operand.values())))
    status = WARN if level < limit else PASS
    sentence = f"median {middle:.1f} dB over {len(by_operand)} operands; the lowest, {level:.1f} dB, is {layer}"
    return Check(name, title, run, level, f"{level:.1f} dB", threshold, status, sentence)


def check_cosine(run: str, by_layer: Mapping[str, float]) -> Check:
    """Check the cosine between FP8 and high-precision weight gradients: its median and minimum over layers."""
    name, title = "dw_cosine", "Cosine of weight gradients"
    threshold = f"median at least {COSINE_MEDIAN}, none below {COSINE_MIN}; fails with a median below {COSINE_FAIL}"
    if not by_layer:
        return _unmeasured(name, title, run, threshold)
    layer, low = _worst_layer(by_layer, largest=False)
    middle = float(np.median(list(by_layer.values())))
    status = FAIL if middle < COSINE_FAIL else WARN if low < COSINE_MIN or middle < COSINE_MEDIAN else PASS
    sentence = f"median {middle:.4f} over {len(by_layer)} layers; the lowest, {low:.4f}, is {layer}"
    return Check(name, title, run, low, f"{low:.4f}", threshold, status, sentence)


def check_nan_codes(run: str, by_layer: Mapping[str, int]) -> Check:
    """Check that no applied step had NaN codes, by the measured steps."""
    name, title, threshold = "nan_codes", "NaN codes in an applied step", "none"
    if not by_layer:
        return _unmeasured(name, title, run, threshold)
    count = sum(by_layer.values())
    if count:
        layer, most = _worst_layer({k: float(v) for k, v in by_layer.items()}, largest=True)
        sentence = f"{count} NaN codes entered GEMMs of steps that were applied, {int(most)} of them in {layer}"
    else:
        sentence = "no NaN code in any measured step"
    return Check(name, title, run, float(count), str(count), threshold, FAIL if count else PASS, sentence)


def check_gemms(run: str, proof: Mapping[str, Any]) -> Check:
    """Check that FP8 GEMMs ran where planned, by the counts in ``proof.json``."""
    name, title, threshold = "fp8_gemms", "FP8 GEMMs ran where planned", "every planned GEMM counted"
    if not proof:
        return Check(
            name, title, run, None, "no proof", threshold, FAIL,
            "the run has no proof.json, so nothing shows that FP8 ran; train it again",
        )  # fmt: skip
    share, counted = proof.get("share"), int(proof.get("fp8_gemms") or 0)
    of_all = "" if share is None else f": {percent(float(share), 1)} of the linear FLOPs"
    pending, missing = list(proof.get("pending") or ()), list(proof.get("missing") or ())
    shown = f"{counted} counted"
    if missing or not counted:
        what = ", ".join(map(str, missing[:3])) or "none of them"
        sentence = f"planned FP8 GEMMs did not run: {what}" if missing else "no FP8 GEMM was counted"
        return Check(name, title, run, float(len(missing)), shown, threshold, FAIL, sentence)
    if pending:
        sentence = f"no data reached {', '.join(map(str, pending))}, so its FP8 GEMMs are not proven"
        return Check(name, title, run, 0.0, shown, threshold, WARN, sentence)
    return Check(name, title, run, 0.0, shown, threshold, PASS, f"every FP8 GEMM of the plan was counted{of_all}")


def check_skipped(run: str, skipped: Sequence[int], steps: int, planned: int, overflowed: Sequence[int] = ()) -> Check:
    """Check that the run reached its last step, and that few steps had a non-finite loss or gradient.

    Up to 1 % of skipped steps warn, more fail: then the run is not the training to compare. ``overflowed`` steps, in
    which FP16 loss scaling searches for its scale, count as skipped only above 1 %.
    """
    name, title = "skipped_steps", "Steps skipped"
    threshold = f"none; fails above {100 * SKIPPED_WARN:g} %, or if the run did not finish"
    if len(overflowed) > SKIPPED_WARN * steps:
        skipped, overflowed = sorted((*skipped, *overflowed)), ()
    shown = f"{len(skipped)} of {steps}"
    if steps < planned:
        sentence = f"the run ended at step {steps} of {planned}"
        return Check(name, title, run, float(len(skipped)), shown, threshold, FAIL, sentence)
    if skipped:
        first = ", ".join(map(str, skipped[:5])) + (" ..." if len(skipped) > 5 else "")
        sentence = f"{count_noun(len(skipped), 'step')} skipped, where loss or gradient was not finite: {first}"
        status = WARN if len(skipped) <= SKIPPED_WARN * steps else FAIL
        return Check(name, title, run, float(len(skipped)), shown, threshold, status, sentence)
    but = f" except {len(overflowed)}, whose gradients overflowed FP16 until the loss scale fell" if overflowed else ""
    return Check(name, title, run, 0.0, shown, threshold, PASS, f"all {steps} steps were finite and applied{but}")


def check_recorded(run: str, steps: np.ndarray, every: int, planned: int) -> Check:
    """Check that metrics.jsonl has every required step: each multiple of ``every`` up to ``planned``.

    A step without a line has no loss, and the means would be computed over the remaining steps.
    """
    due = np.arange(every, planned + 1, every)
    missing = np.setdiff1d(due, steps)
    name, title, threshold = "recorded_steps", "Steps recorded", "every step of metrics.jsonl"
    shown = f"{len(due) - len(missing)} of {len(due)}"
    if missing.size:
        first = ", ".join(map(str, missing[:5])) + (" ..." if len(missing) > 5 else "")
        sentence = (
            f"metrics.jsonl is missing {count_noun(len(missing), 'step')} ({first}): the file was truncated; "
            "train the run again with --fresh"
        )
        return Check(name, title, run, float(len(missing)), shown, threshold, FAIL, sentence)
    return Check(name, title, run, 0.0, shown, threshold, PASS, f"all {len(due)} required lines are present")


def check_states(run: str, states: str, zeroed: int | None) -> Check:
    """Check that no second moment became zero in quantized optimizer states; states in fp32 and bf16 always pass."""
    name, title, threshold = "v_zero", "Second moments that became zero", "none"
    if states in ("fp32", "bf16"):
        sentence = f"optimizer states are {states}: none is rounded to zero by a quantizer"
        return Check(name, title, run, 0.0, "0", threshold, PASS, sentence)
    if zeroed is None:
        return Check(
            name, title, run, None, "not counted", threshold, WARN, f"states are {states} and were not counted"
        )
    sentence = f"{zeroed} non-zero second moments became zero" if zeroed else "no second moment became zero"
    return Check(name, title, run, float(zeroed), str(zeroed), threshold, FAIL if zeroed else PASS, sentence)


def check_same_data(run: str, tokens: np.ndarray, reference: np.ndarray) -> Check:
    """Check that both runs read the same data: equal numbers of tokens at every step."""
    name, title, threshold = "same_data", "Same data", "equal tokens at every step"
    known = np.isfinite(tokens) & np.isfinite(reference)
    differ = np.flatnonzero(known & (tokens != reference))
    if not known.any():
        return Check(name, title, run, None, "not recorded", threshold, WARN, "the runs recorded no token counts")
    if differ.size:
        sentence = (
            f"{count_noun(differ.size, 'step')} read a different number of tokens from high precision; the runs cannot "
            "be compared"
        )
        return Check(name, title, run, float(differ.size), f"{differ.size} differ", threshold, FAIL, sentence)
    sentence = f"all {int(known.sum())} steps read the same number of tokens as high precision"
    return Check(name, title, run, 0.0, "0 differ", threshold, PASS, sentence)
