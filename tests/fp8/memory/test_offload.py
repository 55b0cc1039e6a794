"""Offload, with a device that is made up: bytes that were fetched are wrong until the device waited for them."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from octavo import fp8
from octavo.fp8.memory.accounting import count_saved
from octavo.fp8.memory.offload import offload, synchronize_per_layer
from octavo.fp8.memory.recompute import activation_checkpointing
from tests import ranks
from tests.fp8.blocks.test_fused_models import make_model
from tests.fp8.memory.test_recompute import Block, same, stack, step


class Slow:
    """Copies that happen when somebody waits for them, in the order in which they began."""

    def __init__(self):
        self.log: list[str] = []
        self.queue: list[tuple[int, Tensor, Tensor]] = []
        self.numbers = 0
        self.moved = 0
        self.waiting: dict[int, int] = {}

    def _later(self, to: Tensor, source: Tensor) -> int:
        self.numbers += 1
        self.queue.append((self.numbers, to, source))
        return self.numbers

    def to_host(self, here: Tensor) -> tuple[Tensor, int]:
        assert here.dtype == torch.uint8 and here.dim() == 1
        self.log.append("out")
        self.moved += here.numel()
        there = torch.full_like(here, 255)
        return there, self._later(there, here)

    def to_device(self, there: Tensor) -> tuple[Tensor, int]:
        self.log.append("back")
        here = torch.full_like(there, 255)  # NaN in every float
        return here, self._later(here, there)

    def wait(self, ready: int) -> None:
        while self.queue and self.queue[0][0] <= ready:
            _, to, source = self.queue.pop(0)
            to.copy_(source)


def offloaded(model: nn.Module, least: int = 1) -> Slow:
    copies = Slow()
    offload(model.named_children(), least=least, copies=copies)
    return copies


@pytest.mark.parametrize("how", ["none", "selective", "full"])
@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_gradients_match_without_offload(how, dropout):
    model = stack(3, dropout, how)
    copies = offloaded(model)
    for _ in range(2):
        model.zero_grad()
        assert same(step(model), step(stack(3, dropout)))
    assert copies.log.count("out") > 0 and copies.log.count("back") > 0


def test_fewer_bytes_are_copied_if_blocks_save_less():
    moved = {}
    for how in ("none", "selective", "full"):
        model = stack(3, how=how)
        copies = offloaded(model)
        step(model)
        moved[how] = copies.moved
    each = 2 * 8 * 32 * 4
    assert moved["full"] == 3 * each
    assert moved["full"] < moved["selective"] < 0.75 * moved["none"]


def test_storage_is_copied_once():
    class Views(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(8, 8))

        def forward(self, x, cos):
            y = x * cos  # saves cos, not x: x needs no... its gradient needs cos
            return (y[:2] * y[2:]) @ self.weight.t()

    block, copies = Views(), Slow()
    offload([("0", block)], least=1, copies=copies)
    x, cos = torch.randn(4, 8, requires_grad=True), torch.randn(4, 8)
    block(x, cos).sum().backward()
    # y, in one piece for its two halves; the product, which the weight's gradient needs. Not cos, not the weight.
    assert copies.moved == 4 * 8 * 4 + 2 * 8 * 4
    assert torch.allclose(x.grad[0], (x * cos)[2] * 8 * cos[0])


def test_one_block_is_prefetched():
    model, events = stack(4), []
    copies = Slow()
    for name in ("to_host", "to_device"):
        plain = getattr(copies, name)
        setattr(copies, name, lambda x, plain=plain, name=name: (events.append(name), plain(x))[1])
    offload(model.named_children(), least=1, copies=copies)
    x = torch.randn(2, 8, 32, requires_grad=True)
    y = model(x)
    for number, block in enumerate(model):
        block.mlp.down.weight.register_hook(lambda g, number=number: events.append(number))
    y.sum().backward()
    backward = [e for e in events if e != "to_host"]
    each = events.count("to_host") // 4
    order = [e for i, e in enumerate(backward) if i == 0 or backward[i - 1] != e]
    # The last block is on the device still; while it goes backward, the one before it comes.
    assert order == ["to_device", 3, "to_device", 2, "to_device", 1, 0]
    assert backward.count("to_device") == 3 * each


def test_at_most_two_blocks_stay_on_device():
    model = stack(6)
    copies = offloaded(model)
    hosts: set[int] = set()
    plain = copies.to_host

    def out(here):
        there, ready = plain(here)
        hosts.add(there.untyped_storage()._cdata)
        return there, ready

    copies.to_host = out
    x = torch.randn(2, 8, 32, requires_grad=True)
    with count_saved(model, model.named_children()) as k:
        y = model(x)
    on_device = k.report().total - copies.moved  # the host's copies are alive as well, and made in the forward
    with count_saved(stack(1)) as one:
        z = stack(1)(x)
    assert on_device <= 2 * one.report().total + 2 * y.numel() * 4 and z is not None


def test_retained_graph_runs_backward_again():
    model = stack(3)
    offloaded(model)
    x = torch.randn(2, 8, 32, requires_grad=True)
    loss = model(x).square().sum()
    loss.backward(retain_graph=True)
    once = [p.grad.clone() for p in model.parameters()]
    loss.backward()
    assert all(torch.equal(p.grad, 2 * g) for p, g in zip(model.parameters(), once, strict=True))


def test_two_forwards_before_their_backwards():
    model, plain = stack(3), stack(3)
    offloaded(model)
    for m in (model, plain):
        torch.manual_seed(1)
        a, b = (m(torch.randn(2, 8, 32)).square().sum() for _ in range(2))
        a.backward()
        b.backward()
    assert all(torch.equal(p.grad, q.grad) for p, q in zip(model.parameters(), plain.parameters(), strict=True))


@pytest.mark.parametrize("how", ["none", "full"])
def test_fp8_layers_offload_codes(how):
    moved, steps = [], []
    for offloads in (False, True):
        model = stack(2)
        fp8.apply(model, fp8.plan(model, "blockwise"))
        activation_checkpointing(model.named_children(), how)
        copies = offloaded(model) if offloads else None
        with fp8.count_gemms() as counts:
            steps.append(step(model))
        moved.append((dict(counts), copies.moved if copies else 0))
    assert same(*steps) and moved[0][0] == moved[1][0]
    plain = stack(2, how=how)
    copies = offloaded(plain)
    step(plain)
    assert moved[1][1] == copies.moved if how == "full" else moved[1][1] < copies.moved


@pytest.mark.parametrize("how", ["none", "selective", "full"])
def test_model_that_saves_fp8_runs_backward_twice(how):
    grads = []
    for offloads in (False, True):
        model, described, inputs = make_model("qwen3")
        fp8.apply(model, fp8.plan(model, fp8.Policy(fuse="on", activations="fp8"), described.components))
        activation_checkpointing(described.layers(model), how)
        if offloads:
            offload(described.layers(model), least=1, copies=Slow())
        loss = model.train()(**inputs, use_cache=False).loss
        loss.backward(retain_graph=True)
        grads.append([p.grad.clone() for p in model.parameters()])
        loss.backward()
        assert all(torch.equal(p.grad, 2 * g) for p, g in zip(model.parameters(), grads[-1], strict=True))
    assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))


def sharded(world) -> list:
    from torch.distributed.fsdp import fully_shard

    def run(split: bool, how: str) -> list:
        model = stack(3, how=how)
        copies = offloaded(model)
        if split:
            for block in model:
                fully_shard(block)
            fully_shard(model)
        return [step(model)["x"].flatten().tolist(), copies.moved]

    return [run(split, how) for how in ("none", "full") for split in (False, True)]


@pytest.mark.long
def test_gathered_weights_stay_on_device():
    for plain, split, plain_full, split_full in ranks.run(sharded, 2):
        assert plain == split and plain_full == split_full and plain[1] > plain_full[1] > 0


def test_small_tensors_and_weights_stay_on_device():
    model = stack(1)
    copies = offloaded(model, least=10**9)
    assert same(step(model), step(stack(1))) and not copies.log

    layer, copies = nn.Sequential(nn.Linear(32, 32)), Slow()
    offload([("0", layer)], least=1, copies=copies)
    with torch.autocast("cpu", torch.bfloat16):
        y = layer(torch.randn(4, 32, requires_grad=True))
    y.sum().backward()
    assert copies.moved == 4 * 32 * 2  # x as autocast made it


def test_no_offload_without_gradient():
    model = stack(2)
    copies = Slow()
    hooks = offload(model.named_children(), least=1, copies=copies)
    with torch.no_grad():
        model(torch.randn(2, 8, 32))
    assert not copies.log
    hooks.remove()
    step(model)
    assert not copies.log


def test_write_to_saved_tensor_is_reported():
    class Writes(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(8))

        def forward(self, x):
            y = (x * self.weight).exp()
            y.mul_(2)
            return y

    block = Writes()
    offload([("0", block)], least=1, copies=Slow())
    with pytest.raises(RuntimeError, match="written to"):
        block(torch.randn(4, 8, requires_grad=True))


def test_exception_in_block_removes_hooks():
    class Fails(Block):
        def forward(self, x):
            raise ZeroDivisionError

    model = nn.Sequential(Block(), Fails())
    copies = offloaded(model)
    with pytest.raises(ZeroDivisionError):
        model(torch.randn(2, 8, 32))
    before = copies.moved
    torch.randn(4, 4, requires_grad=True).exp().sum().backward()
    assert copies.moved == before


def test_cpu_is_rejected():
    with pytest.raises(
        ValueError, match="offload_activations: true.*found the blocks on cpu.*offload_activations: false"
    ):
        offload(stack(1).named_children())
    with pytest.raises(ValueError, match="synchronize_per_layer: true.*on cpu"):
        synchronize_per_layer(stack(1).named_children())
    with pytest.raises(ValueError, match="no blocks at all"):
        offload([])
    with pytest.raises(ValueError, match="no blocks at all"):
        synchronize_per_layer([])


def test_host_waits_after_each_block():
    model, events = stack(3), []
    hooks = synchronize_per_layer(model.named_children(), wait=lambda: events.append("wait"))
    for number, block in enumerate(model):
        block.mlp.down.weight.register_hook(lambda g, number=number: events.append(number))
    x = torch.randn(2, 8, 32, requires_grad=True)
    y = model(x)
    assert events == ["wait"] * 3
    y.sum().backward()
    assert events[3:] == [2, "wait", 1, "wait", 0, "wait"]
    events.clear()
    with torch.no_grad():
        model(x)
    assert events == ["wait"] * 3
    hooks.remove()
    step(model)
    assert events.count("wait") == 3
