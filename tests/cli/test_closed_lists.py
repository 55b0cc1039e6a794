"""A word that is in no closed list is answered with the nearest one, or its translation, before torch is imported."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

TRAIN = ("train", "run.yaml")
RL = (*TRAIN, "train.phase=rl")
# command line, part of the answer
CASES: dict[str, tuple[tuple[str, ...], str]] = {
    "command": (("trian", "run.yaml"), "did you mean `octavo train`?"),
    "tiny": (("tiny", "Qwen3-VL", "d"), "Did you mean 'qwen3_vl'?"),
    "format": (("export", "rd", "out", "--format", "fp8_block"), "Did you mean 'fp8-block'?"),
    "merge format": (("merge", "rd", "out", "--format", "fp8_dynmic"), "Did you mean 'fp8-dynamic'?"),
    "include": (
        ("export", "rd", "out", "--format", "fp8", "--include", "vision_tower"),
        "Did you mean 'image_encoder'?",
    ),
    "shape": (("plan", "--shape", "qwen3-vl-8b"), "qwen3_vl_8b"),
    "suite": (("bench", "steps"), "Did you mean 'step'?"),
    "direction": (("convert", "hf-to-dpc", "a", "b"), "Did you mean 'hf_to_dcp'?"),
    "recipe": ((*TRAIN, "--fp8-recipe", "blockwize"), "Did you mean 'blockwise'?"),
    "recipe of others": ((*TRAIN, "--fp8-recipe", "deepseek"), "Did you mean 'blockwise_1d' (DeepSeek-V3's casts)?"),
    "recipe of eval": (("eval", "rd", "--recipe", "row-wize"), "Did you mean 'rowwise'?"),
    "load in fp8": (("eval", "rd", "--load-in-fp8", "blockwize"), "Did you mean 'blockwise'?"),
    "criterion": (("bisect", "run.yaml", "--by", "lost"), "Did you mean 'loss'?"),
    "source": (("import", "a.yaml", "-o", "b.yaml", "--from", "axolotol"), "Did you mean axolotl?"),
    "sealed": (("seal", "modl", "a", "b"), "Did you mean 'model'?"),
    "option": (("doctor", "--jsn"), "unrecognized arguments: --jsn. Did you mean '--json'?"),
    "section": ((*TRAIN, "trian.lr=1"), "did you mean `train`?"),
    "key": ((*TRAIN, "train.num_generations=3"), "did you mean `rl.group` (completions for one prompt)?"),
    "phase": ((*TRAIN, "train.phase=dpo"), "did you mean preference (the loss is preference.loss)?"),
    "loss": ((*TRAIN, "train.phase=preference", "preference.loss=dpo"), "did you mean sigmoid (DPO's own loss)?"),
    "load_in_fp8": ((*TRAIN, "model.load_in_fp8=blockwize"), "did you mean blockwise?"),
    "fp8.recipe": ((*TRAIN, "fp8.recipe=per_tensor"), "did you mean tensorwise (one scale a tensor)?"),
    "on_long": ((*TRAIN, "data.on_long=truncate"), "did you mean cut (the beginning is kept)?"),
    "reward of others": ((*RL, "rl.rewards=[accuracy_reward]"), "did you mean math (it compares mathematical"),
    "format of others": ((*RL, "rl.rewards=[think_format_reward]"), "did you mean format (with a pattern"),
    "penalty of others": ((*RL, "rl.rewards=[soft_overlong]"), "did you mean rl.overlong (a key of rl"),
    "reward": ((*RL, "rl.rewards=[exactmatch]"), "there is no reward `exactmatch`; did you mean exact_match?"),
    "suite of others": (("bench", "kernel"), "Did you mean 'gemm'?"),
    "shell": (("completion", "zhs"), "Did you mean 'zsh'?"),
    "no recipe": ((*TRAIN, "--fp8-recipe", "fp8"), "'fp8' is none of off, tensorwise"),
    "freeze": ((*TRAIN, "model.freeze=[visual]"), "image_encoder"),
    "optimizer": ((*TRAIN, "optimizer.states=adamw_8bit"), "did you mean fp8 (8 bits with scales of groups)?"),
    "tracker": ((*TRAIN, "run.trackers=[wandbb]"), "did you mean wandb?"),
}
_CODE = """
import contextlib, io, json, sys
from octavo.cli.main import main
answers = {}
for name, words in json.load(sys.stdin).items():
    said = io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        try:
            code = main(words)
        except SystemExit as end:
            code = end.code
    heavy = sorted({"torch", "transformers"} & sys.modules.keys())
    answers[name] = [code, " ".join(said.getvalue().split()), heavy]
json.dump(answers, sys.stdout)
"""


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list]:
    folder: Path = tmp_path_factory.mktemp("closed")
    (folder / "run.yaml").write_text(
        "model: {path: ./m}\ndata: {train: [{path: ./r.jsonl}]}\n"
        "train: {phase: sft, steps: 1, seq_length: 64, global_batch: 2}\nrun: {dir: rd}\n"
    )
    lines = json.dumps({name: words for name, (words, _) in CASES.items()})
    done = subprocess.run(
        [sys.executable, "-c", _CODE], cwd=folder, input=lines, capture_output=True, text=True, check=True
    )
    return json.loads(done.stdout)


@pytest.mark.parametrize("name", CASES)
def test_wrong_word_is_answered_without_torch(answers: dict[str, list], name: str):
    code, said, heavy = answers[name]
    assert code == 2 and CASES[name][1] in said, said
    assert not heavy
