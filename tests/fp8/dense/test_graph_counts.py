"""fp8.count_gemms in compiled graphs: what eager mode counts, by layer; an error where a graph cannot be counted."""

from __future__ import annotations

import copy
import pickle
import threading
from collections.abc import Callable

import pytest
import torch
import torch.nn.modules.module as torch_module
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from octavo import fp8
from octavo.base import accelerator
from octavo.fp8.dense.swap import replace
from octavo.fp8.memory import ChunkedHead
from octavo.fp8.observe.counts import GemmCounts

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


class Norm(nn.Module):
    """As transformers writes it."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight, self.variance_epsilon = nn.Parameter(torch.ones(size)), 1e-6

    def forward(self, x: Tensor) -> Tensor:
        h = x.float()
        return self.weight * (h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)).to(x.dtype)


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = nn.Linear(32, 64, bias=False), nn.Linear(32, 64, bias=False)
        self.down_proj, self.act_fn = nn.Linear(64, 32, bias=False), nn.SiLU()

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))


class Router(nn.Module):
    """Not an nn.Linear: it gives a tuple, as routers of mixtures of experts do."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 32))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        logits = nn.functional.linear(x, self.weight)
        return logits, logits.argmax(-1)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.mlp, self.gate, self.experts = Norm(32), Mlp(), Router(), nn.Identity()
        self.proj = nn.Linear(32, 32)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        logits, _ = self.gate(h)
        return x + self.proj(h) + self.mlp(h) * logits.sum(-1, keepdim=True)


class Model(nn.Module):
    def __init__(self, recompute: bool = False) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(2))
        self.lm_head, self.recompute = nn.Linear(32, 16, bias=False), recompute

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False) if self.recompute else layer(x)
        return self.lm_head(x)


def make(recipe: str = "blockwise", recompute: bool = False, **options: object) -> nn.Module:
    torch.manual_seed(0)
    model = Model(recompute)
    policy = fp8.Policy(recipe, rules=(fp8.Rule("*.experts*", recipe="off"),) if options else (), **options)
    return fp8.apply(model, fp8.plan(model, policy))


def step(run: Callable[[Tensor], Tensor], rows: int = 8) -> None:
    torch.manual_seed(1)
    run(torch.randn(rows, 32, requires_grad=True)).square().sum().backward()


def facts(counts: GemmCounts) -> list[dict[object, int]]:
    return [dict(part) for part in (counts.calls, counts.flops, counts.expected, counts.ran, counts.no_grad)]


def count_steps(run: Callable[[Tensor], Tensor], *rows: int) -> list[dict[object, int]]:
    with fp8.count_gemms() as counts:
        for count in rows or (8,):
            step(run, count)
    return facts(counts)


def test_whole_model_compiled_before_is_counted_as_in_eager_mode():
    """Router, head, fused norm and gated MLP; the second number of rows compiles the graph again."""
    model = make()
    del model.layers[1]
    want = count_steps(model, 8, 24)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    step(compiled)
    assert count_steps(compiled, 8, 24) == want
    assert torch.equal(compiled(x := torch.randn(8, 32)), model(x))  # the router reads what a fused norm gives
    names = {layer for layer, _, _ in want[0]}
    assert {"lm_head", "layers.0.gate", "layers.0.mlp.down_proj", "layers.0.proj"} <= names and len(names) == 6


def test_blocks_that_share_a_graph_are_counted_by_their_names():
    model = make()
    want = count_steps(model)
    for layer in model.layers:
        layer.compile(backend="aot_eager", fullgraph=True)
    assert count_steps(model) == want  # compiled inside the context
    with torch.no_grad(), fp8.count_gemms() as counts:
        model(torch.randn(8, 32))
    assert set(counts.no_grad.values()) == {1} and len(counts.no_grad) == 8 and not counts.total("dgrad")


def test_recomputed_forwards_are_counted_as_such():
    """One graph for forward and backward need not compute again what no gradient needs."""
    model = make(recompute=True)
    del model.layers[1]
    want = count_steps(model)
    calls = count_steps(torch.compile(model, backend="aot_eager", fullgraph=True))[0]
    others = {key for key in {*want[0], *calls} if calls.get(key) != want[0].get(key)}
    assert {gemm for _, gemm, _ in others} <= {"recompute"} and not others & {*calls}
    model.layers[0].compile(backend="aot_eager", fullgraph=True)
    assert count_steps(model) == want


def test_chunked_head_in_high_precision_is_counted():
    model = make()
    del model.layers[1]
    want = count_steps(model)
    replace(model.lm_head, ChunkedHead)
    assert count_steps(model) == want == count_steps(torch.compile(model, backend="aot_eager"))
    assert ("lm_head", "wgrad", fp8.HIGH) in want[0]


def test_frozen_layers_and_copies_keep_their_names():
    model = make()
    for parameter in model.layers[0].parameters():
        parameter.requires_grad_(False)
    want = count_steps(model)
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model)), model.bfloat16().float()):
        assert count_steps(torch.compile(twin, backend="aot_eager")) == want
    assert type(model.lm_head).__name__ == "Linear" and isinstance(model.lm_head, nn.Linear)


def test_graphs_are_counted_on_all_threads():
    model = make()
    compiled = torch.compile(model, backend="aot_eager")
    step(compiled)
    with fp8.count_gemms() as outer:
        threads = [threading.Thread(target=step, args=(compiled,)) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        with fp8.count_gemms() as inner:
            step(compiled)
    assert outer.total() == 3 * inner.total() > 0
    assert facts(inner) == count_steps(model)


def test_functional_linear_is_counted_under_its_name():
    def run(x: Tensor) -> Tensor:
        return fp8.linear(x, weight)

    weight = torch.randn(16, 32, requires_grad=True)
    want = count_steps(run)
    assert count_steps(torch.compile(run, backend="aot_eager")) == want and ("linear", "wgrad", "reference") in want[0]


def test_unknown_weights_and_observers_are_refused_with_the_remedy():
    model = make()
    compiled = torch.compile(lambda x, w: torch.func.functional_call(model, w, x), backend="aot_eager")
    strangers = {name: p.detach().clone().requires_grad_() for name, p in model.named_parameters()}
    x = torch.randn(8, 32)
    with pytest.raises(RuntimeError, match="is not the parameter of a layer.*force_eager"), fp8.count_gemms():
        compiled(x, strangers)
    graph = torch.compile(model, backend="aot_eager")
    graph(x)
    with pytest.raises(RuntimeError, match="needs steps outside of compiled graphs.*force_eager"), fp8.health():
        graph(x)
    with fp8.health() as health, torch.compiler.set_stance("force_eager"):
        graph(x)
    assert len(health.table()) == 8


def test_cuda_graphs_of_torch_are_refused(monkeypatch):
    model, x = make(), torch.randn(8, 32)
    graph = torch.compile(model, backend="aot_eager")
    graph(x)
    monkeypatch.setattr("octavo.fp8.dense.graph_counts.is_capturing", lambda device: True)
    with pytest.raises(RuntimeError, match="mode reduce-overhead.*force_eager"), fp8.count_gemms():
        graph(x)
    monkeypatch.setattr("octavo.fp8.observe.counts.runs_inductor_graphs", lambda: True)
    with pytest.raises(RuntimeError, match="counted nothing.*force_eager"), fp8.count_gemms():
        pass  # a replay runs no Python
    with pytest.raises(KeyError), fp8.count_gemms():
        raise KeyError  # the first error is the one that is seen
    assert accelerator.runs_inductor_graphs() is False


def test_nothing_is_left_in_the_tables_of_global_hooks():
    def tables() -> dict[str, int]:
        names = [name for name in dir(torch_module) if name.startswith("_global_")]
        return {
            name: len(getattr(torch_module, name)) for name in names if hasattr(getattr(torch_module, name), "__len__")
        }

    model, before = make(), tables()
    with pytest.raises(KeyError), fp8.count_gemms(), fp8.count_gemms(), fp8.health(), fp8.high_precision(model):
        model(torch.randn(8, 32))
        raise KeyError
    assert tables() == before
