"""Loading of complete and damaged folders."""

from __future__ import annotations

import json
import shutil
import struct
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import AutoConfig

from octavo import models
from octavo.checkpoint import save_hf
from octavo.fp8.arithmetic.master import join
from octavo.fp8.weights import is_frozen
from octavo.models.folder import headers
from octavo.models.structure.skeleton import stock_config
from octavo.models.weights import loading
from octavo.parallel import World


@pytest.fixture
def folder(checkpoint, tmp_path) -> Path:
    """A copy of a small text model that tests damage."""
    return Path(shutil.copytree(checkpoint("llama"), tmp_path / "model"))


def edit_config(folder: Path, **changes) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))


def edit_weights(folder: Path, change) -> None:
    file = folder / "model.safetensors"
    weights = load_file(file)
    change(weights)
    save_file(weights, file, metadata={"format": "pt"})


def shard(folder: Path) -> dict[str, str]:
    """Two shards and an index instead of a single file."""
    weights = load_file(folder / "model.safetensors")
    names = sorted(weights)
    index = {}
    for number, part in enumerate((names[::2], names[1::2])):
        file = f"model-{number + 1:05d}-of-00002.safetensors"
        save_file({name: weights[name] for name in part}, folder / file, metadata={"format": "pt"})
        index.update(dict.fromkeys(part, file))
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))
    return index


def refused(folder: Path, message: str) -> None:
    with pytest.raises(models.ModelError, match=message):
        models.load(folder)


def test_untrainable_parameters_stay_untrainable(checkpoint):
    """For all loaders, including several ranks: the positions of an audio tower are sinusoids."""
    hears = checkpoint("qwen2_audio")
    ways = [
        models.load(hears), models.load(hears, load_in_fp8={"foundation": "row"}), models.load_split(hears)[0],
        models.init_model(hears), models.load_deferred(hears, torch.float32, torch.device("cpu")).model,
    ]  # fmt: skip
    for model in ways:
        still = [name for name, p in model.named_parameters() if not p.requires_grad and not is_frozen(p)]
        assert still == ["model.audio_tower.embed_positions.weight"]


def test_values_dtype_and_mode(folder):
    model = models.load(folder, torch.bfloat16)
    weights = load_file(folder / "model.safetensors")
    assert not model.training
    for name, value in model.state_dict().items():
        assert value.dtype == torch.bfloat16 and torch.equal(value, weights[name].bfloat16())
    assert model.model.rotary_emb.inv_freq.dtype == torch.float32


def test_folder_may_contain_layers_that_the_model_omits(checkpoint, tmp_path):
    """GLM-OCR's 17th layer predicts several tokens; any other extra layer is an error."""
    folder = Path(shutil.copytree(checkpoint("glm_ocr"), tmp_path / "model"))
    edit_weights(folder, lambda w: w.update({"model.language_model.layers.16.eh_proj.weight": torch.ones(2)}))
    wanted, actual = models.load(checkpoint("glm_ocr")), models.load(folder)
    assert all(torch.equal(value, actual.state_dict()[name]) for name, value in wanted.state_dict().items())
    edit_weights(folder, lambda w: w.update({"model.language_model.layers.15.eh_proj.weight": torch.ones(2)}))
    refused(folder, "layers.15.eh_proj")


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize("family", ["qwen3_vl", "qwen2_5_vl", "internvl"])
def test_attention_implementations(checkpoint, family, implementation):
    model = models.load(checkpoint(family), attn_implementation=implementation)
    assert model.config._attn_implementation == implementation


def test_unsupported_attention_is_rejected(checkpoint):
    with pytest.raises(models.ModelError, match="gpt_bigcode"):
        models.load(checkpoint("mpt"), attn_implementation="gpt_bigcode")


def test_shards(folder):
    whole = models.load(folder).state_dict()
    shard(folder)
    assert all(torch.equal(value, whole[name]) for name, value in models.load(folder).state_dict().items())


def test_empty_reads_no_weights(folder):
    (folder / "model.safetensors").unlink()
    model = models.empty(folder)
    assert all(p.is_meta for p in model.parameters())


def test_no_folder(tmp_path):
    refused(tmp_path / "nowhere", "nowhere is not a folder: .*octavo tiny")
    refused(tmp_path, "config.json is missing")


@pytest.mark.parametrize("content", ["{", "[1]", '"text"'])
def test_a_broken_config(folder, content):
    (folder / "config.json").write_text(content)
    refused(folder, "config.json (is not JSON|contains a (list|str); expected an object)")


def test_config_of_unknown_or_unsupported_model_is_rejected(folder):
    edit_config(folder, model_type="never_heard_of")
    refused(folder, "config.json has model_type 'never_heard_of'")
    edit_config(folder, model_type="clip")
    refused(folder, "model_type 'clip' is neither a model of images or audio and text")


def test_a_field_of_the_wrong_type(folder):
    edit_config(folder, hidden_size="wide")
    refused(folder, "config.json .*hidden_size|config.json has a field")


def test_code_in_the_folder(folder):
    edit_config(folder, auto_map={"AutoModelForCausalLM": "evil.Model"})
    (folder / "evil.py").write_text("raise SystemExit")
    refused(folder, "requires Python code")


def test_another_file_with_the_configuration(folder):
    """transformers would read it instead, unchecked."""
    edit_config(folder, configuration_files=["config.json", "config.4.0.0.json"])
    (folder / "config.4.0.0.json").write_text("{}")
    refused(folder, r"names other files with the configuration \(configuration_files\)")


def test_a_configuration_is_parsed_once(folder, monkeypatch):
    """Unless config.json was changed; and what a caller does to a configuration stays with that caller."""
    parsed = []
    from_pretrained = AutoConfig.from_pretrained
    monkeypatch.setattr(AutoConfig, "from_pretrained", lambda *a, **kw: parsed.append(a) or from_pretrained(*a, **kw))
    first = stock_config(folder)
    expected = first.to_dict()
    first.rope_parameters["rope_theta"], first.hidden_size = -1.0, 7
    assert stock_config(folder).to_dict() == expected and len(parsed) == 1
    edit_config(folder, hidden_act="gelu")
    assert stock_config(folder).hidden_act == "gelu" and len(parsed) == 2
    edit_config(folder, hidden_size="wide")
    for _ in range(2):
        refused(folder, "config.json .*hidden_size|config.json has a field")


def test_quantized_weights_are_rejected(folder):
    edit_config(folder, quantization_config={"quant_method": "gptq", "bits": 4})
    refused(folder, "quantized weights .quant_method 'gptq'")


def test_pickled_weights(folder):
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    refused(folder, "only pickled weights .pytorch_model.bin.; a pickle can run code")


def test_no_weights(folder):
    (folder / "model.safetensors").unlink()
    refused(folder, "no weights to load")


@pytest.mark.parametrize("keep", [0, 4, 100, -1, -4096])
def test_a_truncated_file(folder, keep):
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:keep])
    refused(folder, r"model\.safetensors is damaged or truncated \(\d+ bytes\)")


@pytest.mark.parametrize("length", [0x0280, 0x0380, 0x0480, 0x0580])
def test_header_length_that_looks_like_a_pickle_is_read(tmp_path, length: int):
    """A header of 640 bytes begins with 80 02 00, like a pickle with its protocol."""
    file = tmp_path / "model.safetensors"
    for n in range(length - 120, length):  # the rest of the header has fewer than 120 bytes
        save_file({"a" * n: torch.ones(2)}, file)
        if int.from_bytes(file.read_bytes()[:8], "little") >= length:
            break
    assert int.from_bytes(file.read_bytes()[:8], "little") == length
    assert [entry.name for entry in headers.read(file).entries] == ["a" * n]
    file.write_bytes(b"\x80\x04\x95" + bytes(64))
    with pytest.raises(headers.HeaderError, match="a pickle with the suffix of a different format"):
        headers.read(file)


def test_header_with_excessive_length_is_rejected(folder):
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", 2**62) + b"{}")
    refused(folder, "damaged or truncated")


def test_a_missing_shard_and_a_missing_tensor_of_the_index(folder):
    index = shard(folder)
    file = folder / "model-00002-of-00002.safetensors"
    kept = load_file(file)
    lost = sorted(kept)[0]
    save_file({name: value for name, value in kept.items() if name != lost}, file, metadata={"format": "pt"})
    refused(folder, f"does not contain '{lost}'")
    assert index[lost] == file.name
    file.unlink()
    refused(folder, "model-00002-of-00002.safetensors is missing, although .*index.json names it")


def test_index_with_files_outside_the_folder_is_rejected(folder, tmp_path):
    (folder / "model.safetensors").rename(tmp_path / "other.safetensors")
    with safe_open(tmp_path / "other.safetensors", "pt") as tensors:
        index = dict.fromkeys(tensors.keys(), "../other.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    refused(folder, "names '../other.safetensors', which is not a file of this folder")


@pytest.mark.parametrize("content", ["{}", '{"weight_map": {}}', '{"weight_map": [1]}', '{"weight_map": {"a": 1}}'])
def test_a_broken_index(folder, content):
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors.index.json").write_text(content)
    refused(folder, "index.json has no weight_map")


def test_missing_tensor_is_rejected(folder):
    edit_weights(folder, lambda weights: weights.pop("model.layers.1.mlp.up_proj.weight"))
    refused(
        folder,
        r"1 missing in the folder \(transformers would initialize them randomly\): model.layers.1.mlp.up_proj",
    )


def test_unknown_tensor_is_rejected(folder):
    edit_weights(folder, lambda weights: weights.update({"model.layers.7.extra": torch.ones(2)}))
    refused(folder, "1 in the folder but unknown to the model: model.layers.7.extra")


def test_a_tensor_of_another_shape(folder):
    edit_weights(folder, lambda weights: weights.update({"model.norm.weight": torch.ones(3)}))
    refused(folder, r"1 with a different shape in the model: model.norm.weight \(3,\) instead of \(64,\)")


def test_missing_vision_tensor_is_rejected(checkpoint, tmp_path):
    folder = Path(shutil.copytree(checkpoint("qwen3_vl_moe"), tmp_path / "model"))
    with safe_open(folder / "model.safetensors", "pt") as tensors:
        name = next(key for key in tensors.keys() if "experts.down_proj" in key)  # noqa: SIM118
    edit_weights(folder, lambda weights: weights.pop(name))
    refused(folder, "1 missing in the folder .*experts.down_proj")


def fp32(model) -> dict[str, torch.Tensor]:
    return {name: p.detach() for name, p in model.named_parameters()}


@pytest.mark.parametrize("family", ["qwen3_vl", "internvl", "qwen3_moe"])
def test_an_fp32_checkpoint_is_split_without_loss(checkpoint, family):
    model, lows = models.load_split(checkpoint(family))
    whole = models.load(checkpoint(family))
    high = models.load(checkpoint(family), torch.bfloat16)
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16} and not model.training
    assert lows and all(low.dtype == torch.int16 for low in lows.values())
    for name, p in fp32(model).items():
        low = lows.get(name, torch.zeros(p.shape, dtype=torch.int16))
        assert torch.equal(join(p, low), fp32(whole)[name]), name
    norms = [name for name in fp32(model) if name.endswith("norm.weight")]
    assert norms and not set(norms) & set(lows)  # ones have no lower half to keep
    assert [(n, b.dtype) for n, b in model.named_buffers()] == [(n, b.dtype) for n, b in high.named_buffers()]
    assert all(torch.equal(a, b) for a, b in zip(model.buffers(), high.buffers(), strict=True))
    parts = [(m.config, h.config) for m, h in ((model, high),)]
    parts += [(getattr(m, name), getattr(h, name)) for m, h in parts for name in m.sub_configs]
    assert all(local.dtype == stock.dtype == torch.bfloat16 for local, stock in parts)
    assert (model.lm_head.weight is model.get_input_embeddings().weight) == (
        whole.lm_head.weight is whole.get_input_embeddings().weight
    )


def test_bf16_checkpoint_has_no_lower_halves_and_no_fp32_copy(checkpoint, tmp_path, monkeypatch):
    model = models.load(checkpoint("qwen3_vl"), torch.bfloat16)
    folder = save_hf(model, checkpoint("qwen3_vl"), tmp_path / "m", World())
    calls = []
    real = loading.load
    monkeypatch.setattr(loading, "load", lambda path, dtype, *a, **k: calls.append(dtype) or real(path, dtype, *a, **k))
    model, lows = models.load_split(folder)
    assert calls == [torch.bfloat16] and lows == {}
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), models.load(folder).parameters(), strict=True))


def test_fp32_tensor_among_bf16_tensors_keeps_its_lower_half(folder):
    def change(weights):
        for name, value in weights.items():
            weights[name] = value.bfloat16() if "q_proj" not in name else value

    edit_weights(folder, change)
    model, lows = models.load_split(folder)
    assert lows and all("q_proj" in name for name in lows)
    assert fp32(model).keys() >= lows.keys()


def test_a_damaged_folder_is_refused_when_split_too(folder):
    edit_weights(folder, lambda weights: weights.pop("model.layers.1.mlp.up_proj.weight"))
    with pytest.raises(models.ModelError, match="1 missing in the folder"):
        models.load_split(folder)
    (folder / "model.safetensors").write_bytes(b"")
    with pytest.raises(models.ModelError, match="damaged or truncated"):
        models.load_split(folder)
    (folder / "config.json").unlink()
    with pytest.raises(models.ModelError, match="config.json is missing"):
        models.load_split(folder)


def test_error_describes_adapter_and_run_folders(tmp_path: Path) -> None:
    for name, says in (
        ("adapter_config.json", "a PEFT adapter.*octavo merge"),
        ("config.yaml", "a run of octavo train"),
    ):
        folder = tmp_path / name
        (folder / "checkpoints").mkdir(parents=True)
        (folder / name).write_text("{}")
        refused(folder, f"config.json is missing: .* is {says}")
    (folder / "adapter").mkdir()
    refused(folder, "is a run of octavo train. Its adapter is .*/config.yaml/adapter; octavo merge writes a Hugging")
    (folder / "hf").mkdir()
    (folder / "hf" / "config.json").write_text("{}")
    refused(folder, "is a run of octavo train. Its model is .*/config.yaml/hf")
