"""Memory in `octavo plan`: the table, a card, a file's settings on a published model, a setting that fits."""

from __future__ import annotations

import json
from pathlib import Path

from octavo.cli import plan_memory
from octavo.cli.main import main
from octavo.train.memory_plan import Switch

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "llama2_7b_coat.yaml"


def test_a_file_on_a_published_shape_against_a_card(capsys) -> None:
    assert main(["plan", str(EXAMPLE), "--shape", "llama2_7b", "--ranks", "2", "--card", "80GB"]) == 0
    out = capsys.readouterr().out
    for words in (
        "each of 2",
        "activations",
        "a token of foundation",
        "assumed: train.micro_batch 1",
        "80GB a GPU: fits",
    ):
        assert words in out
    assert "optimizer.states" in out and "fp8 (on)" in out


def test_a_switch_that_saves_nothing_is_offered_to_nobody(capsys, monkeypatch) -> None:
    found = [Switch("a.saves", True, False, 10**9, ""), Switch("a.wastes", True, False, -(10**9), "")]
    found += [Switch("is.wasting", True, True, -(10**9), "")]
    monkeypatch.setattr(plan_memory, "savings", lambda sizes, ranks: found)
    assert main(["plan", "--shape", "llama2_7b", "--card", "80GB"]) == 0
    out = capsys.readouterr().out
    assert "a.saves" in out and "a.wastes" not in out
    assert any(line.split()[:5] == ["is.wasting", "true", "(on)", "costs", "1.0"] for line in out.splitlines())


def test_as_json(capsys) -> None:
    assert main(["plan", "--shape", "llama2_7b", "--json", "--card", "24GB"]) == 0
    found = json.loads(capsys.readouterr().out)["memory"]
    assert found["total"] == sum(found["bytes"].values()) and not found["card"]["fits"]
    assert found["bytes"]["weights"] == 4 * 6738415616
    assert {s["key"] for s in found["switches"]} >= {"optimizer.master", "fp8.activations", "train.recompute"}


def test_fit_proposes_yaml(capsys) -> None:
    held = [
        "optimizer.update=step",
        "train.recompute=none",
        "optimizer.offload=false",
        "train.offload_activations=false",
    ]
    assert main(["plan", "--shape", "llama2_7b", "--fit", "80GB", "train.global_batch=1", *held]) == 0
    out = capsys.readouterr().out
    assert out.splitlines()[0] == (
        "assumed: train.micro_batch 1 x train.seq_length 2048 tokens, rows of one length; --tokens says otherwise; "
        "speeds of 400 TFLOP/s, 2.5 TB/s of the card's memory and 25 GB/s to the host, not measured"
    )
    assert "\n  states: fp8\n" in out and "by an estimate of FLOPs and bytes (not a measurement)" in out
    assert main(["plan", "--shape", "llama2_7b", "--fit", "4GB", "train.global_batch=1", *held]) == 1
    assert "nothing fits" in capsys.readouterr().out
