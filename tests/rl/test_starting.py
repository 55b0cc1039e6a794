"""`run.start_from` between phases, with and without a critic."""

from __future__ import annotations

import pytest

from octavo import rl, train
from octavo.checkpoint import SafeReader

ONE = ("train.steps=1", "train.warmup=0", "data.eval=[]", "run.save_states=false")


def critics(result: train.RunResult) -> int:
    """Count the entries of a value head in a checkpoint."""
    entries = SafeReader(result.dir / "checkpoints" / "step_1").read_metadata().state_dict_metadata
    return sum("value_head" in name for name in entries)


@pytest.mark.long
@pytest.mark.parametrize("overrides", [(), ("lora={rank: 4}", "model.load_in_fp8=block")], ids=["full", "adapters"])
def test_phases_start_from_each_other(make, rl_config, overrides):
    """SFT, GRPO, PPO with a new critic, PPO with the same critic, and SFT without it."""
    tuned = train.run(make(*overrides, *ONE, dir="sft"))
    group = rl.run(rl_config(*overrides, *ONE, f"run.start_from={tuned.dir}", dir="grpo"))
    first = rl.run(rl_config(*overrides, *ONE, "rl.algorithm=ppo", f"run.start_from={group.dir}", dir="ppo"))
    again = rl.run(rl_config(*overrides, *ONE, "rl.algorithm=ppo", f"run.start_from={first.dir}", dir="again"))
    after = train.run(make(*overrides, *ONE, f"run.start_from={again.dir}", dir="after"))
    assert [bool(critics(run)) for run in (tuned, group, first, again, after)] == [False, False, True, True, False]
