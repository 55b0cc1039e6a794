"""A device of another vendor trains tiny models with the reference backend, with the losses of the CPU bit for bit.

The device is :mod:`tests.device.mimic`, registered through torch's PrivateUse1 hooks in a separate process. It has no
streams, pinned memory, generator or statistics; features that need them are disabled or rejected by name.
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
UNSUPPORTED = ("optimizer.offload=true", "train.offload_activations=true", "train.cuda_graphs=true")


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write `mimic.so`, a text, a vision and an MoE model, rows for them, and `run.yaml`."""
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
    """Return the output of :func:`tests.device.mimic.main` for these runs."""
    words = [sys.executable, "-m", "tests.device.mimic", str(place / "mimic.so"), mimic.NAME, str(place / "run.yaml")]
    done = subprocess.run([*words, *runs], env=os.environ | environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_device_trains_like_the_cpu_bit_for_bit(place: Path) -> None:
    """Text, vision and MoE models and a stopped run, each through `train.run`; a checkpoint is resumed on the CPU."""

    def overrides(name: str, *words: str) -> str:
        return " ".join((f"run.dir={place / name}", *words))

    vision = f"model.path={place / 'tiny'} data.train.0.path={place / 'digits/train.json'} train.steps=2"
    experts = f"model.path={place / 'experts'} train.steps=2"
    kinds = {"text": "", "vision": vision, "experts": experts}
    stopped = [overrides("stopped", "stop=2"), overrides("stopped", "run.resume=auto"), overrides("moved", "stop=2")]
    refused = [overrides("refused", word) for word in UNSUPPORTED]
    output = on_mimic(place, *(overrides(f"{name}_there", words) for name, words in kinds.items()), *stopped, *refused)
    *uninterrupted, stopped_run, resumed_run, _, offload, activations, graphs = output["runs"]
    for (name, words), result in zip(kinds.items(), uninterrupted, strict=True):
        cfg = load_config_text((place / "run.yaml").read_text(), overrides(f"{name}_cpu", words).split())
        assert result == {"losses": list(train.run(cfg).losses().values()), "device": "mimic:0"}, name
    assert stopped_run["losses"] == uninterrupted[0]["losses"][:2]
    assert "mimic has only its default stream" in offload["error"] and "=false" in offload["error"]
    assert "train.offload_activations: the device cannot copy while it computes" in activations["error"]
    assert "train.cuda_graphs: true is not possible" in graphs["error"] and "mimic:0" in graphs["error"]
    assert output["here"] == "mimic"
    abilities = {name for name, is_supported in output["abilities"].items() if is_supported}
    assert abilities == {"FP8 dtypes", "float64"}
    record = json.loads((place / "text_cpu/environment.json").read_text())["accelerator"]
    assert record == {"type": "cpu", "found": "cpu", "high": "fp32"}
    cfg = load_config_text((place / "run.yaml").read_text(), overrides("moved", "run.resume=auto").split())
    assert resumed_run["losses"] == list(train.run(cfg).losses().values()) == uninterrupted[0]["losses"]


def test_device_without_fp8_dtypes_is_used_only_if_named(place: Path) -> None:
    """Without FP8 dtypes the CPU is used. If the device is named, FP8 is rejected and high precision trains."""
    single_step = "train.steps=1 train.warmup=0 run.dir="
    runs = (
        f"{single_step}{place / 'left'}",
        f"{single_step}{place / 'fp8'} device=mimic",
        f"{single_step}{place / 'high'} fp8.recipe=off",
    )
    output = on_mimic(place, *runs, MIMIC_WITHOUT_FP8="1")
    left_out, refused, high = output["runs"]
    record = json.loads((place / "left/environment.json").read_text())["accelerator"]
    assert left_out["device"] == "cpu" and record["found"] == "mimic"
    assert record["left_out"].startswith("mimic does not support float8_e4m3fn")
    assert "reference: mimic does not support float8_e4m3fn and float8_e5m2" in refused["error"]
    assert high["device"] == "mimic:0" and not output["abilities"]["FP8 dtypes"]
