"""`preference.reference: disk`: what the reference says of the answers, computed once and kept in a file of the run.

Answers are given, and the reference never changes: of each it is one number, the sum of the log-probabilities of its
tokens. So the first weights themselves are asked, before the first step, and no second model is held.

The batches are those of the run, read ahead until every pair that it will see has come, and then the held-out pairs. In
the first epoch a pair stands beside the same others as it will in training, so its numbers are bit for bit those of
`copy`; in later epochs it keeps them, where `copy` sees it beside others: sums taken in another order, and where
products round by the shape of a batch, another code here and there. With one pair a micro-batch nothing differs.

The file belongs to settings, data, model folder, plan and first weights; what was computed of others is not taken. A
kill costs what came in the last `EVERY` seconds.
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
from octavo.data.loaders.eval_set import EvalSet
from octavo.data.loaders.from_config import pair_loader
from octavo.data.loaders.rows_from_config import Rows
from octavo.data.order import Mixture
from octavo.fp8.proof import reference_note
from octavo.fp8.weights import weight_sums
from octavo.rl.objectives.pairwise import answer_logps
from octavo.rl.phases.reference import Base, Copy, Reference
from octavo.train import TrainError
from octavo.train.forward import losses
from octavo.train.run_dir import input_fingerprints, run_dir
from octavo.train.step.step import Stepper

FILE = "reference.safetensors"
EVERY = 30.0
"""Seconds between writes, and between lines for people."""
_LARGEST = 1 << 36  # bytes of a file: 10^9 pairs

Batches = Sequence[dict[str, Any]]


class ComputedReference:
    """Sums over answers by a reference that is there."""

    def __init__(self, reference: Reference) -> None:
        self.reference = reference

    @property
    def bytes(self) -> int:
        return self.reference.bytes

    def __call__(self, batch: dict[str, Any], keep: Tensor, target: Tensor) -> Tensor:
        """fp32 [B]: the log-probability of each row's answer, the labels `target` [B, P] at the places `keep`."""
        found = self.reference(batch, keep, target)
        return answer_logps(found, (target != losses.IGNORE).to(found.device))[0]


class StoredReference:
    """The same from a table: of each file and row, two answers (chosen, rejected). ``encrypt``: the file of it."""

    bytes = 0

    def __init__(self, file: Path, sources: Iterable[Rows], encrypt: bool = False) -> None:
        self.file, self.encrypt = file, encrypt
        sizes: dict[str, int] = {}
        for source in sources:
            sizes[source.name] = max(len(source), sizes.get(source.name, 0))
        self.sums = {name: np.full((rows, 2), np.nan, dtype=np.float32) for name, rows in sizes.items()}
        self.prints = {name: np.zeros((rows, 2), dtype=np.int64) for name, rows in sizes.items()}

    def __call__(self, batch: dict[str, Any], keep: Tensor, target: Tensor) -> Tensor:
        out = torch.zeros(len(target))
        for place, (file, row, side, mark) in enumerate(_answers(batch)):
            found = float(self.sums[file][row, side])
            if np.isnan(found) or self.prints[file][row, side] != mark:
                what = "was left out" if np.isnan(found) else "had other tokens or images"
                raise TrainError(
                    f"{file}, row {row}: {what} when {self.file.name} was made, and is trained on now. Put the data "
                    f"back as it was, or delete {self.file}: it is made again, by the model of model.path"
                )
            out[place] = found
        return out

    def take(self, found: Iterable[Sequence[Any]]) -> None:
        """Further (file, row, side, print of what it is, sum); the first sum of an answer stays."""
        for file, row, side, mark, total in found:
            if np.isnan(self.sums[file][row, side]):
                self.sums[file][row, side], self.prints[file][row, side] = total, mark

    def write(self, key: Mapping[str, str], done: int, total: int, ranks: int) -> None:
        """Everything so far, after `done` of `total` rounds on so many ranks."""
        counts = {"done": done, "total": total, "ranks": ranks}
        about = json.dumps({"key": dict(key), **counts, "files": list(self.sums)}).encode()
        tensors: dict[str, np.ndarray] = {"about": np.frombuffer(about, dtype=np.uint8)}
        for n, name in enumerate(self.sums):
            tensors |= {f"sums.{n}": self.sums[name], f"prints.{n}": self.prints[name]}
        raw = safetensors.numpy.save(tensors)
        write_bytes(self.file, encryption.encrypted(raw) if self.encrypt else raw)

    def read(self) -> dict[str, Any]:
        """Take what the file holds; what it says of itself: {"key", "done", "total", "ranks"}. Raises TrainError for a
        damaged one."""
        raw = safe_read.read_bytes(self.file, TrainError, _LARGEST)
        try:
            tensors = safetensors.numpy.load(raw)
            about = dict(json.loads(tensors["about"].tobytes()))
            for n, name in enumerate(about["files"]):
                for mine, kind in ((self.sums, "sums"), (self.prints, "prints")):
                    if name in mine and tensors[f"{kind}.{n}"].shape == mine[name].shape:
                        mine[name][:] = tensors[f"{kind}.{n}"]
            return {"key": dict(about["key"]), **{name: int(about[name]) for name in ("done", "total", "ranks")}}
        except (SafetensorError, KeyError, TypeError, ValueError) as error:
            found = safe_read.first_line(error)
            raise TrainError(f"{self.file} is damaged ({found}); delete it: it is made again") from error


def stored_reference(
    stepper: Stepper, processor: Any, directory: Path, step: int, held: EvalSet | None, say: Callable[[str], None]
) -> StoredReference:
    """The reference of a run that resumed after `step`, computed where its directory does not hold it yet. `held`:
    held-out pairs. A collective.

    Raises TrainError where it cannot be, and what loading and reading rows raise.
    """
    world, cfg = stepper.world, stepper.cfg
    mixture = pair_loader(cfg, processor, rank=world.data_rank, world=world.data_size).mixture
    kept = StoredReference(
        directory / FILE, [*mixture.sources, *([] if held is None else held.sources)], cfg.run.encrypt
    )
    steps = _steps(mixture, cfg.train.global_batch, cfg.train.total_steps)
    wanted, total = set(steps), len(steps) + (0 if held is None else len(held))
    key = _key(stepper, directory / run_dir.PLAN)
    done = world.from_main(lambda: _done(kept, key, step, total, world.size, say))
    if done:
        kept.read()
    if done == total:
        return kept

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
                if number in wanted:
                    yield batches
            loader.close()
        for batch in itertools.islice(held or (), max(0, done - len(steps)), None):
            yield [batch]

    reference = _first_weights(stepper, directory, step, say)
    if note := reference_note(stepper.model, stepper.model):
        say(f"note: {note}")
    say(f"the reference is asked once: {_pairs(kept, done, total)} into {kept.file}")
    began = last = time.monotonic()
    for number, batches in enumerate(rounds(), done + 1):
        world.at(f"the reference, batches {number} of {total}")
        found = [entry for batch in batches for entry in _asked(stepper, reference, batch)]
        for part in world.gather_objects(found):
            kept.take(part)
        now = time.monotonic()
        if world.is_main and (number == total or now - last >= EVERY):
            kept.write(key, number, total, world.size)
            say(f"reference: {number} of {total} batches, {now - began:.0f} s")
            last = now
    world.barrier()
    return kept


def _pairs(kept: StoredReference, done: int, total: int) -> str:
    rows = sum(map(len, kept.sums.values()))
    return f"{rows} pairs at most, batches {done + 1} to {total}"


def _asked(stepper: Stepper, reference: Reference, batch: dict[str, Any]) -> Iterator[list[Any]]:
    """What is kept of each answer of a micro-batch: see `StoredReference.take`."""
    keep, target, _ = stepper.judged(batch, 1.0)
    sums = ComputedReference(reference)(batch, keep, target).tolist()
    for (file, row, side, mark), total in zip(_answers(batch), sums, strict=False):
        if not np.isfinite(total):
            raise TrainError(
                f"{file}, row {row}: the first weights give its {('chosen', 'rejected')[side]} answer the "
                f"log-probability {total}: the model computes no numbers. Take another model.path, or another recipe"
            )
        yield [file, row, side, mark, total]


def _answers(batch: Mapping[str, Any]) -> Iterator[tuple[str, int, int, int]]:
    """(file, row, 0 chosen or 1 rejected, print of tokens, labels and pixels) of each row of a micro-batch of pairs.
    It is a pass over them in host memory."""
    meta, ids, labels = batch["meta"], batch["input_ids"], batch["labels"]
    pixels = batch["pixel_values"].split(meta.patches) if meta.has_image else [ids[:0]] * meta.samples
    clips = _of_videos(batch) if meta.has_video else [ids[:0]] * meta.samples
    for place in range(meta.samples):
        count, mark = meta.lengths[place], 0
        for part in (ids[place, :count], labels[place, :count], pixels[place], clips[place]):
            mark = zlib.crc32(part.contiguous().numpy().data, mark)
        yield meta.files[place], meta.rows[place], int(place >= meta.samples // 2), mark


def _of_videos(batch: Mapping[str, Any]) -> Sequence[torch.Tensor]:
    """The pixels of each row's videos."""
    patches = iter(batch["video_grid_thw"].prod(-1).tolist())
    counts = [sum(next(patches) for _ in range(videos)) for videos in batch["meta"].videos]
    return batch["pixel_values_videos"].split(counts)


def _steps(mixture: Mixture, rows: int, steps: int) -> list[int]:
    """The steps (from 0) of a run in which some row comes for the first time."""
    seen: set[tuple[int, int]] = set()
    found = []
    for step in range(steps):
        places = {mixture.row(n) for n in range(step * rows, (step + 1) * rows)}
        if not places <= seen:
            found.append(step)
            seen |= places
        if len(seen) == sum(mixture.sizes):
            break
    return found


def _key(stepper: Stepper, plan: Path) -> dict[str, str]:
    """What decides the numbers, as digests: `run` of what a run keeps to its end, `first` of plan and first weights."""
    cfg, world = stepper.cfg, stepper.world
    run = world.from_main(lambda: _digest([run_dir.settings(cfg), input_fingerprints.fingerprints(cfg)]))
    weights = world.gather_objects(_digest(dict(weight_sums(stepper.model))))
    rows = world.from_main(lambda: _digest((run_dir.read_json(plan) or {}).get("rows")))
    return {"run": run, "first": _digest([weights, rows])}


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def _done(
    kept: StoredReference, key: Mapping[str, str], step: int, total: int, ranks: int, say: Callable[[str], None]
) -> int:
    """Of `total` rounds, those that the file holds; 0 where it is of others. Weights that have moved say nothing of the
    first ones."""
    if not kept.file.exists():
        return 0
    about = StoredReference.read(kept)
    other = [name for name in ("run", *(("first",) if step == 0 else ())) if about["key"].get(name) != key[name]]
    if other:
        what = "other settings or data" if other[0] == "run" else "other weights or another plan"
        say(f"{kept.file} is of {what}; it is made anew")
        for name in kept.sums:
            kept.sums[name][:] = np.nan
        return 0
    if about["done"] == about["total"]:
        return total
    return about["done"] if about["ranks"] == ranks else 0  # whose held-out batches are others


def _first_weights(stepper: Stepper, directory: Path, step: int, say: Callable[[str], None]) -> Reference:
    """Who answers: the policy itself, while it is what it was at first; else its model, loaded once more."""
    if step == 0 or stepper.cfg.lora is not None:
        return Base(stepper)
    say(f"note: {directory / FILE} is not there, and weights have moved: the first ones are loaded for it once more")
    return Copy.of(stepper, directory / run_dir.PLAN, say)
