"""`train.cuda_graphs` without a GPU: a graph that runs what it recorded again, into the memory of the first time."""

from __future__ import annotations

import json
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from octavo import fp8, models, train
from octavo.fp8 import observe
from octavo.fp8.kernels import CudaGraph
from octavo.parallel import World
from octavo.train.errors import TrainError
from octavo.train.run_dir.run_dir import read_rows
from octavo.train.setup import planning
from octavo.train.step import cuda_graphs, loss_scale
from octavo.train.step.cuda_graphs import CudaGraphs
from octavo.train.step.update import Loss

pytestmark = pytest.mark.usefixtures("bare_forward")

CPU = torch.device("cpu")


class Again:
    """Records without running: what the recording left in gradients is undone, and its result says nothing."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model

    def capture(self, work: Any) -> Tensor:
        before = [(p, p.grad.clone()) for p in self.model.parameters() if p.grad is not None]
        self.work, self.out = work, work().clone().fill_(torch.nan)
        for p, gradient in before:
            p.grad.copy_(gradient)
        self.places = {p: p.grad.data_ptr() for p, _ in before}
        return self.out

    def replay(self) -> None:
        assert all(p.grad.data_ptr() == place for p, place in self.places.items()), "gradients moved"
        with observe.mute_reports():
            self.out.copy_(self.work())


# --- a run ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def counting(tmp_path: Path, place: Path) -> str:
    """Rows of one length, judged at the same positions."""
    rows = [
        {
            "conversations": [
                {"from": "human", "value": f"Say {i} now."},
                {"from": "gpt", "value": f"{i} {(3 * i) % 10}"},
            ]
        }
        for i in range(10)
    ]
    (tmp_path / "rows.json").write_text(json.dumps(rows))
    return f"[{{path: {tmp_path / 'rows.json'}}}]"


@pytest.mark.parametrize(("model", "precision"), [("text", "auto"), ("tiny", "auto"), ("text", "fp16")])
def test_graphs_do_not_change_losses_counts_or_weights(
    make, place: Path, counting: str, model: str, precision: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two micro-batches a step; steps 1, 4, 5 and 8 are looked into, in step 2 the second one is captured. In FP16 with
    a loss scale that doubles every two steps."""
    made: list[CudaGraphs] = []

    class Here(CudaGraphs):
        def __init__(self, model: nn.Module, *more: Any) -> None:
            super().__init__(model, *more, lambda: Again(model))
            made.append(self)

    monkeypatch.setattr(cuda_graphs, "CudaGraphs", Here)
    monkeypatch.setattr(cuda_graphs, "unsupported_run_reason", lambda *_: None)
    monkeypatch.setattr(loss_scale, "INTERVAL", 2)
    freeze = "model.freeze=[image_encoder, image_projector]" if model == "tiny" else "model.freeze=[]"
    over = (f"model.path={place / model}", f"data.train={counting}", "data.eval=[]", freeze, "run.health_every=4",
            "run.hf=true", "train.steps=8", f"train.precision={precision}")  # fmt: skip
    found = []
    for on in ("false", "true"):
        with fp8.count_gemms() as counts:
            result = train.run(make(*over, f"train.cuda_graphs={on}", dir=on))
        rows = [(r["loss"], r["grad_norm"], r.get("loss_scale")) for r in read_rows(result.dir / "metrics.jsonl")]
        found.append((rows, dict(counts.calls), dict(counts.flops), dict(counts.expected), dict(counts.ran)))
    assert made[0].replays == 1 + 2 * 3, "one in step 2, all in steps 3, 6 and 7"
    assert found[0][0][7][2] == (65536 * 2**3 if precision == "fp16" else None)
    for without, with_graphs in zip(*found, strict=True):
        assert without == with_graphs
    hf = [(Path(make(dir=on).run.dir) / "hf" / "model.safetensors").read_bytes() for on in ("false", "true")]
    assert hf[0] == hf[1]


# --- one micro-batch --------------------------------------------------------------------------------------------------


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head, self.unused = nn.Embedding(9, 4), nn.Linear(4, 9), nn.Linear(4, 4)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.embed(ids))


def batch(rows: int = 1, length: int = 5, seed: int = 0, images: bool = False, shorter: int = 0) -> tuple[Any, ...]:
    ids = torch.randint(0, 9, (rows, length), generator=torch.Generator().manual_seed(seed))
    meta = SimpleNamespace(sees=images, lengths=(length,) * (rows - 1) + (length - shorter,))
    keep = torch.arange(length - 1)
    given = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids, "meta": meta}
    return given, keep, ids[:, 1:].clone(), torch.full((rows, length - 1), 0.25)


def small(graph: Any = None) -> tuple[Small, CudaGraphs, list[str]]:
    torch.manual_seed(0)
    model, said = Small(), []

    def loss_at(given: dict[str, Any], keep: Tensor, target: Tensor, weight: Tensor) -> Loss:
        logits = model(given["input_ids"])[:, keep]
        each = nn.functional.cross_entropy(logits.flatten(0, 1), target.flatten(), reduction="none")
        loss = (each.view(target.shape) * weight).sum()
        return Loss(loss, torch.stack([loss, torch.zeros_like(loss)]).detach())

    return model, CudaGraphs(model, CPU, loss_at, said.append, graph or (lambda: Again(model))), said


def eager(model: nn.Module, each: CudaGraphs, given: tuple[Any, ...]) -> Tensor:
    loss = each.compute_loss(*given)
    loss.total.backward()
    return loss.parts


def test_gradients_of_graph_and_eager_micro_batches_add_up() -> None:
    """Seen, captured, another shape in between; then a step in which the first one runs eagerly."""
    plain, reference, _ = small()
    model, found, said = small()
    steps = [[(1, 5), (1, 5), (2, 4), (1, 5)], [(3, 3), (1, 5), (2, 4)], [(1, 5)]]
    replayed = []
    for number, shapes in enumerate(steps):
        for at, shape in enumerate(shapes):
            given = batch(*shape, seed=10 * number + at)
            parts = found.run(*given)
            replayed.append(parts is not None)
            parts = eager(model, found, given) if parts is None else parts
            assert torch.equal(parts, eager(plain, reference, given))
        for (name, a), b in zip(model.named_parameters(), plain.parameters(), strict=True):
            assert (a.grad is None) == (b.grad is None) == name.startswith("unused"), "who has no gradient gets none"
            assert a.grad is None or torch.equal(a.grad, b.grad), name
        for p in (*model.parameters(), *plain.parameters()):
            p.grad = None
    assert replayed == [False, True, False, True, False, True, True, True] and not said


def test_unsupported_batches_run_eagerly_and_are_logged_once() -> None:
    _, found, said = small()
    given, keep, target, weight = batch()
    odd = target.clone()
    odd[0, 0] = -100
    for _ in range(3):
        assert found.run(*batch(images=True)) is None
        assert found.run(*batch(rows=2, shorter=1)) is None
        assert found.run(given, keep, odd, weight) is None
    assert [line.split(": ", 2)[2][:25] for line in said] == [
        "a batch has images or vid", "rows of a batch differ in", "rows of a batch have loss"
    ]  # fmt: skip


def test_number_of_captured_shapes_is_limited() -> None:
    _, found, said = small()
    for length in range(3, 4 + cuda_graphs.MAX_SHAPES):
        found.run(*batch(length=length))
        assert (found.run(*batch(length=length)) is None) == (length == 3 + cuda_graphs.MAX_SHAPES)
    assert said == [
        f"train.cuda_graphs: runs without a graph: {cuda_graphs.MAX_SHAPES} shapes of micro-batches are captured, "
        "which is the maximum"
    ]
    assert found.run(*batch(length=3)) is not None


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (
            RuntimeError("operation not permitted when stream is capturing\nand more"),
            "RuntimeError: operation not permitted when stream is capturing",
        ),
        (NotImplementedError(), "NotImplementedError"),
    ],
)
def test_failed_capture_is_logged_and_does_not_change_the_step(error: Exception, words: str) -> None:
    class Refuses(Again):
        def capture(self, work: Any) -> Tensor:
            raise error

    model, found, said = small(lambda: Refuses(model))
    first = eager(model, found, batch())
    before = {n: p.grad for n, p in model.named_parameters()}
    values = {n: g.clone() for n, g in before.items() if g is not None}
    found.run(*batch())
    assert found.run(*batch()) is None and found.run(*batch()) is None
    assert said == [f"train.cuda_graphs: runs without a graph: a step cannot be captured ({words})"]
    for name, p in model.named_parameters():
        assert p.grad is before[name] and (p.grad is None or torch.equal(p.grad, values[name]))
    assert first.isfinite().all()


# --- what never could be ----------------------------------------------------------------------------------------------


def test_a_run_that_could_capture_nothing_is_refused_before_weights_are_read(make, monkeypatch) -> None:
    monkeypatch.setattr("octavo.train.setup.build.assemble_model", lambda *_: pytest.fail("weights were read"))
    with pytest.raises(
        TrainError, match="train.cuda_graphs: true is not possible: it needs a GPU, and this runs on cpu. Or"
    ):
        train.run(make("train.cuda_graphs=true"))


@pytest.mark.parametrize(
    ("over", "ranks", "why"),
    [
        ("train.clip=1", 1, None),
        ("train.clip=1", 2, "between 2 ranks"),
        ("fp8.recipe=delayed", 1, "delayed scaling"),
        ("fp8.param=true", 1, "FP8 between steps"),
    ],
)
def test_why_not_run_names_the_obstacle(make, over: str, ranks: int, why: str | None) -> None:
    cfg = make(over)
    plan, _, _ = planning.plan_for(cfg)
    found = cuda_graphs.unsupported_run_reason(plan, World(0, ranks, device=torch.device("cuda")))
    assert found is None if why is None else why in str(found)


def test_why_not_model_names_the_trained_tower(make, place: Path) -> None:
    model, family = planning.meta_model(make())
    assert "vision tower that is trained" in str(cuda_graphs.unsupported_model_reason(model, family, 0.0))
    for p in model.model.visual.parameters():
        p.requires_grad_(False)
    assert cuda_graphs.unsupported_model_reason(model, family, 0.0) is None
    assert "routers" in str(cuda_graphs.unsupported_model_reason(model, family, 0.1))
    model.model.visual.add_module("drop", nn.Dropout(0.1))
    assert "dropout (model.visual.drop)" in str(cuda_graphs.unsupported_model_reason(model, family, 0.0))


def test_without_masks_is_without_them_and_refuses_windows(place: Path) -> None:
    model = models.load(place / "text").eval()
    ids = torch.arange(12)[None]
    name = model.config._attn_implementation
    seen: list[Any] = []
    hook = model.model.layers[0].self_attn.register_forward_pre_hook(
        lambda m, args, kwargs: seen.append(kwargs.get("attention_mask")), with_kwargs=True
    )
    padded = torch.ones_like(ids)
    padded[0, :2] = 0
    with torch.no_grad():
        plain = model(ids).logits
        with models.disable_masks(model):
            assert torch.equal(model(ids).logits, plain)
            model(ids, attention_mask=padded)
    hook.remove()
    assert seen == [None, None, None] and model.config._attn_implementation == name
    model.config.layer_types = ["sliding_attention", *model.config.layer_types[1:]]
    with pytest.raises(models.ModelError, match="layers of type sliding_attention"), models.disable_masks(model):
        pass


def test_a_capture_that_fails_tells_the_cause_and_gives_random_numbers_back(monkeypatch) -> None:
    """CUDA's own end of a capture that was broken off raises, too (on an H200: tests/gpu/test_graphs.py)."""
    given: list[str] = []
    generator = SimpleNamespace(clone_state=lambda: "before", graphsafe_set_state=given.append)

    @contextmanager
    def graph(captured, pool):
        try:
            yield
        except ValueError as error:
            raise RuntimeError("operation failed due to a previous error during capture") from error

    def work() -> torch.Tensor:
        raise ValueError("the cause")

    for name, fake in {"graph": graph, "CUDAGraph": object, "current_device": lambda: 0,
                       "default_generators": (generator,)}.items():  # fmt: skip
        monkeypatch.setattr(torch.cuda, name, fake)
    with pytest.raises(ValueError, match="the cause"):
        CudaGraph(None).capture(work)
    assert given == ["before"] and CudaGraph(None).capture(lambda: torch.ones(1)).item() == 1 and len(given) == 1
