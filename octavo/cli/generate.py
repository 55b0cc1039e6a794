"""Asks a trained model, with its images if it has eyes. Greedy: the same question has the same answer.

A run answers in the FP8 it was trained in; a checkpoint folder in high precision, unless a recipe is asked for.
octavo generate runs/first --image cat.png --prompt "What is this?"
octavo generate ./Qwen3-VL-2B-Instruct --prompt "Hello" --recipe blockwise
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from octavo.cli import arguments, terminal
from octavo.cli.arguments import UsageError
from octavo.config import RECIPES


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL", help="a run directory, or a checkpoint folder")
    parser.add_argument("--prompt", metavar="TEXT", required=True, help="the question")
    parser.add_argument("--image", metavar="FILE", action="append", default=[], help="may be given more than once")
    parser.add_argument("--recipe", metavar="NAME", choices=RECIPES, help=", ".join(RECIPES))
    parser.add_argument(
        "--step", type=arguments.positive, metavar="N", help="of a run: this checkpoint, not the newest"
    )
    parser.add_argument("--max-new-tokens", type=arguments.positive, default=64, metavar="N", help="default 64")
    arguments.add_json(parser)


def run(args: argparse.Namespace) -> int:
    folder = Path(args.model)
    if not folder.is_dir():
        raise UsageError(f"there is no folder {folder}; name a run directory or a checkpoint folder")
    missing = [file for file in args.image if not Path(file).is_file()]
    if missing:
        raise UsageError(f"there is no image file {missing[0]}")
    if not args.prompt.strip():
        raise UsageError("--prompt is empty; ask something")
    is_run = (folder / "config.yaml").is_file()
    if args.step is not None and not is_run:
        raise UsageError(f"--step chooses a checkpoint of a run, and {folder} is no run directory; leave --step out")
    answer, gemms = ask(folder, is_run, args)
    if args.json:
        terminal.show_json({"answer": answer, "fp8_gemms": gemms})
    else:
        terminal.note(f"{folder}: {f'{gemms} FP8 GEMMs' if gemms else 'high precision'}")
        print(answer)
    return 0


def ask(folder: Path, is_run: bool, args: argparse.Namespace) -> tuple[str, int]:
    """The answer, and how many FP8 GEMMs gave it."""
    import torch

    from octavo import fp8, models, train
    from octavo.data import images

    if is_run:
        model, processor, cfg = train.load_run(folder, args.step, args.recipe, say=terminal.note)
        system, megapixels, precision = cfg.data.system, cfg.data.max_image_megapixels, cfg.train.precision
    else:
        model, processor = _open(folder, args.recipe)
        system, megapixels, precision = None, 100.0, "auto"
    pictures = [images.load(file, megapixels) for file in args.image]
    content: list[dict[str, str]] = [{"type": "image"} for _ in pictures]
    messages: list[dict[str, Any]] = [{"role": "user", "content": [*content, {"type": "text", "text": args.prompt}]}]
    if system:
        messages.insert(0, {"role": "system", "content": [{"type": "text", "text": system}]})
    device = next(model.parameters()).device.type
    bf16 = precision == "bf16" or (precision == "auto" and device == "cuda")  # as training computes
    with torch.autocast(device, dtype=torch.bfloat16, enabled=bf16), fp8.count_gemms() as counts:
        answer = models.generate(model, processor, messages, pictures, args.max_new_tokens)
    return answer, counts.total(fp8=True)


def _open(folder: Path, recipe: str | None) -> tuple[Any, Any]:
    """Model and processor of a checkpoint folder."""
    import torch

    from octavo import fp8, models

    model = models.load(folder, device="cuda" if torch.cuda.is_available() else "cpu")
    if recipe not in (None, "off"):
        fp8.apply(model, fp8.plan(model, recipe, models.describe(model).components))
    return model, models.load_processor(folder)
