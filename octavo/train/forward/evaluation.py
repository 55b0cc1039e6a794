"""Evaluation on held-out data: loss, and exact match per question."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from octavo.base import accelerator
from octavo.config.sections.rl import BEYOND_SFT
from octavo.parallel import World
from octavo.train.errors import TrainError
from octavo.train.forward import losses
from octavo.train.forward.forward import Forward

ANSWER_LOSS = "answer_loss"  # the held-out loss of a phase that trains on another loss
MAX_LOGGED = 4  # number of logged answers per evaluation


class Answer(NamedTuple):
    """An answer to a held-out question, as tokens or text: the prompt (`before`), the reference (`wanted`) and the
    model's answer (`said`). If only the loss is evaluated, the model's answer is the greedy one up to and including its
    first wrong token. A generated answer is complete and has a reward instead of `right`."""

    file: str
    row: int
    before: Sequence[int] | str
    wanted: Sequence[int] | str
    said: Sequence[int] | str
    right: bool | None = None
    reward: float | None = None


class AnswerSpan(NamedTuple):
    """The position of an answer: row of the batch, number in its conversation (from 0), and token range."""

    row: int
    number: int
    start: int
    end: int


def judged_by_exact_match(figures: Iterable[str]) -> bool:
    """Return whether exact match is a verdict on a run that has these figures (names of metrics and of evaluation).

    It compares an answer with the reference token by token. Where answers are judged by rewards or preferences, a good
    answer in other words counts as wrong, so there it is a verdict only if the reward is `exact_match`.
    """
    names = set(figures)
    return "rewards/exact_match/mean" in names or not names & {"reward", "rewards/accuracies", "rewards/margins"}


def name_loss(figures: Mapping[str, float | None], phase: str) -> dict[str, float | None]:
    """Return held-out figures in which no other loss has the name of the loss: `loss` where the phase trains on it, the
    mean cross-entropy of tokens; else `answer_loss`, of the reference, chosen or good answers. Older runs named both
    `loss`."""
    if phase not in BEYOND_SFT:
        return dict(figures)
    return {ANSWER_LOSS if name == "loss" else name: value for name, value in figures.items()}


def token_loss(figures: Mapping[str, float]) -> float | None:
    """Return the mean cross-entropy among held-out figures, under either of its names; None without it."""
    return figures.get("loss", figures.get(ANSWER_LOSS))


def evaluate(
    model: nn.Module,
    evalset: Iterable[dict[str, Any]],
    forward: Forward | None = None,
    world: World | None = None,
    pieces: list[dict[str, Any]] | None = None,
    shown: list[Answer] | None = None,
) -> dict[str, Any]:
    """Evaluate on a held-out set. Returns {"loss", "exact_match", "questions", "tokens"}; "exact_match" is omitted if
    there are no questions (plain text). Collective call.

    loss         mean cross-entropy over all loss tokens, fp32 (nats)
    exact_match  share of the questions that are answered exactly, 0 to 1. Every assistant turn is a question. It is
                 answered exactly if each of its tokens, including the end of turn, is the most likely one given the
                 true tokens before it. So the greedy answer equals the reference, regardless of
                 generation_config.json.

    pieces: receives a record for each answer that this rank evaluated: file, row and number of the answer in its
    conversation, summed loss (nats), loss tokens, `right`, and a digest of the reference. Loss tokens of a row outside
    its answers are an additional record with the number None.

    shown: receives the first answers of this rank's first :data:`MAX_LOGGED` rows, as tokens.

    Raises TrainError if the loss is not finite.
    """
    world = world or World(device=next(model.parameters()).device)
    wide = next(model.parameters()).dtype == torch.float32
    forward = forward or Forward(model, world, accelerator.autocast_dtype(world.device) if wide else None)
    sums = torch.zeros(4, dtype=torch.float64)
    with _eval_mode(model):
        for batch in evalset:
            sums += _evaluate_batch(forward(batch), batch, pieces, shown)
    loss, tokens, right, questions = world.sum(sums).tolist()
    if not math.isfinite(loss):
        raise TrainError(
            f"the loss over {int(tokens)} held-out tokens is {loss}, which is not finite. Evaluate an earlier "
            "checkpoint (--step), or in high precision (--recipe off)"
        )
    matches = {"exact_match": right / questions} if questions else {}
    return {"loss": loss / max(tokens, 1), **matches, "questions": int(questions), "tokens": int(tokens)}


def _evaluate_batch(
    logits: Tensor, batch: dict[str, Any], pieces: list[dict[str, Any]] | None = None, shown: list[Answer] | None = None
) -> Tensor:
    """Return [loss sum, loss tokens, right answers, answers] of one batch; logits [B, T, V]."""
    target = losses.targets(batch["labels"]).to(logits.device)
    loss = losses.cross_entropy(logits[:, :-1], target)
    predicted = logits[:, :-1].argmax(-1)
    hits = (predicted == losses.targets(batch["input_ids"]).to(logits.device)).cpu()
    spans = ((row, n, span) for row, spans in enumerate(batch["meta"].answers) for n, span in enumerate(spans))
    answers = [AnswerSpan(row, number, *span) for row, number, span in spans if span[1] > span[0]]
    right = [bool(hits[row, start - 1 : end - 1].all()) for row, _, start, end in answers]
    if pieces is not None:
        pieces += _answer_records(
            loss.double().view(target.shape).cpu(), (target != losses.IGNORE).cpu(), batch, answers, right
        )
    if shown is not None:
        shown += _logged_answers(predicted, batch, answers, right, MAX_LOGGED - len(shown))
    has_loss = int((target != losses.IGNORE).sum())
    sums = [float(loss.sum(dtype=torch.float64)), has_loss, sum(right), len(answers)]
    return torch.tensor(sums, dtype=torch.float64)


def _answer_records(
    loss: Tensor, has_loss: Tensor, batch: dict[str, Any], answers: list[AnswerSpan], right: list[bool]
) -> Iterator[dict[str, Any]]:
    """Yield the records of `evaluate`; loss and has_loss [B, T-1] belong to the token after each position."""
    meta, rest = batch["meta"], has_loss.clone()
    for (row, number, start, end), hit in zip(answers, right, strict=True):
        inside = slice(start - 1, end - 1)
        said = batch["input_ids"][row, start:end].numpy().tobytes()
        yield {
            "file": meta.files[row], "row": meta.rows[row], "answer": number,
            "loss": float(loss[row, inside][has_loss[row, inside]].sum()), "tokens": int(has_loss[row, inside].sum()),
            "right": hit, "said": hashlib.blake2s(said, digest_size=8).hexdigest(),
        }  # fmt: skip
        rest[row, inside] = False
    for row in range(meta.samples):
        if tokens := int(rest[row].sum()):
            where = {"file": meta.files[row], "row": meta.rows[row], "answer": None}
            yield {**where, "loss": float(loss[row][rest[row]].sum()), "tokens": tokens, "right": None, "said": None}


def _logged_answers(
    predicted: Tensor, batch: dict[str, Any], answers: list[AnswerSpan], right: list[bool], most: int
) -> Iterator[Answer]:
    """Yield the first answer of each of the first rows of a batch; predicted [B, T-1] are the most likely next
    tokens."""
    meta = batch["meta"]
    first = [n for n, place in enumerate(answers) if n == 0 or place.row != answers[n - 1].row]
    for (row, _, start, end), hit in ((answers[n], right[n]) for n in first[: max(most, 0)]):
        ids, said = batch["input_ids"][row].tolist(), predicted[row, start - 1 : end - 1].tolist()
        wanted = ids[start:end]
        agree = next((n for n, (ours, true) in enumerate(zip(said, wanted, strict=True)) if ours != true), len(said))
        yield Answer(meta.files[row], meta.rows[row], ids[:start], wanted, said[: agree + 1], hit)


@contextmanager
def _eval_mode(model: nn.Module) -> Iterator[None]:
    training = model.training
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        model.train(training)
