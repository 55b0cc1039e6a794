"""Writes the built-in dataset: images with four handwritten digits each, or videos that show digits one after another,
with a short conversation about each.

The digits are real handwriting (UCI's digits, included in Octavo); train and test use different samples.
  octavo digits ./digits
  octavo digits ./clips --video                     a digit every half second; the question asks which digits they were
"""

from __future__ import annotations

import argparse
import sys

from octavo.cli import arguments


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "directory", metavar="DIR", help="output folder, for train.json, test.json and images or videos"
    )
    parser.add_argument(
        "--train", type=arguments.positive, default=4000, metavar="N", help="number of training rows (default 4000)"
    )
    parser.add_argument(
        "--test", type=arguments.positive, default=500, metavar="N", help="number of test rows (default 500)"
    )
    parser.add_argument(
        "--seed", type=arguments.natural, default=0, metavar="N", help="seed for the choice of samples (default 0)"
    )
    parser.add_argument(
        "--video", action="store_true", help="write videos (mp4) instead of images; needs octavo[video]"
    )
    parser.add_argument("--digits", type=arguments.positive, metavar="N", help="digits per video (default 3)")
    parser.add_argument("--frames", type=arguments.positive, metavar="N", help="frames per digit (default 4)")


def run(args: argparse.Namespace) -> int:
    from octavo.data.builtin import digit_clips, digits

    common = {"train": args.train, "test": args.test, "seed": args.seed}
    if args.video:
        from rich.console import Console

        console = Console(stderr=True) if sys.stderr.isatty() else Console(quiet=True)
        digit_clips.write(args.directory, **common, digits=args.digits or 3, hold=args.frames or 4, console=console)
    elif args.digits or args.frames:
        raise arguments.UsageError("--digits and --frames apply to videos: add --video, or remove them")
    else:
        digits.write(args.directory, **common)
    what = "videos" if args.video else "images"
    print(f"wrote {args.train} training and {args.test} test {what} to {args.directory}")
    return 0
