"""The run directory: entered once, continued or refused, never overwritten.

config.yaml        resolved; runs again unchanged
environment.json   machine, versions, the library that decoded images
plan.json          written before any weight is read
metrics.jsonl      a line per step
proof.json         the counted GEMMs; in phase rl also that steps train on the policy that generated
adapt.jsonl        precision changes of GEMMs, with fp8.adapt
checks.jsonl       recomputed steps, with run.check_every; it only grows, also when steps run again
gain.json          the measured speed of FP8, with run.gain_steps
answers.jsonl      the first answers of each evaluation
skipped.jsonl      rows that were left out, if any
checkpoints/       step_N, the newest `run.keep`
milestones/        step_N of `run.milestones`
reference.safetensors  log-probabilities of the reference, with preference.reference: disk
hf/                safetensors for from_pretrained; with lora instead adapter/, a PEFT folder
base.json          fingerprints of the frozen base, and that it did not change
page.html          with page.png and memory.json, by octavo train; tensorboard/ has event files
result.json        only when the run has finished
.lock              held while a process trains here

With `run.encrypt`, folders of weights and the reference are encrypted, answers, completions and skipped rows are lists
of encrypted lines (NAME.jsonl.aes), and no other file holds weights or words of the data.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from octavo import checkpoint, fp8
from octavo.base import encryption, safe_read, target_folder
from octavo.base.atomic_write import write_bytes, write_text
from octavo.checkpoint import compat
from octavo.checkpoint.run_state.files import read_state
from octavo.config import Config, ConfigError, load_config, to_yaml
from octavo.fp8 import planning
from octavo.fp8.planning import Schedule
from octavo.fp8.proof import Prediction
from octavo.parallel import World
from octavo.train.errors import TrainError
from octavo.train.run_dir import encryption_rules, input_fingerprints, start_from
from octavo.train.run_dir.run_lock import LOCK, RunLock

CONFIG, PLAN, PROOF, GAIN, RESULT = "config.yaml", "plan.json", "proof.json", "gain.json", "result.json"
METRICS, ADAPT, CHECKS = "metrics.jsonl", "adapt.jsonl", "checks.jsonl"
CHECKPOINTS, MILESTONES = "checkpoints", "milestones"

# The form of the counters in a checkpoint, checked on reading, because the code below uses them unchecked.
_COUNTERS = {
    **dict.fromkeys(("step!", "rows!", "window", "pack", "packs"), safe_read.COUNT),
    **dict.fromkeys(("tokens", "skipped", "in_a_row", "overflowed", "learnt"), safe_read.COUNT),
    "seconds": safe_read.FINITE, "health": {}, "settings!": {}, "data": {},
    "loss_scale": {"value!": safe_read.FINITE, "good!": safe_read.COUNT},
    "start_from": {"path!": safe_read.TEXT, "crc32!": safe_read.COUNT},
    "adapt": [{
        **dict.fromkeys(("layer!", "gemm!", "word!", "why"), safe_read.TEXT),
        **dict.fromkeys(("rung!", "healthy", "step"), safe_read.COUNT),
    }],
}  # fmt: skip


@dataclass
class Progress:
    """The progress of a run:

    step        optimizer steps done
    rows        of the data consumed
    window, pack, packs  of the next pack: its window, number in the window, and the checksum of the window's packs
    tokens      trained on
    skipped     steps that were not finite, `in_a_row` of them just now
    overflowed  steps whose gradients overflowed FP16
    learnt      the last step that held a token with a loss
    seconds     of training
    health      the last FP8 health summary
    """

    step: int = 0
    rows: int = 0
    window: int = 0
    pack: int = 0
    packs: int = 0
    tokens: int = 0
    skipped: int = 0
    in_a_row: int = 0
    overflowed: int = 0
    learnt: int = 0
    seconds: float = 0.0
    health: Mapping[str, float] = field(default_factory=dict)

    @property
    def empty(self) -> int:
        """Steps in a row, up to now, without a token with a loss."""
        return self.step - self.learnt

    def after(
        self,
        step: int,
        rows: int,
        place: tuple[int, int, int],
        tokens: int,
        seconds: float,
        applied: bool,
        learnt: bool,
        overflow: bool = False,
    ) -> None:
        """Record a step. `place`: (window, pack, checksum) of the next pack; `learnt`: it held a token with a loss;
        `overflow`: it was skipped to lower the loss scale, which says nothing about the weights."""
        self.step, self.rows = step, rows
        self.window, self.pack, self.packs = place
        self.learnt = step if learnt else self.learnt
        self.tokens += tokens
        self.seconds += seconds
        self.skipped += not applied and not overflow
        self.overflowed += overflow
        self.in_a_row = 0 if applied else self.in_a_row + (not overflow)

    @classmethod
    def of(cls, counters: Mapping[str, Any]) -> Progress:
        """From :meth:`counters`."""
        known = compat.complete_counters(counters)
        return cls(**{f.name: known[f.name] for f in fields(cls) if f.name in known})

    def counters(self, cfg: Config, files: input_fingerprints.Prints) -> dict[str, Any]:
        """The counters of a checkpoint: these numbers, and the settings and files that a resume must match."""
        return {**asdict(self), "settings": settings(cfg), **files}


@dataclass(frozen=True)
class Start:
    """Where a run begins.

    directory   of the run
    checkpoint  to load (None: start from the first weights)
    rows, step  done so far
    files       fingerprints of its inputs
    result      of a run that has finished already
    forked      the checkpoint belongs to another run, whose plan and FP8 settings may differ
    first       record of the checkpoint with its first weights (`start_from.note`; None: those of model.path)
    place       (window, number in it, checksum) of the next pack
    """

    directory: Path
    checkpoint: Path | None = None
    rows: int = 0
    step: int = 0
    files: input_fingerprints.Prints = field(default_factory=dict)
    result: Mapping[str, Any] | None = None
    forked: bool = False
    first: Mapping[str, Any] | None = None
    place: tuple[int, int, int] = (0, 0, 0)


def skipped(cfg: Config) -> Path:
    """The file that lists rows that were left out or noted."""
    return Path(cfg.run.dir) / ("skipped.jsonl" + encryption.SUFFIX * cfg.run.encrypt)


def settings(cfg: Config) -> dict[str, Any]:
    """The settings that determine a run's numbers: all except where it runs, how ranks share the model, what it writes,
    data workers, fetch sizes, garbage collection, and what backward recomputes or offloads. So a run that ran out of
    memory continues with more recomputation, to the same bits; not with compiled blocks, whose graphs would then sum
    in another order. Also excluded: how many completions are generated at a time, which changes log-probabilities only
    by rounding, and which of them are logged."""
    values = cfg.model_dump(mode="json")
    values["run"] = {"seed": cfg.run.seed}
    values["data"].pop("workers")
    values.pop("parallel")
    for entry in (*values["data"]["train"], *values["data"]["eval"]):
        entry.pop("fetch_gb")
    values["train"].pop("gc")
    for key in () if cfg.train.compile else ("recompute", "offload_activations", "synchronize_per_layer"):
        values["train"].pop(key)
    for key in ("slots", "pages", "show", "reward_timeout") if values["rl"] else ():
        values["rl"].pop(key)
    return values


def enter(
    cfg: Config, world: World, log: Callable[[str], None], lock: RunLock, prints: Mapping[str, str] | None = None
) -> Start:
    """Create or reopen `run.dir` as `run.resume` says, and `lock` it on the main rank. A collective.

    Existing files are not changed before `settle`.

    never   the directory must be new or empty
    auto    continue from its newest good checkpoint; without a checkpoint or a run, start a new run
    PATH    continue from that checkpoint, in its own run or in a directory that is new or empty

    A new run starts from the checkpoint that `run.fork` names, or with the weights of `run.start_from`.

    ``prints``: fingerprints of further inputs that determine the run's numbers
    (:meth:`octavo.train.setup.phase.Phase.prints`).

    The directory of a run that failed before its first step counts as empty.

    Raises TrainError for a directory that holds something else or is in use, and for settings, data files or files of
    the model folder that have changed since the checkpoint, naming them.
    """
    directory = Path(cfg.run.dir)
    known = world.run_on_main(lambda: _locked(cfg, directory, lock, log))
    if dead := known.get("dead"):
        log(f"{directory} has a result, but {dead}: the run has not finished, and continues from its good checkpoints")
    if known["result"] is not None:
        return Start(directory, result=known["result"])
    if cfg.run.resume not in ("never", "auto"):
        chosen: Path | None = Path(cfg.run.resume)
    elif known["run"]:
        chosen = checkpoint.latest(directory / CHECKPOINTS, world, log)
    else:
        chosen = None
    forked = chosen is None and cfg.run.fork is not None
    if forked:
        chosen = Path(str(cfg.run.fork))
    begins_with = None if chosen is not None or cfg.run.start_from is None else Path(cfg.run.start_from)
    first = None if begins_with is None else start_from.find(begins_with, cfg, world, log)
    prepared = world.run_on_main(lambda: _prepare(cfg, directory, chosen, first, forked, prints, log))
    if known["run"] and chosen is None:
        log(f"{directory} holds a run that has no checkpoint yet; it starts from the beginning")
    prepared["place"] = tuple(prepared["place"])  # JSON has no tuples
    return Start(directory, chosen, forked=forked, **prepared)


def settle(start: Start, world: World, log: Callable[[str], None] = lambda text: None) -> None:
    """Remove what lies after the point from which the run continues: its result, later checkpoints, later metrics.
    Among its checkpoints, files that it did not write stay, and `log` receives their names. A collective.

    Called after the checkpoint is loaded, so that an unreadable one costs nothing. Checkpoints are removed before
    their metrics: after a kill in between, `auto` must not continue from a checkpoint without its metrics.
    """

    def remove() -> None:
        (start.directory / RESULT).unlink(missing_ok=True)
        gain = read_json(start.directory / GAIN)
        safe_read.check_schema(gain or {}, {"step": safe_read.COUNT}, start.directory / GAIN, TrainError)
        if gain is not None and gain.get("step", 0) > start.step:  # measured in steps that will run again
            (start.directory / GAIN).unlink()
        folder = start.directory / CHECKPOINTS
        # Among the later ones is any damaged checkpoint that `auto` skipped.
        if start.checkpoint is not None and start.checkpoint.resolve().parent == folder.resolve():
            problems = checkpoint.prune(folder, start.step, keep=len(checkpoint.steps(folder)))
            if problems and any(step > start.step for step in checkpoint.steps(folder)):
                raise TrainError(f"{problems[0]}: run.resume=auto would continue from it. Delete it, and start again")
        for place in (folder, start.directory / MILESTONES):
            if others := checkpoint.foreign_entries(place):
                log(
                    f"note: the run did not write these in {place}, and neither reads nor deletes them: "
                    f"{', '.join(others)}. One that is in the way of a save is renamed to NAME{checkpoint.MOVED_SUFFIX}"
                )
        truncate_metrics(start.directory / METRICS, start.step)
        truncate_metrics(start.directory / ADAPT, start.step)

    world.run_on_main(remove)


def _locked(cfg: Config, directory: Path, lock: RunLock, log: Callable[[str], None]) -> dict[str, Any]:
    """What the directory holds, read under its lock."""
    if not (directory / LOCK).exists():
        _look(cfg, directory)  # so that a refused directory gets no lock file
    lock.take(directory, log)
    state = _look(cfg, directory)
    dead = None if state["result"] is None else _dead(directory, state["result"])
    return state if dead is None else {"run": True, "result": None, "dead": dead}


def _dead(directory: Path, result: Mapping[str, Any]) -> str | None:
    """Why a run with a result has not finished after all; None if it has."""

    def last() -> str | None:
        steps = checkpoint.steps(directory / CHECKPOINTS)
        if not steps or steps[-1] != result["steps"]:
            return None
        newest = directory / CHECKPOINTS / f"step_{steps[-1]}"
        bad = checkpoint.describe_nonfinite(newest, read_state(newest))
        return None if bad is None else f"in {newest} {bad}"

    return compat.why_not_finished(result, last)


def _look(cfg: Config, directory: Path) -> dict[str, Any]:
    """What the directory holds. Refuses a directory that must not be changed, and a name under which no model can be
    written, because `hf/` would fail only at the end of training."""
    target_folder.check_target(directory, TrainError)
    if directory.exists() and not directory.is_dir():
        raise TrainError(f"run.dir {directory} is a file; name a directory that is new or empty")
    # A name with a dot is a temporary file of a run that was killed before it had a configuration.
    names = sorted(p.name for p in directory.iterdir() if not p.name.startswith(".")) if directory.is_dir() else []
    resume = cfg.run.resume
    if resume not in ("never", "auto"):
        _check_checkpoint(Path(resume))
        inside = Path(resume).resolve().parent == (directory / CHECKPOINTS).resolve()
        if names and not inside:
            raise TrainError(
                f"run.resume={resume} continues another run, but run.dir {directory} is not empty. Name a new run.dir, "
                f"or one of the checkpoints in {directory / CHECKPOINTS}"
            )
        return {"run": inside, "result": None}
    if not names:
        return {"run": False, "result": None}
    if CONFIG not in names:
        raise TrainError(
            f"run.dir {directory} is not empty ({', '.join(names[:3])}) and holds no run of Octavo. Name a directory "
            "that is new or empty; nothing is overwritten"
        )
    if not _has_begun(directory):
        return {"run": False, "result": None}
    if resume == "never":
        steps = checkpoint.steps(directory / CHECKPOINTS)
        reached = f"with checkpoints up to step {steps[-1]}" if steps else "without a checkpoint yet"
        raise TrainError(
            f"run.dir {directory} holds a run {reached}, and nothing is overwritten. Continue it with run.resume=auto, "
            "or name another run.dir"
        )
    _same_settings(_saved_settings(directory), cfg, directory)
    if (result := read_json(directory / RESULT)) is None or result.get("status") != "finished":
        return {"run": True, "result": None}
    if not isinstance(result.get("steps"), int):
        raise TrainError(f"{directory / RESULT} is damaged (no number of steps); delete it and start again")
    return {"run": True, "result": result}


def _has_begun(directory: Path) -> bool:
    """Whether a run in it has a step, a checkpoint or a result."""
    metrics = directory / METRICS
    if metrics.exists():
        safe_read.open_file(metrics, TrainError).close()  # refuses a pipe, which would block when it is written to
    steps = metrics.exists() and metrics.stat().st_size > 0
    return steps or (directory / RESULT).exists() or any((directory / CHECKPOINTS).glob("*"))


def _prepare(
    cfg: Config,
    directory: Path,
    chosen: Path | None,
    first: Path | None,
    forked: bool,
    prints: Mapping[str, str] | None,
    log: Callable[[str], None],
) -> dict[str, Any]:
    """Check that the run may begin there, and write its configuration; returns fields of `Start`."""
    step, rows, place, files = (
        0,
        0,
        (0, 0, 0),
        {**input_fingerprints.fingerprints(cfg, log), "phase": dict(prints or {})},
    )
    begun = None if first is None else start_from.note(first)
    if chosen is not None:
        _check_checkpoint(chosen)
        encryption_rules.refuse_plain(chosen, cfg)
        start_from.refuse_without_states(chosen)
        counters = read_state(chosen)["counters"]
        safe_read.check_schema(counters, _COUNTERS, chosen / "state.json", TrainError)
        saved = _complete(counters["settings"])
        _same_settings({**saved, **_fork_may(saved, settings(cfg))} if forked else saved, cfg, chosen)
        input_fingerprints.same(counters, files, chosen, cfg.model.path)
        step, rows = counters["step"], counters["rows"]
        known = compat.complete_counters(counters)
        place = known["window"], known["pack"], known["packs"]
        begun = start_from.noted(counters, cfg, chosen)
    directory.mkdir(parents=True, exist_ok=True)
    if (directory / CHECKPOINTS).is_dir():
        checkpoint.remove_leftovers(directory / CHECKPOINTS)  # removes unfinished saves of a killed process
    if not (directory / CONFIG).exists() or not _has_begun(directory):
        write_text(directory / CONFIG, to_yaml(cfg))
    return {"rows": rows, "place": place, "step": step, "files": files, "first": begun}


def _fork_may(saved: Mapping[str, Any], forks: Mapping[str, Any]) -> dict[str, Any]:
    """The settings in which a fork may differ from its origin, with the fork's values. The optimizer's state formats
    may not differ, because the states come from the checkpoint."""
    free = ("recompute", "offload_activations", "compile", "logits", "gather", "exchange")
    train = {key: forks["train"].get(key) for key in free}
    return {
        "fp8": forks["fp8"],
        "run": forks["run"],
        "model": {**saved["model"], **{key: forks["model"][key] for key in ("load_in_fp8", "keep_fp8")}},
        "data": {**saved["data"], "eval": forks["data"]["eval"]},
        "train": {**saved["train"], **{key: value for key, value in train.items() if key in forks["train"]}},
    }


def _check_checkpoint(path: Path) -> None:
    if (path / "state.json").is_file():
        return
    if not path.exists():
        raise TrainError(f"{path} does not exist; name a checkpoint such as runs/first/checkpoints/step_200")
    inner = path / CHECKPOINTS if (path / CHECKPOINTS).is_dir() else path
    steps = checkpoint.steps(inner)
    fix = f"name one of its checkpoints, e.g. {inner / f'step_{steps[-1]}'}" if steps else "it holds no checkpoint"
    raise TrainError(f"{path} is not a checkpoint: {fix}")


def _saved_settings(directory: Path) -> dict[str, Any]:
    try:
        return settings(load_config(directory / CONFIG))
    except ConfigError as error:
        raise TrainError(f"{directory / CONFIG} cannot be read, so the run cannot be continued: {error}") from error


def _complete(saved: Mapping[str, Any]) -> Mapping[str, Any]:
    """The settings of a checkpoint, with defaults for keys that were added later: they describe what it did."""
    try:
        return settings(Config.model_validate(saved, context={"rules": "later"}))
    except ValueError:  # a removed key or value, which is reported as a difference
        return saved


def _same_settings(saved: Mapping[str, Any], cfg: Config, where: Path) -> None:
    changed = list(_differences(saved, settings(cfg)))
    if changed:
        shown = "; ".join(f"{key} was {old!r}, is now {new!r}" for key, old, new in changed)
        if any(key == "train.steps" for key, _, _ in changed):
            shown += " (if train.epochs was given, they are computed from the rows of data.train: did those change?)"
        raise TrainError(
            f"{where} was made with other settings: {shown}. A resumed run continues with the same model, data, "
            "schedule and FP8 settings (run.* may change, the seed may not; train.gc may; train.recompute may, where "
            "blocks are not compiled; rl.slots, pages, show and reward_timeout may); restore them, or start a new run "
            "in another run.dir"
        )


def _differences(old: Any, new: Any, key: str = "") -> Iterator[tuple[str, Any, Any]]:
    if isinstance(old, Mapping) and isinstance(new, Mapping):
        for name in dict.fromkeys([*old, *new]):
            yield from _differences(old.get(name), new.get(name), f"{key}.{name}" if key else name)
    elif old != new:
        yield key, old, new


def append_lines(file: Path, lines: Iterable[str]) -> None:
    """Append lines, each with its newline, to a file of the run; encrypted if its name ends in `.aes`."""
    if file.suffix == encryption.SUFFIX:
        encryption.append_lines(file, lines)
        return
    with file.open("a", encoding="utf-8", errors="backslashreplace") as out:
        out.writelines(lines)


def truncate_metrics(file: Path, step: int) -> None:
    """Drop the lines after `step`, and a half-written last one, atomically: they will be written again."""
    if not file.exists():
        return
    if file.suffix == encryption.SUFFIX:
        lines = safe_read.read_bytes(file, TrainError).split(b"\n")[:-1]
        earlier = [line for line in lines if json.loads(encryption.decrypt_line(line, file))["step"] <= step]
        write_bytes(file, b"".join(line + b"\n" for line in earlier))
        return
    rows = [row for row in read_rows(file) if row["step"] <= step]
    write_text(file, "".join(json.dumps(row) + "\n" for row in rows))


def read_rows(file: Path) -> list[dict[str, Any]]:
    """The rows of metrics.jsonl, without an unfinished last line of a killed process."""
    if not file.exists():
        return []
    rows = []
    try:
        for number, row in safe_read.json_lines(file):
            safe_read.check_schema(row, {"step!": safe_read.COUNT}, f"{file}:{number}")
            rows.append(row)
    except safe_read.Unreadable as error:
        raise TrainError(f"{error} The file was changed; delete that line.") from error
    return rows


def read_json(file: Path) -> dict[str, Any] | None:
    """The JSON object in a file, or None if the file does not exist."""
    if not file.exists():
        return None
    try:
        return dict(safe_read.read_json(file))
    except safe_read.Unreadable as error:
        raise TrainError(f"{file} is damaged; delete it and start again ({error})") from error


def write_plan(
    directory: Path, family: str, plans: Schedule, plan: fp8.Plan, notes: tuple[str, ...], prediction: Prediction | None
) -> None:
    """Write plan.json: the output of `octavo plan --json` for the newest `plan`, and a plan file for `fp8.plan`
    (`octavo.fp8.planning.file`)."""
    document = {"family": family, **planning.document(plans.main, plan, plans.spans), "notes": list(notes)}
    if prediction is not None:
        document["prediction"] = prediction.to_json()
    write_json(directory / PLAN, document)


def update_plan(directory: Path, plan: fp8.Plan) -> None:
    """Update plan.json to a new current plan; the rest of the file describes the plans of the whole run."""
    document = read_json(directory / PLAN) or {}
    current = {key: value for key, value in plan.to_json().items() if key != "notes"}
    write_json(directory / PLAN, {**document, **current})


def write_json(file: Path, value: Any) -> None:
    """Write indented JSON to a temporary file and rename it."""
    write_text(file, json.dumps(value, indent=2, default=str) + "\n")
