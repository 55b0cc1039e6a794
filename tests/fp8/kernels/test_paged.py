"""The kernels of the paged key-value cache in Triton's interpreter: attention against fp64, writes against the cast."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from octavo.fp8.arithmetic import CastSpec, quantize
from octavo.fp8.kernels.triton_kernels import paged
from octavo.fp8.kernels.triton_kernels.launch import launches

TOKEN_AND_HEAD = CastSpec("e4m3", block=(1, -1), scale="fp32")


class Pages:
    """A layer's cache with keys and values [tokens, 2, heads, dim] of sequences of these lengths, pages anywhere, and
    NaN wherever no token is."""

    def __init__(self, lengths, heads: int, dim: int, page: int, dtype, coded: bool, spare: int = 0) -> None:
        gen = torch.Generator().manual_seed(sum(lengths) + dim)
        self.page, self.dtype, self.lengths = page, dtype, torch.tensor(lengths, dtype=torch.int32)
        width = -(-max(lengths) // page) + spare
        numbers = torch.randperm(len(lengths) * width + 2, generator=gen)[: len(lengths) * width]
        self.table = numbers.view(len(lengths), width).int()
        size = (2 * heads, (len(lengths) * width + 2) * page, dim)
        self.codes = torch.full(size, torch.nan).to(torch.float8_e4m3fn if coded else dtype)
        self.scales = torch.full(size[:2], torch.nan) if coded else None
        self.x = [torch.randn(n, 2, heads, dim, generator=gen).mul(2) for n in lengths]
        for row, x in enumerate(self.x):
            at, kept = self.places(row, len(x)), x.to(dtype).flatten(1, 2).transpose(0, 1)  # [2 * heads, tokens, dim]
            if self.scales is None:
                self.codes[:, at] = kept
                continue
            cast = quantize(kept.reshape(-1, dim), TOKEN_AND_HEAD)
            self.codes.view(torch.uint8)[:, at] = cast.data.view(torch.uint8).view(kept.shape)
            self.scales[:, at] = cast.scale.view(kept.shape[:2])

    def places(self, row: int, count: int) -> Tensor:
        at = torch.arange(count)
        return self.table[row].long()[at // self.page] * self.page + at % self.page

    def attend(self, q: Tensor, scale: float) -> Tensor:
        return paged.attend(q, self.codes, self.scales, self.table, self.lengths, scale, self.page)

    def held(self, row: int) -> Tensor:
        """Return the cached keys and values of a sequence in fp64: [tokens, 2, heads, dim]."""
        x = self.x[row].to(self.dtype)
        if self.scales is None:
            return x.double()
        cast = quantize(x.flatten(0, 2), TOKEN_AND_HEAD)
        return (cast.data.float() * cast.scale).view(x.shape).double()


def exact(q: Tensor, x: Tensor, scale: float) -> Tensor:
    """[H, dim] in fp64."""
    k, v = (x[:, i].transpose(0, 1).repeat_interleave(len(q) // x.shape[2], 0) for i in (0, 1))
    return (((q.double()[:, None] @ k.mT) * scale).softmax(-1) @ v)[:, 0]


def make_queries(lengths, queries: int, dim: int, dtype) -> Tensor:
    return torch.randn(len(lengths), queries, dim, generator=torch.Generator().manual_seed(1)).to(dtype)


@pytest.mark.parametrize("coded", [False, True], ids=["plain", "e4m3"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(
    ("queries", "heads", "dim", "page", "lengths"),
    [(4, 1, 64, 8, (1, 0, 67)), (2, 2, 80, 3, (9, 4)), (6, 2, 96, 5, (33,)), (17, 1, 128, 16, (16, 2))],
)
def test_attention_matches_fp64(queries, heads, dim, page, lengths, dtype, coded) -> None:
    """Within the rounding of the result, and 2^-14 of the largest value for that of p (fp32: 2^-19 for sums)."""
    cache = Pages(lengths, heads, dim, page, dtype, coded)
    q, scale = make_queries(lengths, queries, dim, dtype), dim**-0.4
    with launches() as ran:
        got = cache.attend(q, scale)
    assert ran == {"attend_kernel": 1} and got.dtype == dtype and got.shape == q.shape
    for row, count in enumerate(lengths):
        if not count:
            assert not got[row].any()
            continue
        want, top = exact(q[row], cache.held(row), scale), cache.x[row].abs().max()
        bound = torch.finfo(dtype).eps / 2 * want.abs() + top * (2.0**-19 if dtype == torch.float32 else 2.0**-14)
        assert ((got[row].double() - want).abs() <= bound).all()


@pytest.mark.parametrize("coded", [False, True], ids=["plain", "e4m3"])
def test_sequence_result_is_batch_invariant(coded, monkeypatch) -> None:
    """Chunks of 32 tokens: sequences of one, of several, of whole ones; a table that is wider than all of them."""
    lengths, dtype = (70, 32, 5, 64, 0), torch.bfloat16
    q = make_queries(lengths, 4, 64, dtype)
    full = Pages(lengths, 2, 64, 4, dtype, coded)
    one_chunk = full.attend(q, 0.2)
    monkeypatch.setattr(paged, "CHUNK", 32)
    with launches() as ran:
        got = full.attend(q, 0.2)
    assert ran == {"attend_kernel": 1, "join_kernel": 1}
    assert torch.equal(got[1:3], one_chunk[1:3]), "a sequence of one chunk does not see that others have more"
    for row, count in enumerate(lengths):
        if count:
            want = exact(q[row], full.held(row), 0.2)
            assert ((got[row].double() - want).abs() <= 2.0**-8 * want.abs() + 2.0**-11).all()
    order = torch.tensor([3, 0, 2])
    wide = torch.nn.functional.pad(full.table, (0, 9))[order]
    turned = paged.attend(q[order], full.codes, full.scales, wide, full.lengths[order], 0.2, 4)
    assert torch.equal(turned, got[order])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_written_values_equal_cast_bitwise(dtype) -> None:
    """From fp32 keys in any order of memory; zeros, tiny and huge ones, infinities and NaN; nobody's left out."""
    gen = torch.Generator().manual_seed(2)
    x = torch.randn(2, 3, 11, 80, generator=gen) * torch.exp2(torch.randint(-30, 12, (2, 3, 11, 1), generator=gen))
    x[0, 0, 3], x[1, 1, 4, 7], x[0, 2, 5, 1], x[1, 0, 6] = 0, torch.nan, torch.inf, x[1, 0, 6] * 1e-33
    k, v = (part.transpose(0, 1) for part in x)  # [tokens, heads, dim], not contiguous
    where = torch.tensor([4, -1, 0, 1, 2, 3, 19, 18, 17, -1, 8])
    saved = torch.cat([k, v], 1).to(dtype).transpose(0, 1)  # [2 * heads, tokens, dim]
    for coded in (False, True):
        codes = torch.zeros(6, 20, 80, dtype=torch.float8_e4m3fn if coded else dtype)
        scales = torch.zeros(6, 20) if coded else None
        paged.write(k, v.transpose(1, 2).contiguous().transpose(1, 2), where, codes, scales, dtype)
        want, some = torch.zeros_like(codes), where >= 0
        if scales is None:
            want[:, where[some]] = saved[:, some]
            assert torch.equal(codes.nan_to_num(7.0), want.nan_to_num(7.0))
            continue
        cast = quantize(saved.reshape(-1, 80), TOKEN_AND_HEAD)
        original = torch.zeros_like(scales)
        original[:, where[some]] = cast.scale.view(6, -1)[:, some]
        want.view(torch.uint8)[:, where[some]] = cast.data.view(torch.uint8).view(6, -1, 80)[:, some]
        assert torch.equal(codes.view(torch.uint8), want.view(torch.uint8))
        assert torch.equal(scales.nan_to_num(-1.0), original.nan_to_num(-1.0))


def test_nan_key_affects_only_its_sequence() -> None:
    cache = Pages((5, 6), 1, 64, 4, torch.bfloat16, False)
    bad = torch.full((1, 1, 64), torch.nan)
    paged.write(bad, bad, cache.places(0, 3)[2:], cache.codes, None, torch.bfloat16)
    got = cache.attend(make_queries((5, 6), 2, 64, torch.bfloat16), 0.1)
    assert got[0].isnan().all() and got[1].isfinite().all()
