"""generate, eval and convert in process, on runs, folders and adapters: what they print and what they refuse."""

import json
from pathlib import Path

import pytest

from octavo.cli import terminal
from octavo.cli.main import main


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """model/ (mini Qwen3-VL), fp8/ (its export), lora/ (a run over row codes, its adapter/ inside), run.yaml."""
    from octavo.data.builtin import digits
    from octavo.models.tiny import tiny

    home = tmp_path_factory.mktemp("use")
    tiny.write("qwen3_vl", home / "model", size="mini")
    digits.write(home / "digits", train=8, test=4)
    (home / "run.yaml").write_text(
        """model: {path: model, load_in_fp8: row}
lora: {rank: 2}
data:
  train: [{path: digits/train.json, images: digits}]
  eval: [{path: digits/test.json, images: digits}]
train: {steps: 2, micro_batch: 2, global_batch: 2, seq_length: 256, lr: 1e-2}
run: {dir: lora, tensorboard: false, health_every: 0, threads: 1}
"""
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(home)
        assert main(["train", "run.yaml"]) == 0
        assert main(["export", "model", "fp8", "--format", "fp8-block"]) == 0
    return home


@pytest.fixture
def here(home, monkeypatch):
    monkeypatch.chdir(home)
    return home


def answer(argv, capsys):
    assert main([*argv, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


ASK = ["--prompt", "first?", "--max-new-tokens", "2"]


def test_an_empty_answer_is_said_to_be_one(here, capsys, monkeypatch):
    monkeypatch.setattr("octavo.generation.answers", lambda *_, **__: [[""]])
    assert main(["generate", "fp8", *ASK]) == 0
    got = capsys.readouterr()
    assert got.out == "\n" and got.err.endswith("(the model generated an empty answer)\n")


def test_generate_asks_all_of_them(here, capsys):
    image = ["--image", str(next((here / "digits").rglob("*.png")))]
    run = answer(["generate", "lora", *ASK, *image], capsys)
    assert run["fp8_gemms"] > 0 and any("rowwise on" in note for note in run["notes"])
    same = answer(["generate", "lora/adapter", *ASK, *image, "--load-in-fp8", "row"], capsys)
    assert 0 < same["fp8_gemms"] < run["fp8_gemms"]  # the run computes its tower in FP8 too, which has no codes
    assert answer(["generate", "lora/adapter", *ASK], capsys)["fp8_gemms"] == 0
    assert answer(["generate", "lora/adapter", *ASK, "--base", "fp8"], capsys)["fp8_gemms"] > 0
    reference = answer(["generate", "fp8", *ASK, "--backend", "reference"], capsys)
    assert reference["fp8_gemms"] > 0 and "blockwise on reference" in reference["notes"][0]
    assert answer(["generate", "fp8", *ASK, "--recipe", "off"], capsys)["fp8_gemms"] == 0
    assert answer(["generate", "model", *ASK, "--recipe", "rowwise"], capsys)["fp8_gemms"] > 0
    assert main(["generate", "fp8", *ASK]) == 0
    assert "weights frozen codes" in capsys.readouterr().err


def test_generate_asks_several_questions_and_samples(here, capsys):
    several = ["--prompt", "first?", "--prompt", "second?", "--max-new-tokens", "3"]
    both = answer(["generate", "model", *several], capsys)["answers"]
    assert both[0] == [answer(["generate", "model", *several[:2], *several[4:]], capsys)["answer"]] and len(both) == 2
    drawn = ["--samples", "3", "--temperature", "2", "--top-p", "0.99", "--top-k", "400", "--min-p", "1e-4"]
    one, again, other = (
        answer(["generate", "model", *several, *drawn, "--kv", "fp8", "--seed", seed], capsys)["answers"]
        for seed in ("1", "1", "2")
    )
    assert one == again != other and [len(each) for each in one] == [3, 3] and len(set(one[0])) > 1
    assert main(["generate", "model", *several]) == 0
    got = capsys.readouterr()
    assert len(got.out.splitlines()) == 2 and "second?" in got.err
    whole = answer(["generate", "model", *several[:2], "--max-new-tokens", "9"], capsys)["answer"]
    cut = answer(["generate", "model", *several[:2], "--max-new-tokens", "9", "--stop", whole[2:4]], capsys)["answer"]
    assert whole.startswith(cut) and whole[2:4] not in cut


def test_images_of_a_question_stand_where_it_says(here, capsys):
    """As in rows of training data; else before it."""
    from octavo.cli.generate import _parts

    image, video = {"type": "image"}, {"type": "video"}
    two, both = {"<image>": 2, "<video>": 0}, {"<image>": 1, "<video>": 1}
    assert _parts("What?", two) == [image, image, {"type": "text", "text": "What?"}]
    assert _parts("<image>\nA <image>", two) == [image, {"type": "text", "text": "\nA "}, image]
    assert _parts("What?", both) == [image, video, {"type": "text", "text": "What?"}]
    assert _parts("A<video>", both) == [image, {"type": "text", "text": "A"}, video]
    file = ["--image", str(next((here / "digits").rglob("*.png")))]
    assert main(["generate", "model", "--prompt", "<image> <image>?", *file]) == 2
    assert "has 2 placeholders <image>, but there are 1 images" in capsys.readouterr().err


def test_generate_and_eval_say_which_settings_of_the_folder_they_do_not_follow(here, capsys, monkeypatch):
    file = here / "model/generation_config.json"
    before = file.read_text()
    file.write_text(json.dumps({**json.loads(before), "do_sample": True, "temperature": 0.7, "num_beams": 1}))
    try:
        greedy = (
            "the model's generation settings do_sample=True, temperature=0.7 are ignored: answers are greedy unless "
            "sampling is asked for"
        )
        assert answer(["generate", "model", *ASK], capsys)["notes"][-1] == greedy
        for argv in (["eval", "model", "--config", "run.yaml"], ["train", "run.yaml", "run.dir=greedy"]):
            assert main(argv) == 0
            shown = capsys.readouterr()
            assert " ".join((shown.err + shown.out).split()).count(greedy) == 1
    finally:
        file.write_text(before)


def test_eval_judges_all_of_them(here, capsys):
    run = answer(["eval", "lora"], capsys)
    assert run["step"] == 2 and run["fp8_gemms"] > 0
    folder = answer(["eval", "fp8", "--config", "run.yaml"], capsys)
    assert "step" not in folder and folder["questions"] == run["questions"]
    worn = answer(["eval", "lora/adapter", "--config", "run.yaml", "--base", "model"], capsys)
    assert worn["fp8_gemms"] == 0 and abs(worn["loss"] - run["loss"]) < 0.1
    high = answer(["eval", "lora", "--load-in-fp8", "off", "--recipe", "off"], capsys)
    assert high["fp8_gemms"] == 0


def test_eval_reports_the_difference_of_both_bases(here, capsys):
    found = answer(["eval", "lora", "--base", "both"], capsys)
    assert [row["base"] for row in found["bases"]] == ["fp8", "fp8, dequantized", "high precision"]
    assert found["weights"]["count"] > 0
    assert main(["eval", "lora", "--base", "both"]) == 0
    out = capsys.readouterr().out
    assert "On the FP8 base the loss is" in out and "dB in the geometric mean" in out


@pytest.mark.parametrize(
    "argv, code, message",
    [
        (["generate", "nowhere", *ASK], 2, "there is no folder nowhere"),
        (["generate", "run.yaml", *ASK], 1, "run.yaml is a configuration; name its run directory"),
        (["generate", "digits", *ASK], 1, "is not a run directory, a Hugging Face folder or a PEFT adapter"),
        (["generate", "lora/checkpoints", *ASK], 1, "folder of a run's checkpoints; name the run"),
        (
            ["generate", "model", *ASK, "--samples", "2"],
            2,
            "--samples 2 without --temperature would repeat one answer 2 times",
        ),
        (["generate", "model", *ASK, "--temperature", "-1"], 1, "temperature=-1.0 (0, or at least 1e-6)"),
        (["generate", "model", *ASK[:2], "--max-new-tokens", "5000"], 1, "the model's context is 4096 tokens"),
        (["generate", "model", *ASK, "--template-arg", "mood=0"], 1, "has no place for the variable mood"),
        (["generate", "model", *ASK, "--template-arg", "enable_thinking"], 2, "'enable_thinking' is not NAME=VALUE"),
        (["generate", "fp8", *ASK, "--step", "1"], 2, "fp8 is not a run directory; remove --step"),
        (["generate", "fp8", *ASK, "--backend", "warp"], 2, "there is no backend 'warp'; there are auto,"),
        (["generate", "fp8", *ASK, "--backend", "reference", "--recipe", "off"], 2, "--recipe off has none"),
        (["generate", "fp8", *ASK, "--base", "model"], 1, "is a whole model: only adapters have a base"),
        (["generate", "fp8", *ASK, "--recipe", "rowwise"], 1, "rowwise"),
        (["generate", "fp8", *ASK, "--load-in-fp8", "row"], 1, "fp8"),
        (["generate", "lora", *ASK, "--base", "digits"], 1, "digits was given as the base of lora but has no config"),
        (["generate", "model", *ASK, "--load-in-fp8", "fp4"], 2, "invalid choice: 'fp4'"),
        (["eval", "model"], 1, "--config FILE.yaml (its data.eval)"),
        (["eval", "model", "--config", "no.yaml"], 2, "there is no file no.yaml"),
        (["eval", "model", "--config", "run.yaml", "--base", "both"], 1, "has no adapters, so it has one base"),
        (["eval", "lora", "--base", "both", "--load-in-fp8", "off"], 2, "remove --load-in-fp8 off"),
        (["eval", "lora", "--step", "7"], 1, "no checkpoint of step 7; there are 2"),
        (["convert", "hf_to_dcp", "nowhere", "x"], 1, "nowhere is not a folder"),
        (["convert", "hf_to_dcp", "model", "digits"], 1, "digits exists and is not overwritten"),
        (["convert", "hf_to_dcp", "model", "model/x"], 1, "model/x is inside model, which is only read"),
        (["convert", "dcp_to_hf", "model", "x"], 1, "it is not a DCP checkpoint"),
        (["convert", "dcp_to_hf", "lora/checkpoints/step_2", "x"], 1, "octavo export RUN"),
        (
            ["convert", "lora_hf_to_dcp", "model", "x"],
            1,
            "holds a whole model, not adapter_model.safetensors: convert it with hf_to_dcp",
        ),
        (["convert", "dcp_to_hf", "model", "x", "--is-lora-base"], 2, "--is-lora-base belongs to hf_to_dcp"),
        (["convert", "hf_to_dcp", "model", "x", "--like", "model"], 2, "--like belongs to dcp_to_hf; leave it out"),
        (["convert", "hf_to_mm", "model", "x"], 2, "hf_to_mm: expected one of hf_to_dcp, dcp_to_hf, lora_hf_to_dcp"),
        (["convert", "hf_to_dcp", "model"], 2, "takes two folders: octavo convert hf_to_dcp SRC DST, or --hf_dir SRC"),
        (["convert", "Qwen3VLConverter"], 2, "Qwen3VLConverter: expected one of hf_to_dcp"),
        (
            ["convert", "Mistral3Converter", "hf_to_dcp", "model", "x"],
            2,
            "of MindSpeed-MM's converters, Qwen3VLConverter is",
        ),
        (["convert", "hf_to_dcp", "model", "x", "--dcp_dir", "y"], 2, "name the same folders; keep one"),
        (
            ["convert", "hf_to_dcp", "--hf_dir", "model", "--save_dir", "x"],
            2,
            "--save_dir does not belong to hf_to_dcp",
        ),
        (["convert", "dcp_to_hf", "--load_dir", "a", "--save_dir", "x", "--to_bf16", "maybe"], 2, "invalid choice"),
        (["convert", "hf_to_dcp", "model", "x", "--workers", "0"], 2, "expected a whole number of at least 1"),
    ],
)
def test_refusals(here, argv, code, message, capsys):
    assert main(argv) == code
    assert message in capsys.readouterr().err
    assert not (here / "x").exists() and not (here / "x.converting").exists()


def test_convert_there_and_back(here, tmp_path, capsys):
    for kind, source in (("hf_to_dcp", "fp8"), ("lora_hf_to_dcp", "lora/adapter")):
        there, back = tmp_path / kind, tmp_path / f"{kind}-back"
        assert main(["convert", kind, source, str(there)]) == 0
        assert f"{there}: " in capsys.readouterr().out
        assert answer(["convert", "dcp_to_hf", str(there), str(back)], capsys)["kept"] == 0
        for file in Path(source).iterdir():
            assert (back / file.name).read_bytes() == file.read_bytes(), file
    assert main(["generate", str(tmp_path / "hf_to_dcp-back"), *ASK]) == 0


def test_convert_takes_the_spelling_of_mindspeeds_guide(here, tmp_path, capsys):
    dcp, back, own = (str(tmp_path / name) for name in ("dcp", "back", "own"))
    words = ["convert", "Qwen3VLConverter"]
    assert main([*words, "hf_to_dcp", "--hf_dir", "model", "--dcp_dir", dcp, "--is_lora_base", "false"]) == 0
    ends = ["--load_dir", f"{dcp}/release", "--save_dir", back, "--model_assets_dir", "model", "--to_bf16", "False"]
    assert main([*words, "dcp_to_hf", *ends]) == 0
    for file in Path("model").glob("*.safetensors"):
        assert (Path(back) / file.name).read_bytes() == file.read_bytes()
    assert main([*words, "lora_hf_to_dcp", "--hf_dir", "lora/adapter", "--dcp_dir", str(tmp_path / "lora")]) == 0
    based = ["hf_to_dcp", "--hf_dir", "model", "--is_lora_base", "true", "--dcp_dir"]
    assert (
        main([*words, *based, str(tmp_path / "base")])
        == 0
        == main(["convert", "hf_to_dcp", "model", own, "--is-lora-base"])
    )
    release = "release"
    same = sorted(file.name for file in (tmp_path / "base" / release).iterdir())
    assert same == sorted(file.name for file in (Path(own) / release).iterdir())
    assert all((tmp_path / "base" / release / n).read_bytes() == (Path(own) / release / n).read_bytes() for n in same)


def test_a_bar_is_shown_on_a_terminal(here, tmp_path, capsys, monkeypatch):
    from rich.console import Console

    shown = Console(force_terminal=True, width=100, file=(tmp_path / "out").open("w"))
    monkeypatch.setattr(terminal, "console", lambda **_: shown)
    assert main(["convert", "hf_to_dcp", "model", str(tmp_path / "dcp")]) == 0
    assert main(["eval", "lora"]) == 0
    shown.file.close()
    drawn = (tmp_path / "out").read_text()
    assert "hf_to_dcp" in drawn and "evaluating" in drawn


def test_training_leaves_a_page_and_report_writes_it_anywhere(here, tmp_path, capsys):
    own, again = here / "lora/page.html", tmp_path / "again.html"
    assert main(["report", "lora", "-o", str(again)]) == 0
    assert capsys.readouterr().out == f"wrote {again}, {tmp_path / 'again.png'}\n"
    pages = [page.read_text().split("<h2>Curves", 1)[1] for page in (own, again)]
    assert pages[0] == pages[1] and "predicted" in pages[0]  # the head says when it was written
    for argv, code, said in (
        (["report", "lora", "-o", "a.pdf"], 2, "-o a.pdf: a page must end with .html"),
        (["report", "lora", "digits/nothing"], 2, "there is no run directory digits/nothing"),
        (["report", "digits"], 1, "digits has no config.yaml, so it is not a run directory"),
    ):
        assert main(argv) == code
        assert said in capsys.readouterr().err
