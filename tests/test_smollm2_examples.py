"""examples/smollm2: each file plans on the shape of SmolLM2-135M, its scripts do what they say, and each trains two
steps, one on the whole model and the others on its first layers. examples/smollm2_vl.yaml trains two of each stage."""

from __future__ import annotations

import json
import math
import runpy
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from octavo import models
from octavo.cli.main import main
from octavo.config import load_config
from octavo.models.tiny import tiny
from tests.requirements_real import require
from tests.server import folders

EXAMPLES = Path(__file__).resolve().parents[1] / "examples" / "smollm2"
FILES = sorted(EXAMPLES.glob("*.yaml"))


@pytest.fixture(scope="module")
def shape(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with SmolLM2-135M's config.json and a file of weights that has names and sizes, but occupies no disk."""
    folder = tmp_path_factory.mktemp("shape") / "smollm2"
    config = LlamaConfig(
        hidden_size=576, intermediate_size=1536, num_hidden_layers=30, num_attention_heads=9, num_key_value_heads=3,
        vocab_size=49152, tie_word_embeddings=True, max_position_embeddings=8192, architectures=["LlamaForCausalLM"],
    )  # fmt: skip
    config.save_pretrained(folder)
    with torch.device("meta"):
        sizes = {name: list(p.shape) for name, p in LlamaForCausalLM(config).named_parameters()}
    entries, end = {}, 0
    for name, size in sizes.items():
        begin, end = end, end + 2 * math.prod(size)
        entries[name] = {"dtype": "BF16", "shape": size, "data_offsets": [begin, end]}
    header = json.dumps(entries).encode()
    with (folder / "model.safetensors").open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        file.truncate(8 + len(header) + end)
    return folder


@pytest.mark.usefixtures("no_memory")
@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_an_example_plans_every_layer_in_fp8(path: Path, shape: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", str(path), f"model.path={shape}", "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    low = [row["name"] for row in plan["rows"] if row["recipe"]]
    assert len(low) == 210 and plan["share"] == 1, "no width of this model is a multiple of 128, but 1536"


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_an_example_names_its_command_and_the_test_bed(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert "`make real`" in text and f"#   octavo train examples/smollm2/{path.name}\n" in text
    cfg = load_config(path)
    assert cfg.run.threads == 1 and cfg.run.dir == f"runs/smollm2_{path.stem}"
    build = EXAMPLES.parents[1] / "build"
    assert Path(cfg.model.path).resolve() == (build / "smollm2").resolve()
    for one in (*cfg.data.train, *cfg.data.eval):
        assert Path(one.path).parent.resolve() == (build / "smollm2-data").resolve()


def test_readme_lists_every_file_and_command() -> None:
    text = (EXAMPLES / "README.md").read_text(encoding="utf-8")
    for path in EXAMPLES.iterdir():
        if path.suffix in (".yaml", ".py"):
            assert f"]({path.name})" in text, f"README.md does not link {path.name}"
    for path in FILES:
        assert f"octavo train examples/smollm2/{path.name}" in text


def row(question: str, answer: str) -> dict:
    return {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]}


def test_pairs_reject_the_answer_to_the_next_question_of_a_kind(tmp_path: Path) -> None:
    script = runpy.run_path(str(EXAMPLES / "make_pairs.py"))
    rows = [row("What is a?", "A."), row("Which is a?", "a"), row("What is b?", "B."), row("Which is b?", "a")]
    for part in ("train", "eval"):
        (tmp_path / f"instructions.{part}.jsonl").write_text("".join(json.dumps(one) + "\n" for one in rows))
    script["main"](tmp_path)
    pairs = [json.loads(line) for line in (tmp_path / "pairs.eval.jsonl").read_text().splitlines()]
    assert [(pair["chosen"], pair["rejected"]) for pair in pairs] == [("A.", "B."), ("B.", "A.")]  # "a" twice: no pair
    assert pairs[0]["prompt"] == rows[0]["messages"][:1]
    assert (tmp_path / "pairs.train.jsonl").read_text() == (tmp_path / "pairs.eval.jsonl").read_text()


@pytest.mark.parametrize(
    ("script", "arguments", "words"),
    [
        ("make_pairs.py", ["{here}"], "instructions.train.jsonl: No such file or directory"),
        ("make_images.py", ["{shape}/config.json"], "config.json/images: Not a directory"),
        ("make_prompts.py", ["{here}/none"], "instructions.train.jsonl: No such file or directory"),
        ("lm_eval/pad.py", ["{here}/none", "{here}/out"], "none has no config.json: name the folder of a model"),
        ("lm_eval/pad.py", ["{shape}", "{here}"], "exists: delete it, or name another folder"),
        ("lm_eval/make_questions.py", ["{shape}/config.json"], "config.json: File exists"),
    ],
)
def test_a_script_without_its_source_or_target_ends_in_a_sentence(
    script: str, arguments: list[str], words: str, shape: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.argv", [script, *(one.format(here=tmp_path, shape=shape) for one in arguments)])
    with pytest.raises(SystemExit) as ended:  # with a text: printed to stderr, exit code 1
        runpy.run_path(str(EXAMPLES / script), run_name="__main__")
    assert isinstance(ended.value.code, str) and words in ended.value.code and "\n" not in ended.value.code
    assert list(tmp_path.iterdir()) == []


def test_prompts_ask_once_about_each_function_with_a_short_name(tmp_path: Path) -> None:
    script = runpy.run_path(str(EXAMPLES / "make_prompts.py"))
    about = "What does the Python function `{}` of the module `{}` do?"
    names = [("parse(source,\n mode='exec')", "ast"), ("dump(node)", "ast"), ("a_function_whose_name_is_long()", "ast")]
    rows = [row(about.format(*name), "Parse it.") for name in [*names, names[0]]] + [row("Which is it?", "ast.parse")]
    for part in ("train", "eval"):
        (tmp_path / f"instructions.{part}.jsonl").write_text("".join(json.dumps(one) + "\n" for one in rows))
    script["main"](tmp_path)
    prompts = [json.loads(line) for line in (tmp_path / "prompts.train.jsonl").read_text().splitlines()]
    assert sorted(one["name"] for one in prompts) == ["ast.dump", "ast.parse"]
    parse = next(one for one in prompts if one["name"] == "ast.parse")
    assert parse["answer"] == "`ast.parse`: Parse it."
    assert parse["prompt"][-1] == {"role": "user", "content": "What does `ast.parse` do?"}
    again = script["make_prompts"]([*reversed(rows)])
    assert [one["name"] for one in again] == [one["name"] for one in prompts], "the order of the rows does not matter"


def test_reward_is_highest_for_a_name_and_a_verb() -> None:
    score = runpy.run_path(str(EXAMPLES / "rewards.py"))["glossary"]
    rewards = {
        "`ast.parse` parses.": 1,
        "ast.parse(source, mode) returns a tree": 1,
        "`ast.parse` is a function": 1 / 2,
        "`ast.parse`'s": 1 / 2,
        "`ast.parse": 1 / 2,
        "The `ast.parse()` takes": 1 / 2,
        "The function `ast.parse` is": 1 / 6,
        "The ast.parse_all parses": 0,
        "My.ast.parse does, ast.parse does": 1 / 5,
        "": 0,
    }
    assert score([*rewards], ["ast.parse"] * len(rewards), file="x") == pytest.approx([*rewards.values()])


def short(path: Path) -> list[str]:
    """Settings of two small steps without evaluation."""
    if load_config(path).train.phase == "rl":
        small = ["rl.prompts=1", "rl.group=2", "rl.max_new_tokens=4", "train.micro_batch=2", "rl.eval_prompts=0"]
    else:
        small = ["train.micro_batch=1", "train.global_batch=1"]
    return [*small, "train.steps=2", "train.warmup=1", "train.seq_length=128", "data.eval=[]", "run.eval_every=0"]


@pytest.fixture(scope="module")
def first_layers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Layers 0 to 11 of the model: 11 is the first with massive activations."""
    return folders.cut(require("real"), tmp_path_factory.mktemp("cut") / "smollm2", 12)


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("images")
    runpy.run_path(str(EXAMPLES / "make_images.py"))["main"](folder)
    return folder


def test_test_images_are_not_in_training_and_photographs_are(images: Path) -> None:
    train, test, photographs = (
        json.loads((images / f"{part}.json").read_text()) for part in ("train", "test", "photographs")
    )
    assert (len(train), len(test), len(photographs)) == (1437 + 2 * 20, 360, 2)
    seen, held_out = ({one["image"] for one in rows} for rows in (train, test))
    assert not seen & held_out and {one["image"] for one in photographs} <= seen
    pixels = [(images / name).read_bytes() for name in sorted(held_out)]
    assert len(set(pixels)) == len(pixels) and not {*pixels} & {(images / name).read_bytes() for name in seen}
    assert {one["conversations"][1]["value"] for one in test} == {*map(str, range(10))}


@pytest.mark.long
@pytest.mark.usefixtures("no_pages")
def test_the_vision_language_example_trains_both_stages(images: Path, tmp_path: Path) -> None:
    """With a tiny decoder in place of SmolLM2."""
    file, base, run = EXAMPLES.parent / "smollm2_vl.yaml", tmp_path / "vlm", tmp_path / "run"
    tiny.write("qwen3", tmp_path / "decoder", size="mini")
    over = [f"model.foundation.path={tmp_path}/decoder", f"model.path={base}", f"run.dir={run}"]
    over += [f"data.train.0.path={images}/train.json", f"data.eval.0.path={images}/test.json"]
    over += ["data.eval.0.max_samples=4", "train.stages.0.steps=2", "train.stages.1.steps=2"]
    assert main(["train", str(file), *over, "train.micro_batch=4", "train.global_batch=4", "train.warmup=0"]) == 0
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [(one["stage"], one["step"]) for one in rows] == [(1, 1), (1, 2), (2, 1), (2, 2)]
    before, after = (models.load(folder).state_dict() for folder in (base, run / "hf"))
    moved = {name.split(".")[1] for name in before if not torch.equal(before[name], after[name])}
    assert moved - {"weight"} == {"vision_tower", "multi_modal_projector", "language_model"}  # weight: of the head
    text = (EXAMPLES / "README.md").read_text(encoding="utf-8")
    for line in file.read_text(encoding="utf-8").splitlines():
        assert not line.startswith("#   ") or line.removeprefix("#   ") in text


@pytest.mark.long
@pytest.mark.real
@pytest.mark.usefixtures("no_pages")
@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_an_example_trains_two_steps_of_the_model(path: Path, first_layers: Path, tmp_path: Path) -> None:
    whole = require("real")
    data = whole.with_name(f"{whole.name}-data")
    model = whole if path.stem == "sft" else first_layers
    name = Path(load_config(path).data.train[0].path).name
    if (script := EXAMPLES / f"make_{name.split('.')[0]}.py").exists():
        made = tmp_path / "data"
        made.mkdir()
        for part in ("train", "eval"):
            (made / f"instructions.{part}.jsonl").symlink_to(data / f"instructions.{part}.jsonl")
        runpy.run_path(str(script))["main"](made)
        data = made
    paths = [f"model.path={model}", f"data.train.0.path={data / name}", f"run.dir={tmp_path / 'run'}", "run.hf=false"]
    assert main(["train", str(path), *paths, *short(path)]) == 0
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [one["step"] for one in rows] == [1, 2] and all(one["loss"] is not None for one in rows)
    massive = rows[0]["massive_activations"]
    layers = (11, 28) if model == whole else (11,)
    assert sorted(massive) == [f"model.layers.{layer}.mlp.down_proj" for layer in layers]
    assert json.loads((tmp_path / "run" / "proof.json").read_text())["share"] == 1
