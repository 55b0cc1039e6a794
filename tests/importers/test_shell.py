"""The shell's grammar in launch scripts: what a script sets, what it does not, and what is listed."""

# ruff: noqa: E501 (scripts in tables)
from __future__ import annotations

from pathlib import Path

import pytest

from octavo.config import load_config_text
from octavo.importers import TranslateError, Translation, translate
from octavo.importers.shell import interpreter as shell_script

RUN = "torchrun train.py --lr $LR --size $BS\n"


def of(text: str, **known: str) -> dict[str, str]:
    """The flags of the last command, each with its value."""
    words = [word.text for word in shell_script.read(text, known, "a.sh").commands[-1].words]
    return {words[at]: words[at + 1] for at in range(len(words) - 1) if words[at].startswith("--")}


def listed(text: str) -> list[tuple[int, str]]:
    return [(line, what) for line, what, _ in shell_script.read(text, {}, "a.sh").unread]


def import_of(folder: Path, content: str, framework: str | None = None) -> Translation:
    (folder / "a.sh").write_text(content)
    return translate([folder / "a.sh"], folder / "out.yaml", root=folder, framework=framework)


@pytest.mark.parametrize(
    ("written", "words"),
    [
        ('A="\n --x 1 \\\n --y 2\n"; $A', ["--x", "1", "--y", "2"]),
        ('A="--x 1"; "$A"', ["--x 1"]),
        ("A='p q' B=r; $A$B '' $NONE_SET", ["p", "qr", "", "$NONE_SET"]),
        ("A=; x $A \"$A\"", ["x", ""]),
        ("A=(1 '2 3' # 4\n 5); x ${A[@]} \"${A[@]}\" \"${A[*]}\" $A", ["x", "1", "2", "3", "5", "1", "2 3", "5", "1 2 3 5", "1"]),
        ("x a#b '#' # c", ["x", "a#b", "#"]),
        ("A=8; x $((A * 2)) $(expr $A / 2) `expr $A - 1` ${A:-4} ${#A} $(echo $A)", ["x", "16", "4", "7", "8", "1", "8"]),
        ("A=a/b.json; x ${A##*/} ${A%.json} ${B:-${C:-d}} ${A:+e}", ["x", "b.json", "a/b", "d", "e"]),
        ("x {a,b} '{c,d}'", ["x", "a", "b", "{c,d}"]),
    ],
)  # fmt: skip
def test_words_are_split_after_expansion(written: str, words: list[str]) -> None:
    assert [word.text for word in shell_script.read(written + "\n", {}, "a.sh").commands[-1].words] == words


DOCUMENTS = (
    "cat <<EOF > hosts\nLR=9\ndon't (\nEOF",
    "cat > hosts <<'EOF'\nLR=9 $(\nEOF",
    "cat <<-EOF\n\tLR=9\n\tEOF",
    'cat <<"A B" <<C\nLR=9\nA B\nBS=8\nC',
    'cat <<< "LR=9"',
    "f() {\ncat <<EOF\n}\nLR=9\nEOF\n}\nf",
    "for i in 1; do cat <<EOF\ndone\nLR=9\nEOF\ndone",
    "A=$(cat <<EOF\n)\nLR=9\nEOF\n)",
    "cat <<EOF\nLR=9\\\nEOF\nEOF",
)


@pytest.mark.parametrize("document", DOCUMENTS)
def test_here_document_is_not_parsed_as_script(document: str) -> None:
    text = f"LR=1\n{document}\nBS=2\n{RUN}"
    assert of(text) == {"--lr": "1", "--size": "2"}
    assert shell_script.read(text, {}, "a.sh").commands[-1].words[0].line == text.count("\n")


@pytest.mark.parametrize(
    ("line", "value"),
    [
        *[(line, "1") for line in ("false && LR=8", "true || LR=6", "( LR=9 )", "{ LR=9; } | cat", "LR=9 &", "LR=9 true")],
        *[(line, "1") for line in ("f() { LR=9; }", "if [ 1 = 2 ]; then LR=9; fi", "case a in b) LR=9;; esac")],
        *[(line, "9") for line in ("true && LR=9", "false || { LR=9; }", "{ LR=9; }", "f() { LR=$1; }; f 9", "eval LR=9")],
        *[(line, "9") for line in ("for LR in 8 9; do :; done", "case a in b|a) LR=9;; esac", "((LR = 3 * 3))")],
        *[(line, "9") for line in ('[ "$LR" = 1 ] && LR=9', "if [[ $LR == 1* ]]; then LR=9; else LR=8; fi", ": ${LR:=2}; LR=9")],
    ],
)  # fmt: skip
def test_only_unconditional_commands_are_followed(line: str, value: str) -> None:
    assert of(f"LR=1\n{line}\n{RUN}")["--lr"] == value


@pytest.mark.parametrize("change", ["LR+=1", "((LR++))", "LR+=(1)", "LR=$((LR + 1))", "LR=${#LR}", "LR=${LR:-1}"])
def test_appending_to_a_possibly_set_variable_is_uncertain(change: str) -> None:
    """It was unset for sure, and a line that was not followed may have set it."""
    script = shell_script.read(f'unset LR\nif [ "$BIG" = 1 ]; then LR=4; fi\n{change}\nrun --lr "$LR"\n', {}, "a.sh")
    assert script.commands[-1].words[-1].unsure == (2,)


@pytest.mark.parametrize(
    "line",
    [
        '[ "$BIG" = 1 ] && LR=1e-3',
        'test -n "$X" && LR=3',
        "mkdir out || { LR=3; }",
        'if [ -n "$X" ]; then LR=3; fi',
        'case "$1" in big) LR=3;; esac',
        "while read LR; do :; done < rates",
        "f() { [ -f x ] && return; LR=3; }; f",
        '[ -f x ] && f() { LR=3; }; f',
    ],
)  # fmt: skip
def test_runtime_values_are_listed_and_not_followed(line: str, tmp_path: Path) -> None:
    read = shell_script.read(f"LR=1\n{line}\n{RUN}", {}, "a.sh")
    assert (read.commands[-1].words[3].text, read.commands[-1].words[3].unsure) == ("1", (2,))
    assert 2 in [number for number, _, _ in read.unread]
    swift = "swift sft --model org/m --dataset org/d --max_length 64 --max_steps 4 --learning_rate $LR\n"
    made = import_of(tmp_path, f"LR=1\n{line}\n{swift}")
    assert load_config_text(made.content, base=tmp_path).train.lr == 1
    assert "a.sh:2 is not evaluated and may change learning_rate; the translated values ignore that line" in made.notes


def test_skipped_lines_are_listed() -> None:
    text = f"false && LR=8\ntrue || LR=6\nnever() {{ LR=9; }}\nif [ 1 = 2 ]; then LR=9; fi\nfalse && echo\nLR=1\n{RUN}"
    assert listed(text) == [
        (1, "false && LR=8"), (2, "true || LR=6"), (3, "never()"), (4, "if [ 1 = 2 ];")
    ]  # fmt: skip


def test_conditional_launch_is_used_if_it_is_the_only_one(tmp_path: Path) -> None:
    swift = "swift sft --model org/m --dataset org/d --max_length 64 --max_steps {}"
    made = import_of(tmp_path, f"cd somewhere && {swift.format(4)} 2>&1 | tee log\n")
    assert load_config_text(made.content, base=tmp_path).train.steps == 4
    assert any("as if that held" in why for _, _, why in made.unread)
    with pytest.raises(TranslateError, match="it starts 2 trainings"):
        import_of(tmp_path, f"if [ $N = 1 ]; then {swift.format(4)}; else {swift.format(5)}; fi\n")
    only = import_of(tmp_path, f"[ -n $X ] && {swift.format(4)}\n{swift.format(5)}\n")
    assert load_config_text(only.content, base=tmp_path).train.steps == 5


def test_only_files_within_the_root_are_sourced(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "in").mkdir()
    (tmp_path / "out" / "a.sh").write_text("STEPS=9\n")
    (tmp_path / "in" / "linked.sh").symlink_to(tmp_path / "out" / "a.sh")
    (tmp_path / "in" / "own.sh").write_text("STEPS=7\n")
    for name, steps in (("linked.sh", 4), ("../out/a.sh", 4), (f"{tmp_path}/out/a.sh", 4), ("own.sh", 7)):
        made = import_of(tmp_path / "in", f"STEPS=4\nsource {name}\nswift sft --model org/m --dataset org/d --max_length 64 "
                                          "--max_steps $STEPS\n")  # fmt: skip
        assert load_config_text(made.content, base=tmp_path).train.steps == steps, name
        assert bool(made.unread) == (steps == 4)


def test_parsing_stops_at_the_first_syntax_error(tmp_path: Path) -> None:
    read = shell_script.read("LR=1\nBS=2\nif true; then\nLR=9\n", {}, "a.sh")
    assert [(line, why) for line, _, why in read.unread][0][1].startswith("a shell stops reading here: fi was expected")
    with pytest.raises(TranslateError, match=r"no command that trains .* Line 2: a shell stops reading here"):
        import_of(tmp_path, f"LR=1; BS=2\ndone\n{RUN}")
    assert of(f"LR=1\nADDRESS=<your address>\nBS=2\n{RUN}") == {"--lr": "1", "--size": "2"}


@pytest.mark.parametrize(
    ("text", "refusal"),
    [
        ("A" + "=" * (4 << 20), ""),
        ("A+=(x)\n" * 590_000, "over 200000 words"),
        ("[ $X ] && A+=x\n" * 9_000 + "B=$A$A\n", ""),
        ("for a in " + "x " * 9_000 + "; do for b in " + "y " * 9_000 + "; do A=1; done; done\n", "over 200000 commands"),
        ("${A:-" * 9_000, "constructs are nested"),
        ("if true; then\n" * 9_000, "constructs are nested"),
        ("f() { f; f; }\nf\n", "commands are nested"),
        ("A+=xx; B=${#A}\n" * 9_000, "its variables exceed"),
    ],
)  # fmt: skip
def test_length_steps_and_depth_are_bounded(text: str, refusal: str) -> None:
    if refusal:
        with pytest.raises(TranslateError, match=f"^a.sh:[0-9]+: .*{refusal}"):
            shell_script.read(text, {}, "a.sh")
    else:
        shell_script.read(text, {}, "a.sh")


def test_environment_assignments_apply_to_the_command(tmp_path: Path) -> None:
    read = shell_script.read("export A=1 B=2\nC=3\nA=4\nunset B\n( export D=5 )\nE=6 python prepare.py\nF=7 torchrun train.py\nexport A=9\n",
                      {}, "a.sh")  # fmt: skip
    assert {name: word.text for name, word in read.environment(read.commands[-1]).items()} == {"A": "4", "F": "7"}


LOONGFORGE = """
TRAINING_ARGS=(
    --training-phase sft # options: pretrain, sft
    --seq-length 4096
    --init-method-std 0.02
    --micro-batch-size 2
    --lr 3e-4
    --train-iters 4000
    #--load $CHECKPOINT_PATH
    --dataloader-save out/dataloader
)
"""


def test_array_of_flags_without_launch_is_recognized(tmp_path: Path) -> None:
    made = import_of(tmp_path, LOONGFORGE)
    cfg = load_config_text(made.content, base=tmp_path)
    assert made.framework == "loongforge" and (cfg.train.lr, cfg.train.seq_length) == (3e-4, 4096)
    # no --load: their run begins with random weights
    assert (cfg.model.init, cfg.model.init_std) == ("random", 0.02)
    assert {row.source_key.key: row.kind for row in made.rows}["dataloader_save"] == "default"
    assert next(row.source_key.place.line for row in made.rows if row.source_key.key == "lr") == 7
    loaded = import_of(tmp_path, LOONGFORGE.replace("#--load", "--load"))
    assert load_config_text(loaded.content, base=tmp_path).model.init == "checkpoint"
    text = (
        LOONGFORGE.replace("(", '"')
        .replace(")", '"')
        .replace("# options: pretrain, sft", "")
        .replace("#--load", "--load")
    )
    assert import_of(tmp_path, text).framework == "loongforge"


MINDSPEED = """
NPUS_PER_NODE=8
TP=1; PP=2; MBS=1; GRAD_ACC_STEP=48
DP=$(($NPUS_PER_NODE/$TP/$PP))
GBS=$(($MBS*$GRAD_ACC_STEP*$DP))
DISTRIBUTED_ARGS="
    --nproc_per_node $NPUS_PER_NODE \\
    --nnodes 1 \\
    --node_rank 0 \\
    --master_addr localhost \\
    --master_port 6000 \\
    --log_dir logs
"
GPT_ARGS="
    --tensor-model-parallel-size ${TP} \\
    --pipeline-model-parallel-size ${PP} \\
    --micro-batch-size ${MBS} \\
    --global-batch-size ${GBS} \\
    --seq-length 1024 \\
    --lr 1.0e-5 \\
    --lr-decay-style cosine \\
    --train-iters 10000 \\
    --fp8-format e4m3 --fp8-recipe mxfp8 \\
    --bf16
"
MM_ARGS="--mm-data data.json --mm-model model.json --mm-tool tools.json"
torchrun $DISTRIBUTED_ARGS pretrain_vlm.py \\
    $GPT_ARGS \\
    $MM_ARGS \\
    2>&1 | tee logs/train.log
"""


def test_flags_in_quoted_strings_are_used(tmp_path: Path) -> None:
    made = import_of(tmp_path, MINDSPEED)
    cfg = load_config_text(made.content, base=tmp_path)
    assert made.framework == "mindspeed-mm"
    assert (cfg.train.lr, cfg.train.schedule, cfg.train.steps, cfg.train.seq_length) == (1e-5, "cosine", 10000, 1024)
    assert (cfg.train.micro_batch, cfg.train.global_batch, cfg.fp8.recipe) == (1, 192, "mxfp8")
    assert any("--nproc 8" in note for note in made.notes)
    assert next(row.source_key.place.line for row in made.rows if row.source_key.key == "lr") == 20


def test_script_arguments_are_not_values_of_the_preceding_flag(tmp_path: Path) -> None:
    made = import_of(tmp_path, 'swift sft $FIRST --model org/m --dataset org/d --max_length 64 --max_steps 4 "$@"\n')
    assert load_config_text(made.content, base=tmp_path).train.steps == 4
    assert [text for _, text, _ in made.unread] == ["$FIRST", "$@"]


@pytest.mark.parametrize(
    ("written", "words"),
    [
        # the quotes around ${...} do not quote its pattern
        ('A=a/b.json; x "${A##*/}" "p-${A%/*}-s" "${A#a\\/}" "${A##"*/"}"', ["x", "b.json", "p-a-s", "b.json", "a/b.json"]),
        ("A='a*b'; P='a*'; x \"${A#a*}\" \"${A##$P}\" \"${A#\"$P\"}\" \"${A#'a*'}\"", ["x", "*b", "", "b", "b"]),
        # what is quoted in a default stays one word, what is not does not
        ("x ${S:-\"a b\"} ${S:-'c d'} ${S-e\\ f} ${S:-g h} ${S:-i\" j\"}", ["x", "a b", "c d", "e f", "g", "h", "i j"]),
        ('A=1; x ${A:+--s "a b"} ${A:+c d}', ["x", "--s", "a b", "c", "d"]),
        ('A="p q"; B=(1 "2 3"); x ${S:-"$A"} ${S:-$A} ${S:-"${B[@]}"}', ["x", "p q", "p", "q", "1", "2 3"]),
        ('E=; x ${E:-""} ${E:-} ${E:-${F:-"a b"}}', ["x", "", "a b"]),
        ('A=${S:-"a b"}; x $A ${T:="c d"}', ["x", "a", "b", "c", "d"]),
        # all words of a declaration are worked out before the first is assigned
        ("A=0; export A=1 B=$A; x $A $B", ["x", "1", "0"]),
        ('A=0; f() { local A=1 B=$A C=("$A" "$A"); x $A $B "${C[@]}"; }; f', ["x", "1", "0", "0", "0"]),
        ("set -- p; source by_set.sh; x $1", ["x", "z"]),
        ("set -- p; source by_set.sh q; x $1", ["x", "z"]),
        ("set -- p r; source by_shift.sh q; x $1", ["x", "p"]),
        ("shopt -s lastpipe; A=1; true | A=2; x $A", ["x", "2"]),
        ("shopt -s nocasematch; case Q in q) A=1;; *) A=2;; esac; [[ Q == q ]] && B=3; x $A $B", ["x", "1", "3"]),
    ],
)  # fmt: skip
def test_words_match_bash(written: str, words: list[str]) -> None:
    files = {"by_set.sh": "set -- z\n", "by_shift.sh": "shift\n"}
    script = shell_script.read(written + "\n", {}, "a.sh", files.get)
    assert [word.text for word in script.commands[-1].words] == words
    assert not any(word.open for word in script.commands[-1].words)


@pytest.mark.parametrize(
    ("written", "how"),
    [
        ("N=$[3 + 4]; x $N", "open"),
        ("A=(1 2 3); unset 'A[1]'; x \"${A[@]}\"", "open"),
        ('IFS=,; A=(1 2); x "${A[*]}"', "open"),
        ("A=7bx; x ${A%@(b|x)}", "open"),
        ("LINENO=5; x $LINENO", "open"),
        ("A=1; [[ 08 -eq 8 ]] && A=2; x $A", "unsure"),
        ("A=1; trap 'A=2' ERR; x $A", "unsure"),
        ("A=1; f() { local -n R=A; R=2; }; f; x $A", "unsure"),
        ("A=1; local A=2; x $A", "listed"),
        ("if [ -f a ]; then shopt -s nocasematch; fi; x", "listed"),
    ],
)
def test_skipped_code_is_unset_or_listed(written: str, how: str) -> None:
    script = shell_script.read(written + "\n", {}, "a.sh")
    words = script.commands[-1].words
    assert {"open": any(w.open for w in words), "unsure": any(w.unsure for w in words)}.get(how, script.unread)
