"""Exported folders load in stock transformers and have the model's values."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors import SafetensorError, safe_open
from torch import nn
from transformers import AutoTokenizer

from octavo import models
from octavo.base import atomic_write
from octavo.base.model_families import tiny_families
from octavo.checkpoint import hf_folder, save_hf
from octavo.models.structure.skeleton import auto_class
from octavo.parallel import World
from tests.models.conftest import auto_config, batch


def stock(path, dtype=torch.float32):
    config = auto_config(path)
    return auto_class(config).from_pretrained(path, config=config, dtype=dtype)


class Swapped(nn.Linear):
    """A model after an in-place class swap: the same parameters under a different class."""


def disturb(model) -> None:
    with torch.no_grad():
        for index, p in enumerate(model.parameters()):
            p.add_(0.01 * torch.randn(p.shape, generator=torch.Generator().manual_seed(index)))


@pytest.mark.parametrize("family", tiny_families())
def test_round_trip_through_stock_transformers(checkpoint, tmp_path, family):
    source = checkpoint(family)
    model = models.load(source)
    disturb(model)
    for module in model.modules():
        if type(module) is nn.Linear:
            module.__class__ = Swapped
    out = save_hf(model, source, tmp_path / "hf", World())
    assert sorted(p.name for p in tmp_path.iterdir()) == ["hf"]
    inputs = batch(models.load_processor(out), image=models.describe(model).has_vision)
    with torch.no_grad():
        expected, actual = model(**inputs).logits, stock(out)(**inputs).logits
    assert torch.equal(expected, actual)
    with safe_open(source / "model.safetensors", "pt") as a, safe_open(out / "model.safetensors", "pt") as b:
        assert set(a.keys()) == set(b.keys())  # names and layouts on disk are the source's
        assert all(a.get_slice(k).get_shape() == b.get_slice(k).get_shape() for k in a.keys())  # noqa: SIM118
    again = models.load(out).state_dict()
    assert all(torch.equal(value, again[name]) for name, value in model.state_dict().items())
    text = "first? 3"
    assert (
        AutoTokenizer.from_pretrained(out)(text)["input_ids"]
        == AutoTokenizer.from_pretrained(source)(text)["input_ids"]
    )
    assert {p.name for p in source.iterdir()} == {p.name for p in out.iterdir()}


@pytest.mark.parametrize("family", ["qwen3_vl", "internvl", "qwen3_moe"])
def test_bf16_parameters_are_saved_unchanged(checkpoint, tmp_path, family):
    source = checkpoint(family)  # fp32
    model, lows = models.load_split(source)
    assert lows
    disturb(model)
    out = save_hf(model, source, tmp_path / "hf", World())
    with safe_open(out / "model.safetensors", "pt") as tensors:
        assert {tensors.get_slice(key).get_dtype() for key in tensors.keys()} == {"BF16"}  # noqa: SIM118
    config = json.loads((out / "config.json").read_text())
    assert {v for k, v in walk(config) if k in ("dtype", "torch_dtype")} == {"bfloat16"}
    inputs = batch(models.load_processor(out), image=models.describe(model).has_vision)
    inputs = {k: v.to(torch.bfloat16) if v.is_floating_point() else v for k, v in inputs.items()}
    actual = stock(out, "auto")
    assert {p.dtype for p in actual.parameters()} == {torch.bfloat16}
    with torch.no_grad():
        assert torch.equal(model(**inputs).logits, actual(**inputs).logits)
    again, none = models.load_split(out)
    assert none == {} and all(torch.equal(p, q) for p, q in zip(again.parameters(), model.parameters(), strict=True))


def walk(node):
    for key, value in node.items():
        yield from walk(value) if isinstance(value, dict) else [(key, value)]


def test_folder_dtype_is_that_of_most_weights(checkpoint, tmp_path):
    source = checkpoint("qwen3")
    model = models.load(source)
    for name, parameter in model.named_parameters():
        if "layernorm" not in name:
            parameter.data = parameter.data.bfloat16()
    out = save_hf(model, source, tmp_path / "hf", World())
    assert json.loads((out / "config.json").read_text())["dtype"] == "bfloat16"


def test_earlier_export_is_replaced_but_other_folders_are_not(checkpoint, tmp_path):
    source = checkpoint("qwen3")
    model = models.load(source)
    save_hf(model, source, tmp_path / "hf", World())
    disturb(model)
    out = save_hf(model, source, tmp_path / "hf", World())
    assert torch.equal(models.load(out).lm_head.weight, model.lm_head.weight)
    other = tmp_path / "photos"
    other.mkdir()
    (other / "cat.png").write_bytes(b"")
    with pytest.raises(models.ModelError, match="exists and is not a model folder"):
        save_hf(model, source, other, World())


def test_failed_save_leaves_no_partial_files(checkpoint, tmp_path, monkeypatch):
    source = checkpoint("qwen3")
    model = models.load(source)

    def fail(directory):
        raise OSError("disk full")

    monkeypatch.setattr(atomic_write, "sync_tree", fail)
    with pytest.raises(OSError, match="disk full"):
        save_hf(model, source, tmp_path / "hf", World())
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "error",
    [
        OSError(28, "No space left on device"),
        SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)"),
    ],
)
def test_a_full_disk_is_reported_and_the_earlier_export_stays(checkpoint, tmp_path, monkeypatch, error):
    source = checkpoint("qwen3")
    model = models.load(source)
    save_hf(model, source, tmp_path / "hf", World())

    def fail(directory):
        raise error

    monkeypatch.setattr(atomic_write, "sync_tree", fail)
    with pytest.raises(models.ModelError, match=r"hf could not be written: .*No space left.*free some space"):
        save_hf(model, source, tmp_path / "hf", World())
    assert [entry.name for entry in tmp_path.iterdir()] == ["hf"] and (tmp_path / "hf" / "config.json").exists()


def test_other_safetensors_errors_are_not_reported_as_full_disk(checkpoint, tmp_path, monkeypatch):
    def fail(directory):
        raise SafetensorError("a defect")

    monkeypatch.setattr(atomic_write, "sync_tree", fail)
    with pytest.raises(SafetensorError, match="a defect"):
        save_hf(models.load(checkpoint("qwen3")), checkpoint("qwen3"), tmp_path / "hf", World())


def test_leftovers_of_killed_export_are_removed(checkpoint, tmp_path, monkeypatch):
    source = checkpoint("qwen3")
    model = models.load(source)
    save_hf(model, source, tmp_path / "hf", World())
    # killed between its two renames: the earlier export lies aside, beside the new one
    (tmp_path / ".hf.part").mkdir()
    (tmp_path / ".hf.part" / "new").mkdir()
    (tmp_path / "hf").rename(tmp_path / ".hf.part" / "old")
    monkeypatch.setattr(hf_folder, "_write_parts", lambda *args: 1 / 0)
    with pytest.raises(ZeroDivisionError):  # the next one fails too, and costs nothing
        save_hf(model, source, tmp_path / "hf", World())
    assert [entry.name for entry in tmp_path.iterdir()] == ["hf"] and (tmp_path / "hf" / "config.json").exists()
    monkeypatch.undo()
    (tmp_path / ".hf.part" / "new").mkdir(parents=True)
    save_hf(model, source, tmp_path / "hf", World())
    assert [entry.name for entry in tmp_path.iterdir()] == ["hf"]


def test_concurrent_writers_do_not_mix_files(tmp_path):
    with atomic_write.new_folder(tmp_path / "hf", models.ModelError) as folder:
        (folder / "first").touch()
        with (
            pytest.raises(models.ModelError, match="hf is being written by another process"),
            atomic_write.new_folder(tmp_path / "hf", models.ModelError),
        ):
            pass
    assert [entry.name for entry in (tmp_path / "hf").iterdir()] == ["first"]
    with atomic_write.new_folder(tmp_path / "hf", models.ModelError) as folder:
        (folder / "second").touch()
    assert [entry.name for entry in tmp_path.rglob("*")] == ["hf", "second"]


def test_link_is_preserved(tmp_path):
    (tmp_path / "disk" / "hf").mkdir(parents=True)
    (tmp_path / "link").symlink_to(tmp_path / "disk" / "hf")
    with atomic_write.new_folder(tmp_path / "link", models.ModelError) as folder:
        (folder / "first").touch()
    assert (tmp_path / "link").is_symlink() and (tmp_path / "disk" / "hf" / "first").exists()


def test_weights_of_another_model(checkpoint, tmp_path):
    source = checkpoint("qwen3")
    model = models.load(source)
    norm = model.model.norm.weight
    model.model.norm.weight = nn.Parameter(torch.ones(3))
    with pytest.raises(models.ModelError, match=r"model.norm.weight has shape \(3,\), the source's model \(64,\)"):
        save_hf(model, source, tmp_path / "hf", World())
    model.extra, model.model.norm.weight = norm, None
    with pytest.raises(models.ModelError, match="1 missing .*'model.norm.weight'.*1 unknown .*'extra'"):
        save_hf(model, source, tmp_path / "hf", World())
    with pytest.raises(models.ModelError, match="on the meta device and has no values"):
        save_hf(models.empty(source), source, tmp_path / "hf", World())
