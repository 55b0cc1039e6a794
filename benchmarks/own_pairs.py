"""Writes preference pairs from a model's own samples: for each prompt a right and a wrong answer.

    octavo train examples/digits_rl_base.yaml
    python benchmarks/own_pairs.py runs/digits_rl_base/hf build/digits/train_prompts.json build/digits/pairs.json
    octavo train examples/digits_dpo.yaml

A prompt whose samples are all right or all wrong gives no pair. The same seed gives the same pairs.
"""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path

import torch
from rich.console import Console

from octavo import data, generation, models
from octavo.config import load_config_text
from octavo.rl.rollout.experience import engine_prompt

CONFIG = """
model: {{path: {model}}}
data: {{train: [{{path: {file}}}]}}
train: {{phase: rl, steps: 1, seq_length: {length}}}
rl: {{prompts: {prompts}, group: {samples}, max_new_tokens: {new}, rewards: [exact_match]}}
run: {{seed: {seed}}}
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, help="Hugging Face folder")
    parser.add_argument("file", type=Path, help="prompts with answers")
    parser.add_argument("out", type=Path, help="the pairs")
    parser.add_argument("--prompts", type=int, default=4000)
    parser.add_argument("--samples", type=int, default=4, help="of each prompt")
    parser.add_argument("--max-new-tokens", type=int, default=2)
    parser.add_argument("--seq-length", type=int, default=64)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    cfg = load_config_text(CONFIG.format(
        model=args.model.resolve(), file=args.file.resolve(), length=args.seq_length, prompts=args.prompts,
        samples=args.samples, new=args.max_new_tokens, seed=args.seed,
    ))  # fmt: skip
    processor = models.load_processor(cfg.model.path)
    loader = data.prompt_loader(cfg, processor, prompts=args.prompts, max_new_tokens=args.max_new_tokens)
    torch.set_num_threads(1)  # two wait for each other at every small matrix
    model = models.load(cfg.model.path)
    engine = generation.Engine(model, processor.tokenizer, slots=64)
    sampling = generation.Sampling(args.max_new_tokens, seed=args.seed, excluded=loader.encoder.places)
    prompts = next(loader)
    completions = engine.generate([engine_prompt(prompt) for prompt in prompts], sampling, args.samples)
    texts = [processor.tokenizer.decode(c.tokens, skip_special_tokens=True).strip() for c in completions]
    rows = []
    for number, prompt in enumerate(prompts):
        answers = texts[number * args.samples : (number + 1) * args.samples]
        right = [text for text in answers if text == prompt.answer]
        wrong = [text for text in answers if text and text != prompt.answer]  # a turn without words is none
        if right and wrong:
            images = [os.path.relpath(path, args.out.resolve().parent) for path in prompt.columns["images"]]
            rows.append({
                "prompt": prompt.columns["messages"], "images": images, "chosen": right[0], "rejected": wrong[0],
            })  # fmt: skip
    args.out.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    Console().print(f"{len(rows)} pairs of {len(prompts)} prompts, {args.samples} samples each: {args.out}")


if __name__ == "__main__":
    main()
