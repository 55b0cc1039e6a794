"""FSDP2 on two gloo ranks against one process: equal gradients, tied weights, frozen parameters.

One spawn runs a list of cases, because starting two ranks costs more than any of them.
"""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

from octavo import fp8
from octavo.parallel import CommCounter, World, WorldError, shard
from tests import ranks
from tests.parallel.differences import worst_difference


class Block(nn.Module):
    def __init__(self, width: int):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 3 * width)
        self.down = nn.Linear(3 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Decoder(nn.Module):
    """Embedding, blocks and tied head, with sizes that two ranks do not divide."""

    def __init__(self, width: int = 7, vocabulary: int = 11):
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(2))
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Blocks:
    def layers(self, model: nn.Module) -> list[tuple[str, nn.Module]]:
        return [(name, m) for name, m in model.named_modules() if isinstance(m, Block)]


def _twins(freeze: str = "") -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(0)
    pair = (Decoder(), Decoder())
    pair[1].load_state_dict(pair[0].state_dict())
    for model in pair:
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(not freeze or freeze not in name)
    return pair


def _loss(model: nn.Module, ids: torch.Tensor, count: int) -> torch.Tensor:
    return model(ids).float().logsumexp(-1).sum() / count


def _decoders(world: World) -> dict:
    answer: dict = {}
    for freeze, reshard in (("", True), ("", False), ("up.weight", True), ("blocks.0", True)):
        sharded, whole = _twins(freeze)
        shard(sharded, Blocks(), world, reshard_after_forward=reshard)
        for seed in range(2):  # two micro-batches accumulate
            ids = torch.randint(0, 11, (4, 5), generator=torch.Generator().manual_seed(seed))
            _loss(whole, ids, 40).backward()
            _loss(sharded, ids[world.rank :: world.size], 40).backward()
        answer[f"{freeze or 'all'} {reshard}"] = worst_difference(sharded, whole)
    answer["dtensors"] = all(isinstance(p, DTensor) for p in sharded.parameters())
    answer["tied"] = sharded.head.weight is sharded.embed.weight
    answer["gathers"] = _gathers(sharded, ids)  # the root stays gathered: the state must be whole nevertheless
    state = ranks.whole_state(sharded, world)
    answer["names"] = list(state)
    answer["equal"] = all(torch.equal(state[n], t) for n, t in whole.state_dict().items()) if world.is_main else True
    return answer


def _gathers(model: nn.Module, ids: torch.Tensor) -> list[int]:
    """Count how often weights were gathered at the start and end of each block's forward."""
    seen = []
    with torch.no_grad(), CommCounter() as counted:
        for block in model.blocks:
            block.norm.register_forward_pre_hook(lambda *_: seen.append(counted.calls["all_gather"]))
        model(ids)
    return [*seen, counted.calls["all_gather"]]


def _fp8(world: World) -> dict:
    """Losses over ten steps of AdamW: in high precision, in FP8 by one process, in FP8 by the ranks together."""
    torch.manual_seed(0)
    first = Decoder(48, 31)
    first.embed.weight.data *= 0.2  # else the tied head answers at once
    answer: dict = {}
    for name in ("high", "one", "ranks"):
        model = Decoder(48, 31)
        model.load_state_dict(first.state_dict())
        part = slice(world.rank, None, world.size) if name == "ranks" else slice(None)
        if name != "high":
            fp8.apply(model, fp8.plan(model, "blockwise", components={"foundation": ("blocks.**",)}))
        if name == "ranks":
            shard(model, Blocks(), world)
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
        answer[name] = []
        with fp8.count_gemms() as counts:
            for step in range(10):
                ids = torch.randint(0, 31, (4, 16), generator=torch.Generator().manual_seed(step))[part]
                aim = (3 * ids + 1).flatten() % 31
                loss = nn.functional.cross_entropy(model(ids).flatten(0, 1), aim, reduction="sum") / 64
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                answer[name].append(float(world.sum(loss) if name == "ranks" else loss.detach()))
        answer[f"{name} gemms"] = sorted({gemm for _, gemm, backend in counts if backend == "reference"})
    return answer


def _all(world: World) -> dict:
    return {"decoders": _decoders(world), "fp8": _fp8(world)}


@pytest.mark.parametrize(
    ("size", "replicate"),
    [(2, 1), pytest.param(2, 2, marks=pytest.mark.long), pytest.param(4, 2, marks=pytest.mark.long)],
    ids=["2 shards", "2 copies", "2 copies of 2 shards"],
)
def test_ranks_give_the_gradients_and_the_fp8_losses_of_one_process(size: int, replicate: int):
    results = ranks.run(_all, size, replicate=replicate)
    first, *others = (result["decoders"] for result in results)
    for answer in (first, *others):
        gaps = {name: gap for name, gap in answer.items() if isinstance(gap, float)}
        assert len(gaps) == 4 and max(gaps.values()) < 1e-5, gaps
        assert answer["dtensors"] and answer["tied"] and answer["equal"]
        root, ahead, end = answer["gathers"]
        assert root == ahead == end, "the second block was fetched as it began, and not while the first computed"
    assert first["names"] == list(Decoder().state_dict()) and all(other["names"] == [] for other in others)

    for got in (result["fp8"] for result in results):
        gaps = [abs(a - b) / a for a, b in zip(got["one"], got["ranks"], strict=True)]
        assert max(gaps) < 1e-3, gaps
        assert got["one"][-1] < 0.5 * got["one"][0], "nothing was learnt, so nothing was compared"
        assert max(abs(a - b) / a for a, b in zip(got["one"], got["high"], strict=True)) > max(gaps), "no FP8 ran"
        assert got["one gemms"] == got["ranks gemms"] == ["dgrad", "fwd", "wgrad"]


def test_one_process_is_unchanged():
    model = Decoder()
    kind = type(model)
    assert shard(model, Blocks(), World()) is model and type(model) is kind
    state = ranks.whole_state(model, World())
    assert state["head.weight"] is state["embed.weight"]
    with torch.no_grad():
        model.embed.weight.zero_()
    assert state["embed.weight"].abs().sum() > 0, "a snapshot must not follow the live weights"


def test_a_model_without_blocks_and_blocks_that_share_are_refused():
    world = World(0, 2, mesh=object())  # refused before the mesh is looked at
    with pytest.raises(WorldError, match="Linear cannot be sharded over 2 ranks: its description names no repeating"):
        shard(nn.Linear(2, 2), Blocks(), world)
    model = Decoder()
    model.blocks[1].up.weight = model.blocks[0].up.weight
    with pytest.raises(WorldError, match=r"blocks\.1\.up\.weight is shared between blocks\.0 and blocks\.1"):
        shard(model, Blocks(), world)
