"""What a run of phase rl or preference will do, printed before it begins: a step in words, and its reference."""

from __future__ import annotations

from octavo.config import Config
from octavo.rl.objectives.registry import PREFERENCES
from octavo.rl.phases.preference_phase import settings
from octavo.rl.phases.reference import kind_of
from octavo.rl.phases.settings import Settings
from octavo.train.forward import critic
from octavo.train.setup.planning import count_micro_steps, samples_per_step


def reference_of(cfg: Config) -> str | None:
    """`base`, `copy`, `disk`, or None without a reference."""
    if cfg.train.phase == "rl":
        rl = Settings.of(cfg)
        return kind_of(rl.section.reference, cfg) if rl.beta else None
    if cfg.train.phase == "preference":
        section = settings(cfg)
        return kind_of(section.reference, cfg) if PREFERENCES[section.loss].reference else None
    return None


_REFERENCES = {
    "base": "the base without its adapters: one more forward, no memory",
    "copy": "a frozen copy of the model: one more forward; FP8 layers as codes, a byte a parameter",
    "disk": "the initial weights, run once before the first step; their log-probabilities are kept on disk, no memory",
}


_CRITICS = {
    True: "the same base with a second adapter and a value head: one more forward and backward",
    False: "a value head on the policy's own hidden states",
}


def sentences(cfg: Config, ranks: int = 1) -> list[str]:
    """A step in words; empty in the other phases."""
    if cfg.train.phase not in ("rl", "preference"):
        return []
    reference = reference_of(cfg)
    parts = f"in {_count(count_micro_steps(cfg, ranks), 'micro-batch', 'es')} of {cfg.train.micro_batch}"
    parts += f" on each of {ranks} ranks" if ranks > 1 else ""
    if cfg.train.phase == "rl":
        chosen = Settings.of(cfg)
        rl = chosen.section
        rewards = ", ".join(entry.name or entry.reward for entry in rl.rewards)
        said = [
            f"a step: {_count(rl.prompts, 'prompt')} x {rl.group} completions of up to {rl.max_new_tokens} tokens, "
            f"rewarded by {rewards}; {_count(chosen.updates, 'update')} by {rl.algorithm}, each of "
            f"{samples_per_step(cfg)} completions {parts}"
            + (", every completion used " + _count(rl.epochs, "time") if rl.epochs > 1 else "")
            + (", and written by the weights before the last update" if rl.stale else "")
        ]
        why = f"none, because the weight of its KL is 0 (rl.kl, or the default of {rl.algorithm})"
    else:
        section = settings(cfg)
        rows, each = "pairs", "each two rows of a forward"
        if section.loss == "kto":
            # The baseline needs as many mismatched answers as there are answers.
            rows, each = "labelled answers", "after a forward of as many answers to other prompts"
        said = [f"a step: {cfg.train.global_batch} {rows} {parts}, {each}; one update by {section.loss}"]
        why = f"none: {section.loss} needs none"
    if critic.is_enabled(cfg):
        said.append(f"critic: {_CRITICS[cfg.lora is not None]}")
    return [*said, f"reference: {_REFERENCES[reference] if reference else why}"]


def _count(n: int, what: str, many: str = "s") -> str:
    return f"{n} {what}{many if n != 1 else ''}"
