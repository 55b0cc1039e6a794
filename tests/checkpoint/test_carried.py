"""Tensors that the model class does not load are in every folder that is written from theirs, byte for byte."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file

from octavo import checkpoint, models
from octavo.base import encryption
from octavo.checkpoint import CheckpointError, convert, verify
from octavo.checkpoint.export.carried import Carried, plan_carried
from octavo.models import ModelError
from octavo.models.folder.quantization import read_quantization
from octavo.models.tiny import tiny
from octavo.models.weights.unloaded import describe_names, find_unloaded, is_unloaded
from octavo.parallel import World, shard
from octavo.sealing import Key, SealError, seal_model
from octavo.train.artifacts import export_model
from tests import ranks
from tests.checkpoint import folders, surplus

SENTENCE = (
    "6 tensors that the model does not load (model.layers.2.mlp.up_proj.weight, mtp.*, score.weight) were copied "
    "unchanged"
)


@pytest.fixture(scope="module")
def source(good: folders.Good, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Qwen3 of two layers in BF16 with six more tensors, in two shards; read only."""
    return surplus.copy(good("plain", "qwen3"), tmp_path_factory.mktemp("surplus") / "source")


@pytest.mark.parametrize("format", ["bf16", "fp8-block", "fp8-dynamic", "fp8-tensor"])
def test_exports_copy_them(source: Path, tmp_path: Path, format: str) -> None:
    messages: list[str] = []
    done = export_model(source, tmp_path / "out", format, largest=300_000, log=messages.append)
    assert surplus.same(tmp_path / "out", surplus.tensors()) and SENTENCE in messages
    assert done.to_json()["not_loaded"]["copied"] == sorted(surplus.tensors()) and len(done.files) > 1
    assert json.loads((tmp_path / "out/config.json").read_text())[surplus.KEY] == 1
    models.load(tmp_path / "out")
    verified = verify(tmp_path / "out", against=source)
    # vLLM refuses names that the class does not have, as it does in the source.
    assert {finding.tensor for finding in verified.failures} == set(surplus.tensors())
    assert {finding.kind for finding in verified.failures} == {"extra"}
    assert not [finding for finding in verified.warnings if finding.kind == "skip-nothing"]
    if format == "bf16":
        return
    quantization = read_quantization(tmp_path / "out")
    assert quantization is not None
    listed = {"mtp.fc", "mtp.layers.0.mlp.experts", "model.layers.2.mlp.up_proj", "score"}
    assert listed <= set(quantization.skipped)
    assert not any("norm" in name or "steps" in name for name in quantization.skipped if "mtp" in name)


@pytest.mark.parametrize("encrypt", [False, True])
def test_trained_folder_has_them(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, encrypt: bool) -> None:
    monkeypatch.setenv(encryption.VALUE, "0123456789abcdef" * 4)
    messages: list[str] = []
    model, world = models.load(source, torch.bfloat16), World()
    target = checkpoint.save_hf(model, source, tmp_path / "hf", world, 300_000, encrypt=encrypt, log=messages.append)
    assert messages == [SENTENCE]
    if encrypt:
        assert all(map(encryption.is_encrypted, target.iterdir()))
        checkpoint.save_hf(models.load(target), target, tmp_path / "open", World())  # an encrypted source
        target = tmp_path / "open"
    assert surplus.same(target, surplus.tensors())
    assert json.loads((target / "config.json").read_text())["dtype"] == ("float32" if encrypt else "bfloat16")


def _save_on_ranks(world: World, source: str, target: str) -> list[str]:
    """Write the folder from all ranks, then once more with a source that only rank 0 can read."""
    model = models.load(source, torch.bfloat16)
    shard(model, models.describe(model), world)
    messages: list[str] = []
    checkpoint.save_hf(model, source, target, world, 300_000, log=messages.append)
    other = Path(source) if world.is_main else Path(target).parent / "without"
    if not world.is_main:
        shutil.copytree(source, other, ignore=shutil.ignore_patterns("*.safetensors"))
    checkpoint.save_hf(model, other, f"{target}_lost", world, loaded=True, log=messages.append)
    return messages


def test_ranks_share_the_copies(source: Path, tmp_path: Path) -> None:
    first, second = ranks.run(_save_on_ranks, 2, str(source), str(tmp_path / "two"))
    assert first[0] == SENTENCE and second == []
    assert surplus.same(tmp_path / "two", surplus.tensors())
    alone = checkpoint.save_hf(models.load(source, torch.bfloat16), source, tmp_path / "one", World(), 300_000)
    assert {f.name: f.read_bytes() for f in alone.iterdir()} == {
        f.name: f.read_bytes() for f in (tmp_path / "two").iterdir()
    }
    assert "can no longer be read" in first[1] and "num_nextn_predict_layers of config.json" in first[2]
    assert not set(surplus.tensors()) & surplus.weights(tmp_path / "two_lost").keys()


def test_missing_source_is_reported(source: Path, tmp_path: Path) -> None:
    model = models.load(source, torch.bfloat16)
    other = Path(shutil.copytree(source, tmp_path / "other"))
    for file in other.glob("model*"):
        file.unlink()
    messages: list[str] = []
    checkpoint.save_hf(model, other, tmp_path / "random", World(), log=messages.append)
    assert messages == []  # a folder without weights, from which nothing was loaded
    checkpoint.save_hf(model, other, tmp_path / "hf", World(), loaded=True, log=messages.append)
    assert messages[0].startswith(
        f"the weights of {other} can no longer be read ({other} contains no model.safetensors"
    )
    assert messages[0].endswith("such as layers for multi-token prediction, could not be copied")
    assert messages[1:] == [f"{surplus.KEY} of config.json announced them and was removed"]
    assert surplus.KEY not in json.loads((tmp_path / "hf/config.json").read_text())
    models.load(tmp_path / "hf")
    shutil.rmtree(other)
    with pytest.raises(ModelError, match=f"{tmp_path / 'gone'} cannot be written: {other}, .*is no longer there"):
        checkpoint.save_hf(model, other, tmp_path / "gone", World(), loaded=True)
    assert not (tmp_path / "gone").exists()


def test_message_about_several_keys_has_a_plural_verb() -> None:
    sentences = Carried(Path("m"), config={"num_mtp_layers": None, "num_mtp_modules": 0}).sentences()
    assert sentences == ["num_mtp_layers, num_mtp_modules of config.json announced them and were removed"]


def test_codes_are_copied_only_into_their_own_form(good: folders.Good, tmp_path: Path) -> None:
    form = {**surplus.tensors(),
        "mtp.fc.weight": torch.ones(256, 512).to(torch.float8_e4m3fn),
        "mtp.fc.weight_scale_inv": torch.full((2, 4), 0.5)
    }  # fmt: skip
    source = surplus.copy(good("fp8-block", "qwen3"), tmp_path / "source", form)
    export_model(source, tmp_path / "same", "fp8-block")
    assert surplus.same(tmp_path / "same", form)
    quantization = read_quantization(tmp_path / "same")
    assert quantization is not None and "mtp.fc" not in quantization.skipped and "score" in quantization.skipped
    for format, other in (("fp8-dynamic", "compressed-tensors row"), ("bf16", "high precision")):
        messages: list[str] = []
        export_model(source, tmp_path / format, format, log=messages.append)
        kept = {name: tensor for name, tensor in form.items() if not name.startswith("mtp.")}
        assert surplus.same(tmp_path / format, kept)
        assert not any(name.startswith("mtp.") for name in surplus.weights(tmp_path / format))
        assert any(
            "5 tensors that the model does not load (mtp.*) are left out: they are codes of fp8 block 128x128, which a "
            f"folder in {other} does not describe" in message
            for message in messages
        )
        assert f"{surplus.KEY} of config.json announced them and was removed" in messages
        assert surplus.KEY not in json.loads((tmp_path / format / "config.json").read_text())


def test_names_of_the_family_and_of_no_family(source: Path) -> None:
    model = models.empty(source)
    assert [entry.name for entry in find_unloaded(source, model)] == sorted(surplus.tensors())
    other = ("model.layers.3.mlp.up_proj.weight", "model.layers.1.mlp.extra.weight", "model.extra.weight", "lm_head.x")
    assert not any(is_unloaded(model, name) for name in other)  # config.json counts one layer for prediction
    setattr(model.config, surplus.KEY, 0)
    assert not is_unloaded(model, "mtp.fc.weight") and not is_unloaded(model, "model.layers.2.mlp.up_proj.weight")
    assert describe_names(["visual.a.b", "model.visual.x", "model.visual.y", "model.layers.61.a"]) == (
        "model.layers.61.a, model.visual.*, visual.a.b"
    )


def test_unknown_tensors_are_still_refused(source: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(source, tmp_path / "folder"))
    folders.edit_json(folder / "config.json", lambda raw: raw.pop(surplus.KEY))
    with pytest.raises(ModelError, match="5 in the folder but unknown to the model: model.layers.2.mlp.up_proj.weight"):
        models.load(folder)
    with pytest.raises(ModelError, match="unknown to the model"):
        export_model(folder, tmp_path / "out", "fp8-block")


def test_published_number_of_a_layer_follows_config(tmp_path: Path) -> None:
    """DeepSeek's class leaves out layer 61, whatever the size of the model; a layer of that number that is loaded has
    scales that belong to it."""
    model = models.empty(models.tiny_config("qwen3_5"))
    model._keys_to_ignore_on_load_unexpected = [r"model\.layers\.61.*"]
    text = model.config.get_text_config()
    text.num_nextn_predict_layers = 1
    assert is_unloaded(model, f"model.layers.{text.num_hidden_layers}.eh_proj.weight")
    stored = tmp_path / "model.safetensors"
    names = {"model.language_model.layers.0.mlp.up_proj.weight": None, "mtp.fc.weight": None}
    save_file({name: torch.ones(2, 2) for name in names}, stored)
    assert [entry.name for entry in plan_carried_of(tmp_path, model)] == ["mtp.fc.weight"]


def plan_carried_of(folder: Path, model: object) -> tuple[object, ...]:
    (folder / "config.json").write_text("{}")
    return plan_carried(folder, model).stored  # type: ignore[arg-type, return-value]


def test_conversion_carries_them_both_ways(source: Path, tmp_path: Path) -> None:
    convert.hf_to_dcp(source, tmp_path / "dcp")
    convert.dcp_to_hf(tmp_path / "dcp", tmp_path / "back")
    assert all((tmp_path / "back" / file.name).read_bytes() == file.read_bytes() for file in source.iterdir())
    placed = {name: tensor for name, tensor in surplus.weights(source).items() if name not in surplus.tensors()}
    trained = {f"model.{name}": tensor for name, tensor in placed.items()}
    dcp.save({"model": trained}, checkpoint_id=tmp_path / "other", no_dist=True)
    messages: list[str] = []
    convert.dcp_to_hf(tmp_path / "other", tmp_path / "foreign", like=source, log=messages.append)
    assert surplus.same(tmp_path / "foreign", surplus.weights(source))
    assert f"{SENTENCE} from {source}" in messages
    del trained["model.model.norm.weight"]
    dcp.save({"model": trained}, checkpoint_id=tmp_path / "less", no_dist=True)
    with pytest.raises(CheckpointError, match="no values for 1 of .* tensors, first model.model.norm.weight"):
        convert.dcp_to_hf(tmp_path / "less", tmp_path / "failed", like=source)


def test_sealing_refuses_them_by_name(source: Path, tmp_path: Path) -> None:
    what, fix = "has 6 tensors that the model does not load .*first model.layers.2", f"remove them, and {surplus.KEY}"
    with pytest.raises(SealError, match=f"{what}.*sealing cannot permute.*{fix} from its config.json"):
        seal_model(source, tmp_path / "sealed", Key(os.urandom(32)))
    assert not (tmp_path / "sealed").exists()


def test_reference_names_every_tensor(source: Path, good: folders.Good, tmp_path: Path) -> None:
    verified = verify(good("plain", "qwen3"), against=source)
    texts = " ".join(finding.text for finding in verified.findings)
    assert all(name in texts for name in surplus.tensors())
    qwen = tiny.write("qwen3_5", tmp_path / "qwen3_5", size="mini")
    many = {f"mtp.layers.0.mlp.experts.{e}.up_proj.weight": torch.ones(4, 4) for e in range(9)}
    codes = {"mtp.codes": torch.arange(8, dtype=torch.int32), "mtp.norm.weight": torch.ones(4)}
    more = surplus.copy(qwen, tmp_path / "more", {**many, **codes})
    [finding] = verify(qwen, against=more).warnings
    assert "11 tensors of the reference" in finding.text
    assert "(9 mtp.layers.*.mlp.experts.*.up_proj.weight, mtp.norm.weight, mtp.codes)" in finding.text
    wrong = surplus.copy(qwen, tmp_path / "wrong", {**many, **codes, "mtp.codes": torch.arange(1, 9).int()})
    [failure] = verify(wrong, against=more).failures
    assert (failure.kind, failure.tensor) == ("against-values", "mtp.codes")
    same = verify(more, against=more)
    assert same.ok and "mtp.codes" in {one.tensor for one in same.compared}
