"""LoRA beside a frozen base: what trains, what is saved, what a base that changed costs, and going on bit for bit."""

from __future__ import annotations

import json
import shutil
import signal
from pathlib import Path

import pytest
import torch
from rich.console import Console
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from octavo import fp8, models, train
from octavo.checkpoint import CheckpointError
from octavo.checkpoint.export import export
from octavo.checkpoint.run_state.dcp_safe import SafeReader
from octavo.config import Config, load_config, override
from octavo.fp8.weights import codes_of_frozen, frozen_weights, is_frozen
from octavo.models.weights import iterate
from octavo.train.run_dir.run_dir import read_rows
from octavo.train.setup import model_setup, planning
from octavo.train.setup.resolve_config import resolve_recipe
from tests.train.conftest import at
from tests.train.memory.test_predicted import agree, counted, predicted
from tests.train.test_ranks import losses, on_ranks
from tests.train.test_resume import killed

pytestmark = pytest.mark.usefixtures("unseen")

pytest.importorskip("peft")
LORA = ("lora={rank: 4}", "model.load_in_fp8=block")
ONE = ("train.micro_batch=1", "train.global_batch=1", "train.steps=1", "train.warmup=0", "data.eval=[]")


def adapter(directory: Path | str) -> dict[str, torch.Tensor]:
    return load_file(Path(directory) / "adapter" / "adapter_model.safetensors")


def saved(checkpoint: Path) -> list[str]:
    return sorted(SafeReader(checkpoint).read_metadata().state_dict_metadata)


@pytest.mark.usefixtures("seen")
def test_adapters_train_and_nothing_else_is_kept(make):
    cfg = make(*LORA, "run.hf=true", "run.save_every=3", "run.health_every=3")
    result = train.run(cfg)
    seen = list(result.losses().values())
    assert seen[-1] < seen[0]
    proof = json.loads((result.dir / "proof.json").read_text())
    gemms = proof["components"]["foundation"]
    assert set(gemms) == {"fwd", "dgrad"} and not proof["pending"] and not proof["missing"]
    names = saved(result.dir / "checkpoints" / "step_6")
    model = [name for name in names if name.startswith("model.")]
    assert len(model) == 2 * 14 and all(".lora_A." in name or ".lora_B." in name for name in model)
    assert len([name for name in names if name.startswith("optimizer.")]) == 3 * len(model)
    assert result.base == {"weights": 63, "unchanged": True, "fp8": result.base["fp8"]}
    assert result.base["fp8"]["weights"] == 14 and result.base["fp8"]["bytes_per_parameter"] <= 1.02
    written = json.loads((result.dir / "base.json").read_text())
    assert written["unchanged"] and written["changed"] is None and len(written["sha256"]) == 63
    assert not (result.dir / "hf").exists()
    assert len(adapter(result.dir)) == 28
    config = json.loads((result.dir / "adapter" / "adapter_config.json").read_text())
    assert (config["r"], config["base_model_name_or_path"]) == (4, cfg.model.path)
    plan = json.loads((result.dir / "plan.json").read_text())
    assert any(note.startswith("lora: adapters of rank 4 on 14 layers") for note in plan["notes"])
    assert any("frozen FP8 codes (14 blockwise): 98,360 bytes" in note for note in plan["notes"])


@pytest.mark.usefixtures("bare_forward")
@pytest.mark.parametrize(
    "overrides",
    [
        pytest.param((*LORA, "lora.dropout=0.1"), id="block, dropout"),
        pytest.param(
            ("lora={}", "model.load_in_fp8=tensor", "fp8.recipe=delayed"), id="delayed", marks=pytest.mark.long
        ),
    ],
)
def test_lora_run_resumes_bit_for_bit(make, overrides):
    over = (*overrides, "run.hf=true")
    whole = train.run(make(*over, dir="whole"))
    cfg = make(*over, dir="stopped")
    first = train.run(cfg, callbacks=[at(2, signal.SIGTERM)])
    assert first.status == "stopped" and not (first.dir / "adapter").exists()
    second = train.run(override(cfg, ["run.resume=auto"]))
    assert second.losses() == whole.losses() and second.eval == whole.eval
    ours, theirs = adapter(whole.dir), adapter(second.dir)
    assert all(torch.equal(ours[name], theirs[name]) for name in ours) and ours.keys() == theirs.keys()


@pytest.mark.usefixtures("bare_forward")
def test_another_base_is_refused(make, place: Path, tmp_path: Path):
    """The folder that the base is loaded from is changed between two sessions."""
    folder = tmp_path / "base"
    shutil.copytree(place / "tiny", folder)
    cfg = make(*LORA, f"model.path={folder}")
    train.run(cfg, callbacks=[at(2, signal.SIGTERM)])
    file = folder / "model.safetensors"
    with safe_open(file, "pt") as tensors:
        metadata = tensors.metadata()
    weights = load_file(file)
    name = "model.language_model.layers.1.mlp.up_proj.weight"
    weights[name][3, 5] += 1.0
    save_file(weights, file, metadata)
    with pytest.raises(train.TrainError) as caught:
        train.run(override(cfg, ["run.resume=auto"]))
    assert f"{name} has different values (1 of 63 weights differ)" in str(caught.value)
    assert str(folder) in str(caught.value) and "step_3" in str(caught.value)


@pytest.mark.usefixtures("bare_forward", "seen")
def test_a_base_that_is_written_to_stops_the_run_without_an_adapter(make):
    """Whatever writes to it: the end of the run finds out."""
    cfg = make(*LORA, "train.steps=2", "train.warmup=1", "run.hf=true")

    class Writes(train.Callback):
        def end_step(self, run, step) -> None:
            if step.number == 2:
                weights = dict(run.model.named_parameters())
                codes = codes_of_frozen(weights["model.language_model.layers.0.mlp.up_proj.base_layer.weight"])
                codes.data.view(torch.uint8)[0, 0] ^= 1

    with pytest.raises(train.TrainError) as caught:
        train.run(cfg, callbacks=[Writes()])
    assert "model.language_model.layers.0.mlp.up_proj.weight was written to" in str(caught.value)
    written = json.loads((Path(cfg.run.dir) / "base.json").read_text())
    assert not written["unchanged"] and written["changed"].endswith("layers.0.mlp.up_proj.weight")
    assert not (Path(cfg.run.dir) / "adapter").exists() and not (Path(cfg.run.dir) / "result.json").exists()


@pytest.mark.usefixtures("bare_forward")
def test_a_checkpoint_of_adapters_is_no_model_and_the_other_way_round(make):
    """By the settings first; and by what a checkpoint holds, for whoever loads it in Python."""
    lora = train.run(make(*LORA, "train.steps=1", "train.warmup=0", "data.eval=[]", dir="lora"))
    full = train.run(make("train.steps=1", "train.warmup=0", "data.eval=[]", dir="full"))
    steps = {run.dir.name: run.dir / "checkpoints" / "step_1" for run in (lora, full)}
    with pytest.raises(train.TrainError, match="lora was None"):
        train.run(
            make(*LORA, "train.steps=1", "train.warmup=0", "data.eval=[]", f"run.resume={steps['full']}", dir="a")
        )
    from octavo import checkpoint, parallel

    models_of = {run.dir.name: _model(load_config(run.dir / "config.yaml")) for run in (lora, full)}
    world = parallel.World()
    with pytest.raises(CheckpointError, match=r"holds only trained parameters \(28, first .*lora_A.*does not train"):
        checkpoint.load(steps["lora"], model=models_of["full"], optimizer=None, world=world)
    with pytest.raises(CheckpointError, match="holds a whole model, and not one of the parameters that this model"):
        checkpoint.load(steps["full"], model=models_of["lora"], optimizer=None, world=world)
    assert checkpoint.load(steps["lora"], model=models_of["lora"], optimizer=None, world=world).step == 1


def _model(cfg: Config) -> torch.nn.Module:
    plan, family, _ = planning.plan_for(cfg)
    return model_setup.assemble_model(cfg, torch.device("cpu"), plan, family)[0]


@pytest.mark.usefixtures("bare_forward")
def test_adapters_go_on_from_a_folder(make):
    first = train.run(make(*LORA, "run.hf=true", "data.eval=[]", "train.steps=3", dir="first"))
    more = (*LORA, f"lora.adapter={first.dir / 'adapter'}", "data.eval=[]", "train.steps=3")
    second = train.run(make(*more, dir="second"))
    assert list(second.losses().values())[0] < list(first.losses().values())[0]
    with pytest.raises(Exception, match="rank"):
        train.run(make(*more, "lora.rank=8", dir="third"))


@pytest.mark.usefixtures("seen")
def test_the_frozen_base_of_a_plan_is_what_is_loaded(make):
    """The model that is planned, on the meta device, and the one that trains: same names, shapes, dtypes, codes."""
    cfg = make("lora={}", "model.load_in_fp8={foundation: row, image_encoder: tensor}", "fp8.recipe=rowwise")
    planned, _ = planning.meta_model(cfg)
    loaded = models.load(cfg.model.path, dtype=torch.bfloat16, load_in_fp8=dict(cfg.model.load_in_fp8.kinds))
    mine, theirs = dict(planned.named_parameters()), dict(loaded.named_parameters())
    assert mine.keys() == theirs.keys()
    for name, weight in mine.items():
        assert (weight.shape, weight.dtype) == (theirs[name].shape, theirs[name].dtype), name
        assert is_frozen(weight) == is_frozen(theirs[name]), name
        if is_frozen(weight):
            assert codes_of_frozen(weight).spec == codes_of_frozen(theirs[name]).spec, name
    assert sum(map(is_frozen, mine.values())) == 22


@pytest.mark.usefixtures("seen")
def test_freezing_a_frozen_base_is_noted(make):
    _, _, notes = planning.plan_for(make(*LORA, "model.freeze=[image_encoder]"))
    assert any(note.startswith("model.freeze has no effect with lora") for note in notes)
    with pytest.raises(models.ModelError, match="nothing"):
        planning.plan_for(make(*LORA, "model.freeze=['**.nothing']"))


@pytest.mark.usefixtures("seen", "torch_products")
@pytest.mark.parametrize(
    "overrides",
    [
        pytest.param(LORA, id="block"),
        pytest.param(
            ("lora={dtype: bf16, targets: [foundation, image_encoder], exclude: ['**.layers.0.**']}",
             "model.load_in_fp8={foundation: row, image_encoder: row}", "fp8.recipe=rowwise", "optimizer.states=fp8",
             "optimizer.master=bf16+sr", "optimizer.update=backward", "fp8.activations=fp8",
             "train.recompute=selective"),
            id="everything",
        ),
        pytest.param(("lora={dtype: bf16}", "optimizer.states=bf16", "fp8.recipe=off"), marks=pytest.mark.long),
        pytest.param(("lora={dora: true}", *LORA[1:], "train.recompute=full"), marks=pytest.mark.long),
        pytest.param(("lora={dtype: bf16}", "fp8.recipe=rowwise", "optimizer.master=bf16+16"), marks=pytest.mark.long),
        pytest.param(("lora={dropout: 0.1}", *LORA[1:], "fp8.dgrad=bf16", "train.logits=full"), marks=pytest.mark.long),
    ],
)  # fmt: skip
def test_a_run_counts_what_was_predicted(make, overrides):
    """Between steps to the byte; activations and logits within 5 % (of a model of two layers, the first of which keeps
    less, because no gradient reaches what is before it)."""
    cfg = make(*ONE, *overrides)
    train.run(cfg)
    agree(counted(cfg), predicted(cfg))


@pytest.mark.usefixtures("bare_forward")
@pytest.mark.long
def test_kill_9_and_going_on(make):
    over = (*LORA, "run.save_every=1", "run.hf=true", "data.eval=[]")
    whole = train.run(make(*over, dir="whole"))
    cfg = make(*over, dir="killed")
    killed(cfg, "4")
    assert not (Path(cfg.run.dir) / "result.json").exists()
    second = train.run(override(cfg, ["run.resume=auto"]))
    assert second.losses() == whole.losses()
    ours, theirs = adapter(whole.dir), adapter(second.dir)
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


@pytest.mark.usefixtures("bare_forward")
@pytest.mark.long
def test_two_ranks_train_as_one_and_hold_the_base_alike(make):
    """In blocks, which ranks cut; that codes of rows are loaded alike is in parallel/test_fill.py."""
    over = ("lora={rank: 4}", "model.load_in_fp8=block", "fp8.recipe=blockwise", "run.hf=true", "run.save_every=3",
            "run.keep=9", "train.micro_batch=1", "data.eval=[]")  # fmt: skip
    one, two = make(*over, dir="one"), make(*over, dir="two")
    alone = train.run(one)
    on_ranks(two)
    assert losses(two) == pytest.approx(losses(one), rel=3e-3)
    base_of = [json.loads((Path(cfg.run.dir) / "base.json").read_text()) for cfg in (one, two)]
    assert base_of[0]["sha256"] == base_of[1]["sha256"] and base_of[1]["unchanged"]
    assert sorted(adapter(alone.dir)) == sorted(adapter(two.run.dir))
    step = Path(two.run.dir) / "checkpoints" / "step_3"
    resumed = train.run(make(*over, f"run.resume={step}", dir="after"))
    assert list(resumed.losses().values()) == pytest.approx(losses(two)[3:], rel=3e-3)
    again = make(*over, f"run.resume={step}", dir="again")  # on as many ranks as it was saved on
    on_ranks(again)
    assert losses(again) == losses(two)[3:]


@pytest.mark.long
def test_rank_0_of_two_holds_what_was_predicted(make):
    cfg = make(*ONE, *LORA, "train.global_batch=2")
    on_ranks(cfg)
    agree(counted(cfg), predicted(cfg, 2))


def test_the_loss_rows_say_what_the_base_takes(make):
    cfg = make(*LORA, *ONE)
    train.run(cfg)
    row = read_rows(Path(cfg.run.dir) / "metrics.jsonl")[0]
    assert row["base"]["bytes_per_parameter"] <= 1.02 and row["base"]["weights"] == 14


@pytest.mark.usefixtures("bare_forward")
@pytest.mark.long
def test_compiled_blocks_carry_adapters(make, place: Path, graphs):
    data = place / "digits" / "train_text.json"
    over = (f"model.path={place / 'text'}", f"data.train=[{{path: {data}}}]", "data.eval=[]", *LORA,
            "train.seq_length=512", "train.steps=4")  # fmt: skip
    eager, compiled = (train.run(make(*over, f"train.compile={on}", dir=on)) for on in ("false", "true"))
    assert graphs and compiled.losses() == eager.losses()
    assert compiled.base["unchanged"]


@pytest.fixture(scope="module")
def in_rows(place: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The mini Qwen3 as a checkpoint in FP8, a scale for each row."""
    folder = tmp_path_factory.mktemp("fp8") / "rows"
    found = models.load(place / "text", dtype=torch.bfloat16)
    export(iter(found.state_dict().items()), place / "text", folder, "fp8-dynamic")
    return folder


def test_a_base_that_is_in_fp8_on_disk(make, place: Path, in_rows: Path):
    """LoRA takes its codes and the recipe that multiplies by them; full fine-tuning its values, and says so."""
    rows = place / "digits" / "train_text.json"
    over = [f"model.path={in_rows}", f"data.train=[{{path: {rows}}}]", "data.eval=[]", "train.seq_length=512",
            "train.steps=2", "train.warmup=0", "run.hf=true"]  # fmt: skip
    named = make(*over, "lora={rank: 4}", dir="lora")
    sections = {name: getattr(named, name) for name in Config.model_fields if name != "fp8"}
    cfg = Config(**sections)  # nobody names a recipe
    assert resolve_recipe(cfg).fp8.recipe == "rowwise" and resolve_recipe(named).fp8.recipe == "blockwise"
    result = train.run(cfg)
    written = load_config(result.dir / "config.yaml")
    assert written.fp8.recipe == "rowwise" and resolve_recipe(written) == written
    assert result.base["fp8"]["weights"] == 14
    stored = dict(iterate.iter_weights(in_rows))
    kept = _model(written)
    frozen = {name.replace(".base_layer.", "."): w for name, w in frozen_weights(kept)}
    assert frozen.keys() == {name for name, value in stored.items() if isinstance(value, fp8.Quantized)}
    for name, weight in frozen.items():
        assert torch.equal(codes_of_frozen(weight).data.view(torch.uint8), stored[name].data.view(torch.uint8)), name
    with pytest.raises(fp8.PlanError, match="blockwise"):  # named, and not the codes'
        train.run(override(named, [f"run.dir={result.dir.parent / 'other'}"]))

    console = Console(record=True, width=400)
    full = train.run(make(*over, dir="full"), console=console)
    assert "its weights are dequantized while they are read: codes are only kept with adapters" in console.export_text()
    assert full.base is None and "quantization_config" not in (full.dir / "hf" / "config.json").read_text()


@pytest.mark.usefixtures("bare_forward", "seen")
def test_a_frozen_language_model_of_codes_without_adapters_stays_while_the_tower_trains(make, place: Path):
    """`load_in_fp8` without `lora`: what `model.freeze` names is codes, all else trains, stops and goes on."""
    over = ("model.load_in_fp8=block", "model.freeze=[foundation]", "train.steps=2", "train.warmup=0")
    whole = train.run(make(*over, dir="whole"))
    cfg = make(*over, "run.hf=true")
    train.run(cfg, callbacks=[at(1, signal.SIGTERM)])
    result = train.run(override(cfg, ["run.resume=auto"]))
    assert (result.losses(), result.eval) == (whole.losses(), whole.eval)
    assert result.base["unchanged"] and result.base["fp8"]["weights"] == 14
    codes = models.load(place / "tiny", load_in_fp8="block")
    before, after = (
        dict(fp8.dequantize_weights(m).named_parameters()) for m in (codes, models.load(result.dir / "hf"))
    )
    changed = {name.split(".")[1] for name in before if not torch.equal(before[name], after[name])}
    kept = {name.split(".")[1] for name in before} - changed
    assert "visual" in changed and kept == {"language_model"}
