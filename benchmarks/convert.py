"""Times the conversion between a Hugging Face folder and DCP, compared with a plain copy of the folder.

    python benchmarks/convert.py [--gigabytes 1] [--shards 4] [--repeats 5] [--scratch FOLDER] [--out FILE]

Writes a folder of BF16 and FP8 tensors in shards and times, in turn and in this order: shutil.copytree; a copy that
syncs every file to disk (as a conversion does, so that its output survives a power failure); `hf_to_dcp`; `dcp_to_hf`
of its output; and the usual way, which loads all tensors and calls DCP's own `save`. Before timing, the converted
folder is compared with the original byte by byte. The default size writes results/convert_cpu.json; other sizes only
print their figures, unless --out is given.

Ratios are speeds relative to the synced copy. The fastest of several turns counts, because other processes may use the
machine. CPU seconds are also printed; they are decisive if all cores are busy. All reads come from the page cache,
which is the harder case: a slow disk would hide the time of checksums.
"""

from __future__ import annotations

import argparse
import filecmp
import os
import shutil
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
import turns
from safetensors.torch import load_file, save_file

from octavo.bench import record
from octavo.checkpoint import convert

RESULT = Path(__file__).resolve().parent / "results" / "convert_cpu.json"
SIZE = {"gigabytes": 1.0, "shards": 4, "repeats": 5}
COPY = "copytree, forced to the disk"


def make(folder: Path, gigabytes: float, shards: int) -> int:
    """A folder as large models have it: matrices of 8 to 32 MiB, FP8 codes with scales, small vectors; its bytes."""
    folder.mkdir()
    generator, each = torch.Generator().manual_seed(0), int(gigabytes * 1e9 / shards)
    names = {}
    for number in range(shards):
        tensors, taken, layer = {}, 0, 0
        while taken < each:
            rows = (1024, 2048, 4096)[layer % 3]
            bits = torch.randint(0, 120, (rows, 4096), generator=generator, dtype=torch.uint8)
            name = f"model.layers.{number}.{layer}"
            tensors[f"{name}.a.weight"] = bits.view(torch.float8_e4m3fn)
            tensors[f"{name}.a.weight_scale_inv"] = torch.rand(rows // 128, 32, generator=generator)
            tensors[f"{name}.b.weight"] = torch.rand(rows, 4096, generator=generator).bfloat16()
            tensors[f"{name}.norm.weight"] = torch.ones(4096)
            taken += 3 * bits.numel()
            layer += 1
        file = f"model-{number + 1:05d}-of-{shards:05d}.safetensors"
        save_file(tensors, folder / file, metadata={"format": "pt"})
        names |= dict.fromkeys(tensors, file)
    (folder / "model.safetensors.index.json").write_text(str({"weight_map": names}).replace("'", '"'))
    (folder / "config.json").write_text("{}")
    return sum(file.stat().st_size for file in folder.iterdir())


def forced(source: Path, target: Path) -> None:
    shutil.copytree(source, target)
    for file in target.iterdir():
        with open(file, "rb") as opened:
            os.fsync(opened.fileno())


def by_dcp(source: Path, target: Path) -> None:
    """What is usual: everything in memory, then DCP's own writer (which forces its files to the disk too)."""
    state: dict[str, torch.Tensor] = {}
    for file in sorted(source.glob("*.safetensors")):
        state |= load_file(file)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*single process.*")
        dcp.save({"model": state}, checkpoint_id=target, no_dist=True)


def measure(scratch: Path, gigabytes: float, shards: int, repeats: int) -> record.Result:
    source, dcp_folder = scratch / "model", scratch / "dcp"
    size = make(source, gigabytes, shards)
    convert.hf_to_dcp(source, dcp_folder)
    convert.dcp_to_hf(dcp_folder, scratch / "back")
    same, *wrong = filecmp.cmpfiles(source, scratch / "back", os.listdir(source), shallow=False)
    if any(wrong):
        raise SystemExit(f"not the same after there and back: {wrong}")
    print(f"{len(same)} files, {size / 1e9:.2f} GB: the same there and back")
    shutil.rmtree(scratch / "back")
    out = scratch / "out"
    ways: dict[str, Callable[[], object]] = {
        "copytree": lambda: shutil.copytree(source, out),
        COPY: lambda: forced(source, out),
        "octavo hf_to_dcp": lambda: convert.hf_to_dcp(source, out),
        "octavo dcp_to_hf": lambda: convert.dcp_to_hf(dcp_folder, out),
        "load all, then dcp.save": lambda: by_dcp(source, out),
    }
    # before each turn, so that no turn pays for writes of the one before
    taken = turns.take(ways, repeats, before=os.sync, after=lambda: shutil.rmtree(out), warmup=1)
    case = f"{size / 1e9:.2f} GB in {shards} shards"
    rows = [
        record.Row("convert", case, name, min(each.seconds), each.spread, bytes=size, baseline=COPY)
        for name, each in taken.items()
    ]
    cpu = {name: min(each.cpu_seconds) for name, each in taken.items()}
    settings = {"repeats": repeats, "workers": 4, "cpu_seconds": cpu}
    return record.Result("cpu", gigabytes < 1, rows, settings=settings)


def at_least_two(text: str) -> int:
    """Turns of each way: their spread takes two."""
    if (number := int(text)) < 2:
        raise argparse.ArgumentTypeError(f"{number} says nothing of a spread; take 2 or more")
    return number


def main(words: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gigabytes", type=float)
    parser.add_argument("--shards", type=int)
    parser.add_argument("--repeats", type=at_least_two)
    parser.add_argument("--scratch", type=Path, help="where; its disk must hold five times the folder")
    parser.add_argument(
        "--out", type=Path, help="the result file; by default the repository's, if the size is the default too"
    )
    parser.set_defaults(**SIZE)
    args = parser.parse_args(words)
    default = all(getattr(args, name) == value for name, value in SIZE.items())
    with tempfile.TemporaryDirectory(dir=args.scratch) as scratch:
        result = measure(Path(scratch), args.gigabytes, args.shards, args.repeats)
    for row in record.table(result):
        print("  ".join(f"{cell:<{width}}" for cell, width in zip(row[2:], (26, 10, 6, 12, 30, 6), strict=True)))
    for name, seconds in result.settings["cpu_seconds"].items():
        print(f"{name:<28}  {seconds:.3f} CPU s")
    if out := args.out or (RESULT if default else None):
        sizes = "".join(f" --{name} {getattr(args, name)}" for name in SIZE if not default)
        print(f"wrote {record.save(result.to_json() | {'command': f'python benchmarks/convert.py{sizes}'}, out)}")
    else:
        print("wrote no file: this is not the default size; --out FILE keeps the figures")


if __name__ == "__main__":
    main()
