"""Tensors of a reference that are missing in a folder are reported."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from octavo.checkpoint import verify
from octavo.checkpoint.verify import VerifyResult
from octavo.cli.main import main
from octavo.models.tiny import tiny
from tests.checkpoint import folders
from tests.checkpoint.folders import Good

LAYER = "model.layers.1."


@pytest.fixture(scope="module")
def qwen3_5(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of a family whose folders hold layers for multi-token prediction, which transformers leaves out."""
    return tiny.write("qwen3_5", tmp_path_factory.mktemp("tiny") / "qwen3_5", size="mini")


@pytest.fixture
def copy(good: Good, tmp_path: Path) -> Callable[..., Path]:
    def get(source: Path | str = "plain", model: str = "qwen3", name: str = "base") -> Path:
        return Path(shutil.copytree(good(source, model) if isinstance(source, str) else source, tmp_path / name))

    return get


def add(folder: Path, more: Mapping[str, Tensor]) -> None:
    file = folder / "model.safetensors"
    if not file.exists():
        for name, tensor in more.items():
            folders.put(folder, name, tensor, beside=folders.Q)
        return
    save_file(load_file(file) | dict(more), file, metadata={"format": "pt"})


def found(verified: VerifyResult, status: str = "fail") -> dict[str, set[str]]:
    """Kind -> the tensors of its findings."""
    of: dict[str, set[str]] = {}
    for finding in verified.findings:
        if finding.status == status:
            of.setdefault(finding.kind, set()).add(finding.tensor)
    return of


def prediction(folder: Path) -> dict[str, Tensor]:
    width = json.loads((folder / "config.json").read_text())["text_config"]["hidden_size"]
    return {"mtp.fc.weight": torch.randn(width, 2 * width), "mtp.norm.weight": torch.ones(width)}


def test_unplaced_tensors_are_reported(good: Good, copy: Callable[..., Path]) -> None:
    base = copy()
    add(base, {"score.weight": torch.randn(2, 256), "model.extra_adapter.weight": torch.randn(8, 8)})
    verified = verify(good("fp8-block"), against=base)
    assert found(verified) == {"against-names": {"score.weight", "model.extra_adapter.weight"}}
    assert all("no place for it" in finding.text for finding in verified.failures)


def test_command_names_every_tensor_without_a_counterpart(good: Good, copy: Callable[..., Path], capsys) -> None:
    base, lost = copy(), [f"model.extra_{number}.weight" for number in range(6)]
    add(base, {name: torch.randn(8, 8) for name in lost})
    assert main(["verify", str(good("fp8-block")), "--against", str(base)]) == 1
    printed = " ".join(capsys.readouterr().out.split())
    assert all(name in printed for name in lost) and "and 3 more of this kind (--all lists them): model" in printed


def test_missing_layer_is_reported(good: Good, copy: Callable[..., Path]) -> None:
    folder = copy()
    lost = [name for name in folders.values_of("qwen3") if name.startswith(LAYER)]
    for name in lost:
        folders.put(folder, name, None)
    folders.edit_json(folder / "config.json", lambda raw: raw.update(num_hidden_layers=1, layer_types=None))
    assert verify(folder, quick=True).ok
    assert found(verify(folder, against=good("plain"))) == {"against-names": set(lost)}
    assert LAYER in str(found(verify(good("plain"), against=folder))["against-names"])


def test_unknown_prefix_is_reported(good: Good, copy: Callable[..., Path]) -> None:
    base = copy()
    folders.put(base, "base_model.model." + folders.Q, folders.get(base, folders.Q), beside=folders.Q)
    folders.put(base, folders.Q, None)
    verified = verify(good("plain"), against=base)
    assert found(verified)["against-names"] == {"base_model.model." + folders.Q, folders.Q}


def test_untied_head_of_the_reference_is_reported(good: Good, copy: Callable[..., Path]) -> None:
    base = copy("plain", "qwen3_tied")
    embedding = folders.get(base, "model.embed_tokens.weight")
    folders.put(base, "lm_head.weight", embedding, beside=folders.Q)
    assert verify(good("plain", "qwen3_tied"), against=base).ok  # the same values, tied here
    folders.put(base, "lm_head.weight", embedding * 2)
    verified = verify(good("plain", "qwen3_tied"), against=base)
    assert found(verified) == {"against-names": {"lm_head.weight"}} and "tie_word_embeddings" in verified.sentence()


def test_multi_token_prediction_layers_are_compared(qwen3_5: Path, copy: Callable[..., Path]) -> None:
    base = copy(qwen3_5)
    more = prediction(base)
    add(base, more)
    verified = verify(qwen3_5, against=base)
    assert verified.ok and found(verified, "warn") == {"against-dropped": {"mtp.fc.weight"}}
    [finding] = verified.warnings
    assert "2 tensors" in finding.text and "mtp.fc.weight, mtp.norm.weight" in finding.text
    assert "not in the reference" in verify(base, against=qwen3_5).warnings[0].text
    carried = copy(base, name="carried")
    same = verify(carried, against=base)
    assert same.findings == () and {"mtp.fc.weight", "mtp.norm.weight"} <= {one.tensor for one in same.compared}
    add(carried, {"mtp.fc.weight": more["mtp.fc.weight"] * 2})
    assert found(verify(carried, against=base)) == {"against-values": {"mtp.fc.weight"}}
    add(carried, {"mtp.fc.weight": torch.ones(4, 4)})
    assert found(verify(carried, against=base)) == {"against-shape": {"mtp.fc.weight"}}
