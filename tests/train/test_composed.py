"""A model composed of an image encoder and a decoder trains in stages, on one rank and on two, and is exported."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForImageTextToText

from octavo import models, rl
from octavo.models.compose.compose import Parts, compose
from octavo.train.artifacts.export import export_model
from octavo.train.run_dir.run_dir import read_rows
from tests.models.conftest import batch
from tests.models.small_towers import SMALL, TOWERS, write_settings
from tests.rl.forks import both
from tests.train.conftest import Make

pytestmark = pytest.mark.long

ENCODER = Path(__file__).parents[2] / "examples/compose/image_encoder"
KINDS = ("llava", "octavo_llava", "octavo_vlm")
STAGES = (
    "train.stages=[{freeze: [image_encoder, foundation, lm_head], steps: 2, lr: 1e-3}, {steps: 3, lr: 5e-4}]",
    *("train.warmup=0", "data.eval=[]", "run.hf=true", "train.seq_length=128"),
)


@pytest.fixture(scope="module")
def composed(place: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """model_type -> folder of a composed model of that type."""
    home = tmp_path_factory.mktemp("composed")
    write_settings(home, TOWERS["dinov3"][2])
    (home / "config.json").write_text(
        json.dumps({**SMALL, "model_type": "dinov3_vit", "num_register_tokens": 4, "image_size": 16})
    )
    sources = {"llava": (ENCODER, None), "octavo_llava": (home, "merge_mlp2"), "octavo_vlm": (place / "tiny", None)}

    def get(kind: str) -> Path:
        if not (home / kind).exists():
            encoder, projector = sources[kind]
            compose(Parts(encoder, place / "text", projector, init=("image_encoder",)), home / kind)
        return home / kind

    return get


def rows_of(cfg) -> list[dict]:
    return read_rows(Path(cfg.run.dir) / "metrics.jsonl")


@pytest.mark.parametrize(
    ("kind", "over"),
    [
        ("llava", ()),
        *((kind, ("data.packing=true", "train.micro_batch=1", "parallel.context=2")) for kind in KINDS),
    ],
)
def test_two_ranks_match_one(make: Make, composed: Callable[[str], Path], kind: str, over: tuple[str, ...]) -> None:
    """Each rank trains on its rows, or on its part of the tokens of every pack."""
    common = (f"model.path={composed(kind)}", *STAGES, "fp8.recipe=off")
    one = make(*common, *over[:2], "train.global_batch=2", dir="one")
    two = make(*common, *over, "train.global_batch=2", "train.micro_batch=1", dir="two")
    rl.run(one)
    assert [code for code, _ in both(two)] == [0, 0]
    assert [row["stage"] for row in rows_of(two)] == [1, 1, 2, 2, 2]
    for single, shared in zip(rows_of(one), rows_of(two), strict=True):
        assert shared["loss"] == pytest.approx(single["loss"], rel=1e-4)


@pytest.mark.parametrize("kind", KINDS)
def test_an_export_in_fp8_has_the_weights_that_transformers_loads(
    make: Make, composed: Callable[[str], Path], kind: str, tmp_path: Path
) -> None:
    result = rl.run(make(f"model.path={composed(kind)}", *STAGES))
    export_model(result.dir, tmp_path / "fp8", "fp8-dynamic")
    stock = AutoModelForImageTextToText.from_pretrained(tmp_path / "fp8").eval()
    inputs = batch(models.load_processor(tmp_path / "fp8"), image=True)
    with torch.no_grad():
        exact = models.load(tmp_path / "fp8", keep_fp8=False).eval()(**inputs).logits
        trained = models.load(result.dir / "hf").eval()(**inputs).logits
        found = stock(**inputs).logits.float()
    assert (found - exact).norm() < 0.1 * exact.norm() and (exact - trained).norm() < 0.1 * trained.norm()
    assert not torch.equal(exact, trained)
