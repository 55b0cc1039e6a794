"""Generate completions, as many at a time as fit in memory, and score them: for the steps of phase rl and for held-out
prompts."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from octavo import generation
from octavo.base import accelerator
from octavo.config.sections.rl import RlSection
from octavo.data.tasks.prompts import PromptSample
from octavo.fp8.observe import uncounted
from octavo.generation import Completion, Engine, Prompt, Sampling
from octavo.parallel import World
from octavo.rl.rewards import Rewards
from octavo.rl.rollout.experience import Rollout, prompt_of
from octavo.train import TrainError
from octavo.train.estimate.memory import gb
from octavo.train.estimate.memory.rollout import check_pages
from octavo.train.forward.evaluation import SHOWN, Answer

SHARE = 0.9
"""Share of free memory that is used: the rest is what an allocator cannot use."""
ANY = 1 << 62  # bytes: no limit, for devices whose free memory is not known


def generate_completions(
    engine: Engine,
    prompts: Sequence[PromptSample],
    sampling: Sampling,
    rl: RlSection,
    doing: Callable[[str], None] = lambda text: None,
) -> tuple[list[Completion], int]:
    """`rl.group` completions of each prompt, and the bytes that the engine held, which are free again. A collective
    where ranks share parameters. Raises the errors of :meth:`octavo.generation.Engine.generate`."""
    engine_prompts = [prompt_of(p) for p in prompts]
    engine.slots = slots_for(engine, engine_prompts, sampling, rl, free_bytes(engine.caller.device))
    with uncounted():
        completions = engine.generate(engine_prompts, sampling, rl.group, lambda done, total: doing(f"{done}/{total}"))
    held = sum(engine.bytes.values())
    engine.release()
    return completions, held


def free_bytes(device: torch.device) -> int | None:
    """Bytes that tensors can still take on a device, including those that torch has cached; None on a device that does
    not report it, such as the CPU."""
    free = accelerator.free_bytes(device)
    return None if free is None else int(SHARE * free)


def slots_for(engine: Engine, prompts: Sequence[Prompt], sampling: Sampling, rl: RlSection, free: int | None) -> int:
    """Sequences at a time for these prompts in `free` bytes (None: all fit). The completions do not depend on it.

    Raises TrainError where not even one fits, or `rl.pages` is too small.
    """
    wanted = max(1, len(prompts) * rl.group)
    if not prompts:
        return min(rl.slots or wanted, wanted)
    caller, most = engine.caller, max(prompts, key=lambda prompt: len(prompt.input_ids))
    longest = len(most.input_ids)
    if rl.pages is not None:
        check_pages(rl, longest, engine.page, most.name)
    # All prompts get as many slots as the longest one allows: slots have one size.
    if rl.slots is not None or (free is None and rl.pages is None):
        return min(rl.slots or wanted, wanted)
    free = ANY if free is None else free
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
        most=wanted,
        pages=rl.pages,
        in_place=engine.in_place,
    )
    if not slots:
        shape = generation.Shape(1, longest, rl.max_new_tokens, rl.group, engine.page, max(grids, default=0), rl.pages)
        needs = generation.predict(caller.model.config, shape, rl.kv, caller.dtype, sampling, engine.in_place).total
        raise TrainError(
            f"{gb(free)} are free for the rollout, and one completion of a prompt of {longest} tokens with "
            f"{rl.max_new_tokens} new ones takes {gb(needs)}. Lower rl.max_new_tokens"
            f"{' or rl.pages' * bool(rl.pages)}, keep keys and values in FP8 (rl.kv: fp8), or save memory elsewhere: "
            "octavo plan FILE --card SIZE"
        )
    return slots


def score_completions(
    rewards: Rewards, tokenizer: Any, prompts: Sequence[PromptSample], completions: Sequence[Completion]
) -> Rollout:
    """The rollout of completions with their rewards. Raises RewardError."""
    group = len(completions) // max(len(prompts), 1)
    texts = [tokenizer.decode(c.tokens, skip_special_tokens=True) for c in completions]
    where = [f"{prompts[c.prompt].file}, row {prompts[c.prompt].row}" for c in completions]
    pictures = [prompt.pictures for prompt in prompts for _ in range(group)]
    table = rewards.score(texts, reward_columns(prompts, group), where, pictures)
    return Rollout([*prompts], [*completions], texts, table.totals.copy(), dict(table.each))


def reward_columns(prompts: Sequence[PromptSample], group: int = 1) -> dict[str, list[Any]]:
    """The columns of `group` completions of each prompt, in that order, as rewards take them: `answer`, `prompt`,
    `messages`, `images`, `videos` and every other column of any row (None for rows without it)."""
    rows = [{**prompt.columns, "answer": prompt.answer} for prompt in prompts for _ in range(group)]
    return {key: [row.get(key) for row in rows] for key in dict.fromkeys(key for row in rows for key in row)}


def completion_means(rollout: Rollout, world: World, rl: RlSection) -> dict[str, float | None]:
    """Figures over the completions of all ranks: their number, mean reward and length, the share that was cut off, the
    mean of each reward, and with `on_bad_reward: zero` the share where a reward returned no number; None without
    completions. A collective."""
    sums = {
        "reward": rollout.rewards.sum(),
        "length": float(rollout.lengths.sum()),
        "completions/clipped_ratio": float(rollout.truncated.sum()),
        **{f"rewards/{name}/mean": np.nan_to_num(scores).sum() for name, scores in rollout.scores.items()},
    }
    if rl.on_bad_reward == "zero":
        sums |= {f"rewards/{name}/bad": float(np.isnan(scores).sum()) for name, scores in rollout.scores.items()}
    every = torch.tensor([*sums.values(), len(rollout.completions)], dtype=torch.float64)
    *values, count = world.sum(every).tolist()
    averages = {name: value / count if count else None for name, value in zip(sums, values, strict=True)}
    return {**averages, "completions": count}


def group_figures(rollout: Rollout, world: World) -> dict[str, float | None]:
    """Figures over the groups of all ranks: the mean of their standard deviations, and the share of groups whose
    rewards are all equal; None without groups. A collective."""
    groups = rollout.rewards.reshape(-1, max(rollout.group, 1))
    apart = groups.std(axis=1, ddof=min(1, groups.shape[1] - 1)) if groups.size else np.zeros(0)
    # Not by a deviation of 0: the mean of equal numbers may differ from them in the last bit.
    alike = groups.max(axis=1) == groups.min(axis=1) if groups.size else np.zeros(0)
    every = torch.tensor([apart.sum(), float(alike.sum()), len(rollout.prompts)], dtype=torch.float64)
    spread, equal, prompts = world.sum(every).tolist()
    sums = {"reward_std": spread, "frac_reward_zero_std": equal}
    return {name: value / prompts if prompts else None for name, value in sums.items()}


def evaluate_held_out(
    engine: Engine,
    rewards: Rewards,
    tokenizer: Any,
    prompts: Sequence[PromptSample],
    sampling: Sampling,
    rl: RlSection,
    world: World,
    doing: Callable[[str], None] = lambda text: None,
    shown: list[Answer] | None = None,
) -> dict[str, float | None]:
    """:func:`completion_means` of one greedy answer to each held-out prompt, ended as `sampling` says. The first
    answers are appended to `shown`. A collective."""
    one = rl.model_copy(update={"group": 1})
    greedy = replace(sampling, temperature=0.0, top_p=1.0, top_k=0, min_p=0.0)
    prompts = [replace(prompt, number=place) for place, prompt in enumerate(prompts)]
    completions, _ = generate_completions(engine, prompts, greedy, one, doing)
    rollout = score_completions(rewards, tokenizer, prompts, completions)
    if shown is not None:
        first = list(zip(rollout.prompts, rollout.texts, rollout.rewards.tolist(), strict=True))[:SHOWN]
        shown += [Answer(p.file, p.row, p.input_ids.tolist(), _words(p.answer), text, None, r) for p, text, r in first]
    return completion_means(rollout, world, rl)


def _words(answer: Any) -> str:
    """An answer as text; rows may hold any JSON value that their reward understands."""
    return answer if isinstance(answer, str) else "" if answer is None else json.dumps(answer, default=str)
