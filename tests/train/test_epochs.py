"""`train.epochs`: the steps that follow from the rows of data.train, in the resolved file and after a resume."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from octavo import train
from octavo.config import ConfigError, load_config, override
from octavo.train.setup.resolve_config import resolve_steps

from .conftest import Make

pytestmark = pytest.mark.usefixtures("bare_forward")


def rows(file: Path, count: int) -> Path:
    turns = [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]
    file.write_text(json.dumps([{"conversations": turns}] * count))
    return file


@pytest.mark.parametrize(
    ("epochs", "sets", "batch", "steps"),
    [
        (1, "{path: a.json}", 4, 3),  # 10 rows: the last step goes over
        (2, "{path: a.json}", 4, 5),
        (0.1, "{path: a.json}", 1, 1),
        (0.3, "{path: a.json}", 1, 3),  # 0.3 * 10 is 3.0000000000000004 to nobody
        (0.01, "{path: a.json}", 8, 1),
        (2, "{path: a.json, max_samples: 6}", 4, 3),
        (1, "{path: a.json}, {path: b.json, weight: 3}", 5, 3),  # a pass is as many rows as there are
    ],
)
def test_the_steps_of_epochs(make: Make, tmp_path: Path, epochs: float, sets: str, batch: int, steps: int) -> None:
    rows(tmp_path / "a.json", 10), rows(tmp_path / "b.json", 5)
    found = sets.replace("path: ", f"path: {tmp_path}/")
    cfg = make(f"data.train=[{found}]", f"train.epochs={epochs}", "train.micro_batch=1", "train.warmup=0",
               f"train.global_batch={batch}")  # fmt: skip
    done = resolve_steps(cfg)
    assert (done.train.steps, done.train.epochs) == (steps, None)
    assert resolve_steps(done) is done and done.model_copy(update={"train": cfg.train}) == cfg


def test_too_long_a_warmup_is_refused(make: Make, tmp_path: Path) -> None:
    cfg = make(f"data.train=[{{path: {rows(tmp_path / 'a.json', 8)}}}]", "train.epochs=1")
    with pytest.raises(ConfigError, match="warmup 2 takes all of 2 steps"):
        resolve_steps(cfg)


def test_a_run_of_epochs_writes_its_steps_and_says_why_it_cannot_go_on_with_more_rows(
    make: Make, tmp_path: Path
) -> None:
    file = rows(tmp_path / "a.json", 8)
    cfg = make(f"data.train=[{{path: {file}}}]", "train.epochs=1", "train.warmup=0", "data.eval=[]")
    done = train.run(cfg)
    resolved = load_config(done.dir / "config.yaml")
    assert done.steps == 2 and (resolved.train.steps, resolved.train.epochs) == (2, None)
    assert train.run(override(cfg, ["run.resume=auto"])).steps == 2  # the same epochs of the same rows
    rows(file, 12)
    with pytest.raises(train.TrainError, match=r"train.steps was 2, is now 3 .*rows of data.train: did those change"):
        train.run(override(cfg, ["run.resume=auto"]))
