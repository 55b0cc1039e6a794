"""Fused norms and gated MLPs under torch.compile: the kernels of eager mode, as often, with the same bits."""

from collections import Counter

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from octavo import fp8
from octavo.fp8.kernels.registry import get
from tests.fp8.dense.test_compiled import Recorder, results

COUNTED = (
    *("quantize", "quantize_both", "rmsnorm_quantize", "swiglu_quantize", "swiglu_backward_quantize"),
    *("gemm_fwd", "gemm_dgrad", "gemm_wgrad"),
)


pytestmark = pytest.mark.usefixtures("fresh_dynamo")


class Norm(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.rand(width) + 0.5), 1e-6

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        return self.weight * (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)).to(x.dtype)


class Attention(nn.Module):
    def __init__(self, width: int, writes: bool = False) -> None:
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(width, width) for _ in range(3))
        self.writes = writes

    def forward(self, x: Tensor) -> Tensor:
        if self.writes:
            x.mul_(2)
        return self.q_proj(x) * self.k_proj(x).sigmoid() + self.v_proj(x)


class Mlp(nn.Module):
    def __init__(self, width: int, bias: bool) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = (nn.Linear(width, 48, bias=bias) for _ in range(2))
        self.down_proj, self.act_fn = nn.Linear(48, width, bias=bias), nn.SiLU()

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))


class Block(nn.Module):
    def __init__(self, width: int = 32, bias: bool = False, writes: bool = False) -> None:
        super().__init__()
        self.input_layernorm, self.post_attention_layernorm = Norm(width), Norm(width)
        self.self_attn, self.mlp = Attention(width, writes), Mlp(width, bias)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x))
        return x + self.mlp(self.post_attention_layernorm(x))


def fused(recipe: str = "blockwise", **options: object) -> nn.Module:
    torch.manual_seed(0)
    model = Block(**options)  # type: ignore[arg-type]
    plan = fp8.plan(model, fp8.Policy(recipe, fuse="on"))
    assert sum(b.fused for b in plan.blocks) == 3
    return fp8.apply(model, plan)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """The calls of the reference backend."""
    result_: Counter[str] = Counter()

    def counting(name: str, real: object) -> object:
        def call(*args: object, **kwargs: object) -> object:
            result_[name] += 1
            return real(*args, **kwargs)  # type: ignore[operator]

        return call

    backend = get("reference")
    for name in COUNTED:
        monkeypatch.setattr(backend, name, counting(name, getattr(backend, name)), raising=False)
    return result_


def assert_compiled_equals_eager(
    model: nn.Module, calls: Counter[str], x: Tensor, wrap: object = None, **options: object
) -> Counter[str]:
    """Check that eager and compiled blocks give the same bits by the same calls, and return these calls."""
    wrap = wrap or (lambda run: run)
    results(model, model, x)  # weights are cast
    calls.clear()
    want, eager = results(model, wrap(model), x), Counter(calls)
    calls.clear()
    settings = {"backend": "aot_eager", "fullgraph": True, **options}
    got = results(model, wrap(torch.compile(model, **settings)), x)
    assert all(torch.equal(a, b) and a.dtype == b.dtype for a, b in zip(want, got, strict=True))
    assert Counter(calls) == eager
    return eager


@pytest.mark.parametrize("name", ["tensorwise", "mxfp8"])  # blockwise: below; rowwise casts by blocks of another shape
def test_compiled_block_runs_eager_kernels_with_same_bits(name, calls):
    counts = assert_compiled_equals_eager(fused(name), calls, torch.randn(3, 7, 32))
    assert (counts["rmsnorm_quantize"], counts["swiglu_quantize"], counts["swiglu_backward_quantize"]) == (2, 1, 1)
    assert counts["quantize"] + counts["quantize_both"] == 4  # dy of q, k, v and down: no input of a layer


@pytest.mark.parametrize("how", ["inside", "around"])
def test_activation_checkpointing(how, calls):
    model = fused()
    if how == "around":
        assert_compiled_equals_eager(
            model, calls, torch.randn(9, 32), lambda run: lambda x: checkpoint(run, x, use_reentrant=False)
        )
    else:
        block, model = model, nn.Sequential(model)
        model.forward = lambda x: checkpoint(block, x, use_reentrant=False)
        assert_compiled_equals_eager(model, calls, torch.randn(9, 32))
    assert calls["rmsnorm_quantize"] == 4 and calls["swiglu_quantize"] == 2


@pytest.mark.parametrize("case", ["frozen", "frozen gate, biases, bfloat16", "no dx", "one row under autocast"])
def test_only_required_gradients_are_computed(case, calls):
    model, lower = fused(bias="bfloat16" in case), case == "one row under autocast"
    x = torch.randn(32) if lower else torch.randn(5, 32)
    if case == "frozen":
        for name, p in model.named_parameters():
            p.requires_grad_("norm" in name)
    elif case == "frozen gate, biases, bfloat16":
        model, x = model.bfloat16(), x.bfloat16()
        model.mlp.gate_proj.weight.requires_grad_(False)
    elif case == "no dx":
        for p in model.parameters():
            p.requires_grad_(False)
        model.mlp.down_proj.weight.requires_grad_()

    def lowered(run):
        def call(x):
            with torch.autocast("cpu", torch.bfloat16, enabled=lower):
                return run(x)

        return call

    assert_compiled_equals_eager(model, calls, x, lowered)


def test_blocks_and_numbers_of_tokens_share_one_graph():
    """Values and gradients equal those of eager blocks."""
    recorder = Recorder()
    model, eager = (nn.Sequential(fused(), fused()) for _ in range(2))
    for block in model:
        block.forward = torch.compile(block.forward, backend=recorder.backend, fullgraph=True, dynamic=True)
    for tokens in (5, 130):
        x = torch.randn(tokens, 32)
        assert all(torch.equal(a, b) for a, b in zip(*(results(m, m, x) for m in (model, eager)), strict=True))
    assert len(recorder.forwards) == len(recorder.backwards) == 1
    qkv = ["linear"] * 3
    assert recorder.ops(recorder.forwards[0]) == ["rmsnorm", *qkv, "rmsnorm", "gated_mlp"]
    back = Counter(recorder.ops(recorder.backwards[0]))
    assert back == {"cast": 4, "dgrad": 6, "wgrad": 6, "swiglu_backward": 1}


def test_graph_saves_same_tensors_as_eager():
    """The codes of GEMM operands, x of each norm, gate and up; no output of a norm, and not h."""
    recorder, x = Recorder(), torch.randn(256, 128, requires_grad=True)
    torch.manual_seed(0)
    model = Block(128)
    fp8.apply(model, fp8.plan(model, fp8.Policy(fuse="on")))
    torch.compile(model, backend=recorder.backend, fullgraph=True)(x).sum().backward()
    (graph,) = recorder.forwards
    output = next(node for node in graph.graph.nodes if node.op == "output")
    wide = [n for n in output.args[0][1:] if n is not None and n.meta["val"].dtype is torch.float32]
    wide = [tuple(n.meta["val"].shape) for n in wide if n.meta["val"].shape[:1] == (256,) and n.meta["val"].dim() == 2]
    assert wide.count((256, 48)) == 2 and wide.count((256, 128)) <= 5  # x twice; q, k, v for the attention of this test


def test_write_between_norm_and_layers_is_rejected():
    model = fused(writes=True)
    model(torch.randn(5, 32))  # eagerly versions tell, and the written input is cast
    with pytest.raises(Exception, match=r"(?s)modified in place before the FP8 layers .*Use fuse: off"):
        torch.compile(model, backend="aot_eager", fullgraph=True)(torch.randn(5, 32))


@torch._dynamo.disable
def double_in_place(x: Tensor) -> None:
    x.mul_(2)


def test_norm_output_is_cast_again_after_graph_break():
    """A write during the graph break changes the result."""

    class Broken(Attention):
        def forward(self, x: Tensor) -> Tensor:
            double_in_place(x)
            return super().forward(x)

    result_ = []
    for compiling in (False, True):
        model = fused()
        model.self_attn.__class__ = Broken
        x = torch.randn(5, 32, generator=torch.Generator().manual_seed(0)).requires_grad_()
        y = (torch.compile(model, backend="aot_eager") if compiling else model)(x)
        y.square().sum().backward()
        result_.append((y, x.grad, *(p.grad for p in model.parameters())))
    assert all(torch.equal(a, b) for a, b in zip(*result_, strict=True))


def test_high_precision_runs_stock_blocks():
    recorder, model = Recorder(), fused()
    run = torch.compile(model, backend=recorder.backend, fullgraph=True)
    with fp8.high_precision(model):
        run(torch.randn(5, 32))
    run(torch.randn(5, 32))
    assert [bool(recorder.ops(graph)) for graph in recorder.forwards] == [False, True]
