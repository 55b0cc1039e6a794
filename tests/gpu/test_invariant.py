"""Batch invariance on a GPU: kernels at sizes of real models, and rollouts with the bits of training."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F

pytest.importorskip("transformers")
pytest.importorskip("pydantic")  # these three packages configure runs and read rows
pytest.importorskip("ruamel.yaml")
pytest.importorskip("pyarrow")
pytest.importorskip("triton")

from octavo import fp8, models
from octavo.fp8.arithmetic.recipe import recipe
from octavo.fp8.invariance import BatchInvariantMode, row_linear
from octavo.fp8.invariance.attention import attention
from octavo.fp8.kernels.groups import group_rows
from octavo.fp8.kernels.registry import get
from octavo.fp8.kernels.triton_kernels import rows
from octavo.generation import Engine, Prompt, Sampling
from octavo.models.tiny.parts import PATCH

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")]

DEVICE = "cuda"
ENDS = SimpleNamespace(eos_token_id=None)
DTYPES = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)


def random(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


def near(got: torch.Tensor, want: torch.Tensor) -> None:
    allowed = 4 * torch.finfo(got.dtype).eps * want.abs() + 2**-12 * want.abs().max()
    assert bool(((got.double() - want).abs() <= allowed).all())


@DTYPES
@pytest.mark.parametrize(("k", "n"), [(4096, 1024), (1024, 3076), (4096, 128), (72, 4304), (12288, 4096)])
def test_products(k: int, n: int, dtype: torch.dtype) -> None:
    """Each size is tested first (``prove``), which raises if rows depend on each other."""
    x, w, b = random(300, k, dtype=dtype), random(n, k, seed=1, dtype=dtype), random(n, seed=2, dtype=dtype)
    y = row_linear(x, w, b)
    near(y, F.linear(x.double(), w.double(), b.double()))
    assert torch.equal(row_linear(x[7:8], w, b), y[7:8]) and torch.equal(row_linear(x[100:165], w, b), y[100:165])
    experts, ends = random(4, n, k, seed=3, dtype=dtype).mT, torch.tensor([3, 3, 200, 290], device=DEVICE)
    grouped = rows.grouped_product(x, experts, ends)
    assert torch.equal(grouped[3:200], rows.product(x[3:200], experts[2], None, 1.0, 1.0, dtype))
    assert not grouped[290:].any()


@DTYPES
@pytest.mark.parametrize(("heads", "kv", "d"), [(32, 8, 128), (16, 16, 72), (12, 2, 64), (8, 1, 256), (14, 2, 96)])
def test_attention(heads: int, kv: int, d: int, dtype: torch.dtype) -> None:
    """Tried, and near torch's; whole sequences under masks and by positions, and their last queries alone."""
    q, k, v = (random(3, n, 700, d, seed=n, dtype=dtype) for n in (heads, kv, kv))
    full = attention(q, k, v, is_causal=True)
    near(full, F.scaled_dot_product_attention(q.double(), k.double(), v.double(), is_causal=True, enable_gqa=True))
    mask = torch.ones(700, 700, dtype=torch.bool, device=DEVICE).tril().expand(3, 1, 700, 700)
    assert torch.equal(attention(q, k, v, mask), full)
    assert torch.equal(attention(q, k, v, torch.zeros_like(mask, dtype=dtype).masked_fill(~mask, -torch.inf)), full)
    for t in (0, 333, 699):
        at = torch.tensor([[t], [5], [699]], device=DEVICE)
        assert torch.equal(attention(q[:, :, t : t + 1], k, v, positions=at)[0, :, 0], full[0, :, t])


def test_rows_of_norms_and_softmax() -> None:
    for dtype in (torch.float32, torch.bfloat16):
        x = random(513, 4096, dtype=dtype)
        with BatchInvariantMode():
            for call in (
                lambda x: F.rms_norm(x, (4096,)),
                lambda x: F.layer_norm(x, (4096,)),
                lambda x: x.float().log_softmax(-1),
                lambda x: x.pow(2).mean(-1, keepdim=True),
                lambda x: x.view(-1, 32, 128).sum(-1),
                lambda x: x[:, :64].softmax(-1).topk(8, -1).values,
            ):
                full = call(x)
                for some in (slice(4, 5), slice(7, 140)):
                    assert torch.equal(call(x[some]), full[some])


@pytest.mark.parametrize("title", ["rowwise", "blockwise", "mxfp8"])
def test_fp8_products(title: str) -> None:
    casts, triton = recipe(title).fwd, get("triton")
    assert casts is not None
    for n, k in ((4096, 4096), (1024, 4096), (3420, 1280)):
        x, w = random(600, k), triton.quantize(random(n, k, seed=1), casts.b, 1)
        y = rows.fp8_product(triton.quantize(x, casts.a, 1), w, torch.bfloat16)
        for some in (slice(5, 6), slice(64, 128), slice(3, 500)):
            assert torch.equal(rows.fp8_product(triton.quantize(x[some], casts.a, 1), w, torch.bfloat16), y[some])
    experts = triton.quantize_experts(random(4, 768, 2048, seed=2), casts.b)
    groups, _, row_of = group_rows(torch.arange(600, device=DEVICE) % 3, 4)
    inputs = torch.zeros(groups.rows, 2048, device=DEVICE).index_copy_(0, row_of, random(600, 2048))
    y = rows.fp8_grouped_product(triton.quantize_rows(inputs, casts.a, groups), experts, groups, torch.bfloat16)
    assert bool(y[row_of].isfinite().all())


# --- whole models -----------------------------------------------------------------------------------------------------


def asked(model) -> list[Prompt]:
    """Prompts of 3 to 60 tokens; where the model takes images, two of them have one."""
    config, generator = model.config, torch.Generator().manual_seed(1)
    image, results = getattr(config, "image_token_id", None), []
    for number, (tokens, grid) in enumerate(((3, None), (20, (4, 6)), (60, None), (17, (6, 2)))):
        ids, kinds, extra = torch.randint(5, 200, (tokens,), generator=generator).tolist(), [0] * tokens, {}
        if image is not None:
            count = grid[0] * grid[1] // 4 if grid else 0
            ids = [config.vision_start_token_id, *[image] * count, config.vision_end_token_id, *ids] if grid else ids
            kinds = ([0, *[1] * count, 0] if grid else []) + kinds
            extra["mm_token_type_ids"] = np.array(kinds)
            if grid:
                pixels = torch.randn(grid[0] * grid[1], 3 * 2 * PATCH**2, generator=generator).numpy()
                extra |= {"pixel_values": pixels, "image_grid_thw": np.array([[1, *grid]]), "images": 1}
        results.append(Prompt(np.array(ids), number, **extra))
    return results


def trained(model, prompts, completions, temperature: float):
    """(log-probabilities, entropies) of each completion by one forward of all of them, padded, with gradients."""
    texts = [np.concatenate([prompts[c.prompt].input_ids, c.tokens]) for c in completions]
    longest, batch = max(map(len, texts)), {}

    def padded(parts) -> torch.Tensor:
        return torch.from_numpy(np.stack([np.pad(x, (0, longest - len(x))) for x in parts])).to(DEVICE)

    batch = {"input_ids": padded(texts), "attention_mask": padded([np.ones_like(x) for x in texts])}
    inputs = [prompts[c.prompt] for c in completions]
    if inputs[0].mm_token_type_ids is not None:
        batch["mm_token_type_ids"] = padded([p.mm_token_type_ids for p in inputs])
        recorded = [p for p in inputs if p.pixel_values is not None]
        pixels = torch.from_numpy(np.concatenate([p.pixel_values for p in recorded]))
        batch["pixel_values"] = pixels.to(DEVICE, next(model.parameters()).dtype)
        batch["image_grid_thw"] = torch.from_numpy(np.concatenate([p.image_grid_thw for p in recorded])).to(DEVICE)
    model.train()
    with fp8.batch_invariant(model):
        logits = model(**batch, use_cache=False).logits[:, :-1]
        results = fp8.log_probs(logits, batch["input_ids"][:, 1:], temperature=temperature, entropy=True)
    results[0].sum().backward()
    for row, c in enumerate(completions):
        start = len(prompts[c.prompt].input_ids) - 1
        yield tuple(x[row, start : start + len(c.tokens)].detach().cpu().numpy() for x in results)


CASES = {
    "text": ("qwen3", torch.bfloat16, None),
    "text fp32": ("qwen3", torch.float32, None),
    "text blockwise": ("qwen3", torch.bfloat16, "blockwise"),
    "text mxfp8": ("qwen3", torch.bfloat16, "mxfp8"),
    "VLM": ("qwen3_vl", torch.bfloat16, None),
    "VLM rowwise": ("qwen3_vl", torch.bfloat16, "rowwise"),
    "windows": ("qwen2_5_vl", torch.bfloat16, "blockwise"),
    "MoE": ("qwen3_moe", torch.bfloat16, None),
    "MoE blockwise": ("qwen3_moe", torch.bfloat16, "blockwise"),
    "VLM MoE": ("qwen3_vl_moe", torch.bfloat16, None),
    "LoRA": ("qwen3_vl", torch.bfloat16, "LoRA"),
}


@pytest.mark.parametrize("case", CASES)
def test_rollout_equals_training_forward(case: str) -> None:
    """In any batch of the engine; without the mode there is a difference."""
    family, dtype, kind = CASES[case]
    torch.manual_seed(0)
    model = models.random_model(models.tiny_config(family), DEVICE, dtype, 2)
    if kind == "LoRA":
        pytest.importorskip("peft")
        from octavo import adapters
        from octavo.config import LoraSection

        adapters.attach(model, models.describe(model), LoraSection(rank=3, dtype="fp32"))
        with torch.no_grad():
            for _, parameter in adapters.adapter_parameters(model):
                parameter.normal_(std=0.1)
    elif kind is not None:
        policy = fp8.Policy(kind, backend="triton")
        fp8.apply(model, fp8.plan(model, policy, models.describe(model).components))
    prompts, sampling = asked(model), Sampling(12, temperature=0.7, top_p=0.9)
    got = Engine(model, ENDS, slots=5, page=4, invariant=True).generate(prompts, sampling, group=2)
    for completion, (logps, entropies) in zip(got, trained(model, prompts, got, 0.7), strict=True):
        assert np.array_equal(completion.logps, logps) and np.array_equal(completion.entropy, entropies)
    again = Engine(model, ENDS, slots=2, page=16, invariant=True).generate(prompts, sampling, group=2)
    assert all(np.array_equal(a.logps, b.logps) for a, b in zip(got, again, strict=True))
