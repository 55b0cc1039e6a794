"""`preference.reference: disk`: sums of the reference's log-probabilities, computed once and stored in the run
directory.

The answers are fixed and the reference never changes, so it contributes one number per answer: the sum of the
log-probabilities of its tokens. The initial weights compute it before the first step, so no second model is kept in
memory.

The batches are the run's, read ahead until every pair that the run will use has occurred, and then the held-out pairs.
In the first epoch a pair is in a batch with the same pairs as in training, so its sums equal `copy`'s bit for bit. In
later epochs the stored sums are reused, while `copy` would see the pair with other pairs: sums are then taken in
another order, and single FP8 codes differ where the rounding of GEMMs depends on the shape of a batch. With one pair
per micro-batch nothing differs.

The file is bound to settings, data, model folder, plan and initial weights; a file of another run is not used. A kill
loses the sums of the last `WRITE_INTERVAL_S` seconds.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import time
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.numpy
import torch
from safetensors import SafetensorError
from torch import Tensor

from octavo.base import encryption, safe_read
from octavo.base.atomic_write import write_bytes
from octavo.data.errors import row_place
from octavo.data.loaders.eval_set import EvalSet
from octavo.data.loaders.from_config import pair_loader
from octavo.data.loaders.rows_from_config import Rows
from octavo.data.order import Mixture
from octavo.fp8.proof import reference_note
from octavo.fp8.weights import weight_sums
from octavo.rl.objectives.pairwise import answer_logps
from octavo.rl.phases.reference import BaseReference, CopyReference, Reference
from octavo.train import TrainError
from octavo.train.forward import losses
from octavo.train.run_dir import input_fingerprints, run_dir
from octavo.train.run_dir.file_names import REFERENCE
from octavo.train.step.step import Stepper

WRITE_INTERVAL_S = 30.0
"""Seconds between writes, and between progress lines."""
_MAX_BYTES = 1 << 36  # bytes of a file: 10^9 pairs

Batches = Sequence[dict[str, Any]]


class ComputedReference:
    """Sums of log-probabilities over answers, computed by a reference model."""

    def __init__(self, reference: Reference) -> None:
        self.reference = reference

    @property
    def bytes(self) -> int:
        return self.reference.bytes

    def __call__(self, batch: dict[str, Any], keep: Tensor, target: Tensor) -> Tensor:
        """Return fp32 [B]: the log-probability of each row's answer, the labels `target` [B, P] at the positions
        `keep`."""
        logps = self.reference(batch, keep, target)
        return answer_logps(logps, (target != losses.IGNORE).to(logps.device))[0]


class StoredReference:
    """The same sums, read from a table in `file` with two answers (chosen, rejected) for each data file and row.
    ``encrypt``: write the file encrypted."""

    bytes = 0

    def __init__(self, file: Path, sources: Iterable[Rows], encrypt: bool = False) -> None:
        self.file, self.encrypt = file, encrypt
        sizes: dict[str, int] = {}
        for source in sources:
            sizes[source.name] = max(len(source), sizes.get(source.name, 0))
        self.sums = {name: np.full((rows, 2), np.nan, dtype=np.float32) for name, rows in sizes.items()}
        self.checksums = {name: np.zeros((rows, 2), dtype=np.int64) for name, rows in sizes.items()}

    def __call__(self, batch: dict[str, Any], keep: Tensor, target: Tensor) -> Tensor:
        out = torch.zeros(len(target))
        for place, (file, row, side, checksum) in enumerate(_iter_answers(batch)):
            total = float(self.sums[file][row, side])
            if np.isnan(total) or self.checksums[file][row, side] != checksum:
                problem = "was skipped" if np.isnan(total) else "had other tokens or images"
                raise TrainError(
                    f"{row_place(file, row)}: {problem} when {self.file.name} was written, but is used now. Restore "
                    f"the data, or delete {self.file} to compute it again from the model of model.path"
                )
            out[place] = total
        return out

    def add(self, entries: Iterable[Sequence[Any]]) -> None:
        """Add entries (file, row, side, checksum of the answer, sum). The first sum of an answer is kept."""
        for file, row, side, checksum, total in entries:
            if np.isnan(self.sums[file][row, side]):
                self.sums[file][row, side], self.checksums[file][row, side] = total, checksum

    def write(self, key: Mapping[str, str], done: int, total: int, ranks: int) -> None:
        """Write all sums, after `done` of `total` rounds on `ranks` ranks."""
        counts = {"done": done, "total": total, "ranks": ranks}
        about = json.dumps({"key": dict(key), **counts, "files": list(self.sums)}).encode()
        tensors: dict[str, np.ndarray] = {"about": np.frombuffer(about, dtype=np.uint8)}
        for n, name in enumerate(self.sums):
            tensors |= {f"sums.{n}": self.sums[name], f"prints.{n}": self.checksums[name]}
        raw = safetensors.numpy.save(tensors)
        write_bytes(self.file, encryption.encrypt(raw) if self.encrypt else raw)

    def read(self) -> dict[str, Any]:
        """Read the sums from the file. Returns its header: {"key", "done", "total", "ranks"}. Raises TrainError if the
        file is damaged."""
        raw = safe_read.read_bytes(self.file, TrainError, _MAX_BYTES)
        try:
            tensors = safetensors.numpy.load(raw)
            about = dict(json.loads(tensors["about"].tobytes()))
            for n, name in enumerate(about["files"]):
                for table, kind in ((self.sums, "sums"), (self.checksums, "prints")):
                    if name in table and tensors[f"{kind}.{n}"].shape == table[name].shape:
                        table[name][:] = tensors[f"{kind}.{n}"]
            return {"key": dict(about["key"]), **{name: int(about[name]) for name in ("done", "total", "ranks")}}
        except (SafetensorError, KeyError, TypeError, ValueError) as error:
            cause = safe_read.first_line(error)
            raise TrainError(f"{self.file} is damaged ({cause}); delete it: it is computed again") from error


def load_or_compute_reference(
    stepper: Stepper, processor: Any, directory: Path, step: int, held_out: EvalSet | None, log: Callable[[str], None]
) -> StoredReference:
    """Return the reference of a run that resumes after `step`; computes what its directory does not contain yet.
    `held_out`: held-out pairs. Collective call.

    Raises TrainError for sums that are not finite, and the errors of loading and of reading rows.
    """
    world, cfg = stepper.world, stepper.cfg
    mixture = pair_loader(cfg, processor, rank=world.data_rank, world=world.data_size).mixture
    table = StoredReference(
        directory / REFERENCE, [*mixture.sources, *([] if held_out is None else held_out.sources)], cfg.run.encrypt
    )
    steps = _steps(mixture, cfg.train.global_batch, cfg.train.total_steps)
    needed_steps, total = set(steps), len(steps) + (0 if held_out is None else len(held_out))
    key = _key(stepper, directory / run_dir.PLAN)
    done = world.run_on_main(lambda: _count_finished_rounds(table, key, step, total, world.size, log))
    if done:
        table.read()
    if done == total:
        return table

    def rounds() -> Iterator[Batches]:
        if done < len(steps):
            loader = pair_loader(
                cfg,
                processor,
                rank=world.data_rank,
                world=world.data_size,
                start_row=steps[done] * cfg.train.global_batch,
            )
            for number in range(steps[done], steps[-1] + 1):
                batches = next(loader)
                if number in needed_steps:
                    yield batches
            loader.close()
        for batch in itertools.islice(held_out or (), max(0, done - len(steps)), None):
            yield [batch]

    reference = _initial_reference(stepper, directory, step, log)
    if note := reference_note(stepper.model, stepper.model):
        log(f"note: {note}")
    log(f"the reference is computed once: {_describe_work(table, done, total)} into {table.file}")
    start = last_write = time.monotonic()
    for number, batches in enumerate(rounds(), done + 1):
        world.set_phase(f"the reference, batches {number} of {total}")
        entries = [entry for batch in batches for entry in _compute_entries(stepper, reference, batch)]
        for part in world.gather_objects(entries):  # all ranks keep all sums: later epochs distribute rows differently
            table.add(part)
        now = time.monotonic()
        if world.is_main and (number == total or now - last_write >= WRITE_INTERVAL_S):
            table.write(key, number, total, world.size)
            log(f"reference: {number} of {total} batches, {now - start:.0f} s")
            last_write = now
    world.barrier()
    return table


def _describe_work(table: StoredReference, done: int, total: int) -> str:
    rows = sum(map(len, table.sums.values()))
    return f"{rows} pairs at most, batches {done + 1} to {total}"


def _compute_entries(stepper: Stepper, reference: Reference, batch: dict[str, Any]) -> Iterator[list[Any]]:
    """Compute the entries of a micro-batch's answers for `StoredReference.add`."""
    keep, target, _ = stepper.loss_positions(batch, 1.0)
    sums = ComputedReference(reference)(batch, keep, target).tolist()
    for (file, row, side, checksum), total in zip(_iter_answers(batch), sums, strict=False):
        if not np.isfinite(total):
            raise TrainError(
                f"{file}, row {row}: the initial weights give its {('chosen', 'rejected')[side]} answer the "
                f"log-probability {total}, which is not finite. Use another model.path, or another recipe"
            )
        yield [file, row, side, checksum, total]


def _iter_answers(batch: Mapping[str, Any]) -> Iterator[tuple[str, int, int, int]]:
    """Yield (file, row, 0 for chosen or 1 for rejected, checksum of tokens, labels and pixels) for each row of a
    micro-batch of pairs."""
    meta, ids, labels = batch["meta"], batch["input_ids"], batch["labels"]
    pixels = batch["pixel_values"].split(meta.patches) if meta.has_image else [ids[:0]] * meta.samples
    clips = _video_pixels(batch) if meta.has_video else [ids[:0]] * meta.samples
    for place in range(meta.samples):
        count, checksum = meta.lengths[place], 0
        for part in (ids[place, :count], labels[place, :count], pixels[place], clips[place]):
            checksum = zlib.crc32(part.contiguous().numpy().data, checksum)
        yield meta.files[place], meta.rows[place], int(place >= meta.samples // 2), checksum


def _video_pixels(batch: Mapping[str, Any]) -> Sequence[torch.Tensor]:
    """Return the pixels of each row's videos, [patches of the row, pixels] each."""
    patches = iter(batch["video_grid_thw"].prod(-1).tolist())
    counts = [sum(next(patches) for _ in range(videos)) for videos in batch["meta"].videos]
    return batch["pixel_values_videos"].split(counts)


def _steps(mixture: Mixture, rows: int, steps: int) -> list[int]:
    """Return the steps (from 0) of a run in which a row occurs for the first time."""
    seen: set[tuple[int, int]] = set()
    first_seen = []
    for step in range(steps):
        places = {mixture.row(n) for n in range(step * rows, (step + 1) * rows)}
        if not places <= seen:
            first_seen.append(step)
            seen |= places
        if len(seen) == sum(mixture.sizes):
            break
    return first_seen


def _key(stepper: Stepper, plan: Path) -> dict[str, str]:
    """Return digests of everything that determines the sums: `run` of settings and data, `first` of plan and initial
    weights."""
    cfg, world = stepper.cfg, stepper.world
    run = world.run_on_main(lambda: _digest([run_dir.settings(cfg), input_fingerprints.fingerprints(cfg)]))
    weights = world.gather_objects(_digest(dict(weight_sums(stepper.model))))
    return {"run": run, "first": _digest([weights, world.run_on_main(lambda: _digest_plan(plan))])}


def _digest_plan(file: Path) -> str:
    """Return a digest of the recipes in a plan.json, and of the casts that their names have there."""
    plan = run_dir.read_json(file) or {}
    return _digest([plan.get("rows"), plan.get("casts")])


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def _count_finished_rounds(
    table: StoredReference, key: Mapping[str, str], step: int, total: int, ranks: int, log: Callable[[str], None]
) -> int:
    """Return how many of `total` rounds the file contains, or 0 if it belongs to other settings, data or weights.
    Weights are compared only before the first step, because they change afterwards."""
    if not table.file.exists():
        return 0
    about = StoredReference.read(table)
    differing = [name for name in ("run", *(("first",) if step == 0 else ())) if about["key"].get(name) != key[name]]
    if differing:
        what = "other settings or data" if differing[0] == "run" else "other weights or another plan"
        log(f"{table.file} belongs to {what}; it is computed again")
        for name in table.sums:
            table.sums[name][:] = np.nan
        return 0
    if about["done"] == about["total"]:
        return total
    return about["done"] if about["ranks"] == ranks else 0  # held-out batches depend on the number of ranks


def _initial_reference(stepper: Stepper, directory: Path, step: int, log: Callable[[str], None]) -> Reference:
    """Return a reference with the initial weights: the policy itself before its first update, else a second copy."""
    if step == 0 or stepper.cfg.lora is not None:
        return BaseReference(stepper)
    missing = directory / REFERENCE
    log(f"note: {missing} does not exist, and the weights have changed: the initial weights are loaded again")
    return CopyReference.of(stepper, directory / run_dir.PLAN, log)
