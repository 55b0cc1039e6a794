"""PEFT's folder: written atomically, read strictly, and rejected if a field is not supported."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import peft
import pytest
import torch
from safetensors.torch import load_file, save_file

from octavo import adapters, models
from octavo.adapters import AdapterError
from tests.adapters.conftest import lora, quantized
from tests.fuzz import mutate


@pytest.fixture(scope="module")
def adapter(folder, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An adapter of the mini Qwen3-VL, read only."""
    made = tmp_path_factory.mktemp("adapter") / "a"
    adapters.save(model_of(folder, attach=True), made, folder("qwen3_vl"))
    return made


def model_of(folder, attach: bool = False) -> torch.nn.Module:
    model = models.load(folder("qwen3_vl"), dtype=torch.float32)
    if attach:
        adapters.attach(model, models.describe(model), lora(targets=("**.q_proj", "**.merger"), dtype="bf16"))
    return model


@pytest.fixture
def copy(adapter: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(adapter, tmp_path / "copy"))


def edit(folder: Path, **fields: object) -> None:
    file = folder / "adapter_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **fields}))


def test_folder_has_peft_layout(adapter: Path, folder) -> None:
    assert sorted(os.listdir(adapter)) == ["adapter_config.json", "adapter_model.safetensors"]
    raw = json.loads((adapter / "adapter_config.json").read_text())
    assert raw["base_model_name_or_path"] == str(folder("qwen3_vl")) and raw["inference_mode"] is True
    assert raw["peft_type"] == "LORA" and raw["r"] == 4 and raw["lora_alpha"] == 8 and raw["bias"] == "none"
    assert set(raw) <= {*peft.LoraConfig().to_dict(), "peft_version"}  # stock fields only
    assert raw["target_modules"] == sorted(raw["target_modules"])
    tensors = load_file(adapter / "adapter_model.safetensors")
    assert all(
        n.startswith("base_model.model.model.") and n.endswith(("lora_A.weight", "lora_B.weight")) for n in tensors
    )
    assert {t.dtype for t in tensors.values()} == {torch.bfloat16}
    assert peft.LoraConfig.from_pretrained(str(adapter)).r == 4


@pytest.mark.parametrize("over", [None, "block", "row", "tensor"])
def test_adapter_loads_on_any_base(over: str | None, adapter: Path, folder) -> None:
    model = model_of(folder)
    if over is not None:
        quantized(model, over, {"block": "blockwise", "row": "rowwise", "tensor": "tensorwise"}[over])
    messages: list[str] = []
    adapters.load(model, adapter, messages.append, dtype="bf16")
    stored = load_file(adapter / "adapter_model.safetensors")
    state = adapters.adapter_state(model)
    assert state.keys() == stored.keys() and all(torch.equal(state[n], stored[n]) for n in stored)
    assert "rank 4" in messages[0]
    assert {n for n, p in model.named_parameters() if p.requires_grad} == {
        n for n, _ in adapters.adapter_parameters(model)
    }


def test_save_replaces_only_an_adapter(folder, tmp_path: Path) -> None:
    model = model_of(folder, attach=True)
    place = tmp_path / "deep" / "a"
    adapters.save(model, place, "base")
    before = (place / "adapter_model.safetensors").read_bytes()
    state = {n: v + 1 for n, v in adapters.adapter_state(model).items()}
    adapters.save(model, place, "base", state)
    assert (place / "adapter_model.safetensors").read_bytes() != before
    assert os.listdir(place.parent) == ["a"]  # nothing is left aside
    (place / "notes.txt").write_text("mine")
    with pytest.raises(AdapterError, match="not an adapter folder.*notes.txt"):
        adapters.save(model, place, "base")
    (tmp_path / "file").write_text("")
    with pytest.raises(AdapterError, match="it is a file"):
        adapters.save(model, tmp_path / "file", "base")
    with pytest.raises(AdapterError, match="no adapters"):
        adapters.save(model_of(folder), tmp_path / "none", "base")
    assert not (tmp_path / "none").exists()


def test_failed_save_keeps_previous_adapter(folder, copy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, before = model_of(folder, attach=True), (copy / "adapter_model.safetensors").read_bytes()

    def broken(*args: object, **kwargs: object) -> None:
        Path(args[1]).write_bytes(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("octavo.adapters.files.save_file", broken)
    with pytest.raises(AdapterError, match="could not be written.*No space left"):
        adapters.save(model, copy, "base")
    assert (copy / "adapter_model.safetensors").read_bytes() == before
    assert sorted(os.listdir(copy.parent)) == ["copy"]


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"peft_type": "IA3"}, "type 'IA3'"),
        ({"peft_type": "PROMPT_TUNING"}, "type 'PROMPT_TUNING'"),
        ({"peft_type": None}, "type None"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save.*trained copies"),
        ({"bias": "all"}, "bias.*biases of the base"),
        ({"lora_bias": True}, "lora_bias.*B has a bias"),
        ({"fan_in_fan_out": True}, "fan_in_fan_out"),
        ({"layer_replication": [[0, 2], [1, 2]]}, "layer_replication.*more layers"),
        ({"trainable_token_indices": [1]}, "trainable_token_indices"),
        ({"use_qalora": True}, "use_qalora.*is not supported"),
        ({"alora_invocation_tokens": [1, 2]}, "alora_invocation_tokens"),
        ({"of_tomorrow": {"a": 1}}, "of_tomorrow.*is not supported"),
        ({"init_lora_weights": "pissa"}, "pissa.*path_initial_model"),
        ({"init_lora_weights": "olora"}, "olora"),
        ({"r": 0}, "not a valid LoRA configuration"),
        ({"r": "four"}, "not a valid LoRA configuration|expected a whole number"),
        ({"r": 10**30}, "r is 1000.*; expected a whole number"),
        ({"target_modules": {"a": 1}}, "target_modules is .*; expected text or a list of names"),
        ({"target_modules": "(q_proj"}, "not a valid LoRA configuration: .*unterminated"),
        ({"rank_pattern": {"q_proj": "x"}}, r"rank_pattern\.q_proj is \"x\"; expected a whole number"),
        ({"layers_to_transform": ["a"]}, "layers_to_transform is"),
        ({"lora_dropout": 2}, "not a valid LoRA configuration"),
        ({"r": 8}, r"lora_A.weight is \[4, .*takes \[8"),
        ({"target_modules": ["q_proj"]}, "unknown to the model.*linear_fc1"),
        ({"target_modules": ["q_proj", "k_proj", "linear_fc1", "linear_fc2"]}, "missing: .*k_proj"),
        ({"target_modules": ["lm_head"]}, "adapts lm_head .lm_head.*chunks"),
        ({"target_modules": ["embed_tokens"]}, "embed_tokens .embedding.*look-up"),
        ({"target_modules": ["input_layernorm"]}, "not a linear layer"),
        ({"use_dora": True}, "missing: .*lora_magnitude_vector"),
    ],
)
def test_unsupported_config_fields_are_rejected(fields: dict, says: str, copy: Path, folder) -> None:
    edit(copy, **fields)
    model = model_of(folder)
    with pytest.raises(AdapterError, match=says):
        adapters.load(model, copy)
    assert not adapters.adapted_layers(model)


def placed(file: Path, what: str) -> None:
    mutate.replace_file(None, file, what)  # type: ignore[arg-type]


def test_fields_without_effect_are_accepted(copy: Path, folder) -> None:
    edit(copy, init_lora_weights="gaussian", of_tomorrow=None, another=False, revision="main", loftq_config={})
    assert adapters.load(model_of(folder), copy)


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (lambda d: (d / "adapter_config.json").unlink(), "no adapter_config.json"),
        (lambda d: (d / "adapter_config.json").write_text("{"), "is not JSON"),
        (lambda d: (d / "adapter_config.json").write_text("[1]"), "contains a list; expected an object"),
        (lambda d: (d / "adapter_config.json").write_bytes(b"\xff\xfe"), "is not UTF-8 text"),
        (lambda d: placed(d / "adapter_config.json", "pipe"), r"adapter_config\.json is a named pipe"),
        (lambda d: placed(d / "adapter_model.safetensors", "pipe"), r"safetensors is a named pipe"),
        (lambda d: placed(d / "adapter_model.safetensors", "device"), r"safetensors is a device"),
        (lambda d: (d / "adapter_model.safetensors").unlink(), "adapter is incomplete"),
        (lambda d: (d / "adapter_model.safetensors").write_bytes(b"\x00" * 20), "cannot be read.*truncated"),
        (lambda d: (d / "adapter_model.safetensors").rename(d / "adapter_model.bin"), "adapter_model.bin, a pickle"),
        (lambda d: os.truncate(d / "adapter_model.safetensors", 3000), "cannot be read.*truncated"),
        (lambda d: shutil.rmtree(d), "not an adapter folder"),
    ],
)
def test_damaged_folders_are_rejected(damage, says: str, copy: Path, folder) -> None:
    damage(copy)
    model = model_of(folder)
    with pytest.raises(AdapterError, match=says):
        adapters.load(model, copy)
    assert not adapters.adapted_layers(model)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda t, n: t.pop(n), "1 tensor missing: .*lora_A"),
        (lambda t, n: t.update({n.replace("layers.0", "layers.7"): t[n].clone()}), "1 tensor unknown"),
        (lambda t, n: t.update({n: t[n][:, :4].clone()}), r"is \[4, 4\] where the model takes"),
        (lambda t, n: t.update({n: t[n].float().fill_(float("nan"))}), "NaN or infinity"),
        (lambda t, n: t.update({n: t[n].to(torch.float8_e4m3fn)}), "float8"),
    ],
)
def test_tensors_that_do_not_fit_are_reported(change, says: str, copy: Path, folder) -> None:
    tensors = load_file(copy / "adapter_model.safetensors")
    change(tensors, next(n for n in tensors if "language_model.layers.0" in n and "lora_A" in n))
    save_file(tensors, copy / "adapter_model.safetensors")
    model = model_of(folder)
    with pytest.raises(AdapterError, match=says):
        adapters.load(model, copy)
    assert not adapters.adapted_layers(model)


def test_state_is_loaded_completely_or_not_at_all(folder) -> None:
    model = model_of(folder, attach=True)
    state = adapters.adapter_state(model)
    name = next(iter(state))
    for bad, says in (
        ({n: v + 1 for n, v in state.items() if n != name}, "missing"),
        ({**{n: v + 1 for n, v in state.items()}, "more": torch.zeros(1)}, "unknown"),
        ({**{n: v + 1 for n, v in state.items()}, name: torch.zeros(2, 2)}, "where the model takes"),
    ):
        with pytest.raises(AdapterError, match=says):
            adapters.load_adapter_state(model, bad)
    assert all(torch.equal(v, state[n]) for n, v in adapters.adapter_state(model).items())


def test_peft_regular_expressions_and_all_linear_are_supported(folder, tmp_path: Path) -> None:
    for i, target in enumerate([r".*language_model.*\.(q|v)_proj", "all-linear"]):
        theirs = peft.get_peft_model(model_of(folder), peft.LoraConfig(r=2, target_modules=target))
        theirs.save_pretrained(tmp_path / str(i), save_embedding_layers=False)
        mine = {n.removesuffix(".lora_A.default") for n, _ in theirs.base_model.model.named_modules() if "lora_A." in n}
        assert set(adapters.load(model_of(folder), tmp_path / str(i))) == mine


def test_experts_with_dropout_are_rejected_before_peft(folder, tmp_path: Path) -> None:
    model = models.load(folder("qwen3_vl_moe"), dtype=torch.float32)
    adapters.attach(model, models.describe(model), lora(targets=("**.experts",)))
    adapters.save(model, tmp_path / "a", "base")
    again = models.load(folder("qwen3_vl_moe"), dtype=torch.float32)
    edit(tmp_path / "a", lora_dropout=0.1)
    with pytest.raises(AdapterError, match=r"adapts experts.*lora_dropout=0.1"):
        adapters.load(again, tmp_path / "a")
    edit(tmp_path / "a", lora_dropout=0.0)
    assert adapters.load(again, tmp_path / "a")
