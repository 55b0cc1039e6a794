"""Rules on the sections of reinforcement learning and of preferences."""

from __future__ import annotations

from collections.abc import Iterator

from octavo.base.recipe_specs import PER_TOKEN, SPECS, join_words
from octavo.config.rules.findings import Finding, finding
from octavo.config.sections.all_sections import Sections
from octavo.config.sections.foreign_words import near_value, suggest, value_of
from octavo.config.sections.names import Section
from octavo.config.sections.rl import BEYOND_SFT, CRITIC_KEYS, OPTIONS, WITH_CRITIC, WITH_KL, EngineSection, RlSection
from octavo.config.sections.run import RunSection
from octavo.config.sections.text_types import is_reward_path, python_name
from octavo.config.sections.train import OptimizerSection, TrainSection

BUILT_IN = ("exact_match", "number", "choice", "regex", "format", "math")
_WITH_PATTERN = ("regex", "format")
#: option of a reward -> the kinds that have it
_OPTION_KINDS = {
    "pattern": _WITH_PATTERN,
    "tolerance": ("number",),
    "arguments": ("function",),
    "load_in_fp8": ("model",),
    "batch": ("model",),
}


def rules(config: Sections) -> Iterator[Finding]:
    """Yield the findings on phases rl and preference, and on their sections."""
    phase = config.train.phase
    if phase == "rl" and config.rl is None:
        yield finding("rl", "train.phase is rl, and there are no rewards", "add e.g. `rl: {rewards: [exact_match]}`")
    for name in BEYOND_SFT:
        if phase != name and getattr(config, name) is not None:
            fix = f"use `phase: {name}`, or remove the section"
            yield finding(name, f"has no effect in phase {phase}", fix, "train.phase")
    if phase in BEYOND_SFT:
        yield from _conflicts(config)
    if config.rl is not None:
        yield from _rl(config)
    if config.preference is not None:
        yield from _preference(config)


def _conflicts(config: Sections) -> Iterator[Finding]:
    """Settings of other sections that have no effect in this phase, or that it does not support."""
    phase = config.train.phase
    keys = ["label_smoothing", "z_loss", "loss", "cuda_graphs", "router_aux_loss_coef"]
    keys += ["global_batch", "compile"] if phase == "rl" else []
    why = f"is not for phase {phase}"
    details = {"global_batch": ": a step is rl.prompts x rl.group completions, in rl.mini_batches updates"}
    for key in keys:
        if _is_set(config.train, key, TrainSection):
            yield finding(f"train.{key}", why + details.get(key, ""), "remove it", "train.phase")
    if config.data.train_on_prompt:
        yield finding("data.train_on_prompt", f"{why}, which learns from answers", "remove it", "train.phase")
    if phase == "rl" and _is_set(config.optimizer, "update", OptimizerSection):
        reason = "backward updates weights while the other micro-batches of a rollout still need them"
        yield finding("optimizer.update", reason, "use `update: step`", "train.phase")
    if phase == "rl" and _is_set(config.run, "gain_steps", RunSection):
        yield finding("run.gain_steps", f"{why}, whose steps are mostly rollouts", "remove it", "train.phase")


def _is_set(section: Section, key: str, kind: type[Section]) -> bool:
    return bool(getattr(section, key) != kind.model_fields[key].get_default(call_default_factory=True))


def _reward_kind(reward: str) -> str:
    """Return the name of a built-in reward, function (of a file or a program), or model."""
    if reward in BUILT_IN:
        return reward
    return "function" if ".py:" in reward or python_name(reward) is not None else "model"


def _rl(config: Sections) -> Iterator[Finding]:
    rl = config.rl
    assert rl is not None
    yield from _critic(rl, config.lora is not None)
    yield from _engine(config, rl)
    if rl.group == 1 and rl.algorithm not in WITH_CRITIC:
        yield finding("rl.group", "a single completion has no others to be compared with", "use 2 or more")
    if rl.prompts % rl.mini_batches:
        reason = f"{rl.prompts} prompts cannot be split into {rl.mini_batches} equal mini_batches"
        yield finding("rl.mini_batches", reason, "use a divisor of rl.prompts", "rl.prompts")
    if rl.max_new_tokens >= config.train.seq_length:
        reason = f"{rl.max_new_tokens} new tokens leave no room for a prompt in seq_length {config.train.seq_length}"
        yield finding("rl.max_new_tokens", reason, "lower it, or raise train.seq_length", "train.seq_length")
    if config.data.on_long == "cut":
        reason = "it would cut the end of a prompt, which is the question"
        yield finding("data.on_long", reason, "use drop or error", "train.phase")
    if rl.overlong is not None and rl.overlong > rl.max_new_tokens:
        reason = f"{rl.overlong} tokens are more than the {rl.max_new_tokens} of a completion"
        yield finding("rl.overlong", reason, "lower it", "rl.max_new_tokens")
    # Settings that nothing reads are refused only if the file has them: defaults are always there.
    idle = {"correction": ("correction_level", "correction_low", "correction_high")} if rl.correction == "off" else {}
    no_kl = rl.kl == 0 or (rl.kl is None and rl.algorithm not in WITH_KL)
    idle |= {"kl": ("kl_estimator", "kl_in", "reference")} if no_kl else {}
    for by, names in idle.items():
        for name in (name for name in names if _is_set(rl, name, RlSection)):
            reason = f"has no effect, because rl.{by} is {getattr(rl, by)}"
            if getattr(rl, by) is None:
                reason = f"has no effect, because rl.{by} is absent and {rl.algorithm} has none by default"
            yield finding(f"rl.{name}", reason, f"remove it, or set rl.{by}", f"rl.{by}")
    for index, entry in enumerate(rl.rewards):
        where = f"rl.rewards.{index}"
        kind = _reward_kind(entry.reward)
        if kind in _WITH_PATTERN and entry.pattern is None:
            yield finding(where, f"{kind} needs a pattern", f"write {{reward: {kind}, pattern: ...}}")
        for name, kinds in _OPTION_KINDS.items():
            if getattr(entry, name) is not None and kind not in kinds:
                fix = f"remove it; it is for {' and '.join(kinds)}"
                yield finding(f"{where}.{name}", f"has no effect on {entry.reward}", fix)
        if not entry.weight:
            yield finding(f"{where}.weight", "a reward of weight 0 has no effect", "set a weight, or remove it")
        if kind == "model" and not is_reward_path(entry.reward):
            fix = f"use {', '.join(BUILT_IN)}, FILE.py:FUNCTION, or the path of a folder such as ./reward_model"
            if (translated := value_of(("rl", "rewards"), entry.reward)) is not None:
                fix = f"{suggest(*translated)} {fix}"
            elif (near := near_value(("rl", "rewards"), entry.reward, BUILT_IN)) is not None:
                fix = f"{suggest(*near)} {fix}"
            yield finding(where, f"there is no reward `{entry.reward}`", fix)
    if rl.invariant and rl.kv == "fp8":
        reason = "rollouts would use other keys and values than training"
        yield finding("rl.kv", reason, "use `kv: bf16`, or remove invariant", "rl.invariant")
    if rl.invariant and rl.stale:
        reason = "rollout and update of a step have other weights, so their log-probabilities are not the same bits"
        yield finding("rl.stale", reason, "use `stale: 0`, or remove invariant", "rl.invariant")
    if rl.invariant and config.fp8.recipe in SPECS and SPECS[config.fp8.recipe].couples_rows:
        reason = f"activations of {config.fp8.recipe} share a scale between rows, so they depend on the batch"
        yield finding("fp8.recipe", reason, f"use {join_words(PER_TOKEN, 'or')}, or remove invariant", "rl.invariant")
    if rl.reference == "disk":
        reason = "completions are new in every step, so the reference cannot be computed before the first"
        yield finding("rl.reference", reason, "use copy, or base with adapters (lora)", "train.phase")
    yield from _reference("rl.reference", rl.reference, config.lora is not None)


def _engine(config: Sections, rl: RlSection) -> Iterator[Finding]:
    """Settings of an engine that nothing reads, and of a run that it cannot follow."""
    engine = rl.engine
    if engine.name == "octavo":
        for name in EngineSection.model_fields:
            if name != "name" and _is_set(engine, name, EngineSection):
                reason = "has no effect on octavo, which generates in the process that trains"
                yield finding(f"rl.engine.{name}", reason, "remove it, or use `name: ray`", "rl.engine.name")
        return
    if (requests := -(-rl.prompts // (engine.chunk or 1))) < engine.replicas:
        reason = f"{engine.replicas} replicas, but the {rl.prompts} prompts of a step are {requests} requests"
        yield finding("rl.engine.replicas", reason, f"use at most {requests}, or a smaller chunk", "rl.prompts")
    if rl.stale and rl.max_gap is not None:
        reason = "the trainer has other weights when it gets completions, so their gap is not measured"
        yield finding("rl.max_gap", reason, "remove it, or use `stale: 0`", "rl.stale")
    if config.fp8.adapt is not None:
        reason = "replicas keep the plan that they began with, and fp8.adapt changes it during the run"
        yield finding("rl.engine.name", reason, "use octavo, or remove fp8.adapt", "fp8.adapt")
    for index, rule in enumerate(config.fp8.rules):
        if rule.first is not None or rule.last is not None:
            reason = "replicas keep the plan that they began with, and this rule applies to a part of the steps"
            yield finding("rl.engine.name", reason, f"use octavo, or remove fp8.rules.{index}", f"fp8.rules.{index}")


def _reference(where: str, kind: str, lora: bool) -> Iterator[Finding]:
    """Yield findings on a kind of reference that does not fit the training."""
    if kind == "base" and not lora:
        fix = "use `reference: copy`, or train adapters (lora)"
        yield finding(where, "base is the model without its adapters, and there are no adapters", fix, "lora")
    if kind == "copy" and lora:
        reason = "a copy is not needed with adapters: the base without adapters takes no memory"
        yield finding(where, reason, "use base, or remove it", "lora")


def _critic(rl: RlSection, lora: bool) -> Iterator[Finding]:
    """Settings of critics, and of algorithms that compare groups."""
    if rl.algorithm not in WITH_CRITIC:
        for name in CRITIC_KEYS:
            if getattr(rl, name) is not None:
                reason = f"has no effect on {rl.algorithm}, which has no critic"
                yield finding(f"rl.{name}", reason, f"remove it, or use {' or '.join(WITH_CRITIC)}", "rl.algorithm")
        return
    if rl.advantage is not None:
        reason = f"{rl.algorithm} takes advantages from its critic, token by token, and does not compare groups"
        yield finding("rl.advantage", reason, "remove it", "rl.algorithm")
    if rl.dynamic_sampling:
        reason = f"{rl.algorithm} learns from groups of equal rewards too: it compares with its critic"
        yield finding("rl.dynamic_sampling", reason, "remove it", "rl.algorithm")
    if lora and rl.value_weight is not None:
        reason = "with adapters the critic shares no trained weight with the policy, and AdamW is invariant to a factor"
        yield finding("rl.value_weight", reason, "use rl.critic_lr", "lora")


def _preference(config: Sections) -> Iterator[Finding]:
    preference = config.preference
    assert preference is not None
    options = OPTIONS[preference.loss]
    for name in sorted({name for names in OPTIONS.values() for name in names} - set(options)):
        if getattr(preference, name) is not None:
            reason = f"has no effect on {preference.loss}, whose options are {', '.join(options)}"
            yield finding(f"preference.{name}", reason, "remove it", "preference.loss")
    if preference.loss in ("orpo", "simpo") and preference.reference != "auto":
        yield finding("preference.reference", f"{preference.loss} has none", "remove it", "preference.loss")
    yield from _reference("preference.reference", preference.reference, config.lora is not None)
    if preference.reference == "disk" and preference.loss == "kto":
        reason = "kto also needs answers to other prompts of a step, which differ in each epoch"
        yield finding("preference.reference", reason, "use copy, or base with adapters (lora)", "preference.loss")
