"""Adapters of experts under FSDP2: two ranks have one process's outputs and gradients."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from octavo import adapters, fp8, models
from octavo.models.tiny import tiny
from octavo.parallel import World, shard
from tests import ranks
from tests.adapters.conftest import inputs, lora, quantized
from tests.adapters.test_merge import filled


def _step(world: World, path: str, sharded: bool) -> dict:
    """The loss, and every adapter's gradient after one step on the same batch, summed over ranks."""
    model = quantized(models.load(path), "block", "blockwise")
    family = models.describe(model.config)
    adapters.attach(model, family, lora(targets=("**.experts",)))
    filled(model)
    batch = inputs(models.load(path), family)
    fp8.activation_checkpointing(family.layers(model), "full")
    before = set(fp8.fingerprint(model).values())
    if sharded:
        shard(model, family, world)
    loss = model(**batch, labels=batch["input_ids"]).loss / (world.size if sharded else 1)
    loss.backward()
    grads = {}
    for name, p in adapters.adapter_parameters(model):
        grad = p.grad.full_tensor() if sharded else p.grad
        grads[name] = grad.double().flatten().tolist()
    if not sharded:
        assert set(fp8.fingerprint(model).values()) == before
    return {"loss": float(loss.detach()) * (world.size if sharded else 1), "grads": grads}


def _both(world: World, path: str) -> list[dict]:
    return [_step(world, path, sharded) for sharded in (True, False)]


@pytest.mark.long
def test_two_ranks_match_gradients_of_one_process(tmp_path: Path) -> None:
    path = tiny.write("qwen3_moe", tmp_path / "tiny", size="mini")
    for ours, single in ranks.run(_both, 2, str(path)):
        assert ours["loss"] == pytest.approx(single["loss"], rel=1e-6)
        assert len(ours["grads"]) == 8 and list(ours["grads"]) == list(single["grads"])
        for name, grad in ours["grads"].items():
            a, b = torch.tensor(grad), torch.tensor(single["grads"][name])
            assert a.abs().max() > 0, name
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6 * float(b.abs().max()), msg=name)
