"""Time what a CPU without BF16 instructions computes in fp32 (`octavo/fp8/dense/gemms.py`), and a patch embedding as
one product, each next to torch's own.

    python benchmarks/bf16_cpu.py [--out FILE.json]

The three products of a linear layer, x [M, K] and a weight [N, K], with one thread; both ways alternate, and the
medians of one run are divided. Above 1 the replacement is faster. On a CPU with the instructions it is off, and these
rows say what it would cost.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from unittest import mock

import torch
from torch import Tensor, nn

from octavo.base import accelerator
from octavo.bench import record
from octavo.fp8.dense import gemms

SHAPES = ((1, 576, 1536), (8, 576, 1536), (64, 576, 1536), (1216, 128, 320), (256, 576, 1536), (256, 576, 49152))
PATCHES = ((512, (3, 2, 4, 4), 64), (512, (3, 2, 16, 16), 256))  # patches, their shape, features
Call = Callable[[], object]


def median_ratio(stock: Call, replacement: Call, repeats: int = 7) -> float:
    """Return the median time of ``stock`` over the median time of ``replacement``."""
    times: tuple[list[float], list[float]] = ([], [])
    for _ in range(repeats + 1):
        for call, seconds in zip((stock, replacement), times, strict=True):
            begin = time.perf_counter()
            call()
            seconds.append(time.perf_counter() - begin)
    return statistics.median(times[0][1:]) / statistics.median(times[1][1:])  # without the first of each


def multiply_in_fp32(a: Tensor, b: Tensor) -> Tensor:
    return (a.float() @ b.float()).bfloat16()


def linear_rows() -> list[dict[str, float | int]]:
    rows = []
    for m, k, n in SHAPES:
        x, w, dy = (torch.randn(*shape).bfloat16() for shape in ((m, k), (n, k), (m, n)))
        row: dict[str, float | int] = {
            "M": m,
            "K": k,
            "N": n,
            "replaced": int(gemms.is_computed_in_fp32(x, w, x.dtype)),
        }
        for name, (a, b) in {"fwd": (x, w.t()), "dgrad": (dy, w), "wgrad": (dy.t(), x)}.items():
            row[name] = median_ratio(partial(torch.mm, a, b), partial(multiply_in_fp32, a, b))
        rows.append(row)
    return rows


def learn(forward: Callable[[Tensor], Tensor | None], x: Tensor) -> None:
    y = forward(x)
    assert y is not None
    y.sum().backward()


def patch_rows() -> list[dict[str, object]]:
    rows: list[dict[str, object]] = []
    for patches, shape, features in PATCHES:
        conv = nn.Conv3d(shape[0], features, shape[1:], shape[1:]).to(torch.bfloat16)
        x = torch.randn(patches, *shape).to(torch.bfloat16)
        product = partial(gemms.stock_forward, nn.Conv3d, conv)
        ratio = median_ratio(partial(learn, conv, x), partial(learn, product, x))
        rows.append({"patches": patches, "shape": shape, "features": features, "ratio": ratio})
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    has_instructions = accelerator.multiplies_on_cpu(torch.bfloat16)
    with mock.patch.object(accelerator, "multiplies_on_cpu", lambda dtype: False):
        rows, patches = linear_rows(), patch_rows()
    print(f"This CPU {'has' if has_instructions else 'lacks'} BF16 instructions. Time of torch over time in fp32:")
    print("   M      K      N     fwd   dgrad   wgrad   replaced")
    for row in rows:
        print("{M:4} {K:6} {N:6}  {fwd:6.2f}  {dgrad:6.2f}  {wgrad:6.2f}   {replaced}".format(**row))
    print("Patch embedding, forward and gradients: time of the convolution over time of the product in fp32")
    for patch in patches:
        print("{patches} patches {shape}, {features} features: {ratio:.2f}".format(**patch))
    if args.out is not None:
        about = {"command": "python benchmarks/bf16_cpu.py", "machine": record.describe_machine()}
        about["bf16_instructions"] = has_instructions
        print(f"wrote {record.save({**about, 'rows': rows, 'patch_embeddings': patches}, args.out)}")


if __name__ == "__main__":
    main()
