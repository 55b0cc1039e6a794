"""What a suite found: rows of seconds with what they moved and computed, who could not take part and why, the machine.

A ratio always compares two rows of one case in one run, timed by turns where the candidates fit the device together
(those of ``step`` do not and run one after the other). Rates follow from counted work: bytes that the operation must
read and write, and 2 M N K operations a GEMM; what a kernel does beyond that is its own overhead.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from octavo.base import atomic_write, environment

#: what every record says of where its figures come from
MACHINE = ("octavo", "python", "os", "cpu", "memory_bytes", "torch", "gpus", "driver", "packages")
NOISE = 0.5  # a spread from which on a median says little

COLUMNS = ("suite", "case", "candidate", "time", "spread", "rate", "against", "ratio")
NUMBERS = (3, 4, 5, 7)  # columns of COLUMNS that are set to the right

# Dense BF16 operations a second, by a part of the device's name, the more special first. Source: NVIDIA's data sheets.
BF16_PEAK = {
    "H200 NVL": 835e12,
    "H200": 989e12,
    "H100 PCIe": 756e12,
    "H100 NVL": 835e12,
    "H100": 989e12,
    "H800": 989e12,
    "GB200": 2500e12,
    "B200": 2250e12,
    "L40S": 362e12,
    "L4": 121e12,
    "4090": 165.2e12,
    "5090": 209.5e12,
}


@dataclass(frozen=True)
class Row:
    """One candidate in one case.

    ``seconds`` is the median, ``spread`` the distance between the quartiles over it, ``host`` the median that Python
    and the launches took. ``bytes`` and ``flops`` are the work that the case asks for. ``baseline`` names the candidate
    of the same case that the ratio is taken against. ``peak_bytes`` is what the device held at most, ``memory`` of that
    bytes by kind, ``tokens`` what a step consumed, where they mean something. ``parts``: seconds by part of another
    call, which was cut while it ran and may have taken a little longer; they add up to it.
    """

    suite: str
    case: str
    candidate: str
    seconds: float
    spread: float = 0.0
    bytes: float = 0.0
    flops: float = 0.0
    baseline: str = ""
    tokens: int = 0
    peak_bytes: int | None = None
    memory: Mapping[str, int] = field(default_factory=dict)
    host: float = 0.0
    parts: Mapping[str, float] = field(default_factory=dict)

    @property
    def rate(self) -> str:
        """The counted work a second, in words."""
        if self.seconds <= 0:
            return ""
        parts = []
        if self.tokens:
            parts.append(f"{self.tokens / self.seconds:,.0f} tokens/s")
        if self.flops:
            parts.append(f"{self.flops / self.seconds / 1e12:.3g} TFLOP/s")
        if self.bytes:
            parts.append(f"{self.bytes / self.seconds / 1e9:.3g} GB/s")
        return ", ".join(parts)


@dataclass(frozen=True)
class Absent:
    """A candidate that did not take part in a case, and why."""

    suite: str
    case: str
    candidate: str
    why: str


@dataclass
class Result:
    """Everything one ``octavo bench`` found. ``cut`` says what the time budget left out."""

    device: str
    small: bool
    rows: list[Row] = field(default_factory=list)
    absent: list[Absent] = field(default_factory=list)
    cut: list[str] = field(default_factory=list)
    settings: Mapping[str, Any] = field(default_factory=dict)

    def ratio(self, row: Row) -> float | None:
        """How many times faster than its baseline, by rate where the two count different bytes; None without one."""
        base = next(
            (r for r in self.rows if (r.suite, r.case, r.candidate) == (row.suite, row.case, row.baseline)), None
        )
        if base is None or base is row or row.seconds <= 0:
            return None
        if base.bytes and row.bytes:
            return (row.bytes / row.seconds) / (base.bytes / base.seconds)
        return base.seconds / row.seconds

    def mfu(self, row: Row) -> float | None:
        """Model FLOPs utilization: the counted operations of a step over the GPU's dense BF16 peak (also for FP8, as
        is usual, so that it can exceed 1 there); None for other rows and unknown GPUs."""
        peak = next((p for name, p in BF16_PEAK.items() if name in self.device), None)
        return row.flops / row.seconds / peak if peak and row.tokens and row.flops and row.seconds > 0 else None

    def to_json(self) -> dict[str, Any]:
        return {
            "command": "octavo bench",
            "device": self.device,
            "small": self.small,
            "settings": dict(self.settings),
            "machine": environment.describe(),
            "rows": [{**asdict(r), "rate": r.rate, "ratio": self.ratio(r), "mfu": self.mfu(r)} for r in self.rows],
            "absent": [asdict(a) for a in self.absent],
            "cut": self.cut,
        }


def table(result: Result) -> list[tuple[str, ...]]:
    """Cells under :data:`COLUMNS`."""
    rows: list[tuple[str, ...]] = []
    for r in result.rows:
        ratio, mfu = result.ratio(r), result.mfu(r)
        kinds = "".join(f", {kind} {size / 2**30:.2f}" for kind, size in r.memory.items() if kind != "peak")
        peak = kinds + ("" if r.peak_bytes is None else f", {'peak ' if kinds else ''}{r.peak_bytes / 2**30:.1f} GiB")
        rate = r.rate + ("" if mfu is None else f", MFU {100 * mfu:.0f} %") + peak
        rows.append(
            (r.suite, r.case, r.candidate, _time(r.seconds), f"{100 * r.spread:.0f} %", rate, r.baseline)
            + (("" if ratio is None else f"{ratio:.2f}x"),)
        )
    return rows


def budget(result: Result) -> list[tuple[str, ...]]:
    """Where the time of steps goes: a heading, and a line for each row that was cut into parts; empty without any."""
    cut = [r for r in result.rows if r.parts]
    lines = []
    for row in cut:
        total = sum(row.parts.values())
        cells = [f"{_time(seconds)} {100 * seconds / total:.0f} %" for seconds in row.parts.values()]
        lines.append((row.case, row.candidate, _time(total), *cells))
    return [("case", "candidate", "step", *cut[0].parts), *lines] if cut else []


def noisy(result: Result) -> list[Row]:
    """Rows whose quartiles lie so far apart that their ratios say little."""
    return [r for r in result.rows if r.spread > NOISE]


def part(result: Result, suite: str) -> Result:
    """What one suite found."""
    cut = [line for line in result.cut if line.split()[0] == suite]
    rows = [r for r in result.rows if r.suite == suite]
    absent = [a for a in result.absent if a.suite == suite]
    return Result(result.device, result.small, rows, absent, cut, result.settings)


def _time(seconds: float) -> str:
    return f"{seconds * 1e3:.3f} ms" if seconds < 1 else f"{seconds:.3f} s"


def write(result: Result, path: Path) -> Path:
    """The result as a file."""
    return save(result.to_json(), path)


def machine(described: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Machine, versions and commit, as :data:`MACHINE` lists them: of this process, or of a run's description."""
    described = environment.describe() if described is None else described
    return {key: described[key] for key in MACHINE if key in described}


def save(found: Mapping[str, Any], path: Path) -> Path:
    """Figures as JSON, whole or not at all: those of suites and those of every script in ``benchmarks/``."""
    path.parent.mkdir(parents=True, exist_ok=True)
    atomic_write.write_text(path, json.dumps(found, indent=1, default=str) + "\n", shared=True)
    return path


def load(path: Path) -> Mapping[str, Any]:
    """A result as :func:`write` left it."""
    found: Mapping[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return found


def suites_of(rows: Sequence[Row]) -> list[str]:
    """The suites that left rows, in their order."""
    return list(dict.fromkeys(r.suite for r in rows))
