"""generate, eval and convert in process, on runs, folders and adapters: output and errors."""

import json
from pathlib import Path

import pytest

from octavo.cli import terminal
from octavo.cli.main import main


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """Write model/ (a mini Qwen3-VL), fp8/ (its export), lora/ (a LoRA run on row-wise codes) and run.yaml."""
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


PROMPT = ["--prompt", "first?", "--max-new-tokens", "2"]


def test_empty_answer_is_reported(here, capsys, monkeypatch):
    monkeypatch.setattr("octavo.generation.answers", lambda *_, **__: [[""]])
    assert main(["generate", "fp8", *PROMPT]) == 0
    output = capsys.readouterr()
    assert output.out == "\n" and output.err.endswith("(the model generated an empty answer)\n")


def test_generate_answers_for_runs_folders_and_adapters(here, capsys):
    image = ["--image", str(next((here / "digits").rglob("*.png")))]
    run = answer(["generate", "lora", *PROMPT, *image], capsys)
    assert run["fp8_gemms"] > 0 and any("rowwise on" in note for note in run["notes"])
    adapter = answer(["generate", "lora/adapter", *PROMPT, *image, "--load-in-fp8", "row"], capsys)
    assert 0 < adapter["fp8_gemms"] < run["fp8_gemms"]  # the run also computes the tower in FP8
    assert answer(["generate", "lora/adapter", *PROMPT], capsys)["fp8_gemms"] == 0
    assert answer(["generate", "lora/adapter", *PROMPT, "--base", "fp8"], capsys)["fp8_gemms"] > 0
    reference = answer(["generate", "fp8", *PROMPT, "--backend", "reference"], capsys)
    assert reference["fp8_gemms"] > 0 and "blockwise on reference" in reference["notes"][0]
    assert answer(["generate", "fp8", *PROMPT, "--recipe", "off"], capsys)["fp8_gemms"] == 0
    assert answer(["generate", "model", *PROMPT, "--recipe", "rowwise"], capsys)["fp8_gemms"] > 0
    assert main(["generate", "fp8", *PROMPT]) == 0
    assert "weights frozen codes" in capsys.readouterr().err


def test_generate_answers_several_prompts_and_samples(here, capsys):
    prompts = ["--prompt", "first?", "--prompt", "second?", "--max-new-tokens", "3"]
    answers = answer(["generate", "model", *prompts], capsys)["answers"]
    assert (
        answers[0] == [answer(["generate", "model", *prompts[:2], *prompts[4:]], capsys)["answer"]]
        and len(answers) == 2
    )
    sampling = ["--samples", "3", "--temperature", "2", "--top-p", "0.99", "--top-k", "400", "--min-p", "1e-4"]
    first, repeated, other_seed = (
        answer(["generate", "model", *prompts, *sampling, "--kv", "fp8", "--seed", seed], capsys)["answers"]
        for seed in ("1", "1", "2")
    )
    assert first == repeated != other_seed
    assert [len(samples) for samples in first] == [3, 3] and len(set(first[0])) > 1
    assert main(["generate", "model", *prompts]) == 0
    output = capsys.readouterr()
    assert len(output.out.splitlines()) == 2 and "second?" in output.err
    full = answer(["generate", "model", *prompts[:2], "--max-new-tokens", "9"], capsys)["answer"]
    cut = answer(["generate", "model", *prompts[:2], "--max-new-tokens", "9", "--stop", full[2:4]], capsys)["answer"]
    assert full.startswith(cut) and full[2:4] not in cut


def test_images_are_inserted_at_their_placeholders(here, capsys):
    """As in training rows; without placeholders they come first."""
    from octavo.cli.generate import _content_parts

    image, video = {"type": "image"}, {"type": "video"}
    two_images, image_and_video = {"<image>": 2, "<video>": 0}, {"<image>": 1, "<video>": 1}
    assert _content_parts("What?", two_images) == [image, image, {"type": "text", "text": "What?"}]
    assert _content_parts("<image>\nA <image>", two_images) == [image, {"type": "text", "text": "\nA "}, image]
    assert _content_parts("What?", image_and_video) == [image, video, {"type": "text", "text": "What?"}]
    assert _content_parts("A<video>", image_and_video) == [image, {"type": "text", "text": "A"}, video]
    file = ["--image", str(next((here / "digits").rglob("*.png")))]
    assert main(["generate", "model", "--prompt", "<image> <image>?", *file]) == 2
    assert "has 2 placeholders <image> for 1 image" in capsys.readouterr().err


def test_generate_and_eval_report_ignored_generation_settings(here, capsys, monkeypatch):
    file = here / "model/generation_config.json"
    before = file.read_text()
    file.write_text(json.dumps({**json.loads(before), "do_sample": True, "temperature": 0.7, "num_beams": 1}))
    try:
        greedy = (
            "the model's generation settings do_sample=True, temperature=0.7 are ignored: answers are greedy unless "
            "sampling is enabled"
        )
        assert answer(["generate", "model", *PROMPT], capsys)["notes"][-1] == greedy
        for argv in (["eval", "model", "--config", "run.yaml"], ["train", "run.yaml", "run.dir=greedy"]):
            assert main(argv) == 0
            shown = capsys.readouterr()
            assert " ".join((shown.err + shown.out).split()).count(greedy) == 1
    finally:
        file.write_text(before)


def test_eval_runs_on_runs_folders_and_adapters(here, capsys):
    run = answer(["eval", "lora"], capsys)
    assert run["step"] == 2 and run["fp8_gemms"] > 0
    folder = answer(["eval", "fp8", "--config", "run.yaml"], capsys)
    assert "step" not in folder and folder["questions"] == run["questions"]
    adapter = answer(["eval", "lora/adapter", "--config", "run.yaml", "--base", "model"], capsys)
    assert adapter["fp8_gemms"] == 0 and abs(adapter["loss"] - run["loss"]) < 0.1
    high = answer(["eval", "lora", "--load-in-fp8", "off", "--recipe", "off"], capsys)
    assert high["fp8_gemms"] == 0


def test_eval_reports_both_bases(here, capsys):
    result = answer(["eval", "lora", "--base", "both"], capsys)
    assert [row["base"] for row in result["bases"]] == ["fp8", "fp8, dequantized", "high precision"]
    assert result["weights"]["count"] > 0
    assert main(["eval", "lora", "--base", "both"]) == 0
    out = capsys.readouterr().out
    assert "On the FP8 base the loss is" in out and "dB geometric mean" in out


@pytest.mark.parametrize(
    "argv, code, message",
    [
        (["generate", "nowhere", *PROMPT], 2, "there is no folder nowhere"),
        (["generate", "run.yaml", *PROMPT], 1, "run.yaml is a configuration; name its run directory"),
        (["generate", "digits", *PROMPT], 1, "is not a run directory, a Hugging Face folder or a PEFT adapter"),
        (["generate", "lora/checkpoints", *PROMPT], 1, "folder of a run's checkpoints; name the run"),
        (
            ["generate", "model", *PROMPT, "--samples", "2"],
            2,
            "--samples 2 without --temperature would repeat one answer 2 times",
        ),
        (["generate", "model", *PROMPT, "--temperature", "-1"], 1, "temperature=-1.0 (0, or at least 1e-6)"),
        (["generate", "model", *PROMPT[:2], "--max-new-tokens", "5000"], 1, "the model's context is 4096 tokens"),
        (["generate", "model", *PROMPT, "--template-arg", "mood=0"], 1, "does not accept the variable mood"),
        (["generate", "model", *PROMPT, "--template-arg", "enable_thinking"], 2, "'enable_thinking' is not NAME=VALUE"),
        (["generate", "fp8", *PROMPT, "--step", "1"], 2, "fp8 is not a run directory; remove --step"),
        (["generate", "fp8", *PROMPT, "--backend", "warp"], 2, "there is no backend 'warp'; there are auto,"),
        (["generate", "fp8", *PROMPT, "--backend", "reference", "--recipe", "off"], 2, "--recipe off has none"),
        (["generate", "fp8", *PROMPT, "--base", "model"], 1, "is a whole model: only adapters have a base"),
        (["generate", "fp8", *PROMPT, "--recipe", "rowwise"], 1, "rowwise"),
        (["generate", "fp8", *PROMPT, "--load-in-fp8", "row"], 1, "fp8"),
        (
            ["generate", "lora", *PROMPT, "--base", "digits"],
            1,
            "digits was given as the base of lora, but is not a complete Hugging",
        ),
        (["generate", "model", *PROMPT, "--load-in-fp8", "fp4"], 2, "'fp4' is none of rowwise"),
        (["eval", "model"], 1, "so it has no held-out data: give a configuration with data.eval, --config FILE.yaml"),
        (["eval", "model", "--config", "no.yaml"], 2, "there is no file no.yaml"),
        (
            ["eval", "model", "--config", "run.yaml", "--base", "both"],
            1,
            "has no adapters, so there are no two bases to compare. Remove --base",
        ),
        (["eval", "lora", "--base", "both", "--load-in-fp8", "off"], 2, "remove --load-in-fp8 off"),
        (["eval", "lora", "--step", "7"], 1, "no checkpoint of step 7; there are 2"),
        (["convert", "hf_to_dcp", "nowhere", "x"], 1, "nowhere is not a folder"),
        (["convert", "hf_to_dcp", "model", "digits"], 1, "digits exists and is not overwritten"),
        (["convert", "hf_to_dcp", "model", "model/x"], 1, "model/x is inside model, which must not change"),
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
            "only Qwen3VLConverter is",
        ),
        (["convert", "hf_to_dcp", "model", "x", "--dcp_dir", "y"], 2, "name the same folders; keep one"),
        (
            ["convert", "hf_to_dcp", "--hf_dir", "model", "--save_dir", "x"],
            2,
            "--save_dir does not belong to hf_to_dcp",
        ),
        (
            ["convert", "dcp_to_hf", "--load_dir", "a", "--save_dir", "x", "--to_bf16", "maybe"],
            2,
            "'maybe' is none of true",
        ),
        (["convert", "hf_to_dcp", "model", "x", "--workers", "0"], 2, "expected a whole number of at least 1"),
    ],
)
def test_errors_name_the_problem_and_the_fix(here, argv, code, message, capsys):
    assert main(argv) == code
    assert message in capsys.readouterr().err
    assert not (here / "x").exists() and not (here / "x.converting").exists()


def test_convert_round_trip(here, tmp_path, capsys):
    for kind, source in (("hf_to_dcp", "fp8"), ("lora_hf_to_dcp", "lora/adapter")):
        converted, back = tmp_path / kind, tmp_path / f"{kind}-back"
        assert main(["convert", kind, source, str(converted)]) == 0
        assert f"{converted}: " in capsys.readouterr().out
        assert answer(["convert", "dcp_to_hf", str(converted), str(back)], capsys)["kept"] == 0
        for file in Path(source).iterdir():
            assert (back / file.name).read_bytes() == file.read_bytes(), file
    assert main(["generate", str(tmp_path / "hf_to_dcp-back"), *PROMPT]) == 0


def test_convert_accepts_the_options_of_mindspeed_mm(here, tmp_path, capsys):
    dcp, back, expected = (str(tmp_path / name) for name in ("dcp", "back", "expected"))
    words = ["convert", "Qwen3VLConverter"]
    assert main([*words, "hf_to_dcp", "--hf_dir", "model", "--dcp_dir", dcp, "--is_lora_base", "false"]) == 0
    ends = ["--load_dir", f"{dcp}/release", "--save_dir", back, "--model_assets_dir", "model", "--to_bf16", "False"]
    assert main([*words, "dcp_to_hf", *ends]) == 0
    for file in Path("model").glob("*.safetensors"):
        assert (Path(back) / file.name).read_bytes() == file.read_bytes()
    assert main([*words, "lora_hf_to_dcp", "--hf_dir", "lora/adapter", "--dcp_dir", str(tmp_path / "lora")]) == 0
    base_options = ["hf_to_dcp", "--hf_dir", "model", "--is_lora_base", "true", "--dcp_dir"]
    assert (
        main([*words, *base_options, str(tmp_path / "base")])
        == 0
        == main(["convert", "hf_to_dcp", "model", expected, "--is-lora-base"])
    )
    release = "release"
    names = sorted(file.name for file in (tmp_path / "base" / release).iterdir())
    assert names == sorted(file.name for file in (Path(expected) / release).iterdir())
    assert all(
        (tmp_path / "base" / release / n).read_bytes() == (Path(expected) / release / n).read_bytes() for n in names
    )


def test_progress_bar_is_shown_on_a_terminal(here, tmp_path, capsys, monkeypatch):
    from rich.console import Console

    console = Console(force_terminal=True, width=100, file=(tmp_path / "out").open("w"))
    monkeypatch.setattr(terminal, "console", lambda **_: console)
    assert main(["convert", "hf_to_dcp", "model", str(tmp_path / "dcp")]) == 0
    assert main(["eval", "lora"]) == 0
    console.file.close()
    bars = (tmp_path / "out").read_text()
    assert "hf_to_dcp" in bars and "evaluating" in bars


def test_training_writes_a_page_and_report_repeats_it(here, tmp_path, capsys):
    automatic, requested = here / "lora/page.html", tmp_path / "page.html"
    assert main(["report", "lora", "-o", str(requested)]) == 0
    assert capsys.readouterr().out == f"wrote {requested}, {tmp_path / 'page.png'}\n"
    pages = [page.read_text().split("<h2>Curves", 1)[1] for page in (automatic, requested)]
    assert pages[0] == pages[1] and "predicted" in pages[0]  # the head contains the time of writing
    for argv, code, message in (
        (["report", "lora", "-o", "a.pdf"], 2, "-o a.pdf: the name must end with .html"),
        (["report", "lora", "digits/nothing"], 2, "there is no run directory digits/nothing"),
        (["report", "digits"], 1, "digits has no config.yaml, so it is not a run directory"),
    ):
        assert main(argv) == code
        assert message in capsys.readouterr().err
