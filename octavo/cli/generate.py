"""Generates answers to prompts; vision models also take images and videos.

Decoding is greedy unless a temperature is set. The same prompt, options and seed give the same answer, independent of
the number of prompts in a call.

TARGET is a run, a Hugging Face folder (plain or FP8), or an adapter folder. The base of an adapter is found by its
name, or set with --base. A run uses the FP8 recipe of its weights, and high precision for all other layers.

octavo generate runs/first --image cat.png --prompt "What is this?"
octavo generate ./Qwen3-VL-2B-Instruct-FP8 --prompt "Hello" --recipe off          dequantize FP8 weights
octavo generate runs/first --video clip.mp4 --prompt "What happens?"
octavo generate runs/first --video ./frames --fps 4 --prompt "What happens?"
octavo generate runs/first --prompt "Hello" --prompt "Who?" --samples 4 --temperature 1 --top-p 0.9 --seed 7
octavo generate runs/lora/adapter --load-in-fp8 rowwise --prompt "Hello"
octavo generate ./Qwen3.5-4B --prompt "Hello" --template-arg enable_thinking=false
"""

from __future__ import annotations

import argparse
import json
import re
from pathlib import Path
from typing import Any

from octavo.base.wording import count_noun
from octavo.cli import arguments, terminal
from octavo.cli.arguments import UsageError
from octavo.config import RECIPES
from octavo.config.sections import names
from octavo.config.sections.names import canonical_name
from octavo.config.sections.video import FPS_RANGE, parse_fps

IMAGE, VIDEO = "<image>", "<video>"  # placeholders, as in training data
FROZEN = (*names.FROZEN, "off")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("target", metavar="TARGET", help="a run, a Hugging Face folder, or an adapter folder")
    repeatable = "may be repeated"  # argparse does not show that an option appends
    parser.add_argument(
        "--prompt",
        metavar="TEXT",
        action="append",
        required=True,
        help=f"prompt; {IMAGE} and {VIDEO} mark where each input goes (default: at the start); {repeatable}",
    )
    parser.add_argument(
        "--image", metavar="FILE", action="append", default=[], help=f"image for every prompt; {repeatable}"
    )
    parser.add_argument(
        "--video", metavar="FILE", action="append", default=[],
        help=f"video (mp4, mov, webm, mkv, or a folder of frames) for every prompt; {repeatable}",
    )  # fmt: skip
    parser.add_argument(
        "--fps", metavar="N", type=_rate, help="frame rate of folders of frames; video files contain their rate"
    )
    parser.add_argument(
        "--max-new-tokens",
        type=arguments.positive,
        default=64,
        metavar="N",
        help="length limit of an answer (default 64)",
    )
    parser.add_argument(
        "--template-arg", metavar="NAME=VALUE", action="append", default=[], type=_variable,
        help=f"chat template variable, e.g. enable_thinking=false; added to a run's data.template_args; {repeatable}",
    )  # fmt: skip
    choice = parser.add_argument_group("sampling")
    choice.add_argument(
        "--samples", type=arguments.positive, default=1, metavar="N", help="number of answers per prompt (default 1)"
    )
    choice.add_argument("--temperature", type=float, default=0.0, metavar="T", help="default 0: greedy decoding")
    choice.add_argument(
        "--top-p",
        type=float,
        default=1.0,
        metavar="P",
        help="nucleus sampling: keep the smallest set of tokens with total probability P",
    )
    choice.add_argument(
        "--top-k", type=arguments.natural, default=0, metavar="K", help="keep only the K most likely tokens (0: all)"
    )
    choice.add_argument(
        "--min-p",
        type=float,
        default=0.0,
        metavar="P",
        help="drop tokens with less than P times the highest probability",
    )
    choice.add_argument("--seed", type=arguments.natural, default=0, metavar="N", help="random seed (default 0)")
    choice.add_argument(
        "--stop", metavar="TEXT", action="append", default=[], help=f"text that ends an answer; {repeatable}"
    )
    choice.add_argument(
        "--kv",
        choices=("bf16", "fp8"),
        default="bf16",
        help="format of the KV cache: the compute dtype (bf16) or FP8 (default bf16)",
    )
    add_target_options(parser)
    arguments.add_json(parser)


def _rate(text: str) -> float:
    """Argparse type: frames per second."""
    if (rate := parse_fps(text)) is None:
        raise argparse.ArgumentTypeError(f"expected {FPS_RANGE}, found {text!r}")
    return rate


def _variable(text: str) -> tuple[str, Any]:
    """Argparse type: NAME=VALUE, where the value is JSON, or else text."""
    name, equals, value = text.partition("=")
    if not equals or not name:
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=VALUE")
    try:
        return name, json.loads(value)
    except ValueError:
        return name, value


def add_target_options(parser: argparse.ArgumentParser, base: str = "FOLDER") -> None:
    """Add the options that select how TARGET is loaded (shared by generate and eval)."""
    recipes, kinds = ", ".join(RECIPES), ", ".join(FROZEN)
    parser.add_argument(
        "--recipe",
        metavar="NAME",
        type=canonical_name,
        choices=RECIPES,
        help=f"FP8 recipe for the whole model: {recipes}",
    )
    parser.add_argument(
        "--backend",
        metavar="NAME",
        default="auto",
        help="backend of FP8 GEMMs; `octavo doctor` lists them (default auto)",
    )
    parser.add_argument("--base", metavar=base, help="base model of an adapter (default: the one in its configuration)")
    parser.add_argument(
        "--load-in-fp8",
        metavar="NAME",
        type=canonical_name,
        choices=FROZEN,
        help=f"quantize weights while loading: {kinds}",
    )
    parser.add_argument(
        "--step",
        type=arguments.positive,
        metavar="N",
        help="step of the checkpoint to use, for a run (default: the newest)",
    )


def inspect_target(args: argparse.Namespace, base: str | None) -> Any:
    """Return the target of the command line. Raises UsageError for a path that is not a folder and for options that do
    not apply to the target, and TrainError for folders that contain no loadable model."""
    folder = Path(args.target)
    if not folder.exists():
        raise UsageError(f"there is no folder {folder}; name a run, a Hugging Face folder or an adapter folder")

    with arguments.importing():
        from octavo.fp8 import kernels
        from octavo.train import artifacts

    target = artifacts.inspect_target(folder, base)
    if args.step is not None and target.kind != "run":
        raise UsageError(f"--step chooses a checkpoint of a run, and {folder} is not a run directory; remove --step")
    if args.backend != "auto" and args.recipe == "off":
        raise UsageError("--backend names the kernels of an FP8 recipe, and --recipe off has none; remove one of them")
    if args.backend not in ("auto", *kernels.names()):
        raise UsageError(f"there is no backend {args.backend!r}; there are {', '.join(('auto', *kernels.names()))}")
    return target


def run(args: argparse.Namespace) -> int:
    missing = [file for file in args.image if not Path(file).is_file()]
    if missing:
        raise UsageError(f"there is no image file {missing[0]}")
    if missing := [file for file in args.video if not Path(file).exists()]:
        raise UsageError(f"there is no video {missing[0]}")
    # A folder of frames has no timestamps, so its rate must come from --fps or the configuration.
    folders = [file for file in args.video if Path(file).is_dir()]
    if args.fps is not None and not folders:
        what = f"{args.video[0]} is a video file, which has its own rate" if args.video else "there is no --video"
        raise UsageError(f"--fps is the rate of a folder of frames, and {what}; remove it")
    for prompt in args.prompt:
        if not prompt.strip():
            raise UsageError("--prompt is empty; ask something")
    for option, texts in (("--prompt", args.prompt), ("--stop", args.stop)):
        if any(text.encode(errors="replace").decode() != text for text in texts):
            raise UsageError(f"{option} is not UTF-8; write it as UTF-8")
    if args.samples > 1 and not args.temperature:
        raise UsageError(
            f"--samples {args.samples} without --temperature would repeat one answer {args.samples} times; set "
            "--temperature"
        )
    target = inspect_target(args, args.base)
    if folders and args.fps is None and _folder_fps(target.cfg) is None:
        raise UsageError(
            f"--video {folders[0]} is a folder of frames without a known rate; add --fps, its frames per second"
        )
    _check_sealed(target.base, args)
    answers, gemms, notes = ask(target, args)
    single = len(args.prompt) == args.samples == 1
    if args.json:
        payload = {"answer": answers[0][0]} if single else {"answers": answers}
        terminal.show_json({**payload, "fp8_gemms": gemms, "notes": list(notes)})
        return 0
    terminal.note(f"{args.target}: {', '.join(notes)}" + (f"; {gemms} FP8 GEMMs" if gemms else ""))
    for prompt, samples in zip(args.prompt, answers, strict=True):
        if len(args.prompt) > 1:
            terminal.note(prompt)
        for answer in samples:
            print(answer)
            if not answer.strip():
                terminal.note("(the model generated an empty answer)")
    return 0


def _check_sealed(base: Path, args: argparse.Namespace) -> None:
    """Check that a sealed model gets only sealed words and no images. Raises UsageError."""
    from octavo import models
    from octavo.base.seal_note import read_note

    if read_note(base, UsageError) is None:
        return
    if inputs := [*args.image, *args.video]:
        raise UsageError(
            f"{base} is sealed: it takes pixels permuted by a key, and {inputs[0]} is not permuted. Use the plain "
            "model, which octavo unseal restores"
        )
    known = models.load_tokenizer(base).get_vocab()
    if unknown_word := next((word for prompt in args.prompt for word in prompt.split() if word not in known), None):
        raise UsageError(
            f"{base} is sealed, and {unknown_word!r:.40} is not in its vocabulary: translate prompts with `octavo seal "
            "text` and answers with `octavo unseal text`"
        )


def _folder_fps(cfg: Any) -> float | None:
    """Return the frame rate of folders of frames in the configuration of a run, or None if it is not set."""
    video = None if cfg is None else cfg.data.video
    return None if video is None else video.folder_fps


def ask(target: Any, args: argparse.Namespace) -> tuple[list[list[str]], int, tuple[str, ...]]:
    """Generate the answers to each prompt. Returns them, the number of FP8 GEMMs, and notes on how the model was
    loaded."""
    from octavo import fp8, generation, models
    from octavo.data.loaders.rows_from_config import decode_videos
    from octavo.data.rows import audio_refs, image_refs
    from octavo.models.folder import chat
    from octavo.train.forward.forward import autocast_dtype

    model, processor, notes = target.open(
        load_in_fp8=args.load_in_fp8, recipe=args.recipe, backend=args.backend, step=args.step, log=terminal.note
    )
    if args.template_arg:
        chat.set_template_args(processor, {**processor.template_args, **dict(args.template_arg)}, target.base)
    cfg = target.cfg
    system, megapixels = (None, 100.0) if cfg is None else (cfg.data.system, cfg.data.max_image_megapixels)
    loaded = [image_refs.load(file, megapixels) for file in args.image]
    if hasattr(processor, "sound_limits") and any(audio_refs.PLACEHOLDER in prompt for prompt in args.prompt):
        raise UsageError(
            f"--prompt has a placeholder for audio ({audio_refs.PLACEHOLDER}), and this command does not take audio in "
            "this version; use generate of transformers, or evaluate rows with `octavo eval`"
        )
    is_vision_model = not isinstance(processor, models.TextProcessor)
    videos = decode_videos(args.video, processor, cfg, args.fps)
    counts = {IMAGE: len(loaded), VIDEO: len(videos)}
    conversations = [(_messages(system, prompt, counts, is_vision_model), loaded, videos) for prompt in args.prompt]
    sampling = generation.Sampling(
        args.max_new_tokens, args.temperature, args.top_p, args.top_k, args.min_p, tuple(args.stop), args.seed
    )
    autocast = None if cfg is None else autocast_dtype(cfg, next(model.parameters()).device)  # as in training
    context = generation.Context(autocast=autocast)
    with fp8.count_gemms() as gemms:
        answers = generation.answers(
            model, processor, conversations, sampling, context, samples=args.samples, kv=args.kv, log=terminal.note
        )
    return answers, gemms.total(fp8=True), notes


def _messages(system: str | None, prompt: str, counts: dict[str, int], is_vision_model: bool) -> list[dict[str, Any]]:
    """Format a prompt as training does: with content parts for vision models. `counts`: placeholder -> number of images
    or videos."""
    turns = (("system", system), ("user", prompt))
    messages: list[dict[str, Any]] = [{"role": role, "content": text} for role, text in turns if text]
    if is_vision_model:
        for turn in messages:
            turn["content"] = [{"type": "text", "text": turn["content"]}]
        messages[-1]["content"] = _content_parts(prompt, counts)
    return messages


def _content_parts(prompt: str, counts: dict[str, int]) -> list[dict[str, Any]]:
    """Split a prompt into parts: text, and images and videos at their placeholders, else first. Raises UsageError."""
    types = {IMAGE: "image", VIDEO: "video"}
    first: list[dict[str, Any]] = []
    for place, count in counts.items():
        places, what = prompt.count(place), types[place]
        if not places:
            first += [{"type": what}] * count
        elif places != count:
            raise UsageError(
                f"--prompt has {count_noun(places, 'placeholder')} {place} for {count_noun(count, what)}; the numbers "
                "must agree"
            )
    parts = [
        {"type": types[piece]} if piece in types else {"type": "text", "text": piece}
        for piece in re.split(f"({IMAGE}|{VIDEO})", prompt)
    ]
    return [*first, *(part for part in parts if part.get("text") != "")]
