"""Weights of another run to begin with (`run.start_from`), and checkpoints that hold nothing but weights."""

from __future__ import annotations

import shutil
import signal
from pathlib import Path

import pytest
from rich.console import Console

from octavo import checkpoint, train
from octavo.checkpoint import CheckpointError, SafeReader
from octavo.config import ConfigError, load_config
from octavo.train.run_dir.run_dir import read_rows
from tests.train.conftest import at
from tests.train.test_ranks import losses, on_ranks

pytestmark = pytest.mark.usefixtures("uncounted", "unseen")

# One row over and over, so that the next step of a run and the first of another see the same.
SAME = ("data.train.0.max_samples=1", "data.eval=[]", "train.warmup=0", "train.schedule=constant", "fp8.recipe=off")
LORA = ("lora={rank: 4}",)
STEP = 3


def size(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.rglob("*.distcp"))


def slots(folder: Path) -> set[str]:
    """The kinds of entries that a checkpoint has beside those of the model."""
    names = SafeReader(folder).read_metadata().state_dict_metadata
    return {name.partition(".")[0] + "." + name.rpartition(".")[2] for name in names if not name.startswith("model.")}


@pytest.mark.parametrize(
    ("over", "other"),
    [
        pytest.param((), (), id="full"),
        pytest.param(("optimizer.master=bf16+16",), (), id="both halves", marks=pytest.mark.long),
        pytest.param(
            ("optimizer.master=bf16+16",),
            ("optimizer.master=fp32", "train.precision=bf16"),
            id="halves, fp32",
            marks=pytest.mark.long,
        ),
        pytest.param(LORA, (), id="adapters"),
        pytest.param((*LORA, "lora.dtype=bf16"), (), id="adapters in BF16", marks=pytest.mark.long),
    ],
)
def test_start_from_loads_the_weights(make, over, other):
    """The same first loss as the checkpoint's own next step, whether it holds the optimizer's states or not."""
    first = make(*SAME, *over, "train.precision=auto", f"run.milestones=[{STEP}]", dir="first")
    told = train.run(first).losses()
    bare = train.run(make(*SAME, *over, f"train.steps={STEP}", "run.save_states=false", dir="bare"))
    whole, alone = (run / f"step_{STEP}" for run in (Path(first.run.dir) / "milestones", bare.dir / "checkpoints"))
    assert size(alone) < 0.6 * size(whole)
    assert slots(alone) <= {"optimizer.master", "optimizer.master_low"} and len(slots(whole)) > 5
    for number, source in enumerate((whole, bare.dir)):
        cfg = make(*SAME, *over, *other, f"run.start_from={source}", "train.steps=2", dir=f"second-{number}")
        seen = train.run(cfg).losses()
        assert seen[1] == (pytest.approx(told[STEP + 1], rel=1e-2) if other else told[STEP + 1])
        assert seen[1] != told[1] and len(seen) == 2
    if not other:  # a fresh optimizer's step is another one
        assert seen[2] != told[STEP + 2]


def test_halves_lose_nothing_on_the_way_to_fp32(make):
    """fp32 -> both halves -> fp32: the values of all weights, bit for bit."""
    import torch

    from octavo.checkpoint.run_state.dcp_safe import read_item

    def values(folder: Path) -> dict[str, torch.Tensor]:
        places = SafeReader(folder).read_metadata().storage_data
        names = [i for i in places if i.fqn.startswith("model.")]
        return {i.fqn: read_item(folder / places[i].relative_path, places[i], i.fqn) for i in names}

    still = (*SAME, "train.steps=1", "train.lr=1e-30", "run.save_states=false")
    train.run(make(*SAME, "train.steps=1", dir="a"))
    train.run(make(*still, "optimizer.master=bf16+16", f"run.start_from={Path(make(dir='a').run.dir)}", dir="b"))
    train.run(make(*still, f"run.start_from={Path(make(dir='b').run.dir)}", dir="c"))
    a, c = (values(Path(make(dir=name).run.dir) / "checkpoints" / "step_1") for name in "ac")
    assert a.keys() == c.keys() and all(torch.equal(a[name], c[name]) for name in a)
    assert all(value.dtype == torch.float32 for value in c.values())


def test_weights_only_checkpoint_cannot_be_resumed(make):
    cfg = make(*SAME, "run.save_every=2", "run.save_states=false", "run.keep=9")
    out = Console(record=True, width=300)
    assert train.run(cfg, console=out, callbacks=[at(4, signal.SIGTERM)]).status == "stopped"
    directory = Path(cfg.run.dir)
    assert f"Start a new run with these weights: run.start_from={directory}" in out.export_text()
    last = directory / "checkpoints" / "step_4"
    for over, dir in (
        (("run.resume=auto",), "run"),
        ((f"run.resume={last}",), "else"),
        ((f"run.fork={last}",), "fork"),
    ):
        with pytest.raises(train.TrainError, match=r"holds only weights \(run.save_states: false\).*run.start_from="):
            train.run(make(*SAME, *over, dir=dir))
    model = object()
    with pytest.raises(CheckpointError, match="it has no optimizer state to continue with"):
        checkpoint.load(last, model=model, optimizer=model, world=_One())  # type: ignore[arg-type]
    shutil.rmtree(directory / "checkpoints" / "step_2")
    # One with states beside it is offered; the run that begins anew is a run like any other, and ends with hf/.
    whole = train.run(make(*SAME, "train.steps=2", dir="whole"))
    shutil.copytree(whole.dir / "checkpoints" / "step_2", directory / "checkpoints" / "step_2")
    with pytest.raises(train.TrainError, match=r"or continue from .*step_2, which has them: run.resume="):
        train.run(make(*SAME, "run.resume=auto"))
    again = train.run(make(*SAME, f"run.start_from={directory}", "run.hf=true", "train.steps=1", dir="again"))
    assert (again.dir / "hf" / "model.safetensors").is_file()


class _One:
    rank, size = 0, 1

    def gather_objects(self, value):
        return [value]


@pytest.mark.long
def test_a_run_that_began_with_weights_resumes_without_them(make):
    """Where it began stays known, though the weights are gone; another beginning is refused."""
    first = train.run(make(*SAME, "train.steps=2", dir="first"))
    over = (*SAME, "run.save_every=2", "run.keep=9")
    whole = train.run(make(*over, f"run.start_from={first.dir}", dir="whole"))
    stopped = make(*over, f"run.start_from={first.dir}", dir="stopped")
    train.run(stopped, callbacks=[at(4, signal.SIGTERM)])
    with pytest.raises(
        train.TrainError, match=r"a run that started from .*first/checkpoints/step_2, but run.start_from is .*whole"
    ):
        train.run(make(*over, f"run.start_from={whole.dir}", "run.resume=auto", dir="stopped"))
    state = first.dir / "checkpoints" / "step_2" / "state.json"
    state.write_bytes(state.read_bytes() + b" ")
    with pytest.raises(train.TrainError, match="first/checkpoints/step_2, which has changed since; restore it"):
        train.run(make(*over, "run.resume=auto", dir="stopped"))
    shutil.rmtree(first.dir)
    assert train.run(make(*over, "run.resume=auto", dir="stopped")).losses() == whole.losses()
    assert load_config(stopped.run.dir + "/config.yaml").run.start_from == str(first.dir)


@pytest.mark.usefixtures("seen")
@pytest.mark.parametrize(
    ("over", "message"),
    [
        (("run.start_from=nowhere",), "run.start_from nowhere: there is no such folder. Name a checkpoint"),
        (("run.start_from={place}/digits",), "it is not a checkpoint and contains none"),
        (
            ("run.start_from={full}", "model.path={place}/text"),
            "tensors that this model does not have, first .*another model",
        ),
        (("run.start_from={full}", *LORA), "holds a whole model, and not one of the parameters that this model trains"),
        (("run.start_from={lora}",), "holds only trained parameters .*Continue it with the `lora` section"),
        (("run.start_from={lora}", "lora={rank: 4, alpha: 8}"), "lora.alpha was 32.0, is 8.0. Set them as they were"),
        (("run.start_from={lora}", *LORA, "model.path={other}"), "is not the one with which .* was trained"),
    ],
)  # fmt: skip
def test_start_from_rejects_unsuitable_checkpoints(make, place, sources, over, message):
    words = {"place": place, **sources}
    given = [word if word.startswith("lora") else word.format(**words) for word in over]
    data = [f"data.train=[{{path: {place / 'digits/talk.json'}}}]"] if "{place}/text" in str(over) else []
    (place / "digits/talk.json").write_text('[{"messages": [{"role": "user", "content": "a"}, '
                                            '{"role": "assistant", "content": "b"}]}]')  # fmt: skip
    with pytest.raises((train.TrainError, CheckpointError), match=message):
        train.run(make("fp8.recipe=off", "data.eval=[]", *data, *given, dir="wrong"))


@pytest.fixture(scope="module")
def sources(place, tmp_path_factory):
    """A full and a LoRA run of one step, and another model of the same shape."""
    from octavo.config import load_config_text
    from octavo.models.tiny import tiny

    folder = tmp_path_factory.mktemp("sources")
    tiny.write("qwen3_vl", folder / "other", size="mini", seed=5)
    text = f"""
model: {{path: {place / "tiny"}}}
fp8: {{recipe: off}}
data: {{train: [{{path: {place / "digits/train.json"}}}]}}
train: {{steps: 1, seq_length: 128, micro_batch: 1, global_batch: 1}}
run: {{dir: {folder}/full, health_every: 0, tensorboard: false, hf: false, threads: 1}}
"""
    train.run(load_config_text(text))
    train.run(load_config_text(text, [*LORA, f"run.dir={folder}/lora"]))
    return {name: folder / name for name in ("full", "lora", "other")}


@pytest.mark.parametrize(
    ("over", "key"),
    [(("run.resume=./a/step_1",), "run.resume"), (("run.fork=./a/step_1",), "run.fork"),
     (("lora={adapter: ./a}",), "lora.adapter")],
)  # fmt: skip
def test_a_run_begins_with_one_thing(make, over, key):
    with pytest.raises(ConfigError, match=rf"run.start_from: is set together with {key}, .*remove one of them"):
        make("run.start_from=./b", *over)


@pytest.mark.long
def test_on_two_ranks(make):
    """Two ranks begin with what one saved, and one with what two saved, to the rounding of their sums."""
    first = make(*SAME, f"run.milestones=[{STEP}]", dir="first")
    told = train.run(first).losses()
    start = f"run.start_from={Path(first.run.dir) / 'milestones' / f'step_{STEP}'}"
    two = make(*SAME, start, "train.steps=1", "train.lr=1e-30", "run.save_states=false", dir="two")
    on_ranks(two)
    assert losses(two) == pytest.approx([told[STEP + 1]], rel=1e-6)
    one = train.run(make(*SAME, f"run.start_from={two.run.dir}", "train.steps=1", dir="one"))
    assert list(one.losses().values()) == pytest.approx([told[STEP + 1]], rel=1e-6)
    assert read_rows(Path(two.run.dir) / "metrics.jsonl")[0]["step"] == 1
