"""Peak memory of loading a generated checkpoint of one billion parameters."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from octavo import models
from octavo.models.tiny import tiny
from tests.models.fp8_folders import BLOCK, LINEAR

LAYERS, HIDDEN, INTERMEDIATE, VOCABULARY = 20, 2048, 6144, 32000

# In a process of its own: all is imported once, and each kind is loaded in a fork, first a small model of the family,
# so that everything was done once, then the large one, measured.
MEASURE = """
import json, os, sys, torch
from octavo import models
from octavo.fp8 import weights
def status(key):
    return next(int(line.split()[1]) * 1024 for line in open("/proc/self/status") if line.startswith(key))
def measure(kind, folder):
    asked = None if kind == "folder" else kind
    models.load(small, torch.bfloat16, load_in_fp8=asked or "block")
    peaks = {"RssAnon": 0, "VmRSS": 0}
    def look(done, total):
        for key in peaks:
            peaks[key] = max(peaks[key], status(key))
    open("/proc/self/clear_refs", "w").write("5")  # VmHWM starts anew
    before = {key: status(key) for key in ("VmHWM", "RssAnon", "VmRSS")}
    model = models.load(folder, torch.bfloat16, load_in_fp8=asked, progress=look)
    peaks["VmHWM"] = status("VmHWM")
    codes = [weights.codes_of_frozen(w) for _, w in weights.frozen_weights(model)]
    size = sum(q.data.nbytes + q.scale.nbytes for q in codes)
    size += sum(p.nbytes for p in model.parameters() if not weights.is_frozen(p))
    size += sum(b.nbytes for b in model.buffers())
    quantized = sum(q.data.numel() for q in codes)
    per = sum(q.data.nbytes + q.scale.nbytes for q in codes) / quantized
    count = sum(p.numel() for p in model.parameters())
    grown = {key: peaks[key] - before[key] for key in peaks}
    found = {"kind": kind, "size": size, "parameters": count, "quantized": quantized, "per": per, **grown}
    print(json.dumps(found), flush=True)
small = sys.argv[1]
models.load(small, torch.bfloat16)
for kind, folder in zip(sys.argv[2::2], sys.argv[3::2]):
    if os.fork() == 0:
        measure(kind, folder)
        os._exit(0)
    assert os.wait()[1] == 0, kind
"""
KINDS = ("row", "block", "tensor", "folder")


def shapes(folder: Path) -> dict[str, tuple[int, ...]]:
    model = models.empty(folder)
    return {name: tuple(p.shape) for name, p in model.named_parameters()}


def written(folder: Path, small: Path, fp8: bool) -> Path:
    """A Qwen3 of 1.0e9 parameters in shards, each tensor made and written alone: making it takes no memory to speak of.

    The values are random bytes that are numbers: BF16 of magnitude 2^-6 to 2^-5, or codes below NaN with scales.
    """
    folder.mkdir()
    config = json.loads((small / "config.json").read_text())
    config |= {
        "hidden_size": HIDDEN,
        "intermediate_size": INTERMEDIATE,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": VOCABULARY,
        "layer_types": ["full_attention"] * LAYERS,
        "dtype": "bfloat16",
        **({"quantization_config": BLOCK} if fp8 else {}),
    }
    (folder / "config.json").write_text(json.dumps(config))
    entries: list[tuple[str, str, tuple[int, ...]]] = []
    for name, shape in shapes(folder).items():
        codes = fp8 and LINEAR.search(name) is not None
        entries.append((name, "F8_E4M3" if codes else "BF16", shape))
        if codes:
            entries.append((f"{name}_scale_inv", "F32", (-(-shape[0] // 128), -(-shape[1] // 128))))
    weight_map: dict[str, str] = {}
    for number in range(4):
        part, file = entries[number::4], f"model-{number + 1:05d}-of-00004.safetensors"
        weight_map |= {name: file for name, _, _ in part}
        write_shard(folder / file, part, number)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return folder


def write_shard(file: Path, entries: list[tuple[str, str, tuple[int, ...]]], seed: int) -> None:
    size = {"BF16": 2, "F8_E4M3": 1, "F32": 4}
    header, at = {}, 0
    for name, kind, shape in entries:
        end = at + torch.Size(shape).numel() * size[kind]
        header[name] = {"dtype": kind, "shape": list(shape), "data_offsets": [at, end]}
        at = end
    text = json.dumps(header).encode()
    generator = torch.Generator().manual_seed(seed)
    count = 1 << 22  # random values, written again and again
    values = {
        "F8_E4M3": torch.randint(0, 127, (count,), dtype=torch.uint8, generator=generator),
        "BF16": torch.randint(0x3C80, 0x3D00, (count,), dtype=torch.int16, generator=generator),
        "F32": torch.rand(count, generator=generator) + 0.5,
    }
    with open(file, "wb") as out:
        out.write(len(text).to_bytes(8, "little") + text)
        for _, kind, shape in entries:
            left = torch.Size(shape).numel()
            while left:
                out.write(memoryview(values[kind][:left].view(torch.uint8).numpy()))
                left -= min(left, count)


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, float]]:
    """Peak memory of loading each kind."""
    place = tmp_path_factory.mktemp("billion")
    small = tiny.write("qwen3", place / "small", size="mini")
    plain, coded = written(place / "bf16", small, False), written(place / "fp8", small, True)
    pairs = [str(word) for kind in KINDS for word in (kind, coded if kind == "folder" else plain)]
    ran = subprocess.run(
        [sys.executable, "-c", MEASURE, str(small), *pairs],
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert ran.returncode == 0, ran.stderr[-2000:]
    return {actual["kind"]: actual for actual in map(json.loads, ran.stdout.splitlines())}


@pytest.mark.long
@pytest.mark.rare
@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="the kernel's counts of memory are Linux's")
@pytest.mark.parametrize("kind", KINDS)
def test_peak_memory_is_the_model(measured: dict[str, dict[str, float]], kind: str) -> None:
    actual = measured[kind]
    ratios = {key: actual[key] / actual["size"] for key in ("VmHWM", "VmRSS", "RssAnon")}
    print(
        f"{kind}: {actual['parameters'] / 1e9:.2f}e9 parameters, {actual['size'] / 1e6:.0f} MB of model, "
        f"{actual['per']:.4f} bytes a quantized parameter, peak over it "
        + ", ".join(f"{key} {ratio:.3f}" for key, ratio in ratios.items())
    )
    assert actual["parameters"] > 0.99e9 and actual["quantized"] > 0.8 * actual["parameters"]
    assert actual["per"] <= 1.02
    assert max(ratios.values()) <= 1.1
