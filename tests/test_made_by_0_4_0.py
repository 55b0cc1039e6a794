"""What version 0.4.0 wrote is still read, and goes on as it did there: runs, plans, measurements, state dicts, exports.

The files are ``tests/made_by_0_4_0``; its README.md says how each was made. They stay as they are.
"""

from __future__ import annotations

import inspect
import io
import json
import re
import shutil
from pathlib import Path

import pytest
import torch
from PIL import Image
from rich.console import Console
from safetensors.torch import load_file
from torch import nn
from transformers import AutoModelForCausalLM, Qwen3Config

import octavo
from benchmarks.losses import platform
from octavo import adapters, checkpoint, fp8, models, train
from octavo.checkpoint import compat
from octavo.cli.main import main
from octavo.config import load_config
from octavo.fp8.measuring import Machine
from octavo.fp8.proof import Proof
from octavo.fp8.weights import frozen_weights

MADE = Path(__file__).parent / "made_by_0_4_0"
RESULTS = json.loads((MADE / "results.json").read_text(encoding="utf-8"))
ATTENTION, MLP = "model.layers.0.self_attn.", "model.layers.0.mlp."
QKV = tuple(ATTENTION + name for name in ("q_proj", "k_proj", "v_proj"))
GATE_UP = tuple(MLP + name for name in ("gate_proj", "up_proj"))
LAYERS = {*QKV, ATTENTION + "o_proj", *GATE_UP, MLP + "down_proj"}

pytestmark = pytest.mark.skipif(not Path("/proc/self/cwd").exists(), reason="the runs name their files by /proc")


def siblings_run_as(plan: fp8.Plan, fused: set[tuple[str, ...]]) -> None:
    """What becomes of siblings that a plan of 0.4.0 runs as one GEMM: they run a GEMM each, and the plan says so."""
    notes = [note for note in plan.notes if "as one GEMM" in note]
    assert len(notes) == bool(fused) and not hasattr(plan, "groups")


@pytest.fixture
def copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the files to work in: paths in the runs are seen from the current folder."""
    folder = tmp_path / "made"
    shutil.copytree(MADE, folder)
    monkeypatch.chdir(folder)
    return folder


def meta(folder: str) -> nn.Module:
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(Qwen3Config.from_pretrained(folder), dtype=torch.float32)


def recipes(plan: fp8.Plan) -> dict[str, str]:
    return {row.name: row.recipe.name for row in plan.rows if row.fp8}


def agree(losses: dict[int, float], name: str) -> None:
    """Bit for bit on the platform that the recorded losses come from, closely on any other."""
    expected = {int(step): float.fromhex(loss) for step, loss in RESULTS[name].items()}
    same = platform() == RESULTS["platform"]
    assert losses == (expected if same else pytest.approx(expected, abs=1e-3))


def test_each_form_of_0_4_0_is_a_function_until_1_0() -> None:
    forms = [one for one in vars(compat).values() if inspect.isfunction(one) and one.__module__ == compat.__name__]
    assert forms and all("For 0.4.0, until 1.0." in (form.__doc__ or "") for form in forms)
    assert octavo.__version__.startswith("0."), "delete octavo/checkpoint/compat.py, and what it lists"


@pytest.mark.parametrize("name", ["stopped", "stopped_fp8_weights"])
def test_a_stopped_run_goes_on_to_the_same_losses(name: str, copy: Path) -> None:
    result = train.run(load_config(f"runs/{name}/config.yaml", ["run.resume=auto"]))
    assert result.status == "finished"
    agree(result.losses(), name)
    proof = json.loads((copy / "runs" / name / "proof.json").read_text())
    assert not proof["pending"] and proof["share"] == 1.0
    # Modules may move, since nothing in a run names one: what it wrote then or writes now.
    module = re.compile(rb"\boctavo\.(?:adapters|checkpoint|config|data|fp8|models|parallel|rl|train)\b")
    files = [path for path in (copy / "runs" / name).rglob("*") if path.is_file()]
    assert len(files) > 5 and not [path for path in files if module.search(path.read_bytes())]


def test_a_run_that_fused_siblings_says_that_they_are_separate(copy: Path) -> None:
    file = copy / "runs" / "stopped" / "plan.json"
    earlier, fused = (json.loads(path.read_text()) for path in (file, copy / "plan_fused.json"))
    file.write_text(json.dumps({**earlier, "sisters": fused["sisters"]}))
    said = Console(file=io.StringIO(), width=400)
    train.run(load_config("runs/stopped/config.yaml", ["run.resume=auto"]), console=said)
    assert said.file.getvalue().count("as one GEMM; now each layer runs a separate GEMM") == 1
    now = json.loads(file.read_text())
    assert "sisters" not in now and any("as one GEMM" in note for note in now["notes"])
    siblings_run_as(fp8.load_plan(file, meta("model")), set())


def test_a_lora_run_goes_on_from_an_earlier_checkpoint(copy: Path) -> None:
    before = load_file("runs/lora/adapter/adapter_model.safetensors")
    assert checkpoint.verify("runs/lora/adapter", against="model").ok
    assert set(adapters.load(models.load("model"), "runs/lora/adapter")) == {MLP + "up_proj"}
    frozen = json.loads(Path("runs/lora/base.json").read_text())["sha256"]
    train.run(load_config("runs/lora/config.yaml", ["run.resume=runs/lora/checkpoints/step_4"]))
    losses = train.run(load_config("runs/lora/config.yaml", ["run.resume=auto"])).losses()  # it has finished
    agree(losses, "lora")
    after = load_file("runs/lora/adapter/adapter_model.safetensors")
    assert before.keys() == after.keys()
    for key in before:
        torch.testing.assert_close(after[key], before[key], atol=1e-3, rtol=1e-2)
    assert json.loads(Path("runs/lora/base.json").read_text())["sha256"] == frozen


def test_a_finished_run_is_evaluated_and_its_folder_loads(copy: Path) -> None:
    done = train.run(load_config("runs/finished/config.yaml", ["run.resume=auto"]))
    assert done.status == "finished" and done.steps == 8
    agree(done.losses(), "finished")
    expected = RESULTS["finished_eval"]
    found = train.evaluate_run("runs/finished", log=lambda text: None)
    bound = 0.0 if platform() == RESULTS["platform"] else 1e-3
    assert found == {**expected, "loss": pytest.approx(expected["loss"], abs=bound)}
    assert checkpoint.verify("runs/finished/hf").ok
    trained, written = train.load_run("runs/finished", log=lambda text: None)[0], models.load("runs/finished/hf")
    own = trained.state_dict()
    for name, value in written.state_dict().items():
        assert torch.equal(own[name].float(), value.float()), name


def test_a_finished_run_answers_though_its_template_adds_texts_up(copy: Path, capsys) -> None:
    ask = ["generate", "runs/finished", "--prompt", "1 + 1 = ?", "--max-new-tokens", "2", "--json"]
    assert main(ask) == 0
    assert json.loads(capsys.readouterr().out)["fp8_gemms"] > 0
    Image.new("RGB", (8, 8)).save("cat.png")
    assert main([*ask, "--image", "cat.png"]) == 1
    assert "a text-only model received 1 image" in capsys.readouterr().err


@pytest.mark.parametrize("run", ["stopped", "stopped_fp8_weights", "lora", "finished"])
def test_the_plan_of_a_run_loads(run: str) -> None:
    plan = fp8.load_plan(MADE / "runs" / run / "plan.json", meta(str(MADE / "model")))
    assert recipes(plan) == dict.fromkeys(LAYERS, "blockwise") | ({QKV[0]: "delayed"} if run == "stopped" else {})
    assert plan.policy.param is (run == "stopped_fp8_weights")


def test_a_plan_loads_and_applies() -> None:
    model = models.load(MADE / "model", dtype=torch.float32)
    plan = fp8.load_plan(MADE / "plan.json", model)
    assert recipes(plan) == dict.fromkeys(LAYERS, "blockwise")
    assert {row.name for row in plan.rows if row.fp8 and row.recipe.wgrad is None} == {ATTENTION + "o_proj"}
    siblings_run_as(plan, set())
    assert_runs_as_planned(model, plan)


def test_a_plan_with_fused_siblings_loads_and_applies() -> None:
    model = AutoModelForCausalLM.from_config(Qwen3Config.from_pretrained(MADE / "wide"), dtype=torch.float32)
    plan = fp8.load_plan(MADE / "plan_fused.json", model)
    assert recipes(plan) == dict.fromkeys(LAYERS, "blockwise")
    siblings_run_as(plan, {QKV})
    assert {block.name for block in plan.blocks if block.fused} >= {MLP.rstrip(".")}
    assert_runs_as_planned(model, plan)


def assert_runs_as_planned(model: nn.Module, plan: fp8.Plan) -> None:
    fp8.apply(model, plan)
    proof, ids = Proof(plan), torch.arange(48).reshape(2, 24)
    with fp8.count_gemms() as counts:
        model(input_ids=ids, labels=ids).loss.backward()
    proof.observe(counts, dict.fromkeys(plan.components or {"foundation": ()}, 1))
    assert not proof.pending and all(torch.isfinite(p.grad).all() for p in model.parameters())


def test_a_measured_plan_and_its_measurements_load() -> None:
    model = meta(str(MADE / "wide"))
    with pytest.raises(fp8.PlanError, match="made for Stand-in GPU"):
        fp8.load_plan(MADE / "plan_measured.json", model)
    plan = fp8.load_plan(MADE / "plan_measured.json", model, other_machine=True)
    assert recipes(plan) == dict.fromkeys(LAYERS, "blockwise") and plan.tokens == {"foundation": 64}
    siblings_run_as(plan, {QKV, GATE_UP})

    machine = Machine(**json.loads((MADE / "measurements.json").read_text())["machines"][0]["machine"])
    cases = fp8.MeasurementCache(MADE / "measurements.json").load(machine)
    found = fp8.Measurements(machine, cases)
    again = fp8.plan(model, "auto", tokens={"foundation": 64}, measurements=found)
    # What it measured as `blockwise` is `blockwise_1d` now, which "auto" does not choose; mxfp8 was as fast.
    assert recipes(again) == dict.fromkeys(LAYERS, "mxfp8") and all(r.times is not None for r in again.rows if r.fp8)
    named = fp8.plan(model, "blockwise_1d", tokens={"foundation": 64}, measurements=found)
    assert recipes(named) == dict.fromkeys(LAYERS, "blockwise_1d")
    assert all(row.times is not None for row in named.rows if row.fp8)


def test_an_fp8_state_dict_loads_to_the_same_values() -> None:
    state = load_file(MADE / "fp8_state_dict.safetensors")
    codes = {name: value for name, value in state.items() if value.dtype == torch.float8_e4m3fn}
    assert codes.keys() == {f"{name}.weight" for name in LAYERS}
    model = models.load(MADE / "model", dtype=torch.bfloat16)
    fp8.apply(model, fp8.plan(model, fp8.Policy("blockwise", param=True)))
    fp8.load_fp8_state_dict(model, state)
    again, masters = fp8.fp8_state_dict(model), model.state_dict()
    assert again.keys() == state.keys()
    for name, value in masters.items():
        expected = in_blocks(state, name) if name in codes else state[name].float()
        assert torch.equal(value.float(), expected), name
        assert name not in codes or torch.equal(in_blocks(again, name), expected), name


def in_blocks(state: dict[str, torch.Tensor], name: str) -> torch.Tensor:
    """code * scale, a scale for each block of 128 x 128"""
    codes, scale = state[name].float(), state[f"{name}_scale_inv"]
    whole = scale.repeat_interleave(128, 0).repeat_interleave(128, 1)
    return codes * whole[: codes.shape[0], : codes.shape[1]]


def test_an_export_verifies_and_loads() -> None:
    verified = checkpoint.verify(MADE / "export")
    assert verified.ok and verified.fp8 == len(LAYERS), [finding.text for finding in verified.findings]
    model = models.load(MADE / "export", keep_fp8=True)
    assert {name.removesuffix(".weight") for name, _ in frozen_weights(model)} == LAYERS
    assert torch.isfinite(model(input_ids=torch.arange(32)[None]).logits).all()
