"""The phase of preferences: begins where policy and reference are one, learns, resumes, and refuses what it cannot."""

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
from octavo.rl.objectives.registry import PREFERENCES
from octavo.train.run_dir.run_dir import read_rows
from tests.train.conftest import at

pytestmark = pytest.mark.usefixtures("uncounted", "unseen")

Make = Callable[..., Config]
LORA = ("lora={rank: 4}", "model.load_in_fp8=block")


def rows_of(cfg: Config) -> list[dict]:
    return read_rows(Path(cfg.run.dir) / "metrics.jsonl")


@pytest.mark.parametrize(
    "over",
    [
        pytest.param((), id="a copy as codes"),
        pytest.param(LORA, id="the base of adapters"),
        pytest.param(("fp8.recipe=off",), id="a copy in high precision"),
        pytest.param(
            ("fp8.recipe=rowwise", "train.logits=full", "fp8.rules=[{match: '**.down_proj', recipe: off}]"), id="rules"
        ),
    ],
)
def test_dpo_begins_at_no_margin_and_learns(preferring: Make, over: tuple[str, ...]):
    """Equal weights give equal log-probabilities to the bit, in FP8 too: the first rewards are 0, the loss is log 2."""
    cfg = preferring(*over, "train.steps=4")
    result = rl.run(cfg)
    first, *_, last = rows_of(cfg)
    assert result.status == "finished"
    assert first["rewards/chosen"] == first["rewards/rejected"] == 0 and first["loss"] == pytest.approx(math.log(2))
    assert first["logps/chosen"] < 0 and last["rewards/chosen"] != 0
    proof = json.loads((result.dir / "proof.json").read_text())
    assert not proof["pending"], "the reference's forwards are not counted as the policy's"


@pytest.mark.long
def test_the_reference_is_what_the_run_began_with(preferring: Make, make: Make):
    """Weights of an SFT run (`run.start_from`): policy and reference are one again, also for a reference that is loaded
    once more when the run resumes."""
    tuned = train.run(
        make("train.steps=2", "train.warmup=0", "train.lr=1e-2", "run.save_states=false", "data.eval=[]", dir="tuned")
    )
    cfg = preferring(f"run.start_from={tuned.dir}", "run.save_every=1", "run.keep=9")
    whole = rl.run(cfg).losses()
    assert rows_of(cfg)[0]["rewards/chosen"] == 0 and whole[1] == pytest.approx(math.log(2))
    step = Path(cfg.run.dir) / "checkpoints" / "step_1"
    assert rl.run(preferring(f"run.resume={step}", dir="after")).losses() == {n: whole[n] for n in (2, 3)}


@pytest.mark.parametrize("loss", ["simpo", "orpo"])
def test_losses_without_a_reference_hold_none(preferring: Make, loss: str):
    phase = rl.phase_of(cfg := preferring(f"preference={{loss: {loss}}}", "train.steps=1", "train.warmup=0"))
    seen = []
    begin = phase.begin
    phase.begin = lambda stepper, *rest: (begin(stepper, *rest), seen.append(stepper.reference))  # type: ignore
    train.run(cfg, phase=phase)
    assert seen == [None] and rows_of(cfg)[0]["rewards/accuracies"] <= 1


@pytest.mark.usefixtures("seen")
def test_kto_learns_from_labelled_answers_however_a_step_is_cut(preferring: Make, labelled: Path):
    """What answers are compared with is a mean over the step, so micro-batches do not matter."""
    found = []
    for size in (1, 4):
        over = (
            "preference={loss: kto, desirable_weight: 4}",
            f"train.micro_batch={size}",
            "train.lr=1e-2",
            "fp8.recipe=off",
        )
        cfg = preferring(f"data.train=[{{path: {labelled}}}]", *over, dir=str(size))
        rl.run(cfg)
        found.append([[row[name] for name in ("loss", "grad_norm", "kl", "rewards/margins")] for row in rows_of(cfg)])
    first, *_, last = found[0]
    assert first[2:] == [0, 0] and last[2] > 0
    torch.testing.assert_close(*map(torch.tensor, found), rtol=1e-3, atol=1e-4)


@pytest.mark.usefixtures("seen")
def test_kto_has_no_figure_of_a_kind_of_answer_that_is_not_there(preferring: Make, place: Path, labelled: Path):
    good, bad = (f"{{path: {labelled.with_name(name)}.json}}" for name in ("good", "bad"))
    for name, kind in (("good", True), ("bad", False)):
        rows = [row for row in json.loads(labelled.read_text()) if row["label"] is kind][:4]
        labelled.with_name(f"{name}.json").write_text(json.dumps(rows))
    over = ("preference={loss: kto}", f"data.train=[{good}]", f"data.eval=[{bad}]", "train.steps=1", "train.warmup=0")
    result = rl.run(cfg := preferring(*over, "fp8.recipe=off", "train.global_batch=4"), console=Console(quiet=True))
    (row,) = rows_of(cfg)
    assert row["rewards/chosen"] == 0 != row["logps/chosen"], "of a policy that is its reference"
    assert row["rewards/rejected"] is row["logps/rejected"] is row["rewards/margins"] is None
    assert result.eval["rewards/chosen"] is result.eval["rewards/margins"] is None and result.eval["logps/rejected"] < 0


def test_a_run_that_was_stopped_goes_on_bit_for_bit(preferring: Make):
    whole = rl.run(preferring(*LORA, dir="whole"))
    cfg = preferring(*LORA)
    rl.run(cfg, callbacks=[at(1, signal.SIGTERM)])
    result = rl.run(override(cfg, ["run.resume=auto"]))
    assert result.losses() == whole.losses()


def test_micro_batches_do_not_matter(preferring: Make):
    losses = [
        list(rl.run(preferring(f"train.micro_batch={n}", "fp8.recipe=off", dir=str(n))).losses().values())
        for n in (1, 4)
    ]
    torch.testing.assert_close(*map(torch.tensor, losses), rtol=1e-4, atol=1e-6)


@pytest.mark.usefixtures("seen")
def test_a_step_without_answers_has_no_figures(preferring: Make, place: Path, pairs: Path, tmp_path: Path):
    """Of two steps of a pair each, the image of one is not there."""
    rows = json.loads(pairs.read_text())[:2]
    rows[0]["image"] = "gone.png"
    (tmp_path / "rows.json").write_text(json.dumps(rows))
    step = ("data.on_bad_sample=skip", "train.global_batch=1", "train.micro_batch=1", "train.steps=2", "train.warmup=1")
    train = f"data.train=[{{path: {tmp_path / 'rows.json'}, images: {place / 'digits'}}}]"
    rl.run(cfg := preferring("preference={loss: simpo}", train, *step))
    there, empty = sorted(rows_of(cfg), key=lambda row: "empty" in row)
    names = [name for name in there if "/" in name]
    assert len(names) > 4 and all(there[name] is not None and empty[name] is None for name in names)


def test_options_are_those_of_the_losses():
    assert {name: set(p.options) for name, p in PREFERENCES.items()} == {n: set(o) for n, o in OPTIONS.items()}


@pytest.mark.parametrize(
    ("over", "key", "found"),
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
def test_what_makes_no_sense_is_refused(preferring: Make, over: list[str], key: str, found: str):
    with pytest.raises(ConfigError, match=found) as caught:
        preferring(*over)
    assert key in str(caught.value)


def test_the_phase_of_a_run_is_not_taken_for_another(preferring: Make):
    with pytest.raises(train.TrainError, match="train.phase is preference, and this runs pretrain and sft"):
        train.run(preferring())


def held_out(place: Path, pairs: Path, labelled: Path, loss: str) -> str:
    file = labelled if loss == "kto" else pairs
    return f"data.eval=[{{path: {place / 'digits' / 'test.json'}}}, {{path: {file}, max_samples: 5}}]"


@pytest.mark.usefixtures("seen")
@pytest.mark.long
@pytest.mark.parametrize(("loss", "over"), [("sigmoid, reference: disk", ()), ("simpo", ()), ("kto", LORA)])
def test_held_out_preferences_are_judged_beside_answers(
    preferring: Make, place: Path, pairs: Path, labelled: Path, loss: str, over: tuple[str, ...]
):
    """What a step says of pairs, said of those that are held out: the same rows give the same figures."""
    held, data = held_out(place, pairs, labelled, loss), labelled if loss == "kto" else pairs
    cfg = preferring(*over, f"preference={{loss: {loss}}}", held, "run.eval_every=1", f"data.train=[{{path: {data}}}]")
    result = rl.run(cfg)
    first, *_, last = [row["eval"] for row in rows_of(cfg)]
    assert first["questions"] == 16 + (3 if loss == "kto" else 5) and first["preferences"] == 5
    assert last["preference_loss"] != first["preference_loss"] and last["logps/chosen"] != first["logps/chosen"]
    assert ("rewards/accuracies" in last) == (loss != "kto") and last["rewards/margins"] != 0
    again = train.evaluate_run(result.dir)
    assert {key: again[key] for key in ("loss", "exact_match", "questions", "tokens")} == {
        key: last[key] for key in ("loss", "exact_match", "questions", "tokens")
    }, "octavo eval reads held-out preferences too"


@pytest.mark.usefixtures("seen")
def test_figures_of_held_out_pairs_are_those_of_a_step(preferring: Make, pairs: Path):
    """One step over the four rows that are held out, with a learning rate of nothing."""
    few = f"{{path: {pairs}, max_samples: 4}}"
    over = (f"data.train=[{few}]", f"data.eval=[{few}]", "train.lr=1e-30", "train.steps=1", "train.warmup=0")
    cfg = preferring(*over, "preference={loss: ipo, sft: 0.5}", "fp8.recipe=off")
    rl.run(cfg)
    (row,) = rows_of(cfg)
    told = row["eval"]
    assert told["preference_loss"] == pytest.approx(row["loss"], rel=1e-5)
    figures = {name: row[name] for name in row if "/" in name}
    assert {name: told[name] for name in figures} == pytest.approx(figures, rel=1e-4, abs=1e-6)
