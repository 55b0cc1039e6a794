"""Configurations of others: what becomes of every key of files that have the published files' keys, and of bad ones."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from octavo.cli.main import main
from octavo.config import ConfigError, load_config_text
from octavo.importers import FRAMEWORKS, TranslateError, Translation, markdown, translate
from octavo.models.custom.mpt.configuration import MPTConfig

HERE = Path(__file__).parent
THEIRS = HERE / "theirs"
CLASSES: dict[str, dict[str, str]] = json.loads((HERE / "classes.json").read_text(encoding="utf-8"))
#: what a file of the published keys becomes, in keys of ours
VALUES = {
    "axolotl_dpo.yaml": "model.load_in_fp8.foundation=rowwise train.phase=preference preference.beta=0.1 "
    "lora.alpha=24.0 "
    "optimizer.states=fp8 optimizer.betas=(0.9,0.999) train.recompute.foundation=full train.global_batch=8",
    "axolotl_fp8.yaml": "fp8.recipe=tensorwise fp8.param=True data.packing=True model.attention.foundation=flex "
    "train.global_batch=16 train.min_lr=1e-06 run.save_states=False train.recompute.image_encoder=full",
    "axolotl_qlora.yaml": "data.packing=True train.epochs=1.0 train.steps=None train.micro_batch=1 "
    "train.global_batch=4 train.seq_length=1024",
    "coat.sh": "optimizer.states=coat fp8.foundation.recipe=tensorwise fp8.foundation.format=hybrid "
    "fp8.foundation.activations=fp8 fp8.recipe=off train.global_batch=48 train.loss=microbatch",
    "llama_factory_dpo.yaml": "preference.beta=0.2 preference.sft=0.1 lora.dora=True lora.alpha=32.0 train.steps=400 "
    "train.warmup=40 model.load_in_fp8.foundation=rowwise lora.targets=('**.q_proj','**.v_proj') fp8.recipe=rowwise",
    "llama_factory_fp8.yaml": "fp8.recipe=delayed fp8.format=hybrid train.loss=token train.schedule=cosine run.seed=42",
    "llama_factory_vl.yaml": "lora.targets=('foundation',) lora.rank=4 lora.alpha=8.0 data.max_pixels=131072 "
    "train.loss=microbatch fp8.recipe=off data.on_long=cut run.tensorboard=False data.train.1.max_samples=500",
    "llm_foundry_hub.yaml": "train.phase=sft train.epochs=3.0 data.train.0.split=train data.eval.0.split=test "
    "train.recompute.foundation=full train.global_batch=24 train.micro_batch=4 train.schedule=linear",
    "llm_foundry_mpt.yaml": "model.init=random train.phase=pretrain train.steps=3000 train.min_lr=0.0001 "
    "optimizer.weight_decay=0.02 train.clip=0.5 run.eval_every=500",
    "loongforge.yaml": "fp8.foundation.recipe=blockwise_1d fp8.foundation.param=True "
    "fp8.image_encoder.recipe=tensorwise fp8.recipe=off model.freeze=('image_encoder',) parallel.expert=4 "
    "train.warmup=40 train.clip=0.7 data.on_long=drop",
    "mindspeed.yaml": "parallel.context=4 parallel.ulysses=2 train.loss=token fp8.foundation.recipe=mxfp8 "
    "fp8.recipe=off "
    "fp8.foundation.param=True run.save_states=False model.freeze=('image_encoder','image_projector') train.clip=0.0",
    "mindspeed_old.yaml": "parallel.context=2 parallel.ulysses=2 train.loss=sample lora.exclude=('image_encoder',) "
    "train.synchronize_per_layer=True train.warmup=50 optimizer.betas=(0.9,0.98)",
    "swift_dpo.sh": "preference.sft=0.2 lora.dropout=0.0 lora.targets=('foundation',) data.train.0.max_samples=500 "
    "train.global_batch=16 optimizer.betas=(0.9,0.95) optimizer.weight_decay=0.1 data.on_bad_sample=skip",
    "swift_megatron.sh": "fp8.recipe=delayed fp8.format=hybrid fp8.param=True train.loss=token train.global_batch=32 "
    "train.warmup=20 optimizer.weight_decay=0.1 data.packing=True",
    "vila.sh": "parallel.context=4 parallel.ulysses=2 fp8.foundation.recipe=tensorwise fp8.rules.0.match=**.k_proj "
    "fp8.rules.0.recipe=off optimizer.states=fp32 model.freeze=('image_encoder',) train.loss=microbatch "
    "train.warmup=10",
}


#: sections that hold whatever their framework hands on; nobody can say that a key of theirs is none
OPEN = ("flex_attn_compile_kwargs", "gradient_checkpointing_kwargs", "special_tokens", "variables")


def sources(name: str) -> list[Path]:
    return [THEIRS / name, *([THEIRS / "loongforge.sh"] if name == "loongforge.yaml" else [])]


def become(made: Translation) -> dict[str, str]:
    """Key of theirs -> what became of it."""
    return {row.source_key.key: row.kind for row in made.rows}


def why(made: Translation, key: str) -> str:
    return next(row.why for row in made.rows if row.source_key.key == key)


def text(tmp_path: Path, name: str, content: str, **more) -> Translation:
    (tmp_path / name).write_text(content, encoding="utf-8")
    return translate([tmp_path / name], tmp_path / "out.yaml", root=tmp_path, **more)


@pytest.mark.parametrize("name", CLASSES)
def test_every_published_key_has_an_outcome(name: str, tmp_path: Path) -> None:
    made = translate(sources(name), tmp_path / "out.yaml", root=tmp_path)
    expected = {key: kind for kind, keys in CLASSES[name].items() for key in keys.split()}
    assert become(made) == {**expected, **{k: v for k, v in become(made).items() if " " in k}}
    page = markdown(made)
    assert all(row.why or row.targets for row in made.rows)
    assert all(f"`{row.source_key.key}`" in page and str(row.source_key.place) in page for row in made.rows)
    assert not made.problems
    cfg = load_config_text(made.content, base=tmp_path)
    for word in VALUES[name].split():
        target, _, value = word.partition("=")
        at: object = cfg
        for part in target.split("."):
            at = at[int(part)] if part.isdecimal() else getattr(at, part)
        assert str(at).replace(" ", "") == value, f"{target}: {at}"


@pytest.mark.parametrize("name", sorted(CLASSES))
def test_unknown_key_is_reported(name: str, tmp_path: Path) -> None:
    """Wherever it stands in their file, and however deep."""
    content = (THEIRS / name).read_text(encoding="utf-8")
    if name.endswith(".sh"):
        lines = content.split("\n")
        at = [n for n, line in enumerate(lines) if line.lstrip().startswith("--")]
        planted = [(at[0], "--never_heard_of 7 \\"), (at[-1], "--never_heard_of 7 \\")]
        files = ["\n".join([*lines[:n], line, *lines[n:]]) for n, line in planted]
        keys = ["never_heard_of"] * 2
    else:
        nested = re.search(r"^(\w+):\n  (?=\w)", content, re.MULTILINE)
        files, keys = [f"{content}never_heard_of: 7\n"], ["never_heard_of"]
        if nested:
            files.append(f"{content[: nested.end()]}never_heard_of: 7\n  {content[nested.end() :]}")
            keys.append(f"{nested[1]}.never_heard_of")
    for file, key in zip(files, keys, strict=True):
        (tmp_path / name).write_text(file, encoding="utf-8")
        made = translate([tmp_path / name, *sources(name)[1:]], tmp_path / "out.yaml", root=tmp_path)
        found = next(row for row in made.rows if row.source_key.key == key)
        assert (found.kind == "unknown" or key.partition(".")[0] in OPEN) and found.why
        assert len(made.rows) == len({row.source_key.key for row in made.rows})


def test_misspelled_key_gets_a_suggestion(tmp_path: Path) -> None:
    content = (THEIRS / "llama_factory_vl.yaml").read_text().replace("learning_rate:", "learnig_rate:")
    made = text(tmp_path, "a.yaml", content)
    assert become(made)["learnig_rate"] == "unknown" and "learning_rate?" in why(made, "learnig_rate")


MPT = """
max_seq_len: 256
model: {{name: mpt_causal_lm, d_model: 64, n_heads: 4, n_layers: 2, vocab_size: 512{model}}}
train_loader: {{name: text, dataset: {{local: rows.jsonl}}}}
scheduler: {{name: constant_with_warmup, t_warmup: 1ba}}
optimizer: {{name: decoupled_adamw, lr: 1e-3, weight_decay: 0}}
max_duration: 10ba
global_train_batch_size: 4
device_train_microbatch_size: 2
precision: {precision}
"""


def test_amp_fp8_does_nothing_without_layers_of_transformer_engine(tmp_path: Path) -> None:
    alone = text(tmp_path, "a.yaml", MPT.format(model="", precision="amp_fp8"))
    assert become(alone)["precision"] == "dead" and "fc_type: te" in why(alone, "precision")
    assert load_config_text(alone.content, base=tmp_path).fp8.recipe == "off"

    layers = text(tmp_path, "a.yaml", MPT.format(model=", fc_type: te", precision="amp_fp8"))
    cfg = load_config_text(layers.content, base=tmp_path)
    assert (cfg.fp8.recipe, cfg.fp8.format) == ("delayed", "hybrid") and "16" in why(layers, "precision")
    assert become(layers)["model.fc_type"] == "translated" and not cfg.fp8.rules
    assert (
        become(text(tmp_path, "a.yaml", MPT.format(model=", fc_type: te", precision="amp_bf16")))["model.fc_type"]
        == "dead"
    )

    fused = text(tmp_path, "a.yaml", MPT.format(model=", ffn_config: {ffn_type: te_ln_mlp}", precision="amp_fp8"))
    cfg = load_config_text(fused.content, base=tmp_path)
    assert cfg.fp8.recipe == "delayed" and cfg.fp8.rules[0].match == "**.attn.**" and cfg.fp8.fuse == "on"
    assert "norm_2" in why(fused, "model.ffn_config.ffn_type")


def test_mpt_model_keys_become_a_folder_with_explicit_defaults(tmp_path: Path) -> None:
    more = ", no_bias: true, attn_config: {alibi: true, clip_qkv: 6, rope: false, qk_ln: true}"
    more += ", logit_scale: inv_sqrt_d_model"
    made = text(tmp_path, "a.yaml", MPT.format(model=more, precision="amp_bf16"))
    (file, content), *_ = made.extra.items()
    config = json.loads(content)
    assert file == tmp_path / "out_model" / "config.json" and config["model_type"] == "mpt"
    assert (
        config["no_bias"] is True and config["attn_config"]["clip_qkv"] == 6 and config["attn_config"]["qk_ln"] is True
    )
    assert config["learned_pos_emb"] is False  # alibi takes it off there
    assert config["expansion_ratio"] == 4 and config["tie_word_embeddings"] is True
    assert config["logit_scale"] == "inv_sqrt_d_model" and config["ffn_config"]["ffn_type"] == "mptmlp"
    plain = json.loads(next(iter(text(tmp_path, "a.yaml", MPT.format(model="", precision="fp32")).extra.values())))
    assert plain["learned_pos_emb"] is True and plain["no_bias"] is False and plain["attn_config"]["alibi"] is False
    other = text(tmp_path, "a.yaml", MPT.format(model=", attn_config: {rope: true}", precision="fp32"))
    assert become(other)["model.attn_config.rope"] == "none" and "rope" in " ".join(other.notes)


def _config_of(tmp_path: Path, model: str) -> tuple[Translation, MPTConfig]:
    made = text(tmp_path, "a.yaml", MPT.format(model=model, precision="amp_bf16"))
    (content,) = made.extra.values()
    return made, MPTConfig(**json.loads(content))


def test_supported_mpt_settings_are_translated(tmp_path: Path) -> None:
    more = ", resid_pdrop: 0.1, emb_pdrop: 0.2, embedding_fraction: 0.5, logit_scale: 0.25, attn_config: "
    more += "{qk_gn: true, attn_pdrop: 0.3}, ffn_config: {ffn_hidden_size: 96, ffn_act_fn: {name: relu}}"
    made, config = _config_of(tmp_path, more)
    assert (config.resid_pdrop, config.emb_pdrop, config.embedding_fraction, config.factor) == (0.1, 0.2, 0.5, 0.25)
    assert config.attn_config["qk_gn"] is True and config.attn_config["attn_pdrop"] == 0.3
    assert config.hidden == 96 and config.ffn_config["ffn_act_fn"] == {"name": "relu"}
    assert not [key for key, kind in become(made).items() if key.startswith("model.") and kind not in
                ("translated", "default")]  # fmt: skip

    _, config = _config_of(tmp_path, ", ffn_config: {ffn_type: te_ln_mlp}")
    assert config.ffn_config["ffn_act_fn"] == {"name": "gelu", "approximate": "tanh"}  # Transformer Engine's


@pytest.mark.parametrize("field", ["attn_config: {attn_logit_softcapping: 30}", "final_logit_softcapping: 30",
                                   "attn_config: {attn_type: grouped_query_attention, kv_n_heads: 2}",
                                   "block_overrides: {order: [{name: default}]}"])  # fmt: skip
def test_unsupported_mpt_is_rejected(field: str, tmp_path: Path) -> None:
    made = text(tmp_path, "a.yaml", MPT.format(model=f", {field}", precision="amp_bf16"))
    assert "rejects" in " ".join(made.notes) and "none" in become(made).values()
    (content,) = made.extra.values()
    with pytest.raises(ValueError, match=field.partition(":")[0]):
        MPTConfig(**json.loads(content))


@pytest.mark.parametrize(
    ("word", "steps"), [("50ba", 50), ("10240tok", 10), ("40sp", 10)], ids=["batches", "tokens", "samples"]
)
def test_composer_durations_are_translated(word: str, steps: int, tmp_path: Path) -> None:
    made = text(tmp_path, "a.yaml", MPT.format(model="", precision="fp32").replace("10ba", word))
    assert load_config_text(made.content, base=tmp_path).train.steps == steps


AXOLOTL = """
base_model: Qwen/Qwen3-VL-2B-Instruct
datasets: [{{path: rows.jsonl, type: chat_template}}]
sequence_len: 256
micro_batch_size: 4
learning_rate: 1e-5
max_steps: 1000
{more}
"""


def test_axolotl_batch_size_and_defaults_are_translated(tmp_path: Path) -> None:
    """Ranks of tensor parallelism see the same rows; batch_size is of one process; warm-up is 0.03 of the steps."""
    more = "tensor_parallel_size: 2\nbatch_size: 32\nfreeze_mm_modules: true\nattn_implementation: eager"
    made = text(tmp_path, "a.yaml", AXOLOTL.format(more=more), world=8)
    cfg = load_config_text(made.content, base=tmp_path)
    assert cfg.train.global_batch == 32 * 4 and cfg.train.warmup == 30
    assert cfg.model.freeze == ("image_encoder", "image_projector") and cfg.model.attention.foundation == "eager"
    assert "unknown" not in become(made).values()
    more = "adapter: lora\nlora_target_linear: true\nlora_r: 8\nlora_alpha: 8\nfreeze_mm_modules: "
    for frozen, targets in (("true", {"foundation"}), ("false", {"foundation", "image_encoder", "image_projector"})):
        made = text(tmp_path, "a.yaml", AXOLOTL.format(more=more + frozen))
        assert set(load_config_text(made.content, base=tmp_path).lora.targets) == targets


def test_preferences_keep_their_weights(tmp_path: Path) -> None:
    """SimPO of TRL's trainer adds cross-entropy of the chosen answers, by 1 unless told; DPO what it says."""
    axolotl = [("rl: simpo", (0.1, 0.5, 1.0)), ("rl: simpo\ncpo_alpha: 0\nrl_beta: 2", (2, 0.5, 0)),
               ("rl: dpo\nrpo_alpha: 0.3\ndpo_label_smoothing: 0.1", (0.1, None, 0.3))]  # fmt: skip
    for more, expected in axolotl:
        cfg = load_config_text(text(tmp_path, "a.yaml", AXOLOTL.format(more=more)).content, base=tmp_path).preference
        assert (cfg.beta, cfg.gamma, cfg.sft) == expected
    assert cfg.label_smoothing == 0.1
    swift = "swift rlhf --rlhf_type simpo --model a/b --dataset rows.jsonl --train_type full --torch_dtype bfloat16"
    for more, expected in (("", (2, 1, 1)), (" --cpo_alpha 0 --simpo_gamma 0 --beta 1", (1, 0, 0))):
        cfg = load_config_text(text(tmp_path, "a.sh", swift + more).content, base=tmp_path).preference
        assert (cfg.beta, cfg.gamma, cfg.sft) == expected


def test_swift_default_accumulation_counts_all_processes(tmp_path: Path) -> None:
    """16 over all processes, also those that share rows: 2 accumulated by 4 ranks that see different ones."""
    line = "swift sft --model a/b --dataset rows.jsonl --max_steps 5 --sequence_parallel_size 2 --torch_dtype bfloat16"
    cfg = load_config_text(text(tmp_path, "a.sh", line, world=8).content, base=tmp_path)
    assert cfg.train.global_batch == 8


def test_ms_swift_4_megatron_names_are_translated(tmp_path: Path) -> None:
    line = (
        "megatron sft --model a/b --dataset rows.jsonl --global_batch_size 16 --num_train_epochs 3 --output_dir there "
    )
    line += "--save_steps 200 --logging_steps 5 --save_total_limit 4 --dataloader_num_workers 1 --mcore_model c "
    line += "--lr_warmup_fraction 0.1 --no_load_optim true"
    made = text(tmp_path, "a.sh", line, rows=800)
    cfg = load_config_text(made.content, base=tmp_path)
    assert (cfg.train.epochs, cfg.train.warmup, cfg.run.save_every, cfg.run.log_every) == (3, 15, 200, 5)
    assert (cfg.run.keep, cfg.data.workers, Path(cfg.run.dir).name) == (4, 1, "there")
    assert "unknown" not in become(made).values() and become(made)["no_load_optim"] == "none"
    pairs = text(tmp_path, "a.sh", line.replace(" sft", " rlhf --rlhf_type dpo --moe_aux_loss_coeff 1e-3"))
    assert become(pairs)["moe_aux_loss_coeff"] == "none" and not pairs.problems


def test_zero_is_not_treated_as_the_default(tmp_path: Path) -> None:
    made = text(tmp_path, "a.yaml", AXOLOTL.format(more="").replace("1e-5", "0"))
    assert " lr: 0 " in made.content
    adapters = text(tmp_path, "b.yaml", AXOLOTL.format(more="adapter: lora\nlora_alpha: 0\n"))
    assert "alpha: 0" in adapters.content
    with pytest.raises(ConfigError, match="micro_batch_size"):
        text(tmp_path, "a.yaml", AXOLOTL.format(more="").replace("size: 4", "size: 0"))


def test_llama_factory_adapters_get_its_target_layers(tmp_path: Path) -> None:
    """`all` leaves the projector out; modules by name are of the tower too where it is not frozen."""
    content = "model_name_or_path: Qwen/Qwen3-VL-2B-Instruct\nstage: sft\nfinetuning_type: lora\ndataset: a\n"
    content += "cutoff_len: 64\nmax_steps: 2\nfreeze_multi_modal_projector: false\n"
    made = text(tmp_path, "a.yaml", content + "lora_target: all\nfreeze_vision_tower: true\n")
    assert load_config_text(made.content, base=tmp_path).lora.targets == ("foundation",)
    assert become(made)["freeze_multi_modal_projector"] == "dead"
    for frozen, excluded in (("true", ("image_encoder",)), ("false", ())):
        made = text(tmp_path, "a.yaml", content + f"lora_target: q_proj\nfreeze_vision_tower: {frozen}\n")
        assert tuple(load_config_text(made.content, base=tmp_path).lora.exclude) == excluded


def test_ring_and_usp_become_context_parallelism_with_a_note(tmp_path: Path) -> None:
    file = (THEIRS / "mindspeed.yaml").read_text()
    ring = text(tmp_path, "a.yaml", file.replace("ulysses_parallel_size: 2", "ulysses_parallel_size: 1"))
    assert "gathers" in why(ring, "parallel.ring_attention_size") and "context: 2" in ring.content
    assert "ulysses: 1 " in ring.content
    both = text(tmp_path, "a.yaml", file)
    assert "USP" in why(both, "parallel.ring_attention_size") and "packs" in " ".join(both.notes)
    off = text(
        tmp_path,
        "a.yaml",
        file.replace("attention_size: 2", "attention_size: 1").replace(
            "ulysses_parallel_size: 2", "ulysses_parallel_size: 1"
        ),
    )
    assert become(off)["parallel.ring_attention_size"] == "default" and "context" not in off.content


def test_no_load_optim_without_checkpoint_had_no_effect(tmp_path: Path) -> None:
    file = (THEIRS / "mindspeed.yaml").read_text()
    assert become(text(tmp_path, "a.yaml", file))["training.no_load_optim"] == "dead"
    loaded = text(tmp_path, "a.yaml", file.replace("save_interval: 400", "save_interval: 400\n  load: ./ckpt"))
    assert become(loaded)["training.no_load_optim"] == "none"
    assert "start again" in why(loaded, "training.no_load_optim") and "start_from" in why(
        loaded, "training.no_load_optim"
    )


@pytest.mark.parametrize(
    ("kind", "ours"),
    [("default", "microbatch"), ("per_sample_loss", "sample"), ("per_token_loss", "token"), ("raw", "microbatch")],
)
def test_mindspeed_losses_are_translated(kind: str, ours: str, tmp_path: Path) -> None:
    made = text(tmp_path, "a.yaml", (THEIRS / "mindspeed.yaml").read_text().replace("per_token_loss", kind))
    assert load_config_text(made.content, base=tmp_path).train.loss == ours


def test_loongforge_yaml_overrides_flags(tmp_path: Path) -> None:
    flags = (
        (THEIRS / "loongforge.sh")
        .read_text()
        .replace("--fp8-recipe delayed", "--fp8-recipe delayed --fp8-format hybrid")
    )
    (tmp_path / "a.sh").write_text(flags)
    made = translate([tmp_path / "a.sh", THEIRS / "loongforge.yaml"], tmp_path / "out.yaml", root=tmp_path)
    cfg = load_config_text(made.content, base=tmp_path)
    assert cfg.fp8.recipe == "delayed" and cfg.fp8.foundation.recipe == "blockwise_1d"
    assert cfg.fp8.image_projector.recipe == "off"  # built outside any FP8 context there


def test_small_vila_layers_stay_in_high_precision(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    file = (THEIRS / "vila.sh").read_text().replace('"some/vila-qwen2-7b"', "model")
    sizes = {"num_attention_heads": 28, "num_key_value_heads": 4}
    for width, kind in ((1536, "dead"), (3584, "translated")):
        (tmp_path / "model" / "config.json").write_text(json.dumps({"text_config": {"hidden_size": width, **sizes}}))
        made = text(tmp_path, "a.sh", file)
        assert become(made)["quantize_model"] == kind
        assert ("k_proj" in made.content) == (kind == "translated")


def test_unused_chat_template_variable_is_omitted(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    file = "model_name_or_path: model\nstage: sft\nfinetuning_type: full\ncutoff_len: 8\nenable_thinking: false\n"
    for template, kind in (("{{ messages }}", "dead"), ("{% if enable_thinking %}", "translated")):
        (tmp_path / "model" / "chat_template.jinja").write_text(template)
        assert become(text(tmp_path, "a.yaml", file))["enable_thinking"] == kind


def test_batches_and_epochs_are_computed_from_processes_and_rows(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "dataset_info.json").write_text(
        json.dumps(
            {
                "some_texts": {
                    "file_name": "rows.json",
                    "formatting": "sharegpt",
                    "columns": {"messages": "talk", "images": "pictures"},
                },
                "some_pictures": {"hf_hub_url": "org/pictures", "split": "test"},
            }
        )
    )
    (tmp_path / "data" / "rows.json").write_text(json.dumps([{"talk": []}] * 480))
    file = (
        (THEIRS / "llama_factory_vl.yaml").read_text().replace("some_pictures,some_texts", "some_texts,some_pictures")
    )
    made = text(tmp_path, "a.yaml", file, world=4)
    cfg = load_config_text(made.content, base=tmp_path)
    assert cfg.train.global_batch == 2 * 4 * 4
    assert cfg.train.warmup == 3  # a tenth of 480 // 32 steps an epoch, twice
    assert cfg.data.train[0].columns == {"conversations": "talk", "images": "pictures"}
    assert cfg.data.train[0].path == str(tmp_path / "data" / "rows.json")
    assert (cfg.data.train[1].path, cfg.data.train[1].split) == ("org/pictures", "test")
    assert load_config_text(text(tmp_path, "a.yaml", file, rows=6400).content, base=tmp_path).train.warmup == 160


BAD = {
    "a word for a number": ("llama_factory_vl.yaml", "learning_rate: 2.0e-4", "learning_rate: fast", ":26: "
    "learning_rate"),
    "half a step": ("axolotl_fp8.yaml", "max_steps: 300", "max_steps: 300.5", "expected a whole number"),
    "a word for a flag": ("axolotl_fp8.yaml", "fp8: true", "fp8: maybe", "expected true or false"),
    "no such schedule": ("llama_factory_vl.yaml", "lr_scheduler_type: cosine", "lr_scheduler_type: sinus", "cosine"),
    "no duration": ("llm_foundry_hub.yaml", "max_duration: 3ep", "max_duration: soon", "a duration"),
    "a tag": ("llama_factory_vl.yaml", "stage: sft", "stage: !!python/name:os.system sft", "tag"),
    "twice": ("llama_factory_vl.yaml", "stage: sft", "stage: sft\nstage: dpo", "appears twice"),
    "itself": ("llm_foundry_hub.yaml", "max_seq_len: 512", "max_seq_len: ${variables.max_seq_len}", "refers to itself"),
    "no FP8 of VILA": ("vila.sh", '"fp8Linear_qwen2"', "fp9Linear", "one of"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_invalid_syntax_is_an_error_with_its_line(case: str, tmp_path: Path) -> None:
    name, before, after, said = BAD[case]
    content = (THEIRS / name).read_text()
    assert before in content
    with pytest.raises(ConfigError, match=re.escape(said)) as error:
        text(tmp_path, name, content.replace(before, after))
    assert f"{name}:" in str(error.value)


def test_unrecognized_and_ambiguous_files_are_rejected(tmp_path: Path) -> None:
    with pytest.raises(TranslateError, match="the framework of this file was not recognized.*--from NAME"):
        text(tmp_path, "a.yaml", "a: 1\nb: 2\n")
    with pytest.raises(TranslateError, match="several frameworks"):
        text(tmp_path, "a.yaml", "base_model: a\nsequence_len: 8\nstage: sft\ncutoff_len: 8\n")
    with pytest.raises(TranslateError, match="Did you mean axolotl"):
        text(tmp_path, "a.yaml", "a: 1\n", framework="axoltl")
    assert text(tmp_path, "a.yaml", "base_model: a\nstage: sft\n", framework="axolotl").framework == "axolotl"
    with pytest.raises(TranslateError, match="no command that trains"):
        text(tmp_path, "a.sh", "echo hello\n")
    with pytest.raises(TranslateError, match="starts 2 trainings"):
        text(tmp_path, "a.sh", "swift sft --model a\nswift sft --model b\n")
    with pytest.raises(TranslateError, match="a.sh:2: a quote begins here"):
        text(tmp_path, "a.sh", "\nswift sft --model 'a\n")
    with pytest.raises(TranslateError, match="a.yaml:2: stage: 'ppo' cannot be translated: .*phase rl"):
        text(tmp_path, "a.yaml", "model_name_or_path: a\nstage: ppo\ncutoff_len: 8\nfinetuning_type: lora\n")
    with pytest.raises(TranslateError, match="rl: 'grpo' cannot be translated"):
        text(tmp_path, "a.yaml", "base_model: a\nrl: grpo\nsequence_len: 8\n")
    with pytest.raises(TranslateError, match="rlhf_type: 'gkd' cannot be translated"):
        text(tmp_path, "a.sh", "swift rlhf --rlhf_type gkd --model a\n")
    with pytest.raises(TranslateError, match="is not read here"):
        text(tmp_path, "a.toml", "a = 1\n")
    with pytest.raises(TranslateError, match="missing"):
        translate([tmp_path / "gone.yaml"], tmp_path / "out.yaml")


def test_scripts_are_parsed_and_not_executed(tmp_path: Path) -> None:
    made = text(tmp_path, "a.sh", f"""
FLAG={tmp_path}/ran
touch $FLAG; MODEL=$(touch {tmp_path}/ran; echo org/other)
LR=${{LR:-1e-4}}; ARGS=(--lora_rank 8 # not this: --lora_rank 9
  --learning_rate "$LR"); ARGS+=(--max_steps 5)
for i in $(seq 2); do ARGS+=(--max_steps 9); done
swift sft --model org/$NAME --train_type lora --dataset 'a b.jsonl' --seed $SEED --max_length 64 \\
  ${{ARGS[@]}} --output_dir out > log.txt 2>&1
""", variables={"NAME": "small"})  # fmt: skip
    assert not (tmp_path / "ran").exists()
    cfg = load_config_text(made.content, base=tmp_path)
    assert (cfg.model.path, cfg.lora.rank, cfg.train.lr, cfg.train.steps) == ("org/small", 8, 1e-4, 5)
    assert cfg.data.train[0].path.endswith("a b.jsonl") and cfg.run.dir == "out"
    assert become(made)["seed"] == "none" and "--set SEED=VALUE" in why(made, "seed")
    assert any("max_steps 9" in line for _, line, _ in made.unread)


def test_command_writes_atomically_and_does_not_overwrite(tmp_path: Path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    file = str(THEIRS / "llm_foundry_mpt.yaml")
    assert main(["import", file, "-o", "build/run.yaml", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["framework"] == "llm-foundry" and told["valid"] and sum(told["counts"].values()) == len(told["keys"])
    assert {path.name for path in (tmp_path / "build").rglob("*")} == {
        "run.yaml",
        "run.report.md",
        "run_model",
        "config.json",
    }
    before = (tmp_path / "build" / "run.yaml").read_text()
    assert main(["import", file, "-o", "build/run.yaml"]) == 2
    assert "would be overwritten" in capsys.readouterr().err
    assert main(["import", file, "-o", "build/run.yaml", "--force", "--fp8-recipe", "rowwise", "--world", "8"]) == 0
    after = (tmp_path / "build" / "run.yaml").read_text()
    assert "recipe: off" in before and "recipe: rowwise" in after
    (tmp_path / "streamed.yaml").write_text((THEIRS / "axolotl_qlora.yaml").read_text() + "streaming: true\n")
    assert main(["import", "streamed.yaml", "-o", "q.yaml"]) == 1
    assert "Octavo refuses q.yaml: " in capsys.readouterr().out and (tmp_path / "q.yaml").exists()
    for wrong in (["-o", "run.txt"], ["-o", "a.yaml", "--root", "nowhere"], ["-o", "a.yaml", "--set", "no-name=1"]):
        assert main(["import", file, *wrong]) == 2
    assert main(["import", "gone.yaml", "-o", "a.yaml"]) == 2
    assert capsys.readouterr().err.count("octavo import:") == 4


def test_import_does_not_need_torch() -> None:
    code = "import sys, octavo.importers; print({'torch', 'transformers', 'numpy'} & set(sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "set()\n"


def test_every_framework_has_a_published_key_set(tmp_path: Path) -> None:
    seen = {translate(sources(name), tmp_path / "out.yaml", root=tmp_path).framework for name in CLASSES}
    assert seen == set(FRAMEWORKS)
