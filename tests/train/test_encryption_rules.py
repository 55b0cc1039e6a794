"""What a run is refused for before it begins, for the sake of its key."""

from __future__ import annotations

from pathlib import Path

import pytest

from octavo.base import encryption
from octavo.base.encryption.key import write_new
from octavo.config import Config, load_config
from octavo.train import TrainError
from octavo.train.run_dir import encryption_rules


def config(folder: Path, reward: str) -> Config:
    (folder / "own.py").write_text("def score(completions): return [0.0] * len(completions)\n")
    (folder / "run.yaml").write_text(f"""
model: {{path: model}}
data: {{train: [{{path: rows.jsonl}}]}}
train: {{steps: 1, seq_length: 64, micro_batch: 1, lr: 1e-3, phase: rl}}
rl: {{prompts: 1, group: 4, max_new_tokens: 4, rewards: [number, {{reward: "{reward}"}}]}}
run: {{dir: run}}
""")
    return load_config(folder / "run.yaml")


def test_a_key_in_the_environment_with_rewards_of_a_file_is_refused(tmp_path, monkeypatch):
    monkeypatch.delenv(encryption.FILE, raising=False)
    monkeypatch.setenv(encryption.VALUE, bytes(range(32)).hex())
    with pytest.raises(TrainError, match=r"OCTAVO_KEY is set, and rl\.rewards names .*own\.py:score") as refusal:
        encryption_rules.check(config(tmp_path, "own.py:score"))
    assert "--key-file" in str(refusal.value) and bytes(range(32)).hex() not in str(refusal.value)
    encryption_rules.check(config(tmp_path, "exact_match"))  # no code of others


def test_a_key_in_a_file_with_rewards_of_a_file_is_taken(tmp_path, monkeypatch):
    monkeypatch.delenv(encryption.VALUE, raising=False)
    encryption_rules.check(config(tmp_path, "own.py:score"))
    write_new(tmp_path / "key")
    monkeypatch.setenv(encryption.FILE, str(tmp_path / "key"))
    encryption_rules.check(config(tmp_path, "own.py:score"))
