"""Attaching adapters: trained parameters, initial values, messages, and errors raised before the model is changed."""

from __future__ import annotations

import ast
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch

from octavo import adapters, fp8, models
from octavo.adapters import AdapterError
from octavo.fp8.weights import frozen_weights
from tests.adapters.conftest import inputs, logits, lora, quantized


def load(folder, name: str = "qwen3", dtype: torch.dtype = torch.float32):
    model = models.load(folder(name), dtype=dtype)
    return model, models.describe(model)


def test_only_adapters_train_and_output_is_unchanged(folder) -> None:
    model, family = load(folder, "qwen3_vl")
    batch = inputs(model, family)
    before, classes = logits(model, batch), type(model)
    messages: list[str] = []
    names = adapters.attach(model, family, lora(targets=("foundation", "image_projector")), messages.append)
    assert torch.equal(logits(model, batch), before) and type(model) is classes
    trained = {n for n, p in model.named_parameters() if p.requires_grad}
    assert trained == {n for n, _ in model.named_parameters() if adapters.is_adapter_parameter(n)}
    assert trained == {f"{n}.lora_{part}.default.weight" for n in names for part in "AB"}
    assert len(messages) == 1 and "rank 4, alpha 8" in messages[0] and f"{len(names)} layers" in messages[0]
    assert str(sum(p.numel() for _, p in adapters.adapter_parameters(model))) in messages[0].replace(",", "")
    assert not adapters.is_adapter_parameter("model.layers.0.self_attn.q_proj.base_layer.weight")


@pytest.mark.parametrize("store", ["fp32", "bf16"])
def test_a_depends_only_on_the_seed(store: str, folder) -> None:
    states = []
    for seed, disturb in ((1, 5), (1, 6), (2, 5)):
        model, family = load(folder, dtype=torch.bfloat16)
        torch.manual_seed(disturb)
        at = torch.get_rng_state()
        adapters.attach(model, family, lora(dtype=store), seed=seed)
        assert torch.equal(torch.get_rng_state(), at)
        states.append(adapters.adapter_state(model))
    same = [all(torch.equal(states[0][n], other[n]) for n in states[0]) for other in states[1:]]
    assert same == [True, False]
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[store]
    assert all(v.dtype is dtype for v in states[0].values())
    assert all(not v.any() for n, v in states[0].items() if "lora_B" in n)
    assert all(v.std() > 0 for n, v in states[0].items() if "lora_A" in n)


def test_adapters_are_never_float8(folder) -> None:
    model, family = load(folder, dtype=torch.bfloat16)
    quantized(model, "row", "rowwise")
    adapters.attach(model, family, lora(dtype="bf16", dora=True))
    assert {p.dtype for n, p in adapters.adapter_parameters(model)} == {torch.bfloat16}


def test_rslora_scales_by_the_root_of_the_rank(folder) -> None:
    model, family = load(folder)
    adapters.attach(model, family, lora(rank=16, alpha=8, rslora=True))
    assert {layer.scaling["default"] for layer in adapters.adapted_layers(model).values()} == {2.0}


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"targets": ("**.nothing",)}, "matches nothing"),
        ({"targets": ("lm_head",)}, "lm_head"),
        ({"dora": True, "dropout": 0.1}, "dropout: 0, or lora.dora: false"),
        ({"adapter": "nowhere"}, "not an adapter folder"),
    ],
)
def test_rejected_attach_leaves_the_model_unchanged(settings: dict, says: str, folder) -> None:
    model, family = load(folder)
    with pytest.raises(AdapterError, match=says):
        adapters.attach(model, family, lora(**settings))
    assert not adapters.adapted_layers(model) and all(p.requires_grad for p in model.parameters())


@pytest.mark.parametrize("settings", [{"dropout": 0.1}, {"dora": True}])
def test_dropout_and_dora_with_experts_are_rejected(settings: dict, folder) -> None:
    model, family = load(folder, "qwen3_vl_moe")
    with pytest.raises(AdapterError, match=r'lora.exclude: \["\*\*.experts"\]'):
        adapters.attach(model, family, lora(**settings))
    adapters.attach(model, family, lora(exclude=("**.experts",), **settings))
    assert not [n for n in adapters.adapted_layers(model) if "experts" in n]


def test_names_that_peft_treats_as_experts_are_left_out(folder) -> None:
    """PEFT reads "mlp.gate_proj" of these families as the experts' gate_up_proj of older checkpoints."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    config = Qwen3MoeConfig(
        hidden_size=32,
        intermediate_size=32,
        moe_intermediate_size=16,
        num_hidden_layers=2,
        vocab_size=64,
        num_attention_heads=2,
        num_key_value_heads=1,
        num_experts=4,
        num_experts_per_tok=2,
        head_dim=16,
        mlp_only_layers=[0],
    )
    model = Qwen3MoeForCausalLM(config)
    family, messages = models.describe(model), []
    names = adapters.attach(model, family, lora(exclude=("**.experts",)), messages.append)
    assert set(names) == set(adapters.adapted_layers(model))
    if not any("mlp.gate_proj" in n for n in names):  # PEFT of this version does so
        assert "leaves out" in messages[0] and "qwen3_moe" in messages[0]
        with pytest.raises(AdapterError, match="PEFT cannot address"):
            twin = Qwen3MoeForCausalLM(model.config)
            adapters.attach(twin, family, lora(targets=("model.layers.0.mlp.gate_proj",)))


def test_second_attach_is_rejected(folder, tmp_path: Path) -> None:
    model, family = load(folder)
    adapters.attach(model, family, lora())
    with pytest.raises(AdapterError, match="has adapters already"):
        adapters.attach(model, family, lora())
    adapters.save(model, tmp_path / "a", "base")
    with pytest.raises(AdapterError, match="has adapters already"):
        adapters.load(model, tmp_path / "a")


def test_training_continues_from_an_adapter(folder, tmp_path: Path) -> None:
    model, family = load(folder)
    adapters.attach(model, family, lora(targets=("**.q_proj", "**.mlp")))
    state = {n: torch.randn_like(v) for n, v in adapters.adapter_state(model).items()}
    adapters.load_adapter_state(model, state)
    adapters.save(model, tmp_path / "a", "base")
    there = str(tmp_path / "a")
    again, _ = load(folder)
    messages: list[str] = []
    adapters.attach(again, family, lora(targets=("**.mlp", "q_proj"), adapter=there), messages.append)
    assert all(torch.equal(v, state[n]) for n, v in adapters.adapter_state(again).items()) and there in messages[0]
    for settings, says in (
        ({"rank": 8, "targets": ("**.mlp", "q_proj")}, "lora.rank is 8.*has 4"),
        ({"alpha": 9, "targets": ("**.mlp", "q_proj")}, "lora.alpha is 9"),
        ({"rslora": True, "targets": ("**.mlp", "q_proj")}, "lora.rslora is True"),
        ({"targets": ("**.mlp",)}, "2 differ, first model.layers.0.self_attn.q_proj"),
    ):
        other, _ = load(folder)
        with pytest.raises(AdapterError, match=says):
            adapters.attach(other, family, lora(adapter=there, **settings))
        assert not adapters.adapted_layers(other)


def test_base_errors_require_the_matching_stock_model(folder) -> None:
    model, _ = load(folder)
    with pytest.raises(AdapterError, match="no FP8 weights"):
        adapters.base_errors(model, model)
    quantized(model)
    with pytest.raises(AdapterError, match="the stock model has no values for"):
        adapters.base_errors(model, [])
    stock = dict(load(folder)[0].named_parameters())
    name = next(n for n, _ in frozen_weights(model))
    with pytest.raises(AdapterError, match="in the stock model"):
        adapters.base_errors(model, {**stock, name: stock[name][:, :8]}.items())
    exact = adapters.base_errors(model, fp8.dequantize_weights(quantized(load(folder)[0])))
    assert exact.relative == 0 and exact.sqnr == float("inf") and exact.worst.relative == 0


def test_peft_is_imported_lazily() -> None:
    """Only layer.py, which attaching imports, may import it as it is loaded."""
    for file in Path(adapters.__file__).parent.glob("*.py"):
        for statement in ast.parse(file.read_text(encoding="utf-8")).body:
            names = [a.name for a in getattr(statement, "names", [])] + [getattr(statement, "module", "") or ""]
            wrong = isinstance(statement, ast.Import | ast.ImportFrom) and (
                any(n.split(".")[0] == "peft" for n in names) or "octavo.adapters.layer" in names
            )
            assert file.name == "layer.py" or not wrong, file.name


@pytest.mark.parametrize(
    ("name", "kind", "settings"),
    [("qwen3_vl", "block", {}), ("qwen3_vl_moe", "row", {}), ("qwen3", None, {"dora": True, "dropout": 0.0})],
    ids=["fp8", "experts", "dora"],
)
def test_second_adapter_uses_the_same_base(name: str, kind: str | None, settings: dict, folder, tmp_path: Path) -> None:
    """It trains as the first does, one of them at a time, and is in no file; the first is what runs by itself."""
    model, family = load(folder, name)
    if kind is not None:
        quantized(model, kind, f"{kind}wise" if kind != "block" else "blockwise")
    names = adapters.attach(model, family, lora(**settings), seed=1)
    first = {n: p.detach().clone() for n, p in adapters.adapter_parameters(model)}
    batch = inputs(model, family)
    before = logits(model, batch)
    adapters.attach_second(model, lora(**settings), seed=2)
    mine = dict(adapters.adapter_parameters(model))
    other = {n: p for n, p in model.named_parameters() if adapters.is_second_parameter(n)}
    assert mine.keys() == first.keys() and all(torch.equal(p, first[n]) for n, p in mine.items())
    assert {n.replace(".second.", ".default.") for n in other} == first.keys()
    assert adapters.adapted_layers(model).keys() == set(names)
    assert {n for n, p in model.named_parameters() if p.requires_grad} == {*mine, *other}
    assert any(p.any() and not torch.equal(p, first[n.replace(".second.", ".default.")]) for n, p in other.items())
    with adapters.use_second_adapter(model):
        assert torch.equal(logits(model, batch), before), "it changes nothing yet"
    for n, p in other.items():
        if "lora_B" in n:
            p.data.normal_(std=0.1, generator=torch.Generator().manual_seed(3))
    assert torch.equal(logits(model, batch), before)
    with adapters.use_second_adapter(model):
        assert not torch.allclose(logits(model, batch), before, atol=1e-3)
        with adapters.disable_adapters(model):
            assert torch.allclose(logits(model, batch), before, atol=1e-5)
    for held, rest, entered in ((mine, other, nullcontext()), (other, mine, adapters.use_second_adapter(model))):
        model.zero_grad(set_to_none=True)
        with entered:
            model(**batch).logits.float().square().sum().backward()
        assert any(p.grad is not None and p.grad.any() for p in held.values())
        assert all(p.grad is None or not p.grad.any() for p in rest.values())
    adapters.save(model, tmp_path / "saved", base="base")
    assert adapters.files.read_state(tmp_path / "saved").keys() == adapters.adapter_state(model).keys()
    assert len(adapters.adapter_state(model)) == len(mine)


def test_second_adapter_requires_a_first(folder) -> None:
    model, _ = load(folder)
    with pytest.raises(AdapterError, match="requires a first one"):
        adapters.attach_second(model, lora())
    with pytest.raises(AdapterError, match="no second adapter"), adapters.use_second_adapter(model):
        pass
