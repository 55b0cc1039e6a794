"""Compares a folder with the one it was made from: names, shapes, and the error of every tensor against its bound.

The bound. E4M3 has 3 mantissa bits: neighbours of a normal value in [2^e, 2^(e+1)) are 2^(e-3) apart, so rounding to
nearest moves it by at most 2^(e-4), which is 2^-4 of the value. Subnormal neighbours are 2^-9 apart, so rounding moves
them by at most 2^-10, in units of the scale s. BF16 has 7 mantissa bits, which gives 2^-8 in the same way (scales or
values may be rounded to it, on either side). So for any row of n values, by the triangle inequality,

    |value - reference|  <=  (2^-4 + 2^-8) |reference|  +  2^-10 |s|      |.| the root of the sum of squares

for FP8 compared with high precision; 2^-8 |reference| if both are in high precision and one is BF16 (2^-11 for F16,
2^-20 for F32); twice the FP8 bound if both are FP8 from different casts. A correct cast cannot exceed the bound;
typical is 0.026 (SQNR 31.6 dB). A tensor is judged by the row with the largest ratio of error to bound:

    ok          no row exceeds its bound
    suspicious  a row has up to twice its bound: two roundings, for example weights that were requantized
    bad         a row has more: other values (such as a trained or merged model), or scales of other codes

A bad FP8 tensor is decoded again with its scales transposed (square grids), inverted, as square roots, and left out; if
one of these brings it within the bound, it is named as the cause.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from octavo.checkpoint.stock_model import StockModel
from octavo.checkpoint.verify.findings import Findings, TensorComparison
from octavo.checkpoint.verify.headers import PIECE, FileTensor
from octavo.checkpoint.verify.scales import Pair
from octavo.checkpoint.verify.values import Progress, scales_fp32, split_experts
from octavo.fp8.arithmetic import decode
from octavo.fp8.policy import template

NORMAL, SUBNORMAL, BF16 = 2.0**-4, 2.0**-10, 2.0**-8
_HIGH = {"BF16": BF16, "F16": 2.0**-11}
_F32_BOUND = 2.0**-20


@dataclass(frozen=True)
class Source:
    """One matrix of a folder: its bytes, its scales, and its part of a stack.

    block       (rows, columns) that share a scale; -1 means the whole side
    transposed  True if it is stored as [K, N] (experts of some families)
    part        its rows of the stored matrix, or None for all
    """

    tensor: FileTensor
    scale: Tensor | None = None
    block: tuple[int, int] = (-1, -1)
    transposed: bool = False
    part: tuple[int, int] | None = None

    @property
    def shape(self) -> tuple[int, int]:
        rows, columns = self.tensor.matrix
        if self.transposed:
            rows, columns = columns, rows
        return (self.part[1] - self.part[0], columns) if self.part else (rows, columns)

    def window(self, first: int, last: int, scale: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Return rows first to last in fp32, and the scale of each element (None without scales)."""
        base = self.part[0] if self.part else 0
        if self.transposed:
            whole = self.tensor.window(0, self.tensor.matrix[0])
            return whole.float().T[base + first : base + last].contiguous(), None
        raw = self.tensor.window(base + first, base + last)
        if scale is None:
            return (decode(raw) if self.tensor.dtype == "F8_E4M3" else raw.float()), None
        s = self._spread(scale, first, last)
        return decode(raw) * s, s

    def _spread(self, scale: Tensor, first: int, last: int) -> Tensor:
        (r, c), columns = self.block, self.shape[1]
        rows = torch.zeros(last - first, dtype=torch.long) if r == -1 else torch.arange(first, last) // r
        cols = torch.zeros(columns, dtype=torch.long) if c == -1 else torch.arange(columns) // c
        return scale[rows][:, cols]


def collect_sources(known: Mapping[str, FileTensor], pairs: Iterable[Pair], stock: StockModel) -> dict[str, Source]:
    """Return every tensor by the model's name on disk, stacked experts one by one, tied ones once."""
    out: dict[str, Source] = {}
    paired = {pair.weight.name: pair for pair in pairs}
    for name, tensor in known.items():
        if name in stock.tied_on_disk:
            continue
        singles = stock.stacked.get(name)
        pair = paired.get(tensor.name)
        if singles and pair is None and len(tensor.shape) == 3:
            out.update(_unstack_experts(name, tensor, singles, stock))
        elif len(tensor.shape) < 3 or pair is None:
            scale = None if pair is None else scales_fp32(pair.scale)
            if pair is not None and scale is not None:
                if scale.numel() != math.prod(pair.grid):
                    continue  # another grid, which was reported
                scale = scale.reshape(pair.grid)
            out[name] = Source(tensor, scale, pair.block if pair else (-1, -1))
    return out


def _unstack_experts(
    name: str, tensor: FileTensor, singles: tuple[str, ...], stock: StockModel
) -> Iterator[tuple[str, Source]]:
    wanted = tuple(stock.state[stock.to_module(name)].shape)
    transposed = tensor.shape != wanted
    each = len(singles) // wanted[0]
    rows = wanted[1] // each
    for i, matrix in enumerate(split_experts(tensor)):
        for j in range(each):
            yield singles[i * each + j], Source(matrix, transposed=transposed, part=(j * rows, (j + 1) * rows))


def compare(
    here: Mapping[str, Source], reference: Mapping[str, Source], findings: Findings, progress: Progress | None = None
) -> list[TensorComparison]:
    """Compare the tensors that both folders have, worst first, and report differences of names, shapes and values."""
    for name in here.keys() - reference.keys():
        findings.fail("against-names/extra", here[name].tensor.file, name)
    for name in reference.keys() - here.keys():
        findings.fail("against-names/missing", tensor=name, reference=reference[name].tensor)
    common = [name for name in here if name in reference]
    total, done, compared = sum(here[n].tensor.size for n in common), 0, []
    for name in common:
        a, b = here[name], reference[name]
        if progress is not None:
            progress(done, total, f"against: {name}")
        done += a.tensor.size
        if a.shape != b.shape:
            findings.fail("against-shape", a.tensor.file, name, shape=list(a.shape), other=list(b.shape))
            continue
        compared.append(_compare_one(name, a, b, findings))
    return sorted(compared, key=lambda c: (_ORDER[c.status], -(math.inf if c.error is None else c.error)))


def compare_unplaced(
    here: Mapping[str, FileTensor], reference: Mapping[str, FileTensor], stock: StockModel, findings: Findings
) -> list[TensorComparison]:
    """Compare tensors that the model does not use (layers for multi-token prediction, heads, adapters) by their names
    on disk, and report those that only one folder has.

    A tensor that the family's loaders leave out (`_keys_to_ignore_on_load_unexpected`) gets a warning, because it
    changes no answer; any other is a failure. All are named. Codes and integers must have equal bytes.
    """
    lost = [name for name in reference if name not in here]
    for name in lost:
        if not stock.is_ignored(name):
            findings.fail("against-names/unplaced", tensor=name, reference=reference[name])
    for case, names in (("missing", lost), ("extra", [name for name in here if name not in reference])):
        dropped = [name for name in names if stock.is_ignored(name)]
        if dropped:
            findings.warn(f"against-dropped/{case}", tensor=dropped[0], names=_list_names(dropped), count=len(dropped))
    out = []
    for name in (name for name in here if name in reference):
        a, b = here[name], reference[name]
        if a.shape != b.shape:
            findings.fail("against-shape", a.file, name, shape=list(a.shape), other=list(b.shape))
        elif a.dtype == b.dtype and _same_bytes(a, b):
            out.append(TensorComparison(name, a.file, 0.0, math.inf, 0.0, "ok"))
        elif {a.dtype, b.dtype} <= _VALUE_DTYPES:
            out.append(_compare_one(name, Source(a), Source(b), findings))
        else:  # codes or integers, which no cast relates to other values
            much = f"({a.dtype}) differs from the reference ({b.dtype})"
            worst = "the model does not load it, so its bytes must be equal"
            findings.fail("against-values", a.file, name, much=much, bound=0.0, worst=worst)
            out.append(TensorComparison(name, a.file, None, -math.inf, 0.0, "bad"))
    return out


def _list_names(names: Iterable[str]) -> str:
    """Return the names of tensors; many that differ only in numbers (experts) as one pattern with their count."""
    alike: dict[str, list[str]] = {}
    for name in names:
        alike.setdefault(template(name), []).append(name)
    listed = [
        f"{len(each)} {pattern}" if len(each) > _MAX_ALIKE else ", ".join(each) for pattern, each in alike.items()
    ]
    return ", ".join(listed)


def _same_bytes(a: FileTensor, b: FileTensor) -> bool:
    pairs = zip(a.rows(), b.rows(), strict=True)
    return all(x.view(torch.uint8).equal(y.view(torch.uint8)) for (_, x), (_, y) in pairs)


_MAX_ALIKE = 4  # more names that differ only in numbers are one pattern
_VALUE_DTYPES = {"F64", "F32", "F16", "BF16"}
_ORDER = {"bad": 0, "suspicious": 1, "ok": 2}


def _compare_one(name: str, a: Source, b: Source, findings: Findings) -> TensorComparison:
    codes = ""
    # Codes are compared only in the same blocks: in other blocks they differ by design.
    if a.scale is not None and b.scale is not None and a.block == b.block:
        is_equal = a.tensor.size == b.tensor.size and _same_bytes(a.tensor, b.tensor)
        codes = "identical" if is_equal else "differ"
    error, ratio, bound = _measure_error(a, b, a.scale)
    status = "ok" if ratio <= 1 else "suspicious" if ratio <= 2 else "bad"
    cause = _find_cause(a, b) if status == "bad" and a.scale is not None else ""
    sqnr = math.inf if error == 0 else -math.inf if error is None else -20 * math.log10(error)
    file = a.tensor.file
    if status == "bad":
        much = "is not zero as in the reference"
        if error is not None:
            much = f"differs from the reference by {error:.3g} of its norm"
        worst = f"worst row {ratio:.3g} times its bound" if ratio < math.inf else "rows that should be equal differ"
        if cause:
            findings.fail("error", file, name, much=much, bound=bound, worst=worst, cause=cause)
        else:
            findings.fail("against-values", file, name, much=much, bound=bound, worst=worst)
    elif status == "suspicious":
        findings.warn("error/suspicious", file, name, ratio=ratio, bound=bound)
    return TensorComparison(name, file, error, sqnr, bound, status, codes, cause)


def _measure_error(a: Source, b: Source, scale: Tensor | None) -> tuple[float | None, float, float]:
    """Return (relative error, largest ratio of a row's error to its bound, relative bound), with `scale` instead of the
    scales of `a`. The error is None if it is not a number, or the reference is zero and `a` is not."""
    rows, columns = a.shape
    step = max(1, PIECE // (8 * max(1, columns)))
    noise = power = allowed = 0.0
    worst = 0.0
    relative = _relative_bound(a, b)
    for first in range(0, rows, rows if a.transposed or b.transposed else step):
        last = rows if a.transposed or b.transposed else min(first + step, rows)
        x, s = a.window(first, last, scale)
        y, t = b.window(first, last, b.scale)
        difference = (x.double() - y.double()).square().sum(1)
        reference = y.double().square().sum(1)
        limit = relative * reference.sqrt()
        for spread in (s, t):
            if spread is not None:
                limit = limit + SUBNORMAL * spread.double().square().sum(1).sqrt()
        share = torch.where(difference == 0, 0.0, difference.sqrt() / limit)  # infinite where the bound is 0
        worst = max(worst, float(share.nan_to_num(math.inf, math.inf, math.inf).max()) if share.numel() else 0.0)
        noise += float(difference.sum())
        power += float(reference.sum())
        allowed += float(limit.square().sum())
    if math.isnan(noise):
        return None, math.inf, relative
    if power == 0:
        return (0.0 if noise == 0 else None), worst, relative
    return math.sqrt(noise / power), worst, math.sqrt(allowed / power)


def _relative_bound(a: Source, b: Source) -> float:
    """Return the part of the bound that is proportional to the norm of the reference."""
    codes = (a.scale is not None) + (b.scale is not None)
    if codes == 2:
        return 2 * (NORMAL + BF16)
    if a.scale is not None:
        return NORMAL + BF16
    high = max(_HIGH.get(a.tensor.dtype, _F32_BOUND), _HIGH.get(b.tensor.dtype, _F32_BOUND))
    return max(high, BF16) if codes else high


def _find_cause(a: Source, b: Source) -> str:
    """Return the mistake that explains a bad error: undoing it brings the error within the bound. "" if none does."""
    assert a.scale is not None
    tries = [
        ("its scales are reciprocals (1 / scale is stored)", a.scale.reciprocal()),
        ("its scales are squared or were applied twice", a.scale.sqrt()),
        ("its codes are plain values, cast without a scale", torch.ones_like(a.scale)),
    ]
    if a.scale.shape[0] == a.scale.shape[1] and a.scale.shape[0] > 1:
        tries.insert(0, ("its grid of scales is transposed", a.scale.T.contiguous()))
    for cause, scale in tries:
        if _measure_error(a, b, scale)[1] <= 1:
            return cause
    return ""
