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
from typing import Any

from octavo.base.recipe_specs import RECIPES_OF_KIND
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
            terminal.show_json(dataclasses.asdict(result))
        else:
            print_result(result)
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


def print_result(result: Any) -> None:
    """Print the status and the final metrics of a run."""
    # In reinforcement learning the loss does not measure progress; the reward does.
    first = ("reward",) if "reward" in result.final else ("loss", "rewards/accuracies", "rewards/margins")
    shown = (*first, "rollout_tokens_per_s", "training_tokens_per_s", "tokens_per_s")
    pairs = {name: terminal.number(result.final[name]) for name in shown if name in result.final}
    if result.eval:
        pairs["held-out loss"] = terminal.number(result.eval["loss"])
        if "exact_match" in result.eval:
            pairs["exact match"] = f"{100 * result.eval['exact_match']:.1f} % of {result.eval['questions']} questions"
        if "reward" in result.eval:
            pairs["held-out reward"] = f"{terminal.number(result.eval['reward'])} over {result.eval['completions']:.0f}"
        if "rewards/margins" in result.eval:
            share = result.eval.get("rewards/accuracies")
            in_order = "" if share is None else f"{100 * share:.1f} %, "
            margin = terminal.number(result.eval["rewards/margins"])
            pairs["held-out preferences"] = f"{in_order}margin {margin} over {result.eval['preferences']:.0f}"
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


def print_next_steps(result: Any, cfg: Config, args: argparse.Namespace) -> None:
    """Print the written files and the next command."""
    names = "hf", "adapter", "page.html", "metrics.jsonl", "proof.json"
    written = [name for name in names if (result.dir / name).exists()]
    print(f"wrote {', '.join(str(result.dir / name) for name in written)}")
    print(f"next: {_next(result, cfg, args)}")


def _next(result: Any, cfg: Config, args: argparse.Namespace) -> str:
    """Return the command to run next."""
    if result.status == "stopped":
        ranks = os.environ.get("WORLD_SIZE", "1")
        nproc = ["--nproc", ranks] if ranks != "1" and ranks == os.environ.get("LOCAL_WORLD_SIZE") else []
        resume = ["run.resume=auto"]
        if not cfg.run.save_states:  # a run cannot resume without optimizer states
            resume = [f"run.start_from={result.dir}", f"run.dir={result.dir}-2"]
        replaced = tuple(word.partition("=")[0] + "=" for word in ("run.resume", *resume))
        words = [word for word in arguments.overrides(args) if not word.startswith(replaced)]
        return shlex.join(["octavo", "train", args.file, *words, *resume, *nproc])
    run = shlex.quote(str(result.dir))
    if cfg.data.eval and not result.eval:
        return f"octavo eval {run}"
    if (result.dir / "adapter").is_dir():
        return f"octavo merge {run} {run}-merged"
    if (result.dir / "hf").is_dir():
        recipe = str(cfg.fp8.recipe)
        kind = "bf16" if recipe == "off" else "fp8-dynamic" if recipe in RECIPES_OF_KIND["row"] else "fp8-block"
        return f"octavo export {run} {run}-{kind.partition('-')[0]} --format {kind}"
    return f'octavo generate {run} --prompt "..."'
