"""Assembly: from a configuration to everything that a run needs, as one ordered list.

The order matters:

- Data files are converted first, so that their errors are reported early.
- The plan is made and shown before rows are counted or weights are read.
- Freezing precedes the plan, because a frozen layer has no wgrad.
- FP8 precedes adapters, which wrap FP8 layers. Both precede sharding, because FSDP2 replaces parameters inside the
  converted layers.
- With several ranks sharding precedes reading weights, because each rank reads its shards. It precedes the optimizer,
  which must hold the shards.
- Resuming is last, when everything that it fills exists.

:mod:`octavo.train.step.step` runs the result.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy
import torch

from octavo import checkpoint, fp8, models, parallel
from octavo.base import environment, hub
from octavo.checkpoint import compat
from octavo.checkpoint.run_state.files import read_state
from octavo.config import Config
from octavo.data.loaders.eval_set import EvalSet
from octavo.data.loaders.rows_from_config import prepare_datasets
from octavo.fp8.planning import Schedule
from octavo.models.folder.folder import check_companions
from octavo.train.forward import attention_kernel, routing
from octavo.train.forward.forward import Forward, autocast_dtype, gathers_bf16, keep_towers_running
from octavo.train.run_dir import run_dir
from octavo.train.setup import frozen_base, model_folder, planning, token_counts
from octavo.train.setup.checks import check_family, check_possible, refuse_cuda_graphs
from octavo.train.setup.job import Job
from octavo.train.setup.model_setup import assemble_model, keep_less, losses_of
from octavo.train.setup.phase import SFT, Phase
from octavo.train.setup.resolve_config import data_settings, processor_of, resolve_from_checkpoint
from octavo.train.setup.resume import keep_plan, resume, saved_plan
from octavo.train.setup.token_counts import Tokens
from octavo.train.step import compile, cuda_graphs
from octavo.train.step.optimizer import adamw
from octavo.train.step.precision_schedule import Course
from octavo.train.step.step import Stepper
from octavo.train.step.update import update_for

Log = Callable[[str], None]
DescribePlan = Callable[[planning.Planned], Iterable[str]]


def build(
    cfg: Config,
    world: parallel.World,
    start: run_dir.Start,
    phase: Phase = SFT,
    log: Log = lambda text: None,
    describe_plan: DescribePlan = lambda planned: (),
) -> Job:
    """Assemble a run.

    start           where the run begins (`run_dir.enter`)
    phase           its data and its training step
    log             called with each line to print
    describe_plan   returns the lines that describe the plan

    Raises what its parts raise: TrainError, ModelError, DataError, PlanError, CheckpointError, each with its fix.
    """
    first_weights = None if start.first is None else start.first["path"]
    cfg = cfg.model_copy(update={"run": cfg.run.model_copy(update={"start_from": first_weights})})
    check_possible(cfg, world)
    check_family(cfg)
    context = context_for(cfg, world)
    seed_everything(cfg.run.seed + world.rank)
    processor = _processor(cfg, world, start)
    settings = data_settings(cfg)
    prepare_datasets(settings, processor, log)
    planned = _plan(cfg, world, start, settings, processor, log, describe_plan)
    data = _data(settings, processor, world, start, phase)
    built = _model(cfg, world, context, data, planned, log)
    stepper = phase.stepper(built.stepper, processor, start.directory, start.step, log)
    if cfg.train.cuda_graphs:
        stepper.graphs = cuda_graphs.Graphs(stepper.model, world.device, stepper.loss_at, log)
    progress = resume(stepper, start, log, built.base)
    phase.begin(stepper, processor, start.directory, progress.step, log)
    if start.checkpoint is not None:  # after the resume, so that a refused one does not change the record
        _record_machine(start.directory, cfg, world, processor)
    background = checkpoint.BackgroundSaver(world, world.device, cfg.run.encrypt) if cfg.run.save == "async" else None
    return Job(
        cfg=cfg,
        world=world,
        directory=start.directory,
        processor=processor,
        loader=data.loader,
        evalset=data.evalset,
        plan=planned.plan,
        notes=planned.notes,
        stepper=stepper,
        progress=progress,
        files=start.files,
        phase=phase,
        course=planned.course,
        base=built.base if built.base.whole else None,
        attention=attention_kernel.kept_of(planned.kernels),
        first=start.first,
        background=background,
    )


def _processor(cfg: Config, world: parallel.World, start: run_dir.Start) -> Any:
    """The processor of the model folder. Also checks the folder's other files if the run will copy them into hf/."""
    processor = processor_of(cfg)
    if start.checkpoint is None:
        _record_machine(start.directory, cfg, world, processor)  # first, because it helps if the rest fails
    if cfg.run.hf and cfg.lora is None:
        check_companions(Path(cfg.model.path), copied=True)  # what hf/ would refuse at the end
    return processor


@dataclass(frozen=True)
class _Data:
    """The data of a run."""

    loader: Any  # the result of `Phase.loader`
    evalset: EvalSet | None


def _data(cfg: Config, processor: Any, world: parallel.World, start: run_dir.Start, phase: Phase) -> _Data:
    """The loader, starting at the run's next row, and held-out data. `cfg`: as octavo.data reads it."""
    report = {"report_path": run_dir.skipped(cfg)}
    share: dict[str, Any] = {"rank": world.data_rank, "world": world.data_size, **report}
    if cfg.data.packing:
        share["place"] = start.place
    loader = phase.loader(cfg, processor, start_row=start.rows, **share)
    # Ranks that share training rows do not share held-out rows: each evaluates whole ones.
    evalset = phase.evalset(cfg, processor, rank=world.rank, world=world.size, **report)
    return _Data(loader, evalset)


@dataclass(frozen=True)
class _Plan:
    """The plan of a run.

    cfg       the configuration, without `lora.adapter` if the run has a checkpoint
    schedule  all plans of the run
    plan      the one of the step from which it starts
    """

    cfg: Config
    family: models.Family
    schedule: Schedule
    course: Course
    plan: fp8.Plan
    kernels: tuple[attention_kernel.Choice, ...]
    notes: tuple[str, ...]


def _plan(
    cfg: Config,
    world: parallel.World,
    start: run_dir.Start,
    settings: Config,
    processor: Any,
    log: Log,
    describe_plan: DescribePlan,
) -> _Plan:
    """Make the plan of a new run or load that of a resumed one, write plan.json, and print it. `settings`: the
    configuration as octavo.data reads it, for counting tokens."""

    def count(family: models.Family, model: Any) -> Tokens:
        return token_counts.count(settings, processor, family, model.config)

    saved = saved_plan(world, start) if start.checkpoint is not None else None
    counters = {} if start.checkpoint is None else read_state(start.checkpoint)["counters"]
    planned_cfg = cfg if start.checkpoint is None else resolve_from_checkpoint(cfg)
    schedule, family, notes, prediction = planning.plan_run(planned_cfg, world, count, saved, log)
    course = Course.of(cfg, schedule, {} if start.forked else counters)
    plan = course.at(max(1, start.step))  # the plan under which its newest weights were trained
    _note_pixels(counters, processor, log)
    kernels = attention_kernel.decide(cfg, world, counters.get("attention"))
    notes = (*notes, *map(str, kernels), *model_folder.notes(cfg, processor))
    # A collective, so that no rank continues before the file is written: each quantizes a reference model by it.
    world.run_on_main(lambda: keep_plan(start.directory, saved, family.name, schedule, plan, notes, prediction))
    for line in describe_plan(planning.Planned(planned_cfg, schedule.main, family, notes, prediction, world.size)):
        log(line)
    if saved is not None and planning.leaves_open(cfg):
        log(
            f"note: a resumed run keeps its plan, {saved}; fp8.plan is not read again, and recipe: auto measures "
            "nothing"
        )
    return _Plan(planned_cfg, family, schedule, course, plan, kernels, notes)


def _note_pixels(counters: Any, processor: Any, log: Log) -> None:
    """Print a note if the resumed run resized images with another library."""
    pixels = models.image_backend(processor)
    if not counters or pixels is None:
        return
    before = compat.image_backend(counters)
    if before != pixels:
        how = "install" if before == "torchvision" else "remove"
        log(
            f"note: the run's images were resized by {before}, now they are by {pixels}, with slightly different "
            f"results; {how} torchvision to use the former again"
        )


@dataclass(frozen=True)
class _Model:
    """The model in a stepper for SFT, and the fingerprint of its frozen weights."""

    stepper: Stepper
    base: frozen_base.Base


def _model(
    cfg: Config,
    world: parallel.World,
    context: parallel.Context | None,
    data: _Data,
    planned: _Plan,
    log: Log,
) -> _Model:
    """Load, convert, shard and fill the model; create its forward and its optimizer."""
    # The order is that of this file's head.
    plan, family = planned.plan, planned.family
    if cfg.train.cuda_graphs:
        refuse_cuda_graphs(cuda_graphs.why_never(plan, world))
    model, lows, unread = assemble_model(
        planned.cfg, world.device, plan, family, log, world.size, planned.schedule.plans
    )
    if data.evalset is not None and (ignored := models.ignored_settings(model)):
        log(f"note: {ignored}")
    attention_kernel.use(model, planned.kernels)
    keep_less(model, family, plan, cfg, log)
    model.train()
    balance, load = routing.coefficient(cfg, model), routing.ExpertLoad(model)
    gather = torch.bfloat16 if gathers_bf16(cfg, world.size) else None
    packed = models.Packed(model, family, context) if cfg.data.packing else None
    image_sharding = (
        parallel.ImageSharding(model, family, context) if context is not None and family.has_vision else None
    )
    low = autocast_dtype(cfg, world.device) if gather is None else None
    forward = Forward(model, world, low, gather, packed, context, image_sharding)
    keep_towers_running(model, family, forward, world)
    head = losses_of(model, cfg, log)
    parallel.shard(model, family, world, gather=gather)
    if cfg.train.exchange == "fp8":
        outputs, experts = parallel.send_codes(model, world, models.cache_shape(model.config).dim)
        log(f"train.exchange: ranks send FP8 codes for attention outputs in {outputs} layers, expert rows in {experts}")
    if unread is not None:
        world.set_phase("loading the weights")
        lows, _ = parallel.fill(model, unread, world)
    frozen = frozen_base.Base.of(model, frozen_base.digests(model, world) if cfg.lora is not None else {}, world)
    if cfg.train.compile:
        compile.compile_blocks(model, family, cfg.optimizer.update == "backward" and bool(cfg.train.clip))
    optimizer = adamw(model, cfg)
    if lows:
        fp8.AdamW.set_low(optimizer, model, lows)
    update = update_for(cfg, model, optimizer, world)
    stepper = Stepper(
        cfg=cfg,
        model=model,
        family=family,
        update=update,
        world=world,
        forward=forward,
        balance=balance,
        load=load if load.layers else None,
        head=head,
        delayed=planned.course.may_delay,
    )
    if cfg.train.cuda_graphs:
        refuse_cuda_graphs(cuda_graphs.why_not_this(model, family, balance))
    return _Model(stepper, frozen)


def _record_machine(directory: Path, cfg: Config, world: parallel.World, processor: Any) -> None:
    """Write environment.json, on the main rank."""
    if not world.is_main:
        return
    origin = hub.origin(cfg.model.path)
    about = {**environment.describe(), "ranks": world.size, "pixels": models.image_backend(processor)}
    if origin is not None:
        about["model"] = origin
    if (videos := getattr(processor, "videos", None)) is not None:
        about["video"] = models.describe_videos(videos)
    run_dir.write_json(directory / "environment.json", about)


def context_for(cfg: Config, world: parallel.World) -> parallel.Context | None:
    """The ranks that share rows with this one, None without any. A collective. Raises WorldError if `parallel.ulysses`
    does not divide the heads."""
    if world.layout.context == 1:
        return None
    heads = models.read_config(cfg.model.path).get_text_config().num_attention_heads
    return parallel.make_context(world, cfg.parallel.ulysses, heads)


def seed_everything(seed: int) -> None:
    """Seed Python, NumPy and torch, differently on each rank. The order of data does not depend on it."""
    random.seed(seed)
    numpy.random.seed(seed % 2**32)
    torch.manual_seed(seed)
