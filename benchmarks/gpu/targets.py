"""The targets on a GPU: ratios on the same work in one run, or bytes counted by an allocator.

They are set for one H200, next to the best published figure of other projects and its source. Figures that no benchmark
of `make gpu` measures are also listed, with the command that does.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from octavo.base.recipe_specs import CURRENT_SCALING
from octavo.bench.record import Result, Row

Pairs = Sequence[tuple[Row, Row]]  # of each case in question: its baseline, and the fastest of the candidates asked for


@dataclass(frozen=True)
class Target:
    """``figure`` of the cases and candidates of a suite that match, at least (or at most) ``limit``.

    ``known``: the best known elsewhere, and whose. Without a suite, ``known`` is the command that says it.
    """

    what: str
    known: str
    limit: float
    suite: str = ""
    cases: str = ""
    who: str = ""
    figure: Callable[[Pairs], float | None] | None = None
    unit: str = "x"
    least: bool = True

    def of(self, result: Result) -> float | None:
        """What was measured; None where a candidate or its baseline is missing in all cases."""
        pairs = []
        rows = [r for r in result.rows if r.suite == self.suite and re.match(self.cases, r.case)]
        for case in dict.fromkeys(r.case for r in rows):
            here = {r.candidate: r for r in rows if r.case == case}
            ours = [r for r in here.values() if r.baseline in here and re.match(self.who, r.candidate)]
            if ours:
                best = min(ours, key=lambda r: r.seconds / (r.bytes or 1))
                pairs.append((here[best.baseline], best))
        if self.suite == "memory":  # bytes are of one case, and on a CPU there are none
            pairs = [(base, r) for base, r in pairs if r.memory and base.memory]
        return self.figure(pairs) if pairs and self.figure else None

    def bound(self) -> str:
        return f"{'>=' if self.least else '<='} {self.limit:g}{self.unit}"

    def reached(self, value: float) -> bool:
        return value >= self.limit if self.least else value <= self.limit


def speed(pairs: Pairs) -> float:
    """Seconds of the baseline over ours, summed over cases."""
    return sum(base.seconds for base, _ in pairs) / sum(ours.seconds for _, ours in pairs)


def bandwidth(pairs: Pairs) -> float:
    """Bytes a second over the baseline's, in the worst case."""
    return min(r.bytes / r.seconds / (base.bytes / base.seconds) for base, r in pairs)


def host(pairs: Pairs) -> float | None:
    """The host's seconds of a call over the baseline's, in the worst case; files of 0.4.0 hold none."""
    return max((r.host / base.host for base, r in pairs if base.host), default=None)


def standing(pairs: Pairs) -> float:
    """Bytes a parameter between steps, with gradients; the baseline's weights are fp32, 4 bytes a parameter."""
    ((base, r),) = pairs
    return 4 * sum(r.memory[kind] for kind in ("weights", "states", "gradients")) / base.memory["weights"]


def activations(pairs: Pairs) -> float:
    """KiB that a forward leaves for the backward, of a token and block."""
    ((_, r),) = pairs
    blocks = int(re.findall(r"(\d+) blocks", r.case)[0])
    return r.memory["activations"] / 1024 / r.tokens / blocks


# Cases by name, the small sizes included, which show on a CPU that every case is matched.
LINEAR = r"(qwen3-8b (qkv|gate_up|down)|small) sum M="
WIDE = r"(16384|96) x "
STEP = r"(qwen3_vl_8b, 8192 tokens|tiny)"
FP8 = f"({'|'.join(CURRENT_SCALING)})"

TARGETS: tuple[Target, ...] = (
    Target("linear, blockwise", "TransformerEngine 1.41x, H200", 1.55, "linear", LINEAR, "blockwise", speed),
    Target("... rowwise", "", 1.65, "linear", LINEAR, "rowwise", speed),
    Target("linear, tensorwise", "TransformerEngine 1.57x, H200", 1.75, "linear", LINEAR, "tensorwise", speed),
    Target(
        "cast in both layouts, of a copy", "torchao 0.85-0.94", 0.85, "cast", WIDE, "blockwise(_1d)? both", bandwidth
    ),
    Target("... in tensorwise, amax included", "", 0.65, "cast", WIDE, "tensorwise both", bandwidth),
    Target("... in rowwise", "", 0.6, "cast", WIDE, "rowwise both", bandwidth),
    Target("RMSNorm with its casts", "linghe 2.2x", 1.3, "cast", "rmsnorm " + WIDE, "fused", speed),
    Target("SwiGLU backward with its casts", "linghe 2.5x", 3.5, "cast", "swiglu backward " + WIDE, "fused", speed),
    Target("host time of a linear", "an empty function 1x", 5, "linear", LINEAR, "blockwise", host, "x", False),
    # Goals; benchmarks/step_model.py prints what its levers give.
    Target("training step, 8B, blockwise", "torchao rowwise 1.10x, 8 H100", 1.3, "step", STEP, "blockwise", speed),
    Target("training step, 8B, tensorwise", "torchao 1.25x, 8 H100", 1.4, "step", STEP, "tensorwise", speed),
    Target("experts, 8 of 128", "1.43x, MXFP8 on a B200", 1.4, "moe", "", FP8, speed),
    Target("no module below 1.0x", "`octavo plan --measure`", 1.0),
    Target("training, bytes a parameter", "COAT 10.2", 4.1, "memory", "", "that, codes recast", standing, "", False),
    Target("activations of a block", "COAT 92 KiB", 67, "memory", "", r"\+ FP8 act", activations, " KiB/token", False),
    Target("... with selective recomputation", "", 45, "memory", "", "that, sel", activations, " KiB/token", False),
    Target("peak of a full 8B compared with the plan's", "`octavo plan --card 80GB`", 1.05, least=False),
)
