"""Compares sealed with plain training: the loss differences of a permuted twin, and a frequency attack on its tokens.

    python benchmarks/sealed.py              # writes benchmarks/results/sealed.json; some minutes on one core

Runs: examples/sealed.yaml and its plain twin train ten steps in each recipe; in FP8 also with a second key, because
reordered sums change roundings as much between two sealed runs as between a plain and a sealed one.

Attack: someone who has sealed rows ranks tokens by frequency, does the same for a public text of the same kind with the
plain tokenizer, and assumes that equal ranks are equal tokens. The rows are one half of the files of Python's
documentation and source, and the public text is the other half. Reported are the shares of all tokens and of distinct
tokens that are identified, with 95 % intervals over files (bootstrap, 1000 draws). Control tokens, whose positions are
in the config.json of the twin, are not counted.

Attack with the plain weights, if these are public: a row of the embedding table has the same numbers in the twin, in a
different order. Sorted rows are equal, so every sealed token is identified.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
FILE = ROOT / "benchmarks" / "results" / "sealed.json"
RECIPES = ("off", "blockwise", "mxfp8")
DRAWS = 1000
TOP = (10, 50, 200)


def octavo(*words: str) -> None:
    """One command, in this process."""
    from octavo.cli.main import main

    with contextlib.redirect_stdout(sys.stderr):
        if main(list(words)) != 0:
            raise SystemExit(f"octavo {' '.join(words)} failed")


def prepare(place: Path) -> None:
    """`model`, `text`, and for each of two keys a twin and its rows."""
    octavo("tiny", "qwen3", str(place / "model"))
    octavo("text", str(place / "text"))
    for name in ("a", "b"):
        key_file = place / f"{name}.key"
        key_file.write_bytes(hashlib.sha256(f"benchmark {name}".encode()).digest())  # the same at each call
        key_file.chmod(0o600)
        key = ["--key-file", str(key_file)]
        octavo("seal", "model", str(place / "model"), str(place / f"model-{name}"), *key)
        rows = ["seal", "data", str(place / "text/train.jsonl"), str(place / f"rows-{name}")]
        octavo(*rows, "train.phase=pretrain", "train.seq_length=256", "--model", str(place / "model"), *key)


def losses(place: Path, which: str, recipe: str) -> list[float]:
    """The losses of ten steps: of the plain twin, or of a sealed run with key a or b."""
    from octavo import train
    from octavo.config import load_config

    plain = which == "plain"
    name = "sealed_plain" if plain else "sealed"
    model, rows = (place / "model", place / "text/train.jsonl") if plain else (
        place / f"model-{which}", place / f"rows-{which}")  # fmt: skip
    settings = [f"model.path={model}", f"data.train=[{{path: {rows}}}]", f"fp8.recipe={recipe}",
                f"run.dir={place / f'run-{which}-{recipe}'}", "run.hf=false", "run.tensorboard=false"]  # fmt: skip
    if recipe == "off":
        settings.append("train.precision=fp32")
    with contextlib.redirect_stdout(sys.stderr):
        result = train.run(load_config(ROOT / "examples" / f"{name}.yaml", settings))
    return list(result.losses().values())


def apart(one: Sequence[float], other: Sequence[float]) -> float:
    """The largest relative difference."""
    return max(abs(a - b) / a for a, b in zip(one, other, strict=True))


def attack(counts: np.ndarray, public: np.ndarray, left_out: np.ndarray) -> dict[str, Any]:
    """Shares found by rank. `counts`, `public` [files, vocabulary]: of the sealed rows by their true tokens (the order
    that a key gives them changes nothing but ties, which are broken at random), and of the public text."""
    generator = np.random.default_rng(0)

    def matched(private: np.ndarray, other: np.ndarray) -> dict[str, float]:
        tie = generator.permutation(len(private))  # what sealed numbers tell of equal counts: nothing
        here = np.lexsort((tie, -private))
        ranked = np.lexsort((np.arange(len(other)), -other))
        right = np.zeros(len(private), bool)
        right[here[here == ranked]] = True
        seen = private > 0
        shares = {
            "of_all": float(private[right].sum() / private.sum()),
            "of_different": float((right & seen).sum() / seen.sum()),
        }
        shares |= {f"of_the_{top}_most_frequent": float(right[here[:top]].mean()) for top in TOP}
        return shares

    counts, public = counts[:, ~left_out], public[:, ~left_out]
    whole = matched(counts.sum(0), public.sum(0))
    draws = [
        matched(
            counts[generator.integers(0, len(counts), len(counts))].sum(0),
            public[generator.integers(0, len(public), len(public))].sum(0),
        )
        for _ in range(DRAWS)
    ]
    interval = {name: np.percentile([one[name] for one in draws], [2.5, 97.5]).round(4).tolist() for name in whole}
    return {
        "tokens": int(counts.sum()),
        "different": int((counts.sum(0) > 0).sum()),
        "found": {name: {"share": round(share, 4), "interval": interval[name]} for name, share in whole.items()},
        "by_chance": round(1 / len(counts[0]), 6),
    }


def public_weights(place: Path) -> float:
    """The share of the vocabulary that plain weights tell of the twin with key a: rows of equal sorted numbers."""
    from safetensors.torch import load_file

    from octavo import models
    from octavo.sealing import read_key
    from octavo.sealing.structure import read_structure

    name = "model.embed_tokens.weight"
    plain, sealed = (
        [row.tobytes() for row in load_file(place / folder / "model.safetensors")[name].sort(1)[0].numpy()]
        for folder in ("model", "model-a")
    )
    where = {row: number for number, row in enumerate(plain)}
    guesses = np.asarray([where.get(row, -1) for row in sealed])
    true = read_structure(models.empty(place / "model")).draw(read_key(place / "a.key"))["vocab"]
    return float((guesses == true).mean())


def token_counts(place: Path) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(counts of the rows by document, of the public half, which tokens are control tokens); documents in turn."""
    from octavo import models

    tokenizer: Any = models.load_tokenizer(place / "model")
    documents = [json.loads(line)["text"] for line in (place / "text/train.jsonl").read_text("utf-8").splitlines()]
    size = len(tokenizer)
    rows = np.zeros((len(documents), size), np.int64)
    for number, text in enumerate(documents):
        for token, count in Counter(tokenizer(text, add_special_tokens=False)["input_ids"]).items():
            rows[number, token] = count
    control = np.zeros(size, bool)
    control[list(tokenizer.added_tokens_decoder)] = True
    return rows[::2], rows[1::2], control


def main() -> int:
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        prepare(place)
        runs: dict[str, Any] = {}
        for recipe in RECIPES:
            curves = {which: losses(place, which, recipe) for which in ("plain", "a", "b")}
            runs[recipe] = {
                "losses": curves["plain"],
                "plain_and_sealed": apart(curves["plain"], curves["a"]),
                "two_keys": apart(curves["a"], curves["b"]),
            }
        from octavo.bench import record

        by_weights = {"share_of_the_vocabulary": public_weights(place)}
        document = {
            "command": "python benchmarks/sealed.py",
            "runs": runs,
            "attack": attack(*token_counts(place)),
            "attack_with_public_weights": by_weights,
            "machine": record.describe_machine(),
        }
    record.save(document, FILE)
    short = {r: {k: v for k, v in one.items() if k != "losses"} for r, one in runs.items()}
    print(json.dumps({**short,
                      "attack": document["attack"], "weights": by_weights}, indent=1))  # fmt: skip
    return 0


if __name__ == "__main__":
    sys.exit(main())
