"""Memory in `octavo plan`: the table, --card, settings of a file with a published model, and --fit."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from octavo import rl
from octavo.cli import plan_memory
from octavo.cli.main import main
from octavo.config import load_config
from octavo.train.estimate.memory import Switch

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "llama2_7b_coat.yaml"


def test_settings_of_a_file_with_a_published_model_and_a_card(capsys) -> None:
    assert main(["plan", str(EXAMPLE), "--shape", "llama2_7b", "--ranks", "2", "--card", "80GB"]) == 0
    out = capsys.readouterr().out
    for words in (
        "each of 2",
        "activations",
        "per token of foundation",
        "assumed: train.micro_batch 1",
        "80GB per GPU: fits",
    ):
        assert words in out
    assert "optimizer.states" in out and "fp8 (on)" in out


def test_switches_without_savings_are_not_listed(capsys, monkeypatch) -> None:
    switches = [Switch("key.saving", True, False, 10**9, ""), Switch("key.wasting", True, False, -(10**9), "")]
    switches += [Switch("key.on", True, True, -(10**9), "")]
    monkeypatch.setattr(plan_memory, "savings", lambda sizes, ranks, progress: switches)
    assert main(["plan", "--shape", "llama2_7b", "--card", "80GB"]) == 0
    out = capsys.readouterr().out
    assert "key.saving" in out and "key.wasting" not in out
    assert any(line.split()[:5] == ["key.on", "true", "(on)", "costs", "1.0"] for line in out.splitlines())


def test_memory_as_json(capsys) -> None:
    assert main(["plan", "--shape", "llama2_7b", "--json", "--card", "24GB"]) == 0
    result = json.loads(capsys.readouterr().out)["memory"]
    assert result["total"] == sum(result["bytes"].values()) and not result["card"]["fits"]
    assert result["bytes"]["weights"] == 4 * 6738415616
    assert {s["key"] for s in result["switches"]} >= {"optimizer.master", "fp8.activations", "train.recompute"}


FIXED = [
    "optimizer.update=step",
    "train.recompute=none",
    "optimizer.offload=false",
    "train.offload_activations=false",
]


def test_fit_prints_a_train_command_with_the_given_settings(capsys) -> None:
    words = ["plan", str(EXAMPLE), "--shape", "llama2_7b", "--ranks", "2", "train.global_batch=7", *FIXED]
    assert main([*words, "--fit", "900GB"]) == 0
    [line] = [line for line in capsys.readouterr().out.splitlines() if line.startswith("on the command line: ")]
    assert all(f" {word}" in line for word in ("train.global_batch=7", *FIXED))
    [micro] = [word for word in line.split() if word.startswith("train.micro_batch=")] or ["train.micro_batch=1"]
    assert 7 % int(micro.partition("=")[2]) == 0
    assert main([*words, "--card", "900GB", "parallel.replicate=2", "parallel.shard=2"]) == 1
    assert "parallel has replicate: 2 and shard: 2, but there are 2 ranks" in capsys.readouterr().err


@pytest.mark.long
def test_fit_proposes_yaml(capsys) -> None:
    assert main(["plan", "--shape", "llama2_7b", "--fit", "80GB", "train.global_batch=1", *FIXED]) == 0
    out = capsys.readouterr().out
    assert out.splitlines()[0] == (
        "assumed: train.micro_batch 1 x train.seq_length 2048 tokens, rows of one length; --tokens says otherwise; "
        "speeds of 400 TFLOP/s, 2.5 TB/s of the card's memory and 25 GB/s to the host, not measured"
    )
    assert "\n  states: fp8\n" in out and "by an estimate of FLOPs and bytes (not measured)" in out
    assert main(["plan", "--shape", "llama2_7b", "--fit", "4GB", "train.global_batch=1", *FIXED]) == 1
    assert "nothing fits" in capsys.readouterr().out


EXAMPLES = EXAMPLE.parent


def test_rl_step_has_rollout_and_update_columns(capsys, monkeypatch) -> None:
    """On a small card, only as many completions as fit are generated at a time."""
    monkeypatch.setattr(plan_memory, "savings", lambda sizes, ranks, progress: [])
    file = EXAMPLES / "qwen3_1_7b_grpo_lora_5gb.yaml"
    small = ["rl.slots=null", "rl.kl=0.1", "train.seq_length=512", "rl.max_new_tokens=384", "rl.prompts=16"]
    command = ["plan", str(file), "--shape", "qwen3_1_7b", "--card", "4.5GB", *small]
    assert main(command) == 0
    out = capsys.readouterr().out
    assert (
        "each step: 16 prompts x 8 completions of up to 384 tokens, rewarded by math; 1 update by grpo, each of 128 "
        "completions in 128 micro-batches of 1\nreference: the base without its adapters: one more forward, no memory"
    ) in out
    assert "one GPU, rollout  one GPU, update" in out and "384 of them (rl.max_new_tokens) a completion" in out
    assert "57.75 KiB of cache per token (rl.kv: fp8)" in out and "as many of a step's 128 as 4.5GB has room for" in out
    assert main([*command, "--json", "lora=null", "model.load_in_fp8=null", "optimizer.states=fp8"]) == 0
    result = json.loads(capsys.readouterr().out)
    memory = result["memory"]
    rollout = memory["rollout"]
    assert rollout["total"] == sum(rollout["bytes"].values()) and 0 < rollout["sequences"] < rollout["of"] == 128
    assert memory["total"] == max(memory["update"], rollout["total"])
    assert memory["bytes"]["reference"] == rollout["bytes"]["reference"] > 1.4e9 and "frozen copy" in result["step"][1]
    assert memory["bytes"]["kv_cache"] == 0 < rollout["bytes"]["kv_cache"]


@pytest.mark.long
def test_rollout_pages_are_planned_and_too_few_are_rejected(capsys, monkeypatch) -> None:
    monkeypatch.setattr(plan_memory, "savings", lambda sizes, ranks, progress: [])
    file = EXAMPLES / "qwen3_1_7b_grpo_lora_5gb.yaml"
    small = ["rl.slots=null", "train.seq_length=512", "rl.max_new_tokens=384", "rl.prompts=16"]
    command = ["plan", str(file), "--shape", "qwen3_1_7b", *small]
    assert main([*command, "rl.pages=640"]) == 0
    assert "rollout: 11 completions at a time (as many of a step's 128 as 640 pages hold (rl.pages))" in (
        capsys.readouterr().out
    )
    assert main([*command, "rl.pages=63"]) == 0
    assert (
        "memory is not predicted: rl.pages is 63 pages of 8 tokens, but one completion of a prompt with 128 tokens"
        in (capsys.readouterr().err)
    )


def test_preference_step_has_two_rows_per_pair(capsys, monkeypatch) -> None:
    monkeypatch.setattr(plan_memory, "savings", lambda sizes, ranks, progress: [])
    file = EXAMPLES / "qwen3_vl_8b_dpo_lora.yaml"
    command = ["plan", str(file), "--shape", "qwen3_1_7b", "--json", "fp8.image_encoder=null", "train.seq_length=256"]
    assert main([*command, "train.recompute=none"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["step"] == [
        "each step: 16 pairs in 16 micro-batches of 1, two rows of a forward per pair; one update by sigmoid",
        "reference: the base without its adapters: one more forward, no memory",
    ]
    assert result["memory"]["tokens"]["foundation"] == 512 and result["memory"]["tokens"]["row"] == 256
    assert (
        rl.describe_step(load_config(file, ["preference={loss: orpo}"]))[1] == "reference: none: orpo does not use one"
    )
