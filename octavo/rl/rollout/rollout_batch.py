"""How many sequences a rollout generates at a time where `rl.slots` does not say: all, or what a GPU has room for."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from octavo import generation
from octavo.base import accelerator
from octavo.config.sections.rl import RlSection
from octavo.generation import Engine, Prompt, Sampling
from octavo.train import TrainError
from octavo.train.estimate.memory import gb
from octavo.train.estimate.memory.rollout import check_pages

SHARE = 0.9
"""Of what is free: the rest is what an allocator cannot use."""
ANY = 1 << 62  # bytes: host memory is not looked at


def free_bytes(device: torch.device) -> int | None:
    """Bytes that tensors could still take on a device, those that torch holds and nobody uses among them; None where
    it does not tell, as the CPU, where everything is in host memory."""
    free = accelerator.free_bytes(device)
    return None if free is None else int(SHARE * free)


def slots_for(engine: Engine, prompts: Sequence[Prompt], sampling: Sampling, rl: RlSection, free: int | None) -> int:
    """Sequences at a time for these prompts in `free` bytes (None: there is room for all). What is generated does not
    depend on it.

    Raises TrainError where there is no room for one, or too few `rl.pages`.
    """
    own = max(1, len(prompts) * rl.group)
    if not prompts:
        return min(rl.slots or own, own)
    caller, most = engine.caller, max(prompts, key=lambda prompt: len(prompt.input_ids))
    longest = len(most.input_ids)
    check_pages(rl, longest, engine.page, most.name)
    if rl.slots is not None or (free is None and rl.pages is None):
        return min(rl.slots or own, own)
    free = ANY if free is None else free
    grids = [int(p.image_grid_thw.prod(-1).sum()) for p in prompts if p.image_grid_thw is not None]
    given = (caller.model.config, longest, sampling, rl.group, engine.page, rl.kv, caller.dtype)
    more = {"patches": max(grids, default=0), "most": own, "pages": rl.pages, "in_place": engine.in_place}
    found = generation.sequences_that_fit(free, *given, **more)
    if not found:
        shape = generation.Shape(1, longest, rl.max_new_tokens, rl.group, engine.page, max(grids, default=0), rl.pages)
        needs = generation.predict(caller.model.config, shape, rl.kv, caller.dtype, sampling, engine.in_place).total
        raise TrainError(
            f"a rollout has {gb(free)} free, and one completion of a prompt of {longest} tokens with "
            f"{rl.max_new_tokens} new ones takes {gb(needs)}. Lower rl.max_new_tokens"
            f"{' or rl.pages' * bool(rl.pages)}, keep keys and values in FP8 (rl.kv: fp8), or save memory elsewhere: "
            "octavo plan FILE --card SIZE"
        )
    return found
