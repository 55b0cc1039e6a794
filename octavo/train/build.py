"""Assembly: from a configuration to everything a run needs, as one ordered list.

The order matters. The plan is made and shown before a weight is read; freezing comes before the plan is applied (a
frozen layer has no wgrad), FP8 before sharding (FSDP2 swaps parameters inside the converted layers), sharding before
the optimizer (it must hold the shards), and resuming last, when everything that is filled exists.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy
import torch
from torch import nn

from octavo import checkpoint, data, environment, fp8, models, parallel
from octavo.checkpoint.files import read_state
from octavo.config import Config
from octavo.fp8 import plan_file
from octavo.train import compiled, planning, routing, rundir, tokens
from octavo.train.errors import TrainError
from octavo.train.forward import Forward, autocasts, keep_towers_running, model_dtype
from octavo.train.optim import adamw
from octavo.train.step import Stepper
from octavo.train.tokens import Tokens


@dataclass
class Job:
    """A run, assembled."""

    cfg: Config
    world: parallel.World
    directory: Path
    processor: Any
    loader: data.Loader
    evalset: data.EvalSet | None
    plan: fp8.Plan
    notes: tuple[str, ...]
    stepper: Stepper
    progress: rundir.Progress
    data: Mapping[str, Any]

    @property
    def model(self) -> nn.Module:
        return self.stepper.model


def build(
    cfg: Config, world: parallel.World, start: rundir.Start, say: Callable[[str], None] = lambda text: None
) -> Job:
    """The ordered list. `start` says where the run begins (`rundir.enter`); `say` gets lines for people.

    Raises what its steps raise: TrainError, ModelError, DataError, PlanError, CheckpointError, each with its cure.
    """
    directory = start.directory
    seed_everything(cfg.run.seed + world.rank)
    if world.is_main:
        rundir.write_json(directory / "environment.json", {**environment.describe(), "ranks": world.size})
    processor = models.load_processor(cfg.model.path, cfg.data.max_pixels, cfg.data.min_pixels)
    asked = data_settings(cfg)
    share: dict[str, Any] = {"rank": world.rank, "world": world.size, "report_path": directory / "skipped.jsonl"}
    loader = data.train_loader(asked, processor, start_row=start.rows, **share)
    evalset = data.eval_set(asked, processor, **share)

    def count(family: models.Family, model: nn.Module) -> Tokens:
        return tokens.count(asked, processor, family, model.config)

    saved = _saved_plan(cfg, world, start)
    plan, family, notes, prediction = planning.plan_run(cfg, world, count, saved, say)
    own = saved is not None and saved == (directory / rundir.PLAN).resolve() and rundir.is_whole_plan(saved)
    if world.is_main and not own:
        rundir.write_plan(directory, family.name, plan, notes, prediction)
    say(_told(plan, notes, prediction))
    if saved is not None and planning.leaves_open(cfg):
        say(
            f"note: a run that continues takes the plan that it began with, {saved}; fp8.plan is not read again, and "
            "recipe: auto measures nothing"
        )

    model = models.load(cfg.model.path, dtype=model_dtype(cfg), device=world.device)
    models.freeze(model, family, cfg.model.freeze)
    fp8.apply(model, plan)
    if cfg.train.recompute == "full":
        recompute(model, family)
    model.train()
    balance, load = routing.coefficient(cfg, model), routing.ExpertLoad(model)
    forward = Forward(model, world, autocasts(cfg, world.device))
    keep_towers_running(model, family, forward, world)
    parallel.shard(model, family, world)
    if cfg.train.compile:
        compiled.compile_blocks(model, family)
    optimizer = adamw(model, cfg)
    stepper = Stepper(cfg, model, family, optimizer, world, forward, balance, load if load.layers else None)
    progress = resume(stepper, start, say)
    return Job(cfg, world, directory, processor, loader, evalset, plan, notes, stepper, progress, start.data)


def _saved_plan(cfg: Config, world: parallel.World, start: rundir.Start) -> Path | None:
    """The plan of the run that is continued (None: a new run): its plan.json or, where a checkpoint was copied without
    it, the plan that the checkpoint holds, which then becomes the plan.json of this run. A collective."""
    if start.checkpoint is None:
        return None
    checkpointed = start.checkpoint.resolve()
    beside = checkpointed.parent.parent / rundir.PLAN
    if not planning.leaves_open(cfg):
        return beside

    def find() -> str:
        if beside.exists():
            return str(beside)
        kept = read_state(checkpointed)["counters"].get("plan")
        if kept is None:
            raise TrainError(
                f"{start.checkpoint} belongs to a run with fp8.plan or recipe: auto, whose plan is in neither its "
                f"checkpoint nor {beside}. Copy the run's plan.json there, beside the folder of its checkpoints"
            )
        rundir.write_json(start.directory / rundir.PLAN, kept)
        return str(start.directory.resolve() / rundir.PLAN)

    return Path(world.from_main(find))


def _told(plan: fp8.Plan, notes: tuple[str, ...], prediction: fp8.Prediction | None) -> str:
    """The plan for people, before anything is loaded."""
    if not any(row.fp8 or row.decided for row in plan.rows):
        return "FP8 is off: every layer computes in high precision"
    further = [f"note: {note}" for note in notes if note not in plan.notes]
    return "\n".join([plan.table(), *further, *([] if prediction is None else prediction.sentences())])


def data_settings(cfg: Config) -> Config:
    """The configuration as the data room reads it: pretraining learns every token of the text, prompts included."""
    if cfg.train.phase != "pretrain":
        return cfg
    return cfg.model_copy(update={"data": cfg.data.model_copy(update={"train_on_prompt": True})})


def seed_everything(seed: int) -> None:
    """Seed python, numpy and torch, each rank its own way. Data order has its own generator, from run.seed alone."""
    random.seed(seed)
    numpy.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def recompute(model: nn.Module, family: models.Family) -> None:
    """Let every block keep its input only and run its forward again in backward (Chen et al. 2016)."""
    blocks = [block for _, block in family.layers(model)]
    able = getattr(model, "supports_gradient_checkpointing", False)
    if not able or not blocks or not all(hasattr(block, "gradient_checkpointing") for block in blocks):
        raise TrainError(
            f"train.recompute: full was asked, but the blocks of {family.name} do not support it in this version of "
            "transformers. Use recompute: none"
        )
    if hasattr(model, "activation_checkpointing_enable"):  # newer transformers; the other name is deprecated there
        model.activation_checkpointing_enable(activation_checkpointing_kwargs={"use_reentrant": False})
    else:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})


def resume(stepper: Stepper, start: rundir.Start, say: Callable[[str], None]) -> rundir.Progress:
    """Fill model, optimizer, amax histories and generators from the checkpoint that the run starts from, if any."""
    if start.checkpoint is None:
        return rundir.Progress()
    world = stepper.world
    restored = checkpoint.load(start.checkpoint, model=stepper.model, optimizer=stepper.optimizer, world=world)
    fp8.load_scaling_state(stepper.model, scaling_of(restored.extra))
    checkpoint.rng.restore(restored.extra, world.rank)
    before = (restored.ranks, restored.counters["threads"])
    now = (world.size, torch.get_num_threads())
    if before != now:
        say(
            f"saved by {before[0]} rank(s) of {before[1]} thread(s), continued on {now[0]} of {now[1]}: sums are "
            "taken in another order, so losses agree closely but not bit for bit"
        )
    return rundir.Progress.of(restored.counters)


_SCALING = "scaling."


def scaling_of(extra: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The amax histories among a checkpoint's extra tensors."""
    return {name.removeprefix(_SCALING): t for name, t in extra.items() if name.startswith(_SCALING)}


def save(job: Job) -> Path:
    """Write the run's state after `job.progress.step` steps. A collective."""
    extra = checkpoint.rng.collect(job.world.rank)
    if job.world.is_main:  # equal on all ranks after each step's reduction
        extra |= {_SCALING + name: tensor for name, tensor in fp8.scaling_state(job.model).items()}
    return checkpoint.save(
        job.directory / "checkpoints",
        job.progress.step,
        model=job.model,
        optimizer=job.stepper.optimizer,
        extra=extra,
        counters={
            **job.progress.counters(job.cfg, job.data),
            "threads": torch.get_num_threads(),
            **({"plan": plan_file.document(job.plan)} if planning.leaves_open(job.cfg) else {}),
        },
        world=job.world,
        keep=job.cfg.run.keep,
    )
