"""Settings that all frameworks have: the length of a run, batch sizes, and the learning-rate schedule."""

from __future__ import annotations

import math
import re
from collections.abc import Callable

from octavo.base import safe_read, suffixes
from octavo.importers.common.draft import Draft

#: maximum bytes of a data file that is read to count its rows
_COUNTED = 64 << 20
_NODES = ("nnodes", "num_machines", "num_nodes", "$NNODES")
_EACH = ("nproc_per_node", "num_gpus", "$NPROC_PER_NODE", "$NPUS_PER_NODE", "$GPUS_PER_NODE")
_VISIBLE = ("$CUDA_VISIBLE_DEVICES", "$ASCEND_RT_VISIBLE_DEVICES")


def _launch_count(draft: Draft, key: str) -> int | None:
    """Return a number of hosts or of processes, or None for ``gpu``, ``auto`` and ``1:4``, which are resolved at
    startup."""
    if re.fullmatch(r"gpu|cpu|auto|[0-9]+:[0-9]+", draft.text(key) or "") is None:
        return positive_count(draft, key)
    draft.add_note(f"{key} is {draft.text(key)}, which is resolved when the run starts; set --world N")
    return None


def count_processes(draft: Draft) -> int:
    """Return the number of processes of the original run: from the user, from the launch command, or 1 with a note."""
    # Launchers give hosts and processes per host separately; the product counts unless num_processes is given.
    num_hosts = next((n for key in _NODES if (n := _launch_count(draft, key))), 1)
    per_host = next((n for key in _EACH if (n := _launch_count(draft, key))), None)
    visible = next((words for key in _VISIBLE if (words := draft.words(key))), [])
    launched = positive_count(draft, "num_processes") or (per_host or len(visible)) * num_hosts or None
    world = draft.num_processes or launched
    if draft.num_processes and launched and draft.num_processes != launched:
        draft.add_note(
            f"the command launches {launched} processes, but --world {draft.num_processes} is set and takes precedence"
        )
    unknown_keys = [
        key for key in (*_NODES, *_EACH, *_VISIBLE) if key in draft.source_keys and draft.source_keys[key].open
    ]
    draft.mark_default(*(unknown_keys if draft.num_processes else ()), why="--world sets the number")
    if unknown_keys and not draft.num_processes:
        names = ", ".join(f"{key} is {draft.source_keys[key].value}" for key in unknown_keys)
        draft.add_note(f"the number of processes is not set ({names}); {world or 1} is assumed; set --world N")
    elif world is None:
        draft.add_note("the number of processes is not set; 1 is assumed; set --world N if this is wrong")
    world = world or 1
    draft.set_outside(
        "octavo train --nproc",
        world,
        "num_processes",
        *_NODES,
        *_EACH,
        *_VISIBLE,
        why="the number of processes is set on the command line, not in the file",
    )
    if world > 1:
        draft.add_note(f"start the run with octavo train FILE --nproc {world}, or with torchrun on several hosts")
    return world


def set_batch_size(draft: Draft, micro: int, accumulation: int, ranks: int, *keys: str, packed: bool = False) -> None:
    """Set the batch sizes. With packing a micro-batch is one pack, so a batch of packs becomes that many
    micro-batches."""
    total = micro * accumulation * ranks
    draft.set("train.micro_batch", 1 if packed else micro, *keys[:1], why="one pack" if packed and micro != 1 else "")
    why = f"{micro} per process x {accumulation} accumulated x {ranks} process{'es' if ranks > 1 else ''}"
    draft.set("train.global_batch", total, *keys, why=why)


def positive_count(draft: Draft, key: str) -> int | None:
    """Return a number that must be at least 1, or None; anything else is recorded as invalid."""
    count = draft.integer(key)
    if count is not None and count < 1:
        draft.mark_invalid(key, "a whole number of at least 1")
        return None
    return count


def count_rows(draft: Draft, *names: str) -> int | None:
    """Count the rows of a local JSON or JSON Lines file; returns None for missing, large and other files."""
    file = draft.folder.file(*names)
    if file is None or file.stat().st_size > _COUNTED:
        return None
    try:
        if file.suffix in suffixes.JSON_LINES:
            return sum(1 for line in safe_read.read_text(file).split("\n") if line.strip())
        if file.suffix in suffixes.JSON:
            return len(safe_read.read_json(file, wanted=list))
    except safe_read.Unreadable:
        return None
    return None


def steps_per_epoch(draft: Draft, ranks: int) -> int | None:
    """Return the number of steps per epoch, or None if the number of rows is unknown."""
    total = draft.settings.get("train.global_batch")
    if draft.num_rows is None or total is None or "data.packing" in draft.settings:
        return None
    return max(1, draft.num_rows // max(1, total.value))


def set_length(draft: Draft, steps: int | None, epochs: float | None, step_key: str, epoch_key: str) -> None:
    """Set the length of the run. Steps take precedence over epochs, as in all trainers translated here."""
    if steps is not None and steps > 0:
        draft.set("train.steps", steps, step_key)
        if draft.has(epoch_key):
            draft.mark_ignored(epoch_key, why=f"{step_key} takes precedence if both are set")
    elif epochs is not None:
        draft.set("train.epochs", epochs, epoch_key)
        if steps is not None:
            draft.mark_default(step_key, why="no step limit")


def total_steps(draft: Draft, ranks: int) -> int | None:
    """Return the number of steps of the run, or None if it is unknown."""
    if (setting := draft.settings.get("train.steps")) is not None:
        return int(setting.value)
    epochs, epoch_steps = draft.settings.get("train.epochs"), steps_per_epoch(draft, ranks)
    return None if epochs is None or epoch_steps is None else max(1, math.ceil(epoch_steps * float(epochs.value)))


def _describe_fix(draft: Draft, target: str) -> str:
    """Return advice on a fraction of an unknown number of steps."""
    if "data.packing" in draft.settings:
        return f"set {target}; octavo train prints the number of steps per epoch of packs"
    return f"set --rows N, or set {target}"


def set_warmup(
    draft: Draft,
    ranks: int,
    steps_key: str,
    ratio_key: str,
    whole_steps: Callable[[float], int] = math.ceil,
    schedule_steps: int | None = None,
) -> None:
    """Set the warm-up in steps. A fraction of the run (or of ``schedule_steps`` steps) is converted if its length is
    known."""
    steps = draft.number(steps_key)
    share = draft.number(ratio_key)
    if steps is not None and 0 < steps < 1:  # transformers 5 accepts a fraction
        steps, share, ratio_key = None, steps, steps_key
    if steps:
        draft.set("train.warmup", int(steps), steps_key)
        if share:
            draft.mark_ignored(ratio_key, why=f"{steps_key} takes precedence if both are set")
    elif share:
        run_steps = schedule_steps or total_steps(draft, ranks)
        if run_steps is None:
            why = f"warm-up is set in steps; {share:g} x the steps of the run, which are unknown: "
            draft.mark_unsupported(ratio_key, why=why + _describe_fix(draft, "train.warmup"))
            draft.add_note(f"FILL IN: set train.warmup to {share:g} of the steps of the run")
        else:
            draft.set("train.warmup", whole_steps(run_steps * share), ratio_key, why=f"{share:g} x {run_steps} steps")
    else:
        draft.mark_default(steps_key, ratio_key, why="no warm-up")


def set_interval(draft: Draft, target: str, key: str, ranks: int, fallback: int | None = None) -> None:
    """Set an interval in steps; a value below 1 is a fraction of the run."""
    value = draft.number(key)
    if value is None:
        if fallback is not None:
            draft.set(target, fallback, why="the framework's default")
        return
    if 0 < value < 1:
        run_steps = total_steps(draft, ranks)
        if run_steps is None:
            draft.mark_unsupported(
                key, why="a fraction of the steps of the run, which are unknown: " + _describe_fix(draft, target)
            )
            return
        value = max(1, math.ceil(run_steps * value))
    draft.set(target, int(value), key)


#: transformers' names of schedules -> Octavo's
SCHEDULES = {
    "linear": "linear", "cosine": "cosine", "constant": "constant", "constant_with_warmup": "constant",
    "cosine_with_min_lr": "cosine",
}  # fmt: skip
_NEAREST = {
    "cosine_with_restarts": "cosine",
    "polynomial": "linear",
    "inverse_sqrt": "cosine",
    "warmup_stable_decay": "constant",
    "reduce_lr_on_plateau": "constant",
    "rex": "cosine",
    "one_cycle": "onecycle",
    "greedy": "constant",
    "cosine_warmup_with_min_lr": "cosine",
}


def set_schedule(draft: Draft, key: str, default: str) -> str:
    """Set the learning-rate schedule. One that Octavo does not implement is replaced by the closest and reported."""
    word = (draft.text(key) or default).lower()
    if word in SCHEDULES:
        draft.set("train.schedule", SCHEDULES[word], key)
    elif word in _NEAREST:
        draft.set("train.schedule", _NEAREST[word], why=f"instead of {word}, which Octavo does not implement")
        draft.mark_unsupported(key, why=f"schedule {word} is not implemented; {_NEAREST[word]} is the closest")
        word = _NEAREST[word]
    else:
        draft.mark_invalid(key, f"one of {', '.join([*SCHEDULES, *_NEAREST])}")
    return SCHEDULES.get(word, word)
