"""`train.compile`: the same training, its blocks compiled."""

import functools
import json

import pytest
import torch
import torch._functorch.config

from benchmarks import step_model
from octavo import train
from octavo.config import load_config

pytestmark = pytest.mark.usefixtures("bare_forward")


@pytest.fixture(autouse=True)
def fresh():
    torch._dynamo.reset()
    with torch._functorch.config.patch(donated_buffer=True):
        yield
    torch._dynamo.reset()


COMMON = ("train.steps=4", "train.warmup=0", "data.eval=[]")


@pytest.mark.parametrize("recompute", ["none", pytest.param("full", marks=pytest.mark.long)])
def test_losses_and_the_proof_are_those_of_eager_training(make, graphs, recompute: str):
    common = (*COMMON, f"train.recompute={recompute}", "run.health_every=3")
    plain = train.run(make(*common, dir="plain"))
    assert not graphs
    compiled = train.run(make(*common, "train.compile=true", dir="compiled"))
    assert compiled.losses() == plain.losses()
    proofs = [json.loads((r.dir / "proof.json").read_text()) for r in (plain, compiled)]
    assert proofs[0] == proofs[1] and proofs[1]["shares"]["foundation"] == 1.0
    assert compiled.health == plain.health and compiled.health
    parts = [part for graph in graphs for part in graph.modules() if isinstance(part, torch.fx.GraphModule)]
    used = {str(node.target) for part in parts for node in part.graph.nodes}
    assert any("octavo.linear" in name for name in used)


@pytest.mark.long
@pytest.mark.parametrize("recipe", step_model.RECIPES)
def test_preset_fast_trains_as_its_keys_do_eagerly(make, graphs, recipe: str):
    """And every lever of benchmarks/step_model.py is in its run: operators of the graphs of its blocks, forward and
    backward, the head in the proof, the moments in the checkpoint."""
    common = (*COMMON, "preset=fast", f"fp8.recipe={recipe}")
    plain = train.run(make(*common, "train.compile=false", dir="plain"))
    assert not graphs
    with torch.profiler.profile() as profile:
        compiled = train.run(make(*common, dir="compiled"))
    assert compiled.losses() == plain.losses()
    in_graphs = {str(node.target).removeprefix("octavo.") for graph in graphs for node in graph.graph.nodes}
    assert {"linear", "rmsnorm", "gated_mlp"} <= in_graphs
    ran = {event.key.removeprefix("octavo::") for event in profile.key_averages() if event.key.startswith("octavo::")}
    wanted = {call for lever in step_model.LEVERS for call in lever.calls} - step_model.OUTSIDE_BLOCKS
    assert wanted <= ran, "eager layers have no such operators"
    assert json.loads((compiled.dir / "proof.json").read_text())["components"]["lm_head"]["dgrad"].keys() == {
        "reference"
    }
    assert load_config(compiled.dir / "config.yaml").optimizer.states == "fp8"


def test_a_compiler_that_fails_is_a_sentence_with_the_fix(make, monkeypatch):
    def broken(graph, inputs):
        raise OSError("no compiler here")

    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend=broken))
    with pytest.raises(train.TrainError, match=r"(?s)cannot be compiled: .*no compiler here.*use compile: false"):
        train.run(make(*COMMON, "train.compile=true"))


INSIDE = ("optimizer={states: fp8, update: backward}", "train.micro_batch=4")


@pytest.mark.long
@pytest.mark.parametrize("clip", [0.0, 0.05])
def test_updates_in_backward_go_through_compiled_blocks(make, graphs, clip: float):
    """Clipping goes through one graph twice, and compiled code may not give its memory away the first time."""
    common = (*COMMON, *INSIDE, f"train.clip={clip}", "run.health_every=0")
    plain = train.run(make(*common, dir="plain"))
    compiled = train.run(make(*common, "train.compile=true", dir="compiled"))
    assert graphs and compiled.losses() == plain.losses()
    assert torch._functorch.config.donated_buffer == (clip == 0)


@pytest.mark.long
@pytest.mark.rare
def test_inductor_trains_as_eager_does(make):
    """With updates in backward, which come between the graphs; those of a step come after all of them, as in
    test_lora.py's compiled blocks."""
    plain = train.run(make(*COMMON, *INSIDE, dir="plain")).losses()
    compiled = train.run(make(*COMMON, *INSIDE, "train.compile=true", dir="compiled")).losses()
    assert compiled == pytest.approx(plain, rel=1e-3)
