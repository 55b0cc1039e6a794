"""Assembly of a run: everything from the configuration to the stepper, in a fixed order.

The order matters:

- Data files are converted first, so that their errors are reported early.
- The plan is made and shown before rows are counted or weights are read.
- Freezing precedes the plan, because a frozen layer has no wgrad.
- FP8 conversion precedes adapters, which wrap FP8 layers. Both precede sharding, because FSDP2 replaces parameters
  inside the converted layers.
- With several ranks sharding precedes reading weights, so that each rank reads only its shards. It precedes the
  optimizer, which must hold the shards.
- Resuming is last, once everything that a checkpoint restores has been created.

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
from octavo.data.errors import NoUsableRow
from octavo.data.loaders.eval_set import EvalSet
from octavo.data.loaders.rows_from_config import prepare_datasets
from octavo.fp8.planning import Schedule, changed_casts
from octavo.models.folder.folder import check_companions
from octavo.models.structure.fp8_twin import describe_twin
from octavo.train.forward import attention_kernel, routing
from octavo.train.forward.forward import Forward, autocast_dtype, gathers_bf16, run_towers_on_dummy_inputs
from octavo.train.run_dir import run_dir
from octavo.train.setup import frozen_base, model_folder, planning, token_counts
from octavo.train.setup.checks import check_family, check_supported, refuse_cuda_graphs
from octavo.train.setup.job import Job
from octavo.train.setup.model_setup import assemble_model, make_chunked_head, reduce_saved_activations
from octavo.train.setup.phase import SFT, Phase
from octavo.train.setup.resolve_config import data_settings, load_processor, resolve_from_checkpoint
from octavo.train.setup.resume import resume, saved_plan, write_plan
from octavo.train.setup.token_counts import Tokens
from octavo.train.step import compile, cuda_graphs
from octavo.train.step.optimizer import adamw
from octavo.train.step.precision_schedule import PrecisionSchedule
from octavo.train.step.step import Stepper
from octavo.train.step.update import make_update

Log = Callable[[str], None]
DescribePlan = Callable[[planning.RunPlan], Iterable[str]]


def build(
    cfg: Config,
    world: parallel.World,
    start: run_dir.Start,
    phase: Phase = SFT,
    log: Log = lambda text: None,
    describe_plan: DescribePlan = lambda planned: (),
) -> Job:
    """Assemble a run.

    start          checkpoint and data position from which the run begins (`run_dir.enter`)
    phase          data and training step of the run
    log            called with each line to print
    describe_plan  returns the lines that describe the plan

    Raises: TrainError, ModelError, DataError, PlanError, CheckpointError.
    """
    initial_weights = None if start.initial_weights is None else start.initial_weights["path"]
    cfg = cfg.model_copy(update={"run": cfg.run.model_copy(update={"start_from": initial_weights})})
    check_supported(cfg, world)
    check_family(cfg)
    context = context_for(cfg, world)
    seed_everything(cfg.run.seed + world.rank)
    processor = _load_processor(cfg, world, start)
    settings = data_settings(cfg)
    prepare_datasets(settings, processor, log)
    planned = _plan_run(cfg, world, start, settings, processor, log, describe_plan)
    data = _open_data(settings, processor, world, start, phase)
    built = _build_model(cfg, world, context, data, planned, log)
    stepper = phase.stepper(built.stepper, processor, start.directory, start.step, log)
    if cfg.train.cuda_graphs:
        stepper.cuda_graphs = cuda_graphs.CudaGraphs(stepper.model, world.device, stepper.loss_at_positions, log)
    progress = resume(stepper, start, log, built.base)
    phase.begin(stepper, processor, start.directory, progress.step, log)
    if start.checkpoint is not None:  # after resuming, so that a failed resume does not change the record
        _record_environment(start.directory, cfg, world, processor)
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
        precision_schedule=planned.precision_schedule,
        base=built.base if built.base.fingerprint else None,
        attention=attention_kernel.saved_choices(planned.kernels),
        initial_weights=start.initial_weights,
        background=background,
    )


def _load_processor(cfg: Config, world: parallel.World, start: run_dir.Start) -> Any:
    """Load the processor of the model folder. For a new run, also write environment.json; with `run.hf`, check the
    other files of the folder that the run will copy to hf/."""
    processor = load_processor(cfg)
    if start.checkpoint is None:
        _record_environment(start.directory, cfg, world, processor)  # written first, for debugging a failed start
    if cfg.run.hf and cfg.lora is None:
        check_companions(Path(cfg.model.path), copied=True)  # fail now rather than when hf/ is written
    return processor


@dataclass(frozen=True)
class _Data:
    """Training and held-out data of a run."""

    loader: Any  # returned by `Phase.loader`
    evalset: EvalSet | None


def _open_data(cfg: Config, processor: Any, world: parallel.World, start: run_dir.Start, phase: Phase) -> _Data:
    """Open the training data at the run's next row, and the held-out data. `cfg` is the result of `data_settings`."""
    report = {"report_path": run_dir.skipped_path(cfg)}
    loader_args: dict[str, Any] = {"rank": world.data_rank, "world": world.data_size, **report}
    if cfg.data.packing:
        loader_args["pack_position"] = start.pack_position
    evalset_args = {"rank": world.rank, "world": world.size, **report}
    try:
        loader = phase.loader(cfg, processor, start_row=start.rows, **loader_args)
    except NoUsableRow as problem:
        try:  # held-out rows often have the same problem
            phase.evalset(cfg, processor, **evalset_args)
        except NoUsableRow as another:
            raise problem + another from None
        raise
    # Ranks that share training rows do not share held-out rows: each evaluates whole rows.
    evalset = phase.evalset(cfg, processor, **evalset_args)
    return _Data(loader, evalset)


@dataclass(frozen=True)
class _RunPlanning:
    """The plan of a run, and the decisions made along with it.

    cfg       configuration, without `lora.adapter` if the run has a checkpoint
    schedule  all plans of the run
    plan      plan in effect at the last completed step, or at step 1 in a new run
    """

    cfg: Config
    family: models.Family
    schedule: Schedule
    precision_schedule: PrecisionSchedule
    plan: fp8.Plan
    kernels: tuple[attention_kernel.Choice, ...]
    notes: tuple[str, ...]


def _plan_run(
    cfg: Config,
    world: parallel.World,
    start: run_dir.Start,
    settings: Config,
    processor: Any,
    log: Log,
    describe_plan: DescribePlan,
) -> _RunPlanning:
    """Make the plan of a new run or load the plan of a resumed run, write plan.json, and print the plan. `settings`,
    the result of `data_settings`, is used to count tokens."""

    def count(family: models.Family, model: Any) -> Tokens:
        return token_counts.count_tokens(settings, processor, family, model.config)

    saved = saved_plan(world, start) if start.checkpoint is not None else None
    counters = {} if start.checkpoint is None else read_state(start.checkpoint)["counters"]
    planned_cfg = cfg if start.checkpoint is None else resolve_from_checkpoint(cfg)
    schedule, family, notes, prediction = planning.plan_run(planned_cfg, world, count, saved, log)
    precision_schedule = PrecisionSchedule.from_counters(cfg, schedule, {} if start.forked else counters)
    plan = precision_schedule.plan_at(max(1, start.step))  # in effect at the last completed step
    _note_image_backend(counters, processor, log)
    # A fork is a new run: its configuration names its recipes, with the casts of this version.
    if start.checkpoint is not None and start.forked:
        changes = changed_casts(counters.get("plan") or {}, start.checkpoint, schedule)
        if changes:
            log(f"note: recipes of this fork have other casts than the run that it continues: {'; '.join(changes)}")
    kernels = attention_kernel.decide(cfg, world, counters.get("attention"))
    notes = (*notes, *map(str, kernels), *model_folder.notes(cfg, processor))
    # A collective, so that no rank continues before the file is written: each quantizes a reference model
    # according to it.
    world.run_on_main(lambda: write_plan(start.directory, saved, family.name, schedule, plan, notes, prediction))
    for line in describe_plan(planning.RunPlan(planned_cfg, schedule.main, family, notes, prediction, world.size)):
        log(line)
    if saved is not None and planning.has_open_recipes(cfg):
        log(f"note: a resumed run uses its saved plan ({saved}); fp8.plan and recipe: auto are ignored")
    return _RunPlanning(planned_cfg, family, schedule, precision_schedule, plan, kernels, notes)


def _note_image_backend(counters: Any, processor: Any, log: Log) -> None:
    """Log a note if the run resized its images with a different library before it was resumed."""
    backend = models.image_backend(processor)
    if not counters or backend is None:
        return
    previous = compat.image_backend(counters)
    if previous != backend:
        action = "install" if previous == "torchvision" else "remove"
        log(
            f"note: images were resized with {previous} before, and are resized with {backend} now, so pixels differ "
            f"slightly; {action} torchvision to restore {previous}"
        )


@dataclass(frozen=True)
class _StepperAndBase:
    """The stepper, which holds the model, and the fingerprint of the frozen weights."""

    stepper: Stepper
    base: frozen_base.FrozenBase


def _build_model(
    cfg: Config,
    world: parallel.World,
    context: parallel.Context | None,
    data: _Data,
    planned: _RunPlanning,
    log: Log,
) -> _StepperAndBase:
    """Build, convert and shard the model, load its weights, and create its forward and its optimizer."""
    # Order: see the module docstring.
    plan, family = planned.plan, planned.family
    if cfg.train.cuda_graphs:
        refuse_cuda_graphs(cuda_graphs.unsupported_run_reason(plan, world))
    model, lower_halves, unread_weights = assemble_model(
        planned.cfg, world.device, plan, family, log, world.size, planned.schedule.plans
    )
    if data.evalset is not None and (ignored := models.ignored_settings(model)):
        log(f"note: {ignored}")
    attention_kernel.use_kernels(model, planned.kernels)
    reduce_saved_activations(model, family, plan, cfg, log)
    model.train()
    aux_loss_coef, expert_load = routing.aux_loss_coef(cfg, model), routing.ExpertLoad(model)
    gather_dtype = torch.bfloat16 if gathers_bf16(cfg, world.size) else None
    packed = models.Packed(model, family, context) if cfg.data.packing else None
    image_sharding = (
        parallel.ImageSharding(model, family, context) if context is not None and family.has_vision else None
    )
    autocast = autocast_dtype(cfg, world.device) if gather_dtype is None else None
    forward = Forward(model, world, autocast, gather_dtype, packed, context, image_sharding)
    run_towers_on_dummy_inputs(model, family, forward, world)
    head = make_chunked_head(model, cfg, log)
    parallel.shard(model, family, world, gather_dtype=gather_dtype)
    if cfg.train.exchange == "fp8":
        outputs, experts = parallel.enable_fp8_exchange(model, world, models.cache_shape(model.config).dim)
        log(
            f"train.exchange: sending FP8 codes: attention outputs of {outputs} layers, expert rows of {experts} layers"
        )
    if unread_weights is not None:
        world.set_phase("loading the weights")
        lower_halves, _ = parallel.load_into_shards(model, unread_weights, world)
    digests = frozen_base.compute_digests(model, world) if cfg.lora is not None else {}
    frozen = frozen_base.FrozenBase.from_model(model, digests, world)
    if cfg.train.compile:
        compile.compile_blocks(model, family, cfg.optimizer.update == "backward" and bool(cfg.train.clip))
    optimizer = adamw(model, cfg)
    if lower_halves:
        fp8.AdamW.set_low(optimizer, model, lower_halves)
    update = make_update(cfg, model, optimizer, world)
    stepper = Stepper(
        cfg=cfg,
        model=model,
        family=family,
        update=update,
        world=world,
        forward=forward,
        aux_loss_coef=aux_loss_coef,
        expert_load=expert_load if expert_load.layers else None,
        head=head,
        uses_delayed_scaling=planned.precision_schedule.may_use_delayed_scaling,
    )
    if cfg.train.cuda_graphs:
        refuse_cuda_graphs(cuda_graphs.unsupported_model_reason(model, family, aux_loss_coef))
    return _StepperAndBase(stepper, frozen)


def _record_environment(directory: Path, cfg: Config, world: parallel.World, processor: Any) -> None:
    """Write environment.json, on the main rank."""
    if not world.is_main:
        return
    origin = hub.origin(cfg.model.path)
    record = {**environment.describe(), "ranks": world.size, "pixels": models.image_backend(processor)}
    if origin is not None:
        record["model"] = origin
    if cfg.model.fp8_twin is not None and (twin := describe_twin(cfg)) is not None:
        record["fp8_twin"] = twin
    if (videos := getattr(processor, "videos", None)) is not None:
        record["video"] = models.describe_videos(videos)
    run_dir.write_json(directory / "environment.json", record)


def context_for(cfg: Config, world: parallel.World) -> parallel.Context | None:
    """Return the context-parallel group of this rank, or None if context parallelism is off. Collective call. Raises
    WorldError if `parallel.ulysses` does not divide the number of heads."""
    if world.layout.context == 1:
        return None
    heads = models.read_config(cfg.model.path).get_text_config().num_attention_heads
    return parallel.make_context(world, cfg.parallel.ulysses, heads)


def seed_everything(seed: int) -> None:
    """Seed Python, NumPy and torch, differently on each rank. The order of data does not depend on this seed."""
    random.seed(seed)
    numpy.random.seed(seed % 2**32)
    torch.manual_seed(seed)
