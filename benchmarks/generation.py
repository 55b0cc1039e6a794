"""Compares sampling by the engine with `generate` of transformers: 64 prompts with an image, 8 answers each, on a CPU.

    python benchmarks/generation.py [--rounds 8] [--new 32] [--prompts 64] [--group 8] [--out FILE.json]

The model is `octavo tiny qwen3_vl` (1.2 M parameters) in fp32 on one thread. All candidates run the same modules, in
turn:

    engine               all prompts at once
    transformers, batch  left-padded prompts, `num_return_sequences` = group, at the fastest batch size
    transformers, each   one prompt at a time, its answers in one call
    transformers, one    one answer at a time; a sample of them, scaled up to all

The end token is not in the vocabulary, so that every answer has the maximum length. Ratios are of CPU seconds, paired
by round: the geometric mean and its 95 % interval over resampled rounds. Before timing, the greedy answers of all
prompts are compared token by token.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import turns
from PIL import Image
from transformers import GenerationConfig

from octavo import models
from octavo.bench import record
from octavo.generation import Engine, Sampling, prompt_of
from octavo.models.tiny import tiny

SIZES = (4, 8, 16, 32, 64)
ONE = 8  # answers that are made one at a time, in a turn


class Peer:
    """transformers' generate over the same questions, batches padded on the left."""

    def __init__(self, model: Any, processor: Any, questions: list[tuple[list, list]], new: int, group: int) -> None:
        self.model, self.processor, self.questions, self.new, self.group = model, processor, questions, new, group
        processor.tokenizer.padding_side = "left"

    def inputs(self, start: int, size: int) -> Any:
        questions = self.questions[start : start + size]
        text = [
            self.processor.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
            for messages, _ in questions
        ]
        images = [image for _, several in questions for image in several]
        return self.processor(text=text, images=images, padding=True, return_tensors="pt", add_special_tokens=False)

    def generate(self, inputs: Any, answers: int, greedy: bool = False) -> torch.Tensor:
        """Tokens [prompts * answers, new]."""
        how: dict[str, Any] = {"do_sample": False} if greedy else {"do_sample": True, "temperature": 1.0, "top_k": 0}
        settings = GenerationConfig(
            **how, max_new_tokens=self.new, num_return_sequences=answers, pad_token_id=0,
            eos_token_id=self.model.generation_config.eos_token_id,
        )  # fmt: skip
        with torch.no_grad():
            return self.model.generate(**inputs, generation_config=settings)[:, inputs["input_ids"].shape[1] :]

    def batches(self, size: int) -> Callable[[], None]:
        ready = [self.inputs(start, size) for start in range(0, len(self.questions), size)]
        return lambda: [self.generate(inputs, self.group) for inputs in ready] and None

    def singly(self) -> Callable[[], None]:
        ready = [self.inputs(number, 1) for number in range(ONE)]
        return lambda: [self.generate(inputs, 1) for inputs in ready] and None


def questions_of(count: int) -> list[tuple[list, list]]:
    """Distinct prompts, an image in each."""
    rng = np.random.default_rng(0)
    questions = []
    for number in range(count):
        image = Image.fromarray(rng.integers(0, 255, (56, 56, 3), dtype=np.uint8))
        parts = [{"type": "image"}, {"type": "text", "text": f"Which digit is {number}?"}]
        questions.append(([{"role": "user", "content": parts}], [image]))
    return questions


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--new", type=int, default=32)
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--group", type=int, default=8)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        path = tiny.write("qwen3_vl", Path(folder) / "model")
        model, processor = models.load(path), models.load_processor(path)
    model.generation_config.eos_token_id = model.config.text_config.vocab_size  # no token: no answer ends by it
    questions = questions_of(args.prompts)
    peer = Peer(model, processor, questions, args.new, args.group)
    prompts = [prompt_of(processor, *question, number=number) for number, question in enumerate(questions)]
    engine = Engine(model, processor.tokenizer, slots=args.prompts * args.group)

    greedy = engine.generate(prompts, Sampling(args.new, temperature=0))
    wanted = [peer.generate(peer.inputs(number, 1), 1, greedy=True)[0].tolist() for number in range(args.prompts)]
    equal = sum(c.tokens.tolist() == tokens for c, tokens in zip(greedy, wanted, strict=True))
    print(f"greedy answers: {equal} of {args.prompts} are the same {args.new} tokens")

    sizes = [size for size in SIZES if size <= args.prompts and args.prompts % size == 0] or [args.prompts]
    tried = turns.take({str(size): peer.batches(size) for size in sizes}, 2)
    best = min(sizes, key=lambda size: min(tried[str(size)].cpu_seconds))
    ways = {
        "engine": lambda: engine.generate(prompts, Sampling(args.new), args.group),
        f"transformers, batches of {best}": peer.batches(best),
        "transformers, each": peer.batches(1),
        "transformers, one": peer.singly(),
    }
    taken = turns.take(ways, args.rounds, warmup=1)
    scale = {"transformers, one": args.prompts * args.group / ONE}
    total, first, rows = args.prompts * args.group * args.new, taken["engine"].cpu_seconds, []
    for name, turn in taken.items():
        seconds = [each * scale.get(name, 1) for each in turn.cpu_seconds]
        rows.append(
            {
                "way": name,
                "seconds": min(seconds),
                "tokens_per_s": total / min(seconds),
                **turns.interval(seconds, first),
            }
        )
        row = rows[-1]
        print(
            f"{name:32} {row['seconds']:8.2f} s {row['tokens_per_s']:9.0f} tokens/s "
            f"{row['ratio']:6.2f} times the engine's ({row['low']:.2f} to {row['high']:.2f})"
        )
    if args.out:
        record.save(
            {
                "command": "python benchmarks/generation.py", "prompts": args.prompts, "group": args.group,
                "new": args.new, "equal": equal, "sizes": {k: min(v.cpu_seconds) for k, v in tried.items()},
                "rows": rows, "machine": record.describe_machine(),
            },
            args.out,
        )  # fmt: skip


if __name__ == "__main__":
    main()
