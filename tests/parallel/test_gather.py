"""`train.gather: bf16` on two gloo ranks: BF16 communication, fp32 shards, and a bit-exact resume."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from octavo import checkpoint, fp8
from octavo.fp8.weights.shards import local_of
from octavo.parallel import World, shard
from tests import ranks
from tests.parallel.test_shard import Blocks, Decoder

WAYS = {  # name -> (policy or None, gather)
    "stored": (fp8.Policy("blockwise"), None),
    "bf16": (fp8.Policy("blockwise"), torch.bfloat16),
    "high": (None, torch.bfloat16),
    "codes": (fp8.Policy("blockwise", param=True), torch.bfloat16),
}


class Wire(TorchDispatchMode):
    """Records which collectives run on which dtypes, and their bytes."""

    def __init__(self) -> None:
        super().__init__()
        self.dtypes: set[tuple[str, str]] = set()
        self.gathered = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if str(func).startswith(("c10d._allgather_base", "c10d._reduce_scatter_base")):
            self.dtypes.add((func._schema.name.split("::")[1].strip("_"), str(args[0].dtype).removeprefix("torch.")))
            self.gathered += "gather" in str(func) and args[0].numel() * args[0].element_size()
        return func(*args, **(kwargs or {}))


def _model(name: str, world: World) -> nn.Module:
    torch.manual_seed(0)
    model = Decoder(48, 31)
    model.embed.weight.data *= 0.2
    policy, gather = WAYS[name]
    if policy is not None:
        fp8.apply(model, fp8.plan(model, policy, components={"foundation": ("blocks.**",)}))
    return shard(model, Blocks(), world, gather_dtype=gather)


def _train(model: nn.Module, optimizer: torch.optim.Optimizer, world: World, steps: range) -> list[float]:
    losses = []
    for step in steps:
        for micro in range(2):
            ids = torch.randint(0, 31, (4, 16), generator=torch.Generator().manual_seed(2 * step + micro))
            local = ids[world.rank :: world.size]
            logits = model(local).flatten(0, 1).float()
            loss = nn.functional.cross_entropy(logits, (3 * local + 1).flatten() % 31, reduction="sum") / 128
            loss.backward()
            losses.append(float(world.sum(loss)))
        optimizer.step()
        optimizer.zero_grad()
    return losses


def _all(world: World, folder: str) -> dict:
    answer: dict = {}
    for name in WAYS:
        model = _model(name, world)
        optimizer = fp8.AdamW(model.parameters(), lr=3e-3)
        seen: set[str] = set()
        model.blocks[0].up.register_forward_hook(
            lambda m, _, y, seen=seen: seen.update((str(m.weight.dtype), str(y.dtype)))
        )
        with Wire() as wire:
            losses = _train(model, optimizer, world, range(1))
        logits = model(torch.arange(4)[None])
        logits.float().sum().backward()
        stays = {str(local_of(t).dtype) for p in model.parameters() for t in (p, p.grad)}
        optimizer.zero_grad()
        losses += _train(model, optimizer, world, range(1, 3))
        saved = checkpoint.save(
            f"{folder}/{name}", 3, model=model, optimizer=optimizer, extra={}, counters={}, world=world, keep=1
        )
        losses += _train(model, optimizer, world, range(3, 6))
        again = _model(name, world)
        stock = fp8.AdamW(again.parameters(), lr=3e-3)
        checkpoint.load(Path(saved), model=again, optimizer=stock, world=world)
        resumed = _train(again, stock, world, range(3, 6))
        equal = all(
            torch.equal(local_of(a), local_of(b)) for a, b in zip(model.parameters(), again.parameters(), strict=True)
        )
        answer[name] = {
            "wire": sorted(wire.dtypes), "bytes": wire.gathered, "seen": sorted(seen), "stays": sorted(stays),
            "losses": losses, "resumed": resumed, "equal": equal,
        }  # fmt: skip
    return answer


@pytest.mark.long
def test_bf16_gather_with_fp32_shards(tmp_path: Path) -> None:
    first, second = ranks.run(_all, 2, str(tmp_path))
    for got in (first, second):
        assert got["stored"]["wire"] == [["allgather_base", "float32"], ["reduce_scatter_base", "float32"]]
        assert (
            got["bf16"]["wire"]
            == got["high"]["wire"]
            == [["allgather_base", "bfloat16"], ["reduce_scatter_base", "bfloat16"]]
        )
        assert 2 * got["bf16"]["bytes"] == got["stored"]["bytes"]
        # codes and values of one group go in one buffer of bytes: less than all in BF16, gradients BF16
        assert dict(got["codes"]["wire"])["reduce_scatter_base"] == "bfloat16"
        assert got["codes"]["bytes"] < 0.8 * got["bf16"]["bytes"]
        for name, actual in got.items():
            assert actual["stays"] == ["torch.float32"], name
            assert actual["resumed"] == actual["losses"][6:] and actual["equal"], name
            assert actual["seen"] == (["torch.float32"] if name == "stored" else ["torch.bfloat16"]), name
            gaps = [abs(a - b) / a for a, b in zip(got["stored"]["losses"], actual["losses"], strict=True)]
            assert max(gaps) < 3e-2 and (name == "stored" or max(gaps) > 0), (name, gaps)
            assert actual["losses"][-1] < 0.8 * actual["losses"][0], "nothing was learnt, so nothing was compared"
