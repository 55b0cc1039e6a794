"""Blocks that run again in backward: the same values and codes, fewer bytes, exact counts."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode
from transformers import Qwen3Config

from octavo import fp8, models
from octavo.base.model_families import trained_families
from octavo.fp8.memory.accounting import SavedBytes, count_saved
from octavo.fp8.memory.recompute import activation_checkpointing
from octavo.fp8.proof import Proof
from octavo.models.forward.unused_towers import dummy_image_inputs
from tests import ranks
from tests.fp8.blocks.test_fused_models import make_model
from tests.fp8.memory import test_accounting as test_kept
from tests.fp8.memory.test_accounting import per_layer, qwen3
from tests.models.conftest import MANY

HOW = ("selective", "full")


class Norm(nn.Module):
    def __init__(self, size: int):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * (x * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype)


class Mlp(nn.Module):
    def __init__(self, size: int, dropout: float):
        super().__init__()
        self.up, self.down, self.dropout = nn.Linear(size, 3 * size), nn.Linear(3 * size, size), nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.dropout(torch.nn.functional.gelu(self.up(x))))


class Attention(nn.Module):
    def __init__(self, size: int):
        super().__init__()
        self.qkv, self.q_norm, self.proj = nn.Linear(size, 3 * size), Norm(size), nn.Linear(size, size)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).chunk(3, -1)
        return self.proj(torch.nn.functional.scaled_dot_product_attention(self.q_norm(q), k, v))


class Block(nn.Module):
    def __init__(self, size: int = 32, dropout: float = 0.0):
        super().__init__()
        self.norm1, self.attn = Norm(size), Attention(size)
        self.norm2, self.mlp = Norm(size), Mlp(size, dropout)

    def forward(self, x: Tensor, shift: Tensor | None = None) -> Tensor:
        x = x + self.attn(self.norm1(x if shift is None else x + shift))
        return x + self.mlp(self.norm2(x))


def stack(depth: int = 2, dropout: float = 0.0, how: str = "none") -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(*(Block(dropout=dropout) for _ in range(depth)))
    activation_checkpointing(model.named_children(), how)
    return model


def step(model: nn.Module, seed: int = 3) -> dict[str, Tensor]:
    torch.manual_seed(seed)
    x = torch.randn(2, 8, 32, requires_grad=True)
    y = model(x)
    y.square().sum().backward()
    return {"y": y.detach(), "x": x.grad} | {n: p.grad for n, p in model.named_parameters()}


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_recomputation_preserves_values_and_dropout(how, dropout):
    assert same(step(stack(dropout=dropout)), step(stack(dropout=dropout, how=how)))


def test_recomputed_parts_are_named():
    model = stack(1)
    assert activation_checkpointing(model.named_children(), "none") == ()
    assert activation_checkpointing([("layers.0", model[0])], "selective") == (
        "layers.0.norm1", "layers.0.attn.q_norm", "layers.0.norm2", "layers.0.mlp",
    )  # fmt: skip
    assert activation_checkpointing([("layers.0", stack(1)[0])], "full") == ("layers.0",)


def count(how: str) -> SavedBytes:
    model, x = stack(3, how=how), torch.randn(2, 8, 32, requires_grad=True)
    with count_saved(model, model.named_children()) as k:
        y = model(x)
    report = k.report()
    del y
    return report


def test_saved_tensors_of_full_and_selective():
    each = 2 * 8 * 32 * 4
    # The first block's input is the caller's.
    assert count("full").by_block == {"0": each, "1": each}
    assert count("full").total < count("selective").total < 0.75 * count("none").total


@pytest.mark.parametrize("how", HOW)
def test_retained_graph_runs_backward_again(how):
    model = stack(how=how)
    x = torch.randn(2, 8, 32, requires_grad=True)
    loss = model(x).square().sum()
    loss.backward(retain_graph=True)
    once = [p.grad.clone() for p in model.parameters()]
    loss.backward()
    assert all(torch.equal(p.grad, 2 * g) for p, g in zip(model.parameters(), once, strict=True))


@pytest.mark.parametrize("how", HOW)
def test_keywords_copies_pickles_and_evaluation(how):
    model, plain = stack(how=how), stack()
    x, shift = torch.randn(2, 8, 32), torch.randn(32)
    assert torch.equal(model[0](x, shift=shift), plain[0](x, shift))
    twins = [copy.deepcopy(model), pickle.loads(pickle.dumps(model))]
    for twin in twins:
        assert [type(m) for m in twin.modules()] == [type(m) for m in model.modules()]
        assert same(step(twin), step(plain))
        plain.zero_grad()
    assert isinstance(model[0], Block) and list(model.state_dict()) == list(plain.state_dict())
    with count_saved(model) as k:
        y = model.eval()(x.requires_grad_())
    with count_saved(plain) as k2:
        z = plain.eval()(x)
    assert k.report().total == k2.report().total and torch.equal(y, z)


@pytest.mark.parametrize("how", HOW)
def test_compiled_blocks_recompute_in_graph(how):
    import torch._dynamo

    model, expected = stack(how=how), step(stack())
    for block in model:
        block.forward = torch.compile(block.forward, backend="aot_eager", fullgraph=True)
    found = step(model)
    assert all(torch.allclose(found[name], expected[name], atol=1e-5) for name in expected)
    torch._dynamo.reset()


def test_invalid_blocks_are_rejected():
    with pytest.raises(ValueError, match="one of none, selective, full; found 'some'"):
        activation_checkpointing(stack().named_children(), "some")
    with pytest.raises(ValueError, match="no blocks at all"):
        activation_checkpointing([], "full")
    with pytest.raises(ValueError, match="already"):
        activation_checkpointing(stack(how="selective").named_children(), "full")
    with pytest.raises(ValueError, match="no MLP next to its attention.*norm1"):
        block = Block()
        del block.mlp
        activation_checkpointing([("0", block)], "selective")
    block = stack(1, how="full")[0]
    block._plain.forward = Block.forward
    for name in ("past_key_values", "cache"):  # transformers 5.24 has another word
        with pytest.raises(RuntimeError, match="use_cache=False"):
            block(torch.ones(1, 2, 32), **{name: object()})


# --- the described families, in FP8 -----------------------------------------------------------------------------------


def vision_model():
    """InternVL, whose images have one size and need no grid."""
    torch.manual_seed(0)
    model = models.random_model(models.tiny_config("internvl"), "cpu", torch.float32)
    described = models.describe(model)
    image = dummy_image_inputs(model, described)
    ids = torch.arange(8, 24).reshape(1, -1)
    ids[0, 2] = model.config.image_token_id  # the dummy image is one token
    image["pixel_values"] = torch.randn(image["pixel_values"].shape)
    return model, described, {"input_ids": ids, "labels": ids.clone(), **image}


def family_step(family: str, how: str, policy: fp8.Policy) -> tuple[Tensor, dict[str, Tensor], fp8.GemmCounts]:
    model, described, inputs = vision_model() if family == "internvl" else make_model(family)
    plan = fp8.plan(model, policy, described.components)
    fp8.apply(model, plan)
    activation_checkpointing(described.layers(model), how)
    with fp8.count_gemms() as counts:
        loss = model.train()(**inputs, use_cache=False).loss
        loss.backward()
    vision = {"image_encoder": 1, "image_projector": 1} if described.has_vision else {}
    Proof(plan).observe(counts, {"foundation": 1, **vision})
    return loss.detach(), {n: p.grad for n, p in model.named_parameters() if p.grad is not None}, counts


POLICIES = {"separate": {"fuse": "off"}, "fused": {"fuse": "on"}, "saved": {"fuse": "on", "activations": "fp8"}}


# Every policy with a decoder and images; of the other families each under one, in turn.
ALL_OF = ("qwen3_vl",)
# Of other families the runs of tests/train/test_seeing.py say it: their images are no rows of patches.
DRAWN_FROM = [*MANY, "qwen3_5", "glm4v", "llavaonevision1_5"]
DRAWN = [(f, p) for i, f in enumerate(DRAWN_FROM) for j, p in enumerate(POLICIES) if f in ALL_OF or i % 3 == j]


@pytest.mark.parametrize(("family", "policy"), DRAWN)
def test_fp8_families_have_equal_steps_and_pass_proof(family, policy):
    # what is recomputed: a projector is no block
    blocks = {"image_projector": "off"} if family in trained_families("images") else {}
    policy = fp8.Policy("blockwise", components=blocks, **POLICIES[policy])
    loss, grads, counts = family_step(family, "none", policy)
    assert counts.total("recompute") == 0
    for how in HOW:
        again, own, counted = family_step(family, how, policy)
        assert torch.equal(loss, again)
        assert grads.keys() == own.keys() and all(torch.equal(grads[n], own[n]) for n in grads)
        for gemm in ("fwd", "dgrad", "wgrad"):
            assert counted.total(gemm) == counts.total(gemm)
        fwd, once_more = counted.total("fwd", fp8=True), counted.total("recompute", fp8=True)
        assert once_more == fwd if how == "full" else 0 < once_more < fwd


def sharded(world) -> list[list[float]]:
    from octavo import parallel

    def losses(how: str | None) -> list[float]:
        torch.manual_seed(0)
        model = models.random_model(models.tiny_config("qwen3"), "cpu", torch.float32)
        described = models.describe(model)
        fp8.apply(model, fp8.plan(model, "blockwise", components=described.components))
        if how is not None:
            activation_checkpointing(described.layers(model), how)
            parallel.shard(model, described, world)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05 if how is None else 0.05 / world.size)
        out = []
        for number in range(3):
            ids = torch.arange(8, 24).reshape(1, 16) + number
            loss = model(input_ids=ids, labels=ids, use_cache=False).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            out.append(float(loss.detach()))
        return out

    return [losses(how) for how in (None, "none", *HOW)]


@pytest.mark.long
def test_sharded_blocks_recompute_equally():
    for plain, split, *again in ranks.run(sharded, 2):
        assert split == pytest.approx(plain, rel=1e-5) and plain[0] > plain[-1]
        assert again == [split, split]


# --- the layer that the docstring speaks of ---------------------------------------------------------------------------


@pytest.mark.parametrize(("how", "kib"), [("selective", 62.1), ("full", 8.0)])
def test_bytes_per_token_of_the_stock_layer(how, kib, monkeypatch):
    monkeypatch.setattr(test_kept, "qwen3", lambda depth, config: _apply(qwen3(depth, config), how))
    with FakeTensorMode():
        rate = per_layer(test_kept.stock(4096, 12288, 32, 8, 128))
    assert rate / 1024 == pytest.approx(kib, abs=0.05)


def _apply(model: nn.Module, how: str) -> nn.Module:
    activation_checkpointing(model.layers.named_children(), how)
    return model


@pytest.mark.parametrize(("how", "share"), [("none", 0.0), ("selective", 0.52), ("full", 0.74)])
def test_share_of_recomputed_flops(how, share):
    # The proportions of 4096, 12288, 32 and 8 heads of 128.
    config = Qwen3Config(hidden_size=512, intermediate_size=1536, num_attention_heads=4, num_key_value_heads=1,
                         head_dim=128)  # fmt: skip
    config._attn_implementation = "sdpa"
    model = _apply(qwen3(1, config), how)
    y = model(torch.randn(1, 8, 512, requires_grad=True))
    with FlopCounterMode(display=False) as flops:
        y.sum().backward()
    forward = 2 * 8 * (3 * 512 * 1536 + 2 * 512 * 512 + 2 * 512 * 128)
    assert (flops.get_total_flops() - 2 * forward) / forward == pytest.approx(share, abs=0.005)
