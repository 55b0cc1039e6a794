"""The compiled AdamW kernel on a GPU: equal bits, states on the host, updates in backward, synchronization."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("triton")

from octavo import fp8
from octavo.fp8.arithmetic.adamw import Hyper, Piece, reference_step
from octavo.fp8.arithmetic.moments import GROUP, LAYOUT
from octavo.fp8.kernels.triton_kernels import adamw
from octavo.fp8.kernels.triton_kernels.launch import launches
from octavo.fp8.optim import engine
from octavo.fp8.optim.in_backward import PartialUpdate, UpdateInBackward, clip_factor, gradient_norm
from octavo.fp8.optim.offload import Offload, OffloadedAdamW

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")]

MASTERS = ("fp32", "master", "bf16+16", "bf16+sr")
SHAPES = [(1 << 22, 0), (3420 * 1280, 0), (1000, 256), (50, 100), (7, 5), (4226, 3), (130, (1 << 33) + 40)]


def piece(count: int, start: int, index: int, states: str, master: str) -> Piece:
    make = torch.Generator(device="cuda").manual_seed(index)
    weight = torch.randn(count, generator=make, device="cuda")
    groups = -(-(start % GROUP + count) // GROUP)
    state = {
        k.name: torch.zeros((count,) if k.row is None else (groups, *k.row), dtype=k.dtype, device="cuda")
        for k in LAYOUT[states]
    }
    if master == "bf16+16":
        state["master_low"] = torch.zeros(count, dtype=torch.int16, device="cuda")
    elif master == "master":
        state["master"] = weight.clone()
    weight = weight if master == "fp32" else weight.bfloat16()
    grad = torch.zeros(count, device="cuda", dtype=torch.bfloat16 if index % 2 else torch.float32)
    return Piece(weight, grad, state, start, index, 1)


def with_gradients(pieces: list[Piece], step: int) -> list[Piece]:
    make = torch.Generator(device="cuda").manual_seed(step)
    for p in pieces:
        g = torch.randn(p.grad.shape, generator=make, device="cuda")
        p.grad.copy_(g * torch.exp(2 * torch.randn(p.grad.shape, generator=make, device="cuda")) * 1e-3)
        p.grad[::5] = 0
    return [p._replace(step=step) for p in pieces]


def assert_same(one: list[Piece], other: list[Piece]) -> None:
    for p, q in zip(one, other, strict=True):
        for name, x, y in (("weight", p.weight, q.weight), *((k, v, q.state[k]) for k, v in p.state.items())):
            wrong = int((x.view(torch.uint8) != y.view(torch.uint8)).sum())
            assert not wrong, f"piece {p.index}, {name}: {wrong} bytes differ"


def settings(states: str, master: str) -> Hyper:
    return Hyper(1e-3, weight_decay=0.1, states=states, master="fp32" if master == "master" else master, seed=-5)


@pytest.mark.parametrize("master", MASTERS)
@pytest.mark.parametrize("states", ["fp8", "coat", "bf16", "fp32"])
def test_kernel_equals_reference_bitwise(states: str, master: str) -> None:
    one, other = ([piece(*shape, i, states, master) for i, shape in enumerate(SHAPES)] for _ in range(2))
    factor = torch.tensor(0.7, device="cuda")
    for step in range(1, 5):
        reference_step(with_gradients(one, step), settings(states, master), factor, None)
        with launches() as recorded:
            adamw.step(with_gradients(other, step), settings(states, master), factor)
        assert recorded == {"adamw_step": 4}
    assert_same(one, other)


@pytest.mark.parametrize("states", ["fp8", "fp32"])
def test_cpu_gives_same_bits(states: str) -> None:
    """A checkpoint of one machine can be resumed on another."""
    target = [piece(*SHAPES[i], i, states, "bf16+16") for i in (0, 5)]
    here = [
        p._replace(weight=p.weight.cpu(), grad=p.grad.cpu(), state={k: v.cpu() for k, v in p.state.items()})
        for p in target
    ]
    for step in range(1, 4):
        target = with_gradients(target, step)
        for p, q in zip(target, here, strict=True):
            q.grad.copy_(p.grad)
        here = [q._replace(step=step) for q in here]
        adamw.step(target, settings(states, "bf16+16"))
        reference_step(here, settings(states, "bf16+16"), None, None)
    for p, q in zip(target, here, strict=True):
        for name, x in (("weight", p.weight), *p.state.items()):
            other = q.weight if name == "weight" else q.state[name]
            wrong = (x.cpu().view(torch.uint8) != other.view(torch.uint8)).float().mean()
            assert wrong < 1e-2, f"{name}: {float(wrong):.2%} of the bytes"


def test_device_learning_rate_does_not_synchronize() -> None:
    one, other = ([piece(*SHAPES[0], 0, "fp8", "bf16+sr")] for _ in range(2))
    lr, factor = torch.tensor(1e-3, device="cuda"), torch.tensor(0.5, device="cuda")
    inputs, also = with_gradients(one, 1), with_gradients(other, 1)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        adamw.step(inputs, Hyper(lr, weight_decay=0.1, states="fp8", master="bf16+sr"), factor)
        adamw.step(also, Hyper(1e-3, weight_decay=0.1, states="fp8", master="bf16+sr"), factor)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    for name, x in one[0].state.items():
        assert torch.equal(x, other[0].state[name]), name


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(1000, 512)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.RMSNorm(512), nn.Linear(512, 1536), nn.SiLU(), nn.Linear(1536, 512)) for _ in range(4)
        )
        nn.init.normal_(self.embed.weight, std=0.1)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = x + layer(x)
        return nn.functional.cross_entropy((x @ self.embed.weight.T).float(), tokens)


def model(recipe: str | None = None) -> nn.Module:
    created = Model().cuda().bfloat16()
    return created if recipe is None else fp8.apply(created, fp8.plan(created, recipe))


def train(made: nn.Module, kind: type[fp8.AdamW], clip: float, inside: bool, steps: int = 4) -> fp8.AdamW:
    optimizer = kind(made.parameters(), lr=1e-2, weight_decay=0.1, states="fp8", master="bf16+16")
    updating = UpdateInBackward(optimizer, made) if inside else None
    for step in range(steps):
        tokens = torch.randint(0, 1000, (256,), generator=torch.Generator().manual_seed(step)).cuda()
        loss = made(tokens)
        if updating:
            assert updating.run(lambda retain, loss=loss: loss.backward(retain_graph=retain), clip).applied
        else:
            loss.backward()
            norm = gradient_norm(made.parameters())
            optimizer.step(factor=clip_factor(norm, clip) if clip else None)
            optimizer.zero_grad()
    return optimizer


def assert_models(one: nn.Module, other: nn.Module) -> None:
    for (name, a), b in zip(one.named_parameters(), other.parameters(), strict=True):
        assert torch.equal(a, b), name


@pytest.mark.parametrize("clip", [0.0, 0.05], ids=["unclipped", "clipped"])
@pytest.mark.parametrize("recipe", [None, "blockwise"])
def test_update_in_backward_equals_the_ordinary_step(recipe: str | None, clip: float) -> None:
    one, other = model(recipe), model(recipe)
    torch.use_deterministic_algorithms(True, warn_only=True)  # the gradient of the embedding has a random order of sums
    try:
        train(one, fp8.AdamW, clip, False)
        train(other, fp8.AdamW, clip, True)
    finally:
        torch.use_deterministic_algorithms(False)
    assert_models(one, other)


@pytest.mark.parametrize("states", ["fp8", "coat", "bf16"])
def test_clipped_step_does_not_synchronize(states: str) -> None:
    created = model("blockwise")
    optimizer = fp8.AdamW(created.parameters(), lr=1e-3, states=states, master="bf16+sr")
    tokens = torch.arange(256, device="cuda")

    def step() -> None:
        created(tokens).backward()
        optimizer.step(factor=clip_factor(gradient_norm(created.parameters()), 1.0))
        optimizer.zero_grad()

    step()  # compiles kernels and allocates states
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        step()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_nonfinite_detection_does_not_synchronize() -> None:
    created = model()
    updating = UpdateInBackward(fp8.AdamW(created.parameters(), lr=1e-2), created)
    created.layers[2][0].weight.register_hook(lambda g: g * float("nan"))
    tokens = torch.arange(256, device="cuda")
    with pytest.raises(PartialUpdate, match="updated in part"):
        updating.run(lambda retain: created(tokens).backward(retain_graph=retain))


@pytest.mark.parametrize("inside", [False, True], ids=["step", "backward"])
def test_offloaded_states_give_the_same_weights_and_resume(inside: bool) -> None:
    one, other = model("blockwise"), model("blockwise")
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        ordinary = train(one, fp8.AdamW, 0.05, inside)
        away = train(other, OffloadedAdamW, 0.05, inside)
    finally:
        torch.use_deterministic_algorithms(False)
    assert_models(one, other)
    saved = away.state_dict()["state"]
    for index, state in ordinary.state_dict()["state"].items():
        for name, x in state.items():
            assert saved[index][name].device.type == "cpu" and (name == "step" or saved[index][name].is_pinned())
            assert torch.equal(*(t.reshape(-1).view(torch.uint8) for t in (saved[index][name], x.cpu()))), name
    again = OffloadedAdamW(other.parameters(), lr=1e-2, weight_decay=0.1, states="fp8", master="bf16+16")
    again.load_state_dict(copy.deepcopy(away.state_dict()))
    for p in other.parameters():
        assert all(x.device.type == "cpu" for x in again.state[p].values())


def test_batches_on_streams_do_not_interfere() -> None:
    offload = Offload("cuda", batch=1 << 20)
    one = [piece(1 << 20, 0, i, "fp8", "bf16+16") for i in range(6)]
    other = [
        p._replace(weight=p.weight.clone(), grad=p.grad.clone(), state={k: offload.host(v) for k, v in p.state.items()})
        for p in one
    ]
    for step in range(1, 6):
        engine.select_engine(torch.device("cuda"))(with_gradients(one, step), settings("fp8", "bf16+16"), None, None)
        offload.step(with_gradients(other, step), settings("fp8", "bf16+16"), None, None, adamw.step)
    offload.settle()
    assert_same(one, [q._replace(state={k: v.cuda() for k, v in q.state.items()}) for q in other])
