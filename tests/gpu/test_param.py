"""FP8 weights on a GPU: steps that equal those of plain weights bit for bit, and FSDP2's streams."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

from octavo import fp8
from octavo.fp8.kernels import select
from octavo.fp8.weights import fp8_rows
from octavo.fp8.weights.fp8_rows import Need, Shards
from octavo.fp8.weights.fp8_tensor import Fp8Weight

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")]

RECIPES = ["blockwise", "rowwise", "tensorwise"]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(512, 1336), nn.Linear(1336, 512)  # 1336: not a multiple of 128

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.nn.functional.silu(self.up(x)))


def build(recipe: str, param: bool) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(Block(), Block()).bfloat16().cuda()
    return fp8.apply(model, fp8.plan(model, fp8.Policy(recipe=recipe, param=param)))


def train(model: nn.Module, steps: int = 3) -> tuple[list[float], dict[str, Tensor]]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = []
    for step in range(steps):
        x = torch.randn(256, 512, generator=torch.Generator().manual_seed(step)).bfloat16().cuda()
        loss = model(x).float().square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    state = {n: getattr(v, "full_tensor", lambda v=v: v)() for n, v in model.state_dict().items()}
    return losses, {n: v.clone() for n, v in state.items()}


def same(a: tuple[list[float], dict[str, Tensor]], b: tuple[list[float], dict[str, Tensor]]) -> bool:
    return a[0] == b[0] and all(torch.equal(v, b[1][n]) for n, v in a[1].items())


@pytest.mark.parametrize("recipe", RECIPES)
def test_steps_match_plain_weights(recipe: str) -> None:
    model = build(recipe, True)
    assert isinstance(model[0].up.weight, Fp8Weight) and model[0].up.weight.is_cuda
    assert same(train(build(recipe, False)), train(model))


def test_forward_and_backward_do_not_synchronize() -> None:
    model = build("blockwise", True)
    x = torch.randn(256, 512, device="cuda", dtype=torch.bfloat16)
    model(x).sum().backward()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        fp8.invalidate(model)
        model(x).sum().backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("recipe", RECIPES)
def test_shards_have_codes_of_full_weight(recipe: str, monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = fp8.recipe(recipe)
    sites = [("fwd", chosen.fwd.b, 1)]
    if chosen.dgrad.b != chosen.fwd.b:
        sites.append(("dgrad", chosen.dgrad.b, 0))
    device = torch.device("cuda")
    needs = [Need(s, select(g, recipe_or_spec=chosen, device=device).backend, c) for g, s, c in sites]
    values = (torch.randn(1336, 512, device="cuda") * torch.exp2(torch.randn(1336, 1, device="cuda") * 4)).bfloat16()
    largest: list[Tensor] = []

    def all_reduce(bits: Tensor, op: object, group: object) -> None:
        largest[:] = [bits.clone() if not largest else torch.maximum(largest[0], bits)]
        bits.copy_(largest[0])

    class Mesh:
        def get_group(self) -> None:
            return None

    monkeypatch.setattr(dist, "all_reduce", all_reduce)
    for _ in range(2):
        sent = []
        for rank, rows in enumerate(values.split(446)):
            shards = Shards(1336, 3, rank)
            sent.append(fp8_rows.pack_for_gather(fp8_rows.cast(rows, needs, shards, Mesh()), shards))
    full = tuple(torch.cat(parts) for parts in zip(*sent, strict=True))
    for q, need in zip(
        fp8_rows.unpack_gathered(full, needs, values.shape, Shards(1336, 3, 0), None), needs, strict=True
    ):
        want = need.cast(values)
        assert torch.equal(q.data.contiguous().view(torch.uint8), want.data.contiguous().view(torch.uint8))
        assert torch.equal(q.scale, want.scale)


@pytest.mark.parametrize("recipe", RECIPES)
def test_gathered_by_fsdp(recipe: str) -> None:
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
    try:
        mesh = dist.device_mesh.init_device_mesh("cuda", (1,))
        runs = []
        for param in (False, True):
            model = build(recipe, param)
            for block in model:
                fully_shard(block, mesh=mesh)
            fully_shard(model, mesh=mesh)
            runs.append(train(model))
        assert same(*runs)
    finally:
        dist.destroy_process_group()
