"""One phase begins with the weights of another (`run.start_from`), whether or not either has a critic."""

from __future__ import annotations

import pytest

from octavo import rl, train
from octavo.checkpoint import SafeReader

ONE = ("train.steps=1", "train.warmup=0", "data.eval=[]", "run.save_states=false")


def critics(result: train.RunResult) -> int:
    """How many of a checkpoint's entries are a value head's."""
    found = SafeReader(result.dir / "checkpoints" / "step_1").read_metadata().state_dict_metadata
    return sum("value_head" in name for name in found)


@pytest.mark.long
@pytest.mark.parametrize("over", [(), ("lora={rank: 4}", "model.load_in_fp8=block")], ids=["full", "adapters"])
def test_from_phase_to_phase(make, reinforcing, over):
    """SFT, then GRPO, then PPO, whose critic is new, then PPO with that critic, and SFT without it."""
    tuned = train.run(make(*over, *ONE, dir="sft"))
    group = rl.run(reinforcing(*over, *ONE, f"run.start_from={tuned.dir}", dir="grpo"))
    first = rl.run(reinforcing(*over, *ONE, "rl.algorithm=ppo", f"run.start_from={group.dir}", dir="ppo"))
    again = rl.run(reinforcing(*over, *ONE, "rl.algorithm=ppo", f"run.start_from={first.dir}", dir="again"))
    after = train.run(make(*over, *ONE, f"run.start_from={again.dir}", dir="after"))
    assert [bool(critics(run)) for run in (tuned, group, first, again, after)] == [False, False, True, True, False]
