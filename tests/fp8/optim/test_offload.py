"""States in host memory: the results are those of AdamW, copies happen in an order that never reads what is not there
yet, and what was fetched ahead is used only while it is true.

The host and the device are both the CPU here; a copy is put off until something waits for it, as late as streams allow,
so that whoever does not wait reads garbage.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Sequence

import pytest
import torch

from octavo.fp8.arithmetic.adamw import Hyper, Piece, find_edges, reference_step
from octavo.fp8.arithmetic.moments import GROUP, LAYOUT, STATES
from octavo.fp8.optim import offload as offload_file
from octavo.fp8.optim.offload import Offload, OffloadedAdamW, Pairs


class Late:
    """Transfers that happen as late as they may: a fetch when its slot must have arrived, a write-back when a fetch is
    told to come behind it, or at the end. ``log`` has what was asked for, in order."""

    def __init__(self) -> None:
        self.log: list[tuple[str, int]] = []
        self._fetches: dict[int, Pairs] = {}
        self._writes: dict[int, Pairs] = {}
        self.most = 0

    def host(self, size: int) -> torch.Tensor:
        return torch.empty(size, dtype=torch.uint8)

    def device(self, size: int) -> torch.Tensor:
        return torch.full((size,), 0xA5, dtype=torch.uint8)

    def fetch(self, slot: int, pairs: Pairs, behind: Sequence[int]) -> None:
        self.log.append(("fetch", slot))
        for other in behind:
            self._write(other)
        assert slot not in self._writes, "a slot was taken before its states had left it"
        self._fetches[slot] = pairs
        self.most = max(self.most, len(self._fetches))

    def wait_for_fetch(self, slot: int) -> None:
        self.log.append(("arrive", slot))
        for there, here in self._fetches.pop(slot):
            there.copy_(here)

    def write_back(self, slot: int, pairs: Pairs) -> None:
        self.log.append(("write", slot))
        assert slot not in self._writes
        self._writes[slot] = pairs

    def settle(self) -> None:
        self.log.append(("settle", -1))
        for slot in list(self._writes):
            self._write(slot)

    def _write(self, slot: int) -> None:
        for there, here in self._writes.pop(slot, []):
            here.copy_(there)
            there.view(torch.uint8).fill_(0xA5)  # whoever still reads this slot finds no states


def piece(count: int, start: int, index: int, states: str) -> Piece:
    make = torch.Generator().manual_seed(index)
    groups = -(-(start % GROUP + count) // GROUP)
    state = {
        k.name: torch.zeros((count,) if k.row is None else (groups, *k.row), dtype=k.dtype) for k in LAYOUT[states]
    }
    state["master_low"] = torch.zeros(count, dtype=torch.int16)
    weight = torch.randn(count, generator=make).bfloat16()
    return Piece(weight, torch.zeros(count), state, start, index, 1)


def copied(pieces: Sequence[Piece]) -> list[Piece]:
    return [
        p._replace(weight=p.weight.clone(), grad=p.grad.clone(), state={k: v.clone() for k, v in p.state.items()})
        for p in pieces
    ]


def assert_same(one: Sequence[Piece], other: Sequence[Piece]) -> None:
    for p, q in zip(one, other, strict=True):
        assert torch.equal(p.weight, q.weight), p.index
        for name, x in p.state.items():
            assert torch.equal(x.view(torch.uint8), q.state[name].view(torch.uint8)), (p.index, name)


def step(pieces: Sequence[Piece], number: int) -> list[Piece]:
    for p in pieces:
        p.grad.copy_(torch.randn(p.grad.shape, generator=torch.Generator().manual_seed(100 * number + p.index)))
    return [p._replace(step=number) for p in pieces]


SHAPES = [(128 * 90, 0), (1000, 256), (7, 5), (20000, 77), (0, 128), (50, 100)]


@pytest.mark.parametrize("states", STATES)
def test_offloaded_step_equals_ordinary_step(states: str) -> None:
    ordinary = [piece(*shape, index, states) for index, shape in enumerate(SHAPES)]
    away, late = copied(ordinary), Late()
    offload = Offload("cpu", batch=16 << 10, transfers=late)
    hyper, factor = Hyper(1e-2, states=states, master="bf16+16", weight_decay=0.1), torch.tensor(0.5)
    seen: list[int] = []

    def engine(pieces, *rest):
        seen.append(sum(x.numel() * x.element_size() for p in pieces for x in p.state.values()))
        assert all(p.weight.numel() == 0 or p.start % GROUP == 0 or p.start in (5, 77, 100) for p in pieces)
        reference_step(pieces, *rest)

    for number in range(1, 4):
        reference_step(step(ordinary, number), hyper, factor, None)
        offload.step(step(away, number), hyper, factor, None, engine)
    offload.settle()
    assert_same(ordinary, away)
    assert len(seen) > 12 and max(seen) <= 16 << 10, "batches were too large"
    held = sum(buffer.numel() for buffer in offload._buffers if buffer is not None)
    assert held == 3 * (16 << 10), "device memory is three batches"


def test_transfers_overlap_with_update() -> None:
    late = Late()
    offload = Offload("cpu", batch=16 << 10, transfers=late)
    pieces = step([piece(8 * 2816, 0, 0, "fp8")], 1)

    def engine(given, *rest):
        late.log.append(("update", 0))
        reference_step(given, *rest)

    offload.step(pieces, Hyper(states="fp8", master="bf16+16", lr=1e-2), None, None, engine)
    words = [word for word, _ in late.log if word != "settle"]
    assert words[:9] == ["fetch", "fetch", "arrive", "update", "write", "fetch", "arrive", "update", "write"]
    slots = {word: [slot for w, slot in late.log if w == word] for word in ("fetch", "arrive", "write")}
    count = len(slots["fetch"])
    assert count > 3 and slots["fetch"] == slots["arrive"] == slots["write"] == [i % 3 for i in range(count)]
    assert late.most == 2, "more than one batch ahead"


def test_single_piece_calls_prefetch_known_order() -> None:
    late = Late()
    offload = Offload("cpu", transfers=late)
    ordinary = [piece(300, 0, i, "fp8") for i in range(4)]
    away, hyper = copied(ordinary), Hyper(states="fp8", master="bf16+16", lr=1e-2)
    for number in range(1, 4):
        reference_step(step(ordinary, number), hyper, None, None)
        begin = len(late.log)
        for p in reversed(step(away, number)):
            offload.step([p], hyper, None, None, reference_step)
        if number > 2:  # the order is known, the first piece came in behind the last one of the step before
            words = [word for word, _ in late.log[begin:]]
            assert words[:2] == ["fetch", "arrive"] and words.count("fetch") == 4
    # a piece without a gradient: what was fetched ahead for it is dropped
    for p in reversed(step(away, 4)):
        if p.index != 2:
            offload.step([p], hyper, None, None, reference_step)
    reference_step([p for p in step(ordinary, 4) if p.index != 2], hyper, None, None)
    offload.settle()
    assert_same(ordinary, away)


@pytest.mark.parametrize("count", [1, 2, 3])
def test_buffers_are_reused_after_write_back(count: int) -> None:
    offload = Offload("cpu", transfers=Late())
    ordinary = [piece(300, 0, i, "fp8") for i in range(count)]
    away, hyper = copied(ordinary), Hyper(states="fp8", master="bf16+16", lr=1e-2)
    for number in range(1, 6):
        for p in step(away, number):
            offload.step([p], hyper, None, None, reference_step)
        reference_step(step(ordinary, number), hyper, None, None)
    offload.settle()
    assert_same(ordinary, away)


def test_offload_keeps_no_reference_to_pieces() -> None:
    """What is fetched ahead next time is known by its states: gradients are freed, as update in backward lives on."""
    offload = Offload("cpu", transfers=Late())
    pieces = [piece(300, 0, i, "fp8") for i in range(3)]
    held = [weakref.ref(p.grad) for p in pieces]
    for number in range(1, 3):
        for p in step(pieces, number):
            offload.step([p], Hyper(states="fp8", master="bf16+16", lr=1e-2), None, None, reference_step)
    assert all(ref() is not None for ref in held)
    del p
    pieces.clear()
    assert not any(ref() is not None for ref in held)


def test_deleted_optimizer_releases_states(monkeypatch: pytest.MonkeyPatch) -> None:
    served = Offload("cpu", transfers=Late())
    monkeypatch.setattr(offload_file, "offload_for", lambda device: served)
    optimizer = OffloadedAdamW([torch.nn.Parameter(torch.zeros(300))])
    served.step([piece(300, 0, 0, "fp8")], Hyper(states="fp8", master="bf16+16", lr=1e-2), None, None, reference_step)
    assert served._last is not None
    del optimizer
    gc.collect()
    assert served._last is None and not served._after


def test_host_writes_invalidate_prefetch() -> None:
    offload = Offload("cpu", transfers=Late())
    ordinary = [piece(300, 0, i, "fp8") for i in range(2)]
    away, hyper = copied(ordinary), Hyper(states="fp8", master="bf16+16", lr=1e-2)
    for number in range(1, 6):
        offload.step(step(away, number), hyper, None, None, reference_step)
        reference_step(step(ordinary, number), hyper, None, None)
        offload.settle()
        for pieces in (ordinary, away):
            pieces[0].state["exp_avg_scale"].mul_(0.5)  # as a state dict that is loaded in place
    assert_same(ordinary, away)


def test_shared_groups_are_exchanged_once_and_last() -> None:
    states = "fp8"
    ordinary = [piece(1000, 5, 0, states), piece(700, 256, 1, states), piece(20000, 64, 2, states)]
    away, hyper = copied(ordinary), Hyper(states=states, master="bf16+16", lr=1e-2)
    offload, asked = Offload("cpu", batch=16 << 10, transfers=Late()), []

    def agree(marks: torch.Tensor) -> torch.Tensor:
        asked.append(marks.shape[1])
        return torch.where((marks > 0) & (marks < 0x7E000000), marks + (1 << 20), marks)

    for number in range(1, 3):
        reference_step(step(ordinary, number), hyper, None, agree)
        offload.step(step(away, number), hyper, None, agree, reference_step)
    offload.settle()
    assert_same(ordinary, away)
    assert set(asked) == {len(find_edges(ordinary))}


def test_offload_without_gpu_is_rejected() -> None:
    with pytest.raises(ValueError, match=r"from cpu.*in host memory already.*Leave out optimizer\.offload"):
        Offload("cpu")
    with pytest.raises(ValueError, match=r"Leave out optimizer\.offload"):
        OffloadedAdamW(torch.nn.Linear(4, 4).parameters())
    with pytest.raises(ValueError, match="A batch of 100 bytes holds no group"):
        Offload("cpu", batch=100, transfers=Late())


def test_states_are_created_loaded_and_saved_on_host(monkeypatch: pytest.MonkeyPatch) -> None:
    late, made = Late(), []
    served = Offload("cpu", transfers=late)
    monkeypatch.setattr(offload_file, "offload_for", lambda device: served)
    monkeypatch.setattr(late, "host", lambda size: made.append(size) or torch.empty(size, dtype=torch.uint8))
    model = torch.nn.Linear(40, 10)
    model(torch.ones(40)).sum().backward()
    optimizer = OffloadedAdamW(model.parameters(), master="fp32")
    optimizer.step()
    assert sum(made) == 2 * 410 + 4 * 2 * (4 + 1), "two codes an element, two words a group, all from host memory"
    saved = optimizer.state_dict()
    assert late.log[-1] == ("settle", -1), "a state dict waits for what is under way"
    again = OffloadedAdamW(model.parameters(), master="fp32")
    again.load_state_dict(saved)
    assert len(made) == 16
    for one, other in zip(optimizer.state.values(), again.state.values(), strict=True):
        assert all(torch.equal(one[name], other[name]) for name in one)
