"""Run directories written by hand, in the layout that ``octavo.train`` leaves: tests of the report train nothing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

LAYERS = [
    *(f"model.visual.blocks.{i}.{n}" for i in range(2) for n in ("attn.qkv", "attn.proj", "mlp.linear_fc1")),
    *(f"model.language_model.layers.{i}.{n}" for i in range(2) for n in ("self_attn.q_proj", "mlp.down_proj")),
]


def component(name: str) -> str:
    return "image_encoder" if "visual" in name else "foundation"


def plan(recipe: str = "blockwise", fmt: str = "e4m3") -> dict[str, Any]:
    rows = [
        {"name": n, "component": component(n), "kind": "linear", "shape": [64, 64], "fp8": True,
         "recipe": {"name": recipe, "format": fmt}, "reason": "asked for the whole model", "share": 0.09}
        for n in LAYERS
    ]  # fmt: skip
    head = {"name": "lm_head", "component": "foundation", "kind": "lm_head", "shape": [300, 64], "fp8": False,
            "recipe": None, "reason": "lm_head stays in high precision", "share": None}  # fmt: skip
    return {"rows": [*rows, head], "notes": ["per-tensor amax is local to each rank"]}


def health(sqnr: float = 31.5, underflow: float = 0.001, cosine: float = 0.999, nan_codes: int = 0) -> dict[str, Any]:
    rng = np.random.default_rng(1)

    def operand() -> dict[str, float]:
        return {"sqnr": sqnr + float(rng.uniform(0, 0.4)), "underflow": underflow, "saturation": 0.0}

    return {
        name: {**{role: operand() for role in ("x", "w", "dy", "x_wgrad", "dy_wgrad")}, "dw_cosine": cosine,
               "nan_codes": nan_codes}
        for name in LAYERS
    }  # fmt: skip


def losses(steps: int, shift: float = 0.0, seed: int = 0) -> np.ndarray:
    at = np.arange(1, steps + 1)
    noise = np.random.default_rng(seed).normal(0, 0.02, steps)
    return (3 * np.exp(-at / (0.3 * steps)) + 0.05) * (1 + shift) * np.exp(noise)


def write_run(
    directory: Path,
    loss: np.ndarray,
    *,
    config: str = "",
    tables: dict[int, dict] | None = None,
    plan_json: dict | None = None,
    proof: dict | None = None,
    exact_match: float | None = 0.98,
    environment: dict | None = None,
    tokens: int = 1000,
    speed: float = 5000.0,
    skipped: tuple[int, ...] = (),
    overflowed: tuple[int, ...] = (),
    status: str = "finished",
    memory: dict[str, int] | None = None,
    zeroed: int | None = None,
    lr: float = 1e-3,
    begins: int = 0,
    figures: dict[str, Any] | None = None,
    completions: list[dict] | None = None,
) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    lines = []
    for step, value in enumerate(loss.tolist()[begins:], begins + 1):
        row: dict[str, Any] = {
            "step": step, "loss": value, "tokens": tokens, "tokens_per_s": speed, "grad_norm": 1.0, "lr": lr,
            "memory": memory or {"weights": 4_800_000, "gradients": 4_800_000, "optimizer": 9_600_000,
                       "codes": 1_200_000 if tables else 0, "activations": 9_000_000, "peak_rss": 900_000_000},
        }  # fmt: skip
        row |= {key: float(values[step - 1]) for key, values in (figures or {}).items()}
        if step in skipped:
            row["skipped"] = True
        if step in overflowed:
            row["overflow"] = True
        if zeroed is not None and step == 1:
            row["zeroed_v"] = zeroed
        if tables and step in tables:
            row["health"] = tables[step]
        lines.append(json.dumps(row))
    if exact_match is not None:
        lines.append(
            json.dumps({"step": len(loss), "eval": {"loss": 0.1, "exact_match": exact_match, "questions": 800}})
        )
    (directory / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    (directory / "result.json").write_text(json.dumps({"status": status, "steps": len(loss)}))
    (directory / "environment.json").write_text(
        json.dumps(environment if environment is not None else {"torch": "2.13", "cpu": "some <cpu>", "threads": 2})
    )
    (directory / "config.yaml").write_text(config)
    if completions is not None:
        (directory / "completions.jsonl").write_text("".join(json.dumps(row) + "\n" for row in completions))
    if plan_json is not None:
        (directory / "plan.json").write_text(json.dumps(plan_json))
    if proof is not None:
        (directory / "proof.json").write_text(json.dumps(proof))
    return directory


COUNTED = {"fwd": {"reference": 10, "high": 2}, "dgrad": {"reference": 10}, "wgrad": {"reference": 10}}
GOOD_PROOF = {
    "share": 0.94,
    "shares": {"foundation": 0.95},
    "fp8_gemms": 30,
    "high_gemms": 2,
    "components": {"foundation": COUNTED},
    "pending": [],
    "missing": [],
    "unused": [],
}

CONFIG = """\
model: {path: tiny}
data: {train: [{path: train.json}], eval: [{path: test.json}]}
train: {steps: 100, global_batch: 8, micro_batch: 8}
run: {hf: false}
"""


def judged(right: float = 0.98, loss: float = 0.1, gemms: int = 0, seed: int = 0, questions: int = 1600) -> Any:
    """Held-out answers, four about each of 400 images: of so many right at random, with losses around ``loss``. Every
    seed gives other answers to the same questions, with the same losses but for their level."""
    from octavo.report.evidence.claims import Evaluation

    chance = np.random.default_rng(seed).uniform(size=questions)
    losses = np.random.default_rng(99).uniform(0.5, 1.5, questions) * loss
    pieces = tuple(
        {"file": "test.json", "row": n // 4, "answer": n % 4, "loss": float(losses[n]), "tokens": 2,
         "right": bool(chance[n] < right), "said": str(n % 10), "source": f"image {n // 4}"}
        for n in range(questions)
    )  # fmt: skip
    return Evaluation(pieces, gemms)


def held(runs: Any, fp8: float = 0.98, drift: float = 0.0, before: float = 3.0) -> Any:
    """What a trial judged: high precision and every FP8 run of ``runs``; ``drift`` moves FP8's loss."""
    from octavo.report.evidence.claims import HeldOut

    found = HeldOut(judged(0.1, before))
    for run in runs:
        if run.kind == "reference":
            found.runs[run.name] = judged()
        elif run.kind == "fp8":
            found.runs[run.name] = judged(fp8, 0.1 * (1 + drift), gemms=30)
            found.high[run.name] = judged(fp8)
    return found
