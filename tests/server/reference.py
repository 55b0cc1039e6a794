"""What a server should compute: the same folders in Octavo and transformers, in fp32 and in BF16.

A log-probability is compared with fp32 (`exact`). How far vLLM may be from it follows from the same model in BF16 in
transformers (`plain`): at most `TIMES` its mean distance. The held-out loss may differ by `TIMES` what that distance
makes of a mean of so many tokens, if the differences of tokens were independent.
"""

from __future__ import annotations

import math
import pydoc_data.topics
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import AutoTokenizer, PreTrainedModel

import octavo
from octavo import fp8
from octavo.fp8 import CastSpec
from octavo.fp8.weights import codes_of_frozen, frozen_weights

TIMES = 2.0
# A token is clearly the best if its logit in fp32 is above the next by this and by two steps of BF16, in which the
# server has its logits: at 29 a step is 0.125, so that the order of two logits within 0.25 of each other is rounding.
MARGIN = 0.1
QUESTIONS = (
    "What is the capital of France?",
    "What is 2 + 2?",
    "Who wrote Romeo and Juliet?",
    "Write a Python function that adds two numbers.",
    "Name three colours.",
    "What is the boiling point of water?",
    "Translate 'good morning' into Spanish.",
    "What does a compiler do?",
)
Rows = list[list[int]]
Scores = list[list[float]]


def held_rows(folder: Path, rows: int, length: int) -> Rows:
    """Rows of tokens of the language reference that ships with Python (pydoc); these tests train on none of it."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    text = "\n".join(pydoc_data.topics.topics[name] for name in sorted(pydoc_data.topics.topics)[:40])
    tokens = tokenizer(text)["input_ids"]
    assert len(tokens) >= rows * length
    return [tokens[length * row : length * (row + 1)] for row in range(rows)]


def question_rows(folder: Path) -> Rows:
    """The tokens of each of `QUESTIONS` in the model's chat template."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    chats = [[{"role": "user", "content": question}] for question in QUESTIONS]
    return [tokenizer.apply_chat_template(chat, add_generation_prompt=True)["input_ids"] for chat in chats]


def load(folder: Path, dtype: torch.dtype) -> PreTrainedModel:
    """A folder as Octavo reads it, with the casts of activations that vLLM makes before each layer with codes.

    These are dynamic: one scale, amax / 448 in fp32, for each token, or each 128 numbers of a token where weights have
    blocks. Codes are multiplied as decoded values.
    """
    model = octavo.load(folder, dtype=dtype)
    for name, _ in frozen_weights(model):
        layer = model.get_submodule(name.removesuffix(".weight"))
        block = codes_of_frozen(layer.weight)[2].block
        cast = CastSpec("e4m3", (1, 128 if block == (128, 128) else -1), "fp32")
        layer.register_forward_pre_hook(lambda layer, inputs, cast=cast: (_cast(inputs[0], cast),))
    return model


def _cast(x: torch.Tensor, cast: CastSpec) -> torch.Tensor:
    """x [..., K] in E4M3 and back, in its dtype."""
    return fp8.dequantize(fp8.quantize(x.reshape(-1, x.shape[-1]).float(), cast)).reshape(x.shape).to(x.dtype)


@torch.no_grad()
def score(model: PreTrainedModel, rows: Rows) -> Scores:
    """The log-probability of each token of each row, the first token excepted."""
    scores = []
    for row in rows:
        tokens = torch.tensor([row])
        logits = model(input_ids=tokens).logits[0, :-1].float()
        scores.append(logits.log_softmax(-1).gather(-1, tokens[0, 1:, None]).flatten().tolist())
    return scores


@torch.no_grad()
def generate(model: PreTrainedModel, prompts: Rows, tokens: int) -> tuple[Rows, list[list[bool]]]:
    """Greedy tokens after each prompt, and for each token whether it is clearly the best (see `MARGIN`)."""
    answers, clear = [], []
    for prompt in prompts:
        result = model.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
            do_sample=False,
            max_new_tokens=tokens,
            output_logits=True,
            return_dict_in_generate=True,
        )
        answers.append(result.sequences[0, len(prompt) :].tolist())
        best = [logits[0].float().topk(2).values.tolist() for logits in result.logits]
        clear.append([first - second >= max(MARGIN, 2 * _bf16_step(first)) for first, second in best])
    return answers, clear


def _bf16_step(value: float) -> float:
    """The distance of neighbours in BF16 (8 bits of precision) at a value."""
    return 2.0 ** (math.frexp(value)[1] - 8)


def different(answers: Rows, expected: Rows, clear: list[list[bool]]) -> list[str]:
    """One line for each answer whose first token that differs from `expected` should not: it was clearly the best."""
    lines = []
    for question, answer, wanted, sure in zip(QUESTIONS, answers, expected, clear, strict=True):
        at = first_difference(answer, wanted)
        if at < len(wanted) and sure[at]:
            lines.append(f"{question}: token {at} is {answer[at : at + 1]} instead of {wanted[at]}")
    return lines


def first_difference(answer: list[int], wanted: list[int]) -> int:
    """The position of the first token that differs, or the length of `wanted`."""
    pairs = zip(answer, wanted, strict=False)
    return next((at for at, (a, b) in enumerate(pairs) if a != b), min(len(answer), len(wanted)))


@dataclass(frozen=True)
class Distance:
    """How far log-probabilities are from exact ones.

    mean  mean absolute difference, in nats
    loss  difference of the mean losses, in nats
    error  standard error of `loss`, if the differences of tokens are independent
    """

    mean: float
    loss: float
    error: float


def distance(scores: Scores, exact: Scores) -> Distance:
    """The distance of `scores` from `exact`; its numbers are NaN if one of the scores is."""
    a, b = (torch.tensor(sum(rows, [])) for rows in (scores, exact))
    difference = b - a
    return Distance(
        difference.abs().mean().item(),
        difference.mean().item(),
        (difference.std() / math.sqrt(len(difference))).item(),
    )
