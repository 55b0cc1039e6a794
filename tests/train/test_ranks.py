"""Two processes under torchrun against one: same losses, one run directory, checkpoints that either can read."""

from __future__ import annotations

import json
import multiprocessing
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from octavo import train
from octavo.config import Config, override, to_yaml
from octavo.models.tiny import tiny
from octavo.train.run_dir.run_dir import read_rows
from tests import ranks
from tests.rl.forks import both

pytestmark = pytest.mark.usefixtures("bare_forward")
ROOT = Path(__file__).resolve().parents[2]


def command(cfg: Config, processes: int = 2) -> list[str]:
    """The words that start `octavo train` on `processes`."""
    file = Path(cfg.run.dir).parent / f"{Path(cfg.run.dir).name}.yaml"
    file.write_text(to_yaml(cfg))
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
    return ["env", f"PYTHONPATH={ROOT}", "CUDA_VISIBLE_DEVICES=", *launch, "-m", "octavo", "train", str(file)]


def torchrun(cfg: Config, processes: int = 2) -> subprocess.CompletedProcess[str]:
    """`octavo train` on `processes` as torchrun starts them, to its end.

    The ranks are forks where they can be: torchrun and each of its ranks import torch anew, which takes longer than
    most of these runs.
    """
    words = command(cfg, processes)
    if ranks.START != "fork":
        return subprocess.run(words, capture_output=True, text=True, timeout=300)
    codes, out, errors = ranks.commands(words[words.index("octavo") + 1 :], processes)
    return subprocess.CompletedProcess(words, max(map(abs, codes)), out, errors)


def on_ranks(cfg: Config, processes: int = 2) -> None:
    """The run of a file on several ranks, to its end, without what the command has for people: its page and the memory
    that it predicts take rank 0 longer than most of these runs."""
    if ranks.START != "fork":
        done = torchrun(cfg, processes)
        assert done.returncode == 0, done.stderr
        return
    for code, said in both(cfg, size=processes):
        assert code == 0, said


def losses(cfg: Config) -> list[float]:
    return [row["loss"] for row in read_rows(Path(cfg.run.dir) / "metrics.jsonl")]


@pytest.mark.long
def test_two_ranks_match_one_and_one_resumes_their_checkpoint(make):
    """Blockwise, rows with and without images, so that in some steps only one rank has one; saved at step 4 of 6.

    Equal to 1e-7 until the first code flips, since gradients add up in another order; then to a few thousandths."""
    folder = Path(make().run.dir).parent
    row = {"conversations": [{"from": "human", "value": "Say one."}, {"from": "gpt", "value": "1"}]}
    (folder / "talk.json").write_text(json.dumps([row] * 8))
    images = make().data.train[0].path
    over = (f"data.train=[{{path: {images}}}, {{path: {folder / 'talk.json'}}}]", "train.micro_batch=1", "run.keep=9",
            "run.save_every=4", "run.hf=true", "train.lr=5e-4")  # fmt: skip
    one, two = make(*over, dir="one"), make(*over, dir="two")
    alone = train.run(one)
    done = torchrun(two)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("finished after step 6") == 1  # only one rank speaks
    assert losses(two) == pytest.approx(losses(one), rel=3e-3)
    assert [row["step"] for row in read_rows(Path(two.run.dir) / "metrics.jsonl")] == list(range(1, 7))
    result = json.loads((Path(two.run.dir) / "result.json").read_text())
    assert result["eval"]["questions"] == 16
    assert result["eval"]["loss"] == pytest.approx(alone.eval["loss"], rel=3e-3)
    assert (Path(two.run.dir) / "hf" / "model.safetensors").is_file()
    resumed = train.run(make(*over, f"run.resume={Path(two.run.dir) / 'checkpoints' / 'step_4'}", dir="after"))
    assert list(resumed.losses().values()) == pytest.approx(losses(two)[4:], rel=3e-3)


@pytest.mark.long
@pytest.mark.parametrize(("recipe", "tolerance"), [("off", 1e-5), ("rowwise", 1e-3), ("mxfp8", 1e-3)])
def test_ten_steps_on_two_ranks_are_those_of_one(make, recipe: str, tolerance: float):
    over = (f"fp8.recipe={recipe}", "train.steps=10", "data.eval=[]")
    one, two = make(*over, dir="one"), make(*over, dir="two")
    train.run(one)
    on_ranks(two)
    assert losses(two) == pytest.approx(losses(one), rel=tolerance)


@pytest.mark.long
def test_experts_of_images_alone_train_on_two_ranks_as_on_one(make, tmp_path):
    """Rows of images and of talk, a micro-batch each: most steps leave one of the ranks without an image. Weights in
    BF16, its routers too, which the family keeps in fp32; two of them round sums otherwise."""
    tiny.write("ernie4_5_vl_moe", tmp_path / "ernie", size="mini")
    row = {"conversations": [{"from": "human", "value": "Say one."}, {"from": "gpt", "value": "1"}]}
    (tmp_path / "talk.json").write_text(json.dumps([row] * 24))
    sets = f"data.train=[{{path: {make().data.train[0].path}}}, {{path: {tmp_path / 'talk.json'}}}]"
    over = (f"model.path={tmp_path / 'ernie'}", sets, "fp8.recipe=off", "train.micro_batch=1", "data.eval=[]",
            "optimizer.master=bf16+sr", "train.steps=3")  # fmt: skip
    one, two = make(*over, dir="one"), make(*over, dir="two")
    train.run(one)
    done = torchrun(two)
    assert done.returncode == 0, done.stderr
    assert "2 weights that this family keeps in fp32 are BF16" in done.stdout
    assert losses(two) == pytest.approx(losses(one), rel=3e-3)


@pytest.mark.long
@pytest.mark.skipif(ranks.START != "fork", reason="ranks are forks")
def test_three_ranks_share_four_rows_and_go_on_from_what_one_saved(make):
    """Slices of one, one and two rows: losses, gradients and held-out figures are those of one rank."""
    over = ("fp8.recipe=off", "train.micro_batch=1", "run.save_every=2", "run.keep=9", "train.steps=4")
    one, three = make(*over, dir="one"), make(*over, dir="three")
    alone = train.run(one)
    assert [code for code, _ in both(three, size=3)] == [0, 0, 0]
    rows, others = (list(read_rows(Path(cfg.run.dir) / "metrics.jsonl")) for cfg in (one, three))
    for name in ("loss", "grad_norm", "tokens"):
        assert [row[name] for row in others] == pytest.approx([row[name] for row in rows], rel=1e-5)
    result = json.loads((Path(three.run.dir) / "result.json").read_text())
    assert result["eval"]["loss"] == pytest.approx(alone.eval["loss"], rel=1e-5)
    saved = Path(one.run.dir) / "checkpoints" / "step_2"
    again = make(*over, f"run.resume={saved}", "data.workers=1", dir="again")
    assert [code for code, _ in both(again, size=3)] == [0, 0, 0]
    assert losses(again) == pytest.approx(losses(one)[2:], rel=1e-5)


@pytest.mark.long
def test_bf16_on_the_wire_trains_as_fp32_does_and_goes_on_to_the_bit(make):
    """A whole model, vision tower and dummy images included; the forward then is that of a BF16 model."""
    over = ("train.gather=bf16", "train.steps=8", "run.save_every=4", "run.keep=9")
    one, two = make(*over, dir="one"), make(*over, dir="two")
    train.run(one)  # one process gathers nothing
    done = torchrun(two)
    assert done.returncode == 0, done.stderr
    assert "gradients summed in BF16; shards stay fp32" in done.stdout
    assert losses(two) == pytest.approx(losses(one), rel=2e-2) and losses(two) != losses(one)
    again = make(*over, f"run.resume={Path(two.run.dir) / 'checkpoints' / 'step_4'}", dir="again")
    on_ranks(again)
    assert losses(again) == losses(two)[4:]
    result, alone = (json.loads((Path(cfg.run.dir) / "result.json").read_text()) for cfg in (two, one))
    assert result["eval"]["loss"] == pytest.approx(alone["eval"]["loss"], rel=2e-2)


@pytest.mark.long
def test_delayed_histories_are_those_of_all_ranks_and_survive_a_change_of_ranks(make):
    over = ("fp8.recipe=delayed", "train.steps=8", "run.save_every=4", "run.keep=9", "data.eval=[]")
    one, two = make(*over, dir="one"), make(*over, dir="two")
    train.run(one)
    on_ranks(two)
    assert losses(two) == pytest.approx(losses(one), rel=5e-2)
    after = train.run(make(*over, f"run.resume={Path(two.run.dir) / 'checkpoints' / 'step_4'}", dir="after"))
    assert list(after.losses().values()) == pytest.approx(losses(two)[4:], rel=5e-2)


@pytest.mark.long
def test_an_error_on_one_rank_ends_the_other(make):
    """The third row has no image file; only one of two ranks meets it."""
    source = Path(make().data.train[0].path)
    rows = json.loads(source.read_text())[:8]
    rows[2]["image"] = "images/none.png"
    (source.parent / "bad.json").write_text(json.dumps(rows))
    cfg = make(f"data.train=[{{path: {source.parent / 'bad.json'}}}]", "data.eval=[]")
    done = torchrun(cfg)
    assert done.returncode != 0
    assert "row 2" in done.stderr and "none.png" in done.stderr


@pytest.mark.long
def test_a_refused_directory_is_reported_by_rank_0_and_ends_both(make):
    folder = Path(make().run.dir)
    folder.mkdir()
    (folder / "thesis.txt").write_text("years of work")
    done = torchrun(make())
    assert done.returncode != 0
    assert "not empty (thesis.txt)" in done.stderr


@pytest.mark.long
@pytest.mark.skipif(ranks.START != "fork", reason="ranks are forks")
def test_sigterm_saves_and_two_ranks_go_on_bit_for_bit(make):
    """Each rank gets the signal, as torchrun passes it on (tests/test_launching.py)."""
    over = ("fp8.recipe=delayed", "train.steps=8", "train.micro_batch=1", "data.eval=[]")
    whole, stopped = make(*over, dir="whole"), make(*over, dir="stopped")
    on_ranks(whole)

    def stop() -> None:
        metrics, patience = Path(stopped.run.dir) / "metrics.jsonl", time.monotonic() + 120
        while len(read_rows(metrics)) < 3 and time.monotonic() < patience:
            time.sleep(0.05)
        for process in multiprocessing.active_children():
            process.terminate()

    watcher = threading.Thread(target=stop)
    watcher.start()
    assert torchrun(stopped).returncode == 128 + signal.SIGTERM
    watcher.join()
    assert 3 <= len(losses(stopped)) < 8
    on_ranks(override(stopped, ["run.resume=auto"]))
    assert losses(stopped) == losses(whole)


@pytest.mark.long
def test_two_copies_train_as_one_and_one_process_goes_on(make):
    """Two copies of two shards each, with moments in FP8; saved at step 2 of 4."""
    over = ("train.steps=4", "run.save_every=2", "run.keep=9", "run.hf=true", "data.eval=[]", "optimizer.states=fp8")
    one, four = make(*over, dir="one"), make(*over, "parallel={replicate: 2, shard: 2}", dir="four")
    train.run(one)
    on_ranks(four, 4)
    assert losses(four) == pytest.approx(losses(one), rel=3e-3)
    after = train.run(make(*over, f"run.resume={Path(four.run.dir) / 'checkpoints' / 'step_2'}", dir="after"))
    assert list(after.losses().values()) == pytest.approx(losses(four)[2:], rel=3e-3)
    first, second = ({file.name for file in (Path(cfg.run.dir) / "hf").iterdir()} for cfg in (one, four))
    assert first == second
