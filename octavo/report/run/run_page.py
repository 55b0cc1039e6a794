"""The page of a run, live or finished, or of several runs for comparison: one HTML file that opens offline, and a PNG.

Everything on the page comes from the run directories, and its size is bounded: curves have a maximum number of points,
and the page lists the first and newest evaluations and answers, the newest moves, and the layers with the lowest SQNR.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import matplotlib

from octavo.base import atomic_write
from octavo.base.wording import count_noun
from octavo.config import to_yaml
from octavo.report.evidence.claims import mean_gap
from octavo.report.evidence.run_reader import ROLES, ReportError, layer_health, read_json_file
from octavo.report.evidence.trust_table import percent
from octavo.report.run import page_parts, plots, run_plots
from octavo.report.run.history import History
from octavo.report.run.page_parts import (
    KINDS,
    TOTALS,
    choose_unit,
    flatten,
    format_bytes,
    format_fixed,
    format_number,
    memory_kinds,
)

LAYERS, MOVES = 40, 60
NOT_FINISHED = "not finished"
EXACT = "held-out answers equal to the reference"
_PILLS = {"finished": "pass", "running": "reported", "stopped": "warn", "failed": "fail", NOT_FINISHED: "reported"}


def read_runs(directories: Sequence[str | Path]) -> list[History]:
    """Read the runs of a page. Raises ReportError for a folder that is not a run with at least one step, for a run that
    is named twice, and for runs of several phases."""
    runs = [History.read(directory) for directory in directories]
    folders = [run.directory.resolve() for run in runs]
    if duplicate := next((folder for n, folder in enumerate(folders) if folder in folders[:n]), None):
        raise ReportError(f"{duplicate} is named twice; name each run once")
    if len(runs) > run_plots.MAX_LINES:
        raise ReportError(f"a page shows at most {run_plots.MAX_LINES} runs, got {len(runs)}")
    phases = {run.cfg.train.phase: run.directory for run in runs}
    if len(phases) > 1:
        listed = ", ".join(f"{directory} has phase {phase}" for phase, directory in phases.items())
        raise ReportError(f"runs of different phases have no common curves ({listed}); write one page per phase")
    return runs


def write_page(runs: Sequence[History], out: Path, status: str | None = None) -> tuple[Path, Path]:
    """Write the page and its PNG; returns both paths. ``status`` of a single run, if the caller knows it: running,
    stopped. Raises OSError if a file cannot be written.
    """
    image = out.with_suffix(".png")
    states = [status or _status(run) for run in runs]
    labels = run_labels(runs)
    lines = run_plots.make_lines(labels, runs)
    phase = runs[0].cfg.train.phase
    with matplotlib.rc_context(plots.STYLE):
        panels = run_plots.visible_panels(lines, phase)
        picture = plots.png(run_plots.curves_figure(lines, panels))
        curves = [plots.svg(run_plots.panel_figure(lines, panel), panel.key) for panel in panels]
        health = run_plots.health_figures(runs[0]) if len(runs) == 1 else []
        bars = _memory_bars(runs, labels)
        memory = plots.inline(lambda width: _memory_figure(bars, width), "memory") if bars else ""
    values: dict[str, object] = {
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "phase": phase,
        "curves": curves,
        "curves_of_health": [plots.svg(figure, key) for key, figure in health],
        "drawing": memory,
        "keys": [
            (line.label, line.color, "" if line.style == "-" else " ".join(str(2 * part) for part in line.style[1]))
            for line in lines
        ],
        "bars": bars,
        "kinds": [(kind, KINDS.get(kind, kind.replace("_", " "))) for kind in _nonzero_kinds(bars)],
        "totals": [(kind, word) for kind, word in TOTALS.items() if any(kind in memory for _, memory in bars)],
        "pills": _PILLS,
        "configs": [(label, to_yaml(run.cfg)) for label, run in zip(labels, runs, strict=True)],
        "title": labels[0] if len(runs) == 1 else f"{len(runs)} runs",
    }
    if len(runs) == 1:
        html = page_parts.render(
            "run.html.jinja", page_parts.TEMPLATES, **values, **_single_run_values(runs[0], states[0])
        )
    else:
        html = page_parts.render(
            "runs.html.jinja", page_parts.TEMPLATES, **values, **_multi_run_values(runs, labels, states)
        )
    out.parent.mkdir(parents=True, exist_ok=True)
    atomic_write.write_bytes(image, picture, shared=True)
    atomic_write.write_text(out, html, shared=True)  # last, so that a page always has its picture
    return out, image


def run_labels(runs: Sequence[History]) -> list[str]:
    """Return labels for runs: the shortest distinct suffixes of their paths."""
    folders = [run.directory.resolve().parts for run in runs]
    for length in range(1, max(map(len, folders)) + 1):
        ends = ["/".join(folder[-length:]) for folder in folders]
        if len(set(ends)) == len(ends):
            break
    return ends


def _status(run: History) -> str:
    return "finished" if run.result.get("status") == "finished" else NOT_FINISHED


def _memory_bars(runs: Sequence[History], labels: Sequence[str]) -> list[tuple[str, Mapping[str, int]]]:
    """Return memory by kind: measured and predicted for a single run, measured for several."""
    if len(runs) > 1:
        return [(label, run.memory) for label, run in zip(labels, runs, strict=True) if run.memory]
    bars = (("measured", runs[0].memory), ("predicted", runs[0].predicted))
    return [(label, memory) for label, memory in bars if memory]


def _memory_figure(bars: Sequence[tuple[str, Mapping[str, int]]], width: float) -> Any:
    kinds = _nonzero_kinds(bars)
    most = max(sum(memory.get(kind, 0) for kind in kinds) for _, memory in bars)
    return plots.memory_figure(bars, {kind: KINDS.get(kind, kind) for kind in kinds}, choose_unit(most), width)


def _nonzero_kinds(bars: Sequence[tuple[str, Mapping[str, int]]]) -> list[str]:
    """Return the kinds with nonzero bytes."""
    return [kind for kind in memory_kinds(bars) if any(memory.get(kind) for _, memory in bars)]


def _single_run_values(run: History, status: str) -> dict[str, Any]:
    """Return the template values that only the page of a single run has."""
    proof = read_json_file(run.directory / "proof.json")
    layers = sorted(layer_health([run.layers]), key=lambda layer: min(layer.sqnr.values(), default=math.inf))
    plain = [(step, dict(flatten(figures))) for step, figures in run.evals]
    # With fp8.adapt the plan changes during the run.
    plan = read_json_file(run.directory / "plan.json") if run.cfg.fp8.adapt is not None else run.plan
    return {
        "status": status,
        "line": _progress_line(run),
        "rings": run_plots.has_comparable_losses(run) and run.curve("eval/loss") is not None,
        "tiles": _tiles(run, proof, status),
        "steps": run.cfg.train.steps,
        "directory": str(run.directory),
        "evals": plain,
        "judged": [
            key
            for key in dict.fromkeys(key for _, figures in plain for key in figures)
            if key != "exact_match" or run_plots.shows_exact_match(run)
        ],
        "answers": run.answers(),
        "completions": run.completions(),
        "health": _health(run),
        "measured": run.measured,
        "adapts": run.cfg.fp8.adapt is not None,
        "moves": _move_rows(run),
        "rollouts": _rollouts(run),
        "checks": (checks := run.checks() if run.cfg.run.check_every else None),
        "faults": [{"step": line["step"], **fault} for line in checks or () for fault in _valid_faults(line)],
        "most_moves": MOVES,
        "layers": layers[:LAYERS],
        "more_layers": max(0, len(layers) - LAYERS),
        "roles": dict(zip(ROLES, ("x", "w", "dy", "x, wgrad", "dy, wgrad"), strict=True)),
        "groups": page_parts.plan_groups(plan),
        "notes": plan.get("notes") or [],
        "proof": proof,
        "counted": page_parts.gemm_counts(proof),
        "environment": flatten(read_json_file(run.directory / "environment.json")),
    }


def _progress_line(run: History) -> str:
    skipped = f", {run.skipped} skipped" if run.skipped else ""
    return f"step {run.step} of {run.cfg.train.steps}{skipped}"


def _tiles(run: History, proof: Mapping[str, Any], status: str) -> list[dict[str, str]]:
    """Return the key figures at the top of the page."""
    tiles = [{"figure": text, "word": word} for word, text in _key_figures(run, proof) if text]
    steps_left = run.cfg.train.total_steps - run.step
    left = steps_left * (run.figures["seconds"].median if "seconds" in run.figures else math.nan)
    if status == "running" and math.isfinite(left) and left:
        tiles.append({"figure": _duration(left), "word": f"remaining, for {count_noun(steps_left, 'step')}"})
    return tiles


def _key_figures(run: History, proof: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return the key figures of a run as (description, text); an empty text means unknown."""

    def of(key: str, text: Callable[[float], str], how: str = "newest") -> str:
        kind, _, name = key.partition("/")
        series = run.judged.get(name) if kind == "eval" else run.figures.get(key)
        value = math.nan if series is None else getattr(series, how)
        return text(value) if math.isfinite(value) else ""

    def share(value: float) -> str:
        return percent(value, 1)

    by_phase = {"rl": ("reward", "reward, last twentieth"), "preference": ("rewards/margins", "margin, last twentieth")}
    first = by_phase.get(run.cfg.train.phase, ("loss", "loss, last twentieth"))
    memory = sum(run.memory.get(kind, 0) for kind in memory_kinds([("", run.memory)]))
    # A run has at most one of the held-out losses of answers and of text, and its preference loss in addition.
    return [
        (first[1], of(first[0], format_number)),
        ("held-out loss", of("eval/loss", format_number, "last")),
        ("held-out preference loss", of("eval/preference_loss", format_number, "last")),
        ("held-out loss of answers", of("eval/answer_loss", format_number, "last")),
        (EXACT, of("eval/exact_match", share, "last") if run_plots.shows_exact_match(run) else ""),
        ("held-out reward", of("eval/reward", format_number, "last")),
        ("held-out pairs in order", of("eval/rewards/accuracies", share, "last")),
        ("of linear FLOPs in FP8, counted", share(float(proof["share"])) if proof.get("share") is not None else ""),
        ("tokens per second, median", of("tokens_per_s", lambda value: format_fixed(value, 0), "median")),
        ("seconds per step, median", of("seconds", format_number, "median")),
        ("memory, all kinds", format_bytes(memory) if memory else ""),
    ]


def _health(run: History) -> list[dict[str, Any]]:
    """Return the newest figures of each component, for its worst layer."""
    return [
        {"component": component, "color": color, **{name: series.last for name, series in figures.items()}}
        for (component, figures), color in zip(run.health.items(), run_plots.COLORS, strict=False)
    ]


def _valid_faults(line: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return the faults of a check that have all fields of the table."""
    fields = {"rank", "host", "device", "said"}
    faults = line["faults"] if isinstance(line["faults"], list) else []
    return [fault for fault in faults if isinstance(fault, dict) and fields <= fault.keys()]


def _move_rows(run: History) -> list[dict[str, Any]]:
    """Return the decisions of `fp8.adapt` with formatted figures, newest first."""
    return [
        {
            **row,
            "value": _format_figure(row["figure"], row["value"]),
            "threshold": _format_figure(row["figure"], row["threshold"]),
        }
        for row in reversed(run.moves())
    ]


def _rollouts(run: History) -> dict[str, object] | None:
    """Return what the page says about replicas (`rl.engine`), or None if the run has none."""
    if run.cfg.rl is None or run.cfg.rl.engine.name == "octavo":
        return None
    sent = run.fleet({"bytes", "seconds", "completions"})
    events = run.fleet({"event", "replica", "chunk", "reason"})
    numbers = [row for row in sent if all(isinstance(row[key], int | float) for key in ("bytes", "seconds"))]
    completions = sent[-1]["completions"] if sent and isinstance(sent[-1]["completions"], dict) else {}
    return {
        "engine": run.cfg.rl.engine.name,
        "replicas": run.cfg.rl.engine.replicas,
        "stale": run.cfg.rl.stale,
        "bytes": format_bytes(numbers[-1]["bytes"]) if numbers else "",
        "seconds": format_number(sorted(row["seconds"] for row in numbers)[len(numbers) // 2]) if numbers else "",
        "completions": [(str(replica), count) for replica, count in completions.items()],
        "events": events[::-1],
    }


def _format_figure(name: object, value: object) -> str:
    if not isinstance(value, int | float):
        return "not finite"
    kind = str(name).partition(" ")[0]
    if kind == "sqnr":
        return f"{value:.1f} dB"
    return percent(value, 2) if kind in ("underflow", "saturation") else format_fixed(value, 4)


def _multi_run_values(runs: Sequence[History], labels: Sequence[str], states: Sequence[str]) -> dict[str, Any]:
    """Return the template values that only the page of several runs has."""
    figures_of = [dict(_key_figures(run, read_json_file(run.directory / "proof.json"))) for run in runs]
    words = [word for word in figures_of[0] if any(figures[word] for figures in figures_of)]
    return {
        "words": words,
        "runs": [
            {
                "label": label,
                "status": status,
                "line": _progress_line(run),
                "figures": [figures[word] for word in words],
            }
            for label, status, run, figures in zip(labels, states, runs, figures_of, strict=True)
        ],
        "labels": labels,
        "differ": setting_differences(runs),
        "seeds": _seed_tables(runs, labels),
    }


def setting_differences(runs: Sequence[History]) -> list[tuple[str, list[str]]]:
    """Return the settings in which runs differ, except paths: the key, and the value of each run."""
    each = [dict(flatten(run.cfg.model_dump(mode="json"))) for run in runs]
    keys = dict.fromkeys(key for settings in each for key in settings)
    values_of = [
        (key, [settings.get(key, "") for settings in each]) for key in keys if key not in ("run.dir", "run.resume")
    ]
    return [(key, values) for key, values in values_of if len(set(values)) > 1]


def _seed_tables(runs: Sequence[History], labels: Sequence[str]) -> list[dict[str, Any]]:
    """Return groups of runs that only differ in the seed: the mean of their last figures, with Student's 95 %
    interval."""
    groups: dict[str, dict[int, int]] = {}
    for place, run in enumerate(runs):
        settings = run.cfg.model_dump(mode="json")
        seed = settings["run"]["seed"]
        settings["run"] = {}  # the seed and the directory differ within a group
        groups.setdefault(repr(settings), {}).setdefault(seed, place)
    tables = []
    for group in (list(group.values()) for group in groups.values() if len(group) > 1):
        rows = []
        for word, key, statistic in (
            ("loss, last twentieth", "loss", "newest"), ("reward, last twentieth", "reward", "newest"),
            ("held-out loss", "eval/loss", "last"), (EXACT, "eval/exact_match", "last"),
            ("held-out preference loss", "eval/preference_loss", "last"),
            ("held-out loss of answers", "eval/answer_loss", "last"),
            ("held-out reward", "eval/reward", "last"),
        ):  # fmt: skip
            if word == EXACT and not all(run_plots.shows_exact_match(runs[place]) for place in group):
                continue
            kind, _, name = key.partition("/")
            series = [
                runs[place].judged.get(name) if kind == "eval" else runs[place].figures.get(key) for place in group
            ]
            values = [math.nan if figure is None else float(getattr(figure, statistic)) for figure in series]
            if (interval := mean_gap(values)) is not None:
                rows.append(
                    (
                        word,
                        format_number(interval.estimate),
                        f"{format_number(interval.low)} to {format_number(interval.high)}",
                    )
                )
        tables.append({"runs": [labels[place] for place in group], "rows": rows})
    return tables


def _duration(seconds: float) -> str:
    minutes = math.ceil(seconds / 60)
    return f"{minutes // 60} h {minutes % 60:02d} min" if minutes >= 60 else f"{minutes} min"
