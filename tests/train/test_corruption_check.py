"""`run.check_every`: losses stay what they are in every kind of run; a bit that flips is found, named and stops the run
on all ranks, and the run goes on from the checkpoint before; what may not stand beside it is refused."""

from __future__ import annotations

import platform
from pathlib import Path
from typing import Any

import pytest

from octavo import train
from octavo.cli.main import main
from octavo.config import ConfigError, to_yaml
from octavo.fp8.kernels import registry
from octavo.models.tiny import tiny
from octavo.train.callbacks import corruption_check
from octavo.train.run_dir.run_dir import read_rows
from tests.fp8.proof.test_checking import Faulty, faulty, flip  # noqa: F401 (a fixture)
from tests.rl.forks import both

pytestmark = pytest.mark.usefixtures("bare_forward", "unseen")

SHORT = ("train.steps=2", "train.warmup=0", "data.eval=[]", "run.check_every=1")


def rows(directory: Path | str, name: str = "metrics.jsonl") -> list[dict[str, Any]]:
    return read_rows(Path(directory) / name)


@pytest.fixture(scope="module")
def experts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("checking")
    tiny.write("qwen3_vl_moe", folder / "moe", size="mini")
    return folder / "moe"


def same(make: Any, *over: str) -> list[dict[str, Any]]:
    """Runs without and with checks: losses and gradient norms are equal to the bit; the lines of the latter."""
    found = []
    for every in (0, 1):
        result = train.run(make(*SHORT, *over, f"run.check_every={every}", dir=f"every_{every}"))
        found.append([(row["loss"], row["grad_norm"]) for row in rows(result.dir)])
    assert found[0] == found[1]
    lines = rows(result.dir, "checks.jsonl")
    assert not any(line["faults"] for line in lines) and not any(line["unsteady"] for line in lines)
    assert [row["checked"] for row in rows(result.dir)] == [line["products"] for line in lines]
    return lines


def test_checks_do_not_change_losses(make, uncounted) -> None:
    """Some GEMMs a step, others each time; fused blocks stay fused (their losses would be others)."""
    first, second = same(make, "fp8.fuse=on")
    assert len(first["sites"]) == corruption_check.check_size(78) == 4 and first["sites"] != second["sites"]
    assert first["products"] > 0 and first["codes"] > 0 and first["values"] > 0


@pytest.mark.usefixtures("seen")
@pytest.mark.long
@pytest.mark.parametrize(
    "over",
    [
        ("fp8.recipe=rowwise", "model.load_in_fp8=rowwise", "lora={rank: 4}"),
        ("train.recompute=selective", "fp8.activations=fp8", "fp8.fuse=on"),
        ("fp8.recipe=delayed", "train.recompute=full"),
        ("fp8.lm_head={recipe: blockwise}", "fp8.param=true"),
        ("optimizer.update=backward", "train.micro_batch=4", "train.precision=bf16"),
        ("MOE",),
        ("MOE", "fp8.recipe=delayed"),
        ("MOE", "fp8.recipe=rowwise", "model.load_in_fp8=rowwise", "lora={rank: 4}"),
    ],
    ids=" ".join,
)
def test_all_gemms_of_every_kind_of_run(make, uncounted, experts, monkeypatch, over) -> None:
    monkeypatch.setattr(corruption_check, "select_gemms", lambda there, seed, number: tuple(there))
    first, second = same(make, *(f"model.path={experts}" if word == "MOE" else word for word in over))
    # below the first adapter no gradient goes: of a frozen base all forwards are looked at, and dgrads where they run
    least = sum(gemm == "fwd" for _, gemm in first["sites"]) + 1 if "lora={rank: 4}" in over else len(first["sites"])
    assert len(first["sites"]) >= 48 and min(first["products"], second["products"]) >= least


class Average(train.Callback):
    """Writes another weight through ``.data`` before the evaluation of step 1 is over, as one that swaps averages."""

    def evaluated(self, run: train.Run, figures: Any) -> None:
        if run.step == 1:
            weight = run.model.get_submodule(self.layer).weight
            weight.data.mul_(1.01)

    def begin(self, run: train.Run) -> None:
        self.layer = next(row.name for row in run.job.plan.rows if row.fp8 and "layers.1.mlp" in row.name)


def test_stale_weight_codes_are_found_after_an_evaluation(make, uncounted) -> None:
    """Not in a step that is checked otherwise: GEMMs come again in the third."""
    over = ("train.steps=3", "train.warmup=0", "run.eval_every=1", "run.check_every=3")
    cfg, average = make(*over), Average()
    with pytest.raises(train.TrainError, match=r"step 2: FP8 GEMMs of .*layers\.1\.mlp\..*fp8.invalidate.*not saved"):
        train.run(cfg, callbacks=(average,))
    (line,) = rows(cfg.run.dir, "checks.jsonl")
    assert line["stale"] == [average.layer] and line["sites"] == [] and line["faults"] == []


class Plant(train.Callback):
    """Flips the lowest bit of one value of a forward GEMM at ``step``, on ``rank``: of one that is checked, or not."""

    def __init__(self, backend: Faulty, step: int, checked: bool = True, rank: int = 0) -> None:
        self.backend, self.step, self.checked, self.rank = backend, step, checked, rank
        self.layer = ""

    def begin(self, run: train.Run) -> None:
        self.names = [row.name for row in run.job.plan.rows if row.fp8]
        for name in self.names:
            module = run.model.get_submodule(name)
            module.register_forward_pre_hook(lambda module, args, name=name: self.arm(name == self.layer))

    def arm(self, on: bool) -> None:
        self.backend.product = lambda gemm, out: self.work(out) if on else None

    def work(self, out: Any) -> None:
        self.layer = ""
        self.arm(False)
        flip(out, (2, 3), 0)

    def before_step(self, run: train.Run, number: int, batches: Any) -> None:
        if number == self.step and run.world.rank == self.rank:
            seen = {site.layer for site in run.job.stepper.corruption_checker.gemms if site.gemm == "fwd"}
            self.layer = next(name for name in self.names if (name in seen) == self.checked and "layers" in name)


def sampled(monkeypatch: pytest.MonkeyPatch, *layers: str) -> None:
    """Let checks take the forward of layers whose names end so."""
    chosen = lambda there, seed, number: tuple(s for s in there if s.gemm == "fwd" and s.layer.endswith(layers))  # noqa: E731
    monkeypatch.setattr(corruption_check, "select_gemms", chosen)


@pytest.mark.usefixtures("seen")
def test_flipped_bit_is_found_and_stops_the_run(make, uncounted, faulty, monkeypatch) -> None:  # noqa: F811
    sampled(monkeypatch, "layers.1.mlp.down_proj")
    over = ("train.steps=3", "data.eval=[]", "run.check_every=1", "run.save_every=1")
    cfg = make(*over)
    plant = Plant(faulty, step=2)
    with pytest.raises(train.TrainError) as caught:
        train.run(cfg, callbacks=[plant])
    said, run = str(caught.value), Path(cfg.run.dir)
    assert f"step 2 computed wrongly on rank 0 on {platform.node()}, cpu (" in said
    assert "fwd of model.language_model.layers.1.mlp.down_proj (faulty): a value of y is" in said
    assert "by faulty once more, 1 bit apart" in said and "without a fault was at step 1" in said
    assert [path.name for path in (run / "checkpoints").iterdir()] == ["step_1"] and not (run / "result.json").exists()
    assert [row["step"] for row in rows(run)] == [1]
    (fault,) = rows(run, "checks.jsonl")[-1]["faults"]
    assert fault["rank"] == 0 and fault["gemm"] == "fwd" and fault["at"] == [2, 3] and fault["bits"] == 1

    again = train.run(make(*over, "run.resume=auto"))
    clean = train.run(make(*over, "run.check_every=0", dir="clean"))
    assert [row["loss"] for row in rows(again.dir)] == [row["loss"] for row in rows(clean.dir)]
    lines = rows(run, "checks.jsonl")
    assert [(line["step"], len(line["faults"])) for line in lines] == [(1, 0), (2, 1), (2, 0), (3, 0)]


def test_fault_outside_the_checked_gemms_is_not_found(make, uncounted, faulty, monkeypatch) -> None:  # noqa: F811
    sampled(monkeypatch, "layers.1.mlp.down_proj")
    plant = Plant(faulty, step=2, checked=False)
    result = train.run(make(*SHORT), callbacks=[plant])
    assert result.status == "finished" and plant.layer == "", "it was planted"


@pytest.mark.usefixtures("seen")
@pytest.mark.long
def test_octavo_train_ends_with_1(make, uncounted, faulty, monkeypatch, capsys) -> None:  # noqa: F811
    """At the second step; its page says so."""
    monkeypatch.setattr(corruption_check, "select_gemms", lambda there, seed, number: there if number else ())
    faulty.product = lambda gemm, out: out.view(-1)[:1].add_(1) if gemm == "fwd" else None
    cfg = make(*SHORT)
    (file := Path(cfg.run.dir).parent / "run.yaml").write_text(to_yaml(cfg))
    assert main(["train", str(file)]) == 1
    assert "step 2 computed wrongly" in capsys.readouterr().err
    page = (Path(cfg.run.dir) / "page.html").read_text()
    assert "A device computed wrong results" in page and "fwd of model.visual.blocks.0.attn.qkv (faulty)" in page


@pytest.mark.usefixtures("seen")
@pytest.mark.long
def test_the_rank_is_named_and_all_of_them_stop(make, monkeypatch) -> None:
    sampled(monkeypatch, "layers.1.mlp.down_proj")
    cfg = make("train.steps=3", "data.eval=[]", "run.check_every=1", "run.save_every=1", "train.micro_batch=1")

    def plant(rank: int) -> None:
        backend = Faulty()
        registry._backends[backend.name] = backend
        whole = train.run
        monkeypatch.setattr(train, "run", lambda cfg, **more: whole(cfg, callbacks=[Plant(backend, 2, rank=1)], **more))

    for code, said in both(cfg, plant):
        assert code == 1 and "TrainError: step 2 computed wrongly on rank 1 on" in said, said
        assert "rank 1: fwd of model.language_model.layers.1.mlp.down_proj (faulty)" in said
    assert [path.name for path in (Path(cfg.run.dir) / "checkpoints").iterdir()] == ["step_1"]
    lines = rows(cfg.run.dir, "checks.jsonl")
    assert [[fault["rank"] for fault in line["faults"]] for line in lines] == [[], [1]]


@pytest.mark.parametrize(
    ("over", "said"),
    [
        (("train.compile=true",), "the operands of GEMMs in a compiled graph cannot be read"),
        (("train.cuda_graphs=true",), "the operands of GEMMs in a CUDA graph cannot be read"),
        (("fp8.recipe=off",), "checks FP8 GEMMs, and nothing runs in FP8"),
        (("run.check_every=7",), "none of 6 steps is a check; use at most 6"),
        (("run.check_every=-1",), "run.check_every"),
    ],
)
def test_check_every_rejects_incompatible_settings(make, over, said) -> None:
    with pytest.raises(ConfigError, match=said):
        make("run.check_every=2", *over)
