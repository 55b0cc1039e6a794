"""The phase of preferences: trains on pairs of a chosen and a rejected answer, or on labelled answers.

A micro-batch contains the chosen answers, then the rejected ones (:mod:`octavo.data.tasks.pairs`). It takes one forward
of the policy, one of the reference, and the loss of :mod:`octavo.rl.objectives.pairwise` over the sums of both. A
micro-batch of KTO contains labelled answers; its baseline is computed first, over all micro-batches and ranks, so that
a step does not depend on how it is split.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from octavo.config import Config
from octavo.config.sections.rl import OPTIONS, PreferenceSection
from octavo.data.loaders.eval_set import EvalSet
from octavo.data.loaders.from_config import pair_loader, pair_set
from octavo.data.loaders.loader import Loader
from octavo.rl.objectives.kto import FIGURES, AnswerCounts, baseline, kto
from octavo.rl.objectives.metrics import Figures, combine_figures, whole
from octavo.rl.objectives.pairwise import PairCounts, Pairs, answer_logps
from octavo.rl.objectives.registry import PREFERENCES, Preference
from octavo.rl.phases.reference import add_reference_memory, make_reference, resolve_reference, untracked_forward
from octavo.rl.phases.reference_cache import ComputedReference, StoredReference, load_or_compute_reference
from octavo.train import Observe
from octavo.train.forward import losses
from octavo.train.forward.evaluation import Answer
from octavo.train.forward.forward import log_probs
from octavo.train.run_dir.run_dir import PLAN
from octavo.train.setup.phase import Phase
from octavo.train.step.step import Batches, Stepper, StepResult
from octavo.train.step.update import Loss


class PreferencePhase(Phase):
    """`train.phase: preference`."""

    names = ("preference",)

    def __init__(self) -> None:
        self._held_out: EvalSet | None = None

    def loader(self, cfg: Config, processor: Any, **share: Any) -> Loader:
        return pair_loader(cfg, processor, kind=_row_kind(cfg), **share)

    def evalset(self, cfg: Config, processor: Any, **share: Any) -> EvalSet | None:
        ranks = {name: share[name] for name in ("rank", "world")}  # `evalset` reports skipped rows
        self._held_out = pair_set(cfg, processor, kind=_row_kind(cfg), **ranks)
        return super().evalset(cfg, processor, **share)

    def evaluate(self, stepper: Stepper, evalset: EvalSet, shown: list[Answer] | None = None) -> Mapping[str, Any]:
        """Evaluate held-out data. In addition to the base figures, returns `preference_loss`, the figures of a step and
        the number of held-out preferences; `answer_loss` and `exact_match` concern the chosen or good answers."""
        assert isinstance(stepper, PreferenceStepper)
        figures = super().evaluate(stepper, evalset, shown)
        return figures if self._held_out is None else {**figures, **stepper.evaluate_preferences(self._held_out)}

    def stepper(
        self, plain: Stepper, processor: Any, directory: Path, step: int, log: Callable[[str], None]
    ) -> PreferenceStepper:
        return PreferenceStepper.from_stepper(plain)

    def begin(self, stepper: Stepper, processor: Any, directory: Path, step: int, log: Callable[[str], None]) -> None:
        assert isinstance(stepper, PreferenceStepper)
        kind = settings(stepper.cfg).reference
        if not stepper.spec.reference:
            return
        if resolve_reference(kind, stepper.cfg) == "disk":
            stepper.reference = load_or_compute_reference(stepper, processor, directory, step, self._held_out, log)
        else:
            stepper.reference = ComputedReference(make_reference(kind, stepper, directory / PLAN, log))


def settings(cfg: Config) -> PreferenceSection:
    return cfg.preference or PreferenceSection()


def _row_kind(cfg: Config) -> Literal["pairs", "labelled"]:
    return "pairs" if PREFERENCES[settings(cfg).loss].paired else "labelled"


@dataclass
class PreferenceStepper(Stepper):
    """Trains on pairs or labelled answers instead of next-token labels."""

    reference: ComputedReference | StoredReference | None = None
    counts: PairCounts | AnswerCounts | None = None
    part_figures: list[Figures] = field(default_factory=list)
    z: Tensor | None = None

    @property
    def spec(self) -> Preference:
        return PREFERENCES[settings(self.cfg).loss]

    @property
    def options(self) -> dict[str, float]:
        """The options of the loss from the configuration, or else the defaults."""
        section = settings(self.cfg)
        configured = {name: getattr(section, name) for name in OPTIONS[section.loss]}
        return {**self.spec.options, **{name: value for name, value in configured.items() if value is not None}}

    def run(self, batches: Batches, lr: float, observe: Observe) -> StepResult:
        self.part_figures = []
        self.z = None if self.spec.paired else self._baseline(batches)
        result = super().run(batches, lr, observe)
        figures: dict[str, float | None] = {**whole(combine_figures(self.part_figures), self.world)}
        if self.z is not None:
            figures = {**dict.fromkeys(FIGURES), **figures, "kl": float(self.z)}
        if not result.loss_tokens:  # without a token, there are no figures
            figures = dict.fromkeys(figures)
        return replace(add_reference_memory(result, self.reference), extra_metrics=figures)

    def totals(self, batches: Batches) -> Tensor:
        """Return [pairs or labelled answers, tokens, loss tokens] over all ranks."""
        masks = [losses.targets(batch["labels"]) != losses.IGNORE for batch in batches]
        if self.spec.paired:
            local_counts: PairCounts | AnswerCounts = PairCounts.of(masks)
        else:
            good = (batch["desirable"] for batch in batches)
            local_counts = AnswerCounts.of([(m.sum(dim=1)[: len(g)], g) for m, g in zip(masks, good, strict=True)])
        tokens = [sum(batch["meta"].tokens for batch in batches), sum(int(mask.sum()) for mask in masks)]
        *counts, all_tokens, loss_tokens = self.world.sum(
            torch.tensor([*local_counts, *tokens], dtype=torch.float64)
        ).tolist()
        self.counts = type(local_counts)(*counts)
        rows = self.counts.pairs if isinstance(self.counts, PairCounts) else sum(self.counts)
        return torch.tensor([rows, all_tokens, loss_tokens], dtype=torch.float64)

    def loss_at_positions(
        self, batch: dict[str, Any], keep: Tensor, target: Tensor, weight: Tensor, share: float = 1.0
    ) -> Loss:
        """Return a micro-batch's part of the loss of the step."""
        logs, _ = log_probs(self.forward, self.head, batch, keep, target)
        mask = (target != losses.IGNORE).to(logs.device)
        ref = None
        if self.reference is not None:
            ref = self.reference(batch, keep, target).to(logs.device)
        if isinstance(self.counts, PairCounts):
            loss, figures = self.spec.loss(Pairs.of(logs, mask, ref), self.counts, **self.options)
        else:
            assert ref is not None and self.counts is not None and self.z is not None
            sums, tokens = answer_logps(logs, mask)
            good, z = _desirable_mask(batch).to(logs.device), self.z.to(logs.device)
            loss, figures = kto(sums, tokens, ref, good, z, self.counts, **self.options)
        self.part_figures.append(figures)
        return Loss(loss, torch.stack([loss, torch.zeros_like(loss)]).detach())

    def _baseline(self, batches: Batches) -> Tensor:
        """Compute KTO's baseline over all mismatched answers of the step, without a graph. Collective call."""
        sums, tokens, ref = self._gather_rows(self._sums(batch["crossed"]) for batch in batches).unbind(dim=1)
        return baseline(sums[tokens > 0], ref[tokens > 0])

    def evaluate_preferences(self, batches: Iterable[dict[str, Any]]) -> dict[str, float | None]:
        """Compute loss and figures over all held-out preferences, and their number. Collective call."""
        if self.spec.paired:
            rows = self._gather_rows(torch.cat(self._sums(batch).chunk(2), dim=1) for batch in batches)
            chosen, chosen_tokens, ref_chosen, rejected, rejected_tokens, ref_rejected = rows.unbind(dim=1)
            refs = (None, None) if self.reference is None else (ref_chosen, ref_rejected)
            pairs = Pairs(chosen, rejected, chosen_tokens, rejected_tokens, *refs)
            counts = PairCounts(float(pairs.whole.sum()), float(chosen_tokens[pairs.whole].sum()))
            loss, figures = self.spec.loss(pairs, counts, **self.options)
            names, count = [*figures], counts.pairs
        else:
            rows = self._gather_rows(
                torch.cat([self._sums(b), _desirable_mask(b)[:, None], self._sums(b["crossed"])], dim=1)
                for b in batches
            )
            sums, n, ref, good, crossed, crossed_tokens, ref_crossed = rows.unbind(dim=1)
            z = baseline(crossed[crossed_tokens > 0], ref_crossed[crossed_tokens > 0])
            answers = AnswerCounts.of([(n, good.bool())])
            loss, figures = kto(sums, n, ref, good.bool(), z, answers, **self.options)
            names, count = [*dict.fromkeys([*FIGURES, *figures])], sum(answers)
        computed = {"preference_loss": loss, **figures} if count else {}
        result = {name: float(computed[name]) if name in computed else None for name in ("preference_loss", *names)}
        return {**result, "preferences": count}

    def _sums(self, batch: dict[str, Any]) -> Tensor:
        """Return [B, 3] in host memory, without a graph, for the answers of a micro-batch: the policy's sum of
        log-probabilities, the number of tokens, and the reference's sum (0 without a reference)."""
        keep, target, _ = self.loss_positions(batch, 1.0)
        with untracked_forward(self.model):
            logs, _ = log_probs(self.forward, self.head, batch, keep, target)
        sums, tokens = answer_logps(logs, (target != losses.IGNORE).to(logs.device))
        ref = torch.zeros_like(sums) if self.reference is None else self.reference(batch, keep, target)
        return torch.stack([x.cpu() for x in (sums, tokens, ref)], dim=1)

    def _gather_rows(self, tables: Iterable[Tensor]) -> Tensor:
        """Gather the rows of the tables of all ranks. Collective call."""
        local_rows = torch.cat([*tables])
        by_rank = self.world.gather_objects(local_rows.tolist())
        return torch.tensor([row for rows in by_rank for row in rows]).view(-1, local_rows.shape[1])


def _desirable_mask(batch: dict[str, Any]) -> Tensor:
    """Return bool [B]: which answers of a micro-batch are labelled good. A micro-batch whose rows were all skipped has
    a placeholder row, which is not."""
    good = torch.zeros(len(batch["labels"]), dtype=torch.bool)
    good[: len(batch["desirable"])] = batch["desirable"]
    return good
