"""The training of the text studies: a small decoder trained from scratch on source and documentation of Python.

It has 1.09 million parameters (Qwen3; other families differ in size). Documents are split by file into a training and a
held-out set. Held-out text is the middle of each held-out file, so that the licence header is not evaluated 55 times.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from octavo.base import atomic_write
from octavo.config import Config, load_config_text
from octavo.data.builtin import text
from octavo.models.tiny import tiny

LAYERS = {"qwen3": 6, "qwen3_moe": 2, "mpt": 2}
LENGTH = 128  # tokens of a sample
HELD = 1200  # characters of each held-out file
CONFIG = """
model: {{path: {home}/{family}, init: random}}
fp8: {{recipe: "off"}}
data:
  train: [{{path: {home}/text/train.jsonl}}]
  eval: [{{path: {home}/held_out.jsonl}}]
train:
  {{phase: pretrain, steps: {steps}, seq_length: {length}, micro_batch: 8, global_batch: 8, lr: 3e-3, schedule: cosine,
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
        atomic_write.write_text(held, "".join(json.dumps({"text": middle}) + "\n" for middle in middles))
    if not (home / family).exists():
        tiny.write(family, home / family)
    file, layers = home / family / "config.json", LAYERS[family]
    config = json.loads(file.read_text(encoding="utf-8"))
    wanted = _of(family, layers)
    if any(config[key] != value for key, value in wanted.items()):  # new, or a kill came between the two
        atomic_write.write_text(file, json.dumps(config | wanted, indent=2) + "\n")
    return load_config_text(CONFIG.format(home=home, length=LENGTH, family=family, steps=steps), ())


def _of(family: str, layers: int) -> dict[str, Any]:
    """The keys of a family's config.json that the studies set."""
    if family == "mpt":
        return {"n_layers": layers, "max_seq_len": LENGTH}
    return {"num_hidden_layers": layers, "layer_types": ["full_attention"] * layers}
