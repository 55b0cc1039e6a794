"""Held-out windows of the real model: their losses, by window, in FP8 and in high precision.

The held-out documents of `make real` are tokenized and cut into windows of 256 tokens without a remainder. Windows are
used in an order that spreads over all documents, so that the first N are a sample of the whole.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import lru_cache
from pathlib import Path

import smollm2_operands
import torch
from torch import nn

from octavo import fp8, train

BUILD = Path(__file__).resolve().parents[2] / "build"
MODEL, DATA = BUILD / "smollm2", BUILD / "smollm2-data"
LENGTH = 256  # tokens of a window; the first has no prediction
BATCH = 2
STRIDE = 131  # coprime to any number of windows that it does not divide: the order in which they are used


def check() -> None:
    """Raises SystemExit if the model or the text is missing."""
    for folder in (MODEL, DATA):
        if not folder.is_dir():
            raise SystemExit(f"{folder} does not exist; `make real` makes it")


@lru_cache
def windows() -> torch.Tensor:
    """All held-out windows [windows, LENGTH], in the order of use."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(MODEL / "tokenizer.json"))
    rows = [json.loads(line)["text"] for line in (DATA / "text.eval.jsonl").read_text("utf-8").splitlines()]
    cut = [
        encoded.ids[start : start + LENGTH]
        for encoded in tokenizer.encode_batch(rows)
        for start in range(0, len(encoded.ids) - LENGTH + 1, LENGTH)
    ]
    assert len(cut) % STRIDE, "the stride would repeat windows"
    return torch.tensor([cut[number * STRIDE % len(cut)] for number in range(len(cut))])


@torch.no_grad()
def losses(model: nn.Module, first: int, last: int) -> list[float]:
    """The mean loss of each of the windows `first` to `last` (exclusive), nats a token."""
    was_training = model.training
    model.eval()
    values: list[float] = []
    try:
        for ids in windows()[first:last].split(BATCH):
            logits = model(input_ids=ids).logits[:, :-1].float()
            each = torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten(), reduction="none")
            values += each.view(len(ids), -1).mean(1).tolist()
    finally:
        model.train(was_training)
    return [round(value, 6) for value in values]


def watch_end(run: train.Run, count: int) -> dict[str, dict[str, list[float]]]:
    """The last look, under the number of the last step."""
    return {str(run.cfg.train.steps): watch(run, count, True)}


def watch(run: train.Run, count: int, high: bool) -> dict[str, list[float]]:
    """Losses of the first `count` windows: as the run computes, and also in high precision."""
    figures = {"own": losses(run.model, 0, count)}
    if high:
        with high_precision(run.model):
            figures["high"] = losses(run.model, 0, count)
    return figures


@contextmanager
def high_precision(model: nn.Module) -> Iterator[None]:
    """High precision in FP8 layers, and in layers of which this study rounds single operands."""
    with ExitStack() as stack:
        stack.enter_context(fp8.high_precision(model))
        stack.enter_context(smollm2_operands.off(model))
        yield
