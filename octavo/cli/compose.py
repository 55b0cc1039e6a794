"""Composes a vision-language model from an image encoder, a fresh projector and a decoder, as a Hugging Face folder.

octavo compose --image-encoder ./siglip --foundation ./SmolLM2-135M-Instruct -o ./vlm
octavo compose --image-encoder ./clip --foundation ./Qwen3-8B --image-size 448 -o ./vlm    positions are interpolated

Image encoders are CLIP, SigLIP, DINOv2 and DINOv3, for images of one size, and the towers of Qwen2-VL, Qwen2.5-VL and
Qwen3-VL, for images of any size; decoders are transformers' language models. CLIP, SigLIP and DINOv2 without registers
give a folder in the shape of LLaVA with the default projector, which transformers loads without Octavo.
"""

from __future__ import annotations

import argparse
import shlex
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from octavo.cli import arguments, terminal

if TYPE_CHECKING:
    from octavo.models.compose.compose import Composed


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--image-encoder", metavar="DIR", type=Path, required=True, help="folder of the image encoder")
    add("--foundation", metavar="DIR", type=Path, required=True, help="folder of the decoder")
    add("-o", "--out", metavar="DIR", type=Path, required=True, help="output folder: new or empty")
    kinds = "mlp2, norm_mlp2, merge_mlp2 or pixel_shuffle_mlp2 (default mlp2, for towers of Qwen-VL merge_mlp2)"
    add("--projector", metavar="NAME", help=f"kind of the projector: {kinds}")
    add("--image-size", metavar="N", type=arguments.positive, help="pixels of an image, in each direction")
    add(
        "--chat-template",
        metavar="FILE",
        type=Path,
        help="template that takes images (default: the decoder's, extended)",
    )
    # The features of published LLaVA models.
    layer_help = "hidden state of the image encoder that is the feature (default -2, before the last layer)"
    add("--feature-layer", metavar="N", type=int, default=-2, help=layer_help)
    std_help = "standard deviation of the projector's weights (default: the decoder's initializer_range)"
    add("--init-std", metavar="X", type=float, help=std_help)
    init_help = "component with random weights, besides the projector; the folder of an image_encoder then needs none"
    add("--init", metavar="COMPONENT", action="append", default=[], help=init_help)
    add("--seed", metavar="N", type=arguments.natural, default=0, help="seed of the random weights (default 0)")
    arguments.add_json(parser)


def run(args: argparse.Namespace) -> int:
    with arguments.importing():
        from octavo.models.compose.compose import Parts, compose

    parts = Parts(
        args.image_encoder,
        args.foundation,
        args.projector,
        args.image_size,
        args.feature_layer,
        args.chat_template,
        args.init_std,
        args.seed,
        args.init,
    )
    done = compose(parts, args.out, terminal.note)
    if args.json:
        terminal.show_json({**asdict(done), "directory": str(done.directory)})
    else:
        _show(args, done)
    return 0


def _show(args: argparse.Namespace, done: Composed) -> None:
    print(f"wrote {done.directory}: {done.why}")
    size = "any size" if done.image_size is None else f"{done.image_size} pixels"
    sources = {
        "image_encoder": f"{'new, ' if args.init else ''}{args.image_encoder}, images of {size}",
        "image_projector": f"new, {done.projector}",
        "foundation": str(args.foundation),
        "lm_head": str(args.foundation),
    }
    counts = {name: f"{count:,}" if count else "tied" for name, count in done.parameters.items()}
    rows = [(name, source, counts[name]) for name, source in sources.items()]
    terminal.show_table(("component", "from", "parameters"), rows, right=(2,))
    print("The projector is untrained: train it first, with model.freeze: [image_encoder, foundation, lm_head].")
    print(f'next: octavo generate {shlex.quote(str(done.directory))} --image FILE --prompt "..."')
