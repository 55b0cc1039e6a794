"""Rollouts by replicas: the trainer's bits with batch invariance, and the same bits however many replicas are lost.

The replicas are in this process (:mod:`tests.rl.replicas_in_process`); Ray's are in test_ray.py."""

from __future__ import annotations

import io
import json
import random
import re
import signal
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest
import torch
from rich.console import Console
from torch import nn

from octavo import fp8, rl
from octavo.config import Config, ConfigError, load_config_text, override, to_yaml
from octavo.data.encoding.sample import Input
from octavo.fp8.delayed import named_histories
from octavo.generation import Completion, GenerationError, Prompt
from octavo.generation.engines import Weights, wire
from octavo.report.run.history import History
from octavo.report.run.run_page import write_page
from octavo.rl.fleet import fleet, replica
from octavo.rl.fleet.fleet import FLEET
from octavo.rl.fleet.replica import ReplicaSettings
from octavo.rl.fleet.tensors import rollout_tensors
from octavo.rl.phases.summary import describe_step
from octavo.train import TrainError
from octavo.train.estimate.memory import MemoryEstimator
from octavo.train.setup import planning
from octavo.train.setup.frozen_base import frozen_casts
from octavo.train.setup.token_counts import assume_tokens
from tests import ranks
from tests.rl.forks import both
from tests.rl.replicas_in_process import Fault, ReplicasInProcess
from tests.rl.test_kills import without_times
from tests.rl.test_rl_phase import LORA, read_completions, read_metrics
from tests.train.conftest import at

pytestmark = pytest.mark.usefixtures("uncounted", "unseen")

Make = Callable[..., Config]
RAY = "rl.engine={name: ray, replicas: 2, chunk: 1, timeout: 20}"
INVARIANT = ("rl.invariant=true", "rl.show=16")


@pytest.fixture
def replicas(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[ReplicasInProcess]]:
    """replicas(fault=..., order=...) -> the transports of the runs that follow; the runs need no Ray."""
    transports: list[ReplicasInProcess] = []

    def use(**options: object) -> list[ReplicasInProcess]:
        def transport(cfg: Config, stepper, directory: Path) -> ReplicasInProcess:
            settings = ReplicaSettings(to_yaml(cfg), (directory / "plan.json").read_text(), 1)
            transports.append(ReplicasInProcess(settings, cfg.rl.engine.replicas, **options))
            return transports[-1]

        monkeypatch.setattr(fleet, "ray_transport", transport)
        monkeypatch.setattr(fleet, "has_ray", lambda: True)
        return transports

    return use


def events(cfg: Config) -> list[dict]:
    return [json.loads(line) for line in (Path(cfg.run.dir) / FLEET).read_text().splitlines()]


def bits(cfg: Config) -> tuple[list[dict], list[tuple]]:
    return without_times(read_metrics(cfg)), read_completions(cfg)


@pytest.mark.parametrize(
    "overrides",
    [
        ("fp8.recipe=blockwise",),
        ("fp8.recipe=mxfp8",),
        ("fp8.recipe=off",),
        LORA,
        ("rl.algorithm=ppo",),
        ("rl.algorithm=ppo", *LORA),
        ("fp8.param=true", "rl.mini_batches=2"),
        ("model.freeze=[model.layers.0.*]", "fp8.foundation={recipe: blockwise, fwd: bf16}"),
    ],
    ids=["block", "mxfp8", "high", "lora", "ppo", "ppo lora", "param", "frozen layer"],
)
def test_replicas_generate_the_bits_of_the_trainer(rl_config: Make, replicas, overrides: tuple[str, ...]) -> None:
    """With batch invariance a rollout does not depend on the batch, so replicas can be compared bit for bit."""
    transports = replicas()
    plain = rl_config(*INVARIANT, *overrides, dir="plain")
    other = rl_config(*INVARIANT, *overrides, RAY, dir="ray")
    rl.run(plain)
    rl.run(other)
    assert bits(plain) == bits(other)
    rows = read_metrics(other)
    assert all(row["logp_gap_max"] == 0 for row in rows)
    assert transports[0].is_closed and [row["step"] for row in events(other)] == [0, 1, 2]


@pytest.mark.usefixtures("seen")
def test_images_travel_with_their_prompts(rl_config: Make, replicas) -> None:
    replicas()
    plain, other = rl_config(*INVARIANT, dir="plain"), rl_config(*INVARIANT, RAY, dir="ray")
    rl.run(plain)
    rl.run(other)
    assert bits(plain) == bits(other)


def test_replicas_have_the_histories_of_delayed_scaling(rl_config: Make, replicas) -> None:
    """Its scales depend on the batch, so no bits can be compared; the digest of each version covers the histories."""
    transports = replicas()
    rl.run(rl_config("fp8.recipe=delayed", RAY))
    histories = named_histories(transports[0].replicas[0].model)
    assert histories and any(float(history.max()) > 0 for history in histories.values())


def test_adapters_alone_are_sent_for_lora(rl_config: Make, replicas) -> None:
    transports = replicas()
    for name, overrides in (("full", ("fp8.recipe=blockwise",)), ("lora", LORA)):
        rl.run(rl_config(*overrides, RAY, "train.steps=2", "train.warmup=1", dir=name))
    full, lora = ({name: size for name, size in one.sent.items() if "chunk" not in name} for one in transports)
    assert [*full] == [*lora] == ["0.0", "1.0"]
    model = replica.build_model(
        load_config_text(transports[1].settings.config), transports[1].settings.plan, torch.device("cpu")
    )
    adapters = sum(p.numel() * p.element_size() for name, p in model.named_parameters() if "lora_" in name)
    assert adapters <= lora["1.0"] < adapters + 64 * 2 * 14 + 64


def test_a_value_in_blocks_is_one_byte() -> None:
    model = nn.Sequential(nn.Linear(1024, 1024, bias=False))
    plan = fp8.plan(model, "blockwise")
    casts = frozen_casts(model, plan)
    fp8.apply(model, plan)
    manifest, pieces = Weights(sends_fixed=True).pack(0, lambda fixed: rollout_tensors(model, casts, fixed))
    assert sum(piece.nbytes for piece in pieces.values()) / 1024**2 == pytest.approx(1.0002, abs=1e-4)
    assert [(entry.name, entry.dtype) for entry in manifest.entries] == [
        ("0.weight", "float8_e4m3fn"),
        ("0.weight#scale", "float32"),
    ]


def test_plan_has_no_cache_in_the_memory_of_the_trainer(rl_config: Make) -> None:
    for over, has_cache in (((), True), ((RAY,), False)):
        cfg = rl_config(*over)
        model, family = planning.meta_model(cfg)
        plan, family, _ = planning.plan_model(cfg, model, family)
        tokens = assume_tokens(cfg, family.components, model.config)[0]
        footprint = MemoryEstimator(cfg, model, family, plan, tokens, device="cpu").estimate(cfg)
        assert (footprint.rollout is not None) is has_cache
        assert ("generated by 2 replicas" in describe_step(cfg)[0]) is not has_cache


FAULTS: tuple[Fault, ...] = ("lost", "lost after", "hangs", "stale")


@pytest.mark.parametrize("seed", range(10))
def test_lost_late_and_stale_replicas_change_no_bit(rl_config: Make, replicas, seed: int, quiet) -> None:
    draw = random.Random(seed)
    chosen = {draw.randint(1, 18): draw.choice(FAULTS) for _ in range(3)}
    transports = replicas(
        fault=lambda number, method, replica: chosen.pop(number, None), order=lambda handles: draw.randrange(8)
    )
    cfg = rl_config(*OVER, dir=f"seed{seed}")
    rl.run(cfg)
    assert bits(cfg) == quiet
    happened = [row for row in events(cfg) if "event" in row]
    assert happened and len(chosen) < 3 and transports[-1].is_closed


OVER = ("fp8.recipe=blockwise", RAY, "rl.show=16")


QUIET: list[tuple[list[dict], list[tuple]]] = []


@pytest.fixture
def quiet(rl_config: Make, replicas) -> tuple[list[dict], list[tuple]]:
    """What a run without faults writes; it is run once."""
    if not QUIET:
        replicas()
        cfg = rl_config(*OVER, dir="quiet")
        rl.run(cfg)
        assert not [row for row in events(cfg) if "event" in row]
        QUIET.append(bits(cfg))
    return QUIET[0]


def test_nodes_that_stay_away_end_the_run_only_if_all_do(rl_config: Make, replicas, quiet, tmp_path: Path) -> None:
    replicas(fault=lambda number, method, replica: "down" if number > 4 and replica == 1 else None)
    cfg = rl_config(*OVER, dir="one")
    rl.run(cfg)
    assert bits(cfg) == quiet
    (event,) = (row for row in events(cfg) if "event" in row)
    assert event["event"] == "lost" and event["replica"] == 1
    page, _ = write_page([History.read(cfg.run.dir)], tmp_path / "page.html")
    text = page.read_text()
    assert "<h2>Rollouts by replicas</h2>" in text and "1 times a replica" not in text and "its process ended" in text
    replicas(fault=lambda number, method, replica: "down" if number > 7 else None)
    with pytest.raises(GenerationError, match=r"none of 2 replicas could be reached for 20 s.*resume"):
        rl.run(rl_config(*OVER, "rl.engine.timeout=20", dir="all"))


def test_error_names_prompts_that_end_every_replica(rl_config: Make, replicas) -> None:
    replicas(fault=lambda number, method, replica: "lost after" if method == "generate" else None)
    with pytest.raises(GenerationError, match=r"3 replicas were lost .* same prompts \(from .*lower rl.slots"):
        rl.run(rl_config(*OVER))


def test_error_names_a_tensor_that_a_replica_has_otherwise(
    rl_config: Make, replicas, monkeypatch: pytest.MonkeyPatch
) -> None:
    build = replica.build_model

    def with_other_norm(*arguments):
        model = build(*arguments)
        model.model.norm.weight.data[0] += 1
        return model

    replicas()
    monkeypatch.setattr(replica, "build_model", with_other_norm)
    with pytest.raises(GenerationError, match=r"other weights than the trainer: model.norm.weight differs"):
        rl.run(rl_config(*LORA, RAY))


@pytest.mark.parametrize(
    ("overrides", "key", "reason"),
    [
        (["rl.engine={replicas: 3}"], "rl.engine.replicas", "has no effect on octavo"),
        (["rl.engine=vllm"], "rl.engine", "vllm"),
        (["rl.engine={name: ray, replicas: 0}"], "rl.engine.replicas", "at least 1"),
        ([RAY, "fp8.rules=[{match: '*', recipe: off, last: 0.5}]"], "rl.engine.name", "a part of the steps"),
        ([RAY, "rl.stale=1", "rl.max_gap=1"], "rl.max_gap", "their gap is not measured"),
        ([RAY, "fp8.adapt=true"], "rl.engine.name", "fp8.adapt changes it"),
    ],
)
def test_engine_refuses_settings_that_it_does_not_follow(
    rl_config: Make, overrides: list[str], key: str, reason: str
) -> None:
    with pytest.raises(ConfigError) as error:
        rl_config(*overrides)
    assert key in str(error.value) and reason in str(error.value)


def test_errors_come_before_the_model_is_read(rl_config: Make, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    cfg = rl_config(RAY, f"model.path={tmp_path / 'nowhere'}")
    with monkeypatch.context() as patch:
        patch.setattr(fleet, "has_ray", lambda: False)
        with pytest.raises(TrainError, match=r"needs Ray: pip install 'octavo\[ray\]'"):
            fleet.check_engine(cfg)
    monkeypatch.setattr(fleet, "has_ray", lambda: True)
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "model.safetensors").write_bytes(b"")
    with monkeypatch.context() as patch:
        patch.setattr(fleet.encryption, "is_encrypted", lambda file: file.name == "model.safetensors")
        with pytest.raises(TrainError, match="keys do not leave the trainer's process. Use rl.engine: octavo"):
            fleet.check_engine(override(cfg, [f"model.path={tmp_path / 'model'}"]))
    monkeypatch.setenv("WORLD_SIZE", "4")
    with pytest.raises(TrainError, match="before ranks round them to BF16.*train.gather: stored"):
        fleet.check_engine(override(cfg, ["train.gather=bf16"]))


OVERLAP = ("rl.stale=1", "train.steps=4", "train.lr=1e-2")


def test_overlap_has_the_versions_of_rollouts_before_the_update(rl_config: Make, replicas) -> None:
    """The replicas work when they are asked for the result, when the trainer has other weights; they have the old."""
    replicas()
    plain = rl_config(*OVER[:1], "rl.show=16", *OVERLAP, dir="plain")
    other = rl_config(*OVER, *OVERLAP, dir="ray")
    rl.run(plain)
    console = Console(file=io.StringIO(), width=200)
    rl.run(other, console=console)
    assert re.search(r"reward [0-9.]+  length [0-9.]+  waited [0-9.]+ s, [0-9]+ training", console.file.getvalue())
    rows = read_metrics(other)
    assert [row["weights"] for row in rows] == [0, 0, 1, 2] == [row["weights"] for row in read_metrics(plain)]
    assert [row["step"] for row in events(other)] == [0, 1, 2], "the last step begins no further rollout"
    assert all(row["logp_gap_max"] is None and row["rollout_tokens_per_s"] is None for row in rows)
    assert all(row["rollout_wait_s"] >= 0 for row in rows)
    assert read_completions(other)[:32] == read_completions(plain)[:32], "the initial weights generate two steps"


@pytest.mark.parametrize("overrides", [(), ("rl.algorithm=dapo",), ("rl.algorithm=ppo",)], ids=["grpo", "dapo", "ppo"])
def test_overlapped_run_resumes_bit_for_bit(rl_config: Make, replicas, overrides: tuple[str, ...]) -> None:
    """A checkpoint has the pending completions, also of a run that is killed between two steps."""
    replicas()
    whole = rl_config(*OVER, *OVERLAP, *overrides, "run.save_every=1", dir="whole")
    cfg = rl_config(*OVER, *OVERLAP, *overrides, "run.save_every=1", dir="stopped")
    rl.run(whole)
    rl.run(cfg, callbacks=[at(2, signal.SIGTERM)])
    assert len(read_metrics(cfg)) < 4
    rl.run(override(cfg, ["run.resume=auto"]))
    assert bits(cfg) == bits(whole)


@pytest.mark.long
@pytest.mark.race_is_a_bug
@pytest.mark.skipif(ranks.START != "fork", reason="ranks are forks")
@pytest.mark.parametrize(
    "overrides",
    [("fp8.recipe=blockwise",), ("fp8.recipe=blockwise", "fp8.param=true"), LORA],
    ids=["full", "param", "lora"],
)
def test_two_ranks_share_the_replicas_of_one(rl_config: Make, replicas, overrides: tuple[str, ...]) -> None:
    """Both ranks gather the weights; the replicas generate the bits of the engine in the ranks' own processes."""
    replicas()
    plain = rl_config(*INVARIANT, *overrides, "train.micro_batch=4", dir="plain")
    other = rl_config(*INVARIANT, *overrides, "train.micro_batch=4", RAY, dir="ray")
    for cfg in (plain, other):
        assert [code for code, _ in both(cfg)] == [0, 0]
    assert bits(plain) == bits(other)
    assert all(row["logp_gap_max"] == 0 for row in read_metrics(other))


def test_prompts_and_completions_travel_as_arrays() -> None:
    sizes = {"image_sizes": Input("image", np.array([[4, 8]]))}
    pixels, grid = np.ones((3, 5), dtype=np.float32), np.array([[1, 2, 2]])
    prompts = [
        Prompt(np.arange(3), 7, name="rows.json, row 7"),
        Prompt(np.arange(4), 8, pixels, grid, None, 1, "", sizes),
    ]
    for prompt, back in zip(prompts, wire.decode_prompts(wire.encode_prompts(prompts)), strict=True):
        np.testing.assert_equal(asdict(prompt), asdict(back))
    completion = Completion(1, 2, np.arange(3), np.zeros(3, dtype=np.float32), np.ones(3, dtype=np.float32), "stop")
    (back,) = wire.decode_completions(wire.encode_completions([completion]))
    np.testing.assert_equal(asdict(completion), asdict(back))
    assert wire.decode_prompts(wire.encode_prompts([])) == []
