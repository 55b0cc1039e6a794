"""The whole model and every damaged folder in vLLM: `make test-server`, 10 CPU minutes or more."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from octavo import train
from octavo.config import load_config_text
from octavo.train.artifacts.export import export_model
from octavo.train.artifacts.merge import merge_model
from tests.server import checks, folders, outcomes, reference
from tests.server.client import Server
from tests.server.conftest import FourLayers

pytestmark = [pytest.mark.server, pytest.mark.full, pytest.mark.long]

#: the linear weights of SmolLM2, and of the padded model
CODES = {576: 106_168_320, 768: 30 * 768 * (2 * 768 + 2 * 256 + 3 * 1536)}
ANSWERS = ("Paris.", "The answer is 4.", "William Shakespeare.", "def add(a, b): return a + b", "Red, green, blue.")


class Models:
    """Folders of the whole model, by the names of the table in docs/checkpoints.md."""

    kernels = {"fp8-tensor": "tensor", "fp8-block": "block"}

    def __init__(self, source: Path, folder: Path) -> None:
        self.source, self.folder = source, folder

    def build(self, name: str) -> Path:
        folder = self.folder / name
        if folder.is_dir():
            return folder
        if name == "BF16":
            return self.source
        if name in ("fp8-dynamic", "fp8-tensor"):
            export_model(self.source, folder, name)
        elif name == "fp8-block":
            export_model(folders.pad(self.source, self.folder / "padded"), folder, name)
        elif name == "merged LoRA":
            merge_model(self._train("lora", "lora: {rank: 8, alpha: 16}"), folder, "bf16")
        elif name == "run in FP8":
            export_model(self._train("sft", "fp8: {recipe: rowwise}"), folder, "fp8-dynamic")
        return folder

    def _train(self, name: str, lines: str) -> Path:
        """The directory of a run of three steps on a few questions and answers."""
        rows = [
            {"messages": [{"role": "user", "content": q}, {"role": "assistant", "content": a}]}
            for q, a in zip(reference.QUESTIONS, ANSWERS, strict=False)
        ]
        data, directory = self.folder / f"{name}.json", self.folder / f"{name}-run"
        data.write_text(json.dumps(rows))
        text = f"""
model: {{path: {self.source}}}
data: {{train: [{{path: {data}}}]}}
train: {{steps: 3, seq_length: 64, micro_batch: 2, global_batch: 2, lr: 1e-4, warmup: 0}}
run: {{dir: {directory}, health_every: 0, tensorboard: false, hf: false, threads: 1}}
{lines}
"""
        train.run(load_config_text(text))
        return directory


@pytest.fixture(scope="module")
def models(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Models:
    return Models(model, tmp_path_factory.mktemp("models"))


@pytest.mark.parametrize("name", ["bf16", "dyn", "tensor", "block"])
def test_weight_update(four_layers: FourLayers, seen: dict[str, dict[str, Any]], name: str) -> None:
    problems = four_layers.update(name)
    seen["updates"][name] = {"kernel_of_the_test": bool(folders.BASES[name].kernel), "problems": problems}
    assert not problems


@pytest.mark.parametrize("base", folders.BASES)
def test_verify_knows_good_folders(four_layers: FourLayers, seen: dict[str, dict[str, Any]], base: str) -> None:
    four_layers.scores(base)  # raises if vLLM refuses
    predicted = outcomes.predict(four_layers.base(base))
    kernel = bool(folders.BASES[base].kernel)
    seen["folders"][base] = {"kernel_of_the_test": kernel, "vllm": outcomes.OK, "detail": "", "verify": predicted}
    assert predicted == outcomes.OK


@pytest.mark.parametrize("damage", folders.DAMAGES, ids=lambda damage: damage.name)
def test_verify_knows_damaged_folders(
    four_layers: FourLayers, seen: dict[str, dict[str, Any]], damage: folders.Damage
) -> None:
    observed, predicted = four_layers.observe(damage)
    kernel = bool(damage.kernel)
    row = {"kernel_of_the_test": kernel, "vllm": observed.verdict, "detail": observed.detail, "verify": predicted}
    seen["folders"][damage.name] = row
    assert predicted == observed.verdict, observed


def test_server_is_as_good_as_new_after_all_refusals(four_layers: FourLayers) -> None:
    """A refusal that left something in the process would change later outcomes."""
    first = four_layers.scores("bf16")
    four_layers.server.load(four_layers.base("bf16"))
    assert four_layers.server.score(four_layers.rows) == first


@pytest.mark.parametrize("name", ["BF16", "fp8-dynamic", "fp8-tensor", "fp8-block", "merged LoRA", "run in FP8"])
def test_whole_model(server: Server, models: Models, seen: dict[str, dict[str, Any]], name: str) -> None:
    rows, prompts = reference.held_rows(models.source, 8, 256), reference.question_rows(models.source)
    kernel = Models.kernels.get(name, "")
    compared = checks.compare(server, models.build(name), kernel, rows, prompts)
    seen["models"][name] = {"kernel_of_the_test": bool(kernel), **asdict(compared)}
    assert not compared.problems
    if "FP8" in name or "fp8" in name:
        assert compared.counts["codes"] == CODES[768 if name == "fp8-block" else 576]
    else:
        assert compared.counts["codes"] == 0
