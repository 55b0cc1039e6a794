"""Phase rl: metrics of a step, independence from batching, resuming, and rejected configurations."""

from __future__ import annotations

import io
import json
import math
import shutil
import signal
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import get_args

import pytest
from rich.console import Console

from octavo import rl, train
from octavo.config import Config, ConfigError, override
from octavo.config.rules.phases import BUILT_IN
from octavo.config.sections.rl import CRITIC_KEYS, WITH_CRITIC, WITH_KL, RlSection
from octavo.data import DataError
from octavo.generation import GenerationError
from octavo.rl.objectives.advantages import ADVANTAGES
from octavo.rl.objectives.registry import ALGORITHMS, Values
from octavo.rl.phases.completions_log import COMPLETIONS
from octavo.rl.phases.rl_step import RlStepper
from octavo.rl.rewards import RewardError
from octavo.rl.rewards.builtin import BUILTIN
from octavo.train import TrainError
from octavo.train.callbacks import stopping
from octavo.train.run_dir.run_dir import read_rows
from tests.train.conftest import at

pytestmark = pytest.mark.usefixtures("uncounted", "unseen")

Make = Callable[..., Config]
LORA = ("lora={rank: 4}", "model.load_in_fp8=block")
COLUMNS = {"reward", "reward_std", "length", "entropy", "kl", "logp_gap_mean", "logp_gap_max", "rollout_tokens_per_s"}


@pytest.fixture
def text_rl_config(rl_config: Make, place: Path, tmp_path: Path) -> Make:
    """text_rl_config("rl.algorithm=dapo", ..., dir="a"): like `rl_config` with a text model in high precision, for
    tests that need neither images nor FP8."""
    rows = [{"prompt": f"Say {number}.", "answer": str(number)} for number in range(48)]
    (tmp_path / "talk.json").write_text(json.dumps(rows))
    overrides = (f"model.path={place / 'text'}", f"data.train=[{{path: {tmp_path / 'talk.json'}}}]", "fp8.recipe=off")
    return lambda *more, dir="run": rl_config(*overrides, *more, dir=dir)


def read_metrics(cfg: Config) -> list[dict]:
    return read_rows(Path(cfg.run.dir) / "metrics.jsonl")


def read_completions(cfg: Config) -> list[tuple]:
    lines = [json.loads(line) for line in (Path(cfg.run.dir) / COMPLETIONS).read_text().splitlines()]
    return [(line["step"], line["row"], line["sample"], line["completion"], line["reward"]) for line in lines]


@pytest.mark.parametrize("overrides", [(), LORA, ("fp8.recipe=off",)], ids=["full", "lora", "high"])
def test_step_reports_rewards_and_gap_between_rollout_and_trainer(rl_config: Make, overrides: tuple[str, ...]):
    cfg = rl_config(*overrides, "rl.show=16")
    result = rl.run(cfg)
    rows = read_metrics(cfg)
    assert all(row.keys() >= COLUMNS for row in rows) and len(rows) == 3
    for row in rows:
        assert 0 < row["reward"] < 1 and 0 < row["length"] <= 4 and 0 < row["entropy"] < math.log(512)
        near = 0.2 if overrides == LORA else 1e-4  # a BF16 base rounds differently for GEMMs of different shapes
        assert row["logp_gap_mean"] <= row["logp_gap_max"] < near
        assert row["kl"] is None, "there is no reference"
    completions = read_completions(cfg)
    assert len(completions) == 48
    assert rows[0]["reward"] == pytest.approx(sum(line[-1] for line in completions[:16]) / 16)
    assert not json.loads((result.dir / "proof.json").read_text())["pending"]


@pytest.mark.parametrize("overrides", [("rl.kl=0.1",), ("rl.mini_batches=2",)], ids=["reference", "remembered"])
def test_logprobs_of_rollout_trainer_and_reference_use_the_sampling_temperature(rl_config: Make, overrides: tuple):
    cfg = rl_config(*overrides, "rl.temperature=0.6", "fp8.recipe=off", "train.steps=1", "train.warmup=0")
    rl.run(cfg)
    (row,) = read_metrics(cfg)
    assert row["logp_gap_max"] < 1e-4 and row["kl"] == (0 if "rl.kl=0.1" in overrides else None)


@pytest.mark.parametrize(
    "overrides",
    [
        (),
        (*LORA, "rl.mini_batches=2", "train.micro_batch=3", "rl.algorithm=ppo", "rl.group=2"),
        ("fp8.recipe=rowwise", "train.logits=full", "fp8.activations=fp8", "train.recompute=full"),
    ],
    ids=["full", "lora", "rowwise"],
)
def test_invariant_rollouts_match_the_trainer_bit_for_bit(rl_config: Make, overrides: tuple[str, ...]):
    cfg = rl_config(*overrides, "rl.invariant=true", "rl.kl=0.1", "train.steps=2", "train.warmup=1", "rl.slots=5")
    rl.run(cfg)
    rows = read_metrics(cfg)
    assert rows[0]["kl"] == 0 and rows[1]["kl"]  # the initial weights equal the reference
    for row in rows:
        assert row["logp_gap_max"] == 0 and row["sampling/importance_sampling_ratio/max"] == 1


def test_completions_do_not_depend_on_slots_or_micro_batches(rl_config: Make):
    """In high precision, where results of a row hardly depend on the others, the first rollout is always the same."""
    first = []
    for name, overrides in (("all", ()), ("three", ("rl.slots=3",)), ("small", ("train.micro_batch=3",))):
        cfg = rl_config(*overrides, "fp8.recipe=off", "train.steps=1", "train.warmup=0", "rl.show=16", dir=name)
        rl.run(cfg)
        first.append((read_completions(cfg), pytest.approx(read_metrics(cfg)[0]["grad_norm"], rel=1e-4)))
    assert first[0] == first[1] == first[2]


@pytest.mark.usefixtures("seen")
def test_stopped_run_resumes_bit_for_bit(rl_config: Make):
    overrides = (*LORA, "rl.kl=0.1", "rl.mini_batches=2")
    uninterrupted = rl.run(rl_config(*overrides, dir="uninterrupted"))
    cfg = rl_config(*overrides)
    rl.run(cfg, callbacks=[at(1, signal.SIGTERM)])
    result = rl.run(override(cfg, ["run.resume=auto", "rl.slots=16", "rl.reward_timeout=99"]))
    assert result.losses() == uninterrupted.losses() and read_completions(cfg) == read_completions(
        rl_config(*overrides, dir="uninterrupted")
    )
    assert read_metrics(cfg)[0]["kl"] == 0 < read_metrics(cfg)[1]["kl"]


@pytest.mark.parametrize(
    "overrides",
    [
        ("rl.algorithm=rloo",),  # its KL is in the reward
        ("rl.algorithm=dapo", "rl.overlong=2"),  # draws further prompts
        ("rl.algorithm=gspo", "rl.epochs=2", "rl.mini_batches=2"),
        ("rl.algorithm=cispo", "rl.correction=mask", "rl.correction_level=geometric", "rl.entropy=0.01"),
        ("rl.algorithm=dr_grpo", "rl.kl=0.1", "rl.kl_estimator=k2", "rl.mask_truncated=true", "rl.stop=[a, e, i, o]"),
        ("rl.algorithm=bnpo", "rl.kv=fp8", "train.logits=full"),
        ("rl.algorithm=ppo", "rl.group=1", "train.logits=full", "rl.value_clip=0", "rl.stop=[a, e]", "rl.overlong=2"),
    ],
    ids=lambda overrides: overrides[0].partition("=")[2],
)
def test_algorithms_and_their_settings_run(text_rl_config: Make, overrides: tuple[str, ...]):
    cfg = text_rl_config(*overrides, "train.steps=2", "train.warmup=1")
    assert rl.run(cfg).status == "finished"
    for row in read_metrics(cfg):
        assert math.isfinite(row["loss"]) and math.isfinite(row["grad_norm"])
        assert 0 < row["entropy"] < math.log(512), "mean over the updates of a step"
        assert (row["kl"] is None) == ("rl.kl" not in str(overrides) and overrides[0][-4:] not in ("rloo", "=ppo"))
        assert ("value_loss" in row) == ("explained_variance" in row) == ("ppo" in overrides[0])
        assert ("sampling/draws" in row) == ("dapo" in overrides[0])


def test_rollout_speed_counts_all_draws(text_rl_config: Make, monkeypatch: pytest.MonkeyPatch):
    """With dynamic sampling; elapsed times are patched to one second."""
    monkeypatch.setattr(RlStepper, "_max_over_ranks", lambda stepper, *seconds: [1.0 for _ in seconds])
    overrides = ("rl.algorithm=dapo", "rl.overlong=0", "rl.group=2")
    cfg = text_rl_config(*overrides, "train.steps=1", "train.warmup=0")
    rl.run(cfg)
    (row,) = read_metrics(cfg)
    assert row["sampling/draws"] > 1 and row["length"] == 4
    assert row["rollout_tokens_per_s"] == row["sampling/draws"] * 4 * 2 * 4  # prompts, group, tokens


@pytest.mark.usefixtures("seen")
def test_dynamic_sampling_replaces_equal_groups_and_long_completions_are_penalized(rl_config: Make):
    overrides = ("rl.algorithm=dapo", "rl.overlong=2", "rl.group=2", "rl.show=16", "train.steps=1", "train.warmup=0")
    cfg = rl_config(*overrides, "fp8.recipe=off")
    rl.run(cfg)
    (row,) = read_metrics(cfg)
    assert row["length"] == 4 and row["reward"] == pytest.approx(row["rewards/regex/mean"] - 1)
    rewards = [reward for *_, reward in read_completions(cfg)]
    pairs = [*zip(rewards[::2], rewards[1::2], strict=True)]
    assert row["sampling/draws"] > 1 and pairs and all(a != b for a, b in pairs)
    alike = ("rl.rewards=[{reward: regex, pattern: '.?'}]", "rl.overlong=4", "rl.stop=[a, e, i, o]")
    with pytest.raises(TrainError, match="use rewards or prompts that distinguish completions"):
        rl.run(cfg := rl_config(*overrides, *alike, "fp8.recipe=off", dir="alike"))
    (row,) = read_metrics(cfg)
    assert row["empty"] and row["sampling/draws"] == 4, "length differences do not make a group informative"
    assert row["reward_std"] > 0 == row["frac_reward_zero_std"] and row["reward"] < row["rewards/regex/mean"] == 1


def test_equal_rewards_have_no_gradient(text_rl_config: Make):
    rewards = "rl.rewards=[{reward: regex, pattern: '.?'}]"
    cfg = text_rl_config(rewards, "train.steps=1", "train.warmup=0")
    rl.run(cfg)
    (row,) = read_metrics(cfg)
    assert (
        row["reward"] == row["frac_reward_zero_std"] == 1 and row["grad_norm"] == row["loss"] == row["reward_std"] == 0
    )


def test_run_finishes_without_informative_groups_only_if_it_had_some_before(
    text_rl_config: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(stopping, "MAX_CONSECUTIVE", 3)
    file = tmp_path / "own.py"
    file.write_text(
        "from pathlib import Path\ndone = Path(__file__).with_suffix('.done')\n"
        "def score(completions):\n    equal = done.exists()\n    done.touch()\n"
        "    return [float(n % 2 or equal) for n in range(len(completions))]\n"
    )
    cfg = text_rl_config(f"rl.rewards=['{file}:score']", "rl.dynamic_sampling=true", "train.steps=4")
    rl.run(cfg, callbacks=[at(2, signal.SIGTERM)])
    assert rl.run(override(cfg, ["run.resume=auto"])).status == "finished"
    assert [row.get("empty") for row in read_metrics(cfg)] == [None, True, True, True]
    starved = text_rl_config("rl.rewards=[{reward: regex, pattern: '.?'}]", "rl.dynamic_sampling=true", dir="starved")
    rl.run(starved, callbacks=[at(1, signal.SIGTERM)])  # a resume does not reset the count
    with pytest.raises(TrainError, match=r"3 steps in a row, up to step 3, .*rewards of each group are all equal"):
        rl.run(override(starved, ["run.resume=auto"]))


def test_resume_rejects_a_changed_reward_file(text_rl_config: Make, tmp_path: Path):
    file = tmp_path / "own.py"
    file.write_text(
        "def score(completions, answer, weight):\n    return [weight * len(c) for c, _ in zip(completions, answer)]"
    )
    entry = f"{{reward: '{file}:score', weight: 0.5, arguments: {{weight: 3}}}}"  # `weight` is also a key
    overrides = (f"rl.rewards=[{entry}, exact_match]", "rl.show=16")
    cfg = text_rl_config(*overrides)
    rl.run(cfg, callbacks=[at(1, signal.SIGTERM)])
    row = read_metrics(cfg)[0]
    assert row["reward"] == pytest.approx(0.5 * row["rewards/score/mean"] + row["rewards/exact_match/mean"])
    assert row["rewards/score/mean"] == pytest.approx(
        sum(3 * len(text) for *_, text, _ in read_completions(cfg)[:16]) / 16
    )
    file.write_text(file.read_text() + "\n")
    with pytest.raises(TrainError, match="made with another reward score"):
        rl.run(override(cfg, ["run.resume=auto"]))


@pytest.mark.usefixtures("seen")
def test_rewards_receive_the_columns_of_all_data_sets(rl_config: Make, place: Path, tmp_path: Path):
    rows = json.loads((place / "digits" / "train.json").read_text())
    rows[-1]["hint"] = "in a row that no step uses"
    (tmp_path / "rows.json").write_text(json.dumps(rows))
    (tmp_path / "own.py").write_text(
        "def score(completions, hint, source):\n    return [float(one is None) for one in hint]\n"
        "def asks(completions, nothing):\n    return [0.0] * len(completions)\n"
    )
    overrides = (f"data.train=[{{path: {tmp_path}/rows.json, images: {place / 'digits'}}}]", "train.warmup=0")
    overrides = (*overrides, "fp8.recipe=off")
    cfg = rl_config(*overrides, f"rl.rewards=['{tmp_path}/own.py:score']", "train.steps=1", "rl.prompts=2")
    rl.run(cfg)
    assert read_metrics(cfg)[0]["reward"] == 1 and all(row < len(rows) - 1 for _, row, *_ in read_completions(cfg))
    with pytest.raises(RewardError, match=r"takes nothing, but .* answer, .*images, videos, hint, .*\. Add it"):
        rl.run(rl_config(*overrides, f"rl.rewards=['{tmp_path}/own.py:asks']", dir="asks"))


def test_resume_rejects_changed_end_tokens(rl_config: Make, place: Path, tmp_path: Path):
    """generation_config.json may change under SFT, but in phase rl it determines where completions end."""
    folder = tmp_path / "model"
    shutil.copytree(place / "tiny", folder)
    cfg = rl_config(f"model.path={folder}", "fp8.recipe=off", "train.steps=4")
    rl.run(cfg, callbacks=[at(1, signal.SIGTERM)])
    file = folder / "generation_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "eos_token_id": [*range(200)]}))
    with pytest.raises(TrainError, match=r"made with another generation_config.json \(which tokens"):
        rl.run(override(cfg, ["run.resume=auto"]))


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ("return [float('nan')] * len(completions)", "returned nan"),
        ("return [1.0]", "16 completions"),
        ("import time; time.sleep(60)", "1 s"),
        ("raise KeyError('x')", "KeyError"),
    ],
)
def test_reward_without_a_number_is_named(text_rl_config: Make, tmp_path: Path, body: str, expected: str):
    file = tmp_path / "own.py"
    file.write_text(f"def score(completions, **columns):\n    {body}")
    cfg = text_rl_config(f"rl.rewards=['{file}:score']", "rl.reward_timeout=1")
    with pytest.raises(RewardError, match="reward score") as caught:
        rl.run(cfg)
    assert expected in str(caught.value)
    zero = override(cfg, ["rl.on_bad_reward=zero", "train.steps=2", "train.warmup=0"])
    assert rl.run(zero, console=(console := Console(file=io.StringIO()))).status == "finished"
    assert [(row["reward"], row["rewards/score/mean"], row["rewards/score/bad"]) for row in read_metrics(cfg)] == [
        (0, 0, 1)
    ] * 2
    lines = (Path(cfg.run.dir) / COMPLETIONS).read_text().splitlines()
    assert [json.loads(line)["rewards"] for line in lines] == [{"score": None}] * 8
    output = console.file.getvalue()
    assert output.count("returned no number for 16 of 16 completions. Rows 0 to 15 (") == 1, "printed once in two steps"
    assert "reward score returned no number 32 times since step 1 and counted as 0" in output


@pytest.mark.parametrize(
    ("overrides", "key", "expected"),
    [
        (["rl.rewards=[{reward: format}]"], "rl.rewards.0", "needs a pattern"),
        (["rl.rewards=[{reward: exact_match, tolerance: 1.0}]"], "rl.rewards.0.tolerance", "has no effect"),
        (["rl.rewards=[exact]"], "rl.rewards.0", "there is no reward `exact`"),
        (["rl.stop=['']"], "rl.stop.0", "must not be empty; write a text, or remove"),
        (['rl.stop=["\\ud800"]'], "rl.stop.0", "contains a lone surrogate"),
        (["lora={rank: 4, targets: ['']}"], "lora.targets.0", "must not be empty; write a text, or remove"),
        (["rl.group=1"], "rl.group", "has no others to be compared with"),
        (["rl.critic_lr=1e-3"], "rl.critic_lr", "no effect on grpo, which has no critic"),
        (["rl.gamma=0.9", "rl.algorithm=rloo"], "rl.gamma", "no effect on rloo"),
        (["rl.algorithm=ppo", "rl.advantage=group"], "rl.advantage", "does not compare groups"),
        (["rl.algorithm=ppo", "rl.dynamic_sampling=true"], "rl.dynamic_sampling", "compares with its critic"),
        (
            ["rl.algorithm=ppo", "lora={rank: 4}", "rl.value_weight=0.5"],
            "rl.value_weight",
            "AdamW is invariant to a factor",
        ),
        (["rl.mini_batches=3"], "rl.mini_batches", "cannot be split into 3"),
        (["rl.max_new_tokens=128"], "rl.max_new_tokens", "leave no room for a prompt"),
        (["rl.invariant=true", "fp8.recipe=tensorwise"], "fp8.recipe", "share a scale between rows"),
        (["rl.invariant=true", "rl.kv=fp8"], "rl.kv", "other keys and values"),
        (["rl.correction=off", "rl.correction_high=3.0"], "rl.correction_high", "because rl.correction is off"),
        (["rl.correction=off", "rl.correction_level=sequence"], "rl.correction_level", "because rl.correction is off"),
        (["rl.kl=0.0", "rl.kl_estimator=k2"], "rl.kl_estimator", "because rl.kl is 0.0"),
        (["rl.kl_in=reward"], "rl.kl_in", "because rl.kl is absent and grpo has none"),
        (["rl.algorithm=dapo", "rl.kl_estimator=k1"], "rl.kl_estimator", "because rl.kl is absent and dapo has none"),
        (["rl.algorithm=gspo", "rl.reference=copy"], "rl.reference", "because rl.kl is absent and gspo has none"),
        (["data.on_long=cut"], "data.on_long", "the end of a prompt"),
        (["rl.reference=base"], "rl.reference", "there are no adapters"),
        (["rl.reference=copy", "lora={rank: 4}"], "rl.reference", "the base without adapters takes no memory"),
        (["train.global_batch=16"], "train.global_batch", "a step is rl.prompts x rl.group"),
        (["train.compile=true"], "train.compile", "is not for phase rl"),
        (["run.gain_steps=2"], "run.gain_steps", "is not for phase rl"),
        (["optimizer.update=backward"], "optimizer.update", "still need them"),
        (["train.phase=sft"], "rl", "has no effect in phase sft"),
    ],
)
def test_contradictory_settings_are_rejected(rl_config: Make, overrides: list[str], key: str, expected: str):
    with pytest.raises(ConfigError, match=expected) as caught:
        rl_config(*overrides)
    assert key in str(caught.value)


@pytest.mark.usefixtures("seen")
def test_images_for_a_text_model_are_rejected_by_row(rl_config: Make, place: Path):
    with pytest.raises(DataError, match="row .*has an image, but the model is text-only"):
        rl.run(rl_config(f"model.path={place / 'text'}"))


def test_prompt_beyond_the_context_is_named_by_row(rl_config: Make, place: Path, tmp_path: Path):
    shutil.copytree(place / "text", tmp_path / "short")
    file = tmp_path / "short" / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"max_position_embeddings": 40}))
    rows = [{"prompt": "Say one.", "answer": "1"}, {"prompt": "Say " + "one, " * 30, "answer": "1"}]
    (tmp_path / "talk.json").write_text(json.dumps(rows))
    overrides = (f"model.path={tmp_path / 'short'}", f"data.train=[{{path: {tmp_path / 'talk.json'}}}]")
    with pytest.raises(GenerationError, match=r"talk\.json, row 1 has \d+ tokens .* 4 more, .* context is 40 tokens"):
        rl.run(rl_config(*overrides))


@pytest.mark.usefixtures("seen")
def test_resume_rejects_other_prompts(rl_config: Make, place: Path, tmp_path: Path):
    rows = json.loads((place / "digits" / "train.json").read_text())
    file = tmp_path / "prompts.json"
    file.write_text(json.dumps(rows))
    overrides = (f"data.train=[{{path: {file}, images: {place / 'digits'}}}]",)
    cfg = rl_config("fp8.recipe=off", *overrides)
    rl.run(cfg, callbacks=[at(1, signal.SIGTERM)])
    again = override(cfg, ["run.resume=auto"])
    before = read_completions(cfg)
    for path, expected in (
        (place / "digits/test.json", r"different settings: data\.train was"),
        (file, "prompts.json had"),
    ):
        file.write_text(json.dumps(rows[1:]))
        with pytest.raises(TrainError, match=expected):
            rl.run(override(again, [f"data.train=[{{path: {path}, images: {place / 'digits'}}}]"]))
    assert read_completions(cfg) == before


def test_reward_processes_end_if_the_run_does_not_start(rl_config: Make, tmp_path: Path):
    (tmp_path / "own.py").write_text("def score(completions, **columns):\n    return [1.0] * len(completions)")
    cfg = rl_config(f"rl.rewards=['{tmp_path}/own.py:score']")
    Path(cfg.run.dir).mkdir()
    (Path(cfg.run.dir) / "thesis.txt").write_text("years of work")
    phase, before = rl.phase_of(cfg), set(_children())
    with pytest.raises(TrainError, match="not empty"):
        train.run(cfg, phase=phase)
    assert phase.rewards is not None and set(_children()) == before


def _children() -> list[str]:
    return [line for task in Path("/proc/self/task").iterdir() for line in (task / "children").read_text().split()]


def test_configuration_lists_the_existing_names():
    """The configuration imports no torch, so it repeats the names."""
    algorithms = RlSection.model_fields["algorithm"].annotation
    assert set(get_args(algorithms)) == set(ALGORITHMS)
    assert set(WITH_CRITIC) == {name for name, one in ALGORITHMS.items() if one.values}
    assert set(WITH_KL) == {name for name, one in ALGORITHMS.items() if one.beta}
    assert {f"value_{f.name}" if f.name in ("clip", "weight") else f.name for f in fields(Values)} < set(CRITIC_KEYS)
    advantage = get_args(get_args(RlSection.model_fields["advantage"].annotation)[0])
    assert set(advantage) == set(ADVANTAGES) and set(BUILT_IN) == set(BUILTIN)


PAGES = ("train.steps=1", "train.warmup=0", "rl.show=16", "fp8.recipe=off", "rl.max_new_tokens=12")


@pytest.mark.long
def test_completions_do_not_depend_on_the_number_of_pages(rl_config: Make):
    """A cache with pages for few completions generates them in turns."""
    unlimited, limited = rl_config(*PAGES, dir="all"), rl_config(*PAGES, "rl.pages=8", dir="turns")
    rl.run(unlimited)
    rl.run(limited)
    assert read_completions(limited) == read_completions(unlimited)
    caches = [read_metrics(cfg)[0]["memory"]["kv_cache"] for cfg in (limited, unlimited)]
    assert caches[0] < caches[1] / 3


def test_too_few_pages_are_rejected_with_the_keys(rl_config: Make):
    few = rl_config(*PAGES, "rl.pages=3")
    with pytest.raises(
        TrainError,
        match=r"rl\.pages is 3 pages of 8 tokens, but one completion of .*train\.json, row \d+ with \d+ tokens "
        r"and up to 12 new tokens \(rl\.max_new_tokens\) may need [4-8] pages\. Raise rl\.pages \(rl\.kv: fp8 halves",
    ):
        rl.run(few)
    assert not read_metrics(few)
