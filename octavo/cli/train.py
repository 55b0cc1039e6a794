"""Runs a training job.

octavo train run.yaml
octavo train run.yaml train.lr=3e-4 --fp8-recipe rowwise
octavo train run.yaml run.resume=auto                          resume from the newest checkpoint
octavo train run.yaml --nproc 8                                use 8 GPUs of this machine (auto: all)
torchrun --nnodes 2 ... -m octavo train run.yaml               use several machines
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

from octavo.cli import arguments, launch_ranks, terminal
from octavo.config import Config


def add_arguments(parser: argparse.ArgumentParser) -> None:
    arguments.add_config(parser)
    parser.add_argument("--verbose", action="store_true", help="print the plan layer by layer, with all notes")
    parser.add_argument(
        "--nproc",
        metavar="N",
        type=launch_ranks.processes,
        default=1,
        help="number of processes on this machine, or auto for one per GPU (default 1)",
    )
    arguments.add_json(parser)


def run(args: argparse.Namespace) -> int:
    """Load the configuration and train (:mod:`octavo.train.loop.loop`) in its phase (:mod:`octavo.rl.run`)."""
    cfg = arguments.config(args)  # before the slow import of torch
    cfg = arguments.require_files(cfg, args.file)

    if args.nproc != 1 and (count := launch_ranks.resolve_process_count(args.nproc)) > 1:
        with arguments.importing():
            from octavo.parallel import Layout
        Layout.from_section(count, cfg.parallel)  # report a wrong mesh once instead of on each rank
        return launch_ranks.launch(_rank_arguments(args), count)
    with arguments.importing():
        from octavo import rl
        from octavo.report.run.live_page import Page

    page, console = Page(), terminal.console(stderr=args.json)
    result = rl.run(cfg, console=console, describe_plan=plan_printer(args.verbose, page.expect), watchers=[page])
    if os.environ.get("RANK", "0") == "0":  # under torchrun only rank 0 prints
        if args.json:
            terminal.show_json(result.to_json())
        else:
            print_result(result, cfg.train.phase)
            print_next_steps(result, cfg, args)
    return int(result.exit_code)


def _rank_arguments(args: argparse.Namespace) -> list[str]:
    """Return the command line of each rank."""
    flags = [f"--{name.replace('_', '-')}" for name in ("fp8_param_gather", "verbose", "json") if getattr(args, name)]
    valued = [(f"--{name.replace('_', '-')}", getattr(args, name)) for name in ("fp8_recipe", "fp8_format")]
    return ["train", args.file, *args.overrides, *flags, *(word for pair in valued if pair[1] for word in pair)]


def plan_printer(
    verbose: bool, predicted: Callable[[Any], None] = lambda footprint: None
) -> Callable[[Any], list[str]]:
    """Return a function that describes a plan, in short or layer by layer. `predicted` is called with the memory
    prediction."""
    from octavo import rl
    from octavo.cli.plan_layers import layers
    from octavo.train.loop.summary import describe_in_full, summary

    def describe_plan(planned: Any) -> list[str]:
        cfg = planned.cfg
        with_phase = dataclasses.replace(
            planned, reference=rl.reference_kind(cfg), steps=rl.describe_step(cfg, planned.ranks)
        )
        return describe_in_full(with_phase, layers, predicted) if verbose else summary(with_phase, predicted)

    return describe_plan


def print_result(result: Any, phase: str) -> None:
    """Print the status and the final metrics of a run in this phase."""
    # In reinforcement learning the loss does not measure progress; the reward does.
    first = ("reward",) if "reward" in result.final else ("loss", "rewards/accuracies", "rewards/margins")
    shown = (*first, "rollout_tokens_per_s", "training_tokens_per_s", "tokens_per_s")
    pairs = {name: terminal.number(result.final[name]) for name in shown if result.final.get(name) is not None}
    if "loss" in pairs and "rewards/margins" in result.final:
        pairs = {"preference loss" if name == "loss" else name: value for name, value in pairs.items()}
    if result.eval:
        from octavo.train.forward.evaluation import judged_by_exact_match, name_loss  # imports torch

        # A run of an earlier version that has finished already has the older names.
        held_out = name_loss(result.eval, phase)
        trained = {*pairs}
        for name in ("preference_loss", "loss", "answer_loss"):
            if held_out.get(name) is not None:
                pairs[f"held-out {name.replace('_', ' ')}"] = terminal.number(held_out[name])
        if "exact_match" in result.eval and judged_by_exact_match((*result.final, *result.eval)):
            pairs["exact match"] = f"{100 * result.eval['exact_match']:.1f} % of {result.eval['questions']} questions"
        if "reward" in result.eval:
            pairs["held-out reward"] = f"{terminal.number(result.eval['reward'])} over {result.eval['completions']:.0f}"
        if "rewards/margins" in result.eval:
            share = result.eval.get("rewards/accuracies")
            in_order = "" if share is None else f"{100 * share:.1f} %, "
            margin = terminal.number(result.eval["rewards/margins"])
            pairs["held-out preferences"] = f"{in_order}margin {margin} over {result.eval['preferences']:.0f}"
        if result.eval_step not in (None, result.steps):  # of a stopped run; the other figures are of its last step
            pairs |= {name: f"{pairs[name]} (after step {result.eval_step})" for name in pairs if name not in trained}
    if result.gain and "failed" in result.gain:
        pairs["FP8 gain"] = f"not measured: {result.gain['failed']}"
    elif result.gain:
        pairs["FP8 gain"] = (
            f"{100 * result.gain['gain']:+.1f} % in forward and backward, measured against high precision"
        )
    if result.skipped:
        pairs["skipped steps"] = str(result.skipped)
    if result.overflowed:
        pairs["FP16 overflows"] = f"{result.overflowed} steps skipped; each halved the scale"
    print(f"{result.status} after step {result.steps}: {result.dir}")
    width = max(map(len, pairs), default=0)
    for name, value in pairs.items():
        print(f"  {name:<{width}}  {value}")


def print_written(result: Any) -> None:
    """Print the files and folders that a run wrote."""
    names = "hf", "adapter", "page.html", "metrics.jsonl", "proof.json"
    written = [name for name in names if (result.dir / name).exists()]
    print(f"wrote {', '.join(str(result.dir / name) for name in written)}")


def print_next_steps(result: Any, cfg: Config, args: argparse.Namespace) -> None:
    """Print the written files and the next command."""
    print_written(result)
    others: list[str] = []
    if result.status == "stopped":
        command = _resume_command(result.dir, cfg, args)
    elif cfg.data.eval and not result.eval:
        command = f"octavo eval {shlex.quote(str(result.dir))}"
    else:
        command, *others = _export_commands(result.dir, cfg) or [
            f'octavo generate {shlex.quote(str(result.dir))} --prompt "..."'
        ]
    print(f"next: {command}{arguments.key_option(args)}")
    for other in others:
        print(f"or in FP8: {other}{arguments.key_option(args)}")


def _resume_command(run: Path, cfg: Config, args: argparse.Namespace) -> str:
    """Return the command that continues a stopped run."""
    ranks = os.environ.get("WORLD_SIZE", "1")
    nproc = ["--nproc", ranks] if ranks != "1" and ranks == os.environ.get("LOCAL_WORLD_SIZE") else []
    resume = ["run.resume=auto"]
    if not cfg.run.save_states:  # a run cannot resume without optimizer states
        resume = [f"run.start_from={run}", f"run.dir={run}-2"]
    replaced = tuple(word.partition("=")[0] + "=" for word in ("run.resume", *resume))
    words = [word for word in arguments.overrides(args) if not word.startswith(replaced)]
    return shlex.join(["octavo", "train", args.file, *words, *resume, *nproc])


def _export_commands(run: Path, cfg: Config) -> list[str]:
    """Return the command that writes the model for a server, in a format that its shapes permit, after a line with the
    reason; nothing for a run that wrote no model. An adapter is merged in BF16, or with a second command in FP8."""
    from octavo.checkpoint import CheckpointError
    from octavo.models import ModelError
    from octavo.train.artifacts import choose_target_format, inspect_target, is_trained_in_fp8

    adapter = (run / "adapter").is_dir()
    if not adapter and not (run / "hf").is_dir():
        return []
    format = "bf16"
    try:
        target = inspect_target(run)
        if adapter or is_trained_in_fp8(cfg) or target.quantization is not None:
            choice = choose_target_format(target)
            format = choice.format
            # Whether an adapter survives the rounding to FP8 shows in the merge itself.
            unless = " (bf16 if rounding would remove the adapter)" if adapter else ""
            print(f"export format: {choice}{unless}")
        elif cfg.fp8.recipe_of("foundation") != "off":
            print("note: in BF16, as the forward of the language model was: rounded weights may answer otherwise")
    except (CheckpointError, ModelError) as error:
        print(f"export format: bf16, because {error}")
    if not adapter:
        return [shlex.join(["octavo", "export", str(run), f"{run}-{format.partition('-')[0]}", "--format", format])]
    merge = ["octavo", "merge", str(run)]
    commands = [[*merge, f"{run}-merged", "--format", "bf16"]]
    if format != "bf16":
        commands.append([*merge, f"{run}-merged-fp8", "--format", "auto"])  # never fails for its format
    return [shlex.join(command) for command in commands]
