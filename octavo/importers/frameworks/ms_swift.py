"""ms-swift's arguments (read at 3.9 and 4): launch scripts of `swift sft`, `pt`, `rlhf` and of `megatron sft`, or their
YAML. Most are transformers' own; `megatron` has Megatron's."""

from __future__ import annotations

import re

from octavo.importers.common import model_and_data, steps_and_schedule
from octavo.importers.common.draft import Draft, choice
from octavo.importers.common.prefixed_keys import Under
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
_HF = hf_trainer.Usual(micro=1, schedule="cosine", betas=(0.9, 0.95), decay=0.1, recompute=True)
_MEGATRON = megatron.Usual(total=16, schedule="cosine", betas=(0.9, 0.95), decay=0.1, lr=1e-5, seed=42)
#: flags of `megatron sft` of 3 -> what 4 calls them
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
_OF_LORA = (
    "lora_rank lora_alpha lora_dropout target_modules target_regex target_parameters use_rslora use_dora lora_dtype "
    "lora_bias modules_to_save init_weights"
)

NONE = {
    model_and_data.TEMPLATE: "template agent_template use_chat_template template_backend response_prefix norm_bbox "
    "chat_template",
    "the model's class is found by its config.json": "model_type model_name model_author task_type num_labels "
    "problem_type "
    "local_repo_path experts_impl architectures llm_architectures",
    "rows are read as they are, and kept as Arrow (data.cache)": "dataset_num_proc load_from_cache_file download_mode "
    "custom_dataset_info disable_auto_column_mapping cached_dataset cached_val_dataset packing_* interleave_prob "
    "stopping_strategy dataset_shuffle val_dataset_shuffle train_dataloader_shuffle shuffle_buffer_size lazy_tokenize "
    "val_dataset_* group_by_length",
    "models are taken of the Hugging Face hub, or of a folder": "use_hf hub_token check_model",
    "positions follow config.json": "rope_scaling max_model_len",
    "tokens come from the model's folder": "new_special_tokens",
    "one learning rate for all that is trained": "vit_lr aligner_lr lorap_lr_ratio",
    "adapters begin with B = 0, and nothing else is trained": "init_weights lora_ga_* lora_bias modules_to_save "
    "target_parameters",
    "other tuners are not built": "fourier_* boft_* vera_* adapter_act adapter_length adalora_* llamapro_* lisa_* "
    "reft_* "
    "use_galore galore_* tuner_backend",
    "whole parts are frozen by model.freeze; parameters by share are not": "freeze_parameters* trainable_parameters* "
    "freeze_parameters_ratio",
    "bitsandbytes and its kind are not used": "quant_method bnb_4bit_* hqq_axis quantization_*",
    "of rollouts by vLLM; here the modules that train write completions (docs/rl.md)": "vllm_* use_vllm sleep_level "
    "async_generate multi_turn_* offload_model offload_optimizer move_model_batches num_generations* reward_* "
    "max_completion_length cosine_* repetition_* soft_* dynamic_sample max_resample_times overlong_filter "
    "scale_rewards log_completions epsilon epsilon_high delta num_iterations advantage_estimator kl_in_reward "
    "importance_sampling_level steps_per_generation generation_batch_size teacher_* lmbda sft_alpha seq_kd gkd_* "
    "top_entropy_quantile log_entropy max_new_tokens temperature top_k top_p repetition_penalty num_ppo_epochs "
    "whiten_rewards kl_coef cliprange* vf_coef gamma lam num_mini_batches local_rollout_* num_sample_generations "
    "response_length missing_eos_penalty ref_model_type ref_model_revision ref_adapters sync_ref_model "
    "ref_model_sync_* "
    "ref_model_mixup_alpha",
    "figures and pages are in the run's directory": "add_version create_checkpoint_symlink logging_dir metric "
    "eval_use_evalscope eval_dataset eval_dataset_args eval_limit eval_generation_config extra_eval_args swanlab_*",
    "one process group, by --nproc or torchrun": "use_ray ray_* device_groups device_groups.* device_map max_memory",
    "figures of one kind are kept": "save_strategy eval_metric early_stop_interval",
    "of Ascend, of ray and of other trainers": "enable_npu_model_patch load_data_args ignore_args_error use_swift_lora "
    "decision_* offload_teacher_model ds3_gather_for_generation mrl_dims ref_adapter_name mcore_ref_* tau_* real_tau "
    "fipo_* offload_bridge wandb_log_unique_prompts rollout_* off_policy_* router_replay_mode max_turns "
    "completion_length_limit_scope use_gym_env gym_env skip_megatron_init language_model_only vit_attn_impl "
    "vit_gradient_checkpointing_kwargs max_epochs optimizer",
    "MAX_PIXELS and its kind are read as variables of the environment": "model_kwargs model_kwargs.*",
    "not built": "loss_type enable_dft_loss enable_channel_loss discopop_tau ld_alpha loss_weights "
    "center_rewards_coefficient "
    "cpo_alpha use_logits_to_keep use_flash_ckpt acc_strategy is_binary_loss_scale reference_free f_divergence_type "
    "calculate_KL zero_hpz_partition_size init_strategy callbacks external_plugins custom_register_path use_muonclip "
    "mlp_padding_free loss_scale_type",
    "adapters are merged afterwards, by octavo merge": "merge_lora",
    "Megatron's copy of the weights is made by a conversion; Octavo reads the Hugging Face folder": "adapter_load "
    "ref_load ref_adapter_load max_shard_size use_shared_expert_gate "
    "original_max_position_embeddings partial_rotary_factor linear_* layer_types mlp_padding_free",
}  # fmt: skip
SAME = {
    "Octavo's loss never makes full logits (train.logits: chunked)": "use_liger_kernel",
    "weights are read and written as safetensors": "load_safetensors save_safetensors safe_serialization "
    "bridge_backend",
    "the file that was given": "config load_args",
    "rows of a batch are padded on the right": "padding_side",
    "rows of a batch are padded; packs are not": "padding_free",
    "the empty block of thinking has no loss (data.mask_empty_think)": "disable_ignore_empty_think "
    "add_non_thinking_prefix",
}


def translate(draft: Draft) -> None:
    # `megatron sft` and `swift sft` share most flags; these keys only exist in the former.
    mega = "megatron" in draft.command or any(
        key in draft.source_keys
        for key in (
            "tensor_model_parallel_size",
            "train_iters",
            "global_batch_size",
            "lr_warmup_fraction",
            "fp8_format",
        )
    )
    world = steps_and_schedule.processes(draft)
    path = model_and_data.model(draft, "model")
    if revision := draft.text("model_revision"):
        draft.put("model.revision", revision, "model_revision")
    if (task := draft.text("task_type") or "causal_lm") != "causal_lm":
        draft.refuse(
            "task_type", f"it trains no text ({task}): embeddings, classifiers and rerankers are not implemented"
        )
    seeing = model_and_data.sees(draft, path or draft.text("load") or draft.text("mcore_model"))
    phase = _phase(draft)
    packed = model_and_data.packs(draft, phase, "packing")
    _data(draft, phase, path)
    lora = _adapters(draft, seeing)
    _model(draft, packed)
    u = _megatron(draft, world, packed, lora, phase) if mega else None
    if u is None:
        _trainer(draft, world, packed, lora, phase)
    if not lora:
        draft.table("dead", {"train_type is full, so there are no adapters": _OF_LORA})
    if phase != "preference":
        of = "rlhf_type beta rpo_alpha simpo_gamma desirable_weight undesirable_weight label_smoothing ref_model"
        draft.table("dead", {"no answers are compared in this run": of})
    draft.table("none", NONE)
    draft.table("default", SAME)
    if u is not None:
        megatron.rest(draft, u)
    hf_trainer.rest(draft)


def _phase(draft: Draft) -> str:
    kind = draft.text("rlhf_type") or ("dpo" if "rlhf" in draft.command else None)
    if kind in ("dpo", "orpo", "simpo", "kto"):
        draft.put("train.phase", "preference", "rlhf_type")
        beta = draft.number("beta")  # the default depends on the loss
        if kind == "dpo":
            hf_trainer.preference(draft, "loss_type", _LOSSES, 0.1 if beta is None else beta, "beta")
            if smooth := draft.number("label_smoothing"):
                draft.put("preference.label_smoothing", smooth, "label_smoothing")
        else:
            draft.put("preference.loss", kind, "rlhf_type")
            draft.put("preference.beta", beta or (2.0 if kind == "simpo" else 0.1), "beta")
        share = draft.number("rpo_alpha")
        draft.same(*(["rpo_alpha"] if share == 0 else []), why="no cross-entropy is added to the loss")
        if share and kind == "dpo":
            draft.put("preference.sft", share, "rpo_alpha", why="adds the chosen answers' cross-entropy to the loss")
        if kind == "simpo":
            draft.put("preference.gamma", 1.0 if (g := draft.number("simpo_gamma")) is None else g, "simpo_gamma")
            why = "SimPO adds the chosen answers' cross-entropy there, 1 unless cpo_alpha is given"
            draft.put("preference.sft", 1.0 if (a := draft.number("cpo_alpha")) is None else a, "cpo_alpha", why=why)
        for weight in ("desirable_weight", "undesirable_weight") if kind == "kto" else ():
            if (weight_value := draft.number(weight)) is not None:
                draft.put(f"preference.{weight}", weight_value, weight)
        if reference := draft.text("ref_model"):
            same = reference == draft.text("model")
            (draft.same if same else draft.none)("ref_model", why="the policy's own first weights are the reference")
        return "preference"
    if kind is not None:
        draft.refuse("rlhf_type", "SFT and preferences are; phase rl has GRPO, PPO and their relatives (docs/rl.md)")
    phase = "pretrain" if "pt" in draft.command else "sft"
    draft.put("train.phase", phase, why="swift pt" if phase == "pretrain" else "")
    return phase


def _data(draft: Draft, phase: str, path: str | None) -> None:
    for of, key in (("train", "dataset"), ("eval", "val_dataset")):
        for number, word in enumerate(draft.words(key, "")):
            # [HF:: or MS::]name[:subset][#number of rows]; the name may be a URL with a colon.
            match = re.fullmatch(r"(?:(?:HF|MS)::)?([^#:]*(?:://[^#:]*)?)(?::([^#]*))?(?:#(\d+))?", word)
            name, subset, count = match.groups() if match else (word, None, None)
            at = model_and_data.dataset(draft, of, number, name, key)
            if count:
                draft.put(
                    f"{at}.max_samples", int(count), key, why="the first rows, where there a random part is taken"
                )
            if subset:
                draft.put(f"{at}.subset", subset, key)
            if draft.flag("streaming"):
                model_and_data.stream(draft, at, "streaming")
            if columns := {v: k for k, v in draft.mapping("columns").items()}:
                draft.put(f"{at}.columns", columns, "columns", *draft.under("columns."))
            if of == "train" and number == 0 and draft.sizes is None:
                rows = steps_and_schedule.rows_of(draft, name)
                draft.sizes = rows if rows is None or not count else min(rows, int(count))
    if not draft.has("dataset"):
        draft.put("data.train.0.path", "/path/to/data.json", why="to be filled in: no flag named data")
        draft.note("data.train is to be filled in")
    if (share := draft.number("split_dataset_ratio")) and not draft.has("val_dataset"):
        draft.none("split_dataset_ratio", why=f"rows are not split off ({share:g}); set held-out rows in data.eval")
    else:
        draft.same("split_dataset_ratio", why="no rows are split off")
    length = draft.whole("max_length") or draft.whole("seq_length")
    draft.put(
        "train.seq_length", length or 2048, "max_length", "seq_length", why="" if length else "there the model's own"
    )
    words = {"delete": "drop", "left": "cut", "right": "cut", "split": "cut"}
    strategy = choice(draft, "truncation_strategy", {word: word for word in words})
    draft.put("data.on_long", words[strategy or "delete"], "truncation_strategy")
    if strategy in ("left", "split"):
        draft.note(f"truncation_strategy {strategy}: Octavo cuts the end of a row, never inside an image")
    if (strict := draft.flag("strict")) is not None or phase:
        draft.put(
            "data.on_bad_sample",
            "error" if strict else "skip",
            "strict",
            why="" if strict else "there bad rows are left out",
        )
    if system := draft.text("system"):
        draft.put("data.system", system, "system")
    _loss_scale(draft, phase)
    if pixels := draft.whole("max_pixels") or draft.whole("$MAX_PIXELS"):
        draft.put("data.max_pixels", pixels, "max_pixels", "$MAX_PIXELS")
    if low := draft.whole("$MIN_PIXELS"):
        draft.put("data.min_pixels", low, "$MIN_PIXELS")
    side = model_and_data.token_side(draft, path)
    for bound in ("max", "min"):
        key = f"$IMAGE_{bound.upper()}_TOKEN_NUM"
        if (tokens := draft.whole(key)) and side:
            draft.put(
                f"data.{bound}_pixels", tokens * side * side, key, why=f"{tokens} tokens of {side} x {side} pixels"
            )
        else:
            draft.none(key, why="tokens of an image: data.max_pixels counts pixels, so many of them as a token has")
    film = {"fps": "$FPS", "min_frames": "$FPS_MIN_FRAMES", "max_frames": "$FPS_MAX_FRAMES"}
    film |= {"max_pixels": "$VIDEO_MAX_PIXELS", "min_pixels": "$VIDEO_MIN_PIXELS"}
    model_and_data.video(draft, model_and_data.filmed(draft, path), phase, film, {})
    draft.none(*[k for k in draft.source_keys if k.startswith("$VIDEO") and k not in film.values()],
               why="per frame: data.video.max_pixels counts pixels, for Qwen3-VL of all frames")  # fmt: skip
    model_and_data.thinking(draft, "enable_thinking", "preserve_thinking")


def _loss_scale(draft: Draft, phase: str) -> None:
    """What has loss: ms-swift calls weights of tokens `loss_scale`."""
    word = draft.text("loss_scale")
    if word is None:
        return
    words = word.split("+")
    if "last_round" in words and phase == "sft":
        model_and_data.last_answer(draft, "loss_scale")
    elif "all" in words and phase == "sft":
        draft.put("data.train_on_prompt", True, "loss_scale")
    elif set(words) <= {"default", "last_round", "all", "ignore_empty_think"}:
        draft.same("loss_scale", why="every answer has loss; an empty block of thinking none (data.mask_empty_think)")
    if odd := [w for w in words if w not in ("default", "last_round", "all", "ignore_empty_think")]:
        draft.none("loss_scale", why=f"weights by {', '.join(odd)} are not built: a turn has weight 0 or 1")


def _adapters(draft: Draft, seeing: bool) -> bool:
    key = "tuner_type" if "tuner_type" in draft.source_keys else "train_type"
    kind = draft.text(key) or ("full" if "megatron" in draft.command else "lora")
    frozen = {name: bool(default if (flag := draft.flag(name)) is None else flag)
              for name, default in (("freeze_llm", False), ("freeze_vit", True), ("freeze_aligner", True))}  # fmt: skip
    ours = {"freeze_vit": "image_encoder", "freeze_aligner": "image_projector", "freeze_llm": "foundation"}
    draft.read_keys.update(("tuner_type", "train_type"))
    if not seeing:
        draft.dead(*frozen, why="a text model has no tower, no projector")
    if kind == "full":
        draft.same(key, why="no lora section")
        if seeing:
            model_and_data.freeze(draft, {ours[name]: (name,) for name, on in frozen.items() if on})
            draft.same(*[name for name, on in frozen.items() if not on], why="trained")
        return False
    if kind == "lora_llm":
        draft.none(key, why="tower and projector are trained completely there; here only adapters are trained")
        draft.note("tuner lora_llm: the language model gets adapters here, and tower and projector are not trained")
    elif kind != "lora":
        draft.none(key, why=f"{kind} is not implemented: LoRA is used instead")
        draft.note(f"{kind} is not implemented: LoRA is used instead; look at lora.rank, lora.targets and train.lr")
    else:
        draft.same(key, why="the section lora is there")
    targets = draft.words("target_modules") or ["all-linear"]
    if draft.text("target_regex"):
        draft.none("target_regex", why="a regular expression: write globs in lora.targets")
    keys = {"rank": "lora_rank", "alpha": "lora_alpha", "dropout": "lora_dropout", "targets": "target_modules"}
    everything = bool({"all-linear", "all-linears", "ALL", "all"} & set(targets))
    if kind == "lora_llm":
        draft.dead(*frozen, why="lora_llm asks for none of them")
        everything, targets = True, ["foundation"]
    elif everything:
        targets = [ours[name] for name, on in frozen.items() if not on] if seeing else ["foundation"]
    # Megatron fuses layers that Hugging Face models keep apart.
    odd = [
        word
        for word in targets
        if word in ("all-embedding", "all-router", "linear_qkv", "linear_proj", "linear_fc1", "linear_fc2")
    ]
    if odd:
        names = {"linear_qkv": ["q_proj", "k_proj", "v_proj"], "linear_proj": ["o_proj"],
                 "linear_fc1": ["gate_proj", "up_proj"], "linear_fc2": ["down_proj"]}  # fmt: skip
        targets = [name for word in targets for name in names.get(word, [] if word in odd else [word])] or [
            "foundation"
        ]
        if left := [word for word in odd if word not in names]:
            draft.none("target_modules", why=f"{', '.join(left)}: embeddings and routers get no adapters")
    rank, alpha = draft.whole("lora_rank", 8), draft.number("lora_alpha", 32)
    model_and_data.lora(draft, rank, alpha, draft.number("lora_dropout", 0.05), targets, keys=keys)
    if everything and seeing and kind != "lora_llm":
        draft.put("lora.targets", targets, *frozen)
    elif seeing and kind != "lora_llm":
        draft.dead(*frozen, why="only read with target_modules: all-linear; names of modules match in all parts")
    model_and_data.adapt(draft, keys, "use_rslora", "use_dora")
    if draft.text("lora_dtype") == "bfloat16":
        draft.put("lora.dtype", "bf16", "lora_dtype")
    if adapter := draft.words("adapters"):
        draft.put("lora.adapter", draft.path(adapter[0]), "adapters")
    return True


def _model(draft: Draft, packed: bool) -> None:
    model_and_data.kernel(draft, "attn_impl", _KERNELS, packed)
    if (bits := draft.whole("quant_bits")) is not None:
        model_and_data.eight_bits(draft, "quant_bits", bits)


def _precision(draft: Draft, lora: bool) -> None:
    word = choice(draft, "torch_dtype", {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"})
    if word == "bf16" and not draft.flag("fp16"):
        draft.put("train.precision", "bf16", "torch_dtype", "bf16")
    elif word == "fp16" and lora:
        draft.none("torch_dtype", why="the base of LoRA is BF16 here, and adapters compute as it does")
    elif word:
        draft.put("train.precision", word, "torch_dtype")
    else:
        hf_trainer.precision(draft, lora)


def _trainer(draft: Draft, world: int, packed: bool, lora: bool, phase: str) -> None:
    context = _shared(draft, packed)
    packed = packed or context > 1
    ranks = max(1, world // context)
    micro = steps_and_schedule.counted(draft, "per_device_train_batch_size") or 1
    usual = hf_trainer.Usual(
        **{**vars(_HF), "lr": 1e-4 if lora else 1e-5, "accumulation": max(1, -(-16 // (micro * world)))}
    )
    hf_trainer.steps(draft, usual, ranks, packed)
    if phase != "preference":
        draft.put("train.loss", "token", why="tokens of the whole step")
    hf_trainer.optimizer(draft, usual)
    _precision(draft, lora)
    hf_trainer.recompute(draft, usual)
    _vit(draft)
    if (coefficient := draft.number("router_aux_loss_coef")) is not None:
        draft.put("train.router_aux_loss_coef", coefficient, "router_aux_loss_coef")
    hf_trainer.saving(draft, usual, ranks)
    if draft.flag("resume_only_model"):
        draft.none("resume_only_model", why="run.start_from starts a new run from the weights of a checkpoint")
    hf_trainer.ranks(draft)
    model_and_data.no_fp8(draft)


def _vit(draft: Draft) -> None:
    vit = draft.flag("vit_gradient_checkpointing")
    if vit is None:
        return
    recompute = draft.settings["train.recompute"].value
    draft.put("train.recompute", {"image_encoder": "full" if vit else "none", "foundation": recompute}
              if isinstance(recompute, str) else recompute, "vit_gradient_checkpointing")  # fmt: skip


def _shared(draft: Draft, packed: bool) -> int:
    """Sequence parallelism is Ulysses' exchange, with a ring over it where heads do not suffice."""
    names = ("sequence", "context", "expert")
    size, context, expert = (steps_and_schedule.counted(draft, f"{name}_parallel_size") or 1 for name in names)
    if expert > 1:
        draft.put("parallel.expert", expert, "expert_parallel_size")
    else:
        draft.same("expert_parallel_size", why="experts are sharded, not distributed")
    both = max(size, context)
    if both == 1:
        draft.same("sequence_parallel_size", "context_parallel_size", why="no rows are shared")
        return 1
    why = "heads are exchanged as far as they go, and keys and values gathered beyond that (parallel.ulysses: auto);"
    why += " a ring passes them on instead"
    draft.put("parallel.context", both, "sequence_parallel_size", "context_parallel_size", why=why)
    if not packed:
        draft.put("data.packing", True, why="ranks can only share packed rows (parallel.context)")
    return both


def _megatron(draft: Draft, world: int, packed: bool, lora: bool, phase: str) -> Under:
    draft.read_keys.update(_NEWER.values())
    # Newer versions renamed keys: read the new name if only that is present.
    u = Under(
        draft,
        names={old: new for old, new in _NEWER.items() if new in draft.source_keys and old not in draft.source_keys},
    )
    ranks = megatron.data_parallel(draft, u, world)
    usual = megatron.Usual(**{**vars(_MEGATRON), "lr": 1e-4 if lora else 1e-5})
    megatron.context(draft, u)
    packed = packed or "data.packing" in draft.settings
    megatron.steps(draft, u, usual, ranks, packed)
    if phase != "preference":
        by_token = draft.flag("calculate_per_token_loss")
        draft.put("train.loss", "token" if by_token in (None, True) else "microbatch", "calculate_per_token_loss")
    megatron.optimizer(draft, u, usual)
    if draft.has("torch_dtype"):
        _precision(draft, lora)
    else:
        megatron.precision(draft, u)
    megatron.fp8(draft, u, param=not lora)
    model_and_data.no_fp8(draft)
    if phase == "preference":
        draft.none(
            "moe_aux_loss_coeff", "expert_model_parallel_size", why="not in phase preference; experts are sharded"
        )
    else:
        megatron.aux_loss(draft, u)
        megatron.expert(draft, u, lora=lora)
    megatron.recompute(draft, u, "selective")
    _vit(draft)
    draft.put("run.save_every", 500, why="their default")
    draft.put("run.seed", usual.seed, why="their default")
    megatron.saving(draft, u)
    if (keep := draft.whole("save_total_limit")) is not None:
        draft.put("run.keep", max(1, keep), "save_total_limit")
    if draft.has("report_to"):
        hf_trainer.trackers(draft, "report_to")
    word = draft.text("attention_backend")
    if word:
        draft.put("model.attention", "sdpa" if word in ("flash", "fused", "auto") else "eager", "attention_backend",
                  why="torch chooses at each call, flash where it can")  # fmt: skip
    draft.none(
        u("load"),
        "mcore_adapter",
        why="a checkpoint of Megatron's layout: Octavo reads the Hugging Face folder (model.path)",
    )
    return u
