"""Runs one training job.

octavo train run.yaml
octavo train run.yaml train.lr=3e-4 --fp8-recipe rowwise
octavo train run.yaml run.resume=auto                          continue where the run stopped
torchrun --nproc-per-node 2 -m octavo train run.yaml
"""

from __future__ import annotations

import argparse
import dataclasses
import os
from typing import Any

from octavo.cli import arguments, terminal


def add_arguments(parser: argparse.ArgumentParser) -> None:
    arguments.add_config(parser)
    arguments.add_json(parser)


def run(args: argparse.Namespace) -> int:
    """Read the file and run it: :mod:`octavo.train.loop`, in the phase that the file names (:mod:`octavo.rl.run`)."""
    cfg = arguments.config(args)  # before torch is imported: a wrong file is answered at once

    from octavo import rl

    result = rl.run(cfg, console=terminal.console(stderr=args.json))
    if os.environ.get("RANK", "0") == "0":  # torchrun starts this once a rank; one of them speaks
        if args.json:
            terminal.show_json(dataclasses.asdict(result))
        else:
            conclude(result)
    return int(result.exit_code)


def conclude(result: Any) -> None:
    """How the run ended, in a few lines."""
    first = ("reward",) if "reward" in result.final else ("loss", "rewards/accuracies", "rewards/margins")
    told = (*first, "rollout_tokens_per_s", "training_tokens_per_s", "tokens_per_s")
    pairs = {name: terminal.number(result.final[name]) for name in told if name in result.final}
    if result.eval:
        pairs["held-out loss"] = terminal.number(result.eval["loss"])
        pairs["exact match"] = f"{100 * result.eval['exact_match']:.1f} % of {result.eval['questions']} questions"
        if "reward" in result.eval:
            pairs["held-out reward"] = f"{terminal.number(result.eval['reward'])} over {result.eval['completions']:.0f}"
        if "rewards/margins" in result.eval:
            told = f"{100 * result.eval['rewards/accuracies']:.1f} %, " if "rewards/accuracies" in result.eval else ""
            margin = terminal.number(result.eval["rewards/margins"])
            pairs["held-out preferences"] = f"{told}margin {margin} over {result.eval['preferences']:.0f}"
    if result.gain and "failed" in result.gain:
        pairs["FP8 gain"] = f"not measured: {result.gain['failed']}"
    elif result.gain:
        pairs["FP8 gain"] = f"{100 * result.gain['gain']:+.1f} % in forward and backward, measured over high precision"
    if result.skipped:
        pairs["skipped steps"] = str(result.skipped)
    print(f"{result.status} after step {result.steps}: {result.dir}")
    width = max(map(len, pairs), default=0)
    for name, value in pairs.items():
        print(f"  {name:<{width}}  {value}")
