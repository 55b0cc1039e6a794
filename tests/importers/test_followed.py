"""What files of other frameworks did, though their keys do not say so plainly: files that they name, defaults of their
code, trainers that switch something off, models that no folder holds."""

from __future__ import annotations

from pathlib import Path

import pytest

from octavo.cli.main import main
from octavo.config import load_config_text
from octavo.importers import TranslateError, Translation, translate


def made_of(folder: Path, content: str, name: str = "a.yaml", *more: Path, **given) -> Translation:
    (folder / name).write_text(content, encoding="utf-8")
    return translate([folder / name, *more], folder / "out.yaml", root=folder, **given)


def cfg_of(made: Translation):
    return load_config_text(made.content, base=made.out.parent)


def row(made: Translation, key: str):
    return next(row for row in made.rows if row.source_key.key == key)


OLD = """
gpt_args: {{context_parallel_size: {context}, fsdp2_config_path: {path}, micro_batch_size: 1, global_batch_size: 16,
  lr: 1.0e-5, lr_decay_style: cosine, train_iters: 100, seq_length: 64, load: ./ckpt/mm/{load}{gpt}}}
data: {{dataset_param: {{preprocess_parameters: {{model_name_or_path: ./ckpt/hf/{model}}},
  basic_parameters: {{dataset: ./rows.jsonl{basic}}}}}}}
model: {{model_id: {kind}, init_from_hf_path: ./ckpt/hf/{model}, text_decoder: {{freeze: false}}}}
{more}
"""
USUAL = {"context": 1, "path": "fsdp2.yaml", "load": "Qwen3-VL-8B", "gpt": "", "basic": "", "kind": "qwen3_vl",
         "model": "Qwen3-VL-8B", "more": ""}  # fmt: skip


def old(**more: object) -> str:
    return OLD.format(**{**USUAL, **more})


FSDP2 = """
sharding_size: auto
param_dtype: "bf16"
reduce_dtype: "{reduce}"
expert_parallel_size: 16
offload_to_cpu: True
recompute_modules: [{towers}]
moe_modules: ["model.language_model.layers.{{*}}.mlp.experts"]
"""


def test_fsdp2_file_is_found_from_the_folder_or_the_yaml(tmp_path: Path) -> None:
    (tmp_path / "inner").mkdir()
    text = FSDP2.format(reduce="fp32", towers='"model.language_model.layers.{*}"')
    for folder in (tmp_path, tmp_path / "inner"):
        (folder / "fsdp2.yaml").write_text(text)
        (tmp_path / "inner" / "a.yaml").write_text(old(model="Qwen2.5-VL-7B", kind="qwen2_5_vl"))
        made = translate([tmp_path / "inner" / "a.yaml"], tmp_path / "o.yaml", root=tmp_path)
        cfg = cfg_of(made)
        assert (cfg.parallel.expert, cfg.optimizer.offload, cfg.train.precision) == (16, True, "bf16")
        assert (cfg.train.recompute.foundation, cfg.train.recompute.image_encoder) == ("full", "none")
        assert row(made, "fsdp2_config.param_dtype").source_key.place.source == "fsdp2.yaml"
        (folder / "fsdp2.yaml").unlink()
    gone = translate([tmp_path / "inner" / "a.yaml"], tmp_path / "o.yaml", root=tmp_path)
    assert "gpt_args.fsdp2_config_path" in gone.lost_keys
    (tmp_path / "fsdp2.yaml").write_text(FSDP2.format(reduce="bf16", towers=""))
    assert "fsdp2_config.reduce_dtype" in made_of(tmp_path, old()).lost_keys


def test_qwen3_vl_of_the_older_trainer_is_always_recomputed(tmp_path: Path) -> None:
    assert "recompute: full " in made_of(tmp_path, old()).content
    granular = "text_decoder: {freeze: false, recompute_granularity: selective}"
    made = made_of(tmp_path, old(kind="x").replace("text_decoder: {freeze: false}", granular))  # by its name
    assert "recompute: full " in made.content and row(made, "model.text_decoder.recompute_granularity").kind == "dead"
    other = made_of(tmp_path, old(kind="qwen2_5_vl", model="Qwen2.5-VL-7B"))
    assert "recompute: none " in other.content


@pytest.mark.parametrize(
    ("template", "thinking", "line", "kind"),
    [
        ("qwen3_vl_nothink", "false", "", "dead"), ("qwen3_vl_nothink", "true", "", "dead"),
        ("qwen2vl", "true", "", "dead"), ("qwen3_vl", "false", "mask_reasoning: true", "translated"),
        ("qwen3_vl", "true", "mask_empty_think: false", "translated"),
        ("qwen3_vl", None, "mask_empty_think: false", ""),
        ("glm4.1v", "null", "", ""),
    ],
)  # fmt: skip
def test_enable_thinking_becomes_a_reasoning_setting(
    template: str, thinking: str | None, line: str, kind: str, tmp_path: Path
) -> None:
    more = f", template: {template}" + (f", enable_thinking: {thinking}" if thinking else "")
    made = made_of(tmp_path, old(basic=more))
    assert "template_args" not in made.content and (line or "mask_") in made.content + ("" if line else "mask_")
    assert line or "mask_" not in made.content
    if kind:
        assert row(made, "data.dataset_param.basic_parameters.enable_thinking").kind == kind
    cfg_of(made)


def test_hybrid_algorithm_becomes_context_parallelism_with_ulysses(tmp_path: Path) -> None:
    for algo, degree, expected in (
        ("hybrid_cp_algo", 2, 2), ("hybrid_cp_algo", None, "auto"), ("ulysses_cp_algo", None, 4),
        ("megatron_cp_algo", None, 1), ("hybrid_adaptive_cp_algo", 2, 2),
    ):  # fmt: skip
        more = f", context_parallel_algo: {algo}" + (f", ulysses_degree_in_cp: {degree}" if degree else "")
        made = made_of(tmp_path, old(context=4, gpt=more))
        assert (cfg_of(made).parallel.context, cfg_of(made).parallel.ulysses) == (4, expected), algo
        assert not [key for key in made.lost_keys if "parallel" in key or "ulysses" in key]


def test_adapter_base_becomes_the_model(tmp_path: Path) -> None:
    lora = "lora_args: {lora_r: 4, lora_alpha: 8, lora_target_modules: q_proj}"
    made = made_of(
        tmp_path, old(load="lora", gpt=", load_base_model: ./ckpt/mm/Qwen3-VL-8B, no_load_optim: true", more=lora)
    )
    cfg = cfg_of(made)
    assert cfg.model.path.endswith("ckpt/hf/Qwen3-VL-8B") and cfg.run.start_from == "./ckpt/mm/lora"
    assert row(made, "gpt_args.load_base_model").kind == row(made, "gpt_args.no_load_optim").kind == "default"
    copy = made_of(tmp_path, old(load="Qwen3-VL-8B-dcp/release"))
    assert row(copy, "gpt_args.load").kind == "default" and copy.lost_keys == ("gpt_args.fsdp2_config_path",)
    assert "gpt_args.load" in made_of(tmp_path, old(load="another")).lost_keys


def test_flags_with_two_json_files_and_gc_are_translated(tmp_path: Path) -> None:
    model = '"preprocess_parameters": {"model_name_or_path": "./Qwen2.5-VL-7B"}'
    rows = f'{{"dataset_param": {{"basic_parameters": {{"dataset": "./rows.json"}}, {model}}}}}'
    (tmp_path / "data.json").write_text(rows)
    tree = '{"model_id": "qwen2_5vl", "image_encoder": {"vision_encoder": {"freeze": true}}}'
    (tmp_path / "model.json").write_text(tree)
    run = "export ENABLE_GC_THRESHOLD=1\ntorchrun --nproc_per_node 8 pretrain_vlm.py --mm-data data.json --mm-model {} "
    run += "--lr 1.0e-5 --lr-decay-style cosine --train-iters 100 --micro-batch-size 1 --global-batch-size 16 "
    run += "--pipeline-model-parallel-size 2 --seq-length 1024 --bf16 --load ckpt/Qwen2.5-VL-7B --no-load-optim\n"
    made = made_of(tmp_path, run.format("model.json"), "a.sh")
    cfg = cfg_of(made)
    assert (cfg.train.lr, cfg.train.schedule, cfg.train.seq_length, cfg.train.steps) == (1e-5, "cosine", 1024, 100)
    assert cfg.train.gc == (700, 10, 1000) and "image_encoder" in cfg.model.freeze and made.lost_keys == ()
    assert "mm_model" in made_of(tmp_path, run.format("gone.json"), "a.sh").lost_keys
    off = made_of(tmp_path, run.format("model.json").replace("THRESHOLD=1", "THRESHOLD=0"), "a.sh")
    assert cfg_of(off).train.gc is None


LISTS = {
    "mindspeed": (old(basic=", streaming: true"), "data.dataset_param.basic_parameters.streaming"),
    "llama": ("model_name_or_path: ./m\nstage: sft\nfinetuning_type: full\ndataset: rows.jsonl\ndataset_dir: .\n"
              "cutoff_len: 64\nmax_steps: 2\nstreaming: true\nbuffer_size: 16\n", "streaming"),
    "axolotl": ("base_model: ./m\nsequence_len: 8\nmax_steps: 2\nstreaming: true\ndatasets: [{path: rows.jsonl}]\n",
                "streaming"),
}  # fmt: skip


@pytest.mark.parametrize("name", LISTS)
def test_json_lines_are_streamed_but_json_lists_are_not(name: str, tmp_path: Path) -> None:
    content, key = LISTS[name]
    for rows, text, streamed in (
        ("rows.jsonl", '{"a": 1}\n', True), ("rows.jsonl", '\ufeff [{"a": 1}]', False), ("rows.json", "[]", False),
        ("rows.json", '{"a": 1}\n{"a": 2}\n', True), ("rows.json", None, False),
    ):  # fmt: skip
        (tmp_path / rows).unlink(missing_ok=True)
        if text is not None:
            (tmp_path / rows).write_text(text)
        made = made_of(tmp_path, content.replace("rows.jsonl", rows))
        assert cfg_of(made).data.train[0].stream is streamed, (rows, text)
        assert row(made, key).kind == ("translated" if streamed else "none") and key not in made.lost_keys


LOONG = """
defaults:
  - ../../models/image_encoder@model.image_encoder: {tower}
  - ../../models/image_projector@model.image_projector: qwen_mlp_adapter
  - ../../models/{folder}@model.foundation: {language}
  - _self_
model: {{model_type: {kind}, foundation: {{freeze: false}}}}
"""
SCRIPT = "torchrun train.py --config-file {config} --training-phase pretrain --hf-tokenizer-path ./Qwen2.5-VL-3B "
SCRIPT += (
    "--data-path rows.jsonl --seq-length 64 --lr 1e-4 --train-iters 10 --micro-batch-size 1 --global-batch-size 8 "
)


def test_composed_model_is_rejected_by_name(tmp_path: Path, capsys) -> None:
    made_of(tmp_path, LOONG.format(tower="qwen2_5_vit", folder="qwen2.5", language="qwen2_5_3b", kind="qwen2_5_vl"))
    script = tmp_path / "a.sh"
    for tower, folder, language in (
        ("intern_vit_6b", "llama3", "llama3_8b"),
        ("moon_vit_3d", "glm5.2", "glm5_2"),
        ("qwen3_vit", "glm5.2", "glm5_2"),
    ):
        (tmp_path / "custom").mkdir(exist_ok=True)
        (tmp_path / "custom" / "own.yaml").write_text(
            LOONG.format(tower=tower, folder=folder, language=language, kind="own_vlm")
        )
        said = f"own_vlm is composed of {tower} and {language}, which cannot be translated"
        for words in (["custom/own.yaml"], ["custom/own.yaml", "a.sh"], ["a.sh"]):  # the script names it
            script.write_text(SCRIPT.format(config="custom/own.yaml") + "\n")
            with pytest.raises(TranslateError, match=said):
                translate([tmp_path / word for word in words], tmp_path / "o.yaml", root=tmp_path)
    script.write_text(SCRIPT.format(config="/elsewhere/configs/models/custom/x.yaml") + "\n")
    assert main(["import", str(script), "-o", str(tmp_path / "o.yaml"), "--root", str(tmp_path)]) == 2
    assert "x.yaml is composed of custom components" in capsys.readouterr().err
    script.write_text(SCRIPT.format(config="/elsewhere/qwen2_5_vl_3b.yaml") + "\n")
    assert "config_file" in translate([script], tmp_path / "o.yaml", root=tmp_path).lost_keys


def test_composed_model_becomes_parts(tmp_path: Path) -> None:
    """LoongForge's example of Qwen2.5-VL's tower and a Llama 3; `#--load` there means a random start."""
    (tmp_path / "own.yaml").write_text(
        LOONG.format(tower="qwen2_5_vit", folder="llama3", language="llama3_8b", kind="own_vlm")
    )
    (tmp_path / "a.sh").write_text(SCRIPT.format(config="own.yaml") + "--init-method-std 0.02\n")
    made = translate([tmp_path / "own.yaml", tmp_path / "a.sh"], tmp_path / "o.yaml", root=tmp_path)
    model = cfg_of(made).model
    assert model.image_encoder is not None and model.foundation is not None
    assert model.image_encoder.path.endswith("Qwen2.5-VL-3B") and model.foundation.path == "/path/to/decoder"
    assert (model.init, model.init_std) == ("random", 0.02)
    assert "model.path" not in made.content and "FILL IN: llama3_8b has no folder" in made.content
    (tmp_path / "a.sh").write_text(
        SCRIPT.format(config="own.yaml").replace("Qwen2.5-VL-3B", "Llama-3-8B") + "--load x\n"
    )
    made = translate([tmp_path / "own.yaml", tmp_path / "a.sh"], tmp_path / "o.yaml", root=tmp_path)
    assert cfg_of(made).model.image_encoder.path == "/path/to/image_encoder"
    assert cfg_of(made).model.init == "checkpoint"


def test_run_without_checkpoint_starts_from_random_weights(tmp_path: Path) -> None:
    plain = SCRIPT.replace("--config-file {config} ", "")
    made = made_of(tmp_path, plain + "--init-method-std 0.01 --dataloader-save there\n", "a.sh")
    assert (cfg_of(made).model.init, cfg_of(made).model.init_std) == ("random", 0.01)
    assert row(made, "dataloader_save").kind == "default" and made.lost_keys == ()
    assert cfg_of(made_of(tmp_path, plain + "\n", "a.sh")).model.init_std == 0.02
    loaded = made_of(tmp_path, plain + "--init-method-std 0.01 --load $CHECKPOINT\n", "a.sh")
    assert cfg_of(loaded).model.init == "checkpoint" and row(loaded, "init_method_std").kind == "dead"
    tuned = made_of(tmp_path, plain.replace("phase pretrain", "phase sft") + "\n", "a.sh")
    assert cfg_of(tuned).model.init == "checkpoint" and any("no flag loads weights" in note for note in tuned.notes)


PAIRS = {
    "dpo of LLaMA-Factory": ("model_name_or_path: ./m\nstage: dpo\nfinetuning_type: lora\ncutoff_len: 8\ndataset: a\n"
                             "max_steps: 2\nlora_dropout: 0.1\n", "a.yaml"),
    "kto of LLaMA-Factory": ("model_name_or_path: ./m\nstage: kto\nfinetuning_type: lora\ncutoff_len: 8\ndataset: a\n"
                             "max_steps: 2\nlora_dropout: 0.1\n", "a.yaml"),
    "orpo of axolotl": ("base_model: ./m\nrl: orpo\nadapter: lora\nsequence_len: 8\nmax_steps: 2\nlora_dropout: 0.1\n"
                        "datasets: [{path: org/d}]\n", "a.yaml"),
    "dpo of ms-swift": ("swift rlhf --rlhf_type dpo --model ./m --dataset org/d --max_length 8 --max_steps 2 "
                        "--lora_dropout 0.1 --torch_dtype bfloat16\n", "a.sh"),
}  # fmt: skip


@pytest.mark.parametrize("name", PAIRS)
def test_dropout_disabled_by_the_trainer_is_not_written(name: str, tmp_path: Path) -> None:
    content, file = PAIRS[name]
    made = made_of(tmp_path, content, file)
    assert "dropout" not in made.content.replace("lora_dropout", "") and cfg_of(made).lora.dropout == 0
    assert (
        row(made, "lora_dropout").kind == "dead" and "framework's trainer disables it" in row(made, "lora_dropout").why
    )
    off = made_of(tmp_path, content.replace("0.1", "0.0"), file)
    assert row(off, "lora_dropout").kind == "default"
    plain = content.replace("stage: dpo", "stage: sft").replace("stage: kto", "stage: sft").replace("rl: orpo\n", "")
    plain = plain.replace("rlhf --rlhf_type dpo", "sft")
    assert cfg_of(made_of(tmp_path, plain, file)).lora.dropout == 0.1


def test_dropout_kept_by_the_trainer_is_lost(tmp_path: Path) -> None:
    run = "megatron rlhf --rlhf_type dpo --model ./m --dataset org/d --max_length 8 --train_iters 2 --lora_dropout 0.1 "
    made = made_of(tmp_path, run + "--train_type lora --micro_batch_size 1 --global_batch_size 2\n", "a.sh")
    assert made.lost_keys == ("lora_dropout",) and cfg_of(made).lora.dropout == 0


def test_mds_shards_need_conversion(tmp_path: Path) -> None:
    content = "max_seq_len: 8\nmodel: {name: hf_causal_lm, pretrained_model_name_or_path: ./m}\nmax_duration: 8ba\n"
    content += "train_loader: {name: text, dataset: {local: ./shards, split: train, remote: s3://b/x}}\n"
    made = made_of(tmp_path, content + "global_train_batch_size: 8\nprecision: amp_bf16\n")
    assert cfg_of(made).data.train[0].path.endswith("shards-train.jsonl")
    (note,) = [note for note in made.notes if "MDS shards" in note]
    assert "StreamingDataset(local='./shards/train'" in note and "> ./shards-train.jsonl" in note
    assert "train_loader.dataset.remote" in made.lost_keys
