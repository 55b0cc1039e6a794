"""ms-swift's arguments (read at 3.9 and 4): launch scripts of `swift sft`, `pt`, `rlhf` and of `megatron sft`, or their
YAML. Most are transformers' own; `megatron` has Megatron's."""

from __future__ import annotations

import re

from octavo.importers.common import model_and_data, steps_and_schedule
from octavo.importers.common.draft import Draft, choice
from octavo.importers.common.prefixed_keys import PrefixedDraft
from octavo.importers.frameworks import hf_trainer, megatron

NAME = "ms-swift"
MARKS = (
    "train_type",
    "tuner_type",
    "tuner_backend",
    "rlhf_type",
    "split_dataset_ratio",
    "torch_dtype",
    "freeze_vit",
    "freeze_aligner",
    "attn_impl",
    "dataset_num_proc",
    "load_from_cache_file",
    "target_modules",
    "model",
)
COMMANDS = ("swift", "megatron")
FIRST_WINS = False
_HF = hf_trainer.Defaults(micro=1, schedule="cosine", betas=(0.9, 0.95), decay=0.1, recompute=True)
_MEGATRON = megatron.Defaults(total=16, schedule="cosine", betas=(0.9, 0.95), decay=0.1, lr=1e-5, seed=42)
#: flags of `megatron sft` in version 3 -> their names in version 4
_NEWER = {"max_epochs": "num_train_epochs", "save": "output_dir", "save_interval": "save_steps", "load": "mcore_model",
          "log_interval": "logging_steps", "num_workers": "dataloader_num_workers",
          "eval_interval": "eval_steps"}  # fmt: skip
_LOSSES = {"sigmoid": "sigmoid", "hinge": "hinge", "ipo": "ipo", "robust": "robust", "sigmoid_norm": "sigmoid_norm"}
_KERNELS = {
    "sdpa": "sdpa",
    "eager": "eager",
    "flash_attn": "flash_attention_2",
    "flash_attention_2": "flash_attention_2",
    "flash_attention_3": "flash_attention_3",
    "flex_attention": "flex",
}
_LORA_KEYS = (
    "lora_rank lora_alpha lora_dropout target_modules target_regex target_parameters use_rslora use_dora lora_dtype "
    "lora_bias modules_to_save init_weights"
)

NONE = {
    model_and_data.TEMPLATE_REASON: "template agent_template use_chat_template template_backend response_prefix "
    "norm_bbox chat_template",
    "config.json selects the model class": "model_type model_name model_author task_type num_labels problem_type "
    "local_repo_path experts_impl architectures llm_architectures",
    "rows need no preprocessing; they are cached as Arrow (data.cache)": "dataset_num_proc load_from_cache_file "
    "download_mode custom_dataset_info disable_auto_column_mapping cached_dataset cached_val_dataset packing_* "
    "interleave_prob stopping_strategy dataset_shuffle val_dataset_shuffle train_dataloader_shuffle "
    "shuffle_buffer_size lazy_tokenize val_dataset_* group_by_length",
    "models are loaded from the Hugging Face hub or from a folder": "use_hf hub_token check_model",
    "positions are set by config.json": "rope_scaling max_model_len",
    "the tokenizer comes from the model folder": "new_special_tokens",
    "all parameters have the same learning rate": "vit_lr aligner_lr lorap_lr_ratio",
    "adapters start with B = 0; nothing else is trained": "init_weights lora_ga_* lora_bias modules_to_save "
    "target_parameters",
    "only LoRA is implemented":
    "fourier_* boft_* vera_* adapter_act adapter_length adalora_* llamapro_* lisa_* reft_* use_galore galore_* "
    "tuner_backend",
    "model.freeze freezes whole components; freezing a share of the parameters is not implemented":
    "freeze_parameters* trainable_parameters* freeze_parameters_ratio",
    "bitsandbytes and similar libraries are not used": "quant_method bnb_4bit_* hqq_axis quantization_*",
    "for vLLM rollouts; Octavo generates completions with the modules that train (docs/rl.md)": "vllm_* use_vllm "
    "sleep_level async_generate multi_turn_* offload_model offload_optimizer move_model_batches num_generations* "
    "reward_* max_completion_length cosine_* repetition_* soft_* dynamic_sample max_resample_times overlong_filter "
    "scale_rewards log_completions epsilon epsilon_high delta num_iterations advantage_estimator kl_in_reward "
    "importance_sampling_level steps_per_generation generation_batch_size teacher_* lmbda sft_alpha seq_kd gkd_* "
    "top_entropy_quantile log_entropy max_new_tokens temperature top_k top_p repetition_penalty num_ppo_epochs "
    "whiten_rewards kl_coef cliprange* vf_coef gamma lam num_mini_batches local_rollout_* num_sample_generations "
    "response_length missing_eos_penalty ref_model_type ref_model_revision ref_adapters sync_ref_model "
    "ref_model_sync_* ref_model_mixup_alpha",
    "metrics and reports are in the run directory": "add_version create_checkpoint_symlink logging_dir metric "
    "eval_use_evalscope eval_dataset eval_dataset_args eval_limit eval_generation_config extra_eval_args swanlab_*",
    "there is one process group, started by --nproc or torchrun": "use_ray ray_* device_groups device_groups.* "
    "device_map max_memory",
    "checkpoints are saved by steps": "save_strategy eval_metric early_stop_interval",
    "for Ascend, ray or other trainers": "enable_npu_model_patch load_data_args ignore_args_error use_swift_lora "
    "decision_* offload_teacher_model ds3_gather_for_generation mrl_dims ref_adapter_name mcore_ref_* tau_* real_tau "
    "fipo_* offload_bridge wandb_log_unique_prompts rollout_* off_policy_* router_replay_mode max_turns "
    "completion_length_limit_scope use_gym_env gym_env skip_megatron_init language_model_only vit_attn_impl "
    "vit_gradient_checkpointing_kwargs max_epochs optimizer",
    "MAX_PIXELS and similar settings are read as environment variables": "model_kwargs model_kwargs.*",
    "not implemented": "loss_type enable_dft_loss enable_channel_loss discopop_tau ld_alpha loss_weights "
    "center_rewards_coefficient cpo_alpha use_logits_to_keep use_flash_ckpt acc_strategy is_binary_loss_scale "
    "reference_free f_divergence_type calculate_KL zero_hpz_partition_size init_strategy callbacks external_plugins "
    "custom_register_path use_muonclip mlp_padding_free loss_scale_type",
    "octavo merge merges adapters after training": "merge_lora",
    "Megatron checkpoint; Octavo reads the Hugging Face folder": "adapter_load ref_load ref_adapter_load "
    "max_shard_size use_shared_expert_gate original_max_position_embeddings partial_rotary_factor linear_* layer_types "
    "mlp_padding_free",
}  # fmt: skip
SAME = {
    "Octavo's loss never materializes full logits (train.logits: chunked)": "use_liger_kernel",
    "weights are read and written as safetensors": "load_safetensors save_safetensors safe_serialization "
    "bridge_backend",
    "this is the translated file": "config load_args",
    "rows of a batch are padded on the right": "padding_side",
    "rows of a batch are padded; packs are not": "padding_free",
    "an empty thinking block has no loss (data.mask_empty_think)": "disable_ignore_empty_think add_non_thinking_prefix",
}


def translate(draft: Draft) -> None:
    # `megatron sft` and `swift sft` share most flags; these keys only exist in the former.
    is_megatron = "megatron" in draft.command or any(
        key in draft.source_keys
        for key in (
            "tensor_model_parallel_size",
            "train_iters",
            "global_batch_size",
            "lr_warmup_fraction",
            "fp8_format",
        )
    )
    world = steps_and_schedule.count_processes(draft)
    path = model_and_data.set_model_path(draft, "model")
    if revision := draft.text("model_revision"):
        draft.set("model.revision", revision, "model_revision")
    if draft.text("task_type") not in (None, "causal_lm"):
        draft.refuse("task_type", "embedding models, classifiers and rerankers are not implemented")
    has_tower = model_and_data.has_vision(draft, path or draft.text("load") or draft.text("mcore_model"))
    phase = _translate_phase(draft)
    packed = model_and_data.translate_packing(draft, phase, "packing")
    _translate_data(draft, phase, path)
    lora = _translate_adapters(draft, has_tower)
    _translate_model(draft, packed)
    u = _translate_megatron(draft, world, packed, lora, phase) if is_megatron else None
    if u is None:
        _translate_trainer(draft, world, packed, lora, phase)
    if not lora:
        draft.mark_many("dead", {"train_type is full, so there are no adapters": _LORA_KEYS})
    if phase != "preference":
        group = "rlhf_type beta rpo_alpha simpo_gamma desirable_weight undesirable_weight label_smoothing ref_model"
        draft.mark_many("dead", {"this run has no preference loss": group})
    draft.mark_many("none", NONE)
    draft.mark_many("default", SAME)
    if u is not None:
        megatron.mark_remaining(draft, u)
    hf_trainer.mark_remaining(draft)


def _translate_phase(draft: Draft) -> str:
    kind = draft.text("rlhf_type") or ("dpo" if "rlhf" in draft.command else None)
    if kind in ("dpo", "orpo", "simpo", "kto"):
        draft.set("train.phase", "preference", "rlhf_type")
        beta = draft.number("beta")  # the default depends on the loss
        if kind == "dpo":
            hf_trainer.set_preference(draft, "loss_type", _LOSSES, 0.1 if beta is None else beta, "beta")
            if label_smoothing := draft.number("label_smoothing"):
                draft.set("preference.label_smoothing", label_smoothing, "label_smoothing")
        else:
            draft.set("preference.loss", kind, "rlhf_type")
            draft.set("preference.beta", beta or (2.0 if kind == "simpo" else 0.1), "beta")
        share = draft.number("rpo_alpha")
        draft.mark_default(*(["rpo_alpha"] if share == 0 else []), why="no cross-entropy is added to the loss")
        if share and kind == "dpo":
            draft.set("preference.sft", share, "rpo_alpha", why="adds cross-entropy on the chosen answers to the loss")
        if kind == "simpo":
            draft.set("preference.gamma", 1.0 if (g := draft.number("simpo_gamma")) is None else g, "simpo_gamma")
            why = "ms-swift's SimPO adds cross-entropy on the chosen answers with weight 1 unless cpo_alpha is set"
            draft.set("preference.sft", 1.0 if (a := draft.number("cpo_alpha")) is None else a, "cpo_alpha", why=why)
        for weight in ("desirable_weight", "undesirable_weight") if kind == "kto" else ():
            if (weight_value := draft.number(weight)) is not None:
                draft.set(f"preference.{weight}", weight_value, weight)
        if reference := draft.text("ref_model"):
            is_same = reference == draft.text("model")
            (draft.mark_default if is_same else draft.mark_unsupported)(
                "ref_model", why="the reference is the policy's initial weights"
            )
        return "preference"
    if kind is not None:
        draft.refuse(
            "rlhf_type", "only SFT and preference runs are; for GRPO, PPO and related methods see phase rl (docs/rl.md)"
        )
    phase = "pretrain" if "pt" in draft.command else "sft"
    draft.set("train.phase", phase, why="swift pt" if phase == "pretrain" else "")
    return phase


def _translate_data(draft: Draft, phase: str, path: str | None) -> None:
    for group, key in (("train", "dataset"), ("eval", "val_dataset")):
        for number, word in enumerate(draft.words(key, "")):
            # [HF:: or MS::]name[:subset][#number of rows]; the name may be a URL with a colon.
            match = re.fullmatch(r"(?:(?:HF|MS)::)?([^#:]*(?:://[^#:]*)?)(?::([^#]*))?(?:#(\d+))?", word)
            name, subset, count = match.groups() if match else (word, None, None)
            at = model_and_data.add_dataset(draft, group, number, name, key)
            if count:
                draft.set(f"{at}.max_samples", int(count), key, why="the first rows; ms-swift takes a random subset")
            if subset:
                draft.set(f"{at}.subset", subset, key)
            if draft.flag("streaming"):
                model_and_data.set_streaming(draft, at, "streaming")
            if columns := {v: k for k, v in draft.mapping("columns").items()}:
                draft.set(f"{at}.columns", columns, "columns", *draft.keys_under("columns."))
            if group == "train" and number == 0 and draft.num_rows is None:
                rows = steps_and_schedule.count_rows(draft, name)
                draft.num_rows = rows if rows is None or not count else min(rows, int(count))
    if not draft.has("dataset"):
        draft.set("data.train.0.path", "/path/to/data.json", why="FILL IN: no flag names training data")
        draft.add_note("FILL IN: set data.train")
    if (share := draft.number("split_dataset_ratio")) and not draft.has("val_dataset"):
        draft.mark_unsupported(
            "split_dataset_ratio", why=f"Octavo does not split off evaluation rows ({share:g}); set data.eval"
        )
    else:
        draft.mark_default("split_dataset_ratio", why="no rows are split off for evaluation")
    length = draft.integer("max_length") or draft.integer("seq_length")
    draft.set(
        "train.seq_length",
        length or 2048,
        "max_length",
        "seq_length",
        why="" if length else "ms-swift uses the model's length",
    )
    words = {"delete": "drop", "left": "cut", "right": "cut", "split": "cut"}
    strategy = choice(draft, "truncation_strategy", {word: word for word in words})
    draft.set("data.on_long", words[strategy or "delete"], "truncation_strategy")
    if strategy in ("left", "split"):
        draft.add_note(f"truncation_strategy {strategy}: Octavo truncates rows at the end, never inside an image")
    if (strict := draft.flag("strict")) is not None or phase:
        draft.set(
            "data.on_bad_sample",
            "error" if strict else "skip",
            "strict",
            why="" if strict else "ms-swift skips invalid rows",
        )
    if system := draft.text("system"):
        draft.set("data.system", system, "system")
    _translate_loss_scale(draft, phase)
    if pixels := draft.integer("max_pixels") or draft.integer("$MAX_PIXELS"):
        draft.set("data.max_pixels", pixels, "max_pixels", "$MAX_PIXELS")
    if min_pixels := draft.integer("$MIN_PIXELS"):
        draft.set("data.min_pixels", min_pixels, "$MIN_PIXELS")
    side = model_and_data.image_token_side(draft, path)
    for bound in ("max", "min"):
        key = f"$IMAGE_{bound.upper()}_TOKEN_NUM"
        if (tokens := draft.integer(key)) and side:
            draft.set(
                f"data.{bound}_pixels", tokens * side * side, key, why=f"{tokens} tokens of {side} x {side} pixels"
            )
        else:
            draft.mark_unsupported(
                key, why="tokens per image; data.max_pixels is in pixels: multiply by the pixels per token"
            )
    video_keys = {"fps": "$FPS", "min_frames": "$FPS_MIN_FRAMES", "max_frames": "$FPS_MAX_FRAMES"}
    video_keys |= {"max_pixels": "$VIDEO_MAX_PIXELS", "min_pixels": "$VIDEO_MIN_PIXELS"}
    model_and_data.set_video(draft, model_and_data.video_family(draft, path), phase, video_keys, {})
    draft.mark_unsupported(*[k for k in draft.source_keys if k.startswith("$VIDEO") and k not in video_keys.values()],
               why="per frame; data.video.max_pixels is in pixels, for Qwen3-VL over all frames")  # fmt: skip
    model_and_data.set_template_flags(draft, "enable_thinking", "preserve_thinking")


def _translate_loss_scale(draft: Draft, phase: str) -> None:
    """Translate which tokens have loss; ms-swift calls token weights `loss_scale`."""
    word = draft.text("loss_scale")
    if word is None:
        return
    words = word.split("+")
    if "last_round" in words and phase == "sft":
        model_and_data.mark_last_answer_loss(draft, "loss_scale")
    elif "all" in words and phase == "sft":
        draft.set("data.train_on_prompt", True, "loss_scale")
    elif set(words) <= {"default", "last_round", "all", "ignore_empty_think"}:
        draft.mark_default(
            "loss_scale", why="all answers have loss; empty thinking blocks have none (data.mask_empty_think)"
        )
    if unsupported := [w for w in words if w not in ("default", "last_round", "all", "ignore_empty_think")]:
        draft.mark_unsupported(
            "loss_scale", why=f"token weights {', '.join(unsupported)} are not implemented; a turn has weight 0 or 1"
        )


def _translate_adapters(draft: Draft, has_tower: bool) -> bool:
    key = "tuner_type" if "tuner_type" in draft.source_keys else "train_type"
    kind = draft.text(key) or ("full" if "megatron" in draft.command else "lora")
    frozen = {name: bool(default if (flag := draft.flag(name)) is None else flag)
              for name, default in (("freeze_llm", False), ("freeze_vit", True), ("freeze_aligner", True))}  # fmt: skip
    components = {"freeze_vit": "image_encoder", "freeze_aligner": "image_projector", "freeze_llm": "foundation"}
    draft.read_keys.update(("tuner_type", "train_type"))
    if not has_tower:
        draft.mark_ignored(*frozen, why="a text model has no vision tower or projector")
    if kind == "full":
        draft.mark_default(key, why="no lora section")
        if has_tower:
            model_and_data.set_freeze(draft, {components[name]: (name,) for name, on in frozen.items() if on})
            draft.mark_default(*[name for name, on in frozen.items() if not on], why="trained")
        return False
    if kind == "lora_llm":
        draft.mark_unsupported(key, why="ms-swift trains the tower and projector fully; Octavo trains only adapters")
        draft.add_note("tuner lora_llm: only the language model gets adapters; the tower and projector are not trained")
    elif kind != "lora":
        draft.mark_unsupported(key, why=f"{kind} is not implemented: LoRA is used instead")
        draft.add_note(f"{kind} is not implemented: LoRA is used instead; check lora.rank, lora.targets and train.lr")
    else:
        draft.mark_default(key, why="the lora section enables it")
    targets = draft.words("target_modules") or ["all-linear"]
    if draft.text("target_regex"):
        draft.mark_unsupported("target_regex", why="regular expressions are not supported: write globs in lora.targets")
    keys = {"rank": "lora_rank", "alpha": "lora_alpha", "dropout": "lora_dropout", "targets": "target_modules"}
    all_linear = bool({"all-linear", "all-linears", "ALL", "all"} & set(targets))
    if kind == "lora_llm":
        draft.mark_ignored(*frozen, why="not used with lora_llm")
        all_linear, targets = True, ["foundation"]
    elif all_linear:
        targets = [components[name] for name, on in frozen.items() if not on] if has_tower else ["foundation"]
    # Megatron fuses layers that are separate in Hugging Face models.
    special_names = [
        word
        for word in targets
        if word in ("all-embedding", "all-router", "linear_qkv", "linear_proj", "linear_fc1", "linear_fc2")
    ]
    if special_names:
        names = {"linear_qkv": ["q_proj", "k_proj", "v_proj"], "linear_proj": ["o_proj"],
                 "linear_fc1": ["gate_proj", "up_proj"], "linear_fc2": ["down_proj"]}  # fmt: skip
        targets = [name for word in targets for name in names.get(word, [] if word in special_names else [word])] or [
            "foundation"
        ]
        if unsupported_names := [word for word in special_names if word not in names]:
            draft.mark_unsupported(
                "target_modules", why=f"{', '.join(unsupported_names)}: embeddings and routers get no adapters"
            )
    rank, alpha = draft.integer("lora_rank", 8), draft.number("lora_alpha", 32)
    model_and_data.set_lora(draft, rank, alpha, draft.number("lora_dropout", 0.05), targets, keys=keys)
    if all_linear and has_tower and kind != "lora_llm":
        draft.set("lora.targets", targets, *frozen)
    elif has_tower and kind != "lora_llm":
        draft.mark_ignored(
            *frozen, why="only used with target_modules: all-linear; module names match in all components"
        )
    model_and_data.set_lora_variants(draft, keys, "use_rslora", "use_dora")
    if draft.text("lora_dtype") == "bfloat16":
        draft.set("lora.dtype", "bf16", "lora_dtype")
    if adapter := draft.words("adapters"):
        draft.set("lora.adapter", draft.path(adapter[0]), "adapters")
    return True


def _translate_model(draft: Draft, packed: bool) -> None:
    model_and_data.set_attention_kernel(draft, "attn_impl", _KERNELS, packed)
    if (bits := draft.integer("quant_bits")) is not None:
        model_and_data.set_quantized_base(draft, "quant_bits", bits)


def _translate_precision(draft: Draft, lora: bool) -> None:
    word = choice(draft, "torch_dtype", {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"})
    if word == "bf16" and not draft.flag("fp16"):
        draft.set("train.precision", "bf16", "torch_dtype", "bf16")
    elif word == "fp16" and lora:
        draft.mark_unsupported(
            "torch_dtype", why="Octavo keeps the LoRA base in BF16, and adapters compute in its dtype"
        )
    elif word:
        draft.set("train.precision", word, "torch_dtype")
    else:
        hf_trainer.set_precision(draft, lora)


def _translate_trainer(draft: Draft, world: int, packed: bool, lora: bool, phase: str) -> None:
    context = _translate_sequence_parallel(draft, packed)
    packed = packed or context > 1
    ranks = max(1, world // context)
    micro = steps_and_schedule.positive_count(draft, "per_device_train_batch_size") or 1
    defaults = hf_trainer.Defaults(
        **{**vars(_HF), "lr": 1e-4 if lora else 1e-5, "accumulation": max(1, -(-16 // (micro * world)))}
    )
    hf_trainer.set_steps(draft, defaults, ranks, packed)
    if phase != "preference":
        draft.set("train.loss", "token", why="mean over the tokens of the whole step")
    hf_trainer.set_optimizer(draft, defaults)
    _translate_precision(draft, lora)
    hf_trainer.set_recompute(draft, defaults)
    _translate_vit_recompute(draft)
    if (coefficient := draft.number("router_aux_loss_coef")) is not None:
        draft.set("train.router_aux_loss_coef", coefficient, "router_aux_loss_coef")
    hf_trainer.set_saving(draft, defaults, ranks)
    if draft.flag("resume_only_model"):
        draft.mark_unsupported(
            "resume_only_model", why="run.start_from starts a new run from the weights of a checkpoint"
        )
    hf_trainer.set_sharding(draft)
    model_and_data.disable_fp8_if_unset(draft)


def _translate_vit_recompute(draft: Draft) -> None:
    vit = draft.flag("vit_gradient_checkpointing")
    if vit is None:
        return
    recompute = draft.settings["train.recompute"].value
    draft.set("train.recompute", {"image_encoder": "full" if vit else "none", "foundation": recompute}
              if isinstance(recompute, str) else recompute, "vit_gradient_checkpointing")  # fmt: skip


def _translate_sequence_parallel(draft: Draft, packed: bool) -> int:
    """Translate sequence parallelism: Ulysses, combined with a ring if there are too few heads. Returns its size."""
    names = ("sequence", "context", "expert")
    size, context, expert = (steps_and_schedule.positive_count(draft, f"{name}_parallel_size") or 1 for name in names)
    if expert > 1:
        draft.set("parallel.expert", expert, "expert_parallel_size")
    else:
        draft.mark_default("expert_parallel_size", why="experts are sharded by FSDP2")
    largest = max(size, context)
    if largest == 1:
        draft.mark_default("sequence_parallel_size", "context_parallel_size", why="rows are not split across ranks")
        return 1
    why = (
        "heads are exchanged as far as their number allows, then keys and values are gathered (parallel.ulysses: auto);"
    )
    why += " ms-swift uses a ring instead"
    draft.set("parallel.context", largest, "sequence_parallel_size", "context_parallel_size", why=why)
    if not packed:
        draft.set("data.packing", True, why="context parallelism needs packed rows")
    return largest


def _translate_megatron(draft: Draft, world: int, packed: bool, lora: bool, phase: str) -> PrefixedDraft:
    draft.read_keys.update(_NEWER.values())
    # Newer versions renamed keys: read the new name if only that is present.
    u = PrefixedDraft(
        draft,
        names={old: new for old, new in _NEWER.items() if new in draft.source_keys and old not in draft.source_keys},
    )
    ranks = megatron.data_parallel_size(draft, u, world)
    defaults = megatron.Defaults(**{**vars(_MEGATRON), "lr": 1e-4 if lora else 1e-5})
    megatron.set_context_parallel(draft, u)
    packed = packed or "data.packing" in draft.settings
    megatron.set_steps(draft, u, defaults, ranks, packed)
    if phase != "preference":
        by_token = draft.flag("calculate_per_token_loss")
        draft.set("train.loss", "token" if by_token in (None, True) else "microbatch", "calculate_per_token_loss")
    megatron.set_optimizer(draft, u, defaults)
    if draft.has("torch_dtype"):
        _translate_precision(draft, lora)
    else:
        megatron.set_precision(draft, u)
    megatron.set_fp8(draft, u, param=not lora)
    model_and_data.disable_fp8_if_unset(draft)
    if phase == "preference":
        draft.mark_unsupported(
            "moe_aux_loss_coeff", "expert_model_parallel_size", why="not used in phase preference; experts are sharded"
        )
    else:
        megatron.set_aux_loss(draft, u)
        megatron.set_expert_parallel(draft, u, lora=lora)
    megatron.set_recompute(draft, u, "selective")
    _translate_vit_recompute(draft)
    draft.set("run.save_every", 500, why="the framework's default")
    draft.set("run.seed", defaults.seed, why="the framework's default")
    megatron.set_saving(draft, u)
    if (keep := draft.integer("save_total_limit")) is not None:
        draft.set("run.keep", max(1, keep), "save_total_limit")
    if draft.has("report_to"):
        hf_trainer.set_trackers(draft, "report_to")
    word = draft.text("attention_backend")
    if word:
        draft.set("model.attention", "sdpa" if word in ("flash", "fused", "auto") else "eager", "attention_backend",
                  why="torch selects a kernel at each call, flash attention if possible")  # fmt: skip
    draft.mark_unsupported(
        u("load"),
        "mcore_adapter",
        why="Megatron checkpoint; Octavo reads the Hugging Face folder (model.path)",
    )
    return u
