"""Ranks that start with different settings, files or versions end before the first step, each with key and values."""

from __future__ import annotations

import fnmatch
import gc
import json
import multiprocessing
import shutil
import tempfile
import typing
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from pydantic import BaseModel

from octavo import version
from octavo.base import encryption, environment
from octavo.config import Config, override, to_yaml
from octavo.config.sections.text_types import FilePath
from octavo.train.run_dir.rank_facts import LOCAL_KEYS, PATH_KEYS, rank_facts
from tests import ranks

pytestmark = pytest.mark.usefixtures("uncounted", "unseen")
Make = Callable[..., Config]


@pytest.fixture
def own(make: Make, place: Path, tmp_path: Path) -> Make:
    """own("train.lr=1", ..., dir="host"): a run whose model and data are its own copies."""

    def build(*over: str, dir: str = "one") -> Config:
        folder = tmp_path / dir
        if not folder.exists():
            shutil.copytree(place / "text", folder / "model")
            shutil.copytree(place / "talk", folder / "talk")
        paths = (f"model.path={folder / 'model'}", f"data.train=[{{path: {folder / 'talk' / 'train.json'}}}]")
        return make(*paths, "data.eval=[]", "fp8.recipe=off", "run.hf=false", "train.warmup=0", *over, dir=dir)

    return build


def differing(one: Config, other: Config) -> set[str]:
    facts, others = rank_facts(one, {}), rank_facts(other, {})
    return {key for key in {**facts, **others} if facts.get(key) != others.get(key)}


def test_rank_facts_ignore_locations_of_equal_files(own: Make):
    other = own("run.threads=2", "data.workers=0", "run.tensorboard=false", "run.timeout=9", dir="two")
    assert differing(own(), other) == set()


@pytest.mark.parametrize(
    ("over", "keys"),
    [
        (["train.lr=5e-3"], {"train.lr"}),
        (["optimizer.weight_decay=0.5"], {"optimizer.weight_decay"}),
        (["optimizer.states=bf16"], {"optimizer.states"}),
        (["run.seed=7"], {"run.seed"}),
        (["run.save_every=1"], {"run.save_every"}),
        (["train.recompute=full"], {"train.recompute.image_encoder", "train.recompute.foundation",
                                    "train.recompute.audio_encoder"}),
        (["lora={rank: 2}"], None),
    ],
)  # fmt: skip
def test_rank_facts_differ_for_settings_that_change_numbers(own: Make, over: list[str], keys: set[str] | None):
    found = differing(own(), own(*over))
    assert found == keys if keys is not None else "lora.rank" in found


def end_of(file: Path) -> None:
    """Other bytes at the end of a file of the same size."""
    raw = file.read_bytes()
    file.write_bytes(raw[:-8] + bytes(byte ^ 1 for byte in raw[-8:]))


@pytest.mark.parametrize(
    ("change", "key"),
    [
        (lambda folder: end_of(folder / "talk" / "train.json"), "data.train.0.path: train.json"),
        (lambda folder: end_of(folder / "model" / "model.safetensors"), "model.path: model.safetensors"),
        (lambda folder: (folder / "model" / "chat_template.jinja").write_text("{{ messages }}"),
         "model.path: chat_template.jinja"),
        (lambda folder: (folder / "model" / "tokenizer_config.json").unlink(), "model.path: tokenizer_config.json"),
    ],
    ids=["data", "weights", "template", "missing"],
)  # fmt: skip
def test_rank_facts_differ_for_changed_files(own: Make, change: Callable[[Path], object], key: str):
    other = own(dir="two")
    change(Path(other.run.dir).parent / "two")
    assert differing(own(), other) == {key}


def test_rank_facts_differ_for_versions_rewards_and_arithmetic(own: Make, monkeypatch: pytest.MonkeyPatch):
    cfg = own()
    before = rank_facts(cfg, {"reward score": "a" * 64})
    monkeypatch.setattr(version, "__version__", "0.0.1")
    monkeypatch.setattr(environment, "versions", lambda: {"transformers": "5.17", "rich": "1"})
    monkeypatch.setenv("NVIDIA_TF32_OVERRIDE", "0")
    after = rank_facts(cfg, {"reward score": "b" * 64})
    found = {key for key in {**before, **after} if before.get(key) != after.get(key)}
    assert found > {"octavo", "package.transformers", "variable NVIDIA_TF32_OVERRIDE", "file of reward score"}
    assert "package.rich" not in found


def test_rank_facts_differ_for_encryption_keys(own: Make, monkeypatch: pytest.MonkeyPatch):
    facts = []
    for key in ("01" * 31 + "02", "03" * 31 + "04"):
        monkeypatch.setenv(encryption.VALUE, key)
        facts.append(rank_facts(own("run.encrypt=true"), {}))
    assert {name for name in facts[0] if facts[0][name] != facts[1][name]} == {"id of the key"}
    assert key not in str(facts)


def test_every_path_key_is_compared_by_content_or_excluded():
    def places(model: type[BaseModel], key: str = "") -> list[str]:
        names = []
        for name, field in model.model_fields.items():
            text, below = str(field.annotation) + str(field.metadata), f"{key}.{name}" if key else name
            if "_check_path" in text or field.annotation is FilePath:
                names.append(below)
            for inner in sections(field.annotation):
                listed = ".0" if "tuple" in str(field.annotation) else ""
                names += places(inner, below + listed)
        return names

    def sections(annotation: object) -> list[type[BaseModel]]:
        if isinstance(annotation, type) and issubclass(annotation, BaseModel):
            return [annotation]
        return [one for inner in typing.get_args(annotation) for one in sections(inner)]

    found = places(Config)
    assert {"model.path", "run.resume", "data.train.0.images", "rl.rewards.0.reward", "fp8.plan"} <= {*found}
    assert [key for key in found if not any(fnmatch.fnmatchcase(key, glob) for glob in (*LOCAL_KEYS, *PATH_KEYS))] == []


def started(own: Sequence[tuple[int, Config, Sequence[str]]], port: int) -> list[tuple[int | None, str]]:
    """`octavo train` of each rank, with the WORLD_SIZE, configuration and words that it is given: exit code, stderr."""
    context = multiprocessing.get_context("fork")
    gc.collect()
    with tempfile.TemporaryDirectory() as folder:
        processes = []
        for rank, (size, cfg, words) in enumerate(own):
            file = Path(folder) / f"{rank}.yaml"
            file.write_text(to_yaml(cfg))
            words = ["train", str(file), *words]
            processes.append(context.Process(target=ranks._command, args=(rank, size, port, folder, words)))
            processes[-1].start()
        for process in processes:
            process.join(240)
            process.kill()
            process.join()
        return [(p.exitcode, (Path(folder) / f"{rank}.err").read_text()) for rank, p in enumerate(processes)]


@pytest.mark.long
@pytest.mark.skipif(ranks.START != "fork", reason="ranks are forks")
@pytest.mark.parametrize("what", ["rate", "data", "layout", "size"])
def test_ranks_that_differ_end_before_the_first_step(own: Make, what: str):
    one, size = own("train.steps=2", "train.global_batch=8"), 2
    other, words = one, ["the same files, versions and command line"]
    if what == "rate":
        other = override(one, ["train.lr=0.5"])
        words += [f"train.lr is {one.train.lr:g} on rank 0 and 0.5 on rank 1"]
    elif what == "data":
        other = own("train.steps=2", "train.global_batch=8", dir="two")
        file = Path(other.data.train[0].path)
        file.write_text(json.dumps(json.loads(file.read_text())[:-1]))
        words += ["data.train.0.path: train.json is ", " bytes (", "on rank 0 and "]
    elif what == "layout":  # whose groups of ranks would wait for each other
        other = override(one, ["parallel.replicate=2"])
        words += ["parallel.replicate is 1 on rank 0 and 2 on rank 1"]
    else:
        size, words = 3, ["WORLD_SIZE is 2 on rank 0 and 3 on rank 1", "Start all of them"]
    for code, said in started([(2, one, ()), (size, other, ())], ranks.free_port()):
        assert code == 1 and "Traceback" not in said, said
        assert all(word in said for word in words), said
        (sentence,) = [line for line in said.splitlines() if line.startswith("octavo train: ")]
        assert len(sentence.partition(". Start")[0]) < 200
    assert not (Path(one.run.dir) / "config.yaml").exists(), "nothing was begun"


@pytest.mark.skipif(ranks.START != "fork", reason="ranks are forks")
def test_waiting_rank_reports_missing_ranks(own: Make, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("octavo.parallel.world.NOTICE_SECONDS", 0.1)
    cfg = own("run.timeout=2")
    ((code, said),) = started([(2, cfg, ())], ranks.free_port())
    assert code == 1 and "Traceback" not in said
    assert (
        "rank 0 of 2 has waited 0.1 s for one of the 1 other ranks" in said and "did not appear within 1.8 s: 1" in said
    )
