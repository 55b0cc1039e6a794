"""Launch scripts: sums, files that they source, values that stay open, words that only look like another thing."""

from __future__ import annotations

from pathlib import Path

import pytest

from octavo.config import load_config_text
from octavo.importers import TranslateError, Translation, translate
from octavo.importers.shell.arithmetic import evaluate


def script(folder: Path, content: str, **more) -> Translation:
    (folder / "a.sh").write_text(content, encoding="utf-8")
    return translate([folder / "a.sh"], folder / "out.yaml", root=folder, **more)


def row(made: Translation, key: str):
    return next(row for row in made.rows if row.source_key.key == key)


@pytest.mark.parametrize(
    ("text", "value"),
    [("64 / 8", 8), ("2048/2 / 8/ 2", 64), ("(3 + 4) * -2 % 5", -4), ("-7 / 2", -3), ("7 % -2", 1)]
    + [(text, None) for text in ("1 / 0", "2 ** 9", "1 << 3", "n / 2", "'a' * 9", "9" * 300, "9" * 30, "")]
    + [(text, None) for text in ("++7", "--7", "16#9")],
)
def test_arithmetic_matches_the_shell(text: str, value: int | None) -> None:
    assert evaluate(text) == value


RUN = """
nodes=2
export NPROC_PER_NODE=$((16 / nodes))
swift sft --model org/m --dataset org/d --max_length 64 --max_steps 4 {flags}
"""


def test_batch_size_expression_is_evaluated(tmp_path: Path) -> None:
    flags = "--per_device_train_batch_size $((64 / ${nodes} / 8)) --gradient_accumulation_steps $(expr 16 / $nodes)"
    made = script(tmp_path, RUN.format(flags=flags))
    cfg = load_config_text(made.content, base=tmp_path)
    assert (cfg.train.micro_batch, cfg.train.global_batch) == (4, 4 * 8 * 8)
    backquotes = script(tmp_path, RUN.format(flags="--gradient_accumulation_steps `expr 4 \\* $nodes`"))
    assert load_config_text(backquotes.content, base=tmp_path).train.global_batch == 8 * 8


def test_unset_script_variables_become_todos(tmp_path: Path) -> None:
    flags = "--per_device_train_batch_size $((64 / SLURM_NODES)) --output_dir $(date) --seed $1"
    made = script(tmp_path, RUN.format(flags=flags))
    assert "--set SLURM_NODES=VALUE" in row(made, "per_device_train_batch_size").why
    assert any(note.startswith("FILL IN: set train.micro_batch") for note in made.notes)
    (line,) = [line for line in made.content.split("\n") if "micro_batch:" in line]
    assert "FILL IN" in line and "the framework's default" not in line
    for key in ("output_dir", "seed"):  # nothing that --set could name
        assert row(made, key).kind == "none" and "write the value into the script" in row(made, key).why
    given = script(tmp_path, RUN.format(flags=flags), variables={"SLURM_NODES": "4"})
    assert load_config_text(given.content, base=tmp_path).train.micro_batch == 16

    (tmp_path / "b").mkdir()
    launch = "torchrun --nproc_per_node 8 --nnodes $NODES train.py --tune_language_model true --vision_tower a "
    made = script(tmp_path / "b", launch + "--data_mixture a --model_max_length 64 --max_steps 2\n")
    assert any("$NODES" in note and "--world N" in note for note in made.notes)


def test_sourced_local_file_is_read(tmp_path: Path) -> None:
    (tmp_path / "setup").mkdir()
    text = 'GPUS=${SLURM_GPUS:-$USUAL}\nBATCH=$((TOTAL / GPUS / 2))\nexport PORT=7\nif [ -n "$X" ]; then exit 1; fi\n'
    (tmp_path / "setup" / "all.sh").write_text(text + "source setup/all.sh\n")
    content = "USUAL=8\nTOTAL=128\nsource setup/all.sh\n"
    content += "NPROC_PER_NODE=$GPUS swift sft --model org/m --dataset org/d --max_length 64 --max_steps 1 "
    content += "--per_device_train_batch_size $BATCH --gradient_accumulation_steps 2\n"
    made = script(tmp_path, content)
    cfg = load_config_text(made.content, base=tmp_path)
    assert (cfg.train.micro_batch, cfg.train.global_batch) == (8, 128) and row(made, "$PORT").source_key.value == 7
    assert any(text.startswith("setup/all.sh: if") for _, text, _ in made.unread)
    (tmp_path / "setup" / "all.sh").unlink()
    gone = script(tmp_path, content)
    assert ("source setup/all.sh", "another file, which is not read") in {tuple(line[1:]) for line in gone.unread}


def test_endless_scripts_are_bounded(tmp_path: Path) -> None:
    """One that sources itself, many that source each other, defaults in defaults, a variable that doubles."""
    run = "swift sft --model org/m --dataset org/d --max_length 64 --max_steps 1\n"
    own = script(tmp_path, f"source a.sh\n. ./a.sh\n{run}")
    assert [text for _, text, _ in own.unread] == ["source a.sh", ". ./a.sh"]
    for name in "bcde":
        (tmp_path / f"{name}.sh").write_text(f"source {chr(ord(name) + 1)}.sh\n" * 99 + f"# {name}\n")
    assert len(script(tmp_path, f"source b.sh\n{run}").unread) < 9999
    for text, said in (
        ("A=" + "${A:-" * 999 + "}" * 999, "a.sh:2: over 50 constructs are nested"),
        ("A=xx" + "\nA=$A$A" * 40, "its variables exceed"),
        ("A=(x)" + '\nA+=("${A[@]}" "${A[@]}")' * 40, "its variables exceed"),
    ):
        with pytest.raises(TranslateError, match=said):
            script(tmp_path, f"\n{text}\n{run}")


def test_script_with_a_config_file_asks_for_the_file(tmp_path: Path) -> None:
    run = "NNODES=2 NPROC_PER_NODE=4 llamafactory-cli train there/b.yaml \\\n  learning_rate=1e-5 output_dir=out\n"
    with pytest.raises(TranslateError, match="octavo import there/b.yaml SCRIPT"):
        script(tmp_path, run)
    keys = "model_name_or_path: org/m\nstage: sft\nfinetuning_type: full\ncutoff_len: 64\ndataset: a\nmax_steps: 2\n"
    (tmp_path / "b.yaml").write_text(keys)
    made = translate([tmp_path / "b.yaml", tmp_path / "a.sh"], tmp_path / "out.yaml", root=tmp_path)
    cfg = load_config_text(made.content, base=tmp_path)
    assert (cfg.train.lr, cfg.run.dir, cfg.train.global_batch) == (1e-5, "out", 8 * 8) and not made.unread


def test_ambiguous_words_are_parsed_by_the_shell_grammar(tmp_path: Path) -> None:
    flags = "--external_plugins code/plugin.py --system '' --seed ${EMPTY:-5} \\\n --lr_scheduler_type linear \\\n"
    made = script(tmp_path, "EMPTY=\n" + RUN.format(flags=flags + " # --save_steps 7 \\\n --save_steps 9"))
    assert row(made, "external_plugins").source_key.value == "code/plugin.py"
    cfg = load_config_text(made.content, base=tmp_path)
    assert (cfg.run.seed, cfg.train.schedule, cfg.run.save_every) == (5, "linear", 500)
    assert [text for _, text, why in made.unread if "ended" in why] == ["--save_steps 9"]

    nothing = "MIX=\ntorchrun train.py --data_mixture $MIX --tune_language_model true --vision_tower a --max_steps 2\n"
    made = script(tmp_path, nothing)
    assert any("FILL IN: set data.train.0.path" in note for note in made.notes)
