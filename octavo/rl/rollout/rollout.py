"""Generates completions, as many at a time as fit in memory, and scores them."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from octavo import generation
from octavo.base import accelerator
from octavo.config.sections.rl import RlSection
from octavo.data.tasks.prompts import PromptSample
from octavo.fp8.observe import uncounted
from octavo.generation import Completion, Engine, GenerationError, Prompt, Sampling
from octavo.generation.engines import Generation, Manifest, Pieces, RolloutEngine
from octavo.parallel import World
from octavo.rl.rewards import Rewards
from octavo.rl.rollout.experience import Rollout, engine_prompt
from octavo.train import TrainError
from octavo.train.estimate.memory import gb
from octavo.train.estimate.memory.rollout import check_pages
from octavo.train.forward.evaluation import MAX_LOGGED, Answer

USABLE_SHARE = 0.9
"""Share of free memory that is used; the rest is reserved for fragmentation of the allocator."""
UNLIMITED = 1 << 62  # bytes, for devices that do not report their free memory


def generate_completions(
    engine: RolloutEngine,
    version: int,
    prompts: Sequence[PromptSample],
    sampling: Sampling,
    group: int,
    doing: Callable[[str], None] = lambda text: None,
) -> tuple[list[Completion], int]:
    """Generate `group` completions per prompt with the weights of a version. Returns them and the bytes that the engine
    used in this process, which are freed.

    A collective if ranks share parameters. Raises the errors of :class:`octavo.generation.engines.Generation`."""
    with uncounted():
        generation = engine.generate(version, [engine_prompt(p) for p in prompts], sampling, group)
        completions = generation.result(lambda done, total: doing(f"{done}/{total}"))
    return completions, engine.release()


class SharedEngine:
    """The engine in this process, with the modules that train: every version of the weights is the current one. It
    generates as many sequences at a time as fit in memory, when it is asked for the result."""

    shares_weights = True

    def __init__(self, engine: Engine, rl: RlSection) -> None:
        self.engine, self.rl = engine, rl

    def update(self, version: int, manifest: Manifest, pieces: Pieces) -> str:
        raise GenerationError("this engine generates with the trainer's own weights, so there are none to take.")

    def generate(self, version: int, prompts: Sequence[Prompt], sampling: Sampling, group: int = 1) -> Generation:
        """See :meth:`octavo.generation.Engine.generate`; the result is a collective if ranks share the model's
        parameters."""
        return _InProcess(self, prompts, sampling, group)

    def release(self) -> int:
        held = sum(self.engine.bytes.values())
        self.engine.release()
        return held

    def close(self) -> None:
        self.engine.release()


@dataclass(frozen=True)
class _InProcess:
    """What a :class:`SharedEngine` generates."""

    shared: SharedEngine
    prompts: Sequence[Prompt]
    sampling: Sampling
    group: int

    def result(self, progress: Callable[[int, int], None] = lambda done, total: None) -> list[Completion]:
        engine, rl = self.shared.engine, self.shared.rl.model_copy(update={"group": self.group})
        engine.slots = slots_for(engine, self.prompts, self.sampling, rl, free_bytes(engine.caller.device))
        return engine.generate(self.prompts, self.sampling, self.group, progress)


def free_bytes(device: torch.device) -> int | None:
    """Return the bytes available to tensors on a device, including those that torch has cached, or None on a device
    that does not report them, such as the CPU."""
    free = accelerator.free_bytes(device)
    return None if free is None else int(USABLE_SHARE * free)


def slots_for(engine: Engine, prompts: Sequence[Prompt], sampling: Sampling, rl: RlSection, free: int | None) -> int:
    """Return how many sequences to generate at a time in `free` bytes (None if unlimited). Completions do not depend
    on it.

    Raises TrainError if not even one sequence fits, or `rl.pages` is too small.
    """
    total = max(1, len(prompts) * rl.group)
    if not prompts:
        return min(rl.slots or total, total)
    caller, longest_prompt = engine.caller, max(prompts, key=lambda prompt: len(prompt.input_ids))
    longest = len(longest_prompt.input_ids)
    if rl.pages is not None:
        check_pages(rl, longest, engine.page, longest_prompt.name)
    # All slots have the size that the longest prompt needs.
    if rl.slots is not None or (free is None and rl.pages is None):
        return min(rl.slots or total, total)
    free = UNLIMITED if free is None else free
    grids = [int(p.image_grid_thw.prod(-1).sum()) for p in prompts if p.image_grid_thw is not None]
    slots = generation.sequences_that_fit(
        free,
        caller.model.config,
        longest,
        sampling,
        rl.group,
        engine.page,
        rl.kv,
        caller.dtype,
        patches=max(grids, default=0),
        most=total,
        pages=rl.pages,
        in_place=engine.reads_pages_in_place,
    )
    if not slots:
        shape = generation.Shape(1, longest, rl.max_new_tokens, rl.group, engine.page, max(grids, default=0), rl.pages)
        needs = generation.predict(
            caller.model.config, shape, rl.kv, caller.dtype, sampling, engine.reads_pages_in_place
        ).total
        raise TrainError(
            f"the rollout has {gb(free)} of free memory, but one completion of {rl.max_new_tokens} tokens after a "
            f"prompt of {longest} tokens takes {gb(needs)}. Lower rl.max_new_tokens{' or rl.pages' * bool(rl.pages)}, "
            "keep keys and values in FP8 (rl.kv: fp8), or reduce the memory of training: octavo plan FILE --card SIZE"
        )
    return slots


def score_completions(
    rewards: Rewards, tokenizer: Any, prompts: Sequence[PromptSample], completions: Sequence[Completion]
) -> Rollout:
    """Score completions; returns them as a rollout. Raises RewardError."""
    group = len(completions) // max(len(prompts), 1)
    texts = [tokenizer.decode(c.tokens, skip_special_tokens=True) for c in completions]
    where = [prompts[c.prompt].place for c in completions]
    pictures = [prompt.pictures for prompt in prompts for _ in range(group)]
    table = rewards.score(texts, reward_columns(prompts, group), where, pictures)
    return Rollout([*prompts], [*completions], texts, table.totals.copy(), dict(table.each))


def reward_columns(prompts: Sequence[PromptSample], group: int = 1) -> dict[str, list[Any]]:
    """Return the columns that rewards take, for `group` completions per prompt: `answer`, `prompt`, `messages`,
    `images`, `videos` and every other column of any row (None for rows without it)."""
    rows = [{**prompt.columns, "answer": prompt.answer} for prompt in prompts for _ in range(group)]
    return {key: [row.get(key) for row in rows] for key in dict.fromkeys(key for row in rows for key in row)}


def completion_means(rollout: Rollout, world: World, rl: RlSection) -> dict[str, float | None]:
    """Compute figures over the completions of all ranks: their number, mean reward and length, the share that was cut
    off, the mean of each reward, and with `on_bad_reward: zero` the share for which a reward returned no number. Values
    are None without completions. Collective call."""
    sums = {
        "reward": rollout.rewards.sum(),
        "length": float(rollout.lengths.sum()),
        "completions/clipped_ratio": float(rollout.truncated.sum()),
        **{f"rewards/{name}/mean": np.nan_to_num(scores).sum() for name, scores in rollout.scores.items()},
    }
    if rl.on_bad_reward == "zero":
        sums |= {f"rewards/{name}/bad": float(np.isnan(scores).sum()) for name, scores in rollout.scores.items()}
    local_sums = torch.tensor([*sums.values(), len(rollout.completions)], dtype=torch.float64)
    *values, count = world.sum(local_sums).tolist()
    averages = {name: value / count if count else None for name, value in zip(sums, values, strict=True)}
    return {**averages, "completions": count}


def group_figures(rollout: Rollout, world: World) -> dict[str, float | None]:
    """Compute figures over the groups of all ranks: the mean of their standard deviations, and the share of groups with
    equal rewards. Values are None without groups. Collective call."""
    groups = rollout.rewards.reshape(-1, max(rollout.group, 1))
    deviations = groups.std(axis=1, ddof=min(1, groups.shape[1] - 1)) if groups.size else np.zeros(0)
    # Not a deviation of 0: the mean of equal numbers may differ from them in the last bit.
    all_equal = groups.max(axis=1) == groups.min(axis=1) if groups.size else np.zeros(0)
    local_sums = torch.tensor([deviations.sum(), float(all_equal.sum()), len(rollout.prompts)], dtype=torch.float64)
    deviation, equal, prompts = world.sum(local_sums).tolist()
    sums = {"reward_std": deviation, "frac_reward_zero_std": equal}
    return {name: value / prompts if prompts else None for name, value in sums.items()}


def evaluate_held_out(
    engine: RolloutEngine,
    version: int,
    rewards: Rewards,
    tokenizer: Any,
    prompts: Sequence[PromptSample],
    sampling: Sampling,
    rl: RlSection,
    world: World,
    doing: Callable[[str], None] = lambda text: None,
    shown: list[Answer] | None = None,
) -> dict[str, float | None]:
    """Generate one greedy answer per held-out prompt with the weights of a version, and the stop conditions of
    `sampling`; returns their :func:`completion_means`. The first answers are appended to `shown`. Collective call."""
    greedy = replace(sampling, temperature=0.0, top_p=1.0, top_k=0, min_p=0.0)
    prompts = [replace(prompt, number=place) for place, prompt in enumerate(prompts)]
    completions, _ = generate_completions(engine, version, prompts, greedy, 1, doing)
    rollout = score_completions(rewards, tokenizer, prompts, completions)
    if shown is not None:
        first = list(zip(rollout.prompts, rollout.texts, rollout.rewards.tolist(), strict=True))[:MAX_LOGGED]
        shown += [
            Answer(p.file, p.row, p.input_ids.tolist(), _answer_text(p.answer), text, None, r) for p, text, r in first
        ]
    return completion_means(rollout, world, rl)


def _answer_text(answer: Any) -> str:
    """Format an answer as text; rows may have any JSON value that their reward accepts."""
    return answer if isinstance(answer, str) else "" if answer is None else json.dumps(answer, default=str)
