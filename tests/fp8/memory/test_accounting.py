"""The accountant against bytes counted by hand."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import checkpoint

from octavo import fp8
from octavo.fp8.memory.accounting import SavedBytes, count_saved
from tests import ranks


class Run(nn.Module):
    """Calls a function as a module's forward."""

    def __init__(self, function, **children):
        super().__init__()
        self.function = function
        for name, child in children.items():
            self.add_module(name, child)

    def forward(self, *args, **kwargs):
        return self.function(self, *args, **kwargs)


def count(model: nn.Module, *args, blocks=(), **kwargs) -> SavedBytes:
    with count_saved(model, blocks) as k:
        out = model(*args, **kwargs)
    report = k.report()
    del out
    return report


def per_layer(keeps, tokens: tuple[int, int] = (128, 256)) -> float:
    """Bytes a token of one more layer: what does not grow with ``keeps(depth, tokens)`` in both falls out."""
    low, high = (keeps(2, n).total - keeps(1, n).total for n in tokens)
    return (high - low) / (tokens[1] - tokens[0])


def leaf(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.ones(shape, dtype=dtype).requires_grad_()


def test_linear_saves_its_input():
    report = count(nn.Linear(8, 16), leaf(4, 8))
    assert report.total == 0 and report.separate == {"input": 4 * 8 * 4, "output": 4 * 16 * 4}


def test_storage_belongs_to_deepest_module():
    def forward(self, x):
        return self.down(F.gelu(self.up(x))).sum()

    model = Run(forward, up=nn.Linear(8, 32), down=nn.Linear(32, 8))
    report = count(model, leaf(4, 8))
    assert report.by_module == {"up": 4 * 32 * 4, "": 4 * 32 * 4}  # gelu's input, and its output, which down keeps
    assert report.by_dtype == {torch.float32: report.total}
    assert {r.op for r in report.rows if not r.module and r.kind == "activation"} == {"aten.gelu.default"}


def test_views_and_repeated_saves_count_once():
    def forward(self, x):
        y = x * 2
        return (y[:2] * y[2:] * y[:2].t().t()).sum()

    # y; the first product, which the second factor's gradient needs
    assert count(Run(forward), leaf(4, 8)).total == 4 * 8 * 4 + 2 * 8 * 4


def test_view_counts_whole_storage():
    assert count(Run(lambda self, x: (x * 2)[:1].exp_().sum()), leaf(100, 8)).total == 100 * 8 * 4


def test_in_place_and_freed_storages_do_not_count():
    def forward(self, x):
        y = x * 3
        y.relu_()  # keeps its own result, in the same storage
        (y + 1).sum()  # gone
        return y.sum()

    assert count(Run(forward), leaf(4, 8)).total == 4 * 8 * 4


class Stashes(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.codes = x.to(torch.float8_e4m3fn)  # no hook on saved tensors sees these
        ctx.more = {"scale": [torch.ones(3), torch.tensor([1.0, 2.0])]}
        return x * 1

    @staticmethod
    def backward(ctx, dy):
        return dy * ctx.codes.to(dy.dtype)


def test_tensors_on_autograd_context_count():
    report = count(Run(lambda self, x: Stashes.apply(x).sum()), leaf(4, 8))
    assert report.by_dtype == {torch.float8_e4m3fn: 4 * 8, torch.float32: 3 * 4 + 2 * 4}


def test_attention_saves_output_and_log_sum_exp():
    def forward(self, q, k, v):
        return F.scaled_dot_product_attention(q * 1, k * 1, v * 1, is_causal=True).sum()

    q = [leaf(1, 2, 16, 64, dtype=torch.bfloat16) for _ in range(3)]
    report = count(Run(forward), *q)
    each = 2 * 16 * 64 * 2
    assert report.by_dtype == {torch.bfloat16: 4 * each, torch.float32: 2 * 16 * 4}


def test_checkpointed_region_saves_its_arguments():
    block = nn.Sequential(nn.Linear(8, 64), nn.GELU(), nn.Linear(64, 8))

    def forward(self, x):
        return checkpoint(self.block, checkpoint(self.block, x * 2, use_reentrant=False), use_reentrant=False).sum()

    model = Run(forward, block=block)
    assert count(model, leaf(4, 8)).total == 2 * 4 * 8 * 4
    assert count(Run(lambda self, x: self.block(x * 2).sum(), block=block), leaf(4, 8)).total > 2 * 4 * 8 * 4


def test_weights_buffers_gradients_and_cached_codes_do_not_count():
    def forward(self, x):
        self.seen = (self.seen + 1).detach()
        return self.a(x).sum()

    model = Run(forward, a=nn.Linear(128, 256, bias=False))
    model.register_buffer("seen", torch.zeros(1000))
    fp8.apply(model, fp8.plan(model, "blockwise"))
    report = count(model, leaf(128, 128))
    assert fp8.weight_cache_bytes(model) > 128 * 256
    # x in wgrad layout: a byte an element and one fp32 scale per block
    assert report.by_dtype == {torch.float8_e4m3fn: 128 * 128, torch.float32: 4}


@pytest.mark.long
def test_positions_and_masks_are_separate():
    def decoder(self, x):
        angles = torch.arange(x.shape[0], dtype=torch.float32)[:, None] * torch.ones(8)
        mask, cos = torch.ones(x.shape[0], 1, dtype=torch.bool).tril(), angles.cos()
        for block in self.blocks:
            x = block(x, attention_mask=mask, position_embeddings=(cos, angles))
        return x.sum()

    def block(self, x, attention_mask, position_embeddings):
        cos, _ = position_embeddings
        return (x * cos).masked_fill(~attention_mask, 0.0)

    def model(depth: int) -> Run:
        return Run(decoder, blocks=nn.ModuleList(Run(block) for _ in range(depth)))

    def report(depth: int, tokens: int = 4) -> SavedBytes:
        made = model(depth)
        return count(made, leaf(tokens, 8), blocks=list(made.blocks.named_children()))

    # cos is saved and angles died with the forward; the mask's inverse is made in the block and counts there
    assert report(2).separate == {"position": 4 * 8 * 4, "output": 4}
    assert report(2).by_block.keys() == {"0", "1"}
    one, two = report(1), report(2)
    assert two.total - one.total == 4 and two.by_dtype[torch.bool] - one.by_dtype[torch.bool] == 4
    assert per_layer(report, tokens=(4, 8)) == 1 and two.separate == one.separate


def test_report_shows_current_then_final_state():
    x = leaf(4, 8)
    with count_saved(nn.Identity()) as k:
        y = (x * 2).exp()
        assert k.report().total == 4 * 8 * 4
        z = y.exp()
    assert k.report().total == 2 * 4 * 8 * 4
    del y, z
    assert k.report().total == 2 * 4 * 8 * 4


def test_counting_has_no_side_effects():
    model = nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 8))
    x = leaf(4, 8)
    model(x).sum().backward()
    plain, x.grad = x.grad, None
    before = (len(nn.modules.module._global_forward_pre_hooks), len(nn.modules.module._global_forward_hooks))
    with count_saved(model) as k:
        loss = model(x).sum()
    refs = [seen.storage for seen in k._storages.values() if seen.created]
    loss.backward()
    assert torch.equal(x.grad, plain)
    del loss
    assert refs and all(ref.expired() for ref in refs)
    with pytest.raises(ZeroDivisionError), count_saved(model):
        model(x)
        raise ZeroDivisionError
    after = (len(nn.modules.module._global_forward_pre_hooks), len(nn.modules.module._global_forward_hooks))
    assert before == after


def test_results_without_backward_are_freed():
    """A node that keeps its own result would otherwise keep itself: 5 GB beside a forward of a model of 1 B."""
    x, made = leaf(4, 8), []

    def forward(self, x):
        made.append(torch.multiprocessing.reductions.StorageWeakRef((y := x.exp().sigmoid()).untyped_storage()))
        return y.sum()

    with count_saved(Run(forward)) as k:
        out = k.model(x)
    assert k.report().total == 2 * 4 * 8 * 4
    del out
    assert made[0].expired()


def test_unsupported_layout_is_rejected():
    with pytest.raises(TypeError, match="sparse_csr"), count_saved(nn.Identity()):
        torch.ones(4, 4).to_sparse_csr()


def test_sparse_tensors_count_their_indices_and_values():
    with count_saved(nn.Identity()) as k:
        held = (torch.ones(4, 4) * 2).to_sparse()
    assert k.report().total == 16 * 4 + 2 * 16 * 8 and held.layout is torch.sparse_coo


def test_host_memory_of_device_model_is_separate():
    model = nn.Linear(8, 16, device="meta")
    with count_saved(model) as k:
        there, here = torch.ones(4, 8) * 2, torch.ones(4, 8, device="meta") * 2
    assert k.report().separate == {"host": 4 * 8 * 4} and k.report().total == 4 * 8 * 4 and there.shape == here.shape


def test_gathered_buffers_are_separate():
    import torch.distributed.fsdp  # its operations

    with count_saved(nn.Identity()) as k:
        whole, parts = torch.ones(8, 4), [torch.empty(8, 1), torch.empty(8, 3)]
        torch.ops.fsdp.split_with_sizes_copy(whole, [1, 3], 1, out=parts)
    assert k.report().separate == {"gathered": 2 * 8 * 4 * 4} and k.report().total == 0


# --- the layer that the issue speaks of, as transformers ships it -----------------------------------------------------


def qwen3(depth: int, config) -> nn.Module:
    from transformers.models.qwen3.modeling_qwen3 import Qwen3DecoderLayer, Qwen3RotaryEmbedding

    def forward(self, x):
        where = self.rotary(x, torch.arange(x.shape[1])[None])
        for layer in self.layers:
            x = layer(x, position_embeddings=where)
        return x

    layers = nn.ModuleList(Qwen3DecoderLayer(config, i) for i in range(depth))
    return Run(forward, rotary=Qwen3RotaryEmbedding(config), layers=layers)


def stock(hidden: int, intermediate: int, heads: int, kv: int, head: int):
    from transformers import Qwen3Config

    config = Qwen3Config(hidden_size=hidden, intermediate_size=intermediate, num_attention_heads=heads,
                         num_key_value_heads=kv, head_dim=head)  # fmt: skip
    config._attn_implementation = "sdpa"

    def keeps(depth: int, tokens: int) -> SavedBytes:
        torch.set_default_dtype(torch.bfloat16)
        try:
            model = qwen3(depth, config)
        finally:
            torch.set_default_dtype(torch.float32)
        x = leaf(1, tokens, hidden, dtype=torch.bfloat16)
        return count(model, x, blocks=list(model.layers.named_children()))

    return keeps


def test_stock_decoder_layer_saves_211_kib_per_token():
    with FakeTensorMode():
        keeps = stock(4096, 12288, 32, 8, 128)
        one, two = keeps(1, 128), keeps(2, 128)
        assert per_layer(keeps) / 1024 == pytest.approx(210.3, abs=0.05)
    assert two.by_module["layers.1.mlp.gate_proj"] == 128 * 12288 * 2
    assert one.separate == two.separate, "cos and sin are made once, whatever the depth"
    assert str(two).splitlines()[0] == f"{two.total:>16,}  bytes saved"


def test_fake_tensors_count_as_real_ones():
    keeps = stock(64, 128, 4, 2, 16)
    real = keeps(2, 8)
    with FakeTensorMode():
        assert keeps(2, 8) == real
    assert real.total > 0


# --- sharded ----------------------------------------------------------------------------------------------------------


def sharded(world) -> list:
    from torch.distributed.fsdp import fully_shard

    def model() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(3)))

    plain = count(model(), leaf(4, 64))
    split = model()
    for block in split:
        fully_shard(block, reshard_after_forward=False)  # whole weights outlive the forward
    fully_shard(split)
    runs = (plain, count(split, leaf(4, 64)), count(split, leaf(4, 64)))
    return [sorted([r.module, r.kind, r.bytes] for r in k.rows if r.kind not in ("gathered", "input")) for k in runs]


@pytest.mark.long
def test_gathered_weights_do_not_count():
    for plain, first, again in ranks.run(sharded, 2):
        assert plain == first == again
