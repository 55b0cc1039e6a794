"""The sections of reinforcement learning and of preferences, which `train.phase` asks for."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from octavo.base.recipe_specs import listed
from octavo.config.sections.names import FROM_LIST, FROZEN, Frozen, Section
from octavo.config.sections.text_types import FilePath, Letters, Text

#: phases that learn from what the model is compared with or rewarded for, not from given answers alone
BEYOND_SFT = ("rl", "preference")


Reference = Literal["auto", "base", "copy", "disk"]

#: algorithms with a critic, and the keys of `rl` that are about it; those whose KL from the reference counts where
#: `rl.kl` is absent; tests hold them against `octavo.rl`'s own
WITH_CRITIC = ("ppo",)
WITH_KL = ("rloo", "ppo")
OF_CRITIC = ("gamma", "lam", "value_clip", "value_weight", "critic_lr")


class RewardSection(Section):
    """One reward: a function of completions and of the columns of their rows."""

    reward: FilePath = Field(
        min_length=1,
        description="exact_match, number, choice, regex, format, math; a function of a Python file (rewards.py:score, "
        "relative to the file that names it); or the folder of a reward model (sequence classification, one output).",
    )
    name: Text | None = Field(
        default=None,
        min_length=1,
        max_length=64,
        description="Its name in metrics. Absent: that of the function or folder.",
    )
    weight: float = Field(default=1.0, ge=-1e6, le=1e6, description="Its factor in the sum of rewards.")
    pattern: Text | None = Field(
        default=None, min_length=1, description="The regular expression of regex (somewhere) and format (as a whole)."
    )
    tolerance: float | None = Field(
        default=None,
        ge=0,
        le=1e9,
        description="Of number: how far apart equal numbers may be, relatively. Absent: 1e-6.",
    )
    arguments: dict[str, Any] | None = Field(
        default=None, description="Of a Python function: further keyword arguments, handed to it at each call."
    )
    load_in_fp8: Frozen = Field(
        default=None,
        description=f"Of a reward model: keep linear layers as FP8 codes, {listed(FROZEN, 'or')} (true: {FROZEN[0]}).",
    )
    batch: int | None = Field(
        default=None, ge=1, le=2**16, description="Of a reward model: completions that it judges at a time."
    )


def _as_reward(value: Any) -> Any:
    return {"reward": value} if isinstance(value, str) else value


_OR_NAME = BeforeValidator(_as_reward, json_schema_input_type=str | RewardSection)


class RlSection(Section):
    """A step: completions of this step's prompts by the model itself, their rewards, and updates by them."""

    algorithm: Literal["grpo", "dr_grpo", "dapo", "bnpo", "gspo", "cispo", "rloo", "ppo"] = Field(
        default="grpo",
        description="The objective, with its usual clipping, advantages and normalisation (docs/rl.md has each's "
        "paper); keys below that are absent are the algorithm's own.",
    )
    prompts: int = Field(default=16, ge=1, le=2**20, description="Prompts of a step, over all processes.")
    group: int = Field(default=8, ge=1, le=2**16, description="Completions of each prompt.")
    max_new_tokens: int = Field(default=256, ge=1, le=2**20, description="Most tokens of a completion.")
    temperature: float = Field(default=1.0, ge=1e-6, le=100, description="Of the distribution that is sampled.")
    top_p: float = Field(default=1.0, gt=0, le=1, description="Sample among the likeliest tokens of this total share.")
    top_k: int = Field(default=0, ge=0, le=2**31, description="Sample among so many likeliest tokens; 0 = all.")
    min_p: float = Field(
        default=0.0, ge=0, le=1, description="Sample among tokens at least this share as likely as the likeliest."
    )
    stop: Annotated[tuple[Letters, ...], FROM_LIST] = Field(
        default=(), description="Texts that end a completion, beside the tokens that do."
    )
    rewards: Annotated[tuple[Annotated[RewardSection, _OR_NAME], ...], FROM_LIST] = Field(
        min_length=1,
        description="What completions are rewarded for; each a name, a path, or a mapping with a weight. They add up.",
    )
    on_bad_reward: Literal["error", "zero"] = Field(
        default="error",
        description="A reward that raises, gives no finite number, or hangs: stop and name its rows, or count 0 there.",
    )
    reward_timeout: float = Field(
        default=60.0, gt=0, le=86400, description="Seconds that a Python reward may take for the completions of a step."
    )
    epochs: int = Field(default=1, ge=1, le=1000, description="Times that a step's completions are learnt from.")
    mini_batches: int = Field(
        default=1,
        ge=1,
        le=2**16,
        description="Optimizer updates of each epoch: the prompts are cut into so many parts.",
    )
    stale: int = Field(
        default=0,
        ge=0,
        le=1,
        description="1: a step learns from completions that the weights before the last update wrote, as where rollout "
        "and update run side by side (here nothing does); ratios are against those weights. 0: from its own.",
    )
    advantage: Literal["group", "group_unscaled", "leave_one_out", "batch"] | None = Field(
        default=None,
        description="A reward less the mean of its group, over the group's standard deviation (group), not divided "
        "(group_unscaled) or over the batch's (batch); or less the mean of the others of its group (leave_one_out).",
    )
    gamma: float | None = Field(
        default=None, ge=0, le=1, description="Of ppo: discount of what comes a token later (GAE). Absent: 1."
    )
    lam: float | None = Field(
        default=None,
        ge=0,
        le=1,
        description="Of ppo: how far advantages look past the critic's next value (GAE): 0, there alone; 1, to the "
        "end. Absent: 0.95.",
    )
    value_clip: float | None = Field(
        default=None,
        ge=0,
        le=1e6,
        description="Of ppo: how far a value may move from that of the rollout and still lower its loss; 0: as far as "
        "it likes. Absent: 0.2.",
    )
    value_weight: float | None = Field(
        default=None,
        gt=0,
        le=1e6,
        description="Of ppo, full-parameter: factor of the critic's loss, which trains the policy's own layers too. "
        "Absent: 0.1.",
    )
    critic_lr: float | None = Field(
        default=None,
        gt=0,
        le=1000,
        description="Of ppo: peak learning rate of what is the critic's own: its adapters and its head, or without "
        "lora its head; the schedule is that of train.lr. Absent: train.lr.",
    )
    clip_low: float | None = Field(
        default=None, ge=0, le=1e6, description="The ratio of policies is clipped at 1 - this."
    )
    clip_high: float | None = Field(
        default=None, ge=0, le=1e6, description="The ratio of policies is clipped at 1 + this."
    )
    kl: float | None = Field(
        default=None, ge=0, le=1e6, description="Factor of the KL penalty against the reference; 0: none."
    )
    kl_estimator: Literal["k1", "k2", "k3"] | None = Field(
        default=None, description="How KL is estimated from a sample (Schulman 2020): k1, k2 or k3."
    )
    kl_in: Literal["loss", "reward"] | None = Field(default=None, description="Where the KL penalty stands.")
    entropy: float = Field(default=0.0, ge=-1e3, le=1e3, description="Factor of the entropy bonus.")
    mask_truncated: bool = Field(
        default=False, description="Learn nothing from completions that max_new_tokens cut off."
    )
    overlong: int | None = Field(
        default=None,
        ge=0,
        le=2**20,
        description="Soft punishment of long completions (DAPO): over the last so many of max_new_tokens, the reward "
        "falls linearly by 1; 0: none.",
    )
    dynamic_sampling: bool | None = Field(
        default=None,
        description="Leave out groups whose rewards are all equal, and take further prompts in their place.",
    )
    correction: Literal["off", "truncate", "mask"] = Field(
        default="truncate",
        description="What becomes of the weight of a sample, trainer over rollout: cut to correction_high, or nothing "
        "is learnt outside correction_low and correction_high.",
    )
    correction_level: Literal["token", "sequence", "geometric"] = Field(
        default="token", description="Whether weights are of tokens, of completions, or of completions by their mean."
    )
    correction_low: float | None = Field(
        default=None, ge=0, le=1, description="The least weight. Absent: as is usual, see docs/rl.md."
    )
    correction_high: float | None = Field(
        default=None, ge=1, le=1e6, description="The largest weight. Absent: as is usual (2 for truncate by token)."
    )
    max_gap: float | None = Field(
        default=None,
        gt=0,
        le=1e3,
        description="Stop the run where log-probabilities of rollout and trainer differ by more than this, in nats, "
        "and name the layer that differs first. Absent: no limit; with invariant: none at all.",
    )
    kv: Literal["bf16", "fp8"] = Field(
        default="bf16", description="Keys and values of rollouts: as computed, or FP8 with a scale a token and head."
    )
    slots: int | None = Field(
        default=None,
        ge=1,
        le=2**16,
        description="Sequences that are generated at a time, a process. Absent: all of a step, or as many as a GPU has "
        "room for; what is generated does not depend on it.",
    )
    pages: int | None = Field(
        default=None,
        ge=1,
        le=2**31,
        description="Pages of the key-value cache of a rollout, 8 tokens each, a process. Absent: as many as its "
        "sequences need; fewer generate less at a time, and one completion must have room.",
    )
    invariant: bool = Field(
        default=False,
        description="Compute rollout and update so that a row's result depends on neither batch nor length: their "
        "log-probabilities are then the same bits, and a difference stops the run. Takes longer; FP8 on a GPU needs "
        "fp8.backend: triton.",
    )
    reference: Reference = Field(
        default="auto",
        description="Who the policy is held to: base, the model without its adapters (lora); copy, its first weights "
        "where there are none, those of FP8 layers as frozen codes, a byte a parameter; auto, what fits of these. disk "
        "is for preferences.",
    )
    eval_prompts: int = Field(
        default=64,
        ge=0,
        le=2**20,
        description="Held-out prompts, the first of data.eval, that each evaluation answers greedily for their reward; "
        "0: none.",
    )
    show: int = Field(
        default=4, ge=0, le=2**16, description="Completions of a step that are kept in completions.jsonl."
    )


class PreferenceSection(Section):
    """What is learnt from pairs of answers, of which one was chosen, or from answers that are good or bad (kto)."""

    loss: Literal["sigmoid", "sigmoid_norm", "ipo", "hinge", "robust", "orpo", "simpo", "kto"] = Field(
        default="sigmoid",
        description="DPO (sigmoid; sigmoid_norm with means over tokens), its relatives (ipo, hinge, robust), losses "
        "without a reference (orpo, simpo), or kto, whose rows are answers with a label.",
    )
    beta: float | None = Field(
        default=None,
        gt=0,
        le=1e6,
        description="How sharply the policy is held to its reference. Absent: 0.1, of simpo 2.",
    )
    label_smoothing: float | None = Field(
        default=None,
        ge=0,
        lt=0.5,
        description="Share of pairs whose order is taken to be wrong. Absent: 0, of robust 0.1.",
    )
    sft: float | None = Field(
        default=None, ge=0, le=1e6, description="Factor of the chosen answers' cross-entropy beside the loss."
    )
    gamma: float | None = Field(default=None, ge=0, le=1e6, description="Of simpo: the margin of rewards; absent: 1.")
    desirable_weight: float | None = Field(default=None, ge=0, le=1e6, description="Of kto: factor of good answers.")
    undesirable_weight: float | None = Field(default=None, ge=0, le=1e6, description="Of kto: factor of bad answers.")
    reference: Reference = Field(
        default="auto",
        description="As rl.reference; or disk: what the first weights say of the answers, computed once before the "
        "first step and kept in the run's directory, so that no second model is held. orpo and simpo have none.",
    )


#: preference loss -> the options that it has; tests hold them against `octavo.rl`'s own
OPTIONS: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("sigmoid", "sigmoid_norm", "robust"), ("beta", "sft", "label_smoothing")),
    **dict.fromkeys(("ipo", "hinge"), ("beta", "sft")),
    "orpo": ("beta",),
    "simpo": ("beta", "gamma", "label_smoothing", "sft"),
    "kto": ("beta", "desirable_weight", "undesirable_weight"),
}
