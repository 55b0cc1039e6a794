"""The registered operators, compared with their fake implementations."""

import copy
import gc
import pickle

import pytest
import torch
from torch import Tensor

from octavo import fp8
from octavo.fp8.arithmetic.cast import CastSpec, Quantized, quantize, scale_fp32
from octavo.fp8.dense import graph_arguments
from octavo.fp8.dense.gemms import LayerGemms, select_backends
from octavo.fp8.kernels import layout, registry
from octavo.fp8.weights import cache as weights
from tests.fp8.kernels.laid_out import laid_out

CPU = torch.device("cpu")
RECIPES = ("blockwise", "rowwise", "tensorwise", "mxfp8")
SPECS = [
    CastSpec("e4m3", block, scale)
    for block, scale in [
        ((1, 128), "pow2"), ((128, 1), "pow2"), ((128, 128), "pow2"), ((1, -1), "pow2"), ((-1, 1), "pow2"),
        ((-1, -1), "fp32"), ((1, 32), "e8m0"), ((32, 1), "e8m0"), ((-1, 32), "fp32"),
    ]
]  # fmt: skip


def key_of(recipe: fp8.Recipe, backend: str = "auto") -> str:
    return LayerGemms("layer", recipe, select_backends(recipe, CPU, backend)).key


def named(name: str, **options: str) -> fp8.Recipe:
    return fp8.recipe(name, **options)


def operands(m: int, n: int, k: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(m + n + k)
    x, w, b = (torch.randn(*size, generator=generator, dtype=dtype) for size in ((m, k), (n, k), (n,)))
    return x, w, b


def equal_bits(a: Quantized, b: Quantized) -> bool:
    return torch.equal(a.data.view(torch.uint8), b.data.view(torch.uint8)) and torch.equal(scale_fp32(a), scale_fp32(b))


# --- packing ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("contract", [0, 1])
@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_pack_and_unpack_round_trip(spec, contract):
    for rows, cols in ((1, 1), (5, 40), (130, 257), (16, 128), (0, 24), (24, 0)):
        q = quantize(torch.randn(rows, cols, generator=torch.Generator().manual_seed(rows)), spec)
        codes, scale = graph_arguments.pack(q, contract)
        assert codes.dtype is torch.uint8 and codes.is_contiguous() and scale.is_contiguous() and scale.dim() == 1
        assert tuple(codes.shape) == layout.padded_sizes(rows, cols, spec, contract)
        again = graph_arguments.unpack(codes, scale, rows, cols, spec, contract)
        assert equal_bits(q, again)
        if min(rows, cols) > 1:  # what a GEMM then reads is a view: nothing is copied a second time
            operand = layout.k_major(again, contract)
            assert operand.codes.data_ptr() == codes.data_ptr()
            if spec.scale != "e8m0":
                assert operand.scale.data_ptr() == scale.data_ptr()


@pytest.mark.parametrize("contract", [0, 1])
@pytest.mark.parametrize("spec", [s for s in SPECS if s.scale != "e8m0"], ids=str)
def test_codes_in_layout_are_packed_without_copy(spec, contract):
    rows, cols = 33, 140
    plain = quantize(torch.randn(rows, cols), spec)
    right = laid_out(plain, contract)
    codes, packed = graph_arguments.pack(right, contract)
    assert codes.data_ptr() == right.data.data_ptr() and packed.data_ptr() == right.scale.data_ptr()
    assert equal_bits(plain, graph_arguments.unpack(codes, packed, rows, cols, spec, contract))


# --- the text that layers share ---------------------------------------------------------------------------------------


def test_key_has_only_backends_and_casts():
    a, b = (LayerGemms(name, named("blockwise"), select_backends(named("blockwise"), CPU)) for name in ("a", "b"))
    ran = f"reference@{layout.REVISION}"
    square, tall = "e4m3,1,128,pow2;e4m3,128,128,pow2", "e4m3,128,1,pow2;e4m3,128,128,pow2"
    assert a.key == b.key == f"{ran}:{square}|{ran}:{square}|{ran}:{tall}"
    parts = graph_arguments.parse_key(key_of(named("rowwise", dgrad="bf16", format="hybrid")))
    assert parts.dgrad == "" and parts.operand("dgrad", 0) == ""
    assert parts.operand("wgrad", 0) == f"{ran}:e5m2,-1,1,pow2"
    assert parts.operand("wgrad", 1) == f"{ran}:e4m3,-1,1,pow2"


@pytest.mark.parametrize("name", RECIPES)
def test_recipe_text_round_trip(name):
    for recipe in (named(name), named(name, wgrad="bf16"), named(name, fwd="bf16", dgrad="bf16")):
        assert graph_arguments.parse_casts(graph_arguments.format_casts(recipe)) == recipe


# --- what the compiler is told ----------------------------------------------------------------------------------------

CHECKS = ("test_schema", "test_faketensor", "test_autograd_registration")


@pytest.mark.parametrize("backend", ["reference", "triton"])
@pytest.mark.parametrize("name", RECIPES)
def test_fake_implementations_match_operators(name, backend):
    recipe = named(name)
    key, (m, n, k) = key_of(recipe, backend), (5, 24, 40)
    x, w, b = operands(m, n, k)
    parts = graph_arguments.parse_key(key)
    for row, col in ((0, 1), (0, None), (None, 1)):
        casts = ("" if row is None else parts.operand("fwd", 0), "" if col is None else parts.operand("wgrad", 1))
        torch.library.opcheck(torch.ops.octavo.cast, (x, *casts), test_utils=CHECKS)
    codes = torch.ops.octavo.cast(x, parts.operand("fwd", 0), parts.operand("wgrad", 1))
    w.requires_grad_()
    torch.library.opcheck(torch.ops.octavo.linear, (x, w, b, *codes, key, 0), test_utils=CHECKS)
    dy = torch.ops.octavo.cast(torch.randn(m, n), parts.operand("dgrad", 0), parts.operand("wgrad", 0))
    dtype = torch.bfloat16
    torch.library.opcheck(torch.ops.octavo.dgrad, (*dy[:2], w, m, dtype, key), test_utils=CHECKS)
    torch.library.opcheck(torch.ops.octavo.wgrad, (*dy[2:], *codes[2:], w, m, key), test_utils=CHECKS)


@pytest.mark.parametrize("name", RECIPES)
def test_gradient_under_aot_dispatch_with_dynamic_sizes(name):
    key = key_of(named(name))
    x, w, b = (t.requires_grad_() for t in operands(37, 24, 40))
    parts = graph_arguments.parse_key(key)
    codes = torch.ops.octavo.cast(x.detach(), parts.operand("fwd", 0), parts.operand("wgrad", 1))
    torch.library.opcheck(torch.ops.octavo.linear, (x, w, b, *codes, key, 0), test_utils=("test_aot_dispatch_dynamic",))


def test_outputs_never_share_memory():
    class OneCast(registry.Backend):
        name = "one_cast"

        def quantize(self, x, spec, contract=1):
            return quantize(x, spec)

        def quantize_both(self, x, row, col):
            q = quantize(x, row)
            return q, q  # the same codes for both, as a backend may for per-tensor scales

    registry._backends["one_cast"] = OneCast()
    try:
        out = torch.ops.octavo.cast(torch.randn(16, 16), "one_cast:e4m3,-1,-1,fp32", "one_cast:e4m3,-1,-1,fp32")
    finally:
        del registry._backends["one_cast"]
        graph_arguments.parse_operand.cache_clear()
    assert len({t.untyped_storage()._cdata for t in out}) == 4
    spec = CastSpec("e4m3", (-1, -1), "fp32")
    row, col = graph_arguments.unpack(*out[:2], 16, 16, spec, 1), graph_arguments.unpack(*out[2:], 16, 16, spec, 0)
    assert equal_bits(row, col)


def test_uncastable_tensor_is_rejected_while_tracing():
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode(), pytest.raises(fp8.CastError, match="float64"):
        torch.ops.octavo.cast(torch.randn(4, 4, dtype=torch.float64), "reference:e4m3,1,-1,pow2", "")


def test_second_derivative_is_rejected():
    key = key_of(named("rowwise"))
    x, w, _ = (t.requires_grad_() for t in operands(8, 16, 16))
    parts = graph_arguments.parse_key(key)
    codes = torch.ops.octavo.cast(x.detach(), parts.operand("fwd", 0), parts.operand("wgrad", 1))
    y = torch.ops.octavo.linear(x, w, None, *codes, key, 0)
    (dx,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="differentiated again"):
        dx.sum().backward()


# --- codes of weights -------------------------------------------------------------------------------------------------


def layer(name: str = "blockwise", n: int = 24, k: int = 40) -> fp8.Linear:
    created = torch.nn.Linear(k, n, bias=False)
    recipe = named(name)
    return fp8.Linear.convert(created, LayerGemms("layer", recipe, select_backends(recipe, CPU)))


def forward(module: fp8.Linear, weight: Tensor, x: Tensor) -> Tensor:
    key = module._site.key
    codes = torch.ops.octavo.cast(x, graph_arguments.parse_key(key).operand("fwd", 0), "")
    return torch.ops.octavo.linear(x, weight, None, *codes, key, 0)


def test_codes_are_found_by_weight_storage():
    module, x = layer(), torch.randn(4, 40)
    cache = module._site.codes
    for weight in (module.weight, module.weight.detach(), torch.nn.Parameter(module.weight, requires_grad=False)):
        forward(module, weight, x)
        assert weights.codes_of(weight) is cache
    assert cache.casts == 1
    with torch.no_grad():
        module.weight.mul_(2)
    assert torch.equal(forward(module, module.weight, x), module(x))
    assert cache.casts == 2


def test_part_of_weight_does_not_match_weight():
    torch.manual_seed(0)
    module, x = layer(), torch.randn(4, 40)
    full = forward(module, module.weight, x)
    part = forward(module, module.weight.detach()[:8], x)
    alone = forward(module, module.weight.detach()[:8].clone(), x)
    assert weights.codes_of(module.weight[:8]) is None and weights.codes_of(module.weight[8:]) is None
    assert torch.equal(part, alone) and module._site.codes.casts == 1
    torch.testing.assert_close(part, full[:, :8])  # other sums of a GEMM of 24 columns, at most


def test_copied_and_moved_layers_are_found():
    module = layer()
    twin = copy.deepcopy(module)
    assert weights.codes_of(twin.weight) is twin._site.codes is not module._site.codes
    loaded = pickle.loads(pickle.dumps(module))
    assert weights.codes_of(loaded.weight) is loaded._site.codes
    module.to(torch.bfloat16)
    assert weights.codes_of(module.weight) is module._site.codes
    module.weight = torch.nn.Parameter(torch.randn(24, 40))
    assert weights.codes_of(module.weight) is module._site.codes
    weight = twin.weight
    before = len(weights._caches)
    del twin, loaded
    gc.collect()
    assert weights.codes_of(weight) is None and len(weights._caches) <= before - 2


def test_an_unknown_weight_is_cast_inside_the_call():
    module, x = layer(), torch.randn(4, 40)
    stranger = torch.randn(24, 40)
    y = forward(module, stranger, x)
    assert module._site.codes.casts == 0
    assert torch.equal(y, fp8.linear(x, stranger))


@pytest.mark.parametrize("name", ["rowwise", "mxfp8"])
def test_separate_weight_casts_have_layout_of_their_gemm(name, monkeypatch):
    """Otherwise dgrad would convert its codes in every call."""
    requested = []
    real = type(registry.get("reference")).quantize

    def quantize(self, x: Tensor, spec: CastSpec, contract: int = 1) -> Quantized:
        requested.append((spec, contract))
        return real(self, x, spec, contract)

    monkeypatch.setattr(type(registry.get("reference")), "quantize", quantize)
    w, x, recipe = torch.randn(24, 40), torch.randn(4, 40, requires_grad=True), named(name)
    key = key_of(recipe)
    codes = torch.ops.octavo.cast(x, graph_arguments.parse_key(key).operand("fwd", 0), "")
    torch.ops.octavo.linear(x, w, None, *codes, key, 0).sum().backward()
    assert (recipe.fwd.b, 1) in requested and (recipe.dgrad.b, 0) in requested and (recipe.dgrad.b, 1) not in requested


@pytest.mark.parametrize("contract", [0, 1])
@pytest.mark.parametrize("spec", [spec for spec in SPECS if spec.scale != "e8m0"], ids=str)
def test_fake_scale_sizes_match_buffers(spec, contract):
    for rows, cols in ((1, 1), (130, 257), (0, 24)):
        scale = laid_out(quantize(torch.zeros(rows, cols), spec), contract).scale
        sizes = layout.scale_sizes(rows, cols, spec, contract)
        assert scale.untyped_storage().nbytes() == 4 * sizes[0] * sizes[1]


def test_graph_capture_casts_weight_and_caches_nothing(monkeypatch):
    module, x = layer(), torch.randn(4, 40)
    forward(module, module.weight, x)
    cache = module._site.codes
    saved = [q.data.data_ptr() for q in cache._codes.values()]
    monkeypatch.setattr(weights, "_is_capturing", lambda tensor: True)
    recorded = []
    backend = module._site.backend.backend
    cast = backend.quantize
    monkeypatch.setattr(
        backend, "quantize", lambda t, *a, **k: recorded.append(t.shape) or cast(t, *a, **k), raising=False
    )
    assert torch.equal(forward(module, module.weight, x), module(x))
    assert recorded.count(module.weight.shape) == 2  # one in the operator, one in the eager layer
    monkeypatch.undo()
    assert [q.data.data_ptr() for q in cache._codes.values()] == saved


def test_cached_graph_of_other_layout_is_not_reused(monkeypatch):
    """A compiler's cache keys a graph by its operators and constants; what the operators return is not part of it."""
    recipe = fp8.recipe("blockwise")
    selections = select_backends(recipe, torch.device("cpu"))
    before = graph_arguments.describe(recipe, selections)
    monkeypatch.setattr(layout, "REVISION", layout.REVISION + 1)
    assert graph_arguments.describe(recipe, selections) != before
