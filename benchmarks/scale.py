"""What a rank holds and reads while a model is loaded and written on several processes, beside what is expected.

    python benchmarks/scale.py --ranks 1 2 --out scale.json

A Qwen3 of 1.07e9 random parameters in BF16 is written to a temporary folder, and then loaded and written again as hf/
by 1, 2, ... processes of this machine (gloo). Memory is the rise of a rank's peak (VmHWM) over what it held before, in
which a small model of the family has been loaded; Linux alone counts it. One process loads as `models.load` does.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.multiprocessing as mp

from octavo import checkpoint, fp8, models, parallel
from octavo.checkpoint.export.files import Shards
from octavo.fp8.weights.shards import local_of
from octavo.models import tiny

SHAPE = {
    "hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 20, "num_attention_heads": 16,
    "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 32000, "layer_types": ["full_attention"] * 20,
    "dtype": "bfloat16",
}  # fmt: skip
KINDS: dict[str, dict[str, Any]] = {
    "bf16": {}, "fp8 rows": {"load_in_fp8": "row"}, "fp8 blocks": {"load_in_fp8": "block"},
}  # fmt: skip


def make(folder: Path, small: Path) -> None:
    """A model folder of SHAPE, each tensor made and written alone."""
    folder.mkdir()
    config = json.loads((small / "config.json").read_text()) | SHAPE
    (folder / "config.json").write_text(json.dumps(config))
    for file in small.iterdir():
        if not file.name.startswith(("config", "model")):
            (folder / file.name).write_bytes(file.read_bytes())
    stock = models.empty(folder, torch.bfloat16)
    tensors = [(name, p.dtype, tuple(p.shape)) for name, p in stock.named_parameters()]
    generator = torch.Generator().manual_seed(0)
    with Shards(folder, tensors, 10**9) as shards:
        for name, dtype, shape in tensors:
            shards.write(name, torch.randn(shape, generator=generator).mul_(0.02).to(dtype))
        shards.finish()


def status(key: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(key))


@contextmanager
def peak(into: dict[str, float], name: str) -> Iterator[None]:
    """Bytes that the process held at once inside more than before, and seconds."""
    Path("/proc/self/clear_refs").write_text("5")  # VmHWM starts anew
    before, start = status("VmHWM"), time.perf_counter()
    yield
    into[name], into[f"{name} seconds"] = status("VmHWM") - before, time.perf_counter() - start


def load(folder: str, how: dict[str, Any], world: parallel.World) -> tuple[torch.nn.Module, int]:
    """(the model, bytes read, 0 where transformers reads)"""
    if world.size == 1:
        return models.load(folder, torch.bfloat16, **how), 0
    unread = models.defer(folder, torch.bfloat16, **how)
    parallel.shard(unread.model, models.describe(unread.model), world)
    return unread.model, parallel.fill(unread.model, unread, world)[1]


def rank(number: int, size: int, port: int, place: str, kind: str) -> None:
    os.environ.update(RANK=str(number), LOCAL_RANK=str(number), WORLD_SIZE=str(size))
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), CUDA_VISIBLE_DEVICES="")
    world, found = parallel.setup(threads=1), {}
    load(f"{place}/small", KINDS[kind], world)
    with peak(found, "load"):
        model, found["read"] = load(f"{place}/large", KINDS[kind], world)
    here = [local_of(p) for p in model.parameters()]
    found["shard"] = sum(p.nbytes for p in here if not fp8.is_frozen(p)) + fp8.frozen_bytes(model)
    found["largest"] = max(p.numel() * 2 for p in model.parameters())
    with peak(found, "write"):
        checkpoint.save_hf(model, f"{place}/large", f"{place}/hf", world)
    Path(f"{place}/{number}.json").write_text(json.dumps(found))
    world.barrier()
    world.close()


def measure(ranks: list[int], place: str) -> list[dict[str, Any]]:
    rows = []
    for size in ranks:
        for kind in KINDS:
            with socket.socket() as probe:
                probe.bind(("127.0.0.1", 0))
                port = probe.getsockname()[1]
            mp.spawn(rank, (size, port, place, kind), nprocs=size)
            each = [json.loads(Path(f"{place}/{number}.json").read_text()) for number in range(size)]
            rows.append({"ranks": size, "kind": kind, **{key: max(found[key] for found in each) for key in each[0]}})
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--out", type=Path, help="a file for the figures, JSON")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        small = tiny.write("qwen3", Path(place) / "small", size="mini")
        make(Path(place) / "large", small)
        rows = measure(asked.ranks, place)
    print("| ranks | weights | shard | bound: 1.1 shard + tensor | peak of loading | read | peak of writing hf/ |")
    print("|---|---|---|---|---|---|---|")
    for row in rows:
        bound = 1.1 * row["shard"] + row["largest"]
        read = f"{row['read'] / 1e6:.0f}" if row["read"] else "all"
        sizes = [f"{value / 1e6:.0f}" for value in (row["shard"], bound, row["load"])]
        print(f"| {row['ranks']} | {row['kind']} | {' | '.join(sizes)} | {read} | {row['write'] / 1e6:.0f} |")
    if asked.out is not None:
        asked.out.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
