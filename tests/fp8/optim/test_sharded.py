"""However the rows of a parameter are divided, its codes, figures and weights are those of one process, bit for bit."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from octavo.fp8.optim import convert, sharded
from octavo.fp8.optim.adamw import AdamW
from octavo.fp8.weights.shards import row_borders, span
from octavo.parallel import World
from tests import ranks

# Rows of 40 (a group on three ranks), a norm's 64, a bias of 1176 + 5, more ranks than rows, an aligned one, one group.
SHAPES = [(7, 40), (64,), (5, 331), (2, 200), (6, 256), (1, 50), (3, 1176)]
KINDS = [("fp8", "fp32"), ("fp8", "bf16+sr"), ("fp8", "bf16+16"), ("coat", "bf16+sr"), ("bf16", "bf16+16")]
STEPS = 3


def _draw(index: int, step: int) -> torch.Tensor:
    """Magnitudes over many octaves, with zeros and a row of nothing but zeros, so that extrema matter."""
    gen = torch.Generator().manual_seed(100 * step + index)
    shape = SHAPES[index]
    value = torch.randn(shape, generator=gen) * torch.exp2(torch.randint(-30, 3, shape, generator=gen).float())
    value[torch.rand(shape, generator=gen) < 0.1] = 0
    if index == 0:
        value[3:6] = 0
    return value


def _train(kind: tuple[str, str], place) -> list[list[torch.Tensor]]:
    """Weights and states after some steps; `place` makes a tensor one that lies over ranks."""
    states, master = kind
    dtype = torch.float32 if master == "fp32" else torch.bfloat16
    params = [nn.Parameter(place(_draw(i, 0).to(dtype))) for i in range(len(SHAPES))]
    groups = [{"params": params[:3], "weight_decay": 0.1}, {"params": params[4:]}]
    groups.append({"params": params[3:4]})  # alone: a third rank holds nothing of this call, and takes part
    optimizer = AdamW(groups, lr=1e-2, states=states, master=master)
    for step in range(1, STEPS + 1):
        for i, p in enumerate(params):
            p.grad = None if i == 4 and step == 2 else place(_draw(i, step).to(dtype))
        optimizer.step(factor=0.5)
    return [[p, *(optimizer.state[p][key] for key in sorted(optimizer.state[p]))] for p in params]


def _differs(whole: torch.Tensor, mine: torch.Tensor, parameter: torch.Tensor) -> bool:
    """Whether this rank's part is not, bit for bit, its part of the whole."""
    if isinstance(mine, DTensor):
        part = span(mine)
        whole, mine = whole.detach().flatten()[part.start : part.stop], mine.detach().to_local().flatten()
    elif mine.ndim and mine.shape != whole.shape:
        part = span(parameter)
        whole = whole[part.start // 128 : -(-part.stop // 128)] if part.stop > part.start else whole[:0]
    if whole.dtype.is_floating_point:
        raw = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[whole.element_size()]
        whole, mine = whole.contiguous().view(raw), mine.contiguous().view(raw)
    return whole.dtype != mine.dtype or not torch.equal(whole, mine)


def _converted(kind: tuple[str, str], place) -> list[list[torch.Tensor]]:
    """Weights and states from a state dict of torch's AdamW, whole tensors, and lower halves; and what comes back."""
    states, master = kind
    plain = [nn.Parameter(_draw(i, 0)) for i in range(len(SHAPES))]
    torchs = torch.optim.AdamW(plain, lr=1e-3)
    for i, p in enumerate(plain):
        p.grad = _draw(i, 1)
    torchs.step()
    model = nn.ParameterList(place(p.detach().to(torch.float32 if master == "fp32" else torch.bfloat16)) for p in plain)
    optimizer = AdamW(model.parameters(), states=states, master=master)
    if master == "bf16+16":
        lows = {str(i): torch.arange(p.numel(), dtype=torch.int16).view(p.shape) for i, p in enumerate(plain)}
        convert.set_low(optimizer, model, lows)
    optimizer.load_state_dict(torchs.state_dict())
    own = AdamW(model.parameters(), states=states, master=master)
    own.load_state_dict(optimizer.state_dict())
    back = convert.to_torch(own)["state"]
    return [
        [p, *(own.state[p][key] for key in sorted(own.state[p])), convert.fp32_weight(own, p), *back[i].values()]
        for i, p in enumerate(model.parameters())
    ]


def _work(world: World) -> dict:
    mesh = init_device_mesh("cpu", (world.size,))
    answer: dict = {"calls": {}}
    real = torch.distributed.all_reduce
    for kind in KINDS:
        calls: list[int] = []

        def counted(tensor, *args, calls=calls, **kwargs):
            calls.append(tensor.numel())
            return real(tensor, *args, **kwargs)

        torch.distributed.all_reduce = counted
        try:
            mine = _train(kind, lambda t: distribute_tensor(t, mesh, [Shard(0)], src_data_rank=None))
        finally:
            torch.distributed.all_reduce = real
        whole = _train(kind, lambda t: t.clone())
        mine = [*mine, *_converted(kind, lambda t: distribute_tensor(t, mesh, [Shard(0)], src_data_rank=None))]
        whole = [*whole, *_converted(kind, lambda t: t.clone())]
        answer[" ".join(kind)] = [
            (i, n)
            for i, (left, right) in enumerate(zip(whole, mine, strict=True))
            for n, (a, b) in enumerate(zip(left, right, strict=True))
            if _differs(a, b, right[0])
        ]
        answer["calls"][" ".join(kind)] = calls
    return answer


@pytest.mark.parametrize("size", [2, pytest.param(3, marks=pytest.mark.long), pytest.param(4, marks=pytest.mark.long)])
def test_ranks_match_one_process_bit_for_bit(size):
    answers = ranks.run(_work, size)
    for answer in answers:
        for kind in KINDS:
            assert answer[" ".join(kind)] == [], kind
        # two small exchanges a step and group of parameters, whatever this rank holds; none where nothing is encoded
        assert len(answer["calls"]["fp8 fp32"]) == 2 * 3 * STEPS
        assert len(answer["calls"]["coat bf16+sr"]) == 3 * STEPS
        assert answer["calls"]["bf16 bf16+16"] == []
        assert max(answer["calls"]["fp8 fp32"]) <= 2 * 4 * (size - 1)
        assert answer["calls"] == answers[0]["calls"]


def test_cut_groups_follow_from_shapes():
    def cut(rows: int, row: int, *ranks: int) -> tuple[int, ...]:
        return sharded._groups_cut_at(row_borders(rows, ranks), row)

    assert cut(4, 128, 4) == ()
    assert cut(7, 40, 2) == (1,)  # four rows and three: element 160
    assert cut(7, 40, 3) == (0, 1)  # 120 and 240
    assert cut(64, 1, 4) == (0,)  # on all four
    assert cut(3, 1176, 2) == (18,)
    assert cut(2, 200, 4) == (1,)  # two ranks hold nothing
    assert cut(0, 128, 2) == ()
    assert cut(8, 40, 2, 2) == (0, 1)  # 80, 160 and 240
    p = nn.Parameter(torch.ones(7, 40))
    assert sharded.cut_groups(p) == () and not sharded.is_cut(p, "fp8")


def test_one_process_needs_no_exchange(monkeypatch):
    monkeypatch.setattr(torch.distributed, "all_reduce", lambda *a, **k: pytest.fail("one process communicated"))
    p = nn.Parameter(torch.randn(7, 40))
    optimizer = AdamW([p])
    p.grad = torch.randn(7, 40)
    seen = []
    real = optimizer.run
    monkeypatch.setattr(optimizer, "run", lambda *args: (seen.append(args), real(*args)))
    optimizer.step()
    assert len(seen) == 1 and seen[0][3] is None  # no agreement is passed
