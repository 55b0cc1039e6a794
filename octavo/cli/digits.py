"""Writes the built-in dataset: images of four handwritten digits, or videos of digits one after another, each with a
short conversation.

Real handwriting (UCI's digits, shipped with Octavo); train and test use different samples.
  octavo digits ./digits
  octavo digits ./clips --video                     a digit every half second; the question asks which digits they were
"""

from __future__ import annotations

import argparse
import sys

from octavo.cli import arguments


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("directory", metavar="DIR", help="folder to write: train.json, test.json and images or videos")
    parser.add_argument("--train", type=arguments.positive, default=4000, help="training images (default 4000)")
    parser.add_argument("--test", type=arguments.positive, default=500, help="test images (default 500)")
    parser.add_argument("--seed", type=arguments.natural, default=0, help="seed of the choice of samples (default 0)")
    parser.add_argument("--video", action="store_true", help="videos (mp4) instead of images; needs octavo[video]")
    parser.add_argument("--digits", type=arguments.positive, metavar="N", help="digits of a video (default 3)")
    parser.add_argument("--frames", type=arguments.positive, metavar="N", help="frames of each digit (default 4)")


def run(args: argparse.Namespace) -> int:
    from octavo.data.builtin import digit_clips, digits

    common = {"train": args.train, "test": args.test, "seed": args.seed}
    if args.video:
        from rich.console import Console

        shown = Console(stderr=True) if sys.stderr.isatty() else Console(quiet=True)
        digit_clips.write(args.directory, **common, digits=args.digits or 3, hold=args.frames or 4, console=shown)
    elif args.digits or args.frames:
        raise arguments.UsageError("--digits and --frames apply to videos: add --video, or remove them")
    else:
        digits.write(args.directory, **common)
    what = "videos" if args.video else "images"
    print(f"wrote {args.train} training and {args.test} test {what} to {args.directory}")
    return 0
