"""Describes a step of phase rl or preference and its reference model, for the lines printed before a run begins."""

from __future__ import annotations

from octavo.base.wording import count_noun
from octavo.config import Config
from octavo.rl.objectives.registry import PREFERENCES
from octavo.rl.phases.preference_phase import settings
from octavo.rl.phases.reference import resolve_reference
from octavo.rl.phases.settings import Settings
from octavo.train.forward import critic
from octavo.train.setup.planning import count_micro_steps, samples_per_step


def reference_kind(cfg: Config) -> str | None:
    """Return `base`, `copy` or `disk`, or None if the run has no reference model."""
    if cfg.train.phase == "rl":
        rl = Settings.of(cfg)
        return resolve_reference(rl.section.reference, cfg) if rl.beta else None
    if cfg.train.phase == "preference":
        section = settings(cfg)
        return resolve_reference(section.reference, cfg) if PREFERENCES[section.loss].reference else None
    return None


_REFERENCES = {
    "base": "the base without its adapters: one more forward, no memory",
    "copy": "a frozen copy of the model: one more forward; FP8 layers keep only codes, one byte per parameter",
    "disk": "the initial weights, run once before the first step; their log-probabilities are kept on disk, no memory",
}


_CRITICS = {
    True: "the same base with a second adapter and a value head: one more forward and backward",
    False: "a value head on the policy's own hidden states",
}


def describe_step(cfg: Config, ranks: int = 1) -> list[str]:
    """Describe a step, or return an empty list in other phases."""
    if cfg.train.phase not in ("rl", "preference"):
        return []
    reference = reference_kind(cfg)
    parts = f"in {count_noun(count_micro_steps(cfg, ranks), 'micro-batch')} of {cfg.train.micro_batch}"
    parts += f" on each of {ranks} ranks" if ranks > 1 else ""
    if cfg.train.phase == "rl":
        chosen = Settings.of(cfg)
        rl = chosen.section
        rewards = ", ".join(entry.name or entry.reward for entry in rl.rewards)
        lines = [
            f"each step: {count_noun(rl.prompts, 'prompt')} x {rl.group} completions of up to {rl.max_new_tokens} "
            f"tokens, rewarded by {rewards}; {count_noun(chosen.updates, 'update')} by {rl.algorithm}, each of "
            f"{samples_per_step(cfg)} completions {parts}"
            + (", each completion used " + count_noun(rl.epochs, "time") if rl.epochs > 1 else "")
            + (", generated with the weights before the last update" if rl.stale else "")
        ]
        why = f"none, because the KL weight is 0 (rl.kl, or the default of {rl.algorithm})"
    else:
        section = settings(cfg)
        rows, detail = "pairs", "two rows of a forward per pair"
        if section.loss == "kto":
            # The baseline needs as many mismatched answers as there are answers.
            rows, detail = "labelled answers", "after a forward of as many answers to other prompts"
        lines = [f"each step: {cfg.train.global_batch} {rows} {parts}, {detail}; one update by {section.loss}"]
        why = f"none: {section.loss} does not use one"
    if critic.is_enabled(cfg):
        lines.append(f"critic: {_CRITICS[cfg.lora is not None]}")
    return [*lines, f"reference: {_REFERENCES[reference] if reference else why}"]
