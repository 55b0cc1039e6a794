"""A fake trainer, whose losses follow from the GEMMs and features that a configuration has on."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from octavo.bisect.short_runs import StepsDone
from octavo.config import Config, load_config_text, to_yaml
from octavo.fp8.policy import matches
from octavo.train import TrainError

KINDS = ("q_proj", "o_proj", "up_proj", "down_proj")
LAYERS = [f"model.visual.blocks.{n}.{kind}" for n in range(2) for kind in KINDS[:2]]
LAYERS += [f"model.layers.{n}.{kind}" for n in range(4) for kind in KINDS]
GEMMS = ("fwd", "dgrad", "wgrad")

CONFIG = """
model: {path: nowhere}
fp8: {recipe: tensorwise}
data: {train: [{path: rows.jsonl}]}
train: {steps: 80, seq_length: 64, micro_batch: 1, global_batch: 1}
run: {dir: runs/it}
"""


def component(layer: str) -> str:
    return "image_encoder" if "visual" in layer else "foundation"


def recipes(cfg: Config) -> dict[str, str]:
    """Return "LAYER.GEMM" -> recipe of the GEMMs in FP8."""
    out = {}
    for layer, gemm in itertools.product(LAYERS, GEMMS):
        recipe, runs = cfg.fp8.recipe, getattr(cfg.fp8, gemm)
        for rule in cfg.fp8.rules:
            if matches(rule.match, layer):
                recipe, runs = rule.recipe or recipe, getattr(rule, gemm) or runs
        if recipe != "off" and runs == "fp8":
            out[f"{layer}.{gemm}"] = recipe
    return out


def plan_of(cfg: Config) -> dict:
    on = recipes(cfg)
    rows = []
    for number, layer in enumerate(LAYERS):
        gemms = {gemm: on.get(f"{layer}.{gemm}") for gemm in GEMMS}
        name = next(filter(None, gemms.values()), None)
        name = "tensorwise" if name == "auto" else name  # as measured
        recipe = (
            None
            if name is None
            else {"name": name, "format": "e4m3"} | {g: "fp8" if r else "bf16" for g, r in gemms.items()}
        )
        rows.append({"name": layer, "component": component(layer), "kind": "linear", "recipe": recipe,
                     "flops": 100.0 - number, "backend": {g: "reference" for g, r in gemms.items() if r}})  # fmt: skip
    lines = []
    for row in rows:
        if row["recipe"]:
            words = {key: word for key, word in row["recipe"].items() if key != "name"}
            lines.append({"match": row["name"], "recipe": row["recipe"]["name"], **words})
    return {"rows": rows, "notes": [], "layers": lines}


Harm = Callable[[Config, dict[str, str], int], float | str]
"""(configuration, GEMMs in FP8, step) -> relative increase of the loss, or the message of an error."""


@pytest.fixture
def no_plots(monkeypatch):
    """Disable plots, which take half a second each."""
    monkeypatch.setattr("octavo.bisect.find_culprits.write", lambda *_: None)


@pytest.fixture
def trainer(monkeypatch):
    """trainer(harm) installs the fake trainer; returns the names of folders that were trained."""

    def install(harm: Harm) -> list[str]:
        trained: list[str] = []

        def run(cfg, *, callbacks, describe_plan):
            folder = Path(cfg.run.dir)
            trained.append(folder.name)
            assert cfg.run.save_every == 0 and not cfg.data.eval and not folder.exists()
            folder.mkdir(parents=True)
            (folder / "config.yaml").write_text(to_yaml(cfg))
            (folder / "plan.json").write_text(json.dumps(plan_of(cfg)))
            begins, on = int((cfg.run.fork or "_0").rpartition("_")[2]), recipes(cfg)
            with (folder / "metrics.jsonl").open("w") as file:
                for step in range(begins + 1, cfg.train.steps + 1):
                    increase = harm(cfg, on, step)
                    if isinstance(increase, str):
                        raise TrainError(increase)
                    seconds = 1.0 + (increase if cfg.train.compile else 0)
                    row = {"step": step, "loss": (3 - step / 100) * (1 + increase), "tokens": 64, "lr": 1e-3,
                           "seconds": seconds, "tokens_per_s": 64 / seconds}  # fmt: skip
                    file.write(json.dumps(row).replace("Infinity", "null") + "\n")
                    try:
                        callbacks[0].end_step(None, SimpleNamespace(number=step, row=row))
                    except StepsDone as done:
                        raise TrainError("a callback failed") from done
            return SimpleNamespace(status="finished")

        monkeypatch.setattr("octavo.rl.run", run)
        monkeypatch.setattr(
            "octavo.train.run_dir.input_fingerprints.fingerprints", lambda cfg, *log: {"data": {}, "model": {}}
        )
        return trained

    return install


@pytest.fixture
def cfg() -> Callable[..., Config]:
    return lambda *overrides: load_config_text(CONFIG, overrides)
