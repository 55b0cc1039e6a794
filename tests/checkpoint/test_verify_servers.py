"""`octavo verify` says of vLLM what vLLM 0.32 did (`server_cases`)."""

from __future__ import annotations

import ast
import inspect
import shutil
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
from transformers import CONFIG_MAPPING

from octavo.checkpoint.stock_model import Linear
from octavo.checkpoint.verify import VerifyResult, verify
from octavo.checkpoint.verify.servers import classes, layout, loading
from octavo.checkpoint.verify.servers.loading import _fits_grid
from octavo.models.tiny import tiny
from tests.checkpoint import server_cases
from tests.checkpoint.server_folders import (
    FORMS,
    GATE,
    HIDDEN,
    NORM,
    OK,
    REFUSES,
    SINGLE,
    UP,
    WRONG,
    Case,
    both,
    drop,
    group,
    q,
    ragged,
    settings,
    stray,
    write,
)

#: the folders for which the column was wrong before its rules were taken from vLLM's loader, and their neighbours
QUICK = (
    "bf16-no-norm1", "bf16-no-down", "bf16-no-embed", "bf16_tied-only-head", "dyn-no-norm1", "dyn-no-down",
    "dyn-no-scale-down", "dyn-down-bf16", "dyn-q-bf16-listed", "dyn-over-bf16", "dyn-qlost", "dyn-down-listed",
    "dyn-stray", "dyn-codes-u8", "tensor-no-scale-v", "bf16-shape-k-rows+", "bf16-kv1", "bf16-stray-single",
    "bf16-duplicate", "ragged-fp8-gateup-n", "ragged-ct-gateup-n", "dyn-extra-g_idx", "bf16-extra-bias-q",
)  # fmt: skip
NAMES = [pytest.param(n, marks=() if n in QUICK else pytest.mark.long) for n in server_cases.CASES]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.write("llama", tmp_path_factory.mktemp("tokenizer") / "llama")


def run(case: Case, tmp_path: Path, tokenizer: Path) -> tuple[VerifyResult, dict[str, str]]:
    verified = verify(write(case, tmp_path / "folder", tokenizer))
    return verified, {verdict.loader: verdict.verdict for verdict in verified.verdicts}


@pytest.mark.parametrize("form", ["bf16", "bf16_tied", *FORMS, "static", "auto", "autostatic"])
def test_good_folders_are_ok(form: str, tmp_path: Path, tokenizer: Path) -> None:
    verified, verdicts = run(Case(form, OK), tmp_path, tokenizer)
    assert verified.ok and verdicts["vLLM"] == verdicts["SGLang"] == OK
    source = next(verdict.source for verdict in verified.verdicts if verdict.loader == "vLLM")
    kernel = " (kernel of the test)" if form not in ("bf16", "bf16_tied", "dyn") else ""
    assert source == f"loaded in vLLM 0.32 on a CPU{kernel}"


@pytest.mark.parametrize("name", NAMES)
def test_verdict_is_what_vllm_did(name: str, tmp_path: Path, tokenizer: Path) -> None:
    case = server_cases.CASES[name]
    verified, verdicts = run(case, tmp_path, tokenizer)
    assert verdicts["vLLM"] == case.vllm, [verdict for verdict in verified.verdicts if verdict.loader == "vLLM"]
    if case.vllm != OK and name != "bf16-no-tokenizer":  # Octavo and transformers load its weights: a warning
        assert not verified.ok  # exit code 1


def _claims(module: ModuleType) -> set[tuple[int, int]]:
    """The first and last lines of the statements in `layout` and `loading` whose prediction is said to have been seen:
    refusals of a config, and events that are not marked as read in the source."""

    def claims(node: ast.AST) -> bool:
        if isinstance(node, ast.Raise):
            return "Refusal(" in ast.unparse(node)
        is_event = isinstance(node, ast.Call) and ast.unparse(node.func) == "self._add"
        return is_event and not any(word.arg == "seen" for word in node.keywords)

    return {(n.lineno, n.end_lineno) for n in ast.walk(ast.parse(inspect.getsource(module))) if claims(n)}


@pytest.mark.long
def test_every_rule_that_vllm_is_said_to_follow_was_seen(
    tmp_path: Path, tokenizer: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each statement that predicts something as "loaded in vLLM" has a case, all of which tests/server loads."""
    lines: set[tuple[str, int]] = set()
    add, refuse = loading._Loading._add, layout.Refusal.__init__

    def note(*_: object) -> None:
        frame = sys._getframe(2)
        lines.add((frame.f_globals["__name__"], frame.f_lineno))

    def noted_add(self: loading._Loading, *args: object, **more: object) -> None:
        if self.run:
            note()
        add(self, *args, **more)

    monkeypatch.setattr(loading._Loading, "_add", noted_add)
    monkeypatch.setattr(layout.Refusal, "__init__", lambda *args: (note(), refuse(*args))[1])
    # Right answers of this one need another model: it is block-qkv-ragged-n in tests/server/folders.py.
    misplaced = {"ragged-misplaced": Case("bf16", WRONG, ragged("fp8-block", "gate_proj", "up_proj", inner=352))}
    for name, case in (server_cases.CASES | misplaced).items():
        verify(write(case, tmp_path / name, tokenizer))
    unseen = [
        f"{module.__name__}:{first}"
        for module in (layout, loading)
        for first, last in sorted(_claims(module))
        if not any((module.__name__, line) in lines for line in range(first, last + 1))
    ]
    assert not unseen, unseen


def test_verdicts_are_three_words() -> None:
    assert {case.vllm for case in server_cases.CASES.values()} == {OK, WRONG, REFUSES}


@pytest.mark.parametrize(
    ("name", "sglang"),
    [
        ("bf16-no-norm1", WRONG),  # nothing is checked after loading
        ("bf16-extra-module", OK),  # left out with a warning
        ("bf16-layers-fewer", WRONG),  # layers beyond the model's are skipped
        ("dyn-qlost", REFUSES),  # the scales of a fused matrix have no parameter
        ("bf16-tie-yes", WRONG),  # the tied head on disk is dropped
    ],
)
def test_sglang_differs_where_its_source_does(name: str, sglang: str, tmp_path: Path, tokenizer: Path) -> None:
    verified, verdicts = run(server_cases.CASES[name], tmp_path, tokenizer)
    assert verdicts["SGLang"] == sglang
    (source,) = [verdict.source for verdict in verified.verdicts if verdict.loader == "SGLang"]
    assert source.startswith("read in its source")


def _move_to_subfolder(folder: Path) -> None:
    (folder / "original").mkdir()
    shutil.copy(folder / SINGLE, folder / "original" / "consolidated.safetensors")


def _write_modelopt(folder: Path) -> None:
    (folder / "hf_quant_config.json").write_text('{"quantization": {"quant_algo": "FP8"}}')


#: folders whose outcome in vLLM was read in its source: case, vLLM's verdict, exit code, words of the first finding
READ_ONLY = {
    "consolidated in a subfolder": (Case("bf16", REFUSES, after=_move_to_subfolder), 1, "move original/"),
    "only a norm in consolidated": (
        Case("bf16", REFUSES, after=stray(NORM, torch.ones(HIDDEN), "consolidated.safetensors")), 1,
        "delete consolidated.safetensors",
    ),
    "Mistral's own names": (
        Case("bf16", "unknown", after=stray("tok_embeddings.weight", torch.ones(2, 2), "consolidated.safetensors")), 1,
        "delete consolidated.safetensors",
    ),
    "hidden file": (Case("bf16", OK, after=server_cases._write_hidden), 0, "._model.safetensors is a hidden file"),
    "ModelOpt's file": (Case("bf16", WRONG, after=_write_modelopt), 1, "delete hf_quant_config.json"),
    "ModelOpt's file over codes": (
        Case("dyn", "unknown", lambda _, raw: raw.pop("quantization_config"), after=_write_modelopt), 1, "ModelOpt's",
    ),
    "a method of another word": (
        Case("dyn", OK, q(lambda block: block.update(quant_method="compressed_tensors"))), 1,
        "write 'compressed-tensors'",
    ),
    "4 bits": (Case("dyn", "unknown", group(num_bits=4, type="int")), 1, "num_bits"),
    "embedding model": (Case("bf16@qwen3", REFUSES, lambda _, raw: raw.pop("architectures")), 1, '"Qwen3ForCausalLM"'),
    "fused in blocks": (Case("block", OK, server_cases._fuse("gate_up_proj", GATE, UP)), 1, "gate_up_proj"),
    "fused with one scale": (Case("tensor", OK, server_cases._fuse("gate_up_proj", GATE, UP)), 1, "gate_up_proj"),
    "generation settings cut off": (
        Case("bf16", OK, after=lambda folder: (folder / "generation_config.json").write_text("{")), 1,
        "generation_config.json is not JSON",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", READ_ONLY)
def test_rules_that_were_read(name: str, tmp_path: Path, tokenizer: Path) -> None:
    case, code, words = READ_ONLY[name]
    verified, verdicts = run(case, tmp_path, tokenizer)
    assert verdicts["vLLM"] == case.vllm, verified.verdicts
    assert verified.ok == (code == 0) and words in verified.findings[0].text, verified.findings
    assert len({finding.text for finding in verified.findings}) == len(verified.findings)
    source = next(verdict.source for verdict in verified.verdicts if verdict.loader == "vLLM")
    if "fused" in name:
        assert source == "read in its source (vLLM 0.32)"


def test_scales_of_ragged_fused_layers_are_refused_or_misplaced() -> None:
    """SmolLM2's q, k and v fit into the grid of their matrix, each at a wrong row; two layers of 320 rows do not."""

    def parts(*rows: int) -> tuple[Linear, ...]:
        return tuple(Linear("x", "x", (n, 128), ("Linear",)) for n in rows)

    assert _fits_grid(parts(576, 192, 192), 128) and not _fits_grid(parts(320, 320), 128)


def test_classes_that_were_not_loaded_have_another_source(tmp_path: Path, tokenizer: Path) -> None:
    """vLLM's rules are predicted for another text model, too, and decide the exit code; they were read."""
    other = both(drop(NORM), settings(model_type="olmo2", architectures=["Olmo2ForCausalLM"]))
    for name, change in (("loaded", drop(NORM)), ("other", other)):
        verified = verify(write(Case("bf16", REFUSES, change), tmp_path / name, tokenizer))
        (verdict,) = [verdict for verdict in verified.verdicts if verdict.loader == "vLLM"]
        assert verdict.verdict == REFUSES and not verified.ok
        assert verdict.source.startswith("loaded in" if name == "loaded" else "read in its source")


#: base, architectures, vLLM's verdict, SGLang's; "unknown" leaves the folder without a failure
OTHER_CLASSES = [
    ("bf16", "Qwen2ForCausalLM", WRONG, WRONG),  # biases without a tensor
    ("bf16", "Qwen3ForCausalLM", REFUSES, WRONG),  # norms without a tensor
    ("dyn", "Qwen3ForCausalLM", WRONG, WRONG),  # a quantized folder is not asked for them
    ("bf16@qwen2", "LlamaForCausalLM", WRONG, WRONG),  # biases are left out
    ("bf16@qwen3", "MistralForCausalLM", REFUSES, WRONG),  # norms have no parameter
    ("bf16", "GemmaForCausalLM", "unknown", "unknown"),
    ("bf16@mistral", "LlamaForCausalLM", OK, OK),  # the same computation
    ("bf16", "MistralForCausalLM", OK, OK),
]


@pytest.mark.parametrize(("base", "name", "vllm", "sglang"), OTHER_CLASSES)
def test_class_of_another_family(base: str, name: str, vllm: str, sglang: str, tmp_path: Path, tokenizer: Path) -> None:
    """vLLM loaded the first folder with wrong answers and refused the second; SGLang's code was read."""
    verified, verdicts = run(Case(base, vllm, settings(architectures=[name])), tmp_path, tokenizer)
    assert verdicts == {"transformers": OK, "vLLM": vllm, "SGLang": sglang}
    if vllm in (WRONG, REFUSES):
        (finding,) = verified.failures
        assert f"architectures names {name}" in finding.text and 'write "architectures": ["' in finding.text
    assert verified.ok == (vllm in (OK, "unknown"))
    if vllm != OK:
        assert all(v.source.startswith("read in") for v in verified.verdicts if v.loader != "transformers")


@pytest.mark.parametrize(
    ("model_type", "name", "same"),
    [
        ("llama", "LlamaForSequenceClassification", True),
        ("llama", "LlamaModel", True),
        ("llama", "LlamaForCausalLMEagle3", True),  # names that only a server or a folder's code has are not judged
        ("llava", "LlavaLlamaForCausalLM", True),
        ("qwen2", "Qwen2ForProcessRewardModel", True),
        ("gemma3", "Gemma3ForConditionalGeneration", True),
        ("gemma3_text", "Gemma3ForCausalLM", True),
        ("gemma3", "Gemma3ForCausalLM", True),
        ("qwen3_vl_moe", "Qwen3VLMoeForConditionalGeneration", True),
        ("mistral3", "Mistral3ForConditionalGeneration", True),
        ("qwen2_5_omni", "Qwen2_5OmniForConditionalGeneration", True),
        ("qwen3_omni_moe", "Qwen3OmniMoeForConditionalGeneration", True),
        ("internvl", "InternVLChatModel", True),
        ("llama4", "Llama4ForConditionalGeneration", True),
        ("llama", "Qwen2ForCausalLM", False),
        ("llama", "LlamaConfig", True),  # no model
    ],
)
def test_family_of_published_class_names(model_type: str, name: str, same: bool) -> None:
    assert classes._is_of_family(name, CONFIG_MAPPING[model_type]) == same
