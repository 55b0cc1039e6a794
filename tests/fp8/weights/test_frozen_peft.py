"""Stock PEFT over a frozen FP8 base: what reads weights works, what writes them is refused with the way out."""

from __future__ import annotations

from typing import Any

import peft
import pytest
import torch
from torch import nn

from octavo import fp8


class Base(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.q_proj, self.o_proj = (nn.Linear(64, 64, dtype=torch.bfloat16) for _ in range(2))
        for layer in (self.q_proj, self.o_proj):
            layer.weight = fp8.freeze_weight(layer.weight, "row")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.o_proj(torch.relu(self.q_proj(x)))


def base(applied: bool = True) -> Base:
    model = Base()
    return fp8.apply(model, fp8.plan(model, "rowwise")) if applied else model


def lora(**more: Any) -> peft.LoraConfig:
    return peft.LoraConfig(r=4, target_modules=["q_proj"], **more)


READ = {
    "dora": lora(use_dora=True),
    "orthogonal": lora(init_lora_weights="orthogonal"),
    "mica": lora(init_lora_weights="mica"),
    "loha": peft.LoHaConfig(r=4, target_modules=["q_proj"]),
    "oft": peft.OFTConfig(oft_block_size=8, target_modules=["q_proj"]),
    "boft": peft.BOFTConfig(boft_block_size=8, target_modules=["q_proj"]),
    "hra": peft.HRAConfig(r=4, target_modules=["q_proj"]),
    "ia3": peft.IA3Config(target_modules=["q_proj"], feedforward_modules=[]),
}


@pytest.mark.parametrize("applied", [True, False], ids=["FP8 layers", "stock layers"])
@pytest.mark.parametrize("kind", READ)
def test_adapters_that_read_base_train(kind: str, applied: bool) -> None:
    model = base(applied)
    before = fp8.fingerprint(model)
    wrapped = peft.get_peft_model(model, READ[kind])
    wrapped(torch.randn(3, 64, dtype=torch.bfloat16)).float().square().sum().backward()
    trained = [p for p in wrapped.parameters() if p.requires_grad]
    assert trained and all(p.grad is not None for p in trained)
    assert fp8.fingerprint(wrapped.base_model.model) == before


def test_dora_starts_from_norms_of_values() -> None:
    model = base()
    wrapped = peft.get_peft_model(model, lora(use_dora=True))
    layer = wrapped.base_model.model.q_proj
    values = layer.base_layer.weight.dequantize().float()
    magnitude = layer.lora_magnitude_vector["default"].weight
    assert torch.allclose(magnitude.float(), values.norm(dim=1), rtol=2**-7)


@pytest.mark.parametrize("start", ["olora", "pissa", "pissa_niter_2"])
@pytest.mark.parametrize("dora", [True, False])
def test_inits_that_change_base_are_rejected_by_name(start: str, dora: bool) -> None:
    name = start.partition("_")[0]
    with pytest.raises(
        RuntimeError, match=f"start '{name}' of adapter 'mine'.*another init_lora_weights.*fp8.dequantize_weights"
    ):
        peft.get_peft_model(base(), lora(init_lora_weights=start, use_dora=dora), adapter_name="mine")
    thawed = peft.get_peft_model(fp8.dequantize_weights(base(applied=False)), lora(init_lora_weights=start))
    assert thawed(torch.randn(3, 64, dtype=torch.bfloat16)).isfinite().all()


@pytest.mark.parametrize("kind", ["dora", "orthogonal", "ia3", "loha"])
@pytest.mark.parametrize("how", ["merge_and_unload", "safe merge_and_unload", "merge_adapter"])
def test_merge_error_names_octavo_merge(kind: str, how: str) -> None:
    model = peft.get_peft_model(base(), READ[kind])
    before = fp8.fingerprint(model.base_model.model)
    more = {"safe_merge": True} if how.startswith("safe") else {}
    with pytest.raises(RuntimeError, match="frozen FP8 weight.*`octavo merge`.*fp8.dequantize_weights"):
        getattr(model, how.removeprefix("safe "))(**more)
    assert fp8.fingerprint(model.base_model.model) == before


def test_other_peft_writes_are_named() -> None:
    shira = peft.get_peft_model(base(), peft.ShiraConfig(r=4, target_modules=["q_proj"]))
    with pytest.raises(RuntimeError, match="peft.tuners.shira.*writes to the base.*such as LoRA or DoRA"):
        shira(torch.randn(3, 64, dtype=torch.bfloat16))
    with pytest.raises(RuntimeError, match="modules_to_save trains a copy.*leave the layer out"):
        peft.get_peft_model(base(), lora(modules_to_save=["o_proj"]))
    with pytest.raises(RuntimeError, match="preparation for bitsandbytes casts weights to fp32: leave it out"):
        peft.prepare_model_for_kbit_training(base(), use_gradient_checkpointing=False)


def test_weighted_adapters_can_be_combined() -> None:
    model: Any = peft.get_peft_model(base(), lora(use_dora=False, init_lora_weights=False))
    model.add_adapter("other", lora(init_lora_weights=False))
    model.add_weighted_adapter(["default", "other"], [0.5, 0.5], "both", combination_type="linear")
    model.set_adapter("both")
    assert model(torch.randn(3, 64, dtype=torch.bfloat16)).isfinite().all()
