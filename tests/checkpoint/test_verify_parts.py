"""Parts of a verification: pieces, bounds, skip lists by each loader's rule, shapes, verdicts, the CLI."""

from __future__ import annotations

import ast
import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from string import Formatter

import pytest
import torch

from octavo.checkpoint import CheckpointError, verify
from octavo.checkpoint.verify import compare_source as verify_against
from octavo.checkpoint.verify import headers as verify_headers
from octavo.checkpoint.verify import loaders as verify_loaders
from octavo.checkpoint.verify.findings import VERDICTS
from octavo.checkpoint.verify.sentences import SENTENCES
from octavo.cli.main import main
from octavo.models.folder.quantization import matches_parts
from tests.checkpoint import folders, planted
from tests.checkpoint.folders import Good


@pytest.fixture
def copy(good: Good, tmp_path: Path) -> Good:
    def get(form: str, model: str = "qwen3") -> Path:
        return Path(shutil.copytree(good(form, model), tmp_path / form))

    return get


def kinds(folder: Path, **more: object) -> set[str]:
    return {f.kind for f in verify(folder, **more).findings}


def test_piece_size_does_not_change_findings(good: Good, copy: Good, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = copy("fp8-block")
    planted.nan_block(folder)
    planted.transposed_square_scale(folder)
    whole = verify(folder, against=good("plain"))
    monkeypatch.setattr(verify_headers, "PIECE", 20000)
    monkeypatch.setattr(verify_against, "PIECE", 20000)
    seen: list[tuple[int, int, str]] = []
    parts = verify(folder, against=good("plain"), progress=lambda done, total, what: seen.append((done, total, what)))
    assert parts.findings == whole.findings and {f.kind for f in whole.findings} == {"nan-codes", "against-values"}
    assert [(c.tensor, c.status) for c in parts.compared] == [(c.tensor, c.status) for c in whole.compared]
    assert all(0 <= done <= total for done, total, _ in seen) and len(seen) > 20


def test_trained_values_are_not_reported_as_garbage(good: Good, copy: Good, tmp_path: Path) -> None:
    """A trained model beside the one it began with: codes and scales are sound, and rows that were zero are not."""
    shutil.copytree(good("plain"), tmp_path / "untrained")
    folders.put(tmp_path / "untrained", folders.Q, folders.get(tmp_path / "untrained", folders.Q) * 0)
    for form in ("plain", "fp8-block"):
        verified = verify(good(form), against=tmp_path / "untrained")
        (finding,) = verified.failures
        assert finding.kind == "against-values" and "a trained or merged model, the wrong reference" in finding.text
        assert form != "plain" or "(rows that should be equal differ)" in finding.text
        assert "e+2" not in finding.text and {(v.verdict, v.warns) for v in verified.verdicts} == {("unknown", False)}


def test_damaged_tensor_is_judged_by_its_worst_row(good: Good, copy: Good) -> None:
    """One row of 256 off by a factor of 4 moves the whole by little, and that row by much."""
    folder = copy("fp8-block")
    codes = folders.get(folder, folders.Q)
    codes[100] = (codes[100].float() / 4).to(torch.float8_e4m3fn)
    folders.put(folder, folders.Q, codes)
    worst = verify(folder, against=good("plain")).compared[0]
    assert worst.tensor == folders.Q and worst.status == "bad" and worst.error < worst.bound * 2


@pytest.mark.parametrize(
    "plant, words",
    [
        (planted.transposed_square_scale, "transposed"),
        (planted.reciprocal_scale, "reciprocals"),
        (planted.squared_scale, "squared"),
        (planted.scales_of_one, ""),
        (planted.unscaled_cast, "lost or never computed"),
    ],
)
def test_cause_of_error_is_reported(plant: Callable[[Path], None], words: str, good: Good, copy: Good) -> None:
    folder = copy("fp8-block")
    plant(folder)
    assert words in " ".join(f.text for f in verify(folder, against=good("plain")).failures)


def test_fp8_folders_are_compared_by_codes(good: Good, copy: Good) -> None:
    folder = copy("fp8-block")
    same = verify(folder, against=good("fp8-block"))
    assert {c.codes for c in same.compared if c.tensor.endswith("_proj.weight")} == {"identical"}
    assert all(c.error == 0 for c in same.compared)
    other = verify(good("ct-row"), against=good("fp8-block"))
    assert other.ok and other.compared[0].error > 0.01


def test_dequantized_folder_matches_its_codes(good: Good, copy: Good) -> None:
    folder = copy("plain")
    for name in folders.values_of("qwen3"):
        if folders.is_linear(name):
            folders.put(folder, name, folders.values_on_disk(good("fp8-block"), name).to(torch.bfloat16))
    verified = verify(folder, against=good("fp8-block"))
    assert verified.ok and not verified.findings and verified.compared[0].error < 2**-8


def test_reference_of_another_model_is_reported(good: Good) -> None:
    assert "against-names" in kinds(good("plain"), against=good("plain", "qwen3_moe"))
    with pytest.raises(CheckpointError, match="leave one out"):
        verify(good("plain"), against=good("plain"), quick=True)


def test_broken_reference_is_rejected(good: Good, copy: Good) -> None:
    folder = copy("plain")
    planted.truncated_shard(folder)
    with pytest.raises(CheckpointError, match="the reference .* cannot be used: .* truncated"):
        verify(good("plain"), against=folder)


def test_bf16_and_e8m0_scales_are_accepted(good: Good, copy: Good, tmp_path: Path) -> None:
    folder = copy("fp8-block")
    for name in folders.values_of("qwen3"):
        if folders.is_linear(name):
            folders.rescale(folder, lambda s: s.to(torch.bfloat16), name)
    assert not verify(folder, against=good("plain")).findings
    for name, value in folders.values_of("qwen3").items():
        if folders.is_linear(name):
            s = torch.exp2(torch.ceil(torch.log2(folders.cast(value, "fp8-block")[1])))
            wide = s.repeat_interleave(128, 0).repeat_interleave(128, 1)
            folders.put(folder, name, (value.float() / wide).to(torch.float8_e4m3fn))
            folders.rescale(folder, lambda _, s=s: s.to(torch.float8_e8m0fnu), name)
    assert "scale-dtype" in kinds(folder)
    folders.edit_json(folder / "config.json", lambda raw: raw["quantization_config"].update(scale_fmt="ue8m0"))
    assert not verify(folder, against=good("plain")).findings


def _resize(folder: Path, key: str, value: int, changes: dict[str, tuple[int, int]]) -> None:
    """Other widths: config.json and the named matrices, quantized again in blocks."""
    folders.edit_json(folder / "config.json", lambda raw: raw.update({key: value}))
    for layer in (0, 1):
        for leaf, (n, k) in changes.items():
            name = f"model.layers.{layer}.{leaf}.weight"
            codes, scale = folders.cast(torch.randn(n, k) * 0.1, "fp8-block")
            folders.put(folder, name, codes)
            folders.put(folder, f"{name}_scale_inv", scale)


@pytest.mark.parametrize(
    "width, found",
    [
        (192, {"block-n", "block-k", "block-ragged"}),  # gate in front of up; down's K; up's N
        (320, {"block-n", "block-k", "block-ragged"}),
        (512, set()),
    ],
)
def test_widths_that_are_not_block_multiples_are_reported(width: int, found: set[str], copy: Good) -> None:
    folder = copy("fp8-block")
    shapes = {"mlp.gate_proj": (width, 256), "mlp.up_proj": (width, 256), "mlp.down_proj": (256, width)}
    _resize(folder, "intermediate_size", width, shapes)
    verified = verify(folder)
    assert {f.kind for f in verified.findings} == found
    if found:
        assert [v.verdict for v in verified.verdicts] == ["ok", "refuses", "refuses"] and verified.verdicts[0].warns


def test_sglang_matches_whole_name_parts() -> None:
    assert matches_parts("model.layers.0.mlp.gate", ["model.layers.0.mlp.gate"])
    assert matches_parts("model.layers.0.mlp.gate", ["layers.0.mlp"])
    assert matches_parts("visual.blocks.0.attn.qkv", ["model.visual"])
    assert not matches_parts("model.layers.0.mlp.gate_proj", ["model.layers.0.mlp.gate"])
    assert not matches_parts("model.layers.11.mlp.gate", ["layers.1"])


@pytest.mark.parametrize(
    "form, entry, loaders",
    [
        ("fp8-block", "model.layers.1", "transformers and SGLang"),  # a prefix: exact names do not know it
        ("fp8-block", "model.layers.1.mlp.*", "transformers"),  # an expression
        ("fp8-block", folders.DOWN.removesuffix(".weight"), "transformers, vLLM and SGLang"),
        ("ct-row", "re:.*layers.1.mlp.*", "transformers, vLLM and SGLang"),
        ("ct-row", "Linear", "transformers"),  # a class: servers compare names
    ],
)
def test_skip_entry_is_judged_by_each_loaders_rule(form: str, entry: str, loaders: str, copy: Good) -> None:
    folder = copy(form)
    folders.skip_list(folder, lambda names: names.append(entry))
    finding = next(f for f in verify(folder, quick=True).failures if f.tensor == folders.DOWN)
    assert finding.kind == "skip-covers-fp8" and f"but {loaders} leave" in finding.text
    assert repr(entry) in finding.text


def test_skip_list_accepts_module_and_disk_names(copy: Good) -> None:
    """Vision layers under the name without `model.`, as vLLM has them, beside the full ones."""
    folder = copy("fp8-block", "qwen3_vl")
    folders.skip_list(folder, lambda names: names.extend([n.removeprefix("model.") for n in names if "visual" in n]))
    assert not verify(folder, quick=True).findings


def test_values_on_the_e4m3_grid_are_reported(copy: Good) -> None:
    folder = copy("plain")
    folders.put(folder, folders.Q, folders.get(folder, folders.Q).to(torch.float8_e4m3fn).to(torch.bfloat16))
    folders.put(folder, folders.DOWN, torch.zeros(256, 384, dtype=torch.bfloat16))
    verified = verify(folder)
    assert verified.ok and {f.kind for f in verified.findings} == {"cast-through-fp8", "zero-weight"}


def test_each_finding_has_a_sentence_and_a_consequence() -> None:
    """Each check gives its sentence the values that it names, and no others."""
    kinds: set[str] = set()
    for file in Path(verify_loaders.__file__).parent.glob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            called = isinstance(node, ast.Call) and getattr(node.func, "attr", getattr(node.func, "id", ""))
            if called not in ("fail", "warn", "add") or not node.args or not isinstance(node.args[0], ast.Constant):
                continue
            kind, given = node.args[0].value, {keyword.arg for keyword in node.keywords}
            if file.name != "adapter.py":
                kinds.add(kind.partition("/")[0])
            if not given & {"text", None}:  # None: a dictionary of values
                fields = [field for _, field, _, _ in Formatter().parse(SENTENCES[kind]) if field]
                wanted = {re.split(r"[.\[]", field)[0] for field in fields}
                assert not given - wanted - {"tensor"}, kind
                assert wanted - given <= {"file", "name"} or wanted - given <= {"tensor", "shape"}, kind
    kinds |= {kind.partition("/")[0] for kind in SENTENCES if not kind.startswith("adapter-")}
    assert kinds <= verify_loaders.CONSEQUENCES.keys()
    for does in verify_loaders.CONSEQUENCES.values():
        assert does.keys() <= {"transformers", "vLLM", "SGLang"}
        assert all(d.verdict in VERDICTS for d in does.values())


def test_verify_command(good: Good, copy: Good, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", str(good("fp8-block")), "--against", str(good("plain"))]) == 0
    out = capsys.readouterr().out
    assert "FP8, fp8 block 128x128" in out and "No problems found, no warnings." in out and "worst first" in out
    folder = copy("fp8-block")
    planted.dropped_scale(folder)
    planted.skip_list_names_nothing(folder)
    assert main(["verify", str(folder)]) == 1
    out = capsys.readouterr().out
    assert f"fail: {folders.Q!r}" in out and "1 problem, 1 warning." in out
    assert main(["verify", str(folder), "--json", "--quick"]) == 1
    document = json.loads(capsys.readouterr().out)
    assert document["ok"] is False and document["scanned"] is False
    assert document["findings"][0]["kind"] == "scale-missing" and set(document["verdicts"]) == {
        "transformers",
        "vLLM",
        "SGLang",
    }
    assert main(["verify", str(folder / "none")]) == 2
    assert "is not a folder" in capsys.readouterr().err
    assert main(["verify", str(folder), "--quick", "--against", str(folder)]) == 2


RUN = {
    "dropped_scale": "loads, wrong answers",
    "quantization_config_lost": "loads, wrong answers",
    "transposed_scale": "refuses",
    "truncated_shard": "refuses",
    "missing_tensor": "loads, wrong answers",
    "nan_block": "loads, wrong answers",
    "extra_tensor": "ok",
}


@pytest.mark.long
@pytest.mark.parametrize("name", RUN)
def test_transformers_behaves_as_predicted(name: str, good: Good, copy: Good) -> None:
    from safetensors import SafetensorError
    from transformers import AutoModelForCausalLM

    def logits(folder: Path) -> tuple[torch.Tensor, dict]:
        model, info = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, output_loading_info=True)
        with torch.no_grad():
            return model(torch.arange(16)[None]).logits.float(), {k: v for k, v in info.items() if v}

    wanted, _ = logits(good("fp8-block"))
    folder = copy("fp8-block")
    getattr(planted, name)(folder)
    verdict = verify(folder).verdicts[0]
    assert verdict.verdict == RUN[name] and verdict.source.startswith("run")
    try:
        found, info = logits(folder)
    except (RuntimeError, SafetensorError) as error:
        assert RUN[name] == "refuses" or "same dtype" in str(error)
        return
    same = torch.equal(found, wanted)
    assert (RUN[name] == "ok") == same or info.get("missing_keys")
