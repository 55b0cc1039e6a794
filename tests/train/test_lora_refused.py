"""What a LoRA run cannot be is said by its plan, before there is a run directory or a base is read."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from octavo import train
from octavo.adapters import AdapterError
from octavo.train import TrainError
from octavo.train.setup import planning

pytestmark = pytest.mark.usefixtures("uncounted", "unseen")

pytest.importorskip("peft")


def test_plan_rejects_invalid_lora_before_a_run_exists(make, tmp_path: Path) -> None:
    for asked, says in (
        ("lora={targets: [lm_head]}", "cannot have an adapter"),
        ("lora={adapter: /nowhere}", "not an adapter folder"),
    ):
        cfg = make(asked, dir="new")
        with pytest.raises(AdapterError, match=says):
            planning.plan_for(cfg)
        with pytest.raises(AdapterError, match=says):
            train.run(cfg)
        assert not (tmp_path / "new").exists()  # so that the mended file may use it


def test_resume_does_not_need_the_initial_adapter(make, tmp_path: Path) -> None:
    short = ("lora={rank: 2, targets: [q_proj]}", "data.eval=[]", "train.steps=2", "train.warmup=0", "run.save_every=1")
    train.run(make(*short, "run.hf=true", dir="first"))
    folder = tmp_path / "given"
    shutil.copytree(tmp_path / "first" / "adapter", folder)
    asked = (*short, f"lora.adapter={folder}")
    with pytest.raises(AdapterError, match=r"lora.rank is 3, .* has 2"):
        planning.plan_for(make(*asked, "lora.rank=3", dir="other"))
    whole = train.run(make(*asked, dir="second"))
    (whole.dir / "result.json").unlink()
    shutil.rmtree(whole.dir / "checkpoints" / "step_2")
    shutil.rmtree(folder)
    again = train.run(make(*asked, "run.resume=auto", dir="second"))
    assert again.losses() == whole.losses()


def test_codes_of_a_folder_are_not_cast_to_another_kind(make, place: Path, tmp_path: Path) -> None:
    from octavo import models
    from octavo.checkpoint.export import export

    source = place / "tiny"
    export(models.load(source).state_dict().items(), source, tmp_path / "rows", "fp8-dynamic")
    asked = (f"model.path={tmp_path / 'rows'}", "model.freeze=[foundation]", "fp8.recipe=off")
    planning.plan_for(make(*asked, "model.load_in_fp8=row"))
    with pytest.raises(TrainError, match="q_proj.weight to FP8 .* a second time.* already contains it as codes"):
        planning.plan_for(make(*asked, "model.load_in_fp8=block"))
