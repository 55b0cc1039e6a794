"""What the studies of text train: a small decoder from nothing, on source and documentation of the installed Python.

1.09 million parameters, split by file: documents of the training set are not in the held-out one. Held-out text is the
middle of each held-out file, so that no licence header is judged 55 times.
"""

from __future__ import annotations

import json
from pathlib import Path

from octavo import atomic
from octavo.config import Config, load_config_text
from octavo.data import text
from octavo.models import tiny

LAYERS = {"qwen3": 6, "qwen3_moe": 2}
HELD = 1200  # characters of each held-out file
CONFIG = """
model: {{path: {home}/{family}, init: random}}
fp8: {{recipe: "off"}}
data:
  train: [{{path: {home}/text/train.jsonl}}]
  eval: [{{path: {home}/held_out.jsonl}}]
train:
  {{phase: pretrain, steps: {steps}, seq_length: 128, micro_batch: 8, global_batch: 8, lr: 3e-3, schedule: cosine,
    warmup: 20, min_lr: 3e-4}}
optimizer: {{weight_decay: 0.1}}
"""


def prepare(home: Path, steps: int, family: str = "qwen3") -> Config:
    """Data and model below ``home``, and the configuration of high precision."""
    home.mkdir(parents=True, exist_ok=True)
    if not (home / "text").exists():
        text.write(home / "text")
    held = home / "held_out.jsonl"
    if not held.exists():
        rows = [json.loads(line)["text"] for line in (home / "text/test.jsonl").read_text("utf-8").splitlines()]
        middles = [row[len(row) // 3 :][:HELD] for row in rows]
        atomic.write_text(held, "".join(json.dumps({"text": middle}) + "\n" for middle in middles))
    if not (home / family).exists():
        tiny.write(family, home / family)
    file, layers = home / family / "config.json", LAYERS[family]
    config = json.loads(file.read_text(encoding="utf-8"))
    if config["num_hidden_layers"] != layers:  # new, or a kill came between the two
        config |= {"num_hidden_layers": layers, "layer_types": ["full_attention"] * layers}
        atomic.write_text(file, json.dumps(config, indent=2) + "\n")
    return load_config_text(CONFIG.format(home=home, family=family, steps=steps), ())
