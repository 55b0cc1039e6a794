"""FP8 folders: loading codes unchanged, faults of folders, and conversions."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

import octavo
from octavo import fp8, models
from octavo.checkpoint import save_hf
from octavo.fp8.weights import FROZEN, codes_of_frozen, frozen_weights
from octavo.models.weights.shards import open_weights
from octavo.parallel import World
from tests.models.conftest import MANY, batch
from tests.models.fp8_folders import CHANNEL, CONFIGS, edit_config, edit_weights, quantized, refused, same, unfused

FORMATS = tuple(CONFIGS)

# FP8 on disk


def on_disk(model, codes: dict) -> dict[str, list[str]]:
    """Return parameter -> names on disk, matched by shape and value; codes are unique."""
    out: dict[str, list[str]] = {}
    for name, weight in frozen_weights(model):
        data = codes_of_frozen(weight).data
        matrices = list(data) if data.dim() == 3 else [data]
        for matrix in matrices:
            halves = matrix.chunk(2) if "gate_up" in name else [matrix]
            for half in halves:
                match = [n for n, code in codes.items() if code.shape == half.shape and same(code, half.contiguous())]
                assert len(match) == 1, (name, match)
                out.setdefault(name, []).append(match[0])
    return out


@pytest.mark.parametrize("method", FORMATS)
@pytest.mark.parametrize("family", MANY)
def test_codes_are_loaded_unchanged(checkpoint, tmp_path, family, method):
    codes, scales = quantized(checkpoint(family), tmp_path / "q", method)
    messages: list[str] = []
    model = models.load(tmp_path / "q", torch.bfloat16, log=messages.append)
    result = on_disk(model, codes)
    assert sorted(name for names in result.values() for name in names) == sorted(codes)
    high = models.load(tmp_path / "q", torch.bfloat16, keep_fp8=False)
    assert not list(frozen_weights(high)) and {p.dtype for p in high.parameters()} == {torch.bfloat16}
    values = dict(high.named_parameters())
    for name, weight in frozen_weights(model):
        q = codes_of_frozen(weight)
        assert q.scale.dtype == torch.float32 and not weight.requires_grad
        expected = []
        for part in result[name]:
            scale = scales[part].reshape(-1, 1) if method != "fp8" and method != "block" else scales[part]
            spread = scale.repeat_interleave(128, 0)[: codes[part].shape[0]] if method in ("fp8", "block") else scale
            if spread.shape[1] > 1:
                spread = spread.repeat_interleave(128, 1)[:, : codes[part].shape[1]]
            expected.append((codes[part].float() * spread).bfloat16())
        whole = torch.cat(expected).view(weight.shape)
        assert torch.equal(weight.dequantize(), whole) and torch.equal(values[name], whole), name
    assert bool([s for s in messages if "fixed scales of activations" in s]) == (method == "tensor")
    assert not hasattr(model.config, "quantization_config") and not hasattr(models.empty(tmp_path / "q").config, "q")


def test_experts_whose_gate_ends_inside_a_block_keep_their_codes(checkpoint, tmp_path):
    quantized(checkpoint("qwen3_moe"), tmp_path / "q", "fp8")
    messages: list[str] = []
    model = models.load(tmp_path / "q", log=messages.append)
    specs = {n.rpartition(".")[2]: codes_of_frozen(w).spec.block for n, w in frozen_weights(model) if "exp" in n}
    assert specs == {"gate_up_proj": (64, 128), "down_proj": (128, 128)}  # gate has 64 rows here
    assert "2 stacks of experts have smaller blocks than the format's" in messages[0]


@pytest.mark.parametrize("scale_dtype", [torch.bfloat16, torch.float16, torch.float8_e8m0fnu])
def test_scales_of_every_dtype_become_fp32_exactly(checkpoint, tmp_path, scale_dtype):
    codes, scales = quantized(checkpoint("llama"), tmp_path / "q", "fp8", scale_dtype)
    edit_config(tmp_path / "q", quantization_config={**CONFIGS["fp8"], "scale_fmt": "ue8m0"})
    model = models.load(tmp_path / "q")
    for name, weight in frozen_weights(model):
        q = codes_of_frozen(weight)
        assert same(q.data, codes[name]) and torch.equal(q.scale, scales[name])
        if scale_dtype is torch.float8_e8m0fnu:
            assert q.spec == FROZEN["block"]
    if scale_dtype is torch.float8_e8m0fnu:  # as bytes, which older safetensors wrote
        edit_weights(
            tmp_path / "q",
            lambda w: w.update({n: v.view(torch.uint8) for n, v in w.items() if n.endswith("_scale_inv")}),
        )
        assert fp8.fingerprint(models.load(tmp_path / "q")) == fp8.fingerprint(model)


@pytest.mark.parametrize("turned", [False, True])
def test_fused_experts_in_codes(checkpoint, tmp_path, turned):
    """[E, N, K] or [E, K, N] codes with their scale grids, as in fused checkpoints."""
    quantized(checkpoint("qwen3_vl_moe"), tmp_path / "alone", "fp8")
    expected = dict(frozen_weights(models.load(tmp_path / "alone")))
    quantized(checkpoint("qwen3_vl_moe"), tmp_path / "q", "fp8")

    def fuse(weights):
        for index in range(2):
            stem = f"model.language_model.layers.{index}.mlp.experts."
            for which in ("gate_up_proj", "down_proj"):
                for name in [
                    n for n in weights if n.startswith(stem) and n.split(".")[6] in "gate_proj up_proj down_proj"
                ]:
                    if ("down" in name) == (which == "down_proj"):
                        weights.pop(name)
                q = codes_of_frozen(expected[stem + which])
                data, scale = q.data.view(torch.uint8), q.scale
                if which == "gate_up_proj":
                    scale = scale[:, :1]  # one block of 128 here, for gate and up
                    if turned:
                        data, scale = data.mT, scale.mT
                weights[stem + which] = data.contiguous().view(torch.float8_e4m3fn)
                weights[stem + which + "_scale_inv"] = scale.contiguous()

    edit_weights(tmp_path / "q", fuse)
    actual = dict(frozen_weights(models.load(tmp_path / "q")))
    assert actual.keys() == expected.keys()
    for name, weight in actual.items():
        q, e = codes_of_frozen(weight), codes_of_frozen(expected[name])
        assert same(q.data, e.data) and torch.equal(q.scale, e.scale[:, : q.scale.shape[-2]]), name


def test_other_block_sizes(checkpoint, tmp_path):
    quantized(checkpoint("llama"), tmp_path / "q", "fp8")
    edit_config(tmp_path / "q", quantization_config={**CONFIGS["fp8"], "weight_block_size": [32, 64]})

    def change(weights):
        for name in [n for n in weights if n.endswith("_scale_inv")]:
            n, k = weights[name.removesuffix("_scale_inv")].shape
            weights[name] = torch.rand(-(-n // 32), -(-k // 64)) + 0.5

    edit_weights(tmp_path / "q", change)
    weights = load_file(tmp_path / "q" / "model.safetensors")
    for name, weight in frozen_weights(models.load(tmp_path / "q")):
        q = codes_of_frozen(weight)
        assert q.spec.block == (32, 64) and same(q.data, weights[name])
        assert torch.equal(q.scale, weights[f"{name}_scale_inv"])


def test_fp8_folder_with_the_same_load_in_fp8(checkpoint, tmp_path):
    quantized(checkpoint("qwen3_vl"), tmp_path / "q", "channel")
    plain = fp8.fingerprint(models.load(tmp_path / "q"))
    assert fp8.fingerprint(models.load(tmp_path / "q", load_in_fp8="row")) == plain
    more = fp8.fingerprint(models.load(tmp_path / "q", load_in_fp8={"foundation": "row", "image_encoder": "block"}))
    assert plain.items() < more.items() and any("visual.blocks" in name for name in more)
    refused(
        tmp_path / "q",
        "has blockwise for foundation, but .* has FP8 codes of compressed-tensors row",
        load_in_fp8="block",
    )
    messages: list[str] = []
    reloaded = models.load(tmp_path / "q", load_in_fp8="block", keep_fp8=False, log=messages.append)
    assert {codes_of_frozen(w).spec for _, w in frozen_weights(reloaded)} == {FROZEN["block"]}
    assert "are quantized again" in messages[0]


def test_a_folder_of_shards(checkpoint, tmp_path):
    folder = tmp_path / "q"
    quantized(checkpoint("qwen3_moe"), folder, "channel")
    whole = fp8.fingerprint(models.load(folder))
    to_shards(folder)
    assert fp8.fingerprint(models.load(folder)) == whole


def to_shards(folder: Path, keep: bool = False) -> dict[str, str]:
    weights = load_file(folder / "model.safetensors")
    index, names = {}, sorted(weights)
    for number, part in enumerate((names[::2], names[1::2])):
        file = f"model-{number + 1:05d}-of-00002.safetensors"
        save_file({name: weights[name] for name in part}, folder / file, metadata={"format": "pt"})
        index.update(dict.fromkeys(part, file))
    if not keep:
        (folder / "model.safetensors").unlink()
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))
    return index


def test_two_sets_of_weights_in_one_folder(checkpoint, tmp_path):
    folder = tmp_path / "q"
    quantized(checkpoint("llama"), folder, "channel")
    whole = fp8.fingerprint(models.load(folder))
    to_shards(folder, keep=True)
    messages: list[str] = []
    assert fp8.fingerprint(models.load(folder, log=messages.append)) == whole
    assert "using model.safetensors, not the shards" in messages[0] and "as in transformers" in messages[0]
    shutil.copy(checkpoint("llama") / "model.safetensors", folder)  # the single file in fp32, the shards in FP8
    messages.clear()
    assert fp8.fingerprint(models.load(folder, log=messages.append)) == whole
    message = messages[0]
    assert "using the shards of model.safetensors.index.json" in message and "only it has FP8 codes" in message
    edit_config(folder, quantization_config=None)
    messages.clear()
    assert not list(frozen_weights(models.load(folder, log=messages.append)))
    assert "using model.safetensors" in messages[0] and "only it has no FP8 codes" in messages[0]
    quantized(checkpoint("llama"), tmp_path / "other", "channel")  # and the other way round
    shutil.copy(tmp_path / "other" / "model.safetensors", folder)
    shutil.copytree(checkpoint("llama"), tmp_path / "plain")
    to_shards(tmp_path / "plain")
    for file in (tmp_path / "plain").glob("model*"):
        shutil.copy(file, folder)
    stock = models.load(checkpoint("llama"))
    messages.clear()
    actual = models.load(folder, log=messages.append)
    assert all(torch.equal(a, b) for a, b in zip(actual.parameters(), stock.parameters(), strict=True))
    assert "using the shards" in messages[0]
    (folder / "model-00001-of-00002.safetensors").unlink()
    refused(folder, "has FP8 codes, but config.json has no quantization_config")


def test_codes_with_a_high_precision_copy(checkpoint, tmp_path):
    folder = tmp_path / "q"
    codes, _ = quantized(checkpoint("llama"), folder, "channel")
    whole = fp8.fingerprint(models.load(folder))
    edit_weights(folder, lambda w: w.update({"layers.0.mlp.up_proj.weight": torch.ones(128, 64)}))
    messages: list[str] = []
    assert fp8.fingerprint(models.load(folder, log=messages.append)) == whole
    assert "using model.layers.0.mlp.up_proj.weight (model.safetensors) (torch.float8_e4m3fn)" in messages[0]


def test_a_tensor_in_two_shards(checkpoint, tmp_path):
    folder = tmp_path / "q"
    quantized(checkpoint("llama"), folder, "channel")
    whole = fp8.fingerprint(models.load(folder))
    index = to_shards(folder)
    name = "model.layers.0.mlp.up_proj.weight"
    other = next(folder / f for f in set(index.values()) if f != index[name])
    save_file({**load_file(other), name: torch.ones(128, 64)}, other)
    messages: list[str] = []
    assert fp8.fingerprint(models.load(folder, log=messages.append)) == whole
    assert f"has {name} twice: using torch.float8_e4m3fn in {index[name]}, which the index names" in messages[0]


def test_a_tensor_in_two_shards_in_the_same_precision(checkpoint, tmp_path):
    folder = tmp_path / "q"
    quantized(checkpoint("llama"), folder, "channel")
    index = to_shards(folder)
    name = "model.norm.weight"
    other = next(folder / f for f in set(index.values()) if f != index[name])
    save_file({**load_file(other), name: torch.ones(64)}, other)
    refused(folder, f"{name} is in .*safetensors and in .*safetensors, and which one loaders use depends on their")


@pytest.mark.parametrize("method", FORMATS)
@pytest.mark.parametrize("family", ["qwen3_vl", "qwen3_moe"])
def test_frozen_casts_are_known_before_loading(checkpoint, tmp_path, family, method):
    folder = tmp_path / "q"
    quantized(checkpoint(family), folder, method)
    loaded = {name: codes_of_frozen(w).spec for name, w in frozen_weights(models.load(folder))}
    assert models.frozen_casts(folder, models.empty(folder)) == loaded
    assert models.frozen_casts(folder, models.empty(folder), keep_fp8=False) == {}
    plain = models.frozen_casts(checkpoint(family), models.empty(folder), "tensor")
    assert plain == dict.fromkeys(loaded, FROZEN["tensor"])


# what is wrong with a folder

UP = "model.layers.1.mlp.up_proj.weight"


@pytest.fixture
def folder(checkpoint, tmp_path) -> Path:
    quantized(checkpoint("llama"), tmp_path / "q", "fp8")
    return tmp_path / "q"


def put(name, make):
    def change(weights):
        weights[name] = make(weights.get(name))

    return change


S = f"{UP}_scale_inv"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda w: w.pop(S), f"{UP} .model.safetensors. has FP8 codes without scales: {S} is missing"),
        (lambda w: w.update({UP + "_scale": w.pop(S)}), "there is .*_scale, the name in another method"),
        (lambda w: w.pop(UP), f"{S} .model.safetensors. is a scale without codes: {UP} is missing"),
        (put(UP, lambda v: v.bfloat16()), f"{S} .* is a scale, but {UP} .* is torch.bfloat16 and has no FP8 codes"),
        (lambda w: (w.pop(S), w.update({UP: w[UP].bfloat16()})), f"{UP} .* is torch.bfloat16, but according to"),
        (put(UP, lambda v: v.float().to(torch.float8_e5m2)), f"{UP} .* has codes in torch.float8_e5m2"),
        (put(S, lambda v: v * float("nan")), f"{S} .* has the scale nan; scales must be finite and above 0"),
        (put(S, lambda v: v * 0), f"{S} .* has the scale 0.0"),
        (put(S, lambda v: -v), f"{S} .* has the scale -"),
        (put(S, lambda v: v / 0), f"{S} .* has the scale inf"),
        (put(S, lambda v: v.double()), f"{S} .* is torch.float64; scales must be float32, bfloat16, float16"),
        (put(S, lambda v: v.to(torch.uint8)), f"{S} .* is torch.uint8; scales must be"),
        (put(S, lambda v: v.expand(2, 1)), rf"{S} .* has shape \[2, 1\]; codes \[128, 64\] in fp8 block 128x128 have"),
        (put(UP, lambda v: v.view(torch.uint8).fill_(0x7F).view(v.dtype)), f"{UP} .* has a NaN code"),
        (put(UP, lambda v: v.view(torch.uint8).fill_(0xFF).view(v.dtype)), f"{UP} .* has a NaN code"),
        (put(UP, lambda v: v[:64]), rf"{UP} \(model.safetensors\) \(64, 64\) instead of \(128, 64\)"),
        (lambda w: (w.pop(UP), w.pop(S)), f"1 missing in the folder .*{UP}"),
        (put("model.norm.weight", lambda v: v.to(torch.int32)), "model.norm.weight .* is torch.int32, but"),
        (put(S, lambda v: v * 0 + 1), f"{S} .* is all 1, but {UP}"),
        (put("model.layers.9.x.weight", lambda v: torch.ones(2)), r"unknown to the model: model.layers.9.x"),
        (put(UP.replace("weight", "input_scale"), lambda v: torch.ones(1)), "unknown to the model: .*input_scale"),
        (
            lambda w: w.update({"model.norm.weight": w["model.norm.weight"].to(torch.float8_e4m3fn),
                                "model.norm.weight_scale_inv": torch.ones(1, 1)}),
            "model.norm.weight .* has FP8 codes, but model.norm.weight is not a linear layer or experts",
        ),
    ],
)  # fmt: skip
def test_damaged_weights_are_refused_by_name(folder, change, message):
    edit_weights(folder, change)
    refused(folder, message)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"quantization_config": None},
            "model.layers.0.mlp.down_proj.weight .*14 such tensors. has FP8 codes, but con",
        ),
        (
            {"quantization_config": {**CONFIGS["fp8"], "modules_to_not_convert": [UP.removesuffix(".weight")]}},
            f"{UP} .* has FP8 codes, but according to config.json that layer is not quantized",
        ),
        (
            {"quantization_config": CHANNEL},
            "has FP8 codes without scales: .*weight_scale is missing .there is .*_inv",
        ),
        (
            {"quantization_config": {**CONFIGS["fp8"], "weight_block_size": [64, 64]}},
            r"_scale_inv .* has shape \[1, 1\]; codes \[64, 128\] in fp8 block 64x64 have scales of shape \[1, 2\]",
        ),
    ],
)
def test_inconsistent_config_is_rejected(folder, change, message):
    edit_config(folder, **change)
    refused(folder, message)


def test_transposed_scales(checkpoint, tmp_path):
    quantized(checkpoint("llama"), tmp_path / "q", "channel")
    edit_weights(tmp_path / "q", lambda w: w.update({n: v.mT for n, v in w.items() if n.endswith("weight_scale")}))
    refused(tmp_path / "q", r"weight_scale .* has shape \[1, 64\]; .* of shape \[64, 1\]. They look transposed")


def test_a_missing_expert(checkpoint, tmp_path):
    quantized(checkpoint("qwen3_moe"), tmp_path / "q", "channel")
    lost = "model.layers.1.mlp.experts.7.up_proj.weight"

    def lose(w):
        w.pop(lost), w.pop(f"{lost}_scale")

    edit_weights(tmp_path / "q", lose)
    refused(tmp_path / "q", f"1 missing in the folder .*: {lost}")
    more = lost.replace(".7.", ".8.")
    quantized(checkpoint("qwen3_moe"), tmp_path / "r", "channel")
    edit_weights(
        tmp_path / "r", lambda w: w.update({more: w[lost].clone(), f"{more}_scale": w[f"{lost}_scale"].clone()})
    )
    refused(tmp_path / "r", "missing in the folder .*experts.8.gate_proj.weight")


def test_one_expert_in_another_precision(checkpoint, tmp_path):
    quantized(checkpoint("qwen3_moe"), tmp_path / "q", "channel")
    name = "model.layers.0.mlp.experts.3.up_proj.weight"
    edit_weights(tmp_path / "q", lambda w: (w.pop(f"{name}_scale"), w.update({name: w[name].bfloat16()})))
    refused(tmp_path / "q", f"{name} .* is torch.bfloat16, but according to config.json that layer is in FP8")
    edit_config(tmp_path / "q", quantization_config={**CHANNEL, "ignore": ["lm_head", name.removesuffix(".weight")]})
    refused(tmp_path / "q", f"{name} .* is torch.bfloat16 but .* FP8 codes, and both are parts of")


@pytest.mark.parametrize("damage", ["cut", "gone", "unlisted", "pickle"])
def test_damaged_files(folder, damage):
    index = to_shards(folder)
    first = folder / "model-00001-of-00002.safetensors"
    if damage == "cut":
        first.write_bytes(first.read_bytes()[:-100])
        refused(folder, "model-00001-of-00002.safetensors is damaged or truncated")
    elif damage == "gone":
        first.unlink()
        refused(folder, "model-00001-of-00002.safetensors is missing")
    elif damage == "unlisted":
        listed = {name: file for name, file in index.items() if name != UP}
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": listed}))
        refused(folder, f"model-0000.-of-00002.safetensors contains {UP} .*index.json does not list")
    else:
        for file in folder.glob("model*"):
            file.unlink()
        torch.save({}, folder / "pytorch_model.bin")
        refused(folder, "only pickled weights")


def test_file_truncated_during_read_is_an_error(checkpoint, tmp_path):
    folder = Path(shutil.copytree(checkpoint("llama"), tmp_path / "m"))
    shards, _ = open_weights(folder, False)
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    last = max(shards.stored.values(), key=lambda entry: entry.begin)
    with shards, pytest.raises(models.ModelError, match=f"ends within {last.name}"):
        shards.read(last)


# other ways in and out


def test_save_hf_writes_values_without_fp8_entries(checkpoint, tmp_path):
    quantized(checkpoint("qwen3_moe"), tmp_path / "q", "fp8")
    model = models.load(tmp_path / "q", torch.bfloat16)
    out = save_hf(model, tmp_path / "q", tmp_path / "hf", World())
    assert "quantization_config" not in json.loads((out / "config.json").read_text())
    high = models.load(tmp_path / "q", torch.bfloat16, keep_fp8=False).state_dict()
    written = models.load(out, torch.bfloat16).state_dict()
    assert high.keys() == written.keys() and all(torch.equal(value, written[name]) for name, value in high.items())


def test_an_fp8_folder_split_in_two_halves(checkpoint, tmp_path):
    quantized(checkpoint("llama"), tmp_path / "q", "fp8")
    model, lows = models.load_split(tmp_path / "q")
    whole = dict(models.load(tmp_path / "q", keep_fp8=False).named_parameters())
    assert lows and not list(frozen_weights(model))
    from octavo.fp8.arithmetic.master import join

    for name, parameter in model.named_parameters():
        low = lows.get(name, torch.zeros(parameter.shape, dtype=torch.int16))
        assert torch.equal(join(parameter.detach(), low), whole[name])


def test_octavo_load(checkpoint, tmp_path):
    model = octavo.load(checkpoint("qwen3_vl"), load_in_fp8=True)
    assert next(model.model.visual.parameters()).dtype == torch.bfloat16
    stock = [m for m in model.modules() if isinstance(m, fp8.Linear)]
    assert not stock and list(frozen_weights(model))
    codes = fp8.fingerprint(model)
    layers = octavo.load(checkpoint("qwen3_vl"), load_in_fp8="row", recipe="rowwise", dtype=torch.float32)
    assert fp8.fingerprint(layers) == codes
    inputs = batch(models.load_processor(checkpoint("qwen3_vl")), image=True)
    with torch.no_grad(), fp8.count_gemms() as counts:
        layers(**inputs)
    assert any(isinstance(m, fp8.Linear) for m in layers.modules()) and counts
    assert isinstance(layers.lm_head, nn.Linear)


def test_model_of_codes_trains_adapters_or_reports_that_nothing_trains(checkpoint):
    """0.4.0 silently trained embeddings, norms and the tower next to fixed codes."""
    ids = torch.tensor([[1, 2, 3]])
    model = octavo.load(checkpoint("llama"), load_in_fp8="row")
    assert not any(p.requires_grad for p in model.parameters())
    with pytest.raises(
        models.ModelError, match="LlamaForCausalLM is in training mode, but none of its parameters requires a gradient"
    ):
        model.train()(ids, labels=ids)
    for harmless in (lambda: model.eval()(ids), lambda: torch.no_grad()(model.train())(ids)):
        harmless()
    model.lm_head.requires_grad_(True)
    model.train()(ids, labels=ids, return_dict=False)[0].backward()
    assert [name for name, p in model.named_parameters() if p.grad is not None] == ["lm_head.weight"]
    assert all(p.requires_grad for p in octavo.load(checkpoint("llama"), recipe="rowwise").parameters())


def test_hf_trainer_and_peft_get_the_same_errors(checkpoint, tmp_path):
    peft, _ = pytest.importorskip("peft"), pytest.importorskip("accelerate")
    from transformers import Trainer, TrainingArguments

    rows = [{"input_ids": [1, 2, 3], "labels": [1, 2, 3]}] * 2
    args = TrainingArguments(tmp_path, max_steps=1, report_to=[], use_cpu=True, disable_tqdm=True, save_strategy="no")
    model = octavo.load(checkpoint("llama"), load_in_fp8="row", recipe="rowwise")
    with pytest.raises(models.ModelError, match="none of its parameters requires a gradient"):
        Trainer(model, args, train_dataset=rows).train()
    codes = fp8.fingerprint(model)
    soft = peft.get_peft_model(model, peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2))
    Trainer(soft, args, train_dataset=rows).train()  # the one parameter that trains is outside the model
    assert fp8.fingerprint(model) == codes


def test_octavo_load_with_an_adapter(checkpoint, tmp_path):
    peft = pytest.importorskip("peft")
    stock = models.load(checkpoint("llama"))
    config = peft.LoraConfig(r=4, target_modules=["q_proj"], init_lora_weights=False)
    peft.get_peft_model(stock, config).save_pretrained(tmp_path / "adapter")
    model = octavo.load(checkpoint("llama"), load_in_fp8="row", adapter=tmp_path / "adapter", recipe="rowwise")
    trained = [name for name, p in model.named_parameters() if p.requires_grad]
    assert trained and all("lora_" in name for name in trained)
    assert unfused({}) == {} and torch.isfinite(model(torch.tensor([[1, 2, 3]])).logits).all()
