"""Measures the memory, reads and communication of a rank on several processes, compared with the expected values.

    python benchmarks/scale.py --ranks 1 2 --out scale.json                  loads and writes a model
    python benchmarks/scale.py --steps --out benchmarks/results/scale.json   a step of packs, on 1, 2 and 4 processes

A Qwen3 with 1.07e9 random parameters in BF16 is written to a temporary folder, and then loaded and written again as hf/
by 1, 2, ... processes of this machine (gloo). Memory is the increase of a rank's peak (VmHWM, Linux only), measured
after a small model of the family was loaded. A single process loads like `models.load`.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import socket
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from typing import Any

import torch
import torch.multiprocessing as mp

from octavo import checkpoint, models, parallel, train
from octavo.checkpoint.export.files import Shards
from octavo.config import load_config_text
from octavo.data.builtin import digits
from octavo.fp8.weights import frozen_bytes, is_frozen
from octavo.fp8.weights.shards import local_of
from octavo.models.tiny import tiny
from octavo.train.estimate import step_time
from octavo.train.estimate.memory import MemoryEstimator
from octavo.train.setup import planning
from octavo.train.setup.token_counts import Tokens

SHAPE = {
    "hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 20, "num_attention_heads": 16,
    "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 32000, "layer_types": ["full_attention"] * 20,
    "dtype": "bfloat16",
}  # fmt: skip
KINDS: dict[str, dict[str, Any]] = {
    "bf16": {}, "fp8 rows": {"load_in_fp8": "row"}, "fp8 blocks": {"load_in_fp8": "block"},
}  # fmt: skip


def make(folder: Path, small: Path) -> None:
    """A model folder of SHAPE, each tensor made and written by itself."""
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
    Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM
    before, start = status("VmHWM"), time.perf_counter()
    yield
    into[name], into[f"{name} seconds"] = status("VmHWM") - before, time.perf_counter() - start


def load(folder: str, how: dict[str, Any], world: parallel.World) -> tuple[torch.nn.Module, int]:
    """(the model, bytes read, 0 where transformers reads)"""
    if world.size == 1:
        return models.load(folder, torch.bfloat16, **how), 0
    unread = models.load_deferred(folder, torch.bfloat16, **how)
    parallel.shard(unread.model, models.describe(unread.model), world)
    return unread.model, parallel.load_into_shards(unread.model, unread, world)[1]


def rank(number: int, size: int, port: int, place: str, kind: str) -> None:
    os.environ.update(RANK=str(number), LOCAL_RANK=str(number), WORLD_SIZE=str(size))
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), CUDA_VISIBLE_DEVICES="")
    world, peaks = parallel.setup(threads=1), {}
    load(f"{place}/small", KINDS[kind], world)
    with peak(peaks, "load"):
        model, peaks["read"] = load(f"{place}/large", KINDS[kind], world)
    here = [local_of(p) for p in model.parameters()]
    peaks["shard"] = sum(p.nbytes for p in here if not is_frozen(p)) + frozen_bytes(model)
    peaks["largest"] = max(p.numel() * 2 for p in model.parameters())
    with peak(peaks, "write"):
        checkpoint.save_hf(model, f"{place}/large", f"{place}/hf", world)
    Path(f"{place}/{number}.json").write_text(json.dumps(peaks))
    world.barrier()
    world.close()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def measure(ranks: list[int], place: str) -> list[dict[str, Any]]:
    rows = []
    for size in ranks:
        for kind in KINDS:
            mp.spawn(rank, (size, free_port(), place, kind), nprocs=size)
            each = [json.loads(Path(f"{place}/{number}.json").read_text()) for number in range(size)]
            rows.append({"ranks": size, "kind": kind, **{key: max(one[key] for one in each) for key in each[0]}})
    return rows


MESHES: dict[str, tuple[int, tuple[str, ...]]] = {
    "one process": (1, ()),
    "shard 2": (2, ()),
    "shard 2, codes gathered": (2, ("fp8.param=true",)),
    "replicate 2": (2, ("parallel.replicate=2",)),
    "shard 4": (4, ()),
    "replicate 2, shard 2": (4, ("parallel.replicate=2",)),
    "context 2": (2, ("parallel.context=2",)),
    "shard 2, context 2, expert 2": (4, ("parallel.context=2", "parallel.expert=2")),
}  # fmt: skip
RUN = """
model: {{path: {place}/moe}}
fp8: {{recipe: blockwise}}
data: {{train: [{{path: {place}/digits/train.json}}], packing: true, window: 64}}
train: {{steps: 1, seq_length: 512, micro_batch: 1, global_batch: 4, lr: 1e-3}}
run: {{dir: {place}/run, resume: never, health_every: 0, tensorboard: false, hf: false, threads: 1}}
"""
HELD = ("weights", "master", "gradients", "optimizer", "codes")


class Counting(train.Callback):
    """Counts the bytes of the collectives of each step, and keeps what the last one gave."""

    def before_step(self, run: train.Run, number: int, batches: Any) -> train.Observe:
        self.batches, self.wire = len(batches), parallel.CommCounter()
        self.patches = sum(int(batch["image_grid_thw"].prod(-1).sum()) for batch in batches) // len(batches)
        self.wire.__enter__()
        return train.Observe(memory=True)

    def after_step(self, run: train.Run, step: train.Step) -> None:
        self.wire.__exit__(None, None, None)
        self.row = {**step.row}


def step_rank(number: int, size: int, port: int, place: str, overrides: tuple[str, ...]) -> None:
    os.environ.update(RANK=str(number), LOCAL_RANK=str(number), WORLD_SIZE=str(size))
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), CUDA_VISIBLE_DEVICES="")
    cfg, counting = load_config_text(RUN.format(place=place), list(overrides)), Counting()
    with Path(os.devnull).open("w") as nothing, redirect_stdout(nothing):
        train.run(cfg, callbacks=[counting])
    figures = {"wire": parallel.predicted_collectives(counting.wire.bytes), "batches": counting.batches}
    figures |= {
        "patches": counting.patches,
        "held": sum(counting.row["memory"][kind] for kind in HELD),
        "padding": counting.row["padding"],
    }
    Path(f"{place}/{number}.json").write_text(json.dumps(figures))


def expected(place: str, size: int, overrides: tuple[str, ...], patches: int) -> tuple[dict[str, int], int]:
    """(bytes of each collective in a micro-batch with images of so many patches, bytes held) of the rank that has most,
    as `octavo plan` has them."""
    cfg = load_config_text(RUN.format(place=place), list(overrides))
    model, family = planning.meta_model(cfg)
    plan, _, _ = planning.plan_model(cfg, model, family, size)
    counts = {"foundation": 512, "lm_head": 512, "image_encoder": patches, "image_projector": patches // 4}
    tokens = Tokens(counts, 512, 64)
    sizes = MemoryEstimator(cfg, model, family, plan, tokens, device="cpu")
    layout = parallel.Layout.from_section(size, cfg.parallel)
    work = step_time.estimate_work(sizes, cfg)
    mesh = step_time.Mesh.from_layout(layout, cfg.parallel.ulysses, work.decoder.heads)
    moved = step_time.total_bytes(work.groups(layout), work.decoder, work.rows, mesh, work.two_backwards)
    kinds = sizes.estimate(cfg, size).kinds
    return step_time.by_collective(moved), sum(kinds[kind] for kind in HELD)


def steps(place: str) -> list[dict[str, Any]]:
    tiny.write("qwen3_vl_moe", Path(place) / "moe", size="mini")
    digits.write(Path(place) / "digits", train=96, test=8)
    rows = []
    for name, (size, overrides) in MESHES.items():
        shutil.rmtree(f"{place}/run", ignore_errors=True)
        mp.spawn(step_rank, (size, free_port(), place, overrides), nprocs=size)
        each = [json.loads(Path(f"{place}/{number}.json").read_text()) for number in range(size)]
        wire, held = expected(place, size, overrides, each[0]["patches"])
        rows.append({
            "mesh": name, "ranks": size, "held": max(figures["held"] for figures in each), "held predicted": held,
            "wire": [figures["wire"] for figures in each], "micro-batches": each[0]["batches"],
            "wire predicted": {name: each[0]["batches"] * size for name, size in wire.items()},
            "padding": each[0]["padding"],
        })  # fmt: skip
    return rows


def show_steps(rows: list[dict[str, Any]]) -> None:
    print("| mesh | processes | received in a step | predicted | held between steps | predicted | padding |")
    print("|---|---|---|---|---|---|---|")
    for row in rows:
        sums = [sum(wire.values()) for wire in row["wire"]]
        exact = all(wire == row["wire predicted"] for wire in row["wire"])
        held = f"{row['held']:,} | {'equal' if row['held'] == row['held predicted'] else row['held predicted']}"
        wire = f"{max(sums):,} | {'equal' if exact else format(sum(row['wire predicted'].values()), ',')}"
        print(f"| {row['mesh']} | {row['ranks']} | {wire} | {held} | {row['padding']:.1%} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--out", type=Path, help="a file for the figures, JSON")
    parser.add_argument("--steps", action="store_true", help="steps under several meshes instead")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        if args.steps:
            rows = steps(place)
            show_steps(rows)
            if args.out is not None:
                args.out.write_text(json.dumps(rows, indent=1) + "\n")
            return
        small = tiny.write("qwen3", Path(place) / "small", size="mini")
        make(Path(place) / "large", small)
        rows = measure(args.ranks, place)
    print("| ranks | weights | shard | bound: 1.1 shard + tensor | peak of loading | read | peak of writing hf/ |")
    print("|---|---|---|---|---|---|---|")
    for row in rows:
        bound = 1.1 * row["shard"] + row["largest"]
        read = f"{row['read'] / 1e6:.0f}" if row["read"] else "all"
        sizes = [f"{value / 1e6:.0f}" for value in (row["shard"], bound, row["load"])]
        print(f"| {row['ranks']} | {row['kind']} | {' | '.join(sizes)} | {read} | {row['write'] / 1e6:.0f} |")
    if args.out is not None:
        args.out.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
