"""References within their YAML, text that is none, and files that a configuration names: bounded, and in one folder."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from octavo.cli.main import main
from octavo.config import ConfigError, load_config_text
from octavo.importers import TranslateError, Translation, translate

LLAMA = "model_name_or_path: ./m\nstage: sft\nfinetuning_type: full\ndataset: a\ntemplate: qwen3\ncutoff_len: 64\n"
LLAMA += "learning_rate: 1.0e-5\nmax_steps: 10\noutput_dir: saves/x\n"
DOUBLES = "".join(f'z{n}: "${{z{n + 1}}}${{z{n + 1}}}"\n' for n in range(50)) + "z50: x\n"


def made_of(folder: Path, content: str, name: str = "a.yaml", **more) -> Translation:
    (folder / name).write_text(content, encoding="utf-8")
    return translate([folder / name], folder / "out.yaml", root=folder, **more)


def row(made: Translation, key: str):
    return next(row for row in made.rows if row.source_key.key == key)


@pytest.mark.parametrize(
    ("lines", "said"),
    {
        "itself": ('z: "${z}"\n', "z -> z"),
        "two": ('z0: "${z1}${z1}"\nz1: "${z0}${z0}"\n', "z0 -> z1 -> z0"),
        "three, in sections": ('a: {b: "${c.d}"}\nc: {d: "${e}"}\ne: "${a.b} x"\n', "a.b -> c.d -> e -> a.b"),
        "by its place": ('a: {b: "${.c}", c: "${.b}"}\n', "a.b -> a.c -> a.b"),
        "in a list": ('a: [x, "${a}"]\n', "a -> a"),
        "a name made of references": ('x: "${z${y}}"\ny: "1"\nz1: "${x}"\n', "x -> z1 -> x"),
        "through a hundred": ("".join(f'z{n}: "${{z{n + 1}}}"\n' for n in range(100)) + "z100: 1\n", "more than 64"),
        "grows by doubling": (DOUBLES, "becomes a text of over"),
        "grows in a flat file": ("a: " + "b" * 60_000 + "\n" + "".join(f'x{n}: "${{a}}."\n' for n in range(99)), "x69"),
    }.values(),
)  # fmt: skip
def test_cyclic_and_exponential_references_are_rejected(lines: str, said: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=said.replace(".", r"\.")) as error:
        made_of(tmp_path, LLAMA + lines)
    assert len(str(error.value)) < 2000


def test_acyclic_references_are_resolved(tmp_path: Path) -> None:
    lines = 'a: {lr: 1e-4, sets: [x, y], name: out}\nb: "${a.name}/${c}"\nc: "${a.name}"\nd: "${oc.env:USER,7}"\n'
    lines += (
        'k: name\ne: "${a.${k}}"\nf: {g: "${.h}", h: 3}\nbetas: "${a.sets}"\nopen: "${resolver:x}"\nmany: ["${k}"]\n'
    )
    made = made_of(tmp_path, lines + LLAMA.replace("1.0e-5", '"${a.lr}"').replace("saves/x", '"${b}"'))
    cfg = load_config_text(made.content, base=tmp_path)
    assert (cfg.train.lr, Path(cfg.run.dir)) == (1e-4, Path("out/out"))
    values = {row.source_key.key: row.source_key.value for row in made.rows}
    assert (values["d"], values["e"], values["f.g"], values["betas"]) == (7, "out", 3, ["x", "y"])
    assert (values["open"], values["many"]) == ("${resolver:x}", ["name"])


@pytest.mark.parametrize("half", [r"\ud800", r"x\udc00y"])
@pytest.mark.parametrize("where", ['{}: "{}"', '"{}{}": 1', 'dataset: [a, "{1}"]'])
def test_lone_surrogate_or_nul_is_an_error_with_its_key(where: str, half: str, tmp_path: Path) -> None:
    for text, said in ((half, "half a character"), (r"a\0b", "a NUL character")):
        line = where.format("default_system" if ": " in where[:4] else "", text)
        with pytest.raises(ConfigError, match=f"a.yaml:\\d+: .*no valid Unicode: it holds {said}") as error:
            made_of(tmp_path, LLAMA.replace("dataset: a\n", "") + line + "\n")
        str(error.value).encode()


def test_surrogate_pairs_are_decoded(tmp_path: Path, capsys) -> None:
    values = {"base_model": "./m", "sequence_len": 8, "max_steps": 2, "default_system_message": "é \U0001f600"}
    made = made_of(tmp_path, json.dumps(values), "a.json")
    assert load_config_text(made.content, base=tmp_path).data.system == "é \U0001f600"
    (tmp_path / "b.yaml").write_bytes(b"base_model: \xff\nsequence_len: 8\n")
    assert main(["import", str(tmp_path / "b.yaml"), "-o", str(tmp_path / "o.yaml")]) == 2
    for wrong in (["-o", f"{tmp_path}/\udcff.yaml"], ["-o", f"{tmp_path}/o.yaml", "--set", "A=\udcff"]):
        assert main(["import", str(tmp_path / "a.json"), *wrong]) == 2
    assert capsys.readouterr().err.count("is not UTF-8") == 3


#: a sum of two of their keys, each of which is given a word, a list, nothing, a mapping and a number beyond all
SUMS = {
    "axolotl": ("base_model: ./m\nsequence_len: 8\ncosine_min_lr_ratio: 0.1\nlearning_rate: 1e-4\nmicro_batch_size: 2\n"
                "gradient_accumulation_steps: 2\nwarmup_ratio: 0.1\nnum_epochs: 2\nsaves_per_epoch: 2\n", 6),
    "llama-factory": ("model_name_or_path: ./m\nstage: sft\ncutoff_len: 8\nnum_train_epochs: 1\nwarmup_ratio: 0.1\n"
                      "per_device_train_batch_size: 1\ngradient_accumulation_steps: 2\nlora_rank: 4\n"
                      "lr_scheduler_type: cosine\nlr_scheduler_kwargs: {min_lr_rate: 0.1}\n", 7),
    "llm-foundry": ("max_seq_len: 8\nmodel: {name: hf_causal_lm, pretrained_model_name_or_path: ./m}\n"
                    "global_train_batch_size: 8\ndevice_train_microbatch_size: 2\nmax_duration: 10ba\n"
                    "optimizer: {name: decoupled_adamw, lr: 1e-3, weight_decay: 1e-5}\n"
                    "scheduler: {name: cosine_with_warmup, alpha_f: 0.1, t_warmup: 0.1dur}\n", 6),
    "mindspeed-mm": ("training: {lr: 1e-5, lr_min: 1e-6, lr_warmup_ratio: 0.1, train_iters: 10, micro_batch_size: 1}\n"
                     "model: {model_name_or_path: ./m}\nparallel: {ring_attention_size: 2}\n", 5),
}  # fmt: skip


@pytest.mark.parametrize("framework", SUMS)
def test_any_type_in_a_sum_of_two_keys_is_handled(framework: str, tmp_path: Path) -> None:
    content, least = SUMS[framework]
    named = set()
    for value in ("fast", "[1, 2]", "null", "{a: 1}", "9" * 500, ".nan", "-1", "1e400", "true"):
        for key in [word.rstrip(":") for word in content.replace("{", " ").split() if word.endswith(":")]:
            before, _, rest = content.partition(f"{key}: ")
            end = next((n for n, letter in enumerate(rest) if letter in ",}\n"), len(rest))
            if rest.startswith("{"):
                continue
            try:
                made_of(tmp_path, f"{before}{key}: {value}{rest[end:]}", framework=framework)
            except (ConfigError, TranslateError) as error:
                named |= {key} if key in str(error) else set()
    assert len(named) >= least


def test_files_outside_the_folder_are_not_read(tmp_path: Path) -> None:
    """Neither by its path, nor by a link, nor by dots."""
    inside, outside = tmp_path / "in", tmp_path / "out"
    for folder in (inside / "data", inside / "m", outside / "m"):
        folder.mkdir(parents=True)
    (outside / "m" / "config.json").write_text('{"vision_config": {}, "model_type": "qwen2_5_vl"}')
    (outside / "rows.jsonl").write_text("{}\n" * 640)
    (inside / "data" / "dataset_info.json").symlink_to(outside / "rows.jsonl")
    (inside / "rows.jsonl").symlink_to(outside / "rows.jsonl")
    (inside / "m" / "config.json").symlink_to(outside / "m" / "config.json")
    axolotl = "base_model: {}\nsequence_len: 8\nnum_epochs: 1\nwarmup_ratio: 0.1\ndatasets: [{{path: {}}}]\n"
    for model in (str(outside / "m"), "../out/m", "m"):
        for rows in (str(outside / "rows.jsonl"), "../out/rows.jsonl", "rows.jsonl"):
            made = made_of(inside, axolotl.format(model, rows))
            assert row(made, "warmup_ratio").kind == "none", rows
            assert sum("is outside" in note for note in made.notes) == 2
            assert any("is a text model" in note for note in made.notes), model
    llama = made_of(inside, LLAMA + "deepspeed: ../out/m/config.json\n")
    assert any("data/dataset_info.json is outside" in note for note in llama.notes)
    whole = translate([inside / "a.yaml"], tmp_path / "o.yaml", root=tmp_path)
    assert not any("outside" in note for note in whole.notes)


@pytest.mark.parametrize(
    ("register", "said"),
    [({"a": {"file_name": 7}}, "a: file_name is 7"), ({"a": {"file_name": "x", "columns": []}}, "columns is"),
     ({"a": {"file_name": "x", "tags": {"role_tag": ["b"]}}}, "role_tag is"),
     ([], "contains a list; expected an object")],
)  # fmt: skip
def test_invalid_dataset_registry_is_an_error(register: object, said: str, tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "dataset_info.json").write_text(json.dumps(register))
    with pytest.raises(TranslateError, match=said):
        made_of(tmp_path, LLAMA)


@pytest.mark.parametrize("config", [[], {"text_config": []}, {"vision_config": 7, "num_attention_heads": "x"}])
def test_invalid_config_json_is_an_error(config: object, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    run = "torchrun train.py --model_name_or_path . --data_mixture a --tune_language_model true --max_steps 2 "
    try:
        made_of(tmp_path, run + "--vision_tower a --quantize_model fp8Linear_qwen2\n", "a.sh")
    except TranslateError as error:
        assert "config.json" in str(error) and config == []


def test_suggestions_are_bounded_for_thousands_of_unknown_keys(tmp_path: Path) -> None:
    flags = " ".join(f"--lerning_rat{n} {n}" for n in range(4_900))
    made = made_of(tmp_path, f"--model a/b --train_type lora {flags}", "a.txt")
    assert made.counts["unknown"] == 4_900
    assert sum("did you mean" in row.why for row in made.rows) == 40
    more = " ".join(f"d{n}" for n in range(10_001))
    with pytest.raises(ConfigError, match="at most 10,000 words"):
        made_of(tmp_path, f"--model a/b --train_type lora --dataset {more}", "a.txt")
    sets = " ".join(f"--datasets.{n}9999999999.path a{n}" for n in range(1001))
    with pytest.raises(TranslateError, match="more than 1,000 data sets"):
        made_of(tmp_path, f"--base_model a --sequence_len 8 {sets}", "a.txt")
