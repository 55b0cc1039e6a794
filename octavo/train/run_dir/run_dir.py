"""The run directory. A run creates or resumes its directory and never overwrites other files.

config.yaml        the resolved configuration; can be rerun as is
environment.json   machine, versions, the library that decoded images
plan.json          written before any weight is read
metrics.jsonl      a line per step, of all stages
proof.json         the counted GEMMs; in phase rl also evidence that steps train the policy that generated
adapt.jsonl        precision changes of GEMMs, with fp8.adapt
checks.jsonl       recomputed steps, with run.check_every; append-only, even if steps are repeated
gain.json          the measured speed of FP8, with run.gain_steps
answers.jsonl      the first answers of each evaluation
skipped.jsonl      rows that were left out, if any
checkpoints/       step_N, the newest `run.keep`
milestones/        step_N of `run.milestones`
reference.safetensors  log-probabilities of the reference, with preference.reference: disk
hf/                safetensors for from_pretrained; with lora instead adapter/, a PEFT folder
base.json          fingerprints of the frozen base, and that it did not change
page.html          with page.png and memory.json, by octavo train; tensorboard/ has event files
result.json        written when the run has finished
stages/            with train.stages: their configuration, and the directories 1, 2, ... of all but the last
previous_N/        files of an earlier run that ended before its first checkpoint
.lock              held while a process trains here

With `run.encrypt`, folders of weights and the reference are encrypted, answers, completions and skipped rows are lists
of encrypted lines (NAME.jsonl.aes), and no other file contains weights or text of the data.
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
from octavo.config.stage_folders import STAGES
from octavo.fp8 import planning
from octavo.fp8.planning import Schedule
from octavo.fp8.proof import Prediction
from octavo.parallel import World
from octavo.train.errors import TrainError
from octavo.train.run_dir import earlier_run, encryption_rules, finished_run, input_fingerprints, start_from
from octavo.train.run_dir.file_names import (  # noqa: F401 (names of this module, too)
    ADAPT,
    CHECKPOINTS,
    CHECKS,
    CONFIG,
    GAIN,
    METRICS,
    MILESTONES,
    PLAN,
    PROOF,
    RESULT,
)
from octavo.train.run_dir.run_lock import LOCK, RunLock

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

# Fields of `Progress` with another name in checkpoints.
_STORED_NAMES = {"consecutive_skips": "in_a_row", "last_loss_step": "learnt"}


@dataclass
class Progress:
    """The progress of a run.

    step                 optimizer steps done
    rows                 data rows consumed
    window, pack, packs  position of the next pack: window, number in the window, checksum of the window's packs
    tokens               tokens trained on
    skipped              steps that were skipped because loss or gradient was not finite
    consecutive_skips    such steps since the last applied step
    overflowed           steps that were skipped because gradients overflowed FP16
    last_loss_step       the last step that had a token with a loss
    seconds              seconds of training
    health               the last FP8 health summary
    """

    step: int = 0
    rows: int = 0
    window: int = 0
    pack: int = 0
    packs: int = 0
    tokens: int = 0
    skipped: int = 0
    consecutive_skips: int = 0
    overflowed: int = 0
    last_loss_step: int = 0
    seconds: float = 0.0
    health: Mapping[str, float] = field(default_factory=dict)

    @property
    def empty(self) -> int:
        """Number of steps since the last step that had a token with a loss."""
        return self.step - self.last_loss_step

    def record_step(
        self,
        step: int,
        rows: int,
        pack_position: tuple[int, int, int],
        tokens: int,
        seconds: float,
        applied: bool,
        has_loss: bool,
        overflow: bool = False,
    ) -> None:
        """Record a step.

        pack_position  (window, pack, checksum) of the next pack
        has_loss       True if a token of the step had a loss
        overflow       True if the step was skipped only because the loss scale was too large
        """
        self.step, self.rows = step, rows
        self.window, self.pack, self.packs = pack_position
        self.last_loss_step = step if has_loss else self.last_loss_step
        self.tokens += tokens
        self.seconds += seconds
        self.skipped += not applied and not overflow
        self.overflowed += overflow
        self.consecutive_skips = 0 if applied else self.consecutive_skips + (not overflow)

    @classmethod
    def from_counters(cls, counters: Mapping[str, Any]) -> Progress:
        """Return the progress that :meth:`counters` stored."""
        known = compat.complete_counters(counters)
        keys = {spec.name: _STORED_NAMES.get(spec.name, spec.name) for spec in fields(cls)}
        return cls(**{name: known[key] for name, key in keys.items() if key in known})

    def counters(self, cfg: Config, files: input_fingerprints.Fingerprints) -> dict[str, Any]:
        """Return the counters of a checkpoint: these numbers, the settings, and the fingerprints of the inputs."""
        numbers = {_STORED_NAMES.get(name, name): value for name, value in asdict(self).items()}
        return {**numbers, "settings": settings(cfg), **files}


@dataclass(frozen=True)
class Start:
    """The state from which a run starts.

    directory   the run directory
    checkpoint  checkpoint to load, or None to start from the initial weights
    rows, step  rows consumed and steps done so far
    files       fingerprints of the run's inputs
    result      result.json of a run that has already finished, else None
    forked      True if the checkpoint belongs to another run, whose plan and FP8 settings may differ
    initial_weights  record of the checkpoint that they come from (`start_from.make_note`), or None for model.path
    pack_position    (window, number in the window, checksum) of the next pack
    """

    directory: Path
    checkpoint: Path | None = None
    rows: int = 0
    step: int = 0
    files: input_fingerprints.Fingerprints = field(default_factory=dict)
    result: Mapping[str, Any] | None = None
    forked: bool = False
    initial_weights: Mapping[str, Any] | None = None
    pack_position: tuple[int, int, int] = (0, 0, 0)


def skipped_path(cfg: Config) -> Path:
    """Return the file that lists the rows that were skipped or noted."""
    return Path(cfg.run.dir) / ("skipped.jsonl" + encryption.SUFFIX * cfg.run.encrypt)


def settings(cfg: Config) -> dict[str, Any]:
    """Return the settings that determine a run's numbers.

    Excluded are `run` except its seed, parallelism, data workers, fetch sizes, garbage collection, recomputation and
    offloading, so a run that ran out of memory can resume with more recomputation, bit-identically. Compiled blocks
    include recomputation, because their graphs sum in a different order. Also excluded are the number of completions
    generated at a time, which changes log-probabilities only by rounding, and the number of logged completions.
    """
    values = cfg.model_dump(mode="json")
    del values["preset"], values["parallel"]  # the settings of a preset are in their sections
    values["run"] = {"seed": cfg.run.seed}
    values["data"].pop("workers")
    for entry in (*values["data"]["train"], *values["data"]["eval"]):
        entry.pop("fetch_gb")
    values["train"].pop("gc")
    values["train"].pop("stages")  # each is a run
    for key in () if cfg.train.compile else ("recompute", "offload_activations", "synchronize_per_layer"):
        values["train"].pop(key)
    for key in ("slots", "pages", "show", "reward_timeout") if values["rl"] else ():
        values["rl"].pop(key)
    return values


def enter(
    cfg: Config, world: World, log: Callable[[str], None], lock: RunLock, fingerprints: Mapping[str, str] | None = None
) -> Start:
    """Create or reopen `run.dir` according to `run.resume`, and `lock` it on the main rank. Collective call.

    Existing files are not changed before `discard_later_files`. Values of `run.resume`:

    never   the directory must be new or empty
    auto    resume from the newest good checkpoint, or start a new run; files of an earlier one move to `previous_N/`
    PATH    resume from that checkpoint, in its own run directory or in one that is new or empty

    A new run starts from the checkpoint `run.fork` or the weights of `run.start_from`. The directory of a run that
    failed before its first step counts as empty; its files move, too. ``fingerprints`` are `Phase.fingerprints`.

    Raises TrainError if the directory is in use or contains other files, and if settings, data files or files of the
    model folder have changed since the checkpoint, or since the run finished; the message names them.
    """
    directory = Path(cfg.run.dir)
    known = world.run_on_main(lambda: _lock_and_inspect(cfg, directory, lock, log))
    if dead := known.get("dead"):
        log(f"{directory} has a result, but {dead}: the run has not finished; it resumes from its last good checkpoint")
    if (result := known["result"]) is not None:
        world.run_on_main(lambda: finished_run.check_same_inputs(directory, result, cfg, fingerprints or {}, log))
        return Start(directory, result=result)
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
    weights = None if begins_with is None else start_from.find_initial_weights(begins_with, cfg, world, log)
    prepared = world.run_on_main(
        lambda: _prepare(cfg, directory, chosen, weights, forked, fingerprints, log, "earlier" in known)
    )
    position = tuple(prepared.pop("pack_position"))  # JSON has no tuples
    return Start(directory, chosen, forked=forked, pack_position=position, **prepared)


def discard_later_files(start: Start, world: World, log: Callable[[str], None] = lambda text: None) -> None:
    """Remove the result, checkpoints and changes of precision after the step from which the run resumes.

    Unknown files in the checkpoint folders stay, and their names are logged. Called after the checkpoint was loaded, so
    nothing is removed if it is unreadable. Collective call.
    """

    def remove() -> None:
        (start.directory / RESULT).unlink(missing_ok=True)
        gain = read_json(start.directory / GAIN)
        safe_read.check_schema(gain or {}, {"step": safe_read.COUNT}, start.directory / GAIN, TrainError)
        if gain is not None and gain.get("step", 0) > start.step:  # measured in a step that will run again
            (start.directory / GAIN).unlink()
        folder = start.directory / CHECKPOINTS
        # A damaged checkpoint that `auto` skipped is among the later ones.
        if start.checkpoint is not None and start.checkpoint.resolve().parent == folder.resolve():
            problems = checkpoint.prune(folder, start.step, keep=len(checkpoint.steps(folder)))
            if problems and any(step > start.step for step in checkpoint.steps(folder)):
                raise TrainError(f"{problems[0]}: run.resume=auto would resume from it. Delete it and start again")
        for place in (folder, start.directory / MILESTONES):
            if others := checkpoint.foreign_entries(place):
                log(
                    f"note: {place} contains entries that the run did not write and will not read or delete: "
                    f"{', '.join(others)}. An entry in the way of a save is renamed to NAME{checkpoint.MOVED_SUFFIX}"
                )
        truncate_metrics(start.directory / ADAPT, start.step)

    world.run_on_main(remove)


def _lock_and_inspect(cfg: Config, directory: Path, lock: RunLock, log: Callable[[str], None]) -> dict[str, Any]:
    """Lock the directory and return its state: "run" (bool), "result", and "dead" (why a result is invalid)."""
    if not (directory / LOCK).exists():
        _inspect(cfg, directory)  # before the lock, so that no lock file is written to a refused directory
    lock.take(directory, log)
    state = _inspect(cfg, directory)
    dead = None if state["result"] is None else finished_run.why_not_finished(directory, state["result"])
    return state if dead is None else {"run": True, "result": None, "dead": dead}


def _inspect(cfg: Config, directory: Path) -> dict[str, Any]:
    """Return the state of the directory. Raises TrainError if it must not change, or if hf/ could not be written."""
    target_folder.check_target(directory, TrainError)
    if directory.exists() and not directory.is_dir():
        raise TrainError(f"run.dir {directory} is a file; name a directory that is new or empty")
    # A name with a dot is a temporary file of a run that was killed before it had a configuration.
    names = sorted(p.name for p in directory.iterdir() if not p.name.startswith(".")) if directory.is_dir() else []
    is_staged = CONFIG not in names and (directory / STAGES).is_dir()
    if is_staged and earlier_run.continues_stage(cfg.run.start_from, directory):
        return {"run": False, "result": None}  # as in a run, other files may be there, too
    resume = cfg.run.resume
    if resume not in ("never", "auto"):
        _check_checkpoint(Path(resume))
        inside = Path(resume).resolve().parent == (directory / CHECKPOINTS).resolve()
        if names and not inside:
            raise TrainError(
                f"run.resume={resume} resumes a different run, but run.dir {directory} is not empty. Name a new "
                f"run.dir, or one of the checkpoints in {directory / CHECKPOINTS}"
            )
        return {"run": inside, "result": None}
    if not names:
        return {"run": False, "result": None}
    earlier_run.check_written_by_run(directory, names)
    is_binding = earlier_run.is_binding(directory)
    if resume == "never" and (is_binding or earlier_run.has_steps(directory)):
        steps = checkpoint.steps(directory / CHECKPOINTS)
        reached = f"with checkpoints up to step {steps[-1]}" if steps else "without a checkpoint yet"
        fix = "Resume it with run.resume=auto" if is_binding else "With run.resume=auto it makes room for a new run"
        reason = f"run.dir {directory} contains a run {reached}, and nothing is overwritten"
        raise TrainError(f"{reason}. {fix}, or name another run.dir")
    if not is_binding:
        return {"run": False, "result": None, "earlier": True}
    _check_same_settings(_saved_settings(directory), cfg, directory)
    if (result := read_json(directory / RESULT)) is None or result.get("status") != "finished":
        return {"run": True, "result": None}
    if not isinstance(result.get("steps"), int):
        raise TrainError(f"{directory / RESULT} is damaged (no number of steps); delete it and start again")
    return {"run": True, "result": result}


def _prepare(
    cfg: Config,
    directory: Path,
    chosen: Path | None,
    weights: Path | None,
    forked: bool,
    fingerprints: Mapping[str, str] | None,
    log: Callable[[str], None],
    earlier: bool,
) -> dict[str, Any]:
    """Check that the run may start there, move the files of an `earlier` run without a checkpoint out of its way, and
    write its configuration. Returns fields of `Start`."""
    step, rows, pack_position = 0, 0, (0, 0, 0)
    files = {**input_fingerprints.fingerprints(cfg, log), "phase": dict(fingerprints or {})}
    source = None if weights is None else start_from.make_note(weights)
    if chosen is not None:
        _check_checkpoint(chosen)
        encryption_rules.refuse_plain_checkpoint(chosen, cfg)
        start_from.refuse_without_states(chosen)
        counters = read_state(chosen)["counters"]
        safe_read.check_schema(counters, _COUNTERS, chosen / "state.json", TrainError)
        saved = _with_defaults(counters["settings"])
        _check_same_settings({**saved, **_fork_settings(saved, settings(cfg))} if forked else saved, cfg, chosen)
        input_fingerprints.check_same_inputs(counters, files, chosen, cfg.model.path)
        step, rows = counters["step"], counters["rows"]
        known = compat.complete_counters(counters)
        pack_position = known["window"], known["pack"], known["packs"]
        source = start_from.check_note(counters, cfg, chosen)
    directory.mkdir(parents=True, exist_ok=True)
    if (directory / CHECKPOINTS).is_dir():
        checkpoint.remove_leftovers(directory / CHECKPOINTS)  # removes unfinished saves of a killed process
    if earlier and (moved := earlier_run.move_aside(directory)):
        log(moved)
    if earlier or not (directory / CONFIG).exists():
        write_text(directory / CONFIG, to_yaml(cfg))
    return {"rows": rows, "pack_position": pack_position, "step": step, "files": files, "initial_weights": source}


def _fork_settings(saved: Mapping[str, Any], forks: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings in which a fork may differ, with its values. Formats of optimizer states must be equal."""
    free_keys = ("recompute", "offload_activations", "compile", "logits", "gather", "exchange")
    train = {key: forks["train"].get(key) for key in free_keys}
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
    fix = f"name one of its checkpoints, e.g. {inner / f'step_{steps[-1]}'}" if steps else "it contains no checkpoint"
    raise TrainError(f"{path} is not a checkpoint: {fix}")


def _saved_settings(directory: Path) -> dict[str, Any]:
    try:
        return settings(load_config(directory / CONFIG))
    except ConfigError as error:
        raise TrainError(f"{directory / CONFIG} cannot be read, so the run cannot be resumed: {error}") from error


def _with_defaults(saved: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the settings of a checkpoint; newer keys get their defaults, which keep the old behavior."""
    try:
        return settings(Config.model_validate(saved, context={"rules": "later"}))
    except ValueError:  # a removed key or value, which is reported as a difference
        return saved


def _check_same_settings(saved: Mapping[str, Any], cfg: Config, where: Path) -> None:
    changed = list(_differences(saved, settings(cfg)))
    if changed:
        shown = "; ".join(f"{key} was {old!r}, is now {new!r}" for key, old, new in changed)
        if any(key == "train.steps" for key, _, _ in changed):
            shown += " (if train.epochs was given, they are computed from the rows of data.train: did those change?)"
        raise TrainError(
            f"{where} was made with different settings: {shown}. A resumed run must have the same model, data, "
            "schedule and FP8 settings. These may change: run.* except run.seed, train.gc, train.recompute if blocks "
            "are not compiled, and rl.slots, pages, show and reward_timeout. Restore the settings, or start a new run "
            "in another run.dir"
        )


def _differences(old: Any, new: Any, key: str = "") -> Iterator[tuple[str, Any, Any]]:
    if isinstance(old, Mapping) and isinstance(new, Mapping):
        for name in dict.fromkeys([*old, *new]):
            yield from _differences(old.get(name), new.get(name), f"{key}.{name}" if key else name)
    elif old != new:
        yield key, old, new


def append_lines(file: Path, lines: Iterable[str]) -> None:
    """Append lines, which end with a newline, to a file of the run; encrypted if its name ends in `.aes`."""
    if file.suffix == encryption.SUFFIX:
        encryption.append_lines(file, lines)
        return
    with file.open("a", encoding="utf-8", errors="backslashreplace") as out:
        out.writelines(lines)


def truncate_metrics(file: Path, step: int) -> None:
    """Atomically drop the lines after `step`, which will be written again, and an incomplete last line."""
    if not file.exists():
        return
    if file.suffix == encryption.SUFFIX:
        lines = safe_read.read_bytes(file, TrainError).split(b"\n")[:-1]
        earlier = [line for line in lines if json.loads(encryption.decrypt_line(line, file))["step"] <= step]
        write_bytes(file, b"".join(line + b"\n" for line in earlier))
        return
    write_text(file, "".join(json.dumps(row) + "\n" for row in read_rows(file) if row["step"] <= step))


def read_rows(file: Path) -> list[dict[str, Any]]:
    """Read the rows of metrics.jsonl, without an incomplete last line of a killed process."""
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
    """Read the JSON object in a file, or return None if the file does not exist."""
    if not file.exists():
        return None
    try:
        return dict(safe_read.read_json(file))
    except safe_read.Unreadable as error:
        raise TrainError(f"{file} is damaged; delete it and start again ({error})") from error


def write_plan(
    directory: Path, family: str, plans: Schedule, plan: fp8.Plan, notes: tuple[str, ...], prediction: Prediction | None
) -> None:
    """Write plan.json: the output of `octavo plan --json` for the newest `plan`, which can be used as `fp8.plan`."""
    document = {"family": family, **planning.document(plans.main, plan, plans.spans), "notes": list(notes)}
    if prediction is not None:
        document["prediction"] = prediction.to_json()
    write_json(directory / PLAN, document)


def update_plan(directory: Path, plan: fp8.Plan) -> None:
    """Replace the current plan in plan.json; the rest of the file describes all plans of the run."""
    current = {key: value for key, value in plan.to_json().items() if key != "notes"}
    write_json(directory / PLAN, {**(read_json(directory / PLAN) or {}), **current})


def write_json(file: Path, value: Any) -> None:
    """Write indented JSON to a temporary file and rename it."""
    write_text(file, json.dumps(value, indent=2, default=str) + "\n")
