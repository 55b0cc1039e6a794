"""The sections ``rl`` and ``preference``, for the phases of the same names."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from octavo.base.recipe_specs import join_words
from octavo.config.sections.names import FROM_LIST, FROZEN, Frozen, Section
from octavo.config.sections.text_types import FilePath, Letters, Text

#: phases that learn from rewards or comparisons, not only from given answers
BEYOND_SFT = ("rl", "preference")


Reference = Literal["auto", "base", "copy", "disk"]

#: algorithms with a critic; algorithms whose KL has a weight by default; the keys of `rl` that configure the critic.
#: Tests compare them with the registry of `octavo.rl`.
WITH_CRITIC = ("ppo",)
WITH_KL = ("rloo", "ppo")
CRITIC_KEYS = ("gamma", "lam", "value_clip", "value_weight", "critic_lr")


class RewardSection(Section):
    """One reward: a function of completions and of the columns of their rows, or a reward model."""

    reward: FilePath = Field(
        min_length=1,
        description="exact_match, number, choice, regex, format, math; a function of a Python file (rewards.py:score, "
        "relative to the configuration file); the folder of a reward model (sequence classification, one output); or "
        "python:NAME, a function that a program passes to octavo.run.",
    )
    name: Text | None = Field(
        default=None,
        min_length=1,
        max_length=64,
        description="Its name in metrics. Absent: the name of the function or folder.",
    )
    weight: float = Field(default=1.0, ge=-1e6, le=1e6, description="Its factor in the sum of rewards.")
    pattern: Text | None = Field(
        default=None,
        min_length=1,
        description="For regex and format: the regular expression; regex searches it, format matches it to the whole.",
    )
    tolerance: float | None = Field(
        default=None,
        ge=0,
        le=1e9,
        description="For number: the maximum relative difference of numbers that count as equal. Absent: 1e-6.",
    )
    arguments: dict[str, Any] | None = Field(
        default=None, description="For a Python function: further keyword arguments of each call."
    )
    load_in_fp8: Frozen = Field(
        default=None,
        description=f"For a reward model: keep linear layers as FP8 codes, {join_words(FROZEN, 'or')} (true: "
        f"{FROZEN[0]}).",
    )
    batch: int | None = Field(default=None, ge=1, le=2**16, description="For a reward model: completions at a time.")


def _as_reward(value: Any) -> Any:
    return {"reward": value} if isinstance(value, str) else value


_OR_NAME = BeforeValidator(_as_reward, json_schema_input_type=str | RewardSection)


class EngineSection(Section):
    """The engine that generates completions."""

    name: Literal["octavo", "ray"] = Field(
        default="octavo",
        description="octavo: the modules that train, in their process. ray: replicas of that engine in other "
        "processes, on this machine or on a Ray cluster (RAY_ADDRESS), which receive the weights of each step "
        "(pip install 'octavo[ray]').",
    )
    replicas: int = Field(default=2, ge=1, le=4096, description="For ray: number of replicas.")
    cpus: int = Field(default=1, ge=1, le=4096, description="For ray: CPU threads of a replica.")
    gpus: float = Field(
        default=0.0, ge=0, le=1, description="For ray: GPUs of a replica; below 1 replicas share one. 0: on the CPU."
    )
    chunk: int | None = Field(
        default=None,
        ge=1,
        le=2**20,
        description="For ray: prompts of a request, which are lost with a replica and generated again. Absent: so many "
        "that each replica has two requests in a step.",
    )
    timeout: float = Field(
        default=600.0,
        gt=0,
        le=86400,
        description="For ray: seconds after which a replica that does not answer is started again, and for which a run "
        "waits if none can be reached.",
    )
    node_address: Text | None = Field(
        default=None,
        min_length=1,
        description="For ray without RAY_ADDRESS: the address at which other nodes join the cluster that the run "
        "starts. Absent: 127.0.0.1, so that none can.",
    )


def _as_engine(value: object) -> object:
    return {"name": value} if isinstance(value, str) else value


_OR_ENGINE = BeforeValidator(_as_engine, json_schema_input_type=Literal["octavo", "ray"] | EngineSection)


class RlSection(Section):
    """Reinforcement learning. A step generates completions of its prompts, rewards them, and updates the model."""

    algorithm: Literal["grpo", "dr_grpo", "dapo", "bnpo", "gspo", "cispo", "rloo", "ppo"] = Field(
        default="grpo",
        description="The objective with its default clipping, advantages and normalization (docs/rl.md lists the "
        "papers); absent keys below have the algorithm's defaults.",
    )
    prompts: int = Field(default=16, ge=1, le=2**20, description="Prompts in one step, over all processes.")
    group: int = Field(default=8, ge=1, le=2**16, description="Completions of each prompt.")
    max_new_tokens: int = Field(default=256, ge=1, le=2**20, description="Maximum number of tokens per completion.")
    temperature: float = Field(default=1.0, ge=1e-6, le=100, description="Temperature of sampling.")
    top_p: float = Field(
        default=1.0,
        gt=0,
        le=1,
        description="Sample from the most likely tokens with this total probability.",
    )
    top_k: int = Field(default=0, ge=0, le=2**31, description="Sample from this many most likely tokens; 0 = all.")
    min_p: float = Field(
        default=0.0,
        ge=0,
        le=1,
        description="Sample from tokens at least this many times as likely as the most likely one.",
    )
    stop: Annotated[tuple[Letters, ...], FROM_LIST] = Field(
        default=(), description="Texts that end a completion, in addition to the model's end tokens."
    )
    rewards: Annotated[tuple[Annotated[RewardSection, _OR_NAME], ...], FROM_LIST] = Field(
        min_length=1,
        description="The rewards, each a name, a path, or a mapping with a weight; their weighted sum counts.",
    )
    on_bad_reward: Literal["error", "zero"] = Field(
        default="error",
        description="For a reward that raises, returns no finite number, or hangs: stop and name its rows, or count 0.",
    )
    reward_timeout: float = Field(
        default=60.0, gt=0, le=86400, description="Seconds that a Python reward may take for the completions of a step."
    )
    epochs: int = Field(
        default=1, ge=1, le=1000, description="Number of times that the completions of a step are used."
    )
    mini_batches: int = Field(
        default=1,
        ge=1,
        le=2**16,
        description="Optimizer updates of each epoch: the prompts are split into this many parts.",
    )
    stale: int = Field(
        default=0,
        ge=0,
        le=1,
        description="1: a step learns from completions that the weights before the last update wrote; replicas "
        "(rl.engine) write them while the step before learns. Ratios are relative to those weights. 0: from "
        "completions of the current weights.",
    )
    advantage: Literal["group", "group_unscaled", "leave_one_out", "batch"] | None = Field(
        default=None,
        description="How a reward becomes an advantage: minus the mean of its group, divided by the group's standard "
        "deviation (group), not divided (group_unscaled) or divided by the batch's (batch); or minus the mean of the "
        "other rewards of its group (leave_one_out).",
    )
    gamma: float | None = Field(
        default=None, ge=0, le=1, description="For ppo: discount of rewards per token (GAE). Absent: 1."
    )
    lam: float | None = Field(
        default=None,
        ge=0,
        le=1,
        description="For ppo: lambda of GAE; 0: advantages use only the critic's next value, 1: rewards to the end. "
        "Absent: 0.95.",
    )
    value_clip: float | None = Field(
        default=None,
        ge=0,
        le=1e6,
        description="For ppo: how far a value may move from its value at the rollout and still lower the loss; 0: no "
        "limit. Absent: 0.2.",
    )
    value_weight: float | None = Field(
        default=None,
        gt=0,
        le=1e6,
        description="For ppo without lora: factor of the critic's loss, which trains the policy's layers too. Absent: "
        "0.1.",
    )
    critic_lr: float | None = Field(
        default=None,
        gt=0,
        le=1000,
        description="For ppo: peak learning rate of the critic's adapters and head, or of its head without lora; the "
        "schedule is the same as for train.lr. Absent: train.lr.",
    )
    clip_low: float | None = Field(
        default=None, ge=0, le=1e6, description="The ratio of policies is clipped at 1 - clip_low."
    )
    clip_high: float | None = Field(
        default=None, ge=0, le=1e6, description="The ratio of policies is clipped at 1 + clip_high."
    )
    kl: float | None = Field(default=None, ge=0, le=1e6, description="Weight of the KL from the reference; 0: none.")
    kl_estimator: Literal["k1", "k2", "k3"] | None = Field(
        default=None, description="Estimator of the KL from samples (Schulman 2020): k1, k2 or k3."
    )
    kl_in: Literal["loss", "reward"] | None = Field(default=None, description="Where the KL is counted.")
    entropy: float = Field(default=0.0, ge=-1e3, le=1e3, description="Factor of the entropy bonus.")
    mask_truncated: bool = Field(
        default=False, description="Exclude completions that max_new_tokens cut off from the loss."
    )
    overlong: int | None = Field(
        default=None,
        ge=0,
        le=2**20,
        description="Soft penalty on long completions (DAPO): over this many last tokens of max_new_tokens the reward "
        "falls linearly by 1; 0: none.",
    )
    dynamic_sampling: bool | None = Field(
        default=None,
        description="Drop groups whose rewards are all equal, and take further prompts in their place.",
    )
    correction: Literal["off", "truncate", "mask"] = Field(
        default="truncate",
        description="Importance weights, trainer over rollout: truncate them to correction_high, or mask samples whose "
        "weight is outside correction_low .. correction_high.",
    )
    correction_level: Literal["token", "sequence", "geometric"] = Field(
        default="token", description="Weights of tokens, of completions, or of completions by the geometric mean."
    )
    correction_low: float | None = Field(
        default=None, ge=0, le=1, description="The minimum weight. Absent: the default in docs/rl.md."
    )
    correction_high: float | None = Field(
        default=None, ge=1, le=1e6, description="The maximum weight. Absent: a default (2 for truncate by token)."
    )
    max_gap: float | None = Field(
        default=None,
        gt=0,
        le=1e3,
        description="Stop the run if log-probabilities of rollout and trainer differ by more than this many nats, and "
        "name the first layer that differs. Absent: no limit; with invariant: 0.",
    )
    kv: Literal["bf16", "fp8"] = Field(
        default="bf16", description="Keys and values of rollouts: as computed, or FP8 with a scale per token and head."
    )
    slots: int | None = Field(
        default=None,
        ge=1,
        le=2**16,
        description="Sequences that a process generates at a time. Absent: all of a step, or as many as fit on the "
        "GPU; completions do not depend on it.",
    )
    pages: int | None = Field(
        default=None,
        ge=1,
        le=2**31,
        description="Pages of a process's key-value cache, 8 tokens each. Absent: as many as its sequences need. With "
        "fewer, fewer sequences are generated at a time; one completion must fit.",
    )
    engine: Annotated[EngineSection, _OR_ENGINE] = Field(
        default_factory=EngineSection,
        description="The engine that generates completions: its name, or a mapping.",
    )
    invariant: bool = Field(
        default=False,
        description="Batch invariance: a row's results in rollout and update depend on neither batch nor length, so "
        "that their log-probabilities are the same bits; a difference stops the run. Slower; FP8 on a GPU needs "
        "fp8.backend: triton.",
    )
    reference: Reference = Field(
        default="auto",
        description="The model of the KL: base, the model without its adapters (with lora); copy, a frozen copy of the "
        "initial weights (without lora), FP8 layers as codes, one byte per parameter; auto, the one of these that "
        "applies. disk is for preferences.",
    )
    eval_prompts: int = Field(
        default=64,
        ge=0,
        le=2**20,
        description="Held-out prompts, from the first of data.eval, that each evaluation answers greedily and rewards; "
        "0: none.",
    )
    show: int = Field(
        default=4, ge=0, le=2**16, description="Completions of each step that are written to completions.jsonl."
    )


class PreferenceSection(Section):
    """Learning from pairs of a chosen and a rejected answer, or from answers labeled good or bad (kto)."""

    loss: Literal["sigmoid", "sigmoid_norm", "ipo", "hinge", "robust", "orpo", "simpo", "kto"] = Field(
        default="sigmoid",
        description="DPO (sigmoid; sigmoid_norm with means over tokens), its variants (ipo, hinge, robust), losses "
        "without a reference (orpo, simpo), or kto, whose rows are answers with a label.",
    )
    beta: float | None = Field(
        default=None,
        gt=0,
        le=1e6,
        description="Scale of the implicit rewards; with a reference, a larger beta keeps the policy closer to it. "
        "Absent: 0.1, for simpo 2.",
    )
    label_smoothing: float | None = Field(
        default=None,
        ge=0,
        lt=0.5,
        description="Share of pairs that are assumed to be labeled the wrong way round. Absent: 0, for robust 0.1.",
    )
    sft: float | None = Field(
        default=None, ge=0, le=1e6, description="Factor of the chosen answers' cross-entropy, added to the loss."
    )
    gamma: float | None = Field(default=None, ge=0, le=1e6, description="For simpo: margin of rewards. Absent: 1.")
    desirable_weight: float | None = Field(
        default=None,
        ge=0,
        le=1e6,
        description="For kto: factor of good answers. Absent: 1.",
    )
    undesirable_weight: float | None = Field(
        default=None,
        ge=0,
        le=1e6,
        description="For kto: factor of bad answers. Absent: 1.",
    )
    reference: Reference = Field(
        default="auto",
        description="As rl.reference; or disk: the initial weights' log-probabilities of the answers, computed once "
        "before the first step and stored in the run directory, so that no second model is in memory. orpo and simpo "
        "have none.",
    )


#: preference loss -> its options; tests compare them with the registry of `octavo.rl`
OPTIONS: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("sigmoid", "sigmoid_norm", "robust"), ("beta", "sft", "label_smoothing")),
    **dict.fromkeys(("ipo", "hinge"), ("beta", "sft")),
    "orpo": ("beta",),
    "simpo": ("beta", "gamma", "label_smoothing", "sft"),
    "kto": ("beta", "desirable_weight", "undesirable_weight"),
}
