"""Shows the recipe and kernel of every linear layer, and the reasons. Reads no weights, except with --first-batch.

octavo plan run.yaml
octavo plan run.yaml fp8.recipe=rowwise --all
octavo plan run.yaml --why                                     show why each backend was chosen or rejected
octavo plan run.yaml fp8.recipe=auto --measure --save plan.json   use FP8 only where it is faster; see docs/plan.md
octavo plan run.yaml --first-batch                             also run one batch, to find massive activations
octavo plan run.yaml 'fp8.rules=[{match: "**", recipe: off, first: 100}]'   a schedule over steps
octavo plan --shape qwen3_vl_8b --fp8-recipe rowwise fp8.image_projector.recipe=off
octavo plan --shape qwen3_vl_8b --measure --tokens foundation=8192,image_encoder=4096
octavo plan run.yaml --ranks 8 --card 80GB                     memory by kind, whether it fits, possible savings
octavo plan run.yaml --ranks 64 --parallel replicate=2,shard=8,context=4   FLOPs and communication volume
octavo plan run.yaml --cluster h100x8x8                        step time and the best mesh; see docs/scale.md
octavo plan --shape qwen3_vl_8b --fit 80GB                     the fastest settings that fit; see docs/memory.md
octavo plan run.yaml --shape llama2_7b                         settings of the file with a published model
"""

from __future__ import annotations

import argparse
import gc
import os
import re
import shlex
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from octavo.cli import arguments, terminal

if TYPE_CHECKING:  # commands import torch only when they need it
    from torch import nn

    from octavo.fp8 import Plan
from octavo.base.wording import count_noun, nearest
from octavo.config import Config, load_config
from octavo.config.sections.rl import BEYOND_SFT
from octavo.config.stages import keys_in_stage, stage_configs
from octavo.config.yaml.problems import describe_value


def add_arguments(parser: argparse.ArgumentParser) -> None:
    arguments.add_config(parser, file="?")
    # FILE.yaml is optional because --shape can replace its model; `_config` checks that one of them is given.
    parser.add_argument("--shape", metavar="NAME", help="published model to plan for, instead of model.path")
    parser.add_argument("--all", action="store_true", help="list repeated layers individually")
    parser.add_argument(
        "--why", action="store_true", help="also list the backend of each GEMM, and the rejected backends"
    )
    parser.add_argument(
        "--measure",
        action="store_true",
        help="time every distinct layer on this GPU, and use FP8 only where it is faster",
    )
    parser.add_argument(
        "--first-batch",
        action="store_true",
        help="read the weights and run the first micro-batch forward in high precision, to report massive activations",
    )
    parser.add_argument(
        "--tokens",
        metavar="COMPONENT=N,...",
        type=_tokens,
        help="number of tokens per forward in each component, e.g. image_encoder=4096,foundation=8192 (default: "
        "counted in the data)",
    )
    parser.add_argument(
        "--cache", metavar="FILE", help="file that stores measurements (default: in the user's cache folder)"
    )
    parser.add_argument("--ranks", metavar="N", type=arguments.positive, default=1, help="number of GPUs (default 1)")
    parser.add_argument(
        "--parallel",
        metavar="AXIS=N,...",
        type=_axes,
        default=[],
        help=f"sizes of the mesh axes {', '.join(AXES)}; see docs/scale.md",
    )
    parser.add_argument(
        "--cluster",
        metavar="NAME",
        help="estimate step time and find the best mesh on a cluster: e.g. h100x8x8 (8 nodes of 8 GPUs), or a file",
    )
    parser.add_argument(
        "--card", metavar="SIZE", help="check whether the run fits on a GPU with this much memory, e.g. 80GB or h100"
    )
    parser.add_argument(
        "--fit",
        metavar="SIZE",
        help="propose the fastest settings that fit in this much memory; key=value settings are kept",
    )
    parser.add_argument(
        "--stage", metavar="N", type=arguments.positive, help="plan this stage of train.stages (default: the last)"
    )
    parser.add_argument("--save", metavar="FILE", help="write the plan to an editable file for fp8.plan")
    arguments.add_json(parser)


def run(args: argparse.Namespace) -> int:
    gc.disable()  # imports create many long-lived objects, and collections take a tenth of the time
    try:
        return _run(args)
    finally:
        gc.enable()


def _check_options(args: argparse.Namespace) -> None:
    """Raise UsageError for options that contradict each other, and for a --save that cannot be written."""
    if args.cache is not None and not args.measure:
        raise arguments.UsageError("--cache stores measurements; add --measure, or remove --cache")
    if args.save is not None:
        _check_writable(Path(args.save), args.save)
    if args.fit is not None and (args.measure or args.save is not None or args.card is not None):
        raise arguments.UsageError("--fit only proposes settings; remove --measure, --save and --card")
    if args.first_batch and args.shape is not None:
        raise arguments.UsageError("--first-batch needs weights, which a published shape has not; remove one of them")
    if args.parallel and args.cluster is None and args.ranks == 1:
        raise arguments.UsageError("--parallel sets the mesh of several ranks; add their number, e.g. --ranks 64")


def _run(args: argparse.Namespace) -> int:
    _check_options(args)
    args.overrides.extend(f"parallel.{pair}" for pair in args.parallel)
    cfg, names = _stage(_config(args), args)
    if args.measure and cfg.fp8.plan is not None:
        raise arguments.UsageError(
            f"--measure creates a plan, but the configuration uses the plan of {cfg.fp8.plan}; remove one of them "
            "(fp8.plan=null)"
        )

    from octavo import fp8, models
    from octavo.cli import plan_memory, plan_step_time
    from octavo.cli.plan_layers import show
    from octavo.train.estimate.memory import Card
    from octavo.train.loop import summary
    from octavo.train.setup import planning
    from octavo.train.setup.resolve_config import resolve_recipe, resolve_steps, resolve_video

    for size in (args.card, args.fit):
        if size is not None:
            Card.parse(size)
    cluster = plan_step_time.cluster_of(args)
    cfg = cfg if args.shape is not None else resolve_video(resolve_recipe(cfg))
    if args.shape is None and any(rule.first is not None or rule.last is not None for rule in cfg.fp8.rules):
        cfg = resolve_steps(cfg)
    model, family, count = _model(args, cfg)
    tokens = measurements = None
    if args.measure:
        _require_gpu()
        tokens, measurements = _measure(args, cfg, model, family, count)
    elif args.tokens is not None:
        tokens = count()
    # Measurements are of one rank's forward, which has a part of the tokens under context parallelism.
    rank_tokens = None if tokens is None else tokens.shared(cfg.parallel.context)
    plan, family, notes = planning.plan_model(cfg, model, family, args.ranks, rank_tokens, measurements)
    plans = planning.make_schedule(cfg, plan, model, measurements)
    if (why := models.why_not_trained(model.config)) is not None:
        return _show_layers_only(args, plan, family, notes, why)
    massive, massive_notes = _massive_activations(args, cfg, plan)
    steps, reference = _describe_phase(cfg, args.ranks)
    notes = (*notes, *massive_notes, *map(str, _attention_choices(cfg, model)), *_folder_notes(args, cfg, model))
    if args.fit is not None:
        sizes, message = plan_memory.predicted(cfg, model, family, plan, tokens, args.fit, reference)
        fixed = [pair.partition("=")[0] for pair in arguments.overrides(args)]
        fixed += [key for key, name in names.items() if name in fixed]
        return plan_memory.show_fit(sizes, message, args, fixed, names)
    prediction = None if rank_tokens is None else planning.predict(plan, model, rank_tokens)
    if args.measure and not planning.has_open_recipes(cfg):
        notes = (*notes, _TRAIN_HINT)
    sizes, message = plan_memory.predicted(cfg, model, family, plan, tokens, args.card, reference)
    export_line, export_fits = _export_fits(args, cfg)
    if args.json:
        extra: dict[str, Any] = {} if prediction is None else {"prediction": prediction.to_json()}
        extra["export"] = export_fits
        extra |= {"step": steps} if steps else {}
        extra |= {"spans": _spans(plans)} if plans.spans else {}
        if args.first_batch:
            extra["massive_activations"] = massive
        extra["memory"] = _unless_unpredictable(lambda: plan_memory.as_json(sizes, message, args), args)
        if args.ranks > 1:
            extra["step_of_a_rank"] = plan_step_time.as_json(sizes, cluster, args)
        terminal.show_json({"family": family.name, **plan.to_json(), "notes": list(notes), **extra})
    else:
        predicted = [] if prediction is None else prediction.sentences()
        lines = [*summary.describe_plan(plan), *planning.describe_spans(plans), *steps, *predicted, export_line]
        print("\n".join(lines))
        shown = _unless_unpredictable(lambda: print(f"{plan_memory.line(sizes, args)}\n") or True, args)
        show(plan, notes, everything=args.all, why=args.why)
        if shown:
            plan_memory.show(sizes, message, args)
        if args.ranks > 1:
            plan_step_time.show(sizes, cluster, args)
    if args.save is not None:  # last, so that the plan is printed even if writing fails
        fp8.save_plan(plan, args.save, plans.spans)
        terminal.note(f"wrote {args.save}; use it with fp8.plan: {args.save}")
    return 0


def _massive_activations(
    args: argparse.Namespace, cfg: Config, plan: Plan
) -> tuple[dict[str, dict[str, object]], list[str]]:
    """Return (layer -> figures of its massive activations in the first micro-batch, notes about them); both are empty
    without --first-batch."""
    if not args.first_batch:
        return {}, []
    from octavo.train.artifacts.first_batch import read_first_inputs
    from octavo.train.forward.massive_activations import describe_massive, find_massive

    massive = find_massive(read_first_inputs(cfg, plan, terminal.note))
    if not massive:
        terminal.note("no input of an FP8 layer has massive activations in the first micro-batch")
    notes = [describe_massive(massive, plan)] if massive else []
    return {name: one.to_json() for name, one in massive.items()}, notes


def _spans(plans: Any) -> list[dict[str, Any]]:
    """Return the plan of each range of steps, for rules with `first` and `last`."""
    return [
        {"steps": [span.first, span.last], "share": span.plan.share, "rows": [row.to_json() for row in span.plan.rows]}
        for span in plans.spans
    ]


def _show_layers_only(args: argparse.Namespace, plan: Any, family: Any, notes: Sequence[str], why: str) -> int:
    """Print the plan of a model that Octavo cannot train; its memory is not predicted."""
    from octavo import fp8
    from octavo.cli.plan_layers import show
    from octavo.train.loop import summary

    known = f"model_type {family.name!r} can be planned but not trained: {why}"
    if args.card is not None or args.fit is not None or args.cluster is not None or args.ranks > 1:
        raise arguments.UsageError(f"{known}. Its memory and time are not predicted: remove {_MEMORY_OPTIONS}")
    notes = (*notes, f"{known}; its memory is not predicted")
    if args.json:
        terminal.show_json({"family": family.name, **plan.to_json(), "notes": list(notes)})
    else:
        print("\n".join([*summary.describe_plan(plan), ""]))
        show(plan, notes, everything=args.all, why=args.why)
    if args.save is not None:
        fp8.save_plan(plan, args.save)
        terminal.note(f"wrote {args.save}")
    return 0


_MEMORY_OPTIONS = "--card, --fit, --cluster and --ranks"


def _check_writable(path: Path, argument: str) -> None:
    """Raise UsageError for a path that cannot be written, before minutes of measuring. Creates nothing."""
    problem = ""
    try:
        folder = next(p for p in path.absolute().parents if p.exists())
        if not argument.strip():
            problem = "is empty"
        elif "\0" in argument:
            problem = "is not a path"
        elif path.is_dir():
            problem = "is a folder"
        elif not folder.is_dir():
            problem = f"cannot be created: {folder} is a file"
        elif not os.access(folder, os.W_OK):
            problem = f"cannot be written: no permission to write to {folder}"
        elif len(os.fsencode(path.name)) > 250:  # leaves room for the temporary name
            problem = "has too long a name"
    except (OSError, ValueError) as error:
        problem = f"is not a path ({getattr(error, 'strerror', None) or error})"
    if problem:
        raise arguments.UsageError(f"--save {argument!r} {problem}; name a file, e.g. --save plan.json")


def _unless_unpredictable(work: Callable[[], Any], args: argparse.Namespace) -> Any:
    """Return ``work()``, or None with a note if memory cannot be predicted. With --card the error is raised."""
    from octavo.train.errors import TrainError

    try:
        return work()
    except TrainError as error:
        if args.card is not None:
            raise
        terminal.note(f"note: memory is not predicted: {error}")
        return None


def _describe_phase(cfg: Any, ranks: int) -> tuple[list[str], str | None]:
    """Return (lines that describe a step, kind of the reference model) of phases preference and rl; empty for other
    phases."""
    if cfg.train.phase not in BEYOND_SFT:
        return [], None
    from octavo import rl

    return rl.describe_step(cfg, ranks), rl.reference_kind(cfg)


_TRAIN_HINT = (
    "octavo train uses the configured recipe; to use this plan, save it (--save FILE, then fp8.plan: FILE), or set "
    "fp8.recipe: auto"
)


def _stage(cfg: Config, args: argparse.Namespace) -> tuple[Config, dict[str, str]]:
    """Return the configuration of the stage to plan, and the names in it of the keys that stages set."""
    configs = stage_configs(cfg)
    number = args.stage or len(configs)
    if number > len(configs) or (args.stage is not None and not cfg.train.stages):
        stages = count_noun(len(cfg.train.stages), "stage") if cfg.train.stages else "no train.stages"
        raise arguments.UsageError(f"--stage {number}: the configuration has {stages}")
    if cfg.train.stages and args.stage is None:
        terminal.note(f"note: this is stage {number} of {number}; --stage plans another")
    return configs[number - 1], keys_in_stage(cfg, number - 1)


def _config(args: argparse.Namespace) -> Any:
    """Load the configuration; --shape replaces `model.path` and needs no data."""
    if args.shape is None:
        if args.file is None:
            raise arguments.UsageError(
                "name a configuration file, or a published model: octavo plan --shape qwen3_vl_8b"
            )
        return _load_file(args)
    if args.shape not in SHAPES:
        close = nearest(args.shape, SHAPES)
        hint = f"did you mean {close}? " if close else ""
        raise arguments.UsageError(
            f"there is no published shape {args.shape!r}; {hint}expected one of {', '.join(SHAPES)}"
        )
    if args.file is not None and "=" in args.file:  # without a file, argparse takes the first setting as FILE
        args.overrides.insert(0, args.file)
        args.file = None
    if args.measure and args.tokens is None:
        raise arguments.UsageError(
            "a published model has no data: set the number of tokens per forward in each component, e.g. "
            "--tokens foundation=8192, or for a vision model --tokens foundation=8192,image_encoder=4096"
        )
    if args.file is not None:  # settings of the file with this model
        return load_config(args.file, [f"model.path={args.shape}", *arguments.overrides(args)])
    settings = [f"model.path={args.shape}", "data.train=[{path: none}]", "train.steps=1"]
    if any(re.fullmatch(r"context=(?!1$)\d+", pair) for pair in args.parallel):  # context parallelism requires packing
        settings += ["data.packing=true", "train.micro_batch=1"]
    return load_config(None, [*settings, *arguments.overrides(args)])


#: the names in octavo.models.structure.shapes, which imports transformers
SHAPES = (
    "qwen3_vl_2b", "qwen3_vl_4b", "qwen3_vl_8b", "qwen3_vl_30b_a3b", "qwen3_vl_235b_a22b", "qwen2_5_vl_7b",
    "internvl3_5_8b", "llava_onevision_1_5_4b", "llava_onevision_1_5_8b", "nvila_8b", "qwen3_1_7b", "qwen3_8b",
    "qwen3_14b", "llama2_7b", "qwen2_5_0_5b", "mpt_1b",
)  # fmt: skip


def shape_of(path: str) -> str | None:
    """Guess the published model from the name of a folder: `.../Qwen3-VL-8B-Instruct` is qwen3_vl_8b."""

    def bare(text: str) -> str:
        return re.sub("[^a-z0-9]", "", text.lower())

    last = bare("/".join(Path(path).parts[-3:]))  # in the hub's cache the name is two folders up
    return max((name for name in SHAPES if bare(name) in last), key=len, default=None)


def _load_file(args: argparse.Namespace) -> Any:
    """Load the configuration. Missing data cause only a note, since a plan needs data only to count tokens."""
    cfg, missing = arguments.resolve_files(arguments.config(args), args.file)
    shape = None if Path(cfg.model.path).is_dir() else shape_of(cfg.model.path)
    if shape is not None and not missing[0].startswith("model.fp8_twin"):
        command = shlex.join(["octavo", "plan", args.file, *arguments.overrides(args), "--shape", shape])
        missing[0] += f"; its name matches a published model, which can be planned without the folder: {command}"
    is_composed = cfg.model.foundation is not None  # then the only message says why there is no model
    if missing and (
        is_composed or missing[0].startswith(("model.path", "model.fp8_twin")) or (args.measure and args.tokens is None)
    ):
        raise arguments.UsageError("\n".join(missing))
    for sentence in missing:
        terminal.note(f"note: {sentence}")
    return cfg


def _model(args: argparse.Namespace, cfg: Any) -> tuple[Any, Any, Callable[[], Any]]:
    """Return (model without weights, family, function that counts its tokens)."""
    from octavo.models.structure import shapes
    from octavo.train.setup import frozen_base, planning
    from octavo.train.setup import token_counts as tokens
    from octavo.train.setup.resolve_config import data_settings, load_processor

    model: nn.Module
    if args.shape is not None:
        model, family = shapes.shape_model(args.shape)
        frozen_base.prepare_meta_model(model, family, cfg)
    else:
        model, family = planning.meta_model(cfg)

    def count() -> Any:
        if args.tokens is not None:
            return tokens.complete_tokens(cfg, family, args.tokens)
        return tokens.count_tokens(data_settings(cfg), load_processor(cfg), family, model.config)

    return model, family, count


def _export_fits(args: argparse.Namespace, cfg: Config) -> tuple[str, dict[str, object]]:
    """Return how many layers each FP8 format of `octavo export` takes, as a line and as JSON."""
    from octavo.checkpoint.export.formats import describe_fits
    from octavo.checkpoint.export.layout import ExportModel
    from octavo.models.structure import shapes

    if args.shape is not None:
        return describe_fits(ExportModel.of(shapes.shape_model(args.shape)[0], args.shape))
    return describe_fits(ExportModel.read(cfg.model.path))


def _attention_choices(cfg: Any, model: Any) -> Any:
    """Return the attention kernels that a run on this machine would use, or nothing where torch chooses at each
    call."""
    from octavo.base import accelerator
    from octavo.train.forward import attention_kernel

    return attention_kernel.choices(
        cfg, attention_kernel.heads_of(model.config, cfg.train.seq_length), accelerator.default_device()
    )


def _folder_notes(args: argparse.Namespace, cfg: Any, model: Any) -> Sequence[str]:
    """Return notes about the model folder (`octavo.train.setup.model_folder`); nothing for a published model or without
    a tokenizer. Raises ModelError for a tokenizer or weights that do not belong to the model."""
    from octavo import models
    from octavo.models.folder.folder import find_file
    from octavo.models.processors.processors import load_for_chat
    from octavo.train.setup import model_folder

    names = ("tokenizer.json", "tokenizer_config.json")
    if args.shape is None:
        models.check_no_integers(cfg.model.path, model)
    if args.shape is not None or not any(find_file(Path(cfg.model.path), name).exists() for name in names):
        return ()
    return model_folder.notes(cfg, load_for_chat(cfg.model.path))


def _require_gpu() -> None:
    from octavo.base import accelerator

    if not accelerator.is_gpu(accelerator.default_device()):
        raise arguments.UsageError(
            "--measure needs a GPU: on a CPU FP8 is emulated, so its times are not meaningful. Measure on the machine "
            "that will train; without --measure, recipe auto uses the table in docs/plan.md"
        )


def _measure(args: argparse.Namespace, cfg: Any, model: Any, family: Any, count: Callable[[], Any]) -> tuple[Any, Any]:
    from octavo.base import accelerator
    from octavo.train.setup import planning

    tokens = count()
    rank_tokens = tokens.shared(cfg.parallel.context)
    with terminal.progress("measuring", bytes=False, fallback=_note_measured) as progress:
        measurements = planning.measure_recipes(
            cfg, model, family, accelerator.default_device(), rank_tokens, progress, args.cache
        )
    return tokens, measurements


def _note_measured(done: int, total: int, name: str) -> None:
    terminal.note(f"measured {done} of {total}{name and ': now ' + name}")


AXES = ("replicate", "shard", "context", "ulysses", "expert")


def _axes(text: str) -> list[str]:
    """Argparse type: ``axis=N,axis=N``."""
    pairs = [pair.strip() for pair in text.split(",")]
    names = [pair.partition("=")[0] for pair in pairs]
    if duplicate := next((name for name in names if names.count(name) > 1), None):
        raise argparse.ArgumentTypeError(f"expected each axis once, found {duplicate} twice")
    for pair in pairs:
        name, _, number = pair.partition("=")
        if name not in AXES or not (number.isdecimal() or number == "auto") or len(number) > 6:
            raise argparse.ArgumentTypeError(
                "expected axes with their sizes, e.g. replicate=2,shard=8,context=4,expert=8, found "
                f"{describe_value(pair)}; axes are {', '.join(AXES)}"
            )
    return pairs


def _tokens(text: str) -> dict[str, int]:
    """Argparse type: ``component=N,component=N``."""
    counts: dict[str, int] = {}
    for pair in text.split(","):
        name, _, number = (part.strip() for part in pair.partition("="))
        if not name or not number.isdecimal() or len(number) > 12 or name in counts:
            raise argparse.ArgumentTypeError(
                "expected each component once with an integer below 10**12, e.g. foundation=8192, found "
                f"{describe_value(pair)}"
            )
        counts[name] = int(number)
    return counts
