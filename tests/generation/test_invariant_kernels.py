"""What a GPU runs inside fp8.batch_invariant, by Triton's interpreter: a rollout has the bits of training, and nothing
that looks at several rows is left to torch."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

pytest.importorskip("triton")

from octavo import adapters, fp8, models
from octavo.config import LoraSection
from octavo.fp8.kernels.triton_kernels.launch import INTERPRETED, launches
from octavo.generation import Engine, Sampling
from tests.generation.conftest import prompts_of
from tests.generation.test_invariant_engine import trained

pytestmark = pytest.mark.skipif(not INTERPRETED, reason="tests/gpu runs the compiled kernels")

ROWS = ("mm", "bmm", "addmm", "baddbmm", "_grouped_mm", "convolution", "_softmax", "_log_softmax", "logsumexp", "mean")
ROWS += ("native_layer_norm", "_fused_rms_norm", "topk", "var", "linalg_vector_norm", "cumprod")


class Seen(TorchDispatchMode):
    """Which operations look at several numbers of floating point, of those that run under it."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        sums = name == "sum" and args[0].is_floating_point() and len(args) > 1
        if args and isinstance(args[0], torch.Tensor) and not args[0].numel():
            pass  # asked for a dtype
        elif sums or name in ROWS or "attention" in name:
            self.names.add(name)
        return func(*args, **(kwargs or {}))


CASES = {
    "text": ("qwen3", None, False),
    "MoE": ("qwen3_moe", None, False),
    "VLM, LoRA on FP8": ("qwen3_vl", "rowwise", True),
}


@pytest.mark.parametrize("case", [c if c == "text" else pytest.param(c, marks=pytest.mark.long) for c in CASES])
def test_the_gap_to_a_training_forward_is_zero(made, case: str, row_kernels: None) -> None:
    family, recipe, lora = CASES[case]
    source, processor = made(family)
    model = models.load(source.name_or_path, dtype=torch.bfloat16)
    if recipe is not None:
        fp8.apply(model, fp8.plan(model, fp8.Policy(recipe, backend="triton")))
    if lora:
        adapters.attach(model, models.describe(model), LoraSection(rank=3, dtype="fp32"))
        with torch.no_grad():
            for _, parameter in adapters.adapter_parameters(model):
                parameter.normal_(std=0.1, generator=torch.Generator().manual_seed(2))
    prompts = prompts_of(model, processor, 2)
    engine = Engine(model, processor.tokenizer, slots=2, page=4, invariant=True)
    with launches() as ran, Seen() as seen:
        got = engine.generate(prompts, Sampling(2, temperature=0.7), group=1)
        with torch.no_grad():
            found = list(trained(model, prompts, got, 0.7))
    for completion, (logps, entropies) in zip(got, found, strict=True):
        assert np.array_equal(completion.logps, logps) and np.array_equal(completion.entropy, entropies)
    assert not seen.names
    assert ran["attend_kernel"] and ran["sums_kernel"] and ran["product_kernel"]
    assert bool(ran["gemm_kernel"]) == (recipe is not None) and not ran["decode_kernel"]


def test_norms_that_make_codes_make_none(made, row_kernels: None) -> None:
    """Outside of the mode their sums follow from the codes that are wanted, and so from whether it trains."""
    model = models.load(made("qwen3")[0].name_or_path, dtype=torch.bfloat16)
    fp8.apply(model, fp8.plan(model, fp8.Policy("blockwise", backend="triton")))
    fp8.fuse(model)
    norm, x = model.model.layers[0].input_layernorm, torch.randn(5, 64, generator=torch.Generator().manual_seed(0))
    x = x.bfloat16().requires_grad_()
    with launches() as outside:
        norm(x)
    with fp8.batch_invariant(model), launches() as inside:
        y = norm(x)
        with torch.no_grad():
            assert torch.equal(norm(x[:1]), y[:1])
    assert outside["rmsnorm_tile"] and dict(inside) == {"sums_kernel": 2}
