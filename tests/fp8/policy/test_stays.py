"""What a recipe for the whole model leaves in high precision until a rule names it: adapters, output layers, routers,
time embeddings. Real PEFT around small networks; nothing is computed but where two orders are compared."""

from __future__ import annotations

from typing import Any

import peft
import pytest
import torch
from torch import nn
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from octavo import fp8

SMALL: dict[str, Any] = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 96, "pad_token_id": 0,
}  # fmt: skip
ADAPTER = "adapter stays in high precision unless a rule names it"
OUTPUT = "output layer stays in high precision unless a rule names it"


class Net(nn.Module):
    """Two layers, and a third one that PEFT may save whole."""

    def __init__(self, size: int = 64) -> None:
        super().__init__()
        self.q_proj, self.v_proj, self.last = (nn.Linear(size, size) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.v_proj(self.q_proj(x)))


def network() -> Net:
    torch.manual_seed(0)
    return Net()


def planned(model: nn.Module, policy: Any = "blockwise") -> dict[str, str | None]:
    """The reason of each row in high precision, None in FP8, by name."""
    return {row.name: None if row.fp8 else row.reason for row in fp8.plan(model, policy).rows}


def lora(**more: Any) -> peft.LoraConfig:
    return peft.LoraConfig(**{"r": 4, "target_modules": ["q_proj", "v_proj"], "init_lora_weights": False, **more})


KINDS = {
    "lora": lora(),
    "dora": lora(use_dora=True),
    "rslora and a bias": lora(use_rslora=True, lora_bias=True),
    "loha": peft.LoHaConfig(r=4, target_modules=["q_proj"]),
    "lokr": peft.LoKrConfig(r=4, target_modules=["q_proj"]),
    "ia3": peft.IA3Config(target_modules=["q_proj"], feedforward_modules=[]),
    "oft": peft.OFTConfig(oft_block_size=8, target_modules=["q_proj"]),
    "vera": peft.VeraConfig(r=4, target_modules=["q_proj"]),
    "whole": lora(modules_to_save=["last"]),
}


@pytest.mark.parametrize("kind", KINDS)
def test_adapters_stay_in_high_precision(kind: str) -> None:
    model = peft.get_peft_model(network(), KINDS[kind])
    stock = {"base_model.model.q_proj.base_layer", "base_model.model.v_proj", "base_model.model.last"}
    stock |= {"base_model.model.v_proj.base_layer"}
    for name, reason in planned(model).items():
        if name in stock:
            assert reason is None, name
        else:
            assert reason in (
                ADAPTER,
                "original of a modules_to_save copy stays in high precision unless a rule names it",
            )
    plan = fp8.plan(model)
    fp8.apply(model, plan)
    with fp8.count_gemms() as counts:
        model(torch.randn(4, 64)).sum().backward()
    ran = {name for (name, _, how), count in counts.items() if count and how != "high"}
    assert ran and ran <= stock


def test_order_of_peft_and_apply_does_not_matter() -> None:
    x = torch.randn(5, 64)
    results = []
    for wrap_first in (True, False):
        model: Any = network()
        if not wrap_first:
            fp8.apply(model, fp8.plan(model))
        torch.manual_seed(1)
        model = peft.get_peft_model(model, lora())
        if wrap_first:
            fp8.apply(model, fp8.plan(model))
        model.add_adapter("second", lora(r=8))
        model.set_adapter("second")
        y = model(x)
        y.sum().backward()
        a = model.base_model.model.q_proj.lora_A["second"]
        assert type(a) is nn.Linear and a.weight.grad is not None
        results.append((y, a.weight.grad))
    assert all(torch.equal(*pair) for pair in zip(*results, strict=True))


@pytest.mark.parametrize("match", ["**.lora_A.*", "**.q_proj.lora_?.default", "base_model.model.q_proj.lora_A.default"])
def test_rule_with_adapter_name_applies(match: str) -> None:
    policy = fp8.Policy("blockwise", rules=(fp8.Rule(match, recipe="rowwise"),))
    assert planned(peft.get_peft_model(network(), lora()), policy)["base_model.model.q_proj.lora_A.default"] is None


@pytest.mark.parametrize("match", ["**", "**.q_proj.**", "**.q_proj.*_layer"])
def test_wildcard_rule_does_not_apply_to_adapter(match: str) -> None:
    policy = fp8.Policy("off", rules=(fp8.Rule(match, recipe="rowwise"), fp8.Rule("**.base_layer", recipe="rowwise")))
    assert planned(peft.get_peft_model(network(), lora()), policy)["base_model.model.q_proj.lora_A.default"] == ADAPTER


def test_prompt_encoders_stay_in_high_precision() -> None:
    for config in (
        peft.PromptEncoderConfig(task_type="CAUSAL_LM", num_virtual_tokens=2, encoder_hidden_size=32),
        peft.PrefixTuningConfig(
            task_type="CAUSAL_LM", num_virtual_tokens=2, prefix_projection=True, encoder_hidden_size=32
        ),
    ):  # fmt: skip
        reasons = planned(peft.get_peft_model(LlamaForCausalLM(LlamaConfig(**SMALL)), config))
        own = {name: reason for name, reason in reasons.items() if name.startswith("prompt_encoder.")}
        assert own and set(own.values()) == {ADAPTER}
        assert [r for name, r in reasons.items() if name.endswith("down_proj")] == [None, None]


def test_wrapped_layers_keep_their_kind() -> None:
    """A head, a classifier and a router keep their kind when PEFT wraps them; the experts that it adds to do not run
    from codes."""
    config = lora(target_modules=["lm_head", "q_proj"])
    model = peft.get_peft_model(LlamaForCausalLM(LlamaConfig(**SMALL)), config)
    reasons = planned(model)
    assert reasons["base_model.model.lm_head.base_layer"] == "lm_head stays in high precision"
    assert reasons["base_model.model.lm_head.lora_A.default"] == ADAPTER
    moe = Qwen3MoeForCausalLM(
        Qwen3MoeConfig(**SMALL, moe_intermediate_size=32, num_experts=4, num_experts_per_tok=2, head_dim=16)
    )
    config = lora(target_modules=["q_proj"], target_parameters=["mlp.experts.gate_up_proj"], modules_to_save=["gate"])
    reasons = planned(peft.get_peft_model(moe, config))
    of_experts = [reason for name, reason in reasons.items() if name.endswith(("gate_up_proj", "down_proj"))]
    assert of_experts and all(reason and "sum of a base and PEFT's adapter" in reason for reason in of_experts)
    assert all(reason for name, reason in reasons.items() if ".gate." in name)


def test_expert_adapters_after_apply_are_rejected_with_fix() -> None:
    config = Qwen3MoeConfig(**SMALL, moe_intermediate_size=32, num_experts=4, num_experts_per_tok=2, head_dim=16)
    moe = Qwen3MoeForCausalLM(config)
    fp8.apply(moe, fp8.plan(moe))
    model = peft.get_peft_model(moe, lora(target_modules=["q_proj"], target_parameters=["mlp.experts.gate_up_proj"]))
    with pytest.raises(RuntimeError, match="fp8.plan after get_peft_model"):
        model(input_ids=torch.arange(5, 9)[None])


def test_output_layers_stay_in_high_precision() -> None:
    plain = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 10))
    assert planned(plain) == {"0": None, "2": OUTPUT}
    assert planned(plain, fp8.Policy("blockwise", rules=(fp8.Rule("2", recipe="rowwise"),)))["2"] is None
    assert planned(plain, fp8.Policy("blockwise", rules=(fp8.Rule("*", recipe="rowwise"),)))["2"] == OUTPUT
    assert planned(nn.Sequential(nn.Linear(256, 10))) == {"0": None}, "what a caller plans by itself is meant"
    two = nn.ModuleDict({"body": nn.Linear(64, 64), "policy": nn.Linear(64, 12), "value": nn.Linear(64, 1)})
    assert planned(two) == {"body": None, "policy": OUTPUT, "value": OUTPUT}
    reward = LlamaForSequenceClassification(LlamaConfig(**SMALL, num_labels=64))
    assert planned(reward)["score"] == OUTPUT
    inner = nn.ModuleDict({"body": nn.Linear(64, 64), "v_head": nn.ModuleDict({"summary": nn.Linear(64, 64)})})
    assert planned(inner)["v_head.summary"] == OUTPUT and planned(inner)["body"] is None


def test_wide_last_layer_has_note() -> None:
    wide = fp8.plan(nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 200)))
    assert all(row.fp8 for row in wide.rows)
    assert wide.notes[0] == (
        "2 (200 x 256) is the last layer and runs in FP8; if it is the output head, "
        "Rule('2', recipe='off') keeps it in high precision"
    )
    off = fp8.plan(
        nn.Sequential(nn.Linear(64, 256), nn.Linear(256, 200)), fp8.Policy(rules=({"match": "1", "recipe": "off"},))
    )
    stack = fp8.plan(nn.Sequential(*(nn.Linear(64, 64) for _ in range(3))))
    for plan in (off, stack):
        assert not any("output head" in note for note in plan.notes)


def test_time_embeddings_and_custom_routers_stay() -> None:
    class Mixture(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.assign = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 32))
            self.experts = nn.ModuleList(nn.Linear(64, 64) for _ in range(32))

    model = nn.ModuleDict(
        {"time_embedding": nn.ModuleDict({"linear_1": nn.Linear(64, 256)}), "moe": Mixture(), "out": nn.Linear(64, 64)}
    )
    reasons = planned(model)
    assert reasons.pop("time_embedding.linear_1") == "time embedding stays in high precision unless a rule names it"
    assert reasons.pop("moe.assign.1") == "router stays in high precision unless a rule names it"
    assert not any(reasons.values())


def test_percentages_have_no_exponent() -> None:
    policy = fp8.Policy("blockwise", rules=(fp8.Rule("2", recipe="blockwise"),))
    notes = " ".join(fp8.plan(nn.Sequential(nn.Linear(256, 256), nn.GELU(), nn.Linear(256, 10)), policy).notes)
    assert "e+" not in notes and "2: 10 x 256 padded to 128 x 256, 433 % more" in notes


@pytest.mark.parametrize(
    "config",
    [
        peft.RandLoraConfig(r=4, target_modules=["q_proj"]),
        peft.VBLoRAConfig(r=4, num_vectors=4, vector_length=32, target_modules=["q_proj"]),
    ],
    ids=["randlora", "vblora"],
)
def test_linear_subclass_wrappers_are_skipped(config: peft.PeftConfig) -> None:
    """The layer inside is the one that multiplies; the wrapper has no weight."""
    rows = {row.name: row for row in fp8.plan(peft.get_peft_model(Net(), config), "rowwise").rows}
    assert rows["base_model.model.q_proj.base_layer"].fp8 and "base_model.model.q_proj" not in rows
