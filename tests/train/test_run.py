"""One job from configuration to run directory."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from pathlib import Path

import pytest
import torch
from rich.console import Console

from octavo import fp8, models, train
from octavo.config import load_config
from octavo.data.order import FullShuffle
from octavo.models import load_processor
from octavo.train.run_dir.run_dir import read_rows

from .conftest import STEPS, Rows


def rows_of(directory: Path) -> list[dict]:
    return [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def finished(place: Path, tmp_path_factory: pytest.TempPathFactory):
    """A run with everything switched on, its result and what it printed."""
    folder = tmp_path_factory.mktemp("finished")
    cfg = load_config(
        None,
        [
            f"model.path={place / 'tiny'}",
            f"data.train=[{{path: {place / 'digits/train.json'}}}]",
            f"data.eval=[{{path: {place / 'digits/test.json'}}}]",
            *(f"train.{k}" for k in (f"steps={STEPS}", "seq_length=128", "micro_batch=2", "global_batch=4", "lr=2e-3")),
            *(
                f"run.{k}"
                for k in (f"dir={folder / 'run'}", "health_every=3", "eval_every=4", "save_every=2", "threads=1")
            ),
        ],
    )
    console = Console(record=True, width=200, force_terminal=False)
    seen: list[int] = []
    result = train.run(cfg, console=console, label="arm", callbacks=[Rows(lambda row: seen.append(row["step"]))])
    return cfg, result, console.export_text(), seen


def test_it_leaves_a_whole_run_directory(finished):
    _, result, _, _ = finished
    there = {p.name for p in result.dir.iterdir()}
    assert {"config.yaml", "plan.json", "environment.json", "metrics.jsonl", "proof.json", "result.json", "checkpoints",
            "tensorboard", "hf"} <= there  # fmt: skip
    assert list((result.dir / "tensorboard").glob("events*"))
    assert sorted(p.name for p in (result.dir / "checkpoints").iterdir()) == ["step_4", "step_6"]  # run.keep is 2


def test_each_step_has_one_row_with_its_figures(finished):
    _, result, _, seen = finished
    rows = rows_of(result.dir)
    assert [row["step"] for row in rows] == seen == list(range(1, STEPS + 1))
    for row in rows:
        assert {"loss", "tokens", "tokens_per_s", "grad_norm", "lr"} <= row.keys()
        assert row["tokens_per_s"] == row["tokens"] / row["seconds"]
    times = [datetime.fromisoformat(row["time"]) for row in rows]
    assert times == sorted(times) and times[0].tzinfo is UTC
    assert rows[-1]["loss"] < rows[0]["loss"]
    assert [row["step"] for row in rows if "health" in row] == [3, 6]
    assert [row["step"] for row in rows if "eval" in row] == [4, 6]
    assert {"weights", "gradients", "optimizer", "codes", "activations", "peak_rss"} <= rows[0]["memory"].keys()
    assert result.losses() == {row["step"]: row["loss"] for row in rows}


def test_memory_is_counted_in_bytes(finished):
    cfg, result, _, _ = finished
    size = sum(p.numel() * 4 for p in models.load(cfg.model.path).parameters())
    memory = rows_of(result.dir)[0]["memory"]
    assert memory["weights"] == memory["gradients"] == size
    assert 2 * size <= memory["optimizer"] < 2 * size + 4096  # two moments and a step counter a parameter
    assert 0 < memory["codes"] < size / 3
    assert memory["activations"] > 0


@pytest.mark.parametrize(("every", "steps", "memory", "health"), [
    (1, 3, [1], [2, 3]), (2, 3, [1], [2, 3]), (25, 1, [1], []), (3, 4, [1], [3, 4]),
])  # fmt: skip
def test_memory_and_health_never_share_a_step(make, every: int, steps: int, memory: list, health: list):
    """Health keeps x in high precision, so its steps would count too many bytes."""
    cfg = make(f"run.health_every={every}", f"train.steps={steps}", "train.warmup=0", "data.eval=[]")
    rows = read_rows(train.run(cfg).dir / "metrics.jsonl")
    assert [row["step"] for row in rows if "memory" in row] == memory
    assert [row["step"] for row in rows if "health" in row] == health


def test_the_plan_and_the_proof_are_kept(finished):
    _, result, printed, _ = finished
    plan = json.loads((result.dir / "plan.json").read_text())
    proof = json.loads((result.dir / "proof.json").read_text())
    assert plan["family"] == "qwen3_vl" and plan["notes"]
    assert proof["fp8_gemms"] > 0 and not proof["missing"] and not proof["pending"]
    assert proof["shares"]["foundation"] == proof["shares"]["image_encoder"] == 1.0
    assert printed.index("of linear FLOPs") < printed.index("arm: step 1/6")


def test_the_saved_configuration_runs_again_unchanged(finished):
    cfg, result, _, _ = finished
    assert load_config(result.dir / "config.yaml") == cfg


def test_result_and_health_are_returned(finished):
    _, result, _, _ = finished
    assert (result.status, result.steps, result.exit_code, result.skipped) == ("finished", STEPS, 0, 0)
    assert result.eval["questions"] == 16
    assert result.health["x_sqnr_median"] > 25
    assert json.loads((result.dir / "result.json").read_text())["eval"] == result.eval


def test_hf_loads_and_gives_the_logits_of_high_precision(finished, place: Path):
    _, result, _, _ = finished
    ours, processor, _ = train.load_run(result.dir, recipe="off")
    stock = models.load(result.dir / "hf")
    text = processor.apply_chat_template([{"role": "user", "content": "hello"}], tokenize=False)
    batch = processor(text=[text], return_tensors="pt")
    with torch.no_grad():
        assert torch.equal(ours(**batch).logits, stock(**batch).logits)
    assert load_processor(result.dir / "hf").image_processor is not None


def test_a_run_comes_back_with_fp8_and_its_evaluation(finished):
    _, result, _, _ = finished
    model, _, _ = train.load_run(result.dir)
    assert any(isinstance(module, fp8.Linear) for module in model.modules())
    again = train.evaluate_run(result.dir)
    assert again.pop("fp8_gemms") > 0
    assert again == {"step": STEPS, **result.eval}
    assert train.evaluate_run(result.dir, step=4)["step"] == 4


def test_missing_checkpoint_error_names_existing_steps(finished, tmp_path: Path):
    _, result, _, _ = finished
    with pytest.raises(train.TrainError, match="no checkpoint of step 3; there are 4, 6"):
        train.load_run(result.dir, step=3)
    with pytest.raises(train.TrainError, match="is not a run directory: it has no config.yaml"):
        train.load_run(tmp_path)


def test_off_trains_in_high_precision_and_proves_that_too(make):
    result = train.run(make("fp8.recipe=off", "train.steps=2", "train.warmup=0", "run.health_every=1"))
    proof = json.loads((result.dir / "proof.json").read_text())
    assert (proof["fp8_gemms"], proof["share"]) == (0, 0.0)
    assert not any("health" in row for row in read_rows(result.dir / "metrics.jsonl"))


@pytest.mark.parametrize("recipe", [pytest.param("off", marks=pytest.mark.long), "blockwise", "delayed"])
def test_recomputation_changes_no_loss(make, recipe: str):
    common = (f"fp8.recipe={recipe}", "train.steps=3", "train.warmup=0", "data.eval=[]")
    plain = train.run(make(*common, dir="plain"))
    again = train.run(make(*common, "train.recompute=full", dir="recomputed"))
    assert again.losses() == plain.losses()
    assert again.memory["activations"] < plain.memory["activations"] / 2


def test_a_text_only_model_trains(make, place: Path):
    result = train.run(make(
        f"model.path={place / 'text'}", f"data.train=[{{path: {place / 'digits/train_text.json'}}}]", "data.eval=[]",
        "train.seq_length=512", "train.steps=2", "train.warmup=0",
    ))  # fmt: skip
    proof = json.loads((result.dir / "proof.json").read_text())
    assert proof["shares"] == {"foundation": 1.0}


def test_rows_without_images_train_an_open_tower_and_leave_it_still(make, place: Path):
    """A run whose rows hold no image: the tower runs on the dummy, gets zero gradients, and is not proven."""
    row = {"conversations": [{"from": "human", "value": "Say one."}, {"from": "gpt", "value": "1"}]}
    file = Path(make().run.dir).parent / "talk.json"
    file.write_text(json.dumps([row] * 8))
    cfg = make(f"data.train=[{{path: {file}}}]", "data.eval=[]", "train.steps=2", "train.warmup=0")
    result = train.run(cfg)
    before, (after, _, _) = models.load(place / "tiny"), train.load_run(result.dir)
    tower = "model.visual.blocks.0.attn.qkv.weight"
    assert torch.equal(before.get_parameter(tower), after.get_parameter(tower))
    assert json.loads((result.dir / "proof.json").read_text())["pending"] == ["image_encoder", "image_projector"]


def test_a_frozen_tower_stays_and_is_proven_without_weight_gradients(make, place: Path):
    result = train.run(make("model.freeze=[image_encoder]", "train.steps=2", "train.warmup=0", "data.eval=[]"))
    before, (after, _, _) = models.load(place / "tiny"), train.load_run(result.dir)
    tower = "model.visual.blocks.0.attn.qkv.weight"
    assert torch.equal(before.get_parameter(tower), after.get_parameter(tower))
    proof = json.loads((result.dir / "proof.json").read_text())
    assert "wgrad" not in proof["components"]["image_encoder"]


def test_bad_rows_are_left_out_and_listed(make, place: Path):
    rows = json.loads((place / "digits/train.json").read_text())[:12]
    rows[3]["image"] = "images/none.png"
    rows[5]["conversations"][0]["value"] += "<|im_end|>"
    file = place / "digits" / "one_bad.json"
    file.write_text(json.dumps(rows))
    over = (f"data.train=[{{path: {file}}}]", "data.eval=[]", "train.steps=3", "train.warmup=0")
    console = Console(record=True, width=400, force_terminal=False)
    result = train.run(make(*over, "data.on_bad_sample=skip"), console=console)
    listed = [json.loads(line) for line in (result.dir / "skipped.jsonl").read_text().splitlines()]
    assert sorted((row["row"], row["action"]) for row in listed) == [(3, "skipped"), (5, "with control tokens")]
    assert "row 5: its text contains '<|im_end|>', which" in console.export_text()
    with pytest.raises(ValueError, match="row 3.*none.png"):
        train.run(make(*over, dir="strict"))


def test_pretraining_learns_every_token(make):
    over = ("train.steps=1", "train.warmup=0", "data.eval=[]")
    sft = train.run(make(*over, dir="sft")).final
    pretrain = train.run(make(*over, "train.phase=pretrain", dir="pretrain")).final
    assert pretrain["tokens"] == sft["tokens"]
    assert pretrain["loss_tokens"] > 2 * sft["loss_tokens"]


def test_rows_that_are_all_too_long_end_a_run_before_its_first_step(make, tmp_path: Path):
    over = ("train.steps=1", "train.warmup=0", "data.eval=[]", "run.resume=auto")
    with pytest.raises(
        ValueError, match=r"none of its 48 rows fits into train.seq_length: 4; .*Set train.seq_length to"
    ):
        train.run(make(*over, "train.seq_length=4"))
    with pytest.raises(ValueError) as refused:  # held-out rows as well: all is mended at once
        train.run(make("train.steps=1", "train.warmup=0", "train.seq_length=4", dir="both"))
    learned, held_out = str(refused.value).splitlines()
    assert "train.json: none of its 48 rows" in learned and "test.json: none of its" in held_out
    assert not (tmp_path / "run/metrics.jsonl").exists()
    assert len((tmp_path / "run/skipped.jsonl").read_text().splitlines()) == 48
    assert train.run(make(*over)).status == "finished", "the directory is not bound to the failed run"
    assert not (tmp_path / "run/skipped.jsonl").exists() and (tmp_path / "run/previous_1/skipped.jsonl").exists()


def test_a_run_that_trains_on_nothing_does_not_end_as_finished(make, place: Path, tmp_path: Path):
    rows = json.loads((place / "digits/train.json").read_text())[:40]
    last = FullShuffle(40, 0, 0).row(0, 39)  # the only row that fits comes last
    for row in rows[:last] + rows[last + 1 :]:
        row["conversations"][0]["value"] += "long " * 200
    (place / "digits" / "last.json").write_text(json.dumps(rows))
    over = (f"data.train=[{{path: {place}/digits/last.json}}]", "train.steps=3", "data.eval=[]")
    console = Console(record=True, width=400, force_terminal=False)
    with pytest.raises(train.TrainError, match=r"(?s)3 steps in a row, up to step 3, had no loss tokens .*dropped"):
        train.run(make(*over), console=console)
    assert "step 1/3  no loss tokens  lr" in console.export_text(), "a loss of 0 would mean a perfect model"


def test_off_takes_a_run_of_any_fp8_settings_to_high_precision(make):
    over = ("train.steps=1", "train.warmup=0", "data.eval=[]", "run.hf=false")
    result = train.run(make(*over, "fp8.recipe=tensorwise", "fp8.format=e4m3", "fp8.wgrad=bf16"))
    model, _, cfg = train.load_run(result.dir, recipe="off")
    assert cfg.fp8.recipe == "off" and not any(isinstance(module, fp8.Linear) for module in model.modules())
