"""The results of a suite: rows of seconds with bytes and operations, absent candidates with reasons, and the machine.

A ratio always compares two rows of one case in one run, timed by turns if the candidates fit on the device together
(whole training steps do not and run one after another). Rates are computed from counted work: bytes that the operation
must read and write, and 2 M N K operations for a GEMM; any further work of a kernel counts as overhead.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from octavo.base import atomic_write, environment

#: fields of the environment in every record
MACHINE = ("octavo", "python", "os", "cpu", "memory_bytes", "torch", "gpus", "driver", "packages")
NOISE = 0.5  # spread above which a median means little

COLUMNS = ("suite", "case", "candidate", "time", "spread", "rate", "against", "ratio")
NUMBERS = (3, 4, 5, 7)  # right-aligned columns of COLUMNS

# Dense BF16 operations per second by a part of the device's name, specific names first. Source: NVIDIA's data sheets.
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


# Bytes per second of the memory, from the same data sheets.
BANDWIDTH = {
    "H200": 4.8e12,
    "H100 PCIe": 2.0e12,
    "H100 NVL": 3.9e12,
    "H100": 3.35e12,
    "H800": 3.35e12,
    "B200": 7.7e12,
    "L40S": 0.864e12,
    "L4": 0.3e12,
    "4090": 1.008e12,
    "5090": 1.792e12,
}


@dataclass(frozen=True)
class Row:
    """One candidate in one case.

    ``seconds`` is the median, ``spread`` the interquartile range divided by the median, ``host`` the median time of
    Python and kernel launches. ``bytes`` and ``flops`` are the counted work. ``baseline`` is the candidate of the same
    case that the ratio refers to. ``peak_bytes`` is the peak memory of the device, ``memory`` its bytes by kind, and
    ``tokens`` the tokens of a step, if they apply. ``parts`` has the seconds by part of a separate, instrumented call,
    which may have taken slightly longer; they add up to that call. ``kernels`` has the seconds of one profiled call by
    kind of kernel, ``kernel_names`` by name, for the most expensive kernels. ``note`` is for readers.
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
    kernels: Mapping[str, float] = field(default_factory=dict)
    kernel_names: Mapping[str, float] = field(default_factory=dict)
    note: str = ""

    @property
    def rate(self) -> str:
        """The counted work per second as text."""
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
class AbsentCandidate:
    """A candidate that did not run in a case, and why."""

    suite: str
    case: str
    candidate: str
    why: str


@dataclass
class Result:
    """All results of one ``octavo bench``; ``cut`` lists the cases that did not fit into the time budget."""

    device: str
    small: bool
    rows: list[Row] = field(default_factory=list)
    absent: list[AbsentCandidate] = field(default_factory=list)
    cut: list[str] = field(default_factory=list)
    settings: Mapping[str, Any] = field(default_factory=dict)

    def ratio(self, row: Row) -> float | None:
        """Return the speed relative to the baseline, or None without a baseline. Rows that count different bytes are
        compared by rate, unless they count tokens."""
        base = next(
            (r for r in self.rows if (r.suite, r.case, r.candidate) == (row.suite, row.case, row.baseline)), None
        )
        if base is None or base is row or row.seconds <= 0:
            return None
        if base.bytes and row.bytes and not row.tokens:
            return (row.bytes / row.seconds) / (base.bytes / base.seconds)
        return base.seconds / row.seconds

    def mfu(self, row: Row) -> float | None:
        """Return model FLOPs utilization: the counted operations of a step over the dense BF16 peak of the GPU, also
        for FP8, where it can exceed 1. None for other rows and unknown GPUs."""
        peak = next((p for name, p in BF16_PEAK.items() if name in self.device), None)
        return row.flops / row.seconds / peak if peak and row.tokens and row.flops and row.seconds > 0 else None

    def derived(self, row: Row) -> dict[str, float | None]:
        """Return the figures of a row that depend on other rows or on the device."""
        return {"ratio": self.ratio(row), "mfu": self.mfu(row), "bandwidth_share": self.bandwidth_share(row)}

    def bandwidth_share(self, row: Row) -> float | None:
        """Return the share of the bandwidth bound: the time to read the bytes of a row that counts tokens at the
        bandwidth of the data sheet, over its time. None for other rows and unknown GPUs."""
        peak = next((p for name, p in BANDWIDTH.items() if name in self.device), None)
        return row.bytes / row.seconds / peak if peak and row.tokens and row.bytes and row.seconds > 0 else None

    def to_json(self) -> dict[str, Any]:
        return {
            "command": "octavo bench",
            "device": self.device,
            "small": self.small,
            "settings": dict(self.settings),
            "machine": environment.describe(),
            "rows": [{**asdict(r), "rate": r.rate, **self.derived(r)} for r in self.rows],
            "absent": [asdict(a) for a in self.absent],
            "cut": self.cut,
        }


def table(result: Result) -> list[tuple[str, ...]]:
    """Return the table of the results, with columns :data:`COLUMNS`."""
    rows: list[tuple[str, ...]] = []
    for r in result.rows:
        ratio, mfu = result.ratio(r), result.mfu(r)
        kinds = "".join(f", {kind} {size / 2**30:.2f}" for kind, size in r.memory.items() if kind != "peak")
        peak = kinds + ("" if r.peak_bytes is None else f", {'peak ' if kinds else ''}{r.peak_bytes / 2**30:.1f} GiB")
        share = result.bandwidth_share(r)
        bound = "" if share is None else f", {100 * share:.0f} % of the bandwidth bound"
        rate = r.rate + ("" if mfu is None else f", MFU {100 * mfu:.0f} %") + bound + peak
        rows.append(
            (r.suite, r.case, r.candidate, _format_seconds(r.seconds), f"{100 * r.spread:.0f} %", rate, r.baseline)
            + (("" if ratio is None else f"{ratio:.2f}x"),)
        )
    return rows


def budget_table(result: Result) -> list[tuple[str, ...]]:
    """Return the table of step times by part, with a header; empty if no row has parts."""
    return _shares_table([(row, row.parts) for row in result.rows if row.parts], "step")


def kernel_table(result: Result) -> list[tuple[str, ...]]:
    """Return the table of profiled calls by kind of kernel, with a header; empty if no call was profiled."""
    return _shares_table([(row, row.kernels) for row in result.rows if row.kernels], "kernels")


def _shares_table(timed: Sequence[tuple[Row, Mapping[str, float]]], what: str) -> list[tuple[str, ...]]:
    lines = []
    for row, parts in timed:
        total = sum(parts.values())
        cells = [f"{_format_seconds(seconds)} {100 * seconds / total:.0f} %" for seconds in parts.values()]
        lines.append((row.case, row.candidate, _format_seconds(total), *cells))
    return [("case", "candidate", what, *timed[0][1]), *lines] if timed else []


def columns_table(result: Result) -> list[tuple[str, ...]]:
    """Return the table of training steps against each compiled step in high precision of their case, with a header;
    empty if there is none. A ratio of 1.2x means that the row is 1.2 times as fast."""
    steps = [r for r in result.rows if r.suite == "step" and r.tokens]
    columns = [r for r in steps if re.match(r"(bf16|fp32) compiled", r.candidate)]
    names = list(dict.fromkeys(r.candidate for r in columns))
    lines = []
    for row in steps:
        bases = {r.candidate: r.seconds for r in columns if r.case == row.case}
        cells = [f"{bases[name] / row.seconds:.2f}x" if name in bases else "" for name in names]
        lines.append((row.case, row.candidate, _format_seconds(row.seconds), *cells))
    return [("case", "candidate", "step", *names), *lines] if columns else []


def notes(result: Result) -> list[str]:
    """Return what a reader has to know of rows, each note once, with the candidates that it is about."""
    about: dict[str, list[str]] = {}
    for row in result.rows:
        if row.note:
            about.setdefault(row.note, []).append(row.candidate)
    return [f"{note} ({', '.join(dict.fromkeys(names))})" for note, names in about.items()]


def noisy_rows(result: Result) -> list[Row]:
    """Return the rows with a spread so large that their ratios mean little."""
    return [r for r in result.rows if r.spread > NOISE]


def select_suite(result: Result, suite: str) -> Result:
    """Return the results of one suite."""
    cut = [line for line in result.cut if line.split()[0] == suite]
    rows = [r for r in result.rows if r.suite == suite]
    absent = [a for a in result.absent if a.suite == suite]
    return Result(result.device, result.small, rows, absent, cut, result.settings)


def _format_seconds(seconds: float) -> str:
    return f"{seconds * 1e3:.3f} ms" if seconds < 1 else f"{seconds:.3f} s"


def write(result: Result, path: Path) -> Path:
    """Write the result to a JSON file."""
    return save(result.to_json(), path)


def describe_machine(described: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Return the fields :data:`MACHINE` of a run's environment; of this process if ``described`` is None."""
    described = environment.describe() if described is None else described
    return {key: described[key] for key in MACHINE if key in described}


def save(figures: Mapping[str, Any], path: Path) -> Path:
    """Write figures as JSON, atomically; used by suites and by every script in ``benchmarks/``."""
    path.parent.mkdir(parents=True, exist_ok=True)
    atomic_write.write_text(path, json.dumps(figures, indent=1, default=str) + "\n", shared=True)
    return path


def load(path: Path) -> Mapping[str, Any]:
    """Load a result that :func:`write` wrote."""
    result: Mapping[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return result


def suite_names(rows: Sequence[Row]) -> list[str]:
    """Return the suites that have rows, in order."""
    return list(dict.fromkeys(r.suite for r in rows))
