"""Runs one training job.

octavo train run.yaml
octavo train run.yaml train.lr=3e-4 --fp8-recipe rowwise
octavo train run.yaml run.resume=auto            continue where the run stopped
torchrun --nproc-per-node 2 -m octavo train run.yaml
"""

from __future__ import annotations

import argparse

from octavo.cli import arguments, terminal


def add_arguments(parser: argparse.ArgumentParser) -> None:
    arguments.add_config(parser)


def run(args: argparse.Namespace) -> int:
    cfg = arguments.config(args)  # before torch is imported: a wrong file is answered at once

    from octavo import train

    train.run(cfg, console=terminal.console())
    return 0
