"""PEFT adapter folders: complete ones pass, also with their base; problems of others are reported."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load, save_file
from torch import Tensor

from octavo.checkpoint import verify
from octavo.models.tiny import tiny

LAYER = "base_model.model.model.layers.0.self_attn.q_proj"
A, B = f"{LAYER}.lora_A.weight", f"{LAYER}.lora_B.weight"
WEIGHTS = "adapter_model.safetensors"


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.write("qwen3", tmp_path_factory.mktemp("base") / "qwen3", size="mini")


@pytest.fixture
def adapter(tmp_path: Path, base: Path) -> Path:
    """Rank 4 on two layers of the mini Qwen3 (hidden 64, q 128 wide, MLP 128 wide)."""
    folder = tmp_path / "adapter"
    folder.mkdir()
    up = LAYER.replace("self_attn.q_proj", "mlp.up_proj")
    tensors = {
        A: torch.randn(4, 64),
        B: torch.randn(128, 4),
        f"{up}.lora_A.weight": torch.randn(4, 64),
        f"{up}.lora_B.weight": torch.randn(128, 4),
    }
    save_file(tensors, folder / WEIGHTS, {"format": "pt"})
    config = {
        "peft_type": "LORA",
        "r": 4,
        "lora_alpha": 8,
        "target_modules": ["q_proj", "up_proj"],
        "base_model_name_or_path": str(base),
    }
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


def tensors(change: Callable[[dict[str, Tensor]], object]) -> Callable[[Path], None]:
    def plant(folder: Path) -> None:
        found = load((folder / WEIGHTS).read_bytes())
        change(found)
        save_file(found, folder / WEIGHTS, {"format": "pt"})

    return plant


def config(**changes: object) -> Callable[[Path], None]:
    def plant(folder: Path) -> None:
        file = folder / "adapter_config.json"
        raw = {**json.loads(file.read_text()), **changes}
        file.write_text(json.dumps({k: v for k, v in raw.items() if v is not None}))

    return plant


def only_a_pickle(folder: Path) -> None:
    (folder / WEIGHTS).unlink()
    torch.save({"a": torch.zeros(1)}, folder / "adapter_model.bin")


def test_complete_adapters_pass(adapter: Path, base: Path) -> None:
    for verified in (verify(adapter), verify(adapter, base), verify(adapter, quick=True)):
        assert verified.findings == () and verified.ok
        assert {v.verdict for v in verified.verdicts} == {"ok"}
        assert verified.form == "PEFT adapter, rank 4"


@pytest.mark.parametrize(
    "plant, kind, word",
    [
        (tensors(lambda t: t.pop(B)), "adapter-half", "lora_B"),
        (tensors(lambda t: t.update({B: torch.randn(128, 3)})), "adapter-shape", "rank in common"),
        (tensors(lambda t: t.update({A: torch.randn(4, 32)})), "adapter-shape", "adds [128, 32]"),
        (tensors(lambda t: t.update({A: torch.randn(3, 64), B: torch.randn(128, 3)})), "adapter-rank", "rank 3"),
        (tensors(lambda t: t.update({A: t[A].to(torch.float8_e4m3fn)})), "adapter-dtype", "F8_E4M3"),
        (tensors(lambda t: t[A].view(-1)[:1].fill_(float("nan"))), "nan-values", "NaN"),
        (tensors(lambda t: t.update({f"x.{A}": t.pop(A)})), "adapter-names", "PEFT's name"),
        (
            tensors(lambda t: t.update({n.replace("q_proj", "qq_proj"): t.pop(n) for n in (A, B)})),
            "adapter-layer",
            "qq_proj",
        ),
        (tensors(lambda t: t.clear() or t.update(a=torch.zeros(1))), "adapter-empty", "no lora_A"),
        (config(peft_type="IA3"), "config", "IA3"),
        (config(r=0), "config", "r = 0"),
        (config(lora_alpha=None), "config", "lora_alpha"),
        (only_a_pickle, "only-pickles", "adapter_model.bin"),
    ],
)
def test_damaged_adapters_are_reported(
    plant: Callable[[Path], None], kind: str, word: str, adapter: Path, base: Path
) -> None:
    plant(adapter)
    verified = verify(adapter)
    finding = next(f for f in verified.failures if f.kind == kind)
    assert word in finding.text and not verified.ok
    assert all(v.verdict in ("refuses", "loads, wrong answers") for v in verified.verdicts)


def test_untrained_adapter_and_missing_base_give_warnings(adapter: Path) -> None:
    tensors(lambda t: [b.zero_() for n, b in t.items() if "lora_B" in n])(adapter)
    config(base_model_name_or_path=None)(adapter)
    verified = verify(adapter)
    assert verified.ok and {f.kind for f in verified.warnings} == {"adapter-untrained", "adapter-base"}


def test_servers_refuse_dora(adapter: Path) -> None:
    config(use_dora=True)(adapter)
    assert [v.verdict for v in verify(adapter).verdicts] == ["ok", "refuses", "refuses"]


def test_adapters_that_octavo_writes_pass(tmp_path: Path, base: Path) -> None:
    pytest.importorskip("peft")
    from octavo import adapters, models
    from octavo.config import LoraSection

    for family, more in (("qwen3", {"dora": True}), ("qwen3_moe", {})):
        source = base if family == "qwen3" else tiny.write(family, tmp_path / family, size="mini")
        model = models.load(source)
        adapters.attach(model, models.describe(model), LoraSection(rank=4, **more), lambda text: None)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "lora_B" in name:
                    parameter.add_(0.01)
        out = tmp_path / f"{family}-adapter"
        adapters.save(model, out, str(source))
        verified = verify(out, source)
        assert [f.text for f in verified.findings] == []
