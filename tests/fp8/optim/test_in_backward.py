"""Update in backward equals the ordinary step bit for bit, clips by the true norm, and refuses what it cannot do."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from octavo import fp8
from octavo.fp8.optim.adamw import AdamW
from octavo.fp8.optim.in_backward import PartialUpdate, UpdateInBackward, clip_factor, gradient_norm
from tests import ranks


class Block(nn.Module):
    """Attention-like and gated: siblings that share an input, a gated MLP, norms."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(width)
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(width, width, bias=False) for _ in range(3))
        self.o_proj = nn.Linear(width, width)
        self.gate_proj, self.up_proj = (nn.Linear(width, 2 * width, bias=False) for _ in range(2))
        self.down_proj = nn.Linear(2 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        x = x + self.o_proj(torch.tanh(self.q_proj(h)) * self.k_proj(h) + self.v_proj(h))
        return x + self.down_proj(nn.functional.silu(self.gate_proj(x)) * self.up_proj(x))


class Model(nn.Module):
    """Two blocks between a tied embedding and head, one parameter frozen, one that no token reaches."""

    def __init__(self, checkpointing: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(40, 64)
        nn.init.normal_(self.embed.weight, std=0.1)
        self.layers = nn.ModuleList(Block() for _ in range(2))
        self.idle = nn.Parameter(torch.ones(300))
        self.scale = nn.Parameter(torch.ones(64), requires_grad=False)
        self.checkpointing = checkpointing

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens) * self.scale
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False) if self.checkpointing else layer(x)
        return nn.functional.cross_entropy((x @ self.embed.weight.T).flatten(0, 1), tokens.flatten())


def tokens(step: int) -> Tensor:
    return torch.randint(0, 40, (2, 16), generator=torch.Generator().manual_seed(step))


def plain_model(**settings: bool) -> nn.Module:
    torch.manual_seed(0)
    return Model(**settings)


def converted(recipe: str, fused: bool = False, **settings: bool) -> nn.Module:
    model = plain_model(**settings)
    fp8.apply(model, fp8.plan(model, recipe))
    if fused:
        fp8.fuse(model)
    return model


MODELS: dict[str, Callable[[], nn.Module]] = {
    "high precision": plain_model,
    "checkpointed": lambda: plain_model(checkpointing=True),
    "blockwise": lambda: converted("blockwise"),
    "blockwise fused": lambda: converted("blockwise", fused=True),
    "blockwise fused checkpointed": lambda: converted("blockwise", fused=True, checkpointing=True),
    "delayed": lambda: converted("delayed"),
}


def train(model: nn.Module, clip: float, in_backward: bool, steps: int = 3, **settings: str) -> list[float]:
    optimizer = AdamW(model.parameters(), lr=1e-2, weight_decay=0.1, **settings)
    updating = UpdateInBackward(optimizer, model) if in_backward else None
    norms = []
    for step in range(steps):
        loss = model(tokens(step))
        if updating:
            done = updating.run(lambda retain, loss=loss: loss.backward(retain_graph=retain), clip)
            assert done.applied and all(p.grad is None for p in model.parameters())
            norms.append(float(done.norm))
        else:
            loss.backward()
            norm = gradient_norm(model.parameters())
            optimizer.step(factor=clip_factor(norm, clip) if clip else None)
            optimizer.zero_grad()
            norms.append(float(norm))
    return norms


def assert_same(one: nn.Module, other: nn.Module) -> None:
    for (name, a), b in zip(one.named_parameters(), other.parameters(), strict=True):
        assert torch.equal(a, b), name


@pytest.mark.parametrize(
    ("name", "clip"),
    [*((name, 0.05) for name in MODELS), ("high precision", 0.0), ("blockwise fused checkpointed", 0.0)],
)
def test_update_in_backward_equals_ordinary_step(name: str, clip: float) -> None:
    one, other = MODELS[name](), MODELS[name]()
    before = copy.deepcopy(one.state_dict())
    ordinary, inside = train(one, clip, False), train(other, clip, True)
    assert ordinary == inside
    assert clip == 0 or all(norm > clip for norm in inside), "nothing was clipped"
    assert_same(one, other)
    moved = [k for k, v in one.state_dict().items() if not torch.equal(v, before[k])]
    assert "idle" not in moved and "scale" not in moved and len(moved) > 10
    for (key, a), b in zip(fp8.scaling_state(one).items(), fp8.scaling_state(other).values(), strict=True):
        assert key.startswith("recent") or "recent" in key or torch.equal(a, b), key


@pytest.mark.parametrize(("states", "master"), [("fp8", "bf16+16"), ("bf16", "bf16+sr"), ("fp32", "fp32")])
def test_every_kind_of_state_and_master(states: str, master: str) -> None:
    models = [plain_model().bfloat16(), plain_model().bfloat16()]
    for model, inside in zip(models, (False, True), strict=True):
        train(model, 0.05, inside, states=states, master=master)
    assert_same(*models)


def test_norm_below_limit_is_not_clipped() -> None:
    one, other = plain_model(), plain_model()
    free, limited = train(one, 0.0, False), train(other, 1e3, True)
    assert free == limited and max(free) < 1e3
    assert_same(one, other)


def test_idle_expert_is_not_updated() -> None:
    from transformers.models.qwen3_moe.configuration_qwen3_moe import Qwen3MoeConfig
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeForCausalLM

    config = Qwen3MoeConfig(
        vocab_size=40, hidden_size=64, intermediate_size=64, moe_intermediate_size=64, num_hidden_layers=1,
        num_attention_heads=4, num_key_value_heads=2, head_dim=16, num_experts=4, num_experts_per_tok=2,
        tie_word_embeddings=True,
    )  # fmt: skip

    class Losses(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.model = Qwen3MoeForCausalLM(config)
            fp8.apply(self.model, fp8.plan(self.model, "blockwise"))

        def forward(self, ids: Tensor) -> Tensor:
            return self.model(input_ids=ids[:1, :1].expand(1, 3), labels=ids[:1, :3]).loss

    one, other = Losses(), Losses()
    assert train(one, 0.05, False, 2) == train(other, 0.05, True, 2)
    assert_same(one, other)


def test_nonfinite_norm_skips_step() -> None:
    model = plain_model()
    optimizer = AdamW(model.parameters(), lr=1e-2)
    updating = UpdateInBackward(optimizer, model)
    before = copy.deepcopy(model.state_dict())
    loss = model(tokens(0)) + (model.layers[0].norm.weight * torch.tensor(float("inf"))).sum() * 0
    done = updating.run(lambda retain: loss.backward(retain_graph=retain), clip=1.0)
    assert not done.applied and not done.norm.isfinite()
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    assert not optimizer.state and all(p.grad is None for p in model.parameters())
    loss = model(tokens(0))
    assert updating.run(lambda retain: loss.backward(retain_graph=retain), clip=1.0).applied


def test_nonfinite_gradient_without_clipping_raises_partial_update() -> None:
    model = plain_model()
    updating = UpdateInBackward(AdamW(model.parameters(), lr=1e-2), model)
    before = copy.deepcopy(model.state_dict())
    loss = model(tokens(0))
    bad = model.layers[1].norm.weight
    handle = bad.register_hook(lambda g: g * float("nan"))
    with pytest.raises(PartialUpdate, match=r"norm of this step is nan.*updated in part.*Resume.*train\.clip > 0"):
        updating.run(lambda retain: loss.backward(retain_graph=retain))
    handle.remove()
    moved = {k for k, v in model.state_dict().items() if not torch.equal(v, before[k])}
    assert "layers.1.down_proj.weight" in moved and "layers.0.down_proj.weight" not in moved, moved
    assert bad.isfinite().all() and all(p.grad is None for p in model.parameters())


def test_second_backward_is_rejected() -> None:
    model = plain_model()
    updating = UpdateInBackward(AdamW(model.parameters(), lr=1e-2), model)
    losses = [model(tokens(i)) for i in range(2)]
    before = copy.deepcopy(model.state_dict())

    def both(retain: bool) -> None:
        for loss in losses:
            loss.backward(retain_graph=retain)

    with pytest.raises(RuntimeError, match=r"second gradient in one step.*optimizer\.update=step"):
        updating.run(both, clip=1.0)
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    losses = [(model.idle * 2).sum() for _ in range(2)]  # without a layer whose saved weight torch would miss first
    with pytest.raises(RuntimeError, match="Some weights have been updated: resume"):
        updating.run(both)
    with pytest.raises(RuntimeError, match=r"outside UpdateInBackward\.run.*accumulate.*remove"):
        model(tokens(2)).backward()
    updating.remove()
    model(tokens(2)).backward()
    with pytest.raises(RuntimeError, match=r"hold a gradient from before.*zero_grad"):
        updating.run(lambda retain: None)


def test_invalid_settings_are_rejected() -> None:
    model = plain_model()
    with pytest.raises(ValueError, match=r"ask for a gradient and are not in the optimizer.*Freeze"):
        UpdateInBackward(AdamW(model.layers.parameters()), model)
    with pytest.raises(ValueError, match="cannot be clipped to a norm of -1"):
        UpdateInBackward(AdamW(model.parameters()), model).run(lambda retain: None, clip=-1.0)
    model = plain_model()
    with pytest.raises(ValueError, match="cannot be clipped to a norm of nan"):
        UpdateInBackward(AdamW(model.parameters()), model).run(lambda retain: None, clip=float("nan"))
    with pytest.raises(ValueError, match=r"asked of SGD.*Use fp8\.AdamW"):
        UpdateInBackward(torch.optim.SGD(model.parameters()), model)  # type: ignore[arg-type]


def test_parameter_has_one_update_in_backward() -> None:
    model = plain_model()
    optimizer = AdamW(model.parameters(), lr=1e-2)
    first = UpdateInBackward(optimizer, model)
    for other in (optimizer, AdamW(model.parameters())):
        with pytest.raises(ValueError, match=r"by another UpdateInBackward already.*remove\(\)"):
            UpdateInBackward(other, model)
    loss = model(tokens(0))
    assert first.run(lambda retain: loss.backward(retain_graph=retain)).applied
    first.remove()
    loss = model(tokens(1))
    assert UpdateInBackward(optimizer, model).run(lambda retain: loss.backward(retain_graph=retain)).applied


@pytest.mark.parametrize("clip", [0.0, 1.0])
def test_function_without_backward_is_reported(clip: float) -> None:
    model = plain_model()
    optimizer = AdamW(model.parameters(), lr=1e-2)
    updating = UpdateInBackward(optimizer, model)
    for idle in (lambda retain: None, lambda retain: model(tokens(0))):
        with pytest.raises(RuntimeError, match=r"No gradient arrived.*loss\.backward\(retain_graph=retain\)"):
            updating.run(idle, clip)
    loss = model(tokens(0))
    if clip:  # the second time, too
        with pytest.raises(RuntimeError, match="No gradient arrived"):
            updating.run(lambda retain: loss.backward(retain_graph=True) if retain else None, clip)
    assert not optimizer.state
    loss = (model.idle * 2).sum()  # one parameter of many is enough
    assert updating.run(lambda retain: loss.backward(retain_graph=retain), clip).applied


def test_counts_and_schedules_see_one_step() -> None:
    model = converted("blockwise")
    optimizer = AdamW(model.parameters(), lr=1e-2)
    updating, stepped = UpdateInBackward(optimizer, model), []
    optimizer.register_step_post_hook(lambda *_: stepped.append(1))
    with fp8.count_gemms() as counts:
        loss = model(tokens(0))
        updating.run(lambda retain: loss.backward(retain_graph=retain), clip=1.0)
    assert counts.total("dgrad") == counts.total("wgrad") == counts.total("fwd") > 0
    assert stepped == [1], "codes of weights and schedules are renewed by the optimizer's step"


def sharded(world) -> list[list[float]]:
    from torch.distributed.fsdp import fully_shard

    found = []
    for clip in (0.0, 0.05):
        for in_backward in (False, True):
            model = plain_model()
            for layer in model.layers:
                fully_shard(layer, mesh=world.mesh)
            fully_shard(model, mesh=world.mesh)
            norms = train(model, clip, in_backward)
            with torch.no_grad():
                found.append([*norms, sum(float(p.full_tensor().double().abs().sum()) for p in model.parameters())])
    return found


@pytest.mark.long
def test_two_ranks_under_fsdp2() -> None:
    one, other = ranks.run(sharded, 2)
    assert one == other
    unclipped, unclipped_inside, clipped, clipped_inside = one
    assert unclipped == unclipped_inside and clipped == clipped_inside and clipped[3] != unclipped[3]
    assert clipped[:3] == pytest.approx(train(plain_model(), 0.05, False), rel=1e-3)


def test_norm_of_large_bf16_gradient_is_computed_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = []
    norm = torch.linalg.vector_norm

    def watched(x: Tensor, *settings: object, **more: object) -> Tensor:
        sizes.append(x.numel())
        return norm(x, *settings, **more)

    p = nn.Parameter(torch.zeros(3, 1 << 20, dtype=torch.bfloat16))
    p.grad = torch.randn(p.shape, generator=torch.Generator().manual_seed(0)).bfloat16()
    with monkeypatch.context() as patch:
        patch.setattr(torch.linalg, "vector_norm", watched)
        found = gradient_norm([p])
    assert max(sizes) <= 1 << 20
    # torch's fp32 sum of 2^20 squares is 3.2e-5 too large here, that of all at once 6.3e-5
    assert float(found) == pytest.approx(float(p.grad.double().norm()), rel=5e-5)
