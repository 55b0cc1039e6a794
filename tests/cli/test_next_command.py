"""The command that a finished run advises works for its model: it is executed for each kind of run."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM, Qwen3Config

from octavo.checkpoint import verify
from octavo.cli.main import main
from octavo.models.tiny import tiny

ROW = ("fp8.recipe=rowwise",)
BLOCK = ("fp8.recipe=blockwise",)
LORA = ("lora={rank: 2}",)
PREFERENCE = ("train.phase=preference", "data.train=[{path: pairs.jsonl}]")
RL = (
    "train.phase=rl", "data.train=[{path: prompts.jsonl}]", "rl.group=2", "rl.rewards=[exact_match]",
    "rl.max_new_tokens=2", "rl.prompts=2",
)  # fmt: skip


def write_text_model(folder: Path, hidden: int, inner: int, heads: int) -> None:
    tiny.write("qwen3", folder)
    config = Qwen3Config.from_pretrained(folder)
    config.hidden_size, config.intermediate_size, config.num_hidden_layers = hidden, inner, 2
    config.num_attention_heads = config.num_key_value_heads = heads
    config.head_dim = hidden // heads
    config.layer_types = config.layer_types[:2]
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Models whose layers fit blocks of 128 x 128 (whole), in part (down) and not (ragged), rows, a configuration."""
    home = tmp_path_factory.mktemp("next")
    write_text_model(home / "whole", 128, 256, 1)
    write_text_model(home / "down", 192, 128, 4)
    write_text_model(home / "ragged", 96, 160, 3)
    tiny.write("qwen3_vl", home / "vision", size="mini")
    said = [
        {"messages": [{"role": "user", "content": f"{n}?"}, {"role": "assistant", "content": "yes"}]} for n in range(4)
    ]
    pairs = [{"prompt": f"{n}?", "chosen": "yes", "rejected": "no"} for n in range(4)]
    prompts = [{"prompt": f"{n}?", "answer": "yes"} for n in range(4)]
    for name, rows in (("rows", said), ("pairs", pairs), ("prompts", prompts)):
        (home / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (home / "key").write_text("0f" * 16 + "a1" * 16)
    (home / "key").chmod(0o600)
    (home / "run.yaml").write_text(
        "model: {path: whole}\ndata: {train: [{path: rows.jsonl}]}\n"
        "train: {steps: 1, micro_batch: 2, seq_length: 64}\n"
        "run: {dir: run, tensorboard: false, health_every: 0, threads: 1}\n"
    )
    return home


CASES = {
    "blocks": (("model.path=whole", *BLOCK), "fp8-block"),
    "some-blocks": (("model.path=down", *BLOCK), "fp8-dynamic"),
    "no-blocks": (("model.path=ragged", *BLOCK), "fp8-dynamic"),
    "rows": (("model.path=whole", *ROW), "fp8-dynamic"),
    "off": (("model.path=whole", "fp8.recipe=off"), "bf16"),
    "forward-off": (("model.path=whole", *BLOCK, "fp8.foundation.fwd=bf16"), "bf16"),
    "off-but-tower": (("model.path=vision", "fp8.recipe=off", "fp8.image_encoder.recipe=blockwise"), "bf16"),
    "tower": (("model.path=vision", *BLOCK), "fp8-dynamic"),
    "lora": (("model.path=whole", *BLOCK, *LORA), "auto"),
    "lora-ragged": (("model.path=ragged", *BLOCK, *LORA), "auto"),
    "lora-fp8-base": (("model.path=whole", "fp8.recipe=off", "model.load_in_fp8=rowwise", *LORA), "auto"),
    "lora-off": (("model.path=whole", "fp8.recipe=off", *LORA), "auto"),
    "preference": (("model.path=ragged", *BLOCK, *PREFERENCE), "fp8-dynamic"),
    "rl": (("model.path=ragged", *BLOCK, *RL), "fp8-dynamic"),
    "encrypted": (("model.path=whole", *BLOCK, "run.encrypt=true", "--key-file", "key"), "fp8-block"),
    "lora-encrypted": (("model.path=whole", "fp8.recipe=off", "run.encrypt=true", *LORA, "--key-file", "key"), "auto"),
}

QUICK = ("blocks", "some-blocks", "off", "tower", "lora-fp8-base", "preference", "rl", "encrypted")


@pytest.mark.parametrize("case", [pytest.param(c, marks=() if c in QUICK else pytest.mark.long) for c in CASES])
def test_advised_command_works(case, home, monkeypatch, capsys):
    arguments, format = CASES[case]
    monkeypatch.chdir(home)
    batch = () if case == "rl" else ("train.global_batch=2",)  # a step of phase rl is rl.prompts x rl.group
    assert main(["train", "run.yaml", *batch, *arguments, f"run.dir={case}"]) == 0
    *before, last = capsys.readouterr().out.splitlines()
    if "lora" in case:  # in BF16, or in FP8 if the adapter survives
        *before, first = before
        assert main(shlex.split(first.removeprefix("next: octavo "))) == 0 and "--format bf16" in first
        assert json.loads((home / f"{case}-merged/octavo_export.json").read_text())["format"] == "bf16"
        last = last.replace("or in FP8: ", "next: ")
    words = shlex.split(last.removeprefix("next: octavo "))
    assert last.startswith("next: octavo ") and words[0] == ("merge" if "lora" in case else "export")
    assert (words[words.index("--format") + 1] if "--format" in words else None) == format
    assert before[-1].startswith("export format: ") == (format not in ("bf16", None))
    assert main(words) == 0
    note = json.loads((home / words[2] / "octavo_export.json").read_text())
    assert verify(home / words[2], quick=True).ok
    if format == "auto":  # one step on codes changes less than half a code
        assert note["format"] == "bf16" and "(bf16 if rounding would remove the adapter)" in before[-1]
    else:
        assert note["format"] == (format or "bf16")
