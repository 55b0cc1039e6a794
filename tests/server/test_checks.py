"""Every bound of `checks` and `outcomes` can be missed: a server that is a little wrong is reported. Needs no vLLM."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch

from octavo.models.tiny import tiny
from octavo.train.artifacts.export import export_model
from tests.server import checks, folders, outcomes, reference
from tests.server.client import ServerRefused

ROWS = [[5 + (7 * row + 3 * at) % 200 for at in range(24)] for row in range(3)]
PROMPTS = [row[:6] for row in (ROWS * 3)[: len(reference.QUESTIONS)]]


@pytest.fixture(autouse=True)
def short_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "TOKENS", 3)


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.write("llama", tmp_path_factory.mktemp("models") / "plain")


@pytest.fixture(scope="module")
def fp8(plain: Path) -> Path:
    export_model(plain, plain.parent / "fp8", "fp8-dynamic")
    return plain.parent / "fp8"


@dataclass
class TransformersServer:
    """The commands of `Server`, answered by transformers in BF16, with one thing wrong."""

    wrong: str = ""
    folder: Path = Path()
    updates: list[Path] = field(default_factory=list)

    def load(self, folder: Path, kernel: str = "") -> dict[str, int]:
        if self.wrong == "refuses":
            raise ServerRefused("ValueError: no parameter\nand more lines")
        self.folder = folder
        return {} if self.wrong == "no kernels" or folder.name == "plain" else {"Kernel": 14}

    def compare(self) -> dict[str, int]:
        tensors, _ = folders.read(self.folder)
        codes = sum(v.numel() for v in tensors.values() if v.dtype == folders.FP8)
        scales = sum(v.numel() for n, v in tensors.items() if n.endswith("_scale"))
        counts = {"codes": codes, "codes_equal": codes, "scales": scales, "scales_equal": scales}
        return counts if self.wrong not in counts else counts | {self.wrong: counts[self.wrong] - 1}

    def score(self, rows: reference.Rows) -> reference.Scores:
        scores = reference.score(reference.load(self.folder, torch.bfloat16), rows)
        if self.wrong == "noise":  # without a change of the mean
            return [[s + (0.5 if at % 2 else -0.5) for at, s in enumerate(row)] for row in scores]
        if self.wrong == "shift":
            return [[s - 0.05 for s in row] for row in scores]
        if self.wrong == "NaN":
            return [[float("nan")] * len(row) for row in scores]
        return scores

    def generate(self, prompts: reference.Rows, tokens: int) -> reference.Rows:
        answers, _ = reference.generate(reference.load(self.folder, torch.float32), prompts, tokens)
        return [[0] * tokens for _ in answers] if self.wrong == "tokens" else answers

    def update(self, folder: Path) -> None:
        self.updates.append(folder)
        if not (self.wrong == "no update" or self.wrong == "no return" and len(self.updates) == 2):
            self.folder = folder


@pytest.mark.parametrize("name", ["plain", "fp8"])
def test_right_server_has_no_problems(plain: Path, fp8: Path, name: str) -> None:
    compared = checks.compare(TransformersServer(), {"plain": plain, "fp8": fp8}[name], "", ROWS, PROMPTS)
    assert not compared.problems
    assert compared.plain == compared.server and compared.plain.mean > 0
    assert compared.greedy[0] == compared.greedy[1] > 0


@pytest.mark.parametrize(
    ("wrong", "name", "problem"),
    [
        ("codes_equal", "fp8", " codes are equal"),
        ("scales_equal", "fp8", " scales are equal"),
        ("no kernels", "fp8", "layers with FP8 kernels are {}"),
        ("noise", "fp8", "log-probabilities are 0."),
        ("shift", "plain", "the loss differs by 0.0"),
        ("NaN", "plain", "log-probabilities are nan"),
        ("tokens", "plain", ": token 0 is [0] instead of "),
    ],
)
def test_wrong_server_is_reported(plain: Path, fp8: Path, wrong: str, name: str, problem: str) -> None:
    compared = checks.compare(TransformersServer(wrong), {"plain": plain, "fp8": fp8}[name], "", ROWS, PROMPTS)
    assert any(problem in line for line in compared.problems), compared.problems


@pytest.mark.parametrize(
    ("wrong", "problems"),
    [("", []), ("no update", ["did not change", "does not answer like a new one"]), ("no return", ["did not restore"])],
)
def test_update_of_a_running_server(plain: Path, tmp_path: Path, wrong: str, problems: list[str]) -> None:
    tensors, config = folders.read(plain)
    other = folders.write(tmp_path / "other", {n: v * 1.5 for n, v in tensors.items()}, config, plain)
    lines = checks.update(TransformersServer(wrong), plain, other, ROWS)
    assert len(lines) == len(problems)
    assert all(problem in line for line, problem in zip(lines, problems, strict=True))


@pytest.mark.parametrize(
    ("wrong", "verdict", "detail"),
    [
        ("", outcomes.OK, "0 nats"),
        ("refuses", outcomes.REFUSES, "ValueError: no parameter"),
        ("NaN", outcomes.WRONG, "NaN"),
        ("noise", outcomes.WRONG, "0.5 nats"),
    ],
)
def test_outcome(plain: Path, wrong: str, verdict: str, detail: str) -> None:
    good = reference.score(reference.load(plain, torch.bfloat16), ROWS)
    seen = outcomes.observe(TransformersServer(wrong), plain, "", ROWS, good, far=0.4)
    assert seen == outcomes.Outcome(verdict, detail)


def test_clear_token_is_two_steps_of_bf16_above_the_next() -> None:
    assert reference._bf16_step(12.7) == 0.0625 and reference._bf16_step(29.3) == 0.125
    assert torch.tensor(29.3, dtype=torch.bfloat16) + 0.125 == torch.tensor(29.3 + 0.125, dtype=torch.bfloat16)
    wanted, answer = [[1, 2, 3]] * 8, [[1, 9, 3]] * 8
    assert not reference.different(answer, wanted, [[True, False, True]] * 8)
    assert len(reference.different(answer, wanted, [[True, True, True]] * 8)) == 8
    assert not reference.different([[1, 2]] * 8, [[1, 2]] * 8, [[True, True]] * 8)


def test_padded_model_computes_the_same(plain: Path, tmp_path: Path) -> None:
    """`pad` on SmolLM2's proportions: 9 heads of 64 and 3 of keys and values."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=576, intermediate_size=256, num_hidden_layers=2, num_attention_heads=9, num_key_value_heads=3,
        head_dim=64, vocab_size=256, tie_word_embeddings=True, dtype=torch.bfloat16,
    )  # fmt: skip
    torch.manual_seed(0)
    LlamaForCausalLM(config).bfloat16().save_pretrained(tmp_path / "model")
    padded = folders.pad(tmp_path / "model", tmp_path / "padded")
    rows = [[t % 256 for t in row] for row in ROWS]
    a, b = (reference.score(reference.load(f, torch.float32), rows) for f in (tmp_path / "model", padded))
    # weights of norms are rounded to BF16 once more
    assert reference.distance(b, a).mean < 0.01
    assert folders.read(padded)[0]["model.layers.0.self_attn.k_proj.weight"].shape == (256, 768)
