"""Trains the base model of the LoRA trial, which reads handwriting, and writes the data of the new task.

    python benchmarks/lora_base.py                                           # build/lora, about four minutes on a core
    octavo compare examples/digits_lora.yaml --savings --forks 3 --jobs 2    # FP8 base compared with BF16 base
    python benchmarks/demo.py runs/digits_lora-compare lora                  # copies the figures

The base is a tiny Qwen3-VL whose parameters were all trained to answer with numerals ("Third?" "7"). LoRA then teaches
it to answer in words ("seven"), which it never did before. Finished runs are kept and stopped runs are resumed.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from rich.console import Console

from octavo.config import Config, load_config_text
from octavo.data.builtin import digits
from octavo.models.tiny import tiny
from octavo.train import run

WORDS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
CONFIG = """
model: {{path: {here}/model}}
fp8: {{recipe: off}}
data:
  train: [{{path: {here}/digits/train.json, images: {here}/digits}}]
  eval: [{{path: {here}/digits/test.json, images: {here}/digits}}]
train: {{steps: {steps}, seq_length: 64, micro_batch: 32, global_batch: 32, lr: 2e-3, schedule: onecycle}}
optimizer: {{betas: [0.9, 0.98], weight_decay: 0.5}}
run: {{dir: {here}/base, resume: auto, save_every: 100, health_every: 0, threads: 1}}
"""


def in_words(source: Path, target: Path) -> None:
    """The rows of a digits file with every answer as a word."""
    rows = json.loads(source.read_text(encoding="utf-8"))
    for row in rows:
        for turn in row["conversations"]:
            if turn["from"] == "gpt":
                turn["value"] = WORDS[int(turn["value"])]
    target.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")


def prepare(here: Path, steps: int, console: Console | None = None) -> Config:
    """Write model and data below ``here`` where they are missing; return the configuration of the base."""
    tiny.write("qwen3_vl", here / "model", texts=[*WORDS, *digits.PLACES])
    files = digits.write(here / "digits", console=console)
    in_words(files.train, here / "words_train.json")
    in_words(files.test, here / "words_test.json")
    return load_config_text(CONFIG.format(here=here, steps=steps))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=500, help="steps that the base is trained")
    parser.add_argument("--dir", type=Path, default=Path("build/lora"))
    args = parser.parse_args()
    here, console = args.dir.resolve(), Console()
    result = run(prepare(here, args.steps, console), console=console, label="base")
    if result.eval is not None:
        console.print(
            f"base: {100 * result.eval['exact_match']:.1f} % of held-out numerals right; {here / 'base' / 'hf'}"
        )


if __name__ == "__main__":
    main()
