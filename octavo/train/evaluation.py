"""Held-out data: loss, and exact match per question."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from octavo.parallel import World
from octavo.train import losses
from octavo.train.forward import Forward


def evaluate(
    model: nn.Module, evalset: Iterable[dict[str, Any]], forward: Forward | None = None, world: World | None = None
) -> dict[str, Any]:
    """{"loss", "exact_match", "questions", "tokens"} over a held-out set. A collective.

    loss         mean cross-entropy over all loss tokens, fp32 (nats)
    exact_match  share of the questions answered exactly, 0 to 1. Every assistant turn is a question; it counts when
                 each of its tokens, the end of turn included, is the most likely one given the true tokens before it.
                 That is the greedy answer: it goes wrong at the first token that differs, here as in generation.
    """
    world = world or World(device=next(model.parameters()).device)
    wide = next(model.parameters()).dtype == torch.float32
    forward = forward or Forward(model, world, autocast=wide and world.device.type == "cuda")
    sums = torch.zeros(4, dtype=torch.float64)
    with _evaluating(model):
        for batch in evalset:
            sums += _judge(forward(batch), batch)
    loss, tokens, right, questions = world.sum(sums).tolist()
    return {
        "loss": loss / max(tokens, 1),
        "exact_match": right / max(questions, 1),
        "questions": int(questions),
        "tokens": int(tokens),
    }


def _judge(logits: Tensor, batch: dict[str, Any]) -> Tensor:
    """[loss sum, loss tokens, right answers, answers] of one batch; logits [B, T, V]."""
    target = losses.targets(batch["labels"]).to(logits.device)
    loss = losses.cross_entropy(logits[:, :-1], target).sum(dtype=torch.float64)
    hits = (logits[:, :-1].argmax(-1) == losses.targets(batch["input_ids"]).to(logits.device)).cpu()
    answers = [(row, span) for row, spans in enumerate(batch["meta"].answers) for span in spans if span[1] > span[0]]
    right = sum(bool(hits[row, start - 1 : end - 1].all()) for row, (start, end) in answers)
    known = int((target != losses.IGNORE).sum())
    return torch.tensor([float(loss), known, right, len(answers)], dtype=torch.float64)


@contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    training = model.training
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        model.train(training)
