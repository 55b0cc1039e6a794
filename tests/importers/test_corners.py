"""Corners that published files have: each a small set of keys, what it becomes, and what is said of them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from octavo.config import ConfigError, load_config_text
from octavo.importers import TranslateError, Translation, translate

LLAMA = "model_name_or_path: {model}\nstage: sft\nfinetuning_type: lora\ndataset: a\ncutoff_len: 64\nmax_steps: 8\n"
AXOLOTL = "base_model: org/m\nsequence_len: 64\nmax_steps: 30\ndatasets:\n  - path: org/d\n"
SWIFT = "swift sft --model {model} --dataset org/d --max_length 64 --max_steps 8 "
MEGATRON = "megatron sft --model {model} --dataset org/d --max_length 64 --train_iters 100 --micro_batch_size 1 "
LOONG = "torchrun train.py --training-phase sft --hf-tokenizer-path /m --data-path d.json --seq-length 64 --lr 1e-3 "
LOONG += "--train-iters 100 --micro-batch-size 1 --global-batch-size 4 "
MIND = """
data: {{dataset_param: {{basic_parameters: {{dataset: a.json, cutoff_len: 64{basic}}}}}{data}}}
model: {{model_name_or_path: org/Qwen2.5-VL-3B{model}}}
parallel: {{fully_shard_parallel_size: auto{parallel}}}
training: {{micro_batch_size: 1, train_iters: 8, lr: 1e-5{training}}}
"""
FOUNDRY = """
words: 64
max_seq_len: ${{words}}
model: {{name: hf_causal_lm, pretrained_model_name_or_path: org/m}}
train_loader: {{name: finetuning, dataset: {{hf_name: org/d}}}}
max_duration: 8ba
global_train_batch_size: 8
{more}
"""


def mind(**more: str) -> str:
    return MIND.format(**{"basic": "", "data": "", "model": "", "parallel": "", "training": "", **more})


def llama(more: str, model: str = "org/Qwen3-VL-2B") -> str:
    return LLAMA.format(model=model) + more


def swift(more: str, model: str = "org/Qwen2.5-VL-3B", base: str = SWIFT) -> str:
    return base.format(model=model) + more


UNFROZEN = "freeze_vision_tower: false\nfreeze_multi_modal_projector: false\n"
#: what it is of -> (a file of theirs, values of ours, key of theirs:what became of it)
CASES = {
    # all looks for names of layers outside the projector, then takes every layer of such a name that is not frozen
    "Qwen3-VL's projector bears names of its tower": (
        llama(UNFROZEN), "lora.targets=('foundation','image_projector','image_encoder') lora.exclude=()",
        "freeze_multi_modal_projector:translated"),
    "Qwen2.5-VL's bears its own": (
        llama(UNFROZEN, "org/Qwen2.5-VL-3B"), "lora.targets=('foundation','image_encoder')",
        "freeze_multi_modal_projector:dead"),
    "GLM-4V's bears those of the language model": (
        llama("freeze_multi_modal_projector: false\n", "org/GLM-4.1V-9B"),
        "lora.targets=('foundation','image_projector')", "freeze_multi_modal_projector:translated"),
    "layers by name are not those of what is frozen": (
        llama("lora_target: gate_proj\nfreeze_language_model: false\n"),
        "lora.targets=('**.gate_proj',) lora.exclude=('image_encoder','image_projector')", ""),
    "frames of videos, bounded each": (
        llama("video_max_pixels: 16384\nvideo_min_pixels: 0\nvideo_maxlen: 32\n", "org/Qwen2.5-VL-3B"),
        "data.video.max_pixels=16384 data.video.min_pixels=1 data.video.max_frames=32 data.video.fps=2.0",
        "video_max_pixels:translated video_min_pixels:translated"),
    "frames of videos, bounded together": (
        llama("video_max_pixels: 16384\nvideo_fps: 1\n"),
        "data.video.max_pixels=None data.video.max_frames=128 data.video.fps=1.0", "video_max_pixels:none"),
    "frames of videos in pairs, which are another phase": (
        llama("video_fps: 1\n").replace("stage: sft", "stage: dpo"), "data.video.fps=1.0", "video_fps:translated"),
    "no frames in texts": (
        llama("video_fps: 1\n").replace("stage: sft", "stage: pt"), "data.video=None", "video_fps:none"),
    "videos of a text model": (llama("video_fps: 1\n", "org/Llama-3"), "data.video=None", "video_fps:none"),
    "loss on the last answer alone": (llama("mask_history: true\n"), "data.split_turns=False", "mask_history:none"),
    "OFT stands as LoRA, and its base may be codes": (
        llama("oft_block_size: 32\nquantization_bit: 8\n").replace("type: lora", "type: oft"),
        "lora.rank=8 model.load_in_fp8.foundation=rowwise", "finetuning_type:none"),
    "parallel sizes of its trainer on Megatron divide the batch": (
        llama("per_device_train_batch_size: 2\ntensor_model_parallel_size: 2\npipeline_model_parallel_size: 2\n"
              "recompute_granularity: full\nmoe_grouped_gemm: true\n", "org/Qwen3-30B-A3B"),
        "train.global_batch=4 train.recompute.foundation=full", "moe_grouped_gemm:default"),
    "recomputation is not switched off by transformers' flag": (
        llama("gradient_checkpointing: false\n"), "train.recompute.foundation=full", "gradient_checkpointing:dead"),
    "recomputation off": (
        llama("disable_gradient_checkpointing: true\n"), "train.recompute.foundation=none",
        "disable_gradient_checkpointing:translated"),
    "a folder of pictures of a set that is not registered here": (
        llama("media_dir: pictures\npreserve_thinking: true\nddp_timeout: 1800\neval_strategy: no\n"),
        "data.train.0.images=pictures data.template_args={'preserve_thinking':True}",
        "dataset_dir: media_dir:translated ddp_timeout:default eval_strategy:default"),

    "modules by name are those of all parts (PEFT)": (
        AXOLOTL.replace("org/m", "org/Qwen2.5-VL-3B") + "adapter: lora\nlora_target_modules: [down_proj]\n",
        "lora.targets=('**.down_proj',) lora.exclude=()", ""),
    "but for what freeze_mm_modules takes off": (
        AXOLOTL.replace("org/m", "org/Qwen2.5-VL-3B")
        + "adapter: lora\nlora_target_modules: [down_proj]\nfreeze_mm_modules: true\n",
        "lora.exclude=('image_encoder','image_projector')", ""),
    "a kernel of the hub, and one that packs have not": (
        AXOLOTL + "attn_implementation: kernels-community/vllm-flash-attn3\nbf16: full\n",
        "model.attention.foundation=flash_attention_3 train.precision=bf16", "attn_implementation:translated"),
    "a kernel that packs have not": (
        AXOLOTL + "attn_implementation: eager\nsample_packing: true\n", "model.attention.foundation=sdpa",
        "attn_implementation:translated"),
    "packs, and epochs of them": (
        AXOLOTL.replace("max_steps: 30", "num_epochs: 2") + "sample_packing: true\nmicro_batch_size: 4\n",
        "data.packing=True train.epochs=2.0 train.micro_batch=1", "sample_packing:translated num_epochs:translated"),
    "LLaMA-Factory's": (
        llama("neat_packing: true\n").replace("max_steps: 8", "num_train_epochs: 2"),
        "data.packing=True train.epochs=2.0", "neat_packing:translated num_train_epochs:translated"),
    "ms-swift's": (
        swift("--packing true").replace("max_steps 8", "num_train_epochs 2"),
        "data.packing=True train.epochs=2.0", "packing:translated num_train_epochs:translated"),
    "a kernel of the hub that is another's": (
        AXOLOTL + "attn_implementation: org/tri-dao\n", "model.attention.foundation=sdpa", "attn_implementation:none"),
    "whole steps of warm-up are rounded down": (AXOLOTL + "warmup_ratio: 0.05\n", "train.warmup=1", ""),
    "activations that go to the host": (
        AXOLOTL + "activation_offloading: true\ngradient_checkpointing: false\n", "train.offload_activations=True",
        "activation_offloading:translated"),
    "activations of which full recomputation leaves none": (
        AXOLOTL + "activation_offloading: true\ngradient_checkpointing: true\n", "train.offload_activations=False",
        "activation_offloading:none"),
    "experts, trackers, streams and variables of the template": (
        AXOLOTL + "expert_parallel_size: 2\nuse_swanlab: true\nswanlab_project: a\nstreaming: true\n"
        "chat_template_kwargs: {reasoning_effort: low}\nuse_wandb: false\nwandb_project: b\n",
        "parallel.expert=2 run.trackers=('swanlab',) data.train.0.stream=True "
        "data.template_args={'reasoning_effort':'low'}",
        "use_swanlab:translated use_wandb:default wandb_project:none"),
    "a loss of pairs, and a reference that is asked once": (
        AXOLOTL + "rl: dpo\ndpo_loss_type: [hinge]\nprecompute_ref_log_probs: true\n",
        "preference.loss=hinge preference.reference=disk", "dpo_loss_type:translated"),
    "one of several losses": (
        AXOLOTL + "rl: dpo\ndpo_loss_type: [sigmoid, bco_pair]\n", "preference.loss=sigmoid", "dpo_loss_type:none"),

    "tower and projector are trained beside adapters": (
        swift("--tuner_type lora_llm --lora_rank 4 --vit_lr 1e-5 --freeze_vit false"),
        "lora.rank=4 lora.targets=('foundation',) model.freeze=()", "tuner_type:none freeze_vit:dead"),
    "a tuner that is not implemented": (swift("--train_type adalora"), "lora.rank=8", "train_type:none"),
    "modules by name, whatever is frozen": (
        swift("--target_modules down_proj --freeze_vit true"), "lora.targets=('**.down_proj',) lora.exclude=()",
        "freeze_vit:dead"),
    "tokens and frames by the environment": (
        "IMAGE_MAX_TOKEN_NUM=16 FPS_MAX_FRAMES=8 VIDEO_MAX_PIXELS=50176 " + swift(""),
        "data.max_pixels=12544 data.video.max_frames=8 data.video.max_pixels=50176",
        "$IMAGE_MAX_TOKEN_NUM:translated $FPS_MAX_FRAMES:translated"),
    "what needs no word": (
        swift("--report_to tensorboard --eval_strategy no --loss_scale last_round"), "data.split_turns=False",
        "report_to:default eval_strategy:default loss_scale:none"),
    "pairs without cross-entropy": (
        swift("--rlhf_type dpo --rpo_alpha 0").replace(" sft", " rlhf"), "preference.sft=None", "rpo_alpha:default"),
    "Megatron's, with names of a newer model": (
        swift("--recompute_granularity none --finetune true --save_safetensors true", "org/Qwen3.5-4B", MEGATRON),
        "train.recompute.foundation=none run.seed=42 run.save_every=500 "
        "model.freeze=('image_encoder','image_projector')",
        "finetune:default save_safetensors:default"),
    "each block by itself": (
        swift("--recompute_granularity full --recompute_method uniform --recompute_num_layers 1", base=MEGATRON),
        "train.recompute.foundation=full", "recompute_method:default recompute_num_layers:default"),
    "some blocks": (
        swift("--recompute_granularity full --recompute_method block --recompute_num_layers 9", base=MEGATRON),
        "train.recompute.foundation=full", "recompute_method:none"),

    "a share of the schedule, which is longer than the run": (
        LOONG + "--lr-decay-iters 1000 --lr-decay-style linear --lr-warmup-fraction 0.01 --min-lr 1e-4",
        "train.warmup=10 train.min_lr=0.000918181818", "lr_decay_iters:none"),
    "routers that no loss balances": (
        LOONG + "--moe-router-load-balancing-type none --moe-aux-loss-coeff 1e-3 --mtp-num-layers 1",
        "train.router_aux_loss_coef=0.0", "moe_aux_loss_coeff:dead mtp_num_layers:none"),
    "layers of latent attention": (
        LOONG + "+peft_config.apply_to_foundation=True +peft_config.target_modules=linear_q_down_proj,linear_proj",
        "lora.targets=('**.q_a_proj','**.o_proj')", ""),

    "held-out rows, and packs without a mask": (
        mind(data=", val_dataset_param: {basic_parameters: {dataset: b.json, cutoff_len: 64}}",
             training=", val_interval: 4", parallel=", ulysses_parallel_size: 2", model=", attn_implementation: eager"),
        "data.eval.0.path=b.json run.eval_every=4 model.attention.foundation=sdpa",
        "training.val_interval:translated data.val_dataset_param.basic_parameters.cutoff_len:default"),
    "features that stand where nothing reads them": (
        mind(model=", recompute: true, recompute_plan: {apply_modules: [a]}, skip_gdn_recompute: true, "
             "gdn_implementation: triton, freeze: [model.visual, audio_tower]"),
        "train.recompute.foundation=none model.freeze=('image_encoder','image_projector','audio_encoder')",
        "model.recompute:dead model.skip_gdn_recompute:none model.gdn_implementation:none"),

    "a value that others refer to, and a share of a process": (
        FOUNDRY.format(more="device_train_microbatch_size: 16\nloggers: {}\nonly_hf_checkpoint: false"),
        "train.micro_batch=8 train.seq_length=64", "words:default loggers:default only_hf_checkpoint:none"),
}  # fmt: skip


def made_of(content: str, folder: Path) -> Translation:
    name = "a.sh" if " --" in content else "a.yaml"
    (folder / name).write_text(content, encoding="utf-8")
    return translate([folder / name], folder / "out.yaml", root=folder, world=8 if "tensor_model" in content else None)


@pytest.mark.parametrize("case", CASES)
def test_corner_case_is_translated(case: str, tmp_path: Path) -> None:
    content, values, kinds = CASES[case]
    made = made_of(content, tmp_path)
    cfg = load_config_text(made.content, base=tmp_path)
    for word in values.split():
        target, _, value = word.partition("=")
        at: object = cfg
        for part in target.split("."):
            at = at[int(part)] if part.isdecimal() else getattr(at, part)
        assert str(at).replace(" ", "").replace(f"{tmp_path}/", "") == value, f"{target}: {at}"
    rows = {row.source_key.key: row for row in made.rows}
    for word in kinds.split():
        key, _, kind = word.partition(":")
        if kind:
            assert rows[key].kind == kind, f"{key}: {rows[key].why}"
    assert not [key for key, row in rows.items() if row.kind == "unknown"]


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (AXOLOTL + "reward_model: true\n", "reward_model: true.* cannot be translated"),
        (AXOLOTL + "diffusion: {eps: 1}\n", "diffusion.eps.* cannot be translated"),
        (swift("--task_type embedding"), "task_type: 'embedding' cannot be translated"),
        (FOUNDRY.format(more="").replace("hf_causal_lm", "hf_t5"), "'hf_t5' cannot be translated"),
    ],
)
def test_unsupported_kind_of_run_is_rejected(content: str, said: str, tmp_path: Path) -> None:
    with pytest.raises(TranslateError, match=said):
        made_of(content, tmp_path)


@pytest.mark.parametrize(
    "content",
    [AXOLOTL + f"{key}: 0\n" for key in ("context_parallel_size", "tensor_parallel_size", "expert_parallel_size")]
    + [swift(f"--{key}_model_parallel_size 0", base=MEGATRON) for key in ("tensor", "pipeline", "expert")]
    + [swift("--sequence_parallel_size 0"), mind(parallel=", ulysses_parallel_size: 0")],
)
def test_parallel_size_0_is_not_treated_as_1(content: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="expected a whole number of at least 1"):
        made_of(content, tmp_path)


def test_local_config_json_takes_precedence(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    vision = {"patch_size": 16, "spatial_merge_size": 2}
    (tmp_path / "model" / "config.json").write_text(json.dumps({"model_type": "qwen3_vl", "vision_config": vision}))
    made = made_of("IMAGE_MAX_TOKEN_NUM=16 FPS=1 " + swift("--train_type full", "model"), tmp_path)
    cfg = load_config_text(made.content, base=tmp_path)
    assert (cfg.data.max_pixels, cfg.data.video.fps) == (16 * 32 * 32, 1)
    assert cfg.model.freeze == ("image_encoder", "image_projector")
    reached = made_of(llama(UNFROZEN, "model"), tmp_path)
    assert "image_projector" in load_config_text(reached.content, base=tmp_path).lora.targets


def test_launcher_determines_the_number_of_processes(tmp_path: Path) -> None:
    made = made_of(LOONG.replace("torchrun", "torchrun --nproc_per_node gpu --nnodes 1:4"), tmp_path)
    assert sum("--world N" in note for note in made.notes) >= 2
