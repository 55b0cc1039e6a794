"""Asks a model, with its images if it has eyes. Greedy: the same question has the same answer.

TARGET is a run, a Hugging Face folder (plain or FP8), or an adapter folder, whose base is found or named. A run answers
as it was trained, FP8 weights by the recipe that multiplies by their codes, all else in high precision.

octavo generate runs/first --image cat.png --prompt "What is this?"
octavo generate ./Qwen3-VL-2B-Instruct-FP8 --prompt "Hello" --recipe off          the codes, dequantized
octavo generate runs/lora/adapter --load-in-fp8 rowwise --prompt "Hello"
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from octavo.cli import arguments, terminal
from octavo.cli.arguments import UsageError
from octavo.config import RECIPES
from octavo.config.sections import one_word

FROZEN = ("rowwise", "blockwise", "tensorwise", "off")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("target", metavar="TARGET", help="a run, a Hugging Face folder, or an adapter folder")
    parser.add_argument("--prompt", metavar="TEXT", required=True, help="the question")
    parser.add_argument("--image", metavar="FILE", action="append", default=[], help="may be given more than once")
    parser.add_argument("--max-new-tokens", type=arguments.positive, default=64, metavar="N", help="default 64")
    add_target_options(parser)
    arguments.add_json(parser)


def add_target_options(parser: argparse.ArgumentParser, base: str = "FOLDER") -> None:
    """How a target is opened: the options that generate and eval share."""
    recipes, kinds = ", ".join(RECIPES), ", ".join(FROZEN)
    parser.add_argument(
        "--recipe", metavar="NAME", type=one_word, choices=RECIPES, help=f"FP8 recipe of the whole model: {recipes}"
    )
    parser.add_argument("--backend", metavar="NAME", default="auto", help="kernels, e.g. reference (octavo doctor)")
    parser.add_argument("--base", metavar=base, help="of adapters: another base than the one they name")
    parser.add_argument(
        "--load-in-fp8", metavar="NAME", type=one_word, choices=FROZEN, help=f"quantize while loading: {kinds}"
    )
    parser.add_argument(
        "--step", type=arguments.positive, metavar="N", help="of a run: this checkpoint, not the newest"
    )


def look(args: argparse.Namespace, base: str | None) -> Any:
    """The target of the command line. Raises UsageError for a path that is no folder, and for options that do not
    belong to what it holds; TrainError for folders that hold nothing that could be opened."""
    folder = Path(args.target)
    if not folder.exists():
        raise UsageError(f"there is no folder {folder}; name a run, a Hugging Face folder or an adapter folder")

    from octavo import fp8
    from octavo.train import finished

    found = finished.look(folder, base)
    if args.step is not None and found.kind != "run":
        raise UsageError(f"--step chooses a checkpoint of a run, and {folder} is no run directory; leave --step out")
    if args.backend != "auto" and args.recipe == "off":
        raise UsageError("--backend names the kernels of an FP8 recipe, and --recipe off has none; leave one out")
    if args.backend not in ("auto", *fp8.backends()):
        raise UsageError(f"there is no backend {args.backend!r}; there are {', '.join(('auto', *fp8.backends()))}")
    return found


def run(args: argparse.Namespace) -> int:
    missing = [file for file in args.image if not Path(file).is_file()]
    if missing:
        raise UsageError(f"there is no image file {missing[0]}")
    if not args.prompt.strip():
        raise UsageError("--prompt is empty; ask something")
    if not args.prompt.isascii() and args.prompt.encode(errors="replace").decode() != args.prompt:
        raise UsageError("--prompt holds bytes that are no UTF-8; write it as UTF-8")
    answer, gemms, notes = ask(look(args, args.base), args)
    if args.json:
        terminal.show_json({"answer": answer, "fp8_gemms": gemms, "notes": list(notes)})
    else:
        terminal.note(f"{args.target}: {', '.join(notes)}" + (f"; {gemms} FP8 GEMMs" if gemms else ""))
        print(answer)
        if not answer.strip():
            terminal.note("(the model answered nothing)")
    return 0


def ask(found: Any, args: argparse.Namespace) -> tuple[str, int, tuple[str, ...]]:
    """The answer, how many FP8 GEMMs gave it, and how the model was opened."""
    import torch

    from octavo import fp8, models
    from octavo.data import images
    from octavo.train.forward import autocasts

    model, processor, notes = found.open(
        load_in_fp8=args.load_in_fp8, recipe=args.recipe, backend=args.backend, step=args.step, say=terminal.note
    )
    cfg = found.cfg
    system, megapixels = (None, 100.0) if cfg is None else (cfg.data.system, cfg.data.max_image_megapixels)
    loaded = [images.load(file, megapixels) for file in args.image]
    turns = (("system", system), ("user", args.prompt))
    messages: list[dict[str, Any]] = [{"role": role, "content": text} for role, text in turns if text]
    if not isinstance(processor, models.TextProcessor):  # as training writes them: in parts for those that see images
        for turn in messages:
            turn["content"] = [{"type": "text", "text": turn["content"]}]
        messages[-1]["content"][:0] = [{"type": "image"} for _ in loaded]
    device = next(model.parameters()).device
    bf16 = cfg is not None and autocasts(cfg, device)  # as training computes
    with torch.autocast(device.type, dtype=torch.bfloat16, enabled=bf16), fp8.count_gemms() as counts:
        answer = models.generate(model, processor, messages, loaded, args.max_new_tokens)
    return answer, counts.total(fp8=True), notes
