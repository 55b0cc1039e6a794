"""Weights that are FP8 between steps, in one process: the same results, codes alone in the GEMMs, stock state dicts."""

import copy
import io
import pickle

import pytest
import torch
from torch import nn
from transformers import Qwen3MoeConfig
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

from octavo import fp8
from octavo.fp8.arithmetic.cast import dequantize
from octavo.fp8.weights.fp8_tensor import Fp8Weight
from octavo.fp8.weights.shards import plain, span

RECIPES = fp8.RECIPES


class Mlp(nn.Module):
    """Siblings, a layer behind them, one that is frozen, an embedding in front."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(50, 48)
        self.gate_proj, self.up_proj = nn.Linear(48, 128), nn.Linear(48, 128, bias=False)
        self.down_proj = nn.Linear(128, 48)
        self.frozen = nn.Linear(48, 48).requires_grad_(False)
        self.lm_head = nn.Linear(48, 50, bias=False)
        self.lm_head.weight = self.embed.weight

    def forward(self, ids):
        x = self.embed(ids)
        h = nn.functional.silu(self.gate_proj(x)) * self.up_proj(x)
        return self.lm_head(self.frozen(self.down_proj(h)) + x)


def build(recipe="blockwise", param=True, dtype=torch.float32, model=Mlp, **policy):
    torch.manual_seed(0)
    made = model().to(dtype)
    return fp8.apply(made, fp8.plan(made, fp8.Policy(recipe=recipe, param=param, **policy)))


def data(step=0):
    return torch.randint(0, 50, (3, 8), generator=torch.Generator().manual_seed(step))


def loss_of(model, step=0):
    return model(data(step)).float().square().mean()


def train(model, steps=3, micro=2, **optimizer):
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, **optimizer)
    losses = []
    for step in range(steps):
        for i in range(micro):
            loss = loss_of(model, micro * step + i)
            loss.backward()
            losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    return losses, {name: value.clone() for name, value in model.state_dict().items()}


def same(a, b):
    return a[0] == b[0] and a[1].keys() == b[1].keys() and all(torch.equal(v, b[1][k]) for k, v in a[1].items())


def casts(model):
    caches = {id(c): c for m in model.modules() if isinstance(m, fp8.Linear) for c in m._weight_caches().values()}
    return sum(c.casts for c in caches.values())


@pytest.mark.parametrize("recipe,dtype", [(r, torch.float32) for r in RECIPES] + [("blockwise", torch.bfloat16)])
def test_training_equals_training_without_fp8_weights(recipe, dtype):
    without, with_ = build(recipe, False, dtype), build(recipe, True, dtype)
    assert isinstance(with_.down_proj.weight, Fp8Weight) and isinstance(with_.down_proj.weight, nn.Parameter)
    assert same(train(without), train(with_))
    assert casts(without) == casts(with_)


@pytest.mark.parametrize("fuse", ["on", "off"])
@pytest.mark.parametrize("how", [{"foreach": True}, {"fused": True}, {"foreach": False}], ids=str)
def test_stock_optimizers_train_master(how, fuse):
    assert same(train(build(param=False, fuse=fuse), **how), train(build(fuse=fuse), **how))


def test_only_weights_of_fp8_layers_are_replaced():
    stock, model = Mlp(), build()
    torch.manual_seed(0)
    values = Mlp().state_dict()
    assert [n for n, _ in model.named_parameters()] == [n for n, _ in stock.named_parameters()]
    found = {n for n, p in model.named_parameters() if isinstance(p, Fp8Weight)}
    assert found == {"gate_proj.weight", "up_proj.weight", "down_proj.weight", "frozen.weight"}
    for name, p in model.named_parameters():
        assert torch.equal(p, values[name]) and p.shape == values[name].shape and p.dtype is values[name].dtype
        assert p.requires_grad == (not name.startswith("frozen")) and p.is_leaf
    assert model.lm_head.weight is model.embed.weight
    assert "master on cpu" in repr(model.up_proj.weight)


def test_component_can_be_excluded():
    components = {"foundation": fp8.ComponentPolicy(param=False)}
    torch.manual_seed(0)
    model = Mlp()
    plan = fp8.plan(model, fp8.Policy(param=True, components=components))
    assert {r.component for r in plan.rows if r.fp8} == {"foundation"}
    fp8.apply(model, plan)
    assert not any(isinstance(p, Fp8Weight) for p in model.parameters())


def test_forward_and_dgrad_read_codes_alone():
    model = build()
    want = loss_of(model)
    want.backward()
    grads = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    before = casts(model)
    for p in model.parameters():
        if isinstance(p, Fp8Weight):
            unreadable = torch.empty_like(p.master, device="meta")
            while unreadable._version < p.held.version:  # nothing was written, as far as the cache can know
                unreadable.zero_()
            p.held.tensor = unreadable
            assert p.device.type == "cpu" and p.master.is_meta
    loss = loss_of(model)
    loss.backward()
    assert loss.item() == want.item() and casts(model) == before
    assert all(torch.equal(p.grad, grads[n]) for n, p in model.named_parameters() if p.grad is not None)


def test_writes_to_master_invalidate_codes():
    for write in (
        lambda p: torch.optim.SGD([p], lr=1.0).step(),
        lambda p: plain(p).mul_(0.5),
        lambda p: p.mul_(0.5),
        lambda p: p.copy_(torch.ones_like(p)),
        lambda p: torch._foreach_mul_([p], 0.5),
        lambda p: setattr(p, "data", torch.ones(p.shape)),
    ):
        model = build()
        loss_of(model).backward()
        with torch.no_grad():
            write(model.down_proj.weight)
        twin = build(param=False)
        twin.load_state_dict(model.state_dict())
        assert loss_of(model).item() == loss_of(twin).item()


def test_optimizer_sees_plain_tensor():
    p = build().down_proj.weight
    assert type(plain(p)) is torch.Tensor and plain(p) is p.master and tuple(span(p)) == (0, p.numel(), p.numel())
    assert type(torch.zeros_like(p)) is torch.Tensor and torch.zeros_like(p).is_contiguous()
    assert type(p.detach() + 1) is torch.Tensor


def test_state_dicts_are_stock_and_live():
    model = build()
    state = model.state_dict()
    assert all(type(v) is torch.Tensor for v in state.values())
    first = loss_of(model).item()
    live = model.state_dict(keep_vars=True)["down_proj.weight"]
    assert live is model.state_dict(keep_vars=True)["down_proj.weight"]
    with torch.no_grad():
        live.zero_()
    fp8.invalidate(model)
    assert loss_of(model).item() != first
    assert not model.down_proj.weight.any()
    other = build()
    for p in other.parameters():
        p.data.mul_(2)
    other.load_state_dict(state)
    twin = build(param=False)
    twin.load_state_dict(state)
    assert loss_of(other).item() == loss_of(twin).item()
    assert isinstance(other.down_proj.weight, Fp8Weight)


@pytest.mark.parametrize("recipe", RECIPES)
def test_state_dict_can_contain_codes(recipe):
    model = build(recipe)
    train(model, 1)
    state = fp8.fp8_state_dict(model)
    suffix = "_scale_inv" if recipe.startswith("blockwise") else "_scale"
    weights = {n for n, p in model.named_parameters() if isinstance(p, Fp8Weight)}
    assert set(state) == set(model.state_dict()) | {n + suffix for n in weights}
    for name, p in model.named_parameters():
        if name in weights:
            spec = fp8.recipe(recipe).fwd.b
            q = fp8.quantize(p.master, spec)
            assert torch.equal(state[name].view(torch.uint8), q.data.view(torch.uint8))
            assert torch.equal(state[name + suffix].float(), q.scale.float())
        else:
            assert torch.equal(state[name], p)
    buffer = io.BytesIO()
    torch.save(state, buffer)
    buffer.seek(0)
    other = build(recipe)
    fp8.load_fp8_state_dict(other, torch.load(buffer))
    for name in weights:
        stored = fp8.Quantized(state[name], state[name + suffix], spec)
        assert torch.equal(other.get_parameter(name).master, dequantize(stored))
    assert torch.isfinite(loss_of(other))
    fp8.load_fp8_state_dict(other, model.state_dict())  # one in high precision loads as well
    assert torch.equal(other.up_proj.weight, model.up_proj.weight)
    del state["up_proj.weight" + suffix]
    with pytest.raises(ValueError, match=r"up_proj\.weight has FP8 codes without the scales"):
        fp8.load_fp8_state_dict(other, state)


def test_tied_layers_share_one_parameter_and_its_codes():
    class Tied(nn.Module):
        def __init__(self, share):
            super().__init__()
            self.a, self.b, self.c = (nn.Linear(48, 48, bias=False) for _ in range(3))
            if share:
                self.b.weight = self.a.weight

        def forward(self, x):
            return self.c(self.b(torch.relu(self.a(x))))

    models = []
    for param in (False, True):
        torch.manual_seed(0)
        models.append(Tied(True))
        fp8.apply(models[-1], fp8.plan(models[-1], fp8.Policy(param=param)))
    model = models[1]
    assert model.a.weight is model.b.weight and isinstance(model.a.weight, Fp8Weight)
    assert len(list(model.parameters())) == 2
    x = torch.randn(4, 48)
    for m in models:
        m(x).sum().backward()
    assert torch.equal(models[0].a.weight.grad, model.a.weight.grad)
    assert fp8.weight_cache_bytes(model) == 2 * (48 * 48 + 4) < fp8.weight_cache_bytes(models[0])
    twin = copy.deepcopy(model)
    assert twin.a.weight is twin.b.weight and twin.a._site.codes is twin.b._site.codes is not model.a._site.codes
    state = model.state_dict(keep_vars=True)
    assert state["a.weight"] is state["b.weight"]


@pytest.mark.parametrize("recipe", ["blockwise", "rowwise", "mxfp8", "delayed"])
def test_experts(recipe):
    config = Qwen3MoeConfig(hidden_size=32, moe_intermediate_size=16, num_experts=4, num_experts_per_tok=2)
    config._experts_implementation = "eager"
    results = []
    for param in (False, True):
        torch.manual_seed(0)
        model = nn.ModuleDict({"experts": Qwen3MoeExperts(config)})
        for p in model.parameters():
            nn.init.normal_(p, std=0.2)
        fp8.apply(model, fp8.plan(model, fp8.Policy(recipe=recipe, param=param)))
        assert all(isinstance(p, Fp8Weight) == param for p in model.parameters())
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
        losses = []
        for step in range(2):
            x = torch.randn(6, 32, generator=torch.Generator().manual_seed(step))
            index = torch.stack([torch.arange(6) % 3, (torch.arange(6) + 1) % 4], 1)
            loss = model["experts"](x, index, torch.full((6, 2), 0.5)).square().sum()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        results.append((losses, {n: v.clone() for n, v in model.state_dict().items()}))
    assert same(*results)
    with torch.no_grad():
        fp8.load_fp8_state_dict(model, fp8.fp8_state_dict(model))


def test_copies_pickles_and_casts_of_the_module():
    model = build()
    loss_of(model).backward()
    want = loss_of(model).item()
    for twin in (copy.deepcopy(model), _pickled(model)):
        p = twin.down_proj.weight
        assert isinstance(p, Fp8Weight) and isinstance(p, nn.Parameter) and p.requires_grad
        assert p.master is not model.down_proj.weight.master
        assert len(twin.down_proj._site.codes) == 0 and loss_of(twin).item() == want
        with torch.no_grad():
            p.zero_()
        assert loss_of(twin).item() != want
    assert loss_of(model).item() == want
    low, twin = copy.deepcopy(model).bfloat16(), build(param=False).bfloat16()
    p = low.down_proj.weight
    assert (type(p), p.dtype, p.master.dtype) == (Fp8Weight, torch.bfloat16, torch.bfloat16)
    assert loss_of(low).item() == loss_of(twin).item()


def _pickled(model):
    return pickle.loads(pickle.dumps(model))


def test_high_precision_computes_with_the_master():
    model, stock = build(), Mlp()
    stock.load_state_dict(model.state_dict())
    with fp8.high_precision(model):
        loss = loss_of(model)
        loss.backward()
    want = loss_of(stock)
    want.backward()
    assert loss.item() == want.item()
    assert torch.equal(model.up_proj.weight.grad, stock.up_proj.weight.grad)


@pytest.mark.parametrize("gemms", [{"fwd": "bf16"}, {"dgrad": "bf16"}, {"fwd": "bf16", "dgrad": "bf16"}], ids=str)
def test_gemms_in_high_precision_read_the_master(gemms):
    model = build(**gemms)
    assert isinstance(model.up_proj.weight, Fp8Weight) == (len(gemms) == 1), "no FP8 GEMM, no FP8 weight"
    assert same(train(model), train(build(param=False, **gemms)))


@pytest.mark.parametrize("param", [False, True])
@pytest.mark.parametrize("recipe,fuse", [("blockwise", "on"), ("tensorwise", "off"), ("rowwise", "off")])
def test_recast_codes_are_equal_and_not_kept(recipe, fuse, param):
    keep, recast = (build(recipe, param, weight_codes=how, fuse=fuse) for how in ("keep", "recast"))
    for model in (keep, recast):
        for _ in range(2):
            loss_of(model).backward()
        model.zero_grad()
    assert fp8.weight_cache_bytes(keep) > 0
    assert fp8.weight_cache_bytes(recast) == 0 and casts(recast) > casts(keep)
    assert same(train(keep), train(recast))
    twin = copy.deepcopy(recast)
    loss_of(twin).backward()
    assert fp8.weight_cache_bytes(twin) == 0, "a copy goes on so"


def test_compile_skips_layer_or_reports_reason():
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(48, 64), nn.Linear(64, 48)

        def forward(self, x):
            return self.b(torch.relu(self.a(x)))

    model, x = build(model=Two), torch.randn(4, 48)
    want = model(x)
    y = torch.compile(model, backend="eager")(x)
    assert torch.equal(y, want)
    y.sum().backward()
    torch._dynamo.reset()
    with pytest.raises(Exception, match="param=False"):
        torch.compile(model, backend="eager", fullgraph=True)(x)
    torch._dynamo.reset()


def test_wrong_data_is_rejected():
    p = build().up_proj.weight
    with pytest.raises(RuntimeError, match=r"cannot take a tensor of shape \[3\]"):
        p.data = torch.zeros(3)


def test_weight_held_by_graph_cannot_be_converted():
    model = build()
    loss, before = loss_of(model), dict(model.named_parameters())
    model.to("cpu").to(torch.float32)  # nothing to do, as trainers ask for it at every turn
    assert all(p is before[name] for name, p in model.named_parameters())
    with pytest.raises(RuntimeError, match="delete the loss"):
        model.bfloat16()
    assert all(p is before[name] for name, p in model.named_parameters())
    loss.backward()
    assert model.up_proj.weight.grad is not None


def test_codes_are_not_loaded_as_values():
    codes, stock = fp8.fp8_state_dict(build()), Mlp()
    before = {name: value.clone() for name, value in stock.state_dict().items()}
    with pytest.raises(ValueError, match="First apply the plan, with param=True"):
        fp8.load_fp8_state_dict(stock, codes)
    assert all(torch.equal(value, before[name]) for name, value in stock.state_dict().items())
