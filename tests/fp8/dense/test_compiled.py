"""FP8 layers under torch.compile: one graph with the numbers of eager mode."""

import copy

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd
from torch.nn.functional import silu
from torch.utils.checkpoint import checkpoint

from octavo import fp8
from octavo.fp8.dense import delayed
from octavo.fp8.dense.gemms import LayerGemms, select_backends
from octavo.fp8.metrics import calc_diff
from tests import ranks

CPU = torch.device("cpu")
RECIPES = ("blockwise", "rowwise", "tensorwise", "mxfp8")


pytestmark = pytest.mark.usefixtures("fresh_dynamo")


class Recorder:
    """A backend that runs graphs unchanged and records the forwards and backwards of joint graphs."""

    def __init__(self) -> None:
        from functorch.compile import make_boxed_func, min_cut_rematerialization_partition

        self.forwards: list[torch.fx.GraphModule] = []
        self.backwards: list[torch.fx.GraphModule] = []

        def keep(graphs: list) -> object:
            return lambda graph, inputs: graphs.append(graph) or make_boxed_func(graph.forward)

        self.backend = aot_autograd(
            fw_compiler=keep(self.forwards),
            bw_compiler=keep(self.backwards),
            partition_fn=min_cut_rematerialization_partition,
        )

    @staticmethod
    def ops(graph: torch.fx.GraphModule) -> list[str]:
        names = [str(node.target) for node in graph.graph.nodes if node.op == "call_function"]
        return [name.split(".")[1] for name in names if name.startswith("octavo.")]


def convert(model: nn.Module, recipe: str | fp8.Recipe, backend: str = "auto") -> nn.Module:
    chosen = recipe if isinstance(recipe, fp8.Recipe) else fp8.recipe(recipe)
    for name, module in list(model.named_modules()):
        if type(module) is nn.Linear:
            delayed.convert(module, LayerGemms(name, chosen, select_backends(chosen, CPU, backend)))
    return model


class Block(nn.Module):
    """q, k, v of one input; gate and up of another; norms and residuals between."""

    def __init__(self, width: int = 32, bias: bool = True) -> None:
        super().__init__()
        self.norm, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.q, self.k, self.v = (nn.Linear(width, width, bias=bias) for _ in range(3))
        self.gate, self.up = nn.Linear(width, 48, bias=bias), nn.Linear(width, 48, bias=bias)
        self.down = nn.Linear(48, width, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        x = x + self.q(h) * self.k(h).sigmoid() + self.v(h)
        h = self.norm2(x)
        return x + self.down(silu(self.gate(h)) * self.up(h))


def block(recipe: str | fp8.Recipe = "blockwise", **options: object) -> nn.Module:
    torch.manual_seed(0)
    return convert(Block(**options), recipe)  # type: ignore[arg-type]


class TwoLayers(nn.Module):
    """A graph of two layers, for tests that need no complete block."""

    def __init__(self, number: int = 0) -> None:
        super().__init__()
        self.number = number
        self.q, self.out = nn.Linear(32, 24), nn.Linear(24, 32)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(silu(self.q(x)))


def two_layers(recipe: str = "blockwise", number: int = 0) -> nn.Module:
    torch.manual_seed(number)
    return convert(TwoLayers(number), recipe)


def results(model: nn.Module, run: object, x: Tensor, dy: Tensor | None = None) -> list[Tensor]:
    """Return y, dx and all gradients of a forward and backward."""
    x = x.detach().clone().requires_grad_()
    model.zero_grad(set_to_none=True)
    y = run(x)  # type: ignore[operator]
    y.backward(torch.linspace(-1, 1, y.numel(), dtype=y.dtype).view_as(y) if dy is None else dy)
    return [y.detach(), x.grad, *(p.grad for p in model.parameters() if p.requires_grad)]


def assert_same(
    model: nn.Module, x: Tensor, run: object = None, close: bool = False, **options: object
) -> list[Tensor]:
    """Compiled and eager results are equal bit for bit, or up to the order of Inductor's sums."""
    run = run or model
    settings = {"backend": "aot_eager", "fullgraph": True, **options}
    want = results(model, run, x)
    got = results(model, torch.compile(run, **settings), x)  # type: ignore[call-overload]
    assert len(want) == len(got)
    for i, (a, b) in enumerate(zip(want, got, strict=True)):
        assert a.dtype == b.dtype and a.shape == b.shape
        if close:
            assert calc_diff(a, b) < 1e-6, i
        else:
            assert torch.equal(a, b), i
    return got


# --- the same numbers -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["blockwise", "mxfp8"])  # each recipe's layers: test_no_token_count_is_specialized
def test_a_block_is_one_graph_equals_eager_bit_for_bit_and_shares_casts(name):
    """Projections with a common input share its cast and save its codes once."""
    recorder = Recorder()
    assert_same(block(name), torch.randn(3, 7, 32), backend=recorder.backend)
    (forward,), (backward,) = recorder.forwards, recorder.backwards
    # The inputs of q, k and v, of gate and up, and of down: three casts for six layers.
    assert Recorder.ops(forward).count("cast") == 3 and Recorder.ops(forward).count("linear") == 6
    assert Recorder.ops(backward).count("cast") == 6  # dy of each layer, row and column in one
    saved = [n.meta["val"] for n in backward.graph.find_nodes(op="placeholder")]
    codes = [t for t in saved if isinstance(t, Tensor) and t.dtype is torch.uint8 and t.dim() == 2]
    assert len(codes) == 3


@pytest.mark.parametrize(
    "recipe",
    [
        fp8.recipe("rowwise", format="hybrid", fwd="bf16"),
        fp8.recipe("tensorwise", format="e4m3", dgrad="bf16"),
        fp8.recipe("mxfp8", wgrad="bf16"),
        fp8.recipe("blockwise", fwd="bf16", dgrad="bf16"),
    ],
    ids=str,
)
def test_formats_and_gemms_in_high_precision(recipe):
    assert_same(convert(nn.Sequential(nn.Linear(32, 24), nn.Linear(24, 40)), recipe), torch.randn(5, 32))


@pytest.mark.parametrize(
    ("shape", "name"),
    [
        *((shape, "blockwise") for shape in ((32,), (1, 32), (0, 32), (2, 1, 3, 32))),
        *(((0, 32), name) for name in ("tensorwise", "mxfp8")),
    ],
    ids=str,
)
def test_shapes(name, shape):
    assert_same(convert(nn.Sequential(nn.Linear(32, 24, bias=len(shape) > 1)), name), torch.randn(shape))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_models(dtype):
    assert_same(convert(nn.Sequential(nn.Linear(32, 24)), "blockwise").to(dtype), torch.randn(9, 32, dtype=dtype))


def test_autocast():
    model = two_layers()

    def run(x: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return model(x)

    assert model.q(torch.randn(2, 32)).dtype == torch.float32
    assert_same(model, torch.randn(9, 32), run)
    with torch.autocast("cpu", dtype=torch.bfloat16):  # and entered outside of the graph
        assert torch.equal(torch.compile(model, backend="aot_eager", fullgraph=True)(x := torch.randn(9, 32)), model(x))


def test_frozen_weight_runs_no_wgrad_and_saves_no_x():
    model = block()
    for name in ("q", "gate"):
        getattr(model, name).requires_grad_(False)
    assert_same(model, torch.randn(9, 32))
    model = two_layers()
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    recorder = Recorder()
    torch.compile(model, backend=recorder.backend, fullgraph=True)(
        torch.randn(9, 32, requires_grad=True)
    ).sum().backward()
    (backward,) = recorder.backwards
    assert "wgrad" not in Recorder.ops(backward) and Recorder.ops(backward).count("dgrad") == 2
    saved = [n.meta["val"] for n in backward.graph.find_nodes(op="placeholder")]
    assert not [t for t in saved if isinstance(t, Tensor) and t.dtype is torch.uint8]
    assert_no_casts_for_wgrad(recorder.forwards[0], 2)


def assert_no_casts_for_wgrad(graph, count):
    """Codes that the backward does not need are not computed."""
    casts = [n for n in graph.graph.nodes if str(n.target).startswith("octavo.cast")]
    assert len(casts) == count and all(n.args[1] and not n.args[2] for n in casts)


def test_input_without_gradient_runs_no_dgrad():
    model, recorder = convert(nn.Sequential(nn.Linear(32, 24)), "rowwise"), Recorder()
    torch.compile(model, backend=recorder.backend, fullgraph=True)(torch.randn(9, 32)).sum().backward()
    assert Recorder.ops(recorder.backwards[0]) == ["cast", "wgrad"]


def test_nothing_is_saved_without_gradients():
    model = block()
    x = torch.randn(9, 32)
    with torch.no_grad():
        recorded = []

        def keep(graph, inputs):
            recorded.append(graph)
            return graph

        assert torch.equal(torch.compile(model, backend=keep, fullgraph=True)(x), model(x))
    assert_no_casts_for_wgrad(recorded[0], 6)  # one a layer, as long as nobody joins them


def test_activation_checkpointing_inside_the_graph():
    model = two_layers("rowwise")
    assert_same(model, torch.randn(9, 32), lambda x: checkpoint(model, x, use_reentrant=False))


def test_activation_checkpointing_around_the_graph():
    model, x = two_layers(), torch.randn(9, 32)
    compiled = torch.compile(model.forward, backend="aot_eager", fullgraph=True)
    want = results(model, model, x)
    got = results(model, lambda t: checkpoint(compiled, t, use_reentrant=False), x)
    assert all(torch.equal(a, b) for a, b in zip(want, got, strict=True))


def test_output_may_be_modified_in_place():
    model = convert(nn.Sequential(nn.Linear(32, 24)), "blockwise")

    def run(x: Tensor) -> Tensor:
        y = model(x.unsqueeze(0))
        y += 1
        return y.relu_()

    assert_same(model, torch.randn(9, 32), run)


def test_functional_linear_is_traced():
    model = nn.Linear(32, 24)
    for recipe in ("blockwise", fp8.recipe("rowwise", wgrad="bf16")):
        torch._dynamo.reset()
        assert_same(model, torch.randn(4, 32), lambda x, r=recipe: fp8.linear(x, model.weight, model.bias, recipe=r))


def test_different_recipe_compiles_another_graph():
    """Layers of equal shapes and different recipes must not share compiled code."""
    x, created = torch.randn(9, 32), [two_layers(name) for name in ("blockwise", "tensorwise")]
    for model in created:
        assert torch.equal(torch.compile(model.forward, backend="aot_eager", fullgraph=True)(x), model(x))
    assert not torch.equal(created[0](x), created[1](x))


# --- casts and graphs are shared --------------------------------------------------------------------------------------


def test_blocks_and_numbers_of_tokens_share_one_graph():
    blocks = [two_layers(number=number) for number in range(3)]
    recorder = Recorder()
    run = [torch.compile(b.forward, backend=recorder.backend, fullgraph=True, dynamic=True) for b in blocks]
    for tokens in (5, 130, 33):
        x = h = torch.randn(tokens, 32)
        h.requires_grad_()
        for compiled in run:
            h = compiled(h)
        h.sum().backward()
        want = x.detach()
        for b in blocks:
            want = b(want)
        assert torch.equal(h, want)
    assert len(recorder.forwards) == len(recorder.backwards) == 1


@pytest.mark.parametrize("name", RECIPES)
def test_no_token_count_is_specialized(name):
    model, recorder = convert(nn.Sequential(nn.Linear(40, 24)), name), Recorder()
    compiled = torch.compile(model, backend=recorder.backend, fullgraph=True, dynamic=True)
    for tokens in (2, 3, 32, 128, 129, 300):
        x = torch.randn(tokens, 40)
        assert all(
            torch.equal(a, b) for a, b in zip(results(model, model, x), results(model, compiled, x), strict=True)
        )
    assert len(recorder.forwards) == 1


# --- weights ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["blockwise", "rowwise"])
def test_weights_are_cast_once_per_step(name):
    model = two_layers(name)
    eager = copy.deepcopy(model)
    optimizers = [torch.optim.AdamW(m.parameters(), lr=0.1, fused=True) for m in (model, eager)]
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    per_step = 1 if name == "blockwise" else 2  # rowwise casts a weight for dgrad anew
    for step in range(1, 4):
        for optimizer in optimizers:
            optimizer.zero_grad()
        for micro in range(3):
            x = torch.randn(6, 32, generator=torch.Generator().manual_seed(10 * step + micro))
            a, b = compiled(x), eager(x)
            assert torch.equal(a, b), (step, micro)
            a.square().mean().backward()
            b.square().mean().backward()
        for optimizer in optimizers:
            optimizer.step()
        assert model.out._site.codes.casts == per_step * step
    for p, q in zip(model.parameters(), eager.parameters(), strict=True):
        assert torch.equal(p, q)


def test_undetected_write_needs_invalidate():
    model, x = convert(nn.Sequential(nn.Linear(32, 24)), "blockwise"), torch.randn(4, 32)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    before = compiled(x)
    model[0].weight.data.mul_(2)
    fp8.invalidate(model)
    assert torch.equal(compiled(x), model(x)) and not torch.equal(before, model(x))


def sharded(world: object, recipe: str, recompute: bool) -> list[tuple[list[float], list[object]]]:
    """Losses of three steps of two micro-batches under FSDP2, eager and compiled, and the GEMMs that were counted."""
    from torch.distributed.fsdp import fully_shard

    results: list[tuple[list[float], list[object]]] = []
    for compiled in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(*[convert(Block(), recipe) for _ in range(2)])
        for part in (*model, model):
            fully_shard(part)
        run = []
        for part in model:
            if compiled:
                part.forward = torch.compile(part.forward, backend="aot_eager", fullgraph=True)  # hooks stay outside
            run.append(lambda x, part=part: checkpoint(part, x, use_reentrant=False) if recompute else part(x))
        optimizer, recorded = torch.optim.AdamW(model.parameters(), lr=0.05, fused=True), []
        with fp8.count_gemms() as counts:
            for _ in range(6):
                x = torch.randn(4, 32)[world.rank :: 2]  # type: ignore[attr-defined]
                loss = run[1](run[0](x)).square().mean()
                loss.backward()
                recorded.append(loss.item())
                if len(recorded) % 2 == 0:
                    optimizer.step()
                    optimizer.zero_grad()
        results.append((recorded, sorted([*key, calls] for key, calls in counts.items())))
    return results


@pytest.mark.long
@pytest.mark.parametrize("recompute", [False, True])
def test_sharded_blocks_compile(recompute):
    for eager, compiled in ranks.run(sharded, 2, "rowwise", recompute):
        assert eager == compiled and len(set(eager[0])) == 6 and len(eager[1]) >= 3


# --- what stays outside -----------------------------------------------------------------------------------------------


def test_delayed_scaling_breaks_graph_with_reason():
    model = convert(nn.Sequential(nn.LayerNorm(32), nn.Linear(32, 24), nn.ReLU()), "delayed")
    x = torch.randn(4, 32)
    with pytest.raises(Exception, match="delayed scaling writes amax histories"):
        torch.compile(model, backend="aot_eager", fullgraph=True)(x)
    torch._dynamo.reset()
    twin = copy.deepcopy(model)
    compiled = torch.compile(model, backend="aot_eager")
    for scale in (1.0, 0.5, 4.0):
        assert torch.equal(compiled(x * scale), twin(x * scale))
    states = (fp8.scaling_state(model), fp8.scaling_state(twin))
    assert all(torch.equal(states[0][n], states[1][n]) for n in states[0])


def test_counting_sees_eager_steps():
    model, x = two_layers(), torch.randn(4, 32)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    compiled(x)
    with fp8.count_gemms() as counts, torch.compiler.set_stance("force_eager"):
        compiled(x)
    assert counts.total("fwd") == 2


def test_high_precision_is_compiled():
    model, x = two_layers(), torch.randn(4, 32)
    compiled = torch.compile(model.forward, backend="aot_eager", fullgraph=True)
    low = compiled(x)
    with fp8.high_precision(model):
        high = compiled(x)
        assert torch.equal(high, model(x)) and not torch.equal(high, low)
    assert torch.equal(compiled(x), low)


# --- Inductor ---------------------------------------------------------------------------------------------------------


@pytest.mark.long
def test_inductor_computes_the_same_and_generates_nothing_in_fp8():
    """Two recipes: operators are opaque to Inductor, and a minute of the C++ compiler went into blocks of all four."""
    from torch._inductor.utils import run_and_get_code

    model = nn.Sequential(*(block(name) for name in ("blockwise", "mxfp8")))
    x = torch.randn(9, 32)
    want = results(model, model, x)
    compiled = torch.compile(model, fullgraph=True, dynamic=True)
    got, code = run_and_get_code(lambda: results(model, compiled, x))
    for a, b in zip(want, got, strict=True):
        assert calc_diff(a, b) < 1e-6
    assert any("octavo.linear" in text for text in code) and any("octavo.wgrad" in text for text in code)
    assert not [text for text in code if "float8" in text or "f8e4m3" in text or "f8e5m2" in text]


# --- real blocks ------------------------------------------------------------------------------------------------------


def qwen3_layer() -> tuple[nn.Module, object]:
    from transformers import Qwen3Config
    from transformers.models.qwen3.modeling_qwen3 import Qwen3DecoderLayer, Qwen3RotaryEmbedding

    config = Qwen3Config(
        hidden_size=32, intermediate_size=48, num_attention_heads=4, num_key_value_heads=2, head_dim=8, vocab_size=8
    )
    config._attn_implementation = "sdpa"
    torch.manual_seed(0)
    layer, positions = Qwen3DecoderLayer(config, 0), torch.arange(10)[None]
    rotary = Qwen3RotaryEmbedding(config)(torch.zeros(1, 10, 32), positions)
    return layer, lambda run, x: run(x, position_embeddings=rotary, position_ids=positions, use_cache=False)


def vision_block() -> tuple[nn.Module, object]:
    """With attention that takes the images' bounds as a tensor, as flash attention does: the stock fallback reads them
    into Python, which no full graph can."""
    from transformers import AttentionInterface
    from transformers.models.qwen3_vl.configuration_qwen3_vl import Qwen3VLVisionConfig
    from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLVisionBlock

    def attention(module, query, key, value, attention_mask, cu_seq_lens_q=None, scaling=None, **kwargs):
        image = torch.searchsorted(cu_seq_lens_q[1:], torch.arange(query.shape[2]), right=True)
        mask = image[:, None] == image[None]
        y = torch.nn.functional.scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=scaling)
        return y.transpose(1, 2), None

    AttentionInterface.register("flash_attention_by_mask", attention)
    config = Qwen3VLVisionConfig(hidden_size=32, intermediate_size=48, num_heads=4, depth=1)
    config._attn_implementation = "flash_attention_by_mask"
    torch.manual_seed(0)
    created = Qwen3VLVisionBlock(config)
    rotary = (torch.randn(24, 8), torch.randn(24, 8))
    bounds = torch.tensor([0, 16, 24], dtype=torch.int32)
    return created, lambda run, x: run(x, cu_seqlens=bounds, position_embeddings=rotary, max_seqlen=16)


@pytest.mark.parametrize(
    ("make", "name"),
    [
        (qwen3_layer, "rowwise"),
        pytest.param(vision_block, "blockwise", marks=pytest.mark.long),
        pytest.param(qwen3_layer, "mxfp8", marks=pytest.mark.long),
        pytest.param(vision_block, "tensorwise", marks=pytest.mark.long),
    ],
)
def test_blocks_of_transformers(make, name):
    model, call = make()
    convert(model, name)
    x = torch.randn(24, 32) if make is vision_block else torch.randn(2, 10, 32)
    want = results(model, lambda t: call(model, t), x)
    compiled = torch.compile(model.forward, backend="aot_eager", fullgraph=True)
    got = results(model, lambda t: call(compiled, t), x)
    for a, b in zip(want, got, strict=True):
        assert torch.equal(a, b)


def test_thawed_layer_compiles_to_one_graph():
    model = nn.Sequential(nn.Linear(128, 128))
    model[0].weight = fp8.freeze_weight(model[0].weight.detach(), "block")
    fp8.apply(model, fp8.plan(model, "blockwise"))
    fp8.dequantize_weights(model)
    x = torch.randn(4, 128)
    assert torch.equal(torch.compile(model, backend="eager", fullgraph=True)(x), model(x))
