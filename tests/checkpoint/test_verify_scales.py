"""Scales of an FP8 KV cache under all their names, AutoFP8's layout, and a note of an export that was changed."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from octavo import models
from octavo.checkpoint import verify
from octavo.checkpoint.checksums import MARKER
from octavo.models import ModelError
from octavo.models.folder.quantization import is_cache_scale
from octavo.train.artifacts import export_model
from tests.checkpoint import folders
from tests.checkpoint.folders import Good

#: forms of the names, by what follows the attention's own
NAMES = {
    "llm-compressor": ("k_scale", "v_scale"),
    "with queries": ("k_scale", "v_scale", "q_scale", "prob_scale"),
    "older": ("k_proj.output_scale", "v_proj.output_scale"),
    "one for both": ("kv_scale",),
    "ModelOpt": ("k_proj.k_scale", "v_proj.v_scale"),
}
SCHEME = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False, "symmetric": True}


@pytest.fixture
def copy(good: Good, tmp_path: Path) -> Good:
    return lambda form, model="qwen3": Path(shutil.copytree(good(form, model), tmp_path / "copy"))


def add_scales(folder: Path, names: tuple[str, ...], value: float = 0.5, dtype: torch.dtype = torch.float32) -> None:
    for layer in range(2):
        for name in names:
            scale = torch.tensor(value, dtype=dtype)
            folders.put(folder, f"model.layers.{layer}.self_attn.{name}", scale, beside=folders.Q)


def scheme(folder: Path, value: Any = SCHEME) -> None:
    folders.edit_json(folder / "config.json", lambda raw: raw["quantization_config"].update(kv_cache_scheme=value))


def kinds(folder: Path) -> dict[str, str]:
    return {finding.kind: finding.status for finding in verify(folder).findings}


@pytest.mark.parametrize("names", NAMES.values(), ids=NAMES)
@pytest.mark.parametrize("form", ["ct-row", "fp8-block"])
def test_kv_cache_scales_are_recognized_by_name(copy: Good, form: str, names: tuple[str, ...]) -> None:
    folder = copy(form)
    add_scales(folder, names)
    scheme(folder)
    verified = verify(folder)
    # vLLM has parameters for fewer names than other programs write.
    refused = "prob_scale" in names or (form == "ct-row" and "output_scale" in names[0])
    assert [f.kind for f in verified.findings] == ["server"] * refused
    assert [v.verdict for v in verified.verdicts] == ["ok", "refuses" if refused else "ok", "ok"]
    assert (
        f"{2 * len(names)} scales of an FP8 KV cache" in verified.form and names[0].rpartition(".")[2] in verified.form
    )
    said: list[str] = []
    models.load(folder, log=said.append)
    assert f"{2 * len(names)} fixed scales of activations or of the KV cache are not used" in " ".join(said)


@pytest.mark.parametrize("form", ["ct-row", "plain"])
def test_kv_cache_scales_without_scheme_give_a_warning(copy: Good, form: str) -> None:
    folder = copy(form)
    add_scales(folder, NAMES["llm-compressor"])
    # Without a quantization_config vLLM has no parameters for them.
    assert kinds(folder) == {"cache-scales": "warn", **({"server": "fail"} if form == "plain" else {})}
    models.load(folder)


def test_kv_cache_scheme_without_scales_gives_a_warning(copy: Good) -> None:
    folder = copy("ct-row")
    scheme(folder)
    verified = verify(folder)
    assert [f.kind for f in verified.findings] == ["cache-scales"] and verified.ok
    assert {v.loader for v in verified.verdicts if v.warns} == {"vLLM", "SGLang"}
    scheme(folder, {**SCHEME, "dynamic": True})
    assert kinds(folder) == {}  # computed from keys and values


def test_half_of_the_kv_cache_scales_is_reported(copy: Good) -> None:
    folder = copy("ct-row")
    add_scales(folder, ("k_scale",))
    scheme(folder)
    [finding] = verify(folder).findings
    assert finding.kind == "cache-scales" and "exists without 'model.layers.0.self_attn.v_scale'" in finding.text


@pytest.mark.parametrize(
    ("value", "dtype", "kind"),
    [
        (0.0, torch.float32, "scale-zero"),
        (-1.0, torch.float32, "scale-negative"),
        (float("nan"), torch.bfloat16, "scale-nan"),
        (float("inf"), torch.float32, "scale-nan"),
        (1.0, torch.int32, "scale-dtype"),
    ],
)
def test_kv_cache_scale_values_are_checked(copy: Good, value: float, dtype: torch.dtype, kind: str) -> None:
    folder = copy("ct-row")
    add_scales(folder, NAMES["llm-compressor"], value, dtype)
    scheme(folder)
    assert kinds(folder) == {kind: "fail"}
    if kind != "scale-dtype":
        assert verify(folder, quick=True).ok


def test_other_names_are_not_kv_cache_scales(copy: Good) -> None:
    for name in ("x.k_proj.weight_scale", "x.q_proj.input_scale", "x.mlp.down_proj.output_scale", "x.k_scale.weight",
                 "x.mask_scale", "x.o_proj.output_scale"):  # fmt: skip
        assert not is_cache_scale(name), name
    folder = copy("ct-row")
    folders.put(folder, "model.layers.0.mlp.down_proj.output_scale", torch.tensor(1.0), beside=folders.Q)
    assert not verify(folder).ok
    with pytest.raises(ModelError, match="output_scale"):
        models.load(folder)


@pytest.mark.parametrize(
    ("layer", "said"), [("layers.0", "layers.1 has none"), ("layers.9", "layers.9, but the folder has no such layer")]
)
def test_kv_cache_scales_of_some_layers_are_reported(copy: Good, layer: str, said: str) -> None:
    folder = copy("ct-row")
    for name in ("k_scale", "v_scale"):
        folders.put(folder, f"model.{layer}.self_attn.{name}", torch.tensor(0.1), beside=folders.Q)
    scheme(folder)
    (found,) = verify(folder).findings
    assert found.kind == "cache-scales" and said in found.text and verify(folder).ok


def test_empty_kv_cache_scale_is_reported(copy: Good) -> None:
    folder = copy("ct-row")
    add_scales(folder, ("k_scale", "v_scale"))
    scheme(folder)
    folders.put(folder, "model.layers.0.self_attn.k_scale", torch.zeros(0), beside=folders.Q)
    assert {(f.kind, f.tensor) for f in verify(folder).failures} == {("scale-nan", "model.layers.0.self_attn.k_scale")}


# AutoFP8 --------------------------------------------------------------------------------------------------------------


def autofp8(folder: Path, activations: str = "static", **block: Any) -> None:
    """A folder in compressed-tensors' form of one scale a tensor becomes what AutoFP8 writes."""

    def change(raw: dict[str, Any]) -> None:
        skipped = raw["quantization_config"]["ignore"]
        raw["quantization_config"] = {
            "quant_method": "fp8", "activation_scheme": activations, "ignored_layers": skipped, **block
        }  # fmt: skip

    folders.edit_json(folder / "config.json", change)
    for name in folders.values_of("qwen3"):
        if folders.is_linear(name):
            scale = folders.get(folder, f"{name}_scale").reshape(())
            folders.put(folder, f"{name}_scale", scale)
            if activations == "static":
                at = f"{name.removesuffix('weight')}input_scale"
                folders.put(folder, at, torch.tensor(0.02), beside=name)


@pytest.mark.parametrize("activations", ["static", "dynamic"])
def test_autofp8_layout_is_recognized(copy: Good, good: Good, activations: str) -> None:
    folder = copy("ct-tensor")
    autofp8(folder, activations)
    verified = verify(folder, against=good("plain"))
    assert [f.kind for f in verified.findings] == ["autofp8"] and verified.ok
    assert verified.form == "FP8, fp8 tensor" and all(c.status == "ok" for c in verified.compared)
    assert {v.loader: v.verdict for v in verified.verdicts} == {
        "transformers": "loads, wrong answers", "vLLM": "ok", "SGLang": "ok"
    }  # fmt: skip
    with pytest.raises(ModelError, match="quant_method 'fp8' without weight_block_size"):
        models.load(folder)


def test_autofp8_with_kv_cache_scales_and_damage(copy: Good) -> None:
    folder = copy("ct-tensor")
    autofp8(folder, kv_cache_scheme="static")
    add_scales(folder, ("kv_scale",))
    assert kinds(folder) == {"autofp8": "warn"} and "(kv_scale)" in verify(folder, quick=True).form
    folders.put(folder, f"{folders.Q.removesuffix('weight')}input_scale", None)
    folders.put(folder, f"{folders.DOWN}_scale", None)
    found = {(f.kind, f.tensor) for f in verify(folder).failures}
    assert found == {("scale-missing", folders.Q), ("scale-missing", folders.DOWN)}


@pytest.mark.parametrize(("value", "kind"), [(-1.0, "negative"), (0.0, "zero"), (float("nan"), "nan")])
def test_static_activation_scales_are_checked(copy: Good, value: float, kind: str) -> None:
    folder = copy("ct-tensor")
    autofp8(folder)
    name = f"{folders.Q.removesuffix('weight')}input_scale"
    folders.put(folder, name, torch.tensor(value))
    assert {(f.kind, f.tensor) for f in verify(folder).failures} == {(f"scale-{kind}", name)}


# The note of an export ------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def exported(good: Good, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("exported") / "served"
    export_model(good("plain"), folder, "fp8-dynamic")
    return folder


def _drop(table: str) -> Callable[[dict[str, Any]], Any]:
    return lambda note: note[table].pop(next(n for n in note[table] if n.endswith(".safetensors")))


@pytest.mark.parametrize(
    "change",
    [
        _drop("sha256"),
        lambda note: note["sha256"].update({"config.json": "0" * 64}),
        lambda note: note.update(format="bf16"),
        lambda note: note["files"].append("more.safetensors"),
        lambda note: note.update(more=1),
    ],
    ids=["a sum less", "another sum", "another format", "a file more", "a key more"],
)
def test_changed_export_note_is_reported(
    exported: Path, tmp_path: Path, change: Callable[[dict[str, Any]], Any]
) -> None:
    folder = Path(shutil.copytree(exported, tmp_path / "copy"))
    folders.edit_json(folder / MARKER, lambda note: note)  # other spaces are no other note
    assert verify(folder, quick=True).ok
    folders.edit_json(folder / MARKER, change)
    failed = {f.kind: f.text for f in verify(folder, quick=True).failures}
    assert "was changed after the export wrote it" in failed["export-note"]


def test_export_note_of_0_4_0_has_no_digest(exported: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(exported, tmp_path / "copy"))
    folders.edit_json(folder / MARKER, lambda note: note.pop("sha256_of_note"))
    assert verify(folder, quick=True).ok
    folders.edit_json(folder / MARKER, _drop("sha256"))
    assert {f.kind for f in verify(folder, quick=True).failures} == {"export-note"}
    note = json.loads((folder / MARKER).read_text())
    (folder / MARKER).write_text(json.dumps({**note, "sha256": {}}))
    assert verify(folder, quick=True).ok
