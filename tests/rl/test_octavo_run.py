"""`octavo.run`: training from Python is `octavo train`, on rows and functions that are in no file."""

from __future__ import annotations

import copy
import json
import random
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import numpy
import pytest
import torch
from PIL import Image

import octavo
from octavo import rl, train
from octavo.base import safe_read
from octavo.cli.main import main
from octavo.config import Config, ConfigError, load_config, to_yaml
from octavo.data import BadSample
from octavo.data.storage import python_rows
from octavo.rl.rewards import RewardError
from octavo.train import TrainError
from octavo.train.run_dir.rank_facts import rank_facts
from tests.train.conftest import at

pytestmark = pytest.mark.usefixtures("uncounted", "unseen", "no_pages")

Make = Callable[..., Config]
LENGTH = ("train.steps=2", "train.warmup=0")
SHORT = (*LENGTH, "data.eval=[]")


def without_data(cfg: Config) -> dict[str, Any]:
    """Return a configuration as a dict of the settings that differ from the defaults, without its data sets."""
    values = cfg.model_dump(mode="json", exclude_defaults=True)
    values["data"] = {key: value for key, value in values["data"].items() if key not in ("train", "eval")}
    values.get("rl", {}).pop("rewards", None)
    return values


def rows_of(file: Path) -> list[dict[str, Any]]:
    return json.loads(file.read_text())


def digit_share(completions, **columns):
    return [float(any(c in "0123456789abcde" for c in text)) for text in completions]


def says(place: Path) -> list[dict[str, Any]]:
    return rows_of(place / "talk" / "train.json")


def test_sft_on_rows_is_sft_on_their_file(make: Make, place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = make("train.steps=3", dir="file")
    values = without_data(make("train.steps=3", dir="rows"))
    train_data, eval_data = says(place), rows_of(place / "talk" / "test.json")
    before = copy.deepcopy((values, train_data, eval_data))
    generators = random.getstate(), numpy.random.get_state()[1].tolist(), torch.get_rng_state().tolist()
    result = octavo.run(values, train_data=train_data, eval_data=datasets.Dataset.from_list(eval_data))
    assert (values, train_data, eval_data) == before
    assert (random.getstate(), numpy.random.get_state()[1].tolist(), torch.get_rng_state().tolist()) == generators
    from_file = train.run(file)
    assert result.status == "finished" and result.losses() == from_file.losses() and result.eval == from_file.eval
    shown = capsys.readouterr().out
    assert "step 3/3" in shown and f"finished after step 3: {result.dir}" in shown and "all trained" in shown
    config = load_config(result.dir / "config.yaml")
    assert [entry.path for entry in (*config.data.train, *config.data.eval)] == [
        "python:train_data",
        "python:eval_data",
    ]


@pytest.mark.usefixtures("seen")
def test_images_of_pil_give_the_losses_of_their_files(make: Make, place: Path) -> None:
    rows = rows_of(place / "digits" / "train.json")[:8]
    for row in rows:
        row["image"] = Image.open(place / "digits" / row["image"])
    result = octavo.run(without_data(make(*SHORT, dir="rows")), train_data=rows)
    assert result.losses() == train.run(make(*SHORT, "data.train.0.max_samples=8", dir="file")).losses()


@pytest.mark.parametrize("packing", [False, True])
def test_pretraining_rows_are_cached_by_their_content(make: Make, tmp_path: Path, packing: bool) -> None:
    """Joined documents, or token counts of packs, are in the cache: other rows of the same name must not get them."""
    settings = ("train.phase=pretrain", "train.steps=null", "train.epochs=1", "data.eval=[]", "train.warmup=0")
    settings += ("train.seq_length=48", *(("data.packing=true", "data.join=false", "train.micro_batch=1") * packing))
    rows = [{"text": f"{n} green bottles, and then {n - 1}."} for n in range(6)]
    octavo.run(without_data(make(*settings, dir="other")), train_data=[{"text": row["text"] * 2} for row in rows])
    result = octavo.run(without_data(make(*settings, dir="rows")), train_data=rows)
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    file = make(*settings, f"data.train=[{{path: {tmp_path / 'rows.jsonl'}}}]", dir="file")
    assert result.losses() == train.run(file).losses()


def test_preferences_on_rows_are_those_of_their_file(preference_config: Make, pairs: Path, place: Path) -> None:
    file = preference_config(*LENGTH, dir="file")
    rows = rows_of(place / "talk" / "pairs.json")
    result = octavo.run(without_data(preference_config(*LENGTH, dir="rows")), train_data=rows)
    assert result.losses() == rl.run(file).losses()


RULES = """
def digit_share(completions, **columns):
    return [float(any(c in "0123456789abcde" for c in text)) for text in completions]
"""


def test_functions_reward_as_those_of_a_file(rl_config: Make, place: Path, tmp_path: Path) -> None:
    (tmp_path / "rules.py").write_text(RULES)
    over = (*LENGTH, "fp8.recipe=off", f"rl.rewards=[{tmp_path}/rules.py:digit_share]")
    file = rl_config(*over, dir="file")
    values = without_data(rl_config(*over, dir="rows"))
    result = octavo.run(values, train_data=says(place), rewards=[digit_share])
    assert result.losses() == rl.run(file).losses()
    assert result.final["rewards/digit_share/mean"] > 0
    config = result.dir / "config.yaml"
    assert [entry.reward for entry in load_config(config).rl.rewards] == ["python:digit_share"]

    # errors name the row by its index
    def fails(completions):
        return [1 / 0]

    values["run"]["dir"] = str(tmp_path / "fails")
    with pytest.raises(RewardError, match=r"python:fails\) .*\(train_data\[\d+\]: .* raised ZeroDivisionError"):
        octavo.run(values, train_data=says(place), rewards=[fails])
    # the source of a function binds a resume
    values["run"] |= {"dir": str(tmp_path / "rows"), "resume": str(result.dir / "checkpoints" / "step_2")}
    exec(RULES.replace("abcde", ""), namespace := {})
    with pytest.raises(TrainError, match="another reward digit_share: its contents have changed"):
        octavo.run(values, train_data=says(place), rewards=[namespace["digit_share"]])
    # and the command line has neither
    assert main(["train", str(config)]) == 2


def test_a_resume_needs_the_same_rows(
    make: Make, place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    whole = train.run(make(dir="whole"))
    values = without_data(make())
    values["run"]["resume"] = "auto"
    held_out = rows_of(place / "talk" / "test.json")
    first = octavo.run(values, train_data=says(place), eval_data=held_out, callbacks=[at(2, signal.SIGTERM)])
    assert (first.status, first.steps) == ("stopped", 3)
    # on the command line
    config = str(first.dir / "config.yaml")
    capsys.readouterr()
    assert main(["train", config, "run.resume=auto"]) == 2
    said = capsys.readouterr().err
    assert (
        "data.train.0.path: python:train_data are rows that a Python program passed to octavo.run as train_data" in said
    )
    assert "data.eval.0.path: python:eval_data are rows" in said
    assert main(["eval", str(first.dir)]) == 1 and "python:eval_data are rows" in capsys.readouterr().err
    file = tmp_path / "eval.yaml"
    file.write_text(to_yaml(make(f"data.eval=[{{path: {place / 'talk' / 'test.json'}}}]")))
    assert main(["eval", str(first.dir), "--config", str(file)]) == 0
    # with other rows
    other = says(place)
    other[5]["conversations"][1]["value"] += "!"
    with pytest.raises(TrainError, match=r"python:train_data had \d+ bytes, .* differ.* pass the rows of that time"):
        octavo.run(values, train_data=other, eval_data=held_out)
    # with the same, and the configuration that the run wrote
    again = octavo.run(first.dir / "config.yaml", train_data=says(place), eval_data=held_out)
    assert again.status == "finished" and again.losses() == whole.losses() and again.eval == whole.eval
    # the rows bind a finished run as well
    for rows, others, name in ((other, held_out, "train_data"), (says(place), held_out[1:], "eval_data")):
        with pytest.raises(
            TrainError, match=rf"step_6 was made with different data: python:{name} had .* rows of that"
        ):
            octavo.run(values, train_data=rows, eval_data=others)
    assert octavo.run(values, train_data=says(place), eval_data=held_out).losses() == whole.losses()
    shutil.rmtree(first.dir / "checkpoints")
    capsys.readouterr()
    octavo.run(values, train_data=other, eval_data=held_out)
    said = " ".join(capsys.readouterr().out.split())
    assert "has no checkpoint left, so whether its run had the same data is not checked" in said


def test_rows_and_files_are_mixed_by_naming_both(make: Make, place: Path) -> None:
    entries = [{"path": "python:train_data", "weight": 3, "max_samples": 4, "format": "llava"}]
    entries += [{"path": str(place / "talk" / "train.json"), "max_samples": 4}]
    values = without_data(make(*SHORT)) | {"data": {"train": entries}}
    rows = [{"conversations": row["conversations"]} for row in says(place)]
    result = octavo.run(values, train_data=rows)
    assert result.status == "finished" and (result.dir / "config.yaml").read_text().count("python:train_data") == 1
    assert octavo.run(load_config(values | {"run": values["run"] | {"resume": "auto"}}), train_data=rows).steps == 2


def test_bad_row_is_named_by_its_index_and_may_be_skipped(make: Make, place: Path) -> None:
    rows = says(place)[:8]
    rows[5]["conversations"][0]["from"] = "robot"
    rows[6]["conversations"] = {1, 2}
    values = without_data(make(*SHORT, dir="stops"))
    with pytest.raises(BadSample, match=r"^train_data\[[56]\]"):
        octavo.run(values, train_data=rows)
    values["run"]["dir"] += "-skips"
    values["data"]["on_bad_sample"] = "skip"
    result = octavo.run(values, train_data=rows)
    lines = [line for _, line in safe_read.json_lines(result.dir / "skipped.jsonl")]
    assert {(line["file"], line["row"]) for line in lines} == {("python:train_data", 5), ("python:train_data", 6)}


OWN = [{"path": "python:train_data"}]


def rl_with(*rewards: str) -> dict[str, Any]:
    return {"train.phase": "rl", "rl": {"rewards": [*rewards]}}


@pytest.mark.parametrize(
    ("change", "arguments", "problem"),
    [
        ({}, {"train_data": None}, "data.train: required, but absent"),
        ({}, {"train_data": []}, "train_data: it has no rows"),
        ({"data.train": [{"path": "a.json"}]}, {}, "data.train: names other data, and train_data is given"),
        ({"data.train": OWN}, {"train_data": None}, "data.train: names python:train_data, and train_data is absent"),
        ({"data.eval": OWN}, {}, "data.eval.0.path: there are no rows `python:train_data`; write python:eval_data"),
        ({}, {"rewards": [digit_share]}, "rewards: functions as rewards are for phase rl, and train.phase is sft"),
        ({"train.phase": "rl"}, {"rewards": []}, "rewards: it is empty"),
        ({"train.phase": "rl"}, {"rewards": digit_share}, "expected a list of functions, such as [digit_share]"),
        ({"train.phase": "rl"}, {"rewards": [3]}, "rewards: entry 0 is 3 (int), which cannot be called"),
        (rl_with("math"), {"rewards": [digit_share]}, "names other rewards, and not python:digit_share, which is in"),
        (rl_with("python:score"), {}, "rl.rewards: names python:score, and rewards is absent; pass"),
        (rl_with("python:score"), {"rewards": [digit_share]}, "names python:score, and rewards has python:digit_share"),
        ({}, {"callbacks": [print]}, "callbacks: expected octavo.train.Callback, found <built-in function print>"),
        ({}, {"callbacks": train.Callback()}, "callbacks: expected a list of octavo.train.Callback, found <octavo"),
        ({"data": 3}, {}, "data: expected a mapping, found 3"),
    ],
)
def test_all_problems_of_a_call_are_reported_at_once(
    make: Make, place: Path, change: dict[str, Any], arguments: dict[str, Any], problem: str
) -> None:
    values = without_data(make(*SHORT))
    values["train"]["stepz"] = 3
    for key, value in change.items():
        section, _, name = key.partition(".")
        values[section] = values.get(section, {}) | {name: value} if name else value
    with pytest.raises(ConfigError) as error:
        octavo.run(values, **({"train_data": says(place)} | arguments))
    assert problem in str(error.value)
    assert "train.stepz: unknown key; did you mean `steps`?" in str(error.value)
    assert "rl.rewards: required" not in str(error.value)  # they were passed
    assert not Path(values["run"]["dir"]).exists()


def test_a_call_without_a_configuration_is_refused() -> None:
    with pytest.raises(ConfigError, match="the configuration: expected a dict or the path of a YAML file, found None"):
        octavo.run(None)  # type: ignore[arg-type]


def test_ctrl_c_ends_the_program_after_the_step_is_saved(make: Make, place: Path) -> None:
    values = without_data(make("data.eval=[]", dir="stopped"))
    with pytest.raises(KeyboardInterrupt):
        octavo.run(values, train_data=says(place), callbacks=[at(2, signal.SIGINT)])
    assert (Path(values["run"]["dir"]) / "checkpoints" / "step_3").is_dir()


def test_missing_files_are_named(make: Make, place: Path) -> None:
    values = without_data(make(*SHORT)) | {"model": {"path": "nowhere"}}
    with pytest.raises(ConfigError, match="the configuration: model.path: there is no folder .*nowhere"):
        octavo.run(values, train_data=says(place))


def test_ranks_compare_the_digests_of_rows(place: Path, make: Make) -> None:
    cfg = load_config(without_data(make(*SHORT)) | {"data": {"train": [{"path": "python:train_data"}]}})
    facts = []
    for rows in (says(place), says(place), says(place)[:-1]):
        with python_rows.hold([python_rows.make_rows(rows, "python:train_data")]):
            facts.append(rank_facts(cfg, {}))
    assert facts[0] == facts[1]
    assert {key for key in facts[2] if facts[2][key] != facts[0][key]} == {"rows of python:train_data"}


SCRIPT = """
import json, os, sys
import octavo
import my_rewards

rows = json.load(open(sys.argv[2]))
if sys.argv[3] == "other" and os.environ["RANK"] == "1":
    rows = rows[1:]
score = my_rewards.digit_share if sys.argv[3] != "local" else lambda completions: [0.0] * len(completions)
result = octavo.run(json.load(open(sys.argv[1])), train_data=rows, rewards=[score])
"""


@pytest.mark.long
def test_script_under_torchrun(rl_config: Make, place: Path, tmp_path: Path) -> None:
    (tmp_path / "my_rewards.py").write_text(RULES)
    (tmp_path / "script.py").write_text(SCRIPT)

    def torchrun(how: str) -> subprocess.CompletedProcess[str]:
        values = without_data(rl_config(*LENGTH, "fp8.recipe=off", dir=how))
        (tmp_path / "config.json").write_text(json.dumps(values))
        words = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", str(tmp_path / "script.py")]
        words += [str(tmp_path / "config.json"), str(place / "talk" / "train.json"), how]
        return subprocess.run([sys.executable, *words], capture_output=True, text=True)

    done = torchrun("same")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("finished after step 2") == 1  # only one rank prints
    assert "rows of python:train_data" in torchrun("other").stderr
    assert (
        "rewards: entry 0, lambda, is not in a module that can be imported, which 2 ranks" in torchrun("local").stderr
    )


def test_importing_octavo_needs_no_torch() -> None:
    """The function is there, and nothing that it uses; tests/test_package.py measures the import."""
    assert octavo.run.__module__ == "octavo.training" and "octavo.training" in sys.modules
    names = vars(sys.modules["octavo.training"])
    assert not {"torch", "rl", "train"} & names.keys()
