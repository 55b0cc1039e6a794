"""A device of another vendor trains the tiny models by the reference, with the CPU's losses bit for bit.

The device is :mod:`tests.device.mimic`, registered through torch's PrivateUse1 hooks in a process of its own: it has no
streams, no pinned memory, no generator and no statistics, and what stands on those is gone without or refused by name.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from octavo import train
from octavo.config import load_config_text
from octavo.data.builtin import digits
from octavo.models.tiny import tiny
from tests.device import mimic

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(mimic.compiler() is None, reason="no C++ compiler builds the example device"),
]
REFUSED = ("optimizer.offload=true", "train.offload_activations=true", "train.cuda_graphs=true")


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with `mimic.so`, models of words, of images and of experts, rows for them, and `run.yaml`."""
    folder = tmp_path_factory.mktemp("device")
    mimic.build(folder)
    for name, kind in (("text", "qwen3"), ("tiny", "qwen3_vl"), ("experts", "qwen3_moe")):
        tiny.write(kind, folder / name, size="mini")
    digits.write(folder / "digits", train=8, test=1)
    rows = [{"messages": [{"role": "user", "content": f"{n}?"}, {"role": "assistant", "content": f"it is {n}"}]}
            for n in range(12)]  # fmt: skip
    (folder / "rows.json").write_text(json.dumps(rows))
    (folder / "run.yaml").write_text(
        f"""
model: {{path: {folder / "text"}, attention: eager}}
fp8: {{recipe: blockwise}}
data: {{train: [{{path: {folder / "rows.json"}}}]}}
train: {{steps: 3, seq_length: 128, micro_batch: 2, global_batch: 4, lr: 2e-3, warmup: 1}}
run: {{dir: {folder / "none"}, health_every: 0, tensorboard: false, hf: false, threads: 1}}
"""
    )
    return folder


def on_mimic(place: Path, *runs: str, **environment: str) -> dict[str, Any]:
    """What :func:`tests.device.mimic.main` tells of these runs."""
    words = [sys.executable, "-m", "tests.device.mimic", str(place / "mimic.so"), mimic.NAME, str(place / "run.yaml")]
    done = subprocess.run([*words, *runs], env=os.environ | environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_it_trains_as_the_cpu_does_bit_for_bit(place: Path) -> None:
    """Text, images and experts, a run that was stopped, each through `train.run`; a checkpoint goes on on the CPU."""

    def of(name: str, *words: str) -> str:
        return " ".join((f"run.dir={place / name}", *words))

    vision = f"model.path={place / 'tiny'} data.train.0.path={place / 'digits/train.json'} train.steps=2"
    experts = f"model.path={place / 'experts'} train.steps=2"
    kinds = {"text": "", "vision": vision, "experts": experts}
    stopped = [of("stopped", "stop=2"), of("stopped", "run.resume=auto"), of("moved", "stop=2")]
    refused = [of("refused", word) for word in REFUSED]
    told = on_mimic(place, *(of(f"{name}_there", words) for name, words in kinds.items()), *stopped, *refused)
    *whole, halt, rest, _, offload, activations, graphs = told["runs"]
    for (name, words), found in zip(kinds.items(), whole, strict=True):
        cfg = load_config_text((place / "run.yaml").read_text(), of(f"{name}_cpu", words).split())
        assert found == {"losses": list(train.run(cfg).losses().values()), "device": "mimic:0"}, name
    assert halt["losses"] == whole[0]["losses"][:2]
    assert "no streams and events besides its default one" in offload["error"] and "=false" in offload["error"]
    assert "train.offload_activations: the device cannot copy while it computes" in activations["error"]
    assert "train.cuda_graphs: true is not possible" in graphs["error"] and "mimic:0" in graphs["error"]
    assert told["here"] == "mimic"
    has = {name for name, found in told["abilities"].items() if found}
    assert has == {"FP8 dtypes", "float64"}
    record = json.loads((place / "text_cpu/environment.json").read_text())["accelerator"]
    assert record == {"type": "cpu", "found": "cpu", "high": "fp32"}
    cfg = load_config_text((place / "run.yaml").read_text(), of("moved", "run.resume=auto").split())
    assert rest["losses"] == list(train.run(cfg).losses().values()) == whole[0]["losses"]


def test_without_fp8_dtypes_it_is_left_to_who_names_it(place: Path) -> None:
    """The CPU trains then; named, it refuses FP8 with the lack, and trains in high precision."""
    one = "train.steps=1 train.warmup=0 run.dir="
    runs = f"{one}{place / 'left'}", f"{one}{place / 'fp8'} device=mimic", f"{one}{place / 'high'} fp8.recipe=off"
    told = on_mimic(place, *runs, MIMIC_WITHOUT_FP8="1")
    left, refused, high = told["runs"]
    record = json.loads((place / "left/environment.json").read_text())["accelerator"]
    assert left["device"] == "cpu" and record["found"] == "mimic"
    assert record["left_out"].startswith("mimic does not support float8_e4m3fn")
    assert "reference: mimic does not support float8_e4m3fn and float8_e5m2" in refused["error"]
    assert high["device"] == "mimic:0" and not told["abilities"]["FP8 dtypes"]
