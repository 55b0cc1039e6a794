"""The commands in process: output, arguments passed on, and error messages."""

import inspect
import json
import re
from pathlib import Path
from types import SimpleNamespace

import pytest

from octavo.cli import terminal
from octavo.cli.main import main


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """Write a mini checkpoint, a few digits and a configuration."""
    from octavo.data.builtin import digits
    from octavo.models.tiny import tiny

    home = tmp_path_factory.mktemp("cli")
    tiny.write("qwen3_vl", home / "model", size="mini")
    digits.write(home / "digits", train=8, test=4)
    (home / "run.yaml").write_text(
        """model: {path: model}
data:
  train: [{path: digits/train.json, images: digits}]
  eval: [{path: digits/test.json, images: digits}]
train: {steps: 2, micro_batch: 2, global_batch: 2, seq_length: 256, lr: 1e-3}
run: {dir: run, hf: false, tensorboard: false, health_every: 0}
"""
    )
    return home


@pytest.fixture
def here(home, monkeypatch):
    monkeypatch.chdir(home)
    return home


@pytest.fixture(scope="module")
def trained(home):
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(home)
        assert main(["train", "run.yaml", "run.save_every=1"]) == 0
    return home / "run"


def test_train_then_eval_then_generate(here, trained, capsys):
    assert main(["eval", "run"]) == 0
    table = capsys.readouterr().out
    assert table.split()[:5] == ["step", "loss", "exact", "match", "questions"]
    assert main(["eval", "run", "--step", "1", "--recipe", "off", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["step"] == 1 and result["questions"] == 16 and result["loss"] > 0

    image = str(next((here / "digits").rglob("*.png")))
    ask = ["generate", "run", "--prompt", "first?", "--image", image, "--max-new-tokens", "2", "--json"]
    assert main(ask) == 0
    assert json.loads(capsys.readouterr().out)["fp8_gemms"] > 0  # a run uses the recipe of its training
    assert main([*ask, "--recipe", "off"]) == 0
    assert json.loads(capsys.readouterr().out)["fp8_gemms"] == 0
    assert main(["generate", "model", "--prompt", "hello", "--max-new-tokens", "2"]) == 0
    assert capsys.readouterr().err == "model: high precision\n"


def test_train_prints_at_most_fifteen_lines_before_the_first_step(here, capsys):
    """The plan is short by default and layer by layer with --verbose; the end lists the written files and the next
    command."""
    from octavo.cli.train import plan_printer
    from octavo.config import load_config
    from octavo.train.setup import planning

    assert main(["train", "run.yaml", "run.dir=printed", "run.hf=true", "fp8.activations=fp8"]) == 0
    lines = capsys.readouterr().out.splitlines()
    first = next(n for n, line in enumerate(lines) if line.startswith("step 1/2"))
    assert first <= 15 and lines[0].startswith("qwen3_vl of ") and lines[0].endswith(" all trained: model")
    assert any(line.startswith("memory, predicted: ") for line in lines[:first])
    assert "printed: a checkpoint at the end (keeps the newest 2), hf/ at the end" in lines[:first]
    assert lines[-3].startswith("wrote printed/hf, printed/page.html, printed/metrics.jsonl")
    assert lines[-2].startswith("export format: fp8-") and lines[-1].startswith("next: octavo export printed ")
    cfg = load_config("run.yaml")
    result = plan_printer(verbose=True)(planning.RunPlan(cfg, *planning.plan_for(cfg)))
    assert "note: norms in high precision: a reduction whose error every later layer inherits" in result
    assert sum("self_attn.q_proj " in line for line in result) == 1
    assert all(len(line) <= 80 for line in result if not line.startswith(("note: ", "memory, ")))


def test_train_reports_its_status_and_does_not_overwrite(here, trained, capsys):
    assert main(["train", "run.yaml"]) == 1
    assert "octavo train:" in capsys.readouterr().err
    assert main(["train", "run.yaml", "run.save_every=1", "run.resume=auto", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["status"] == "finished" and result["steps"] == 2


@pytest.mark.parametrize(
    "argv, code, message",
    [
        (["eval", "nowhere"], 2, "there is no folder nowhere"),
        (["eval", "model"], 1, "model is not a run, so it has no held-out data: give a configuration"),
        (["eval", "run", "--step", "7"], 1, "no checkpoint of step 7; there are 1, 2"),
        (["eval", "run", "--recipe", "blok"], 2, "'blok' is none of off, tensorwise"),
        (["generate", "nowhere", "--prompt", "a"], 2, "there is no folder nowhere"),
        (["generate", "digits", "--prompt", "a"], 1, "it has no config.yaml, config.json is missing"),
        (["generate", "model", "--prompt", " "], 2, "--prompt is empty"),
        (["generate", "model", "--prompt", "a", "--image", "no.png"], 2, "there is no image file no.png"),
        (["generate", "model", "--prompt", "a", "--image", "run.yaml"], 1, "run.yaml"),
        (["generate", "model", "--prompt", "a", "--step", "1"], 2, "model is not a run directory; remove --step"),
        (["generate", "model"], 2, "the following arguments are required: --prompt"),
        (["plan"], 2, "name a configuration file, or a published model"),
        (["plan", "run.yaml", "--fit", "80GB", "--card", "80GB"], 2, "--fit only proposes settings"),
        (["plan", "run.yaml", "--card", "big"], 1, "cannot parse the card 'big': give its memory, e.g. 80GB"),
        (["plan", "run.yaml", "--card", "h10"], 1, "cannot parse the card 'h10': did you mean h100? Else give its"),
        (["plan", "--shape", "qwen3_vl_8", "fp8.recipe=off"], 2, "did you mean qwen3_vl_8b?"),
        (["plan", "--shape", "mpt_1b", "fp8.recpe=off"], 2, "fp8.recpe: unknown key; did you mean `recipe`?"),
        (["plan", "run.yaml", "model.path=nowhere"], 2, "model.path: there is no folder"),
        (["plan", "run.yaml", "--cache", "c.json"], 2, "--cache stores measurements; add --measure"),
        (
            ["plan", "run.yaml", "--measure", "fp8.plan=p.json"],
            2,
            "--measure creates a plan, but the configuration uses",
        ),
        (["plan", "run.yaml", "fp8.plan=p.json"], 1, "p.json is missing"),
        (["plan", "run.yaml", "--save", ""], 2, "--save '' is empty; name a file, e.g. --save plan.json"),
        (["plan", "run.yaml", "--save", "digits"], 2, "--save 'digits' is a folder"),
        (["plan", "run.yaml", "--save", "run.yaml/plan.json"], 2, "run.yaml is a file; name a file"),
        (["plan", "run.yaml", "--save", "a\0b"], 2, "is not a path"),
        (["plan", "run.yaml", "--save", "a" * 252], 2, "has too long a name"),
        (["plan", "--shape", "mpt_1b", "--measure"], 2, "a published model has no data"),
        (["plan", "run.yaml", "--tokens", "foundation=x"], 2, "expected each component once with an integer below"),
        (
            ["plan", "run.yaml", "--tokens", "fundation=8"],
            1,
            "given for fundation, but qwen3_vl has no such component",
        ),
        (["plan", "run.yaml", "--tokens", "image_encoder=8"], 1, "tokens are missing for foundation"),
        (
            ["plan", "run.yaml", "fp8.rules=[{match: '**.nothing', recipe: off}]"],
            1,
            "rule '**.nothing' matches no linear",
        ),
        (["plan", "run.yaml", "fp8.backend=warp"], 1, "There is no backend 'warp'"),
        (["tiny", "Qwen3-VL", "d"], 2, "Did you mean 'qwen3_vl'?"),
        (["tiny", "llama", "digits"], 1, "digits"),
        (["digits", "model"], 1, "model"),
    ],
)
def test_errors_name_the_problem_and_the_fix(here, trained, argv, code, message, capsys):
    assert main(argv) == code
    output = capsys.readouterr()
    assert message in output.err and "Traceback" not in output.err
    assert not output.out


def test_plan_of_a_file(here, no_memory, capsys):
    assert main(["plan", "run.yaml", "fp8={recipe: blockwise, image_projector: {recipe: rowwise}}"]) == 0
    text = capsys.readouterr().out
    assert re.match(r"FP8: \d+ of \d+ linear layers, 100.0 % of linear FLOPs", text)  # the verdict is printed first
    assert "  image_projector  4 of 4 rowwise e4m3, 100.0 %\n" in text and "norms in high precision" in text
    shown = text[: text.index("note: ")].splitlines()
    assert max(map(len, shown)) <= 80 and text.count("the whole model") == 2  # once per component
    folded = len(text.splitlines())
    assert main(["plan", "run.yaml", "--all"]) == 0
    assert len(capsys.readouterr().out.splitlines()) > folded


def test_plan_of_a_file_as_json(here, no_memory, capsys):
    from octavo.models.structure import skeleton

    skeleton._parsed.cache_clear()
    assert main(["plan", "run.yaml", "--fp8-recipe", "tensorwise", "--fp8-format", "e4m3", "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    parsed = skeleton._parsed.cache_info()
    assert parsed.misses == 1 and parsed.hits > 3  # transformers takes long to parse a configuration
    assert plan["family"] == "qwen3_vl" and plan["share"] == 1  # the projector too
    assert {row["recipe"]["format"] for row in plan["rows"] if row["recipe"]} == {"e4m3"}


def test_fp8_flags_apply_to_the_whole_model(here, no_memory, capsys):
    def components(*words: str) -> set[str]:
        assert main(["plan", "run.yaml", "fp8={foundation: {wgrad: bf16}}", *words, "--json"]) == 0
        return {row["component"] for row in json.loads(capsys.readouterr().out)["rows"] if row["recipe"]}

    assert components() == {"foundation"}
    whole = {"foundation", "image_encoder", "image_projector"}
    assert components("--fp8-format", "e4m3") == components("--fp8-param-gather") == whole
    assert components("--fp8-recipe", "rowwise") == whole


def test_train_reports_the_fp8_gain(here, capsys):
    assert main(["train", "run.yaml", "run.gain_steps=1", "run.dir=gains", "data.eval=[]"]) == 0
    assert re.search(r"FP8 gain +-\d+\.\d % in forward and backward", capsys.readouterr().out)  # a CPU emulates it


def test_plan_of_a_shape(capsys):
    assert main(["plan", "--shape", "mpt_1b", "fp8.rules=[{match: '**.blocks.0.**', recipe: off}]", "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert plan["family"] and {row["component"] for row in plan["rows"]} >= {"foundation"}
    assert any(row["recipe"] is None and "rule" in row["reason"] for row in plan["rows"])


def test_measure_is_rejected_on_a_cpu(here, no_memory, capsys):
    import torch

    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    assert main(["plan", "run.yaml", "--measure"]) == 2
    assert "--measure needs a GPU: on a CPU FP8 is emulated" in capsys.readouterr().err
    assert main(["plan", "run.yaml", "fp8.recipe=auto"]) == 0
    assert "nothing was measured; recipes come from the table in docs/plan.md" in capsys.readouterr().out


@pytest.mark.long
def test_plan_is_measured_saved_and_loaded(here, tmp_path, monkeypatch, capsys):
    """With fixed times in which FP8 is faster for wide layers."""
    from octavo import fp8
    from octavo.cli import plan as command
    from octavo.fp8.measuring import Machine
    from octavo.fp8.measuring.timing import Timing
    from octavo.train.setup import planning

    def timer(case, calls, device):
        wide = case.n > case.k
        return {n: Timing(1.0 if n == "high precision" else 0.5 if wide else 2.0, 0, 0, 4) for n in calls}

    def measure(cfg, model, family, device, tokens, progress, cache):
        policy, machine = planning.policy_from(cfg), Machine("cpu2", "9.0")
        return fp8.measure(
            model, policy, family.components, tokens.counts,
            device="cpu", cache=fp8.MeasurementCache(cache), progress=progress, timer=timer, machine=machine,
        )  # fmt: skip

    monkeypatch.setattr(command, "_require_gpu", lambda: None)
    monkeypatch.setattr(planning, "measure_recipes", measure)
    cache, file = tmp_path / "cache.json", tmp_path / "plan.json"
    argv = ["plan", "run.yaml", "--measure", "--cache", str(cache), "--save", str(file)]
    assert main(argv) == 0
    output = capsys.readouterr()
    assert "measured: BF16 1000.00 ms, best FP8 2000.00 ms (blockwise e4m3 on reference)" in output.out
    assert "predicted step:" in output.out and "attention" in output.out and "not counted" in output.out
    assert "octavo train uses the configured recipe" in output.out
    assert "measured 0 of" in output.err and f"use it with fp8.plan: {file}" in output.err and cache.is_file()
    assert main([*argv, "--json", "--why", "fp8.recipe=auto"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert plan["prediction"]["gain"] != 0 and plan["backends"][0]["rejected"]
    wide = {r["name"] for r in plan["rows"] if r["recipe"]}
    assert wide and all(r["shape"][0] > r["shape"][1] for r in plan["rows"] if r["recipe"])
    assert main(["plan", "run.yaml", f"fp8.plan={file}"]) == 1  # of another GPU
    assert "plan.json was made for cpu2 (compute capability 9.0), but this is a CPU" in capsys.readouterr().err
    file.write_text(file.read_text().replace('"gpu": "cpu2", "capability": "9.0"', '"gpu": "cpu", "capability": null'))
    assert main(["plan", "run.yaml", f"fp8.plan={file}", "--json"]) == 0
    reloaded = json.loads(capsys.readouterr().out)
    assert {r["name"] for r in reloaded["rows"] if r["recipe"]} == wide


def test_plan_is_printed_if_its_file_cannot_be_written(here, no_memory, tmp_path, monkeypatch, capsys):
    from octavo.base import atomic_write

    def fail(source, target):
        raise OSError(28, "No space left on device", str(target))

    monkeypatch.setattr(atomic_write.os, "replace", fail)
    assert main(["plan", "run.yaml", "--save", str(tmp_path / "deep" / "plan.json")]) == 1
    output = capsys.readouterr()
    assert "of linear FLOPs" in output.out and "No space left on device" in output.err
    assert not list((tmp_path / "deep").iterdir())


def test_plan_lists_why_backends_were_rejected(here, no_memory, capsys):
    assert main(["plan", "run.yaml", "--why", "--tokens", "foundation=64,image_encoder=32"]) == 0
    out = capsys.readouterr().out
    assert "\n  triton is not used: " in out and "weight all components equally" not in out


def test_plan_wraps_lines_on_a_terminal(here, no_memory, monkeypatch, capsys):
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    monkeypatch.setenv("COLUMNS", "80")
    assert main(["plan", "run.yaml"]) == 0
    shown = re.sub(r"\x1b\[[0-9;]*m", "", capsys.readouterr().out)
    assert max(map(len, shown[: shown.index("note: ")].splitlines())) <= 80
    assert "…" not in shown


def test_tiny_and_digits_can_be_repeated(tmp_path, capsys):
    for _ in range(2):
        assert main(["tiny", "llama", str(tmp_path / "llama"), "--seed", "3"]) == 0
        assert main(["digits", str(tmp_path / "digits"), "--train", "4", "--test", "2", "--seed", "1"]) == 0
    assert "wrote a tiny llama" in capsys.readouterr().out
    assert len(json.loads((tmp_path / "digits" / "train.json").read_text())) == 4


def test_defaults_match_the_library():
    import argparse

    from octavo.cli import digits as command
    from octavo.data.builtin import digits

    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    args = parser.parse_args(["d"])
    parameters = inspect.signature(digits.write).parameters
    assert {k: getattr(args, k) for k in ("train", "test", "seed")} == {
        k: parameters[k].default for k in ("train", "test", "seed")
    }


VERDICTS = {"pass": 0, "warn": 0, "fail": 1, "undecided": 3}


def verdict(status):
    check = SimpleNamespace(to_json=lambda: {"name": "loss_gap", "status": status})
    line = f"{status}: so it is"
    return SimpleNamespace(
        status=status, line=line, lines=[line, "  because"], reasons=("because",), checks=(check,), claims=(),
        exit_code=VERDICTS[status], effects=(), data={"power": [], "factorial": None},
    )  # fmt: skip


@pytest.mark.parametrize("status", VERDICTS)
def test_compare_passes_arguments_and_exits_with_the_verdict(here, status, monkeypatch, capsys):
    from octavo import report

    calls = []
    monkeypatch.setattr(report, "compare", lambda *args, **kwargs: calls.append((args, kwargs)) or verdict(status))
    argv = ["compare", "run.yaml", "--recipes", "rowwise, blockwise,rowwise", "--out", "trial", "--fresh"]
    assert main(argv) == VERDICTS[status]
    (cfg, recipes, directory), kwargs = calls[0]
    assert recipes == ["rowwise", "blockwise"] and directory == "trial" and kwargs["fresh"] is True
    assert cfg.train.steps == 2
    lines = capsys.readouterr().out.splitlines()
    assert lines[:3] == [f"{status}: so it is", "  because", f"report: {Path('trial/report/report.html')}"]
    command = {0: "octavo train run.yaml", 1: "then try another recipe: octavo compare run.yaml --out trial --recipes"}
    assert len(lines) == 4 and command.get(VERDICTS[status], "octavo compare run.yaml --out trial --fresh") in lines[3]
    assert kwargs["forks"] == 0 and kwargs["savings"] is False  # three runs by default
    assert main(["compare", "run.yaml", "--json"]) == VERDICTS[status]
    (_, recipes, directory), _ = calls[1]
    assert recipes is None and directory == "run-compare"
    assert json.loads(capsys.readouterr().out)["status"] == status


def test_compare_power_trains_nothing(here, capsys):
    command = ["compare", "run.yaml", "--factorial", "image_encoder,foundation", "--seeds", "2", "--out", "unused"]
    assert main([*command, "--power"]) == 0
    lines = capsys.readouterr().out.splitlines()
    unknown = [line for line in lines if "no spread is recorded for this task" in line]
    assert "Effect on held-out accuracy, Effect on held-out loss" in unknown[-1] and "--seeds 2 first" in unknown[-1]
    assert not any("passes with probability" in line for line in lines)
    at = lines.index("8 runs, 0 of them already trained:")
    assert lines[at + 3].split() == ["3", "FP8", "in", "image_encoder,", "seed", "0"] and len(lines) == at + 9
    assert main([*command, "--power", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert [run["name"] for run in result["runs"][:2]] == ["high-precision", "high-precision-seed-1"]
    assert result["components"] == ["image_encoder", "foundation"] and result["left_out"] == ["image_projector"]
    assert {claim["claim"] for claim in result["power"]} >= {"accuracy", "effect_loss"}
    assert main(["compare", "run.yaml", "--out", "unused", "--forks", "1", "--power", "--json"]) == 0
    forks = json.loads(capsys.readouterr().out)["power"][-1]
    assert forks["claim"] == "loss_forks"
    assert "forks of 1 step cannot diverge, at least 30 are needed" in forks["why_not"]
    assert not (here / "unused").exists()


def test_compare_prints_the_bisect_command_for_a_costly_component(here, monkeypatch, capsys):
    from octavo import report
    from octavo.report.evidence.trust_table import FAIL, REPORTED, Check

    interaction = "image_encoder x foundation"
    bad = Check("effect_accuracy", "", "foundation", -0.05, "", "", FAIL, "", -0.06, -0.04, 0.01)
    reported = Check("effect_loss", "", interaction, 0.00012, "", "", REPORTED, "", -0.0001, 0.0003)
    result = verdict("fail")
    result.checks, result.effects = (bad, reported), (bad, reported)
    result.data = {"power": [], "factorial": {"components": interaction.split(" x "), "left_out": ["image_projector"]}}
    monkeypatch.setattr(report, "compare", lambda *args, **kwargs: result)
    argv = ["compare", "run.yaml", "train.steps=3", "--factorial", "image_encoder,foundation", "--recipes", "rowwise"]
    assert main(argv) == 1
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines[2:6])) <= 80 and lines[4].split()[:4] == ["foundation", "accuracy,", "points", "-5.00"]
    assert "+0.012" in lines[5] and "-0.010 to +0.030" in lines[5]
    search = "octavo bisect run.yaml train.steps=3 fp8.recipe=rowwise fp8.plan=null fp8.image_encoder.recipe=off "
    (line,) = [line for line in lines if line.startswith("foundation costs more than its margin")]
    assert line.endswith(f"{search}fp8.image_projector.recipe=off")
    result.status, result.exit_code = "undecided", 3
    assert main([*argv, "--seeds", "3"]) == 3
    assert (
        capsys.readouterr()
        .out.splitlines()[-1]
        .endswith("--recipes rowwise --factorial image_encoder,foundation --seeds 5")
    )


def test_compare_arguments_exist_in_the_report():
    """Checks the real signatures, which the monkeypatched functions above do not have."""
    from octavo import report
    from octavo.report.demo import demo

    assert {"cfg", "recipes", "directory", "console", "fresh", "forks", "savings", "describe_plan", "factorial"} <= set(
        inspect.signature(report.compare).parameters
    )
    assert {"directory", "steps", "fresh", "console", "task"} <= set(inspect.signature(demo.run).parameters)


def test_demo_passes_arguments(monkeypatch, capsys):
    from octavo.report.demo import demo

    calls, steps = [], inspect.signature(demo.run).parameters["steps"].default
    monkeypatch.setattr(demo, "run", lambda *args, **kwargs: calls.append((args, kwargs)) or verdict("fail"))
    assert main(["demo", "--dir", "d", "--steps", "3", "--json"]) == 1
    assert calls[0][0] == ("d", 3) and calls[0][1]["fresh"] is False
    assert calls[0][1]["console"].stderr
    assert json.loads(capsys.readouterr().out)["line"] == "fail: so it is"
    assert main(["demo"]) == 1
    assert calls[1][0] == ("demo", steps)
    assert not calls[1][1]["console"].stderr


def test_doctor_prints_checks_and_sets_the_exit_code(monkeypatch, capsys):
    from octavo import doctor
    from octavo.base import environment
    from octavo.doctor import ABSENT, FAIL, OK, WARN, Check, Report

    good = (
        Check("versions", "torch", OK, "2.13"),
        Check("optional", "vllm", ABSENT, "not installed", "no vllm", "get it"),
    )
    bad = (Check("fp8", "reference rowwise", FAIL, "boom", "cannot be trusted", "use another"),)
    low = (Check("storage", "/dev/shm", WARN, "0.1 GiB free", "workers may die", "data.workers: 0"),)
    monkeypatch.setattr(environment, "find_drivers", lambda: ["nvidia"])  # without one: tests/doctor/test_doctor.py
    monkeypatch.setattr(doctor, "examine", lambda log, every_package: Report(good + low, {}))
    assert main(["doctor"]) == 0
    out = capsys.readouterr().out
    assert "warn: /dev/shm: 0.1 GiB free\n  means: workers may die\n  fix:   data.workers: 0\n" in out
    assert "get it" not in out and out.endswith("All required checks passed.\n")
    assert main(["doctor", "--all"]) == 0
    assert "fix:   get it" in capsys.readouterr().out
    monkeypatch.setattr(doctor, "examine", lambda log, every_package: Report(good + bad, {"python": "3"}))
    assert main(["doctor"]) == 1
    assert "1 required check failed: reference rowwise." in capsys.readouterr().out
    assert main(["doctor", "--json"]) == 1
    result = json.loads(capsys.readouterr().out)
    assert result["healthy"] is False and result["environment"] == {"python": "3"}
    assert [check["status"] for check in result["checks"]] == [OK, ABSENT, FAIL]


def test_family_that_cannot_train_is_planned_without_memory(here, monkeypatch, capsys):
    from octavo import models

    monkeypatch.setattr(models, "why_not_trained", lambda config: "its forward takes more")
    known = "model_type 'qwen3_vl' can be planned but not trained: its forward takes more"
    assert main(["plan", "run.yaml", "--save", "layers.json"]) == 0
    out = capsys.readouterr().out
    assert "blocks.{0,1}.mlp.linear_fc1" in out and f"note: {known}; its memory is not predicted" in out
    assert "one GPU" not in out and (here / "layers.json").exists()
    assert main(["plan", "run.yaml", "--json"]) == 0
    assert f"{known}; its memory is not predicted" in json.loads(capsys.readouterr().out)["notes"]
    assert main(["plan", "run.yaml", "--card", "80GB"]) == 2
    assert f"{known}. Its memory and time are not predicted" in capsys.readouterr().err
    assert main(["train", "run.yaml", "run.dir=untrained"]) == 1
    assert f"{known}. `octavo doctor --families` lists" in capsys.readouterr().err


def test_doctor_lists_families(monkeypatch, capsys):
    from octavo.models.forward import survey

    families = [
        survey.FamilySupport(
            "a_vl", survey.TRAINS, "", "model.visual", (), ("model.visual.merger",), "model.text", ("x.y",), 7
        ),
        survey.FamilySupport("b_vl", survey.REFUSED, "no vision tower"),
    ]
    monkeypatch.setattr(survey, "survey", lambda: iter(families))
    assert main(["doctor", "--families"]) == 0
    out = capsys.readouterr().out
    assert "refused: no vision tower" in out and "model.visual" not in out
    assert out.rstrip().endswith(": trains 1, planned only 0, refused 1, not built 0.")
    assert main(["doctor", "--families", "--all"]) == 0
    assert "model.visual.merger" in capsys.readouterr().out
    assert main(["doctor", "--families", "--json"]) == 0
    assert [family["here"] for family in json.loads(capsys.readouterr().out)] == ["trains", "refused"]


def test_json_replaces_values_that_are_not_finite(capsys):
    terminal.show_json({"loss": float("nan"), "all": (1, float("inf")), "at": Path("a")})
    assert json.loads(capsys.readouterr().out) == {"loss": None, "all": [1, None], "at": "a"}


def test_lines_are_not_wrapped_without_a_terminal(capsys):
    terminal.console(stderr=False).print("many words " * 30)
    assert capsys.readouterr().out == "many words " * 30 + "\n"


def test_plain_tables_are_aligned():
    text = terminal.plain_table(("name", "n"), [("a", "10"), ("longer", "5")], title="T", right=(1,))
    assert text == "T\nname     n\n------  --\na       10\nlonger   5"
    wrapped = terminal.plain_table(("name", "what"), [("one", "many words " * 9), ("two", "x" * 90)])
    # nothing is cut
    assert wrapped.splitlines()[-2:] == ["      words many words many words", "two   " + "x" * 90]
    assert [terminal.number(v) for v in (None, 3, 0.123456, "x", True)] == ["-", "3", "0.1235", "x", "True"]
