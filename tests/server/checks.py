"""What is compared with a folder that vLLM has loaded; the short and the full form use the same."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from tests.server import reference
from tests.server.client import Server

TOKENS = 24


@dataclass(frozen=True)
class Compared:
    """A loaded folder compared with references; `problems` has one line for each bound that does not hold.

    kernels  classes of vLLM's kernels and how many layers use them
    counts   codes and scales of the folder, and how many of them the engine has
    loss     the mean loss of the rows in vLLM, in nats
    plain, server  distances of transformers in BF16 and of vLLM from fp32, on the same rows
    greedy   tokens of the answers before the first difference, and of all answers
    """

    kernels: dict[str, int]
    counts: dict[str, int]
    loss: float
    plain: reference.Distance
    server: reference.Distance
    greedy: tuple[int, int]
    problems: tuple[str, ...]


def compare(server: Server, folder: Path, kernel: str, rows: reference.Rows, prompts: reference.Rows) -> Compared:
    """Load a folder in vLLM and compare its codes, log-probabilities, loss and greedy answers.

    The bounds: every code and scale is equal; the mean distance of log-probabilities is at most TIMES the distance of
    transformers in BF16; the loss differs by at most TIMES the half width of that path's 95 % interval, which is two
    standard errors. Greedy answers of a folder without codes differ only where no token is clearly the best. FP8
    activations round differently after the smallest difference: answers of FP8 folders are counted and not judged.
    """
    kernels = server.load(folder, kernel)
    counts, scores, answers = server.compare(), server.score(rows), server.generate(prompts, TOKENS)
    model = reference.load(folder, torch.float32)
    exact, (wanted, clear) = reference.score(model, rows), reference.generate(model, prompts, TOKENS)
    del model
    plain = reference.distance(reference.score(reference.load(folder, torch.bfloat16), rows), exact)
    distance = reference.distance(scores, exact)
    problems = []
    for kind in ("codes", "scales"):
        if counts[f"{kind}_equal"] != counts[kind]:
            problems.append(f"{counts[f'{kind}_equal']:,} of {counts[kind]:,} {kind} are equal")
    if bool(kernels) != bool(counts["codes"]):
        problems.append(f"the folder has {counts['codes']:,} codes, and the layers with FP8 kernels are {kernels}")
    if not distance.mean <= reference.TIMES * plain.mean:
        problems.append(f"log-probabilities are {distance.mean:.4f} nats from fp32; transformers': {plain.mean:.4f}")
    if not abs(distance.loss) <= reference.TIMES * 2 * plain.error:
        problems.append(
            f"the loss differs by {distance.loss:.4f} nats; the bound is {reference.TIMES * 2 * plain.error:.4f}"
        )
    if not counts["codes"]:
        problems += reference.different(answers, wanted, clear)
    equal = sum(reference.first_difference(a, b) for a, b in zip(answers, wanted, strict=True))
    loss = -sum(map(sum, scores)) / sum(map(len, scores))
    return Compared(kernels, counts, loss, plain, distance, (equal, sum(map(len, wanted))), tuple(problems))


def update(server: Server, folder: Path, other: Path, rows: reference.Rows, kernel: str = "") -> list[str]:
    """Load `other`'s weights into the engine that serves `folder`, and `folder`'s again; a line for each problem."""
    server.load(folder, kernel)
    before = server.score(rows)
    server.update(other)
    changed = server.score(rows)
    server.update(folder)
    back = server.score(rows)
    server.load(other, kernel)
    fresh = server.score(rows)
    problems = []
    if changed == before:
        problems.append(f"{other.name} did not change the answers of the running engine")
    if changed != fresh:
        problems.append(f"the running engine does not answer like a new one that loads {other.name}")
    if back != before:
        problems.append(f"{folder.name} did not restore the answers")
    return problems
