"""The phase of reinforcement learning: what its rows say, what it depends on and what not, resuming, refusals."""

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
def talking(reinforcing: Make, place: Path, tmp_path: Path) -> Make:
    """talking("rl.algorithm=dapo", ..., dir="a"): the same of a text model in high precision, for what knows neither
    images nor FP8."""
    rows = [{"prompt": f"Say {number}.", "answer": str(number)} for number in range(48)]
    (tmp_path / "talk.json").write_text(json.dumps(rows))
    over = (f"model.path={place / 'text'}", f"data.train=[{{path: {tmp_path / 'talk.json'}}}]", "fp8.recipe=off")
    return lambda *more, dir="run": reinforcing(*over, *more, dir=dir)


def rows_of(cfg: Config) -> list[dict]:
    return read_rows(Path(cfg.run.dir) / "metrics.jsonl")


def said(cfg: Config) -> list[tuple]:
    lines = [json.loads(line) for line in (Path(cfg.run.dir) / COMPLETIONS).read_text().splitlines()]
    return [(line["step"], line["row"], line["sample"], line["completion"], line["reward"]) for line in lines]


@pytest.mark.parametrize("over", [(), LORA, ("fp8.recipe=off",)], ids=["full", "lora", "high"])
def test_a_step_says_what_was_rewarded_and_how_far_rollout_and_trainer_are(reinforcing: Make, over: tuple[str, ...]):
    cfg = reinforcing(*over, "rl.show=16")
    result = rl.run(cfg)
    rows = rows_of(cfg)
    assert all(row.keys() >= COLUMNS for row in rows) and len(rows) == 3
    for row in rows:
        assert 0 < row["reward"] < 1 and 0 < row["length"] <= 4 and 0 < row["entropy"] < math.log(512)
        near = 0.2 if over == LORA else 1e-4  # a base in BF16 rounds, as products of other shapes do
        assert row["logp_gap_mean"] <= row["logp_gap_max"] < near
        assert row["kl"] is None, "nobody asked for a reference"
    found = said(cfg)
    assert len(found) == 48 and rows[0]["reward"] == pytest.approx(sum(line[-1] for line in found[:16]) / 16)
    assert not json.loads((result.dir / "proof.json").read_text())["pending"]


@pytest.mark.parametrize("over", [("rl.kl=0.1",), ("rl.mini_batches=2",)], ids=["reference", "remembered"])
def test_rollout_trainer_and_reference_speak_of_the_temperature_that_is_sampled(reinforcing: Make, over: tuple):
    cfg = reinforcing(*over, "rl.temperature=0.6", "fp8.recipe=off", "train.steps=1", "train.warmup=0")
    rl.run(cfg)
    (row,) = rows_of(cfg)
    assert row["logp_gap_max"] < 1e-4 and row["kl"] == (0 if "rl.kl=0.1" in over else None)


@pytest.mark.parametrize(
    "over",
    [
        (),
        (*LORA, "rl.mini_batches=2", "train.micro_batch=3", "rl.algorithm=ppo", "rl.group=2"),
        ("fp8.recipe=rowwise", "train.logits=full", "fp8.activations=fp8", "train.recompute=full"),
    ],
    ids=["full", "lora", "rowwise"],
)
def test_invariant_rollouts_are_the_trainers_to_the_bit(reinforcing: Make, over: tuple[str, ...]):
    cfg = reinforcing(*over, "rl.invariant=true", "rl.kl=0.1", "train.steps=2", "train.warmup=1", "rl.slots=5")
    rl.run(cfg)
    rows = rows_of(cfg)
    assert rows[0]["kl"] == 0 and rows[1]["kl"]  # the first weights are the reference's
    for row in rows:
        assert row["logp_gap_max"] == 0 and row["sampling/importance_sampling_ratio/max"] == 1


def test_completions_do_not_depend_on_slots_micro_batches_or_page_of_the_cache(reinforcing: Make):
    """High precision, whose results for a row hardly depend on the others: the first rollout is the same, each time."""
    first = []
    for name, over in (("all", ()), ("three", ("rl.slots=3",)), ("small", ("train.micro_batch=3",))):
        cfg = reinforcing(*over, "fp8.recipe=off", "train.steps=1", "train.warmup=0", "rl.show=16", dir=name)
        rl.run(cfg)
        first.append((said(cfg), pytest.approx(rows_of(cfg)[0]["grad_norm"], rel=1e-4)))
    assert first[0] == first[1] == first[2]


@pytest.mark.usefixtures("seen")
def test_a_run_that_was_stopped_goes_on_bit_for_bit(reinforcing: Make):
    over = (*LORA, "rl.kl=0.1", "rl.mini_batches=2")
    whole = rl.run(reinforcing(*over, dir="whole"))
    cfg = reinforcing(*over)
    rl.run(cfg, callbacks=[at(1, signal.SIGTERM)])
    result = rl.run(override(cfg, ["run.resume=auto", "rl.slots=16", "rl.reward_timeout=99"]))
    assert result.losses() == whole.losses() and said(cfg) == said(reinforcing(*over, dir="whole"))
    assert rows_of(cfg)[0]["kl"] == 0 < rows_of(cfg)[1]["kl"]


@pytest.mark.parametrize(
    "over",
    [
        ("rl.algorithm=rloo",),  # its KL is in the reward
        ("rl.algorithm=dapo", "rl.overlong=2"),  # takes further prompts
        ("rl.algorithm=gspo", "rl.epochs=2", "rl.mini_batches=2"),
        ("rl.algorithm=cispo", "rl.correction=mask", "rl.correction_level=geometric", "rl.entropy=0.01"),
        ("rl.algorithm=dr_grpo", "rl.kl=0.1", "rl.kl_estimator=k2", "rl.mask_truncated=true", "rl.stop=[a, e, i, o]"),
        ("rl.algorithm=bnpo", "rl.kv=fp8", "train.logits=full"),
        ("rl.algorithm=ppo", "rl.group=1", "train.logits=full", "rl.value_clip=0", "rl.stop=[a, e]", "rl.overlong=2"),
    ],
    ids=lambda over: over[0].partition("=")[2],
)
def test_algorithms_and_their_settings_run(talking: Make, over: tuple[str, ...]):
    cfg = talking(*over, "train.steps=2", "train.warmup=1")
    assert rl.run(cfg).status == "finished"
    for row in rows_of(cfg):
        assert math.isfinite(row["loss"]) and math.isfinite(row["grad_norm"])
        assert 0 < row["entropy"] < math.log(512), "a mean over the updates of a step"
        assert (row["kl"] is None) == ("rl.kl" not in str(over) and over[0][-4:] not in ("rloo", "=ppo"))
        assert ("value_loss" in row) == ("explained_variance" in row) == ("ppo" in over[0])
        assert ("sampling/draws" in row) == ("dapo" in over[0])


def test_the_speed_of_a_rollout_counts_all_draws(talking: Make, monkeypatch: pytest.MonkeyPatch):
    """Where groups of equal rewards are replaced; every second counts as one."""
    monkeypatch.setattr(RlStepper, "_slowest", lambda stepper, *seconds: [1.0 for _ in seconds])
    over = ("rl.algorithm=dapo", "rl.overlong=0", "rl.group=2")
    cfg = talking(*over, "train.steps=1", "train.warmup=0")
    rl.run(cfg)
    (row,) = rows_of(cfg)
    assert row["sampling/draws"] > 1 and row["length"] == 4
    assert row["rollout_tokens_per_s"] == row["sampling/draws"] * 4 * 2 * 4  # prompts, group, tokens


@pytest.mark.usefixtures("seen")
def test_what_is_drawn_in_place_of_equal_groups_is_not_equal_and_length_is_punished(reinforcing: Make):
    over = ("rl.algorithm=dapo", "rl.overlong=2", "rl.group=2", "rl.show=16", "train.steps=1", "train.warmup=0")
    cfg = reinforcing(*over, "fp8.recipe=off")
    rl.run(cfg)
    (row,) = rows_of(cfg)
    assert row["length"] == 4 and row["reward"] == pytest.approx(row["rewards/regex/mean"] - 1)
    rewards = [reward for *_, reward in said(cfg)]
    pairs = [*zip(rewards[::2], rewards[1::2], strict=True)]
    assert row["sampling/draws"] > 1 and pairs and all(a != b for a, b in pairs)
    alike = ("rl.rewards=[{reward: regex, pattern: '.?'}]", "rl.overlong=4", "rl.stop=[a, e, i, o]")
    with pytest.raises(TrainError, match="use rewards or prompts that distinguish completions"):
        rl.run(cfg := reinforcing(*over, *alike, "fp8.recipe=off", dir="alike"))
    (row,) = rows_of(cfg)
    assert row["empty"] and row["sampling/draws"] == 4, "a length tells completions apart, and is no merit"
    assert row["reward_std"] > 0 == row["frac_reward_zero_std"] and row["reward"] < row["rewards/regex/mean"] == 1


def test_rewards_that_are_all_equal_teach_nothing(talking: Make):
    rewards = "rl.rewards=[{reward: regex, pattern: '.?'}]"
    cfg = talking(rewards, "train.steps=1", "train.warmup=0")
    rl.run(cfg)
    (row,) = rows_of(cfg)
    assert (
        row["reward"] == row["frac_reward_zero_std"] == 1 and row["grad_norm"] == row["loss"] == row["reward_std"] == 0
    )


def test_a_run_that_has_learnt_all_finishes_and_one_that_learns_nothing_does_not(
    talking: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(stopping, "PATIENCE", 3)
    file = tmp_path / "own.py"
    file.write_text(
        "from pathlib import Path\ndone = Path(__file__).with_suffix('.done')\n"
        "def score(completions):\n    equal = done.exists()\n    done.touch()\n"
        "    return [float(n % 2 or equal) for n in range(len(completions))]\n"
    )
    cfg = talking(f"rl.rewards=['{file}:score']", "rl.dynamic_sampling=true", "train.steps=4")
    rl.run(cfg, callbacks=[at(2, signal.SIGTERM)])
    assert rl.run(override(cfg, ["run.resume=auto"])).status == "finished"
    assert [row.get("empty") for row in rows_of(cfg)] == [None, True, True, True]
    never = talking("rl.rewards=[{reward: regex, pattern: '.?'}]", "rl.dynamic_sampling=true", dir="never")
    rl.run(never, callbacks=[at(1, signal.SIGTERM)])  # a resume is not what it learnt
    with pytest.raises(TrainError, match=r"3 steps in a row, up to step 3, .*rewards of each group are all equal"):
        rl.run(override(never, ["run.resume=auto"]))


def test_rewards_of_a_file_are_run_and_held_to_at_a_resume(talking: Make, tmp_path: Path):
    file = tmp_path / "own.py"
    file.write_text(
        "def score(completions, answer, weight):\n    return [weight * len(c) for c, _ in zip(completions, answer)]"
    )
    mine = f"{{reward: '{file}:score', weight: 0.5, arguments: {{weight: 3}}}}"  # the function has a key of our name
    over = (f"rl.rewards=[{mine}, exact_match]", "rl.show=16")
    cfg = talking(*over)
    rl.run(cfg, callbacks=[at(1, signal.SIGTERM)])
    row = rows_of(cfg)[0]
    assert row["reward"] == pytest.approx(0.5 * row["rewards/score/mean"] + row["rewards/exact_match/mean"])
    assert row["rewards/score/mean"] == pytest.approx(sum(3 * len(text) for *_, text, _ in said(cfg)[:16]) / 16)
    file.write_text(file.read_text() + "\n")
    with pytest.raises(TrainError, match="made with another reward score"):
        rl.run(override(cfg, ["run.resume=auto"]))


@pytest.mark.usefixtures("seen")
def test_columns_are_those_of_all_data_sets_whichever_rows_a_step_has(reinforcing: Make, place: Path, tmp_path: Path):
    rows = json.loads((place / "digits" / "train.json").read_text())
    rows[-1]["hint"] = "of a row that no step comes to"
    (tmp_path / "rows.json").write_text(json.dumps(rows))
    (tmp_path / "own.py").write_text(
        "def score(completions, hint, source):\n    return [float(one is None) for one in hint]\n"
        "def asks(completions, nothing):\n    return [0.0] * len(completions)\n"
    )
    over = (f"data.train=[{{path: {tmp_path}/rows.json, images: {place / 'digits'}}}]", "train.warmup=0")
    over = (*over, "fp8.recipe=off")
    cfg = reinforcing(*over, f"rl.rewards=['{tmp_path}/own.py:score']", "train.steps=1", "rl.prompts=2")
    rl.run(cfg)
    assert rows_of(cfg)[0]["reward"] == 1 and all(row < len(rows) - 1 for _, row, *_ in said(cfg))
    with pytest.raises(RewardError, match=r"takes nothing, and .* answer, .*images, videos, hint, .*\. Add it"):
        rl.run(reinforcing(*over, f"rl.rewards=['{tmp_path}/own.py:asks']", dir="asks"))


def test_a_resumed_run_whose_completions_end_elsewhere_is_refused(reinforcing: Make, place: Path, tmp_path: Path):
    """generation_config.json may change under SFT, and says here which tokens end a completion."""
    folder = tmp_path / "model"
    shutil.copytree(place / "tiny", folder)
    cfg = reinforcing(f"model.path={folder}", "fp8.recipe=off", "train.steps=4")
    rl.run(cfg, callbacks=[at(1, signal.SIGTERM)])
    file = folder / "generation_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "eos_token_id": [*range(200)]}))
    with pytest.raises(TrainError, match=r"made with another generation_config.json \(which tokens"):
        rl.run(override(cfg, ["run.resume=auto"]))


@pytest.mark.parametrize(
    ("body", "found"),
    [
        ("return [float('nan')] * len(completions)", "returned nan"),
        ("return [1.0]", "16 completions"),
        ("import time; time.sleep(60)", "1 s"),
        ("raise KeyError('x')", "KeyError"),
    ],
)
def test_a_reward_that_gives_no_number_is_named(talking: Make, tmp_path: Path, body: str, found: str):
    file = tmp_path / "own.py"
    file.write_text(f"def score(completions, **columns):\n    {body}")
    cfg = talking(f"rl.rewards=['{file}:score']", "rl.reward_timeout=1")
    with pytest.raises(RewardError, match="reward score") as caught:
        rl.run(cfg)
    assert found in str(caught.value)
    zero = override(cfg, ["rl.on_bad_reward=zero", "train.steps=2", "train.warmup=0"])
    assert rl.run(zero, console=(console := Console(file=io.StringIO()))).status == "finished"
    assert [(row["reward"], row["rewards/score/mean"], row["rewards/score/bad"]) for row in rows_of(cfg)] == [
        (0, 0, 1)
    ] * 2
    lines = (Path(cfg.run.dir) / COMPLETIONS).read_text().splitlines()
    assert [json.loads(line)["rewards"] for line in lines] == [{"score": None}] * 8
    heard = console.file.getvalue()
    assert heard.count("gave no number for 16 of 16 completions. Rows 0 to 15 (") == 1, "of two steps"
    assert "reward score gave no number 32 times since step 1, and counted 0 there" in heard


@pytest.mark.parametrize(
    ("over", "key", "found"),
    [
        (["rl.rewards=[{reward: format}]"], "rl.rewards.0", "needs a pattern"),
        (["rl.rewards=[{reward: exact_match, tolerance: 1.0}]"], "rl.rewards.0.tolerance", "has no effect"),
        (["rl.rewards=[exact]"], "rl.rewards.0", "there is no reward `exact`"),
        (["rl.stop=['']"], "rl.stop.0", "must not be empty; write a text, or remove"),
        (['rl.stop=["\\ud800"]'], "rl.stop.0", "half a character"),
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
def test_what_makes_no_sense_is_refused(reinforcing: Make, over: list[str], key: str, found: str):
    with pytest.raises(ConfigError, match=found) as caught:
        reinforcing(*over)
    assert key in str(caught.value)


@pytest.mark.usefixtures("seen")
def test_images_for_a_model_without_eyes_are_refused_by_row(reinforcing: Make, place: Path):
    with pytest.raises(DataError, match="row .*has an image, but the model is text-only"):
        rl.run(reinforcing(f"model.path={place / 'text'}"))


def test_a_prompt_that_the_model_has_no_room_for_is_named_by_row(reinforcing: Make, place: Path, tmp_path: Path):
    shutil.copytree(place / "text", tmp_path / "short")
    file = tmp_path / "short" / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"max_position_embeddings": 40}))
    rows = [{"prompt": "Say one.", "answer": "1"}, {"prompt": "Say " + "one, " * 30, "answer": "1"}]
    (tmp_path / "talk.json").write_text(json.dumps(rows))
    over = (f"model.path={tmp_path / 'short'}", f"data.train=[{{path: {tmp_path / 'talk.json'}}}]")
    with pytest.raises(GenerationError, match=r"talk\.json, row 1 has \d+ tokens .* 4 more, .* context is 40 tokens"):
        rl.run(reinforcing(*over))


@pytest.mark.usefixtures("seen")
def test_a_resumed_run_with_other_prompts_is_refused(reinforcing: Make, place: Path, tmp_path: Path):
    rows = json.loads((place / "digits" / "train.json").read_text())
    mine = tmp_path / "mine.json"
    mine.write_text(json.dumps(rows))
    over = (f"data.train=[{{path: {mine}, images: {place / 'digits'}}}]",)
    cfg = reinforcing("fp8.recipe=off", *over)
    rl.run(cfg, callbacks=[at(1, signal.SIGTERM)])
    again = override(cfg, ["run.resume=auto"])
    before = said(cfg)
    for path, found in ((place / "digits/test.json", r"other settings: data\.train was"), (mine, "mine.json had")):
        mine.write_text(json.dumps(rows[1:]))
        with pytest.raises(TrainError, match=found):
            rl.run(override(again, [f"data.train=[{{path: {path}, images: {place / 'digits'}}}]"]))
    assert said(cfg) == before


def test_processes_of_rewards_end_with_a_run_that_never_began(reinforcing: Make, tmp_path: Path):
    (tmp_path / "own.py").write_text("def score(completions, **columns):\n    return [1.0] * len(completions)")
    cfg = reinforcing(f"rl.rewards=['{tmp_path}/own.py:score']")
    Path(cfg.run.dir).mkdir()
    (Path(cfg.run.dir) / "thesis.txt").write_text("years of work")
    phase, before = rl.phase_of(cfg), set(_children())
    with pytest.raises(TrainError, match="not empty"):
        train.run(cfg, phase=phase)
    assert phase.rewards is not None and set(_children()) == before


def _children() -> list[str]:
    return [line for task in Path("/proc/self/task").iterdir() for line in (task / "children").read_text().split()]


def test_the_configuration_knows_the_names_that_there_are():
    """It imports no torch, so it holds them a second time."""
    algorithms = RlSection.model_fields["algorithm"].annotation
    assert set(get_args(algorithms)) == set(ALGORITHMS)
    assert set(WITH_CRITIC) == {name for name, one in ALGORITHMS.items() if one.values}
    assert set(WITH_KL) == {name for name, one in ALGORITHMS.items() if one.beta}
    assert {f"value_{f.name}" if f.name in ("clip", "weight") else f.name for f in fields(Values)} < set(CRITIC_KEYS)
    advantage = get_args(get_args(RlSection.model_fields["advantage"].annotation)[0])
    assert set(advantage) == set(ADVANTAGES) and set(BUILT_IN) == set(BUILTIN)


PAGES = ("train.steps=1", "train.warmup=0", "rl.show=16", "fp8.recipe=off", "rl.max_new_tokens=12")


@pytest.mark.long
def test_few_pages_write_the_same(reinforcing: Make):
    """One completion must have room; all else waits its turn."""
    all_at_once, in_turns = reinforcing(*PAGES, dir="all"), reinforcing(*PAGES, "rl.pages=8", dir="turns")
    rl.run(all_at_once)
    rl.run(in_turns)
    assert said(in_turns) == said(all_at_once)
    caches = [rows_of(cfg)[0]["memory"]["kv_cache"] for cfg in (in_turns, all_at_once)]
    assert caches[0] < caches[1] / 3


def test_too_few_pages_are_named_with_the_keys(reinforcing: Make):
    few = reinforcing(*PAGES, "rl.pages=3")
    with pytest.raises(
        TrainError,
        match=r"rl\.pages is 3, pages of 8 tokens, and one completion of .*train\.json, row \d+, \d+ tokens, with 12 "
        r"new ones \(rl\.max_new_tokens\) may need [4-8]\. Raise rl\.pages \(with rl\.kv: fp8",
    ):
        rl.run(few)
    assert not rows_of(few)
