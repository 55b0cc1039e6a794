"""Writes the embedded dataset: images of four handwritten digits and a short conversation about each.

Real handwriting (scikit-learn's bundled digits); train and test are made of different samples.
  octavo digits ./digits
"""

from __future__ import annotations

import argparse

from octavo.cli import arguments


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("directory", metavar="DIR", help="folder to write: train.json, test.json and images")
    parser.add_argument("--train", type=arguments.positive, default=4000, help="training images (default 4000)")
    parser.add_argument("--test", type=arguments.positive, default=500, help="test images (default 500)")
    parser.add_argument("--seed", type=arguments.natural, default=0, help="which samples are joined (default 0)")


def run(args: argparse.Namespace) -> int:
    from octavo.data import digits

    digits.write(args.directory, train=args.train, test=args.test, seed=args.seed)
    print(f"wrote {args.train} training and {args.test} test images to {args.directory}")
    return 0
