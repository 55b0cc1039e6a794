"""The candidates of ``step`` by name. A name says everything that a candidate does:

    PRECISION [fused] [compiled] [chunked] [fp8 head gradients | fp8 head] [fp8 moments] [graph] [again]

    PRECISION    bf16 (fp32 on a CPU), or a recipe
    fused        norms and gated MLPs are fused with their casts
    compiled     torch.compile, block by block
    chunked      loss and attention of a run: the chunked loss (`train.logits`), and the kernel that `model.attention:
                 auto` chooses. Without it: a plain loss in checkpointed chunks, and the kernel that torch chooses
    fp8 head gradients   dgrad and wgrad of the head in this recipe, its logits in high precision; needs chunked
    fp8 head     the whole head in this recipe (`fp8.lm_head`); needs chunked
    fp8 moments  fp8.AdamW with moments in FP8; without it torch's fused AdamW in the precision of the weights
    graph        forward and backward in one CUDA graph
    again        a repetition, which shows by how much a figure drifts

With fused, compiled, chunked, fp8 head gradients and fp8 moments a step does what a run with `preset: fast`,
`optimizer.master: bf16+sr` and `model.attention: auto` does, except clipping and steps that watch health.

The BF16 columns are `bf16 compiled`, `bf16 compiled chunked` and `bf16 compiled chunked fp8 moments`. A candidate that
is chunked is compared with the second of them, which does everything that a run does except FP8; the others with the
first.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields

from octavo.bench import peers
from octavo.bench.bench import Bench, BenchError


@dataclass(frozen=True)
class Candidate:
    """What one candidate does; see the module docstring. ``str()`` is its name."""

    precision: str
    fused: bool = False
    compiled: bool = False
    chunked: bool = False
    fp8_head_gradients: bool = False
    fp8_head: bool = False
    fp8_moments: bool = False
    graph: bool = False
    again: bool = False

    def __str__(self) -> str:
        return " ".join([self.precision, *(word for field, word in WORDS.items() if getattr(self, field))])

    def baseline(self, high: str) -> str:
        """Return the name of the candidate that this one is compared with."""
        column = self.precision == high and self.compiled
        return f"{high} compiled{' chunked' if self.chunked and not column else ''}"


WORDS = {field.name: field.name.replace("_", " ") for field in fields(Candidate) if field.name != "precision"}


def parse(name: str, high: str) -> Candidate:
    """Return the candidate of this name; ``high`` is the name of high precision. Raises BenchError."""
    precision, _, rest = name.partition(" ")
    known = (high, *peers.RECIPES, *peers.VARIANTS)
    chosen = set()
    for field, word in WORDS.items():  # in this order, so that a candidate has one name
        if rest == word or rest.startswith(f"{word} "):
            chosen.add(field)
            rest = rest[len(word) :].lstrip()
    if precision not in known or rest:
        raise BenchError(
            f"step has no candidate {name!r}; a name is one of {', '.join(known)}, then any of "
            f"{', '.join(WORDS.values())}, in this order."
        )
    candidate = Candidate(precision, **dict.fromkeys(chosen, True))
    if why := _why_impossible(candidate, high):
        raise BenchError(f"step has no candidate {name!r}: {why}.")
    return candidate


def _why_impossible(candidate: Candidate, high: str) -> str | None:
    head = candidate.fp8_head or candidate.fp8_head_gradients
    if candidate.precision == high and (candidate.fused or head):
        return f"{high} casts nothing; `fused` and `fp8 head` need a recipe"
    if head and not candidate.chunked:
        return "`fp8 head` is the head of a chunked loss; add `chunked`"
    if candidate.fp8_head and candidate.fp8_head_gradients:
        return "`fp8 head` has its gradients in FP8 too; name one of both"
    if candidate.compiled and candidate.graph:
        return "compiled blocks check their inputs on the host, so a run does not capture them either"
    return None


def default_names(bench: Bench) -> list[str]:
    """Return the names of all candidates of a call that names none, graphs last."""
    high = bench.high
    recipes = [name for name in peers.RECIPES if peers.supported_backends(bench, name)]
    return [*_iter_names(high, recipes), *(f"{name} graph" for name in (high, *recipes) if bench.device.type == "cuda")]


def _iter_names(high: str, recipes: Sequence[str]) -> Iterator[str]:
    yield from (f"{high} compiled", f"{high} compiled chunked", f"{high} compiled chunked fp8 moments")
    for recipe in recipes:
        yield f"{recipe} fused compiled chunked fp8 head gradients fp8 moments"
        yield f"{recipe} fused compiled chunked"
        yield f"{recipe} compiled chunked"
    yield high
    for recipe in recipes:
        yield from (f"{recipe} fused", recipe)
