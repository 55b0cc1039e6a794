"""The kernels that a GPU uses inside fp8.batch_invariant, in Triton's interpreter: rollouts match training bit for bit,
and torch runs no reduction over several rows."""

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
from tests.generation.conftest import make_prompts
from tests.generation.test_invariant_engine import training_logprobs

pytestmark = pytest.mark.skipif(not INTERPRETED, reason="tests/gpu runs the compiled kernels")

REDUCTIONS = (
    "mm",
    "bmm",
    "addmm",
    "baddbmm",
    "_grouped_mm",
    "convolution",
    "_softmax",
    "_log_softmax",
    "logsumexp",
    "mean",
)
REDUCTIONS += ("native_layer_norm", "_fused_rms_norm", "topk", "var", "linalg_vector_norm", "cumprod")


class ReductionRecorder(TorchDispatchMode):
    """Records which operations reduce floating-point values."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        sums = name == "sum" and args[0].is_floating_point() and len(args) > 1
        if args and isinstance(args[0], torch.Tensor) and not args[0].numel():
            pass  # only for its dtype
        elif sums or name in REDUCTIONS or "attention" in name:
            self.names.add(name)
        return func(*args, **(kwargs or {}))


CASES = {
    "text": ("qwen3", None, False),
    "MoE": ("qwen3_moe", None, False),
    "VLM, LoRA on FP8": ("qwen3_vl", "rowwise", True),
}


@pytest.mark.parametrize("case", [c if c == "text" else pytest.param(c, marks=pytest.mark.long) for c in CASES])
def test_kernels_match_a_training_forward_bit_for_bit(load_mini, case: str, row_kernels: None) -> None:
    family, recipe, lora = CASES[case]
    source, processor = load_mini(family)
    model = models.load(source.name_or_path, dtype=torch.bfloat16)
    if recipe is not None:
        fp8.apply(model, fp8.plan(model, fp8.Policy(recipe, backend="triton")))
    if lora:
        adapters.attach(model, models.describe(model), LoraSection(rank=3, dtype="fp32"))
        with torch.no_grad():
            for _, parameter in adapters.adapter_parameters(model):
                parameter.normal_(std=0.1, generator=torch.Generator().manual_seed(2))
    prompts = make_prompts(model, processor, 2)
    engine = Engine(model, processor.tokenizer, slots=2, page=4, invariant=True)
    with launches() as ran, ReductionRecorder() as reductions:
        completions = engine.generate(prompts, Sampling(2, temperature=0.7), group=1)
        with torch.no_grad():
            training = list(training_logprobs(model, prompts, completions, 0.7))
    for completion, (logps, entropies) in zip(completions, training, strict=True):
        assert np.array_equal(completion.logps, logps) and np.array_equal(completion.entropy, entropies)
    assert not reductions.names
    assert ran["attend_kernel"] and ran["sums_kernel"] and ran["product_kernel"]
    assert bool(ran["gemm_kernel"]) == (recipe is not None) and not ran["decode_kernel"]


def test_fused_norms_do_not_cast_in_the_mode(load_mini, row_kernels: None) -> None:
    """Outside of the mode their reductions depend on the codes that are needed, and so on whether the model trains."""
    model = models.load(load_mini("qwen3")[0].name_or_path, dtype=torch.bfloat16)
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
