"""Decoding on a GPU: kernels of the cache against fp64, and tokens of replayed graphs against eager steps."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("pydantic")  # these three packages configure runs and read rows
pytest.importorskip("ruamel.yaml")
pytest.importorskip("pyarrow")
pytest.importorskip("triton")

from octavo import fp8, models
from octavo.fp8.kernels.triton_kernels import paged
from octavo.generation import Context, Engine, Prompt, Sampling, batch
from octavo.generation.decode_cuda_graph import CudaGraphDecoder

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")]

TOKEN_AND_HEAD = fp8.CastSpec("e4m3", block=(1, -1), scale="fp32")


@pytest.mark.parametrize("coded", [False, True], ids=["plain", "e4m3"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize(("queries", "heads", "dim"), [(32, 8, 128), (16, 8, 64), (6, 2, 96), (8, 8, 80), (40, 2, 256)])
def test_paged_cache_matches_fp64(queries, heads, dim, dtype, coded) -> None:
    """Codes and scales bit for bit the reference's; attention within the rounding of its result, and 2^-14 of the
    largest value (fp32: 2^-18), whatever the lengths; and in other places bit for bit the same."""
    gen, page, lengths = torch.Generator().manual_seed(dim), 8, [1, 8, 1000, 1024, 1025, 4099, 0]
    width = -(-max(lengths) // page)
    table = torch.randperm(len(lengths) * width, generator=gen).view(-1, width).int()
    size = (2 * heads, table.numel() * page, dim)
    codes = torch.zeros(size, dtype=torch.float8_e4m3fn if coded else dtype, device="cuda")
    scales = torch.zeros(size[:2], device="cuda") if coded else None
    q = torch.randn(len(lengths), queries, dim, generator=gen).to(dtype)
    stored = []
    for row, count in enumerate(lengths):
        x = torch.randn(count, 2, heads, dim, generator=gen).mul(2)
        at = torch.arange(count)
        where = table[row].long()[at // page] * page + at % page
        paged.write(x[:, 0].cuda(), x[:, 1].cuda(), where.cuda(), codes, scales, dtype)
        x = x.to(dtype)
        if scales is not None and count:
            cast = fp8.quantize(x.flatten(0, 2), TOKEN_AND_HEAD, backend="reference")
            got = codes[:, where.cuda()].view(torch.uint8).cpu().transpose(0, 1)
            assert torch.equal(got, cast.data.view(torch.uint8).view(count, 2 * heads, dim))
            assert torch.equal(scales[:, where.cuda()].cpu().t(), cast.scale.view(count, 2 * heads))
            x = (cast.data.float() * cast.scale).view(x.shape)
        stored.append(x.double())
    saved = torch.tensor(lengths, dtype=torch.int32, device="cuda")
    scale = dim**-0.5
    got = paged.attend(q.cuda(), codes, scales, table.cuda(), saved, scale, page)
    for row, count in enumerate(lengths):
        if not count:
            assert not got[row].any()
            continue
        k, v = (stored[row][:, i].transpose(0, 1).repeat_interleave(queries // heads, 0) for i in (0, 1))
        want = (((q[row].double()[:, None] @ k.mT) * scale).softmax(-1) @ v)[:, 0]
        bound = torch.finfo(dtype).eps / 2 * want.abs() + v.abs().max() * (2**-18 if dtype == torch.float32 else 2**-14)
        assert ((got[row].cpu().double() - want).abs() <= bound).all(), (row, count)
    order = torch.tensor([4, 0, 2], device="cuda")
    turned = paged.attend(q.cuda()[order], codes, scales, table.cuda()[order], saved[order], scale, page)
    assert torch.equal(turned, got[order])
    narrow = paged.attend(q.cuda()[:3], codes, scales, table.cuda()[:3, :125], saved[:3], scale, page)
    assert torch.equal(narrow, got[:3]), "one chunk, and the first of several"


@pytest.mark.parametrize("kv", ["bf16", "fp8"])
@pytest.mark.parametrize("recipe", ["rowwise", "blockwise", "off"])
def test_graphs_do_not_change_tokens(recipe, kv, monkeypatch) -> None:
    """Log-probabilities and entropies are equal too; graphs use weights that an optimizer has updated."""
    torch.manual_seed(0)
    model = models.random_model(models.tiny_config("qwen3"), "cuda", torch.bfloat16, 2)
    if recipe != "off":
        fp8.apply(model, fp8.plan(model, recipe, models.describe(model).components))
    prompts = [Prompt(np.arange(5 + 3 * i, dtype=np.int64) + 7, i) for i in range(5)]
    sampling, results, created, lines = Sampling(24, 1.0, top_p=0.95, seed=1), [], [], []

    def run(graphs: bool) -> list:
        class Here(CudaGraphDecoder):
            def __init__(self, *args) -> None:
                super().__init__(*args)
                created.append(self)

            def _capture(self, rows):
                return super()._capture(rows) if graphs else None

        monkeypatch.setattr(batch, "CudaGraphDecoder", Here)
        engine = Engine(model, SimpleNamespace(eos_token_id=None), Context(), slots=12, kv=kv, log=lines.append)
        return [
            (c.tokens.tolist(), c.logps.tolist(), c.entropy.tolist()) for c in engine.generate(prompts, sampling, 4)
        ]

    model.generation_config.eos_token_id = None
    for step in range(2):
        results += [run(False), run(True)]
        if not step:
            with torch.no_grad():
                for p in model.parameters():
                    p.mul_(1.25)
    assert not lines and created[0].replays == 0 < created[1].replays and created[3].replays
    assert results[0] == results[1] != results[2] == results[3]
