"""Phase preference: starts with a margin of 0, learns, resumes, and rejects contradictory settings."""

from __future__ import annotations

import json
import math
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from rich.console import Console

from octavo import rl, train
from octavo.config import Config, ConfigError, override
from octavo.config.sections.rl import OPTIONS
from octavo.report.run.history import History
from octavo.rl.objectives.registry import PREFERENCES
from octavo.train.run_dir.run_dir import read_rows
from tests.train.conftest import at

pytestmark = pytest.mark.usefixtures("uncounted", "unseen")

Make = Callable[..., Config]
LORA = ("lora={rank: 4}", "model.load_in_fp8=block")


def read_metrics(cfg: Config) -> list[dict]:
    return read_rows(Path(cfg.run.dir) / "metrics.jsonl")


@pytest.mark.parametrize(
    "overrides",
    [
        pytest.param((), id="a copy as codes"),
        pytest.param(LORA, id="the base of adapters"),
        pytest.param(("fp8.recipe=off",), id="a copy in high precision"),
        pytest.param(
            ("fp8.recipe=rowwise", "train.logits=full", "fp8.rules=[{match: '**.down_proj', recipe: off}]"), id="rules"
        ),
    ],
)
def test_dpo_starts_with_margin_zero_and_learns(preference_config: Make, overrides: tuple[str, ...]):
    """Equal weights give bit-identical log-probabilities, also in FP8: the first rewards are 0 and the loss is log
    2."""
    cfg = preference_config(*overrides, "train.steps=4")
    result = rl.run(cfg)
    first, *_, last = read_metrics(cfg)
    assert result.status == "finished"
    assert first["rewards/chosen"] == first["rewards/rejected"] == 0 and first["loss"] == pytest.approx(math.log(2))
    assert first["logps/chosen"] < 0 and last["rewards/chosen"] != 0
    proof = json.loads((result.dir / "proof.json").read_text())
    assert not proof["pending"], "the reference's forwards are not counted as the policy's"


@pytest.mark.long
def test_reference_has_the_initial_weights_of_the_run(preference_config: Make, make: Make):
    """With `run.start_from` policy and reference start equal, also if the reference is loaded again after a resume."""
    tuned = train.run(
        make("train.steps=2", "train.warmup=0", "train.lr=1e-2", "run.save_states=false", "data.eval=[]", dir="tuned")
    )
    cfg = preference_config(f"run.start_from={tuned.dir}", "run.save_every=1", "run.keep=9")
    uninterrupted = rl.run(cfg).losses()
    assert read_metrics(cfg)[0]["rewards/chosen"] == 0 and uninterrupted[1] == pytest.approx(math.log(2))
    step = Path(cfg.run.dir) / "checkpoints" / "step_1"
    assert rl.run(preference_config(f"run.resume={step}", dir="after")).losses() == {
        n: uninterrupted[n] for n in (2, 3)
    }


@pytest.mark.parametrize("loss", ["simpo", "orpo"])
def test_losses_without_a_reference_load_none(preference_config: Make, loss: str):
    phase = rl.phase_of(cfg := preference_config(f"preference={{loss: {loss}}}", "train.steps=1", "train.warmup=0"))
    references = []
    begin = phase.begin
    phase.begin = lambda stepper, *rest: (begin(stepper, *rest), references.append(stepper.reference))  # type: ignore
    train.run(cfg, phase=phase)
    assert references == [None] and read_metrics(cfg)[0]["rewards/accuracies"] <= 1


@pytest.mark.usefixtures("seen")
def test_kto_does_not_depend_on_micro_batches(preference_config: Make, labelled: Path):
    """The baseline is a mean over the step."""
    figures = []
    for size in (1, 4):
        overrides = (
            "preference={loss: kto, desirable_weight: 4}",
            f"train.micro_batch={size}",
            "train.lr=1e-2",
            "fp8.recipe=off",
        )
        cfg = preference_config(f"data.train=[{{path: {labelled}}}]", *overrides, dir=str(size))
        rl.run(cfg)
        figures.append(
            [[row[name] for name in ("loss", "grad_norm", "kl", "rewards/margins")] for row in read_metrics(cfg)]
        )
    first, *_, last = figures[0]
    assert first[2:] == [0, 0] and last[2] > 0
    torch.testing.assert_close(*map(torch.tensor, figures), rtol=1e-3, atol=1e-4)


@pytest.mark.usefixtures("seen")
def test_kto_reports_none_for_a_missing_kind_of_answer(preference_config: Make, place: Path, labelled: Path):
    good, bad = (f"{{path: {labelled.with_name(name)}.json}}" for name in ("good", "bad"))
    for name, kind in (("good", True), ("bad", False)):
        rows = [row for row in json.loads(labelled.read_text()) if row["label"] is kind][:4]
        labelled.with_name(f"{name}.json").write_text(json.dumps(rows))
    overrides = (
        "preference={loss: kto}",
        f"data.train=[{good}]",
        f"data.eval=[{bad}]",
        "train.steps=1",
        "train.warmup=0",
    )
    result = rl.run(
        cfg := preference_config(*overrides, "fp8.recipe=off", "train.global_batch=4"), console=Console(quiet=True)
    )
    (row,) = read_metrics(cfg)
    assert row["rewards/chosen"] == 0 != row["logps/chosen"], "the policy equals its reference"
    assert row["rewards/rejected"] is row["logps/rejected"] is row["rewards/margins"] is None
    assert result.eval["rewards/chosen"] is result.eval["rewards/margins"] is None and result.eval["logps/rejected"] < 0


def test_stopped_run_resumes_bit_for_bit(preference_config: Make):
    uninterrupted = rl.run(preference_config(*LORA, dir="uninterrupted"))
    cfg = preference_config(*LORA)
    rl.run(cfg, callbacks=[at(1, signal.SIGTERM)])
    result = rl.run(override(cfg, ["run.resume=auto"]))
    assert result.losses() == uninterrupted.losses()


def test_losses_do_not_depend_on_micro_batches(preference_config: Make):
    losses = [
        list(rl.run(preference_config(f"train.micro_batch={n}", "fp8.recipe=off", dir=str(n))).losses().values())
        for n in (1, 4)
    ]
    torch.testing.assert_close(*map(torch.tensor, losses), rtol=1e-4, atol=1e-6)


@pytest.mark.usefixtures("seen")
def test_step_without_answers_has_no_figures(preference_config: Make, place: Path, pairs: Path, tmp_path: Path):
    """One of two steps has a pair whose image is missing."""
    rows = json.loads(pairs.read_text())[:2]
    rows[0]["image"] = "missing.png"
    (tmp_path / "rows.json").write_text(json.dumps(rows))
    step = ("data.on_bad_sample=skip", "train.global_batch=1", "train.micro_batch=1", "train.steps=2", "train.warmup=1")
    train = f"data.train=[{{path: {tmp_path / 'rows.json'}, images: {place / 'digits'}}}]"
    rl.run(cfg := preference_config("preference={loss: simpo}", train, *step))
    full, empty = sorted(read_metrics(cfg), key=lambda row: "empty" in row)
    names = [name for name in full if "/" in name]
    assert len(names) > 4 and all(full[name] is not None and empty[name] is None for name in names)


def test_options_are_those_of_the_losses():
    assert {name: set(p.options) for name, p in PREFERENCES.items()} == {n: set(o) for n, o in OPTIONS.items()}


@pytest.mark.parametrize(
    ("overrides", "key", "expected"),
    [
        (["preference={loss: ipo, label_smoothing: 0.1}"], "preference.label_smoothing", "has no effect on ipo"),
        (["preference={loss: orpo, reference: copy}"], "preference.reference", "orpo has none"),
        (["preference={reference: base}"], "preference.reference", "there are no adapters"),
        (["train.z_loss=0.1"], "train.z_loss", "is not for phase preference"),
        (["train.phase=sft", "preference={beta: 0.2}"], "preference", "has no effect in phase sft"),
        (["rl={rewards: [exact_match]}"], "rl", "has no effect in phase preference"),
        (["train.phase=rl"], "rl", "there are no rewards"),
        (["data.train=[{path: a, format: prompt}]"], "data.train.0.format", "rows of prompts are for phase rl"),
    ],
)
def test_contradictory_settings_are_rejected(preference_config: Make, overrides: list[str], key: str, expected: str):
    with pytest.raises(ConfigError, match=expected) as caught:
        preference_config(*overrides)
    assert key in str(caught.value)


def test_train_run_rejects_the_phase_preference(preference_config: Make):
    with pytest.raises(train.TrainError, match="train.phase is preference, and this runs pretrain and sft"):
        train.run(preference_config())


def held_out(place: Path, pairs: Path, labelled: Path, loss: str) -> str:
    file = labelled if loss == "kto" else pairs
    return f"data.eval=[{{path: {place / 'digits' / 'test.json'}}}, {{path: {file}, max_samples: 5}}]"


@pytest.mark.usefixtures("seen")
@pytest.mark.long
@pytest.mark.parametrize(("loss", "overrides"), [("sigmoid, reference: disk", ()), ("simpo", ()), ("kto", LORA)])
def test_held_out_preferences_and_answers_are_evaluated(
    preference_config: Make, place: Path, pairs: Path, labelled: Path, loss: str, overrides: tuple[str, ...]
):
    """Held-out rows get the same figures as the rows of a step."""
    held_out_data, data = held_out(place, pairs, labelled, loss), labelled if loss == "kto" else pairs
    cfg = preference_config(
        *overrides, f"preference={{loss: {loss}}}", held_out_data, "run.eval_every=1", f"data.train=[{{path: {data}}}]"
    )
    result = rl.run(cfg)
    first, *_, last = [row["eval"] for row in read_metrics(cfg)]
    assert first["questions"] == 16 + (3 if loss == "kto" else 5) and first["preferences"] == 5
    assert last["preference_loss"] != first["preference_loss"] and last["logps/chosen"] != first["logps/chosen"]
    assert ("rewards/accuracies" in last) == (loss != "kto") and last["rewards/margins"] != 0
    assert "loss" not in last, "the loss of a step is another one"
    again = train.evaluate_run(result.dir)
    names = ("answer_loss", "exact_match", "questions", "tokens")
    assert {key: again[key] for key in names} == {key: last[key] for key in names}, "octavo eval reads preferences too"
    history = History.read(result.dir)
    assert (
        history.curve("eval/preference_loss") and history.curve("eval/answer_loss") and not history.curve("eval/loss")
    )
    # Runs of earlier versions, whose metrics name both losses `loss`, have the same curves.
    metrics = result.dir / "metrics.jsonl"
    metrics.write_text(metrics.read_text().replace('"answer_loss"', '"loss"'))
    old = History.read(result.dir).curve("eval/answer_loss")
    assert old is not None and old[1].tolist() == history.curve("eval/answer_loss")[1].tolist()


@pytest.mark.usefixtures("seen")
def test_held_out_figures_equal_those_of_a_step(preference_config: Make, pairs: Path):
    """One step with a learning rate near 0, over the held-out rows."""
    few = f"{{path: {pairs}, max_samples: 4}}"
    overrides = (f"data.train=[{few}]", f"data.eval=[{few}]", "train.lr=1e-30", "train.steps=1", "train.warmup=0")
    cfg = preference_config(*overrides, "preference={loss: ipo, sft: 0.5}", "fp8.recipe=off")
    rl.run(cfg)
    (row,) = read_metrics(cfg)
    evaluation = row["eval"]
    assert evaluation["preference_loss"] == pytest.approx(row["loss"], rel=1e-5)
    figures = {name: row[name] for name in row if "/" in name}
    assert {name: evaluation[name] for name in figures} == pytest.approx(figures, rel=1e-4, abs=1e-6)
