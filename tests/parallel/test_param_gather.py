"""FP8 weights under FSDP2 on two and three gloo ranks: the codes of one process, a byte a parameter on the wire, no
high-precision copy of a whole weight.

One spawn a number of ranks runs all checks, because starting ranks costs more than any of them.
"""

from __future__ import annotations

import gc
import inspect

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

from octavo import fp8
from octavo.fp8 import moe
from octavo.fp8.weights import fp8_rows
from octavo.fp8.weights.fp8_tensor import Fp8Weight
from octavo.fp8.weights.shards import plain, span
from octavo.parallel import World, shard
from tests import ranks

WIDTH, WIDE = 40, 301  # 128 rows of a block fit no shard; 2 outputs leave a third rank without rows


class Block(nn.Module):
    recompute = False

    def __init__(self) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = nn.Linear(WIDTH, WIDE), nn.Linear(WIDTH, WIDE, bias=False)
        self.down_proj = nn.Linear(WIDE, WIDTH)
        self.few, self.back = nn.Linear(WIDTH, 2), nn.Linear(2, WIDTH, bias=False)
        self.tied = nn.Linear(WIDTH, WIDTH, bias=False)
        self.twin = nn.Linear(WIDTH, WIDTH, bias=False)
        self.twin.weight = self.tied.weight
        self.frozen = nn.Linear(WIDTH, WIDTH).requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(self.inner, x, use_reentrant=False) if self.recompute else self.inner(x)

    def inner(self, x: torch.Tensor) -> torch.Tensor:
        h = torch.tanh(self.gate_proj(x)) * self.up_proj(x)
        x = x + self.down_proj(h) + self.back(self.few(x))
        return x + self.frozen(self.twin(torch.relu(self.tied(x))))


class Recomputed(Block):
    recompute = True


class Experts(nn.Module):
    """Config in Hugging Face's format; importing transformers would take seconds on every rank."""

    def __init__(self, experts: int, hidden: int, inner: int) -> None:
        super().__init__()
        self.gate_up_proj = nn.Parameter(torch.empty(experts, 2 * inner, hidden))
        self.down_proj = nn.Parameter(torch.empty(experts, hidden, inner))
        self.act_fn = nn.SiLU()

    def forward(self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor):
        out = torch.zeros_like(hidden_states)
        for e, (first, second) in enumerate(zip(self.gate_up_proj, self.down_proj, strict=True)):
            share = ((top_k_index == e) * top_k_weights).sum(-1, keepdim=True)
            gate, up = (hidden_states @ first.t()).chunk(2, -1)
            out = out + (self.act_fn(gate) * up) @ second.t() * share
        return out


class Moe(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, 32)
        self.experts = Experts(5, 32, 16)
        nn.init.normal_(self.experts.gate_up_proj, std=0.2)
        nn.init.normal_(self.experts.down_proj, std=0.2)
        self.last = nn.Linear(32, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        index = torch.stack([torch.arange(len(x)) % 5, (torch.arange(len(x)) + 1) % 5], 1)
        return x + self.last(self.experts(self.first(x), index, torch.full((len(x), 2), 0.5)))


class Blocks:
    def layers(self, model: nn.Module) -> list[tuple[str, nn.Module]]:
        return [(name, m) for name, m in model.named_modules() if isinstance(m, Block | Moe)]


def _build(recipe: str, param: bool = True, kind: type[nn.Module] = Block, **policy) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(kind(), kind())
    with torch.no_grad():
        for p in model.parameters():
            if p.dim() == 2:  # magnitudes that differ by row: a wrong block shows
                p.mul_(torch.exp2(torch.randint(-3, 3, (p.shape[0], 1))))
    return fp8.apply(model, fp8.plan(model, fp8.Policy(recipe=recipe, param=param, **policy)))


def _batch(step: int, world: World) -> torch.Tensor:
    x = torch.randn(12, WIDTH, generator=torch.Generator().manual_seed(step))
    return x[world.rank :: world.size]


def _train(model: nn.Module, world: World, steps: int = 2, micro: int = 2) -> tuple[list[float], dict]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    losses = []
    for step in range(steps):
        for i in range(micro):
            loss = model(_batch(micro * step + i, world)).square().mean()
            loss.backward()
            losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    return losses, {n: v.full_tensor() if isinstance(v, DTensor) else v for n, v in model.state_dict().items()}


def _equal(a: dict, b: dict) -> bool:
    return a.keys() == b.keys() and all(torch.equal(v, b[name]) for name, v in a.items())


def _local(p: torch.Tensor) -> Fp8Weight:
    local = p._local_tensor  # type: ignore[attr-defined]
    assert isinstance(local, Fp8Weight) and local.held is not None
    return local


class Seen:
    """What each FP8 layer multiplied by, taken at the end of its forward, and what then lived of the shape of a whole
    weight in high precision."""

    def __init__(self, model: nn.Module, shapes: set[torch.Size]) -> None:
        self.codes: dict[str, list[fp8.Quantized]] = {}
        self.copies: list[list[int]] = []
        self.shapes = shapes
        for name, module in model.named_modules():
            if isinstance(module, fp8.Linear | moe.Experts):
                module.register_forward_hook(lambda m, _, __, name=name: self.look(name, m))

    def look(self, name: str, module: nn.Module) -> None:
        for key, weight in module.named_parameters():
            if weight.dim() > 1:
                assert isinstance(weight, Fp8Weight) and isinstance(weight, nn.Parameter) and weight.held is None
                codes = weight.stored.codes
                self.codes[f"{name}.{key}"] = [fp8.Quantized(q.data.clone(), q.scale.clone(), q.spec) for q in codes]
        if not name.startswith("1.down_proj") and not name.startswith("1.experts"):
            return  # looking through all objects takes time
        self.copies += [
            [*t.shape]
            for t in gc.get_objects()
            if type(t) in (torch.Tensor, nn.Parameter)
            and t.shape in self.shapes
            and t.is_floating_point()
            and t.itemsize > 1
            and t.untyped_storage().nbytes()
        ]


def _codes(world: World, recipes: tuple[str, ...]) -> dict:
    """Compares codes of every layer with those of the unsharded weight, gathered bytes, and memory."""
    answer: dict = {"wrong": [], "copies": [], "bytes": {}}
    stock = fp8_rows.dequantize
    decoded: list[object] = []
    fp8_rows.dequantize = lambda *a: decoded.append(a) or stock(*a)  # type: ignore[assignment]
    for recipe in recipes:
        for kind in (Block, Moe):
            want = {
                name: [need.cast(p.values()) for need in p.source.needs]
                for name, p in _build(recipe, kind=kind).named_parameters(remove_duplicate=False)
                if isinstance(p, Fp8Weight)
            }
            model = shard(_build(recipe, kind=kind), Blocks(), world)
            gc.collect()
            seen = Seen(model, {codes[0].data.shape for codes in want.values()})
            model(_batch(0, world)).square().mean().backward()
            assert seen.codes.keys() == want.keys()
            for name, actual in seen.codes.items():
                for q, w in zip(actual, want[name], strict=True):
                    same = torch.equal(q.data.view(torch.uint8), w.data.view(torch.uint8))
                    if not same or not torch.equal(q.scale.view(torch.uint8), w.scale.view(torch.uint8)):
                        answer["wrong"].append(f"{recipe} {name} {q.spec}")
            answer["copies"] += seen.copies
        gathered = [
            p for m in model for p in m._get_fsdp_state()._fsdp_param_group.fsdp_params if len(p._orig_size) > 1
        ]
        sent = sum(t.numel() * t.element_size() for p in gathered for t in p.all_gather_outputs)
        padded = sum(p.padded_sharded_param_size.numel() * world.size for p in gathered)
        answer["bytes"][recipe] = sent / padded
    answer["decoded"] = len(decoded)
    fp8_rows.dequantize = stock
    return answer


def _training(world: World, recipes: tuple[str, ...]) -> dict:
    """Steps with FP8 weights equal steps without, with the same recipe and ranks, bit for bit."""
    answer: dict = {}
    for recipe in recipes:
        for kind in (Block, Moe):
            for reshard in (True, False) if recipe == "tensorwise" else (True,):
                runs = []
                for param in (False, True):
                    model = shard(_build(recipe, param, kind), Blocks(), world, reshard_after_forward=reshard)
                    runs.append(_train(model, world))
                same = runs[0][0] == runs[1][0] and _equal(runs[0][1], runs[1][1])
                answer[f"{recipe} {kind.__name__} {reshard}"] = same
    runs = []
    for param in (False, True):  # a forward that runs again in the backward
        model = _build("blockwise", param, Recomputed)
        runs.append(_train(shard(model, Blocks(), world), world))
    answer["recomputed"] = runs[0][0] == runs[1][0] and _equal(runs[0][1], runs[1][1])
    return answer


def _casts(world: World) -> dict:
    """Rows are cast once per step, not once per gather; nothing is cached if codes are cast at each use."""
    keep, recast = (shard(_build("blockwise", weight_codes=how), Blocks(), world) for how in ("keep", "recast"))
    runs = [_train(model, world, steps=2) for model in (keep, recast)]
    local = _local(keep[0].up_proj.weight)
    held = local.held.rows.nbytes
    return {
        "same": runs[0][0] == runs[1][0] and _equal(runs[0][1], runs[1][1]),
        "kept": local.held.casts,
        "again": _local(recast[0].up_proj.weight).held.casts,
        "bytes": fp8.weight_cache_bytes(recast),
        "share": fp8.weight_cache_bytes(keep) >= held > 0,
    }


def _states(world: World) -> dict:
    """State dicts: writable stock DTensors, full ones and FP8 ones, and the state after a load."""
    answer = {}
    model, whole = shard(_build("tensorwise"), Blocks(), world), _build("tensorwise")
    first = _train(model, world)[1]
    state = model.state_dict(keep_vars=True)
    answer["stock"] = all(type(plain(v)) is torch.Tensor and type(v.to_local()) is torch.Tensor for v in state.values())
    answer["tied"] = state["0.tied.weight"] is state["0.twin.weight"]
    answer["again"] = model.state_dict(keep_vars=True)["0.tied.weight"] is state["0.tied.weight"]
    snapshot = ranks.whole_state(model, world)
    answer["whole"] = not world.is_main or _equal(snapshot, first)
    with torch.no_grad():
        for value in {id(v): v for v in state.values()}.values():
            value.to_local().mul_(0.5)  # what a loader does, behind every cache
    fp8.invalidate(model)
    whole.load_state_dict({n: v * 0.5 for n, v in first.items()})
    answer["written"] = _outputs(model, whole, world)
    model.load_state_dict(model.state_dict())
    answer["loaded"] = _outputs(model, whole, world)
    codes, want = fp8.fp8_state_dict(model), fp8.fp8_state_dict(whole)
    answer["codes"] = codes.keys() == want.keys() and all(
        torch.equal(v.view(torch.uint8), want[n].view(torch.uint8)) for n, v in codes.items()
    )
    for m in (model, whole):
        fp8.load_fp8_state_dict(m, codes)
    answer["fp8"] = _outputs(model, whole, world)
    p = model[0].few.weight
    answer["span"] = [*span(p)] == [*span(model.state_dict(keep_vars=True)["0.few.weight"])]
    answer["rows"] = plain(p).shape[0]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(_batch(9, world)).sum().backward()
    optimizer.step()
    whole.load_state_dict({n: v.full_tensor() for n, v in model.state_dict().items()})
    answer["stepped"] = _outputs(model, whole, world)
    return answer


def _outputs(model: nn.Module, whole: nn.Module, world: World) -> bool:
    with torch.no_grad():
        return torch.equal(model(_batch(3, world)), whole(_batch(3, world)))


def _high(world: World) -> dict:
    """In high precision the values are the decoded codes."""
    model, stock = shard(_build("rowwise"), Blocks(), world), nn.Sequential(Block(), Block())
    codes = fp8.fp8_state_dict(model)
    fp8.load_fp8_state_dict(whole := _build("rowwise"), codes)
    stock.load_state_dict(whole.state_dict())
    x = _batch(0, world)
    with fp8.high_precision(model):
        y = model(x)
        y.sum().backward()
    want = stock(x)
    want.sum().backward()
    gap = max(
        float((p.grad.full_tensor() - _summed(q.grad)).abs().max())
        for p, q in zip(model.parameters(), stock.parameters(), strict=True)
        if p.requires_grad
    )
    answer = {"forward": torch.equal(y, want), "gap": gap}
    model.zero_grad()
    with torch.no_grad():
        answer["after"] = torch.equal(model(x), whole(x))
    try:
        with torch.no_grad():
            model[0].register_forward_pre_hook(lambda m, _: m.up_proj.weight.zero_() and None)
            model(x)
        answer["refused"] = ""
    except RuntimeError as error:
        answer["refused"] = str(error)
    return answer


def _summed(gradient: torch.Tensor) -> torch.Tensor:
    gradient = gradient.clone()
    torch.distributed.all_reduce(gradient)
    return gradient


def _low(world: World) -> dict:
    """With a BF16 gather policy the gathered weight is BF16; codes are those of the master."""
    model = _build("blockwise")
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    dtypes = set()
    for block in model:
        block.up_proj.register_forward_hook(lambda m, _, y: dtypes.add((str(m.weight.dtype), str(y.dtype))))
        fully_shard(block, mesh=world.mesh, mp_policy=policy)
    fully_shard(model, mesh=world.mesh, mp_policy=policy)
    model(_batch(0, world)).float().sum().backward()
    return {"dtypes": sorted(dtypes), "grad": str(model[0].up_proj.weight.grad.dtype)}


def _late(world: World) -> str:
    model = nn.Sequential(Block(), Block())
    shard(model, Blocks(), world)
    with pytest.raises(fp8.PlanError) as caught:
        fp8.apply(model, fp8.plan(model, fp8.Policy(param=True)))
    return str(caught.value)


def _all(world: World, recipes: tuple[str, ...], steps: bool) -> dict:
    return {
        "codes": _codes(world, recipes),
        "training": _training(world, recipes) if steps else {},
        "casts": _casts(world) if steps else {},
        "states": _states(world),
        "high": _high(world) if steps else {},
        "low": _low(world),
        "late": _late(world),
    }


@pytest.mark.parametrize(
    "size,recipes,steps",
    [
        pytest.param(3, fp8.RECIPES, True, id="three", marks=pytest.mark.long),
        pytest.param(2, ("tensorwise", "rowwise"), True, id="two", marks=pytest.mark.long),
        pytest.param(3, ("blockwise",), False, id="without-steps"),
    ],
)
def test_ranks(size: int, recipes: tuple[str, ...], steps: bool) -> None:
    for rank, answer in enumerate(ranks.run(_all, size, recipes, steps)):
        codes = answer["codes"]
        assert codes["wrong"] == [] and codes["copies"] == [] and codes["decoded"] == 0
        # One byte a parameter and cast, and the scales: fp32 a row and a column (short ones here), a byte of 32.
        most = {
            "blockwise": 1.01,
            "blockwise_1d": 1.01,
            "tensorwise": 1.01,
            "delayed": 1.01,
            "rowwise": 2.4,
            "mxfp8": 2.1,
        }
        assert all(actual < most[recipe] for recipe, actual in codes["bytes"].items()), codes["bytes"]
        assert all(answer["training"].values()), answer["training"]
        assert answer["casts"] == ({"same": True, "kept": 2, "again": 8, "bytes": 0, "share": True} if steps else {})
        states = answer["states"]
        assert states.pop("rows") == (1 if size == 2 or rank < 2 else 0)
        assert all(states.values()), states
        if steps:
            high = answer["high"]
            assert high["forward"] and high["after"] and high["gap"] < 1e-3
            assert "writes to a gathered FP8 weight" in high["refused"]
        assert answer["low"] == {"dtypes": [["torch.bfloat16", "torch.bfloat16"]], "grad": "torch.float32"}
        assert "Call fp8.apply before fully_shard" in answer["late"]


def test_fsdp_accepts_short_form_of_hook() -> None:
    """The long form rejects scales on ranks with fewer rows; torch 2.11 to 2.13 use the form with only the mesh."""
    assert list(inspect.signature(Fp8Weight.fsdp_pre_all_gather).parameters) == ["self", "mesh"]
