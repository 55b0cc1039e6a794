"""Assembly: from a configuration to everything a run needs, as one ordered list.

The order matters. The plan is made and shown before a weight is read; freezing comes before the plan is applied (a
frozen layer has no wgrad), FP8 before adapters (which stand around FP8 layers), both before sharding (FSDP2 swaps
parameters inside the converted layers), sharding before weights are read where there are several ranks (each reads its
shards) and before the optimizer (it must hold the shards), and resuming last, when everything that is filled exists.
What is assembled runs in :mod:`octavo.train.step.step`.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy
import torch
from torch import nn

from octavo import checkpoint, data, fp8, models, parallel
from octavo.base import accelerator, environment, hub
from octavo.checkpoint import compat
from octavo.checkpoint.run_state.files import read_state
from octavo.config import Config
from octavo.config.sections.rl import BEYOND_SFT
from octavo.fp8.optim import former_coat
from octavo.fp8.planning import document
from octavo.models.folder.folder import check_companions
from octavo.train.errors import TrainError
from octavo.train.forward import attention_kernel as attention
from octavo.train.forward import routing
from octavo.train.forward.forward import Forward, autocast_dtype, chunked_head, gathers_bf16, keep_towers_running
from octavo.train.run_dir import run_dir, start_from
from octavo.train.setup import frozen_base as base
from octavo.train.setup import model_folder, planning, token_counts
from octavo.train.setup.model_setup import assemble_model
from octavo.train.setup.phase import SFT, Phase
from octavo.train.setup.resolve_config import data_settings, processor_of, resolve_from_checkpoint
from octavo.train.setup.token_counts import Tokens
from octavo.train.step import compile, cuda_graphs
from octavo.train.step.optimizer import adamw
from octavo.train.step.precision_schedule import Course
from octavo.train.step.step import Stepper
from octavo.train.step.update import check_update, update_for


@dataclass
class Job:
    """A run, assembled."""

    cfg: Config
    world: parallel.World
    directory: Path
    processor: Any
    loader: data.Loader | data.PackLoader
    evalset: data.EvalSet | None
    plan: fp8.Plan
    notes: tuple[str, ...]
    stepper: Stepper
    progress: run_dir.Progress
    files: Mapping[str, Any]
    phase: Phase
    course: Course
    base: base.Base | None = None
    attention: Any = None  # the kernel or those of components (`attention.kept_of`), unless torch chooses
    first: Mapping[str, Any] | None = None  # the checkpoint that its first weights are of (`starting.note`)
    background: checkpoint.Background | None = None  # what writes checkpoints beside the steps (`run.save: async`)

    @property
    def model(self) -> nn.Module:
        return self.stepper.model


def build(
    cfg: Config, world: parallel.World, start: run_dir.Start, phase: Phase = SFT,
    say: Callable[[str], None] = lambda text: None,
    tell: Callable[[planning.Planned], Iterable[str]] = lambda planned: (),
) -> Job:  # fmt: skip
    """The ordered list. `start` says where the run begins (`rundir.enter`), `phase` what it learns from; `say` gets
    lines for people, `tell` makes those about the plan.

    Raises what its steps raise: TrainError, ModelError, DataError, PlanError, CheckpointError, each with its fix.
    """
    directory = start.directory
    first = None if start.first is None else start.first["path"]
    cfg = cfg.model_copy(update={"run": cfg.run.model_copy(update={"start_from": first})})
    check_possible(cfg, world)
    check_family(cfg)
    context = context_for(cfg, world)
    seed_everything(cfg.run.seed + world.rank)
    processor = processor_of(cfg)
    pixels = models.pixels_by(processor)
    if start.checkpoint is None:
        _record_machine(directory, cfg, world, processor)  # at once: it helps where the rest fails
    if cfg.run.hf and cfg.lora is None:
        check_companions(Path(cfg.model.path), copied=True)  # what hf/ would refuse at the end
    asked = data_settings(cfg)
    data.prepare(asked, processor, say)
    listed = {"report_path": run_dir.skipped(cfg)}
    share: dict[str, Any] = {"rank": world.data_rank, "world": world.data_size, **listed}
    place = {"place": start.place} if cfg.data.packing else {}
    loader = phase.loader(asked, processor, start_row=start.rows, **place, **share)
    # Ranks that share the rows of training have held-out rows of their own, each whole.
    evalset = phase.evalset(asked, processor, rank=world.rank, world=world.size, **listed)

    def count(family: models.Family, model: nn.Module) -> Tokens:
        return token_counts.count(asked, processor, family, model.config)

    saved = _saved_plan(world, start)
    made = cfg if start.checkpoint is None else resolve_from_checkpoint(cfg)
    plans, family, notes, prediction = planning.plan_run(made, world, count, saved, say)
    kept = {} if start.checkpoint is None else read_state(start.checkpoint)["counters"]
    course = Course.of(cfg, plans, {} if start.forked else kept)
    plan = course.at(max(1, start.step))  # what its newest weights were learnt by
    if kept and pixels is not None and (before := compat.pixels(kept)) != pixels:
        how = "install" if before == "torchvision" else "remove"
        say(f"note: its pixels were made by {before} and are made by {pixels} now, which resizes a little differently; "
            f"{how} torchvision to have the former")  # fmt: skip
    kernels = attention.decide(cfg, world, kept.get("attention"))
    notes = (*notes, *map(str, kernels), *model_folder.notes(cfg, processor))
    # Nobody goes on before the file is there: a reference model is quantized by it on every rank.
    world.from_main(lambda: _keep_plan(directory, saved, family.name, plans, plan, notes, prediction))
    for line in tell(planning.Planned(made, plans.main, family, notes, prediction, world.size)):
        say(line)
    if saved is not None and planning.leaves_open(cfg):
        say(
            f"note: a run that continues takes the plan that it began with, {saved}; fp8.plan is not read again, and "
            "recipe: auto measures nothing"
        )

    if cfg.train.cuda_graphs:
        _refuse(cuda_graphs.why_never(plan, world))
    model, lows, unread = assemble_model(made, world.device, plan, family, say, world.size, plans.plans)
    if evalset is not None and (ignored := models.ignored_settings(model)):
        say(f"note: {ignored}")
    attention.use(model, kernels)
    keep_less(model, family, plan, cfg, say)
    model.train()
    balance, load = routing.coefficient(cfg, model), routing.ExpertLoad(model)
    gather = torch.bfloat16 if gathers_bf16(cfg, world.size) else None
    packed = models.Packed(model, family, context) if cfg.data.packing else None
    dealt = parallel.Images(model, family, context) if context is not None and family.has_vision else None
    low = autocast_dtype(cfg, world.device) if gather is None else None
    forward = Forward(model, world, low, gather, packed, context, dealt)
    keep_towers_running(model, family, forward, world)
    head = losses_of(model, cfg, say)
    parallel.shard(model, family, world, gather=gather)
    if cfg.train.exchange == "fp8":
        outputs, experts = parallel.send_codes(model, world, models.cache_shape(model.config).dim)
        say(f"train.exchange: outputs of attention in {outputs} layers, rows of experts in {experts} go as FP8 codes")
    if unread is not None:
        world.at("loading the weights")
        lows, _ = parallel.fill(model, unread, world)
    rest = base.digests(model, world) if cfg.lora is not None else {}
    beside = base.Base.of(model, rest, world)
    if cfg.train.compile:
        compile.compile_blocks(model, family, cfg.optimizer.update == "backward" and bool(cfg.train.clip))
    optimizer = adamw(model, cfg)
    if lows:
        fp8.set_low(optimizer, model, lows)
    update = update_for(cfg, model, optimizer, world)
    stepper = phase.stepper(cfg, model, family, update, world, forward, balance, load if load.layers else None, head)
    if cfg.train.cuda_graphs:
        _refuse(cuda_graphs.why_not_this(model, family, balance))
        stepper.graphs = cuda_graphs.Graphs(model, world.device, stepper.loss_at, say)
    progress = resume(stepper, start, say, beside)
    found = beside if beside.whole else None
    phase.begin(stepper, processor, directory, progress.step, say)
    if start.checkpoint is not None:  # a resume that is refused leaves what the run was recorded on
        _record_machine(directory, cfg, world, processor)
    background = checkpoint.Background(world, world.device, cfg.run.encrypt) if cfg.run.save == "async" else None
    return Job(
        cfg, world, directory, processor, loader, evalset, plan, notes, stepper, progress, start.files, phase,
        course, found, attention.kept_of(kernels), start.first, background,
    )  # fmt: skip


def _record_machine(directory: Path, cfg: Config, world: parallel.World, processor: Any) -> None:
    """Write environment.json, on the main rank."""
    if not world.is_main:
        return
    origin = hub.origin(cfg.model.path)
    about = {**environment.describe(), "ranks": world.size, "pixels": models.pixels_by(processor)}
    if origin is not None:
        about["model"] = origin
    if (videos := getattr(processor, "videos", None)) is not None:
        about["video"] = models.videos_described(videos)
    run_dir.write_json(directory / "environment.json", about)


def _refuse(why: str | None) -> None:
    """CUDA graphs for a reason that would hold in every step."""
    if why is not None:
        raise TrainError(f"train.cuda_graphs: true cannot be: {why}. Or set train.cuda_graphs: false")


def _saved_plan(world: parallel.World, start: run_dir.Start) -> Path | None:
    """The plan of the run that is continued (None: a new run): its plan.json or, where a checkpoint was copied without
    it, the plan that the checkpoint holds, which then becomes the plan.json of this run. A collective."""
    if start.checkpoint is None or start.forked:
        return None
    checkpointed = start.checkpoint.resolve()
    beside = checkpointed.parent.parent / run_dir.PLAN

    def find() -> str:
        if beside.exists():
            return str(beside)
        kept = read_state(checkpointed)["counters"].get("plan")
        if kept is None:
            raise TrainError(
                f"the plan that {start.checkpoint} was trained by is in neither that checkpoint nor {beside}. Copy the "
                "run's plan.json there, beside the folder of its checkpoints"
            )
        run_dir.write_json(start.directory / run_dir.PLAN, kept)
        return str(start.directory.resolve() / run_dir.PLAN)

    return Path(world.from_main(find))


def _keep_plan(
    directory: Path, saved: Path | None, family: str, plans: fp8.Schedule, plan: fp8.Plan, notes: tuple[str, ...],
    prediction: fp8.Prediction | None,
) -> None:  # fmt: skip
    """Write the run's plan.json, unless the run continues by the one that is there, with all that `write_plan` puts
    into it and not only what a checkpoint keeps. One with layers that ran as one GEMM is written anew: they do so no
    more, as the notes say."""
    file = directory / run_dir.PLAN
    there = (run_dir.read_json(file) or {}) if saved == file.resolve() else {}
    if "rows" not in there or compat.ran_siblings_as_one(there):
        run_dir.write_plan(directory, family, plans, plan, notes, prediction)


def check_possible(cfg: Config, world: parallel.World) -> None:
    """Refuse what the configuration alone cannot: it depends on the processes and their device. Raises TrainError."""
    check_update(cfg, world)
    asked = {
        "train.offload_activations": cfg.train.offload_activations,
        "train.synchronize_per_layer": cfg.train.synchronize_per_layer,
        "optimizer.offload": cfg.optimizer.offload,
    }
    without_effect = [key for key, on in asked.items() if on]
    copies = [key for key in without_effect if key != "train.synchronize_per_layer"]
    if copies and accelerator.beside_host(world.device) and (lack := accelerator.why_no_streams(world.device)):
        off = " ".join(f"{key}=false" for key in copies)
        raise TrainError(f"{' and '.join(copies)}: the device cannot copy beside its work: {lack}. Set {off}")
    if without_effect and not accelerator.beside_host(world.device):
        raise TrainError(
            f"{' and '.join(without_effect)} {'needs' if len(without_effect) == 1 else 'need'} a GPU: on "
            f"{world.device} everything is in host memory already, and "
            f"nothing runs ahead. Set {' '.join(f'{key}=false' for key in without_effect)}"
        )


def check_family(cfg: Config) -> None:
    """Refuse a model that is planned here and not trained before anything of it is read but its configuration."""
    config = models.read_config(cfg.model.path)
    if (why := models.why_not_trained(config)) is not None:
        raise TrainError(
            f"model_type {config.model_type!r} is planned here and not trained: {why}. `octavo doctor --families` "
            "lists what trains"
        )
    if left := getattr(getattr(config, "audio_config", None), "encoder_layerdrop", 0):
        raise TrainError(
            f"{cfg.model.path}/config.json: encoder_layerdrop of audio_config is {left:g}, by which layers are left "
            "out at random in training, and what ran could not be held against the plan. Set it to 0"
        )
    if cfg.train.phase in BEYOND_SFT and getattr(config, "audio_config", None) is not None:
        raise TrainError(
            f"train.phase: {cfg.train.phase} is not for models of sound in this version ({config.model_type}). Use sft"
        )


def context_for(cfg: Config, world: parallel.World) -> parallel.Context | None:
    """The ranks that share rows with this one. Raises WorldError where heads are not to be dealt as asked. A
    collective."""
    if world.layout.context == 1:
        return None
    heads = models.read_config(cfg.model.path).get_text_config().num_attention_heads
    return parallel.context_of(world, cfg.parallel.ulysses, heads)


def losses_of(model: nn.Module, cfg: Config, say: Callable[[str], None]) -> fp8.ChunkedHead | None:
    """The head that gives losses without full logits, where the model allows it; else None, and `say` gets why."""
    if cfg.train.logits == "full":
        return None
    head = chunked_head(model)
    if isinstance(head, str):
        say(f"note: full logits are computed (train.logits: chunked cannot be): {head}")
        return None
    return head


def seed_everything(seed: int) -> None:
    """Seed python, numpy and torch, each rank its own way. Data order has its own generator, from run.seed alone."""
    random.seed(seed)
    numpy.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def keep_less(model: nn.Module, family: models.Family, plan: fp8.Plan, cfg: Config, say: Callable[[str], None]) -> None:
    """What blocks keep for backward beside their FP8 layers: attention without repeated heads, recomputation."""
    if any(plan.policy.activations_of(component) == "fp8" for component in family.components):
        try:
            models.use_attention(model, fp8.grouped_attention)
        except models.ModelError as error:  # it keeps more, and is as right
            say(f"note: attention keeps what it does in high precision: {error}")
    blocks = family.layers(model)
    asked = dict(cfg.train.recompute)
    for component, how in asked.items():
        own = [(name, block) for name, block in blocks if family.component_of(name) == component]
        if not own and how == asked["foundation"]:  # one word for all components, those that the model has
            continue
        if not own and how != "none":
            raise TrainError(
                f"train.recompute.{component}: {how}, and this {family.name} has no {component}. Remove it"
            )
        try:
            fp8.recompute(own, how)
        except ValueError as error:
            raise TrainError(f"train.recompute.{component}: {error}") from error
    if cfg.train.offload_activations:
        fp8.offload_activations(blocks)
    if cfg.train.synchronize_per_layer:
        fp8.synchronize_per_layer(blocks)


def resume(
    stepper: Stepper, start: run_dir.Start, say: Callable[[str], None], beside: base.Base | None = None
) -> run_dir.Progress:
    """Fill model, optimizer, amax histories and generators from the checkpoint that the run starts from, if any, whose
    frozen base must be the one that was loaded; or the model alone, from the one that it begins with."""
    if start.checkpoint is None:
        if start.first is not None:
            start_from.fill(stepper, Path(start.first["path"]), beside, say)
        return run_dir.Progress()
    world = stepper.world
    if beside is not None and beside.whole and not start.forked:  # a fork may have its base in FP8
        before = read_state(start.checkpoint)["counters"].get("base", {})
        base.same(before, beside.whole, start.checkpoint, stepper.cfg.model.path)
    restored = checkpoint.load(start.checkpoint, model=stepper.model, optimizer=stepper.optimizer, world=world)
    if note := former_coat(stepper.optimizer):
        say(f"note: {start.checkpoint}: {note}")
    if not start.forked:  # which begins histories of its own
        fp8.load_scaling_state(stepper.model, scaling_of(restored.extra))
    if stepper.update.scale is not None and (scale := restored.counters.get("loss_scale")):
        stepper.update.scale.load(scale, start.checkpoint)
    checkpoint.rng.restore(restored.extra, world.rank)
    stepper.resumed(restored.extra)
    before = (restored.ranks, restored.counters["threads"])
    now = (world.size, torch.get_num_threads())
    if before != now:
        say(
            f"saved by {before[0]} rank(s) of {before[1]} thread(s), continued on {now[0]} of {now[1]}: sums are "
            "taken in another order, so losses agree closely but not bit for bit"
        )
    return run_dir.Progress.of(restored.counters)


_SCALING = "scaling."


def scaling_of(extra: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The amax histories among a checkpoint's extra tensors."""
    return {name.removeprefix(_SCALING): t for name, t in extra.items() if name.startswith(_SCALING)}


def save(job: Job, folder: str = run_dir.CHECKPOINTS) -> Path | None:
    """Write the run's state after `job.progress.step` steps into a folder of the run; its weights alone, with the amax
    histories that they compute by, without `run.save_states`. None: it is copied, and `job.background` writes it, which
    must have nothing under way. A collective."""
    whole = job.cfg.run.save_states
    extra = checkpoint.rng.collect(job.world.rank) | job.stepper.state() if whole else {}
    if job.world.is_main:  # equal on all ranks after each step's reduction
        extra |= {_SCALING + name: tensor for name, tensor in fp8.scaling_state(job.model).items()}
    moment = checkpoint.take(
        job.progress.step,
        model=job.model,
        optimizer=job.stepper.optimizer,
        extra=extra,
        counters={
            **job.progress.counters(job.cfg, job.files),
            "threads": torch.get_num_threads(),
            "plan": document(job.course.schedule.main, spans=job.course.schedule.spans),
            **({} if job.course.adapt is None else {"adapt": job.course.to_json()}),
            **({} if job.base is None else {"base": job.base.whole}),
            **({} if job.attention is None else {"attention": job.attention}),
            **({} if job.first is None else {"start_from": dict(job.first)}),
            "pixels": models.pixels_by(job.processor),
            **({} if (scale := job.stepper.update.scale) is None else {"loss_scale": scale.state()}),
        },
        world=job.world,
        trained_only=job.cfg.lora is not None,
        weights_only=not whole,
    )
    if job.background is None:
        encrypt = job.cfg.run.encrypt
        return checkpoint.write(job.directory / folder, moment, job.world, keep=None, encrypt=encrypt)  # see `Saving`
    job.background.begin(job.directory / folder, moment)
    return None
