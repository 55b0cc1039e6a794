"""FSDP2: the gathered weight keeps version 0 while its values change; codes must follow and must not outlive
resharding."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils.checkpoint import checkpoint
from transformers import Qwen3MoeConfig
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

from octavo import fp8
from octavo.fp8.delayed import reduce_scaling_state
from octavo.fp8.weights import cache
from octavo.fp8.weights.shards import plain
from tests import ranks

STEPS, MICRO = 3, 2


class Block(nn.Module):
    def __init__(self, recompute=False):
        super().__init__()
        self.up, self.down, self.recompute = nn.Linear(32, 64), nn.Linear(64, 32), recompute

    def inner(self, x):
        return self.down(torch.relu(self.up(x)))

    def forward(self, x):
        return x + (checkpoint(self.inner, x, use_reentrant=False) if self.recompute else self.inner(x))


def build(recipe, recompute=False, **policy):
    torch.manual_seed(0)
    model = nn.Sequential(*[Block(recompute) for _ in range(2)])
    return fp8.apply(model, fp8.plan(model, fp8.Policy(recipe, **policy)))


def train(model, optimizer, rank, size, forget=False):
    """Losses of a few steps; every rank takes its share of the same global batch."""
    torch.manual_seed(1)
    losses, held = [], []
    for _ in range(STEPS):
        total = 0.0
        for _ in range(MICRO):
            x = torch.randn(4, 32)
            if forget:
                fp8.invalidate(model)
            loss = model(x[rank::size]).square().mean()
            held.append(max(len(m._site.codes) for m in model.modules() if isinstance(m, fp8.Linear)))
            (loss / MICRO).backward()
            total += loss.item()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total)
    left = max(len(m._site.codes) for m in model.modules() if isinstance(m, fp8.Linear))
    return losses, max(held), left


def reference(recipe, fused, size):
    """One process with no cache at all, the same data parallel average by hand."""
    model = build(recipe)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05, fused=fused, foreach=not fused)
    torch.manual_seed(1)
    losses = [0.0] * STEPS
    for step in range(STEPS):
        for _ in range(MICRO):
            x = torch.randn(4, 32)
            for rank in range(size):
                fp8.invalidate(model)
                loss = model(x[rank::size]).square().mean()
                (loss / MICRO / size).backward()
                losses[step] += loss.item() / size
        optimizer.step()
        optimizer.zero_grad()
    return losses


def worker(world, recipe, cases):
    want = {fused: reference(recipe, fused, world.size) for fused in (True, False)}
    for fused, reshard, recompute in cases:
        check(recipe, fused, reshard, recompute, world.mesh, world.rank, world.size, want[fused])
    delayed(world.rank, world.size)
    ddp(world.rank, world.size)


def ddp(rank, size):
    """DistributedDataParallel sees an ordinary module; fused AdamW's writes are seen under it too."""
    want = reference("blockwise", True, size)
    wrapped = nn.parallel.DistributedDataParallel(build("blockwise"))
    losses, _, _ = train(wrapped, torch.optim.AdamW(wrapped.parameters(), lr=0.05, fused=True), rank, size)
    mean = torch.tensor(losses)
    dist.all_reduce(mean)
    assert (mean / size).tolist() == pytest.approx(want, rel=1e-3)


def check(recipe, fused, reshard, recompute, mesh, rank, size, want):
    model = build(recipe, recompute)
    for block in model:
        fully_shard(block, mesh=mesh, reshard_after_forward=reshard)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05, fused=fused, foreach=not fused)
    losses, held, left = train(model, optimizer, rank, size)
    mean = torch.tensor(losses)
    dist.all_reduce(mean)
    mean = (mean / size).tolist()
    # Two ranks sum gradients in another order: an ulp may flip a code.
    assert mean == pytest.approx(want, rel=1e-6 if size == 1 else 1e-3), (fused, reshard, recompute)
    assert left == 0, "codes outlived resharding"
    assert held == (0 if reshard else 1), (reshard, held)
    stock = set(build("blockwise").state_dict())
    assert set(model.state_dict()) == stock


def delayed(rank, size):
    """Ranks see different amaxes; afterwards all hold the largest."""
    m = nn.Sequential(nn.Linear(4, 4))
    fp8.apply(m, fp8.plan(m, "delayed"))
    m(torch.full((2, 4), 1.0 + rank))
    m(torch.full((2, 4), 5.0 - rank))
    reduce_scaling_state(m)
    assert fp8.scaling_state(m)["0.fp8_amax_x"][0, :3].tolist() == [5, size, 0]


# (fused AdamW, reshard after forward, recompute)
ALL = [(f, r, c) for f in (True, False) for r in (True, False) for c in (False, True)]
SOME = [(True, True, True), (True, False, False), (False, True, False)]


@pytest.mark.parametrize(("recipe", "case"), [*(("blockwise", c) for c in ALL), *(("rowwise", c) for c in SOME)])
def test_one_rank_never_uses_stale_codes(mesh_of_one, recipe, case):
    check(recipe, *case, mesh_of_one, 0, 1, reference(recipe, case[0], 1))


@pytest.mark.parametrize(
    "recipe,cases",
    [
        pytest.param("blockwise", SOME, id="some cases"),
        pytest.param("blockwise", ALL, id="every case", marks=pytest.mark.long),
        pytest.param("rowwise", ALL, id="two layouts", marks=pytest.mark.long),
    ],
)
def test_two_ranks_never_use_stale_codes(recipe, cases):
    ranks.run(worker, 2, recipe, cases)


def test_weights_gathered_in_bf16_are_cast_from_bf16(mesh_of_one):
    model = build("blockwise")
    full = {k: v.clone() for k, v in model.state_dict().items()}
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    for block in model:
        fully_shard(block, mesh=mesh_of_one, mp_policy=policy)
    fully_shard(model, mesh=mesh_of_one, mp_policy=policy)
    x = torch.randn(4, 32, generator=torch.Generator().manual_seed(3))
    twin = build("blockwise").bfloat16()
    twin.load_state_dict(full)
    assert torch.equal(model(x), twin(x.bfloat16()))


def test_write_to_master_of_gathered_codes_is_detected(mesh_of_one):
    """As a loader writes through a state dict; where a border cuts a block, fp8.invalidate must tell all ranks."""
    want, model, x = build("blockwise"), build("blockwise", param=True), torch.randn(4, 32)
    for block in model:
        fully_shard(block, mesh=mesh_of_one)
    fully_shard(model, mesh=mesh_of_one)
    before = model(x)
    with torch.no_grad():
        for m in (want, model):
            plain(m[0].up.weight).mul_(1.5)
    assert not torch.equal(model(x), before) and torch.equal(model(x), want(x))


@pytest.mark.parametrize("param", [False, True], ids=["values", "codes"])
def test_captured_step_with_gathered_weights(mesh_of_one, monkeypatch, param):
    """Codes cast in a CUDA graph are saved for the backward. Those that were gathered must not be: FSDP2 frees them
    behind the forward and gathers them anew, into the same memory."""
    want, model = build("blockwise"), build("blockwise", param=param)
    for block in model:
        fully_shard(block, mesh=mesh_of_one)
    fully_shard(model, mesh=mesh_of_one)
    monkeypatch.setattr(cache, "_is_capturing", lambda tensor: True)
    x = torch.randn(4, 32)
    for m in (want, model):
        m(x).sum().backward()
    for p, q in zip(model.parameters(), want.parameters(), strict=True):
        assert torch.equal(p.grad.full_tensor(), q.grad)


def test_ungathered_weight_is_reported(mesh_of_one):
    model = fully_shard(build("blockwise"), mesh=mesh_of_one)
    with pytest.raises(RuntimeError, match="is a DTensor when its GEMM runs.*fully_shard"):
        model[0].up(torch.randn(2, 32))


def test_individually_sharded_layer_works(mesh_of_one):
    model = build("blockwise")
    x = torch.randn(3, 32)
    want = model(x)
    for block in model:
        fully_shard(block.up, mesh=mesh_of_one)
        fully_shard(block.down, mesh=mesh_of_one)
    assert isinstance(model[0].up, fp8.Linear) and "FSDP" in type(model[0].up).__name__
    assert torch.equal(model(x), want)


def test_layer_sharded_before_plan_is_skipped_with_note(mesh_of_one):
    plain = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    fully_shard(plain[0], mesh=mesh_of_one)
    plan = fp8.plan(plain, "blockwise")
    assert [r.fp8 for r in plan.rows] == [False, True]
    assert "FSDPLinear is a subclass of nn.Linear and is left as it is" in plan.table()


def test_plan_can_be_applied_after_sharding(mesh_of_one):
    want = build("blockwise")(torch.ones(2, 32))
    torch.manual_seed(0)
    model = nn.Sequential(*[Block() for _ in range(2)])
    for block in model:
        fully_shard(block, mesh=mesh_of_one)
    fully_shard(model, mesh=mesh_of_one)
    fp8.apply(model, fp8.plan(model, "blockwise"))
    assert torch.equal(model(torch.ones(2, 32)), want)
    assert all(len(m._site.codes) == 0 for m in model.modules() if isinstance(m, fp8.Linear))


class Moe(nn.Module):
    def __init__(self, experts):
        super().__init__()
        self.experts = experts

    def forward(self, x):
        index = torch.stack([torch.arange(len(x)) % 4, (torch.arange(len(x)) + 1) % 4], 1)
        return self.experts(x, index, torch.full((len(x), 2), 0.5))


def test_experts_use_gathered_shards(mesh_of_one):
    config = Qwen3MoeConfig(hidden_size=32, moe_intermediate_size=16, num_experts=4, num_experts_per_tok=2)
    config._experts_implementation = "eager"
    results = []
    for shard in (False, True):
        torch.manual_seed(0)
        model = Moe(Qwen3MoeExperts(config))
        for p in model.parameters():
            nn.init.normal_(p, std=0.2)
        fp8.apply(model, fp8.plan(model))
        if shard:
            fully_shard(model, mesh=mesh_of_one)
            with pytest.raises(fp8.PlanError, match="already applied to this model"):
                fp8.apply(model, fp8.plan(model))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.05, fused=True)
        losses = []
        for step in range(3):
            loss = model(torch.randn(6, 32, generator=torch.Generator().manual_seed(step))).square().sum()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        if shard:
            assert all(len(c) == 0 for c in model.experts._weight_caches().values())
        results.append(losses)
    assert results[0] == results[1]


def test_experts_sharded_before_plan_stay_in_high_precision(mesh_of_one):
    config = Qwen3MoeConfig(hidden_size=32, moe_intermediate_size=16, num_experts=4, num_experts_per_tok=2)
    model = nn.ModuleDict({"moe": fully_shard(Moe(Qwen3MoeExperts(config)), mesh=mesh_of_one), "a": nn.Linear(8, 8)})
    assert "experts already sharded (plan and apply before fully_shard)" in fp8.plan(model).table()
