"""Words of other trainers, and what Octavo calls the same thing: keys, and values of single keys.

Each entry is (Octavo's word, why), and a suggestion always says both: a near spelling may train something else, as
`ipo` does for who writes `dpo`. So a translation comes before a near spelling, only typing errors count as near, and
a typing error in a word of another trainer is translated as well.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from octavo.base.wording import typing_error

Word = tuple[str, str]


def _all(words: str, key: str, why: str = "") -> dict[str, Word]:
    return dict.fromkeys(words.split(), (key, why))


KEYS: Mapping[str, Word] = {
    **_all("learning_rate base_learning_rate max_lr", "train.lr"),
    **_all("max_steps num_steps max_iters train_iters num_training_steps", "train.steps"),
    **_all("num_train_epochs num_epochs max_epochs epoch", "train.epochs"),
    **_all("max_length max_seq_length max_seq_len cutoff_len sequence_len model_max_length", "train.seq_length"),
    **_all("batch_size global_batch_size train_batch_size", "train.global_batch", "samples in one optimizer step"),
    **_all("gradient_accumulation_steps accumulate_grad_batches", "train.global_batch",
           "samples in one optimizer step, over all micro-batches and GPUs"),
    **_all("per_device_train_batch_size micro_batch_size device_batch_size", "train.micro_batch",
           "samples of one GPU at a time"),
    **_all("lr_scheduler_type lr_scheduler lr_decay_style", "train.schedule"),
    **_all("warmup_steps warmup_ratio lr_warmup_iters", "train.warmup", "in steps"),
    **_all("max_grad_norm gradient_clip_val clip_grad gradient_clipping", "train.clip"),
    **_all("min_lr_ratio lr_end", "train.min_lr", "as a learning rate"),
    **_all("gradient_checkpointing activation_checkpointing recompute_granularity", "train.recompute"),
    **_all("bf16 fp16 mixed_precision torch_dtype dtype", "train.precision"),
    **_all("label_smoothing_factor", "train.label_smoothing"),
    **_all("activation_offloading", "train.offload_activations"),
    **_all("torch_compile", "train.compile"),
    **_all("stage task objective", "train.phase", "pretrain, sft, preference or rl"),
    **_all("output_dir save_dir run_dir", "run.dir"),
    **_all("logging_steps log_interval", "run.log_every"),
    **_all("save_steps save_interval save_freq", "run.save_every"),
    **_all("eval_steps eval_interval", "run.eval_every"),
    **_all("logging_strategy", "run.log_every", "in steps"),
    **_all("save_strategy", "run.save_every", "in steps"),
    **_all("eval_strategy evaluation_strategy", "run.eval_every", "in steps"),
    **_all("data_seed", "run.seed", "one seed for the order of data and the initial values"),
    **_all("ddp_timeout", "run.timeout", "in seconds"),
    **_all("save_total_limit", "run.keep"),
    **_all("resume_from_checkpoint", "run.resume"),
    **_all("report_to logger loggers", "run.trackers"),
    **_all("model_name_or_path model_name base_model pretrained", "model.path"),
    **_all("model_revision", "model.revision"),
    **_all("load_in_8bit load_in_4bit quantization_bit", "model.load_in_fp8", "8 bits are FP8 codes here"),
    **_all("attn_implementation flash_attn flash_attention", "model.attention"),
    **_all("freeze_vision_tower freeze_vit freeze_vision_model", "model.freeze: [image_encoder]"),
    **_all("freeze_multi_modal_projector freeze_aligner", "model.freeze: [image_projector]"),
    **_all("freeze_language_model freeze_llm", "model.freeze: [foundation]"),
    **_all("lora_rank lora_r r", "lora.rank"),
    **_all("use_peft", "lora.rank", "the section `lora` adds adapters"),
    **_all("lora_alpha", "lora.alpha"),
    **_all("lora_dropout", "lora.dropout"),
    **_all("use_rslora", "lora.rslora"),
    **_all("use_dora", "lora.dora"),
    **_all("target_modules lora_target lora_target_modules", "lora.targets"),
    **_all("exclude_modules", "lora.exclude"),
    **_all("adapter_name_or_path", "lora.adapter"),
    **_all("fp8_recipe", "fp8.recipe"),
    **_all("fp8_format", "fp8.format"),
    **_all("fp8_param_gather", "fp8.param"),
    **_all("dataset train_dataset dataset_path train_file", "data.train", "a list of {path: ...}"),
    **_all("eval_dataset val_dataset validation_file", "data.eval", "a list of {path: ...}"),
    **_all("dataset_text_field text_column", "data.train", "a list of {path: ..., columns: ...}"),
    **_all("dataloader_num_workers", "data.workers"),
    **_all("padding_free", "data.packing", "packs have no padding"),
    **_all("assistant_only_loss completion_only_loss train_on_inputs", "data.train_on_prompt",
           "false, the default: only the assistant's turns have a loss"),
    **_all("chat_template_kwargs", "data.template_args"),
    **_all("truncation_strategy truncation_mode excess_length_strategy", "data.on_long", "drop, cut or error"),
    **_all("num_generations num_samples_per_prompt n_samples_per_prompt rollout_n", "rl.group",
           "completions for one prompt"),
    **_all("max_completion_length max_response_length response_length", "rl.max_new_tokens"),
    **_all("num_iterations ppo_epochs", "rl.epochs"),
    **_all("steps_per_generation", "rl.mini_batches", "the number of updates for one batch of completions"),
    **_all("generation_batch_size", "rl.prompts", "prompts of a step, each with rl.group completions"),
    **_all("epsilon epsilon_low cliprange clip_ratio", "rl.clip_low", "the lower side; the upper one is rl.clip_high"),
    **_all("epsilon_high", "rl.clip_high"),
    **_all("scale_rewards", "rl.advantage", "group, group_unscaled or batch"),
    **_all("reward_weights", "rl.rewards", "a list of {reward: ..., weight: ...}"),
    **_all("importance_sampling_level", "rl.algorithm", "gspo has ratios of sequences, the others of tokens"),
    **_all("mask_truncated_completions", "rl.mask_truncated"),
    **_all("entropy_coef entropy_coeff", "rl.entropy"),
    **_all("log_completions num_completions_to_print", "rl.show", "completions of each step, in completions.jsonl"),
    **_all("vllm_importance_sampling_correction vllm_importance_sampling_mode", "rl.correction",
           "with rl.correction_level"),
    **_all("vllm_importance_sampling_clip_max vllm_importance_sampling_cap", "rl.correction_high"),
    **_all("vllm_importance_sampling_clip_min", "rl.correction_low"),
    **_all("kl_coef init_kl_coef", "rl.kl"),
    **_all("reward_funcs reward_functions reward_fn", "rl.rewards",
           "a list of {reward: ...}"),
    **_all("loss_type", "preference.loss", "of phase preference; in phase rl it is rl.algorithm"),
    **_all("pref_loss", "preference.loss"),
    **_all("loss", "preference.loss", "of phase preference; train.loss is how losses of tokens are averaged"),
    **_all("pref_beta dpo_beta", "preference.beta"),
    **_all("beta", "preference.beta", "of phase preference; in phase rl it is rl.kl"),
    **_all("reference_free", "preference.loss", "orpo and simpo have no reference"),
    **_all("precompute_ref_log_probs", "preference.reference", "disk"),
    **_all("rpo_alpha pref_ftx", "preference.sft", "the weight of the loss of the chosen answer"),
    **_all("optim optimizer_type", "optimizer.states", "the optimizer is AdamW; states chooses how moments are stored"),
    **_all("adam_beta1 adam_beta2", "optimizer.betas", "both in one list"),
    **_all("adam_epsilon", "optimizer.eps"),
    **_all("fsdp fsdp_config deepspeed", "parallel.shard", "sharding is FSDP2's, as in ZeRO-3"),
    **_all("context_parallel_size cp_size", "parallel.context"),
    **_all("expert_model_parallel_size ep_size", "parallel.expert"),
}  # fmt: skip
"""Key of another trainer, at the top or in the section of Octavo's key -> Octavo's key."""

IN_SECTION: Mapping[tuple[str, str], Word] = {
    ("rl", "beta"): ("rl.kl", "the weight of the KL term"),
    **{("rl", word): ("rl.value_weight", "of the critic's loss") for word in ("value_coef", "vf_coef")},
    **{("rl", word): ("rl.algorithm", "it names the loss too") for word in ("loss", "loss_type")},
    ("optimizer", "epsilon"): ("optimizer.eps", ""),
    ("optimizer", "beta"): ("optimizer.betas", "both in one list"),
    ("optimizer", "dtype"): ("optimizer.states", "how moments are stored"),
    ("model", "dtype"): ("train.precision", "weights are kept as optimizer.master says"),
    ("train", "dtype"): ("train.precision", ""),
    ("train", "mini_batch_size"): ("rl.mini_batches", "the number of updates for one batch of completions"),
    ("parallel", "stage"): ("parallel.shard", "sharding is FSDP2's, as in ZeRO-3"),
}
"""(Section, key of another trainer) -> Octavo's key, where the same word means other things elsewhere."""

WITHOUT_COUNTERPART: Mapping[str, str] = {
    **dict.fromkeys(
        ("template", "chat_template", "chat_template_path", "prompt_template"),
        "the chat template comes from the model's folder",
    ),
    "trust_remote_code": "code in a model's folder is never run",
    **dict.fromkeys(("use_vllm", "vllm_mode"), "the modules that train generate the completions"),
}
"""Key of another trainer that has no counterpart -> what is true here instead."""

SEVERAL_MEANINGS = frozenset({"beta", "dtype", "epochs", "format", "gamma", "loss", "reference", "clip"})
"""Keys of several sections, or of one, that mean something else in another: not offered there."""

COMPONENT_WORDS: Mapping[str, str] = {
    **dict.fromkeys(("vision_tower", "visual", "vision_model", "vision_encoder", "vision", "vit"), "image_encoder"),
    **dict.fromkeys(
        ("mm_projector", "multi_modal_projector", "projector", "aligner", "merger", "connector"), "image_projector"
    ),
    **dict.fromkeys(("language_model", "llm", "text_model", "decoder"), "foundation"),
    "audio_tower": "audio_encoder",
}
"""Names that other trainers have for components -> Octavo's."""

SUITE_WORDS: Mapping[str, str] = {
    **dict.fromkeys(("kernel", "kernels", "matmul", "matrix"), "gemm"),
    **dict.fromkeys(("quantize", "quantization"), "cast"),
    **dict.fromkeys(("generate", "generation", "inference"), "decode"),
    **dict.fromkeys(("block", "blocks"), "layer"),
    **dict.fromkeys(("training", "train"), "step"),
}
"""Names that a user may expect of the suites of `octavo bench` -> the suites."""

_PREFERENCE = ["dpo", "ipo", "orpo", "simpo", "kto", "cpo", "rpo", "slic"]
_RL = ["grpo", "dr_grpo", "ppo", "rloo", "dapo", "gspo", "cispo", "bnpo", "reinforce", "rlhf", "rlvr"]
_GRPO = "rl", "GRPO is the default of rl.algorithm"
VALUES: Mapping[tuple[str, ...], Mapping[str, Word]] = {
    ("preference", "loss"): {
        "dpo": ("sigmoid", "DPO's own loss"),
        "kto_pair": ("kto", "pairs become one desirable and one undesirable answer"),
        "cdpo": ("sigmoid", "with preference.label_smoothing"),
        "slic": ("hinge", "SLiC's loss"),
        "rpo": ("sigmoid", "with preference.sft"),
        **dict.fromkeys(_RL, ("rl.algorithm", "another key, with train.phase: rl")),
    },
    ("train", "phase"): {
        **dict.fromkeys(_PREFERENCE, ("preference", "the loss is preference.loss")),
        **dict.fromkeys(_RL, _GRPO),
        **dict.fromkeys(
            ("pt", "cpt", "pretraining", "continued_pretraining"), ("pretrain", "next-token loss on texts")
        ),
        **dict.fromkeys(("finetune", "fine_tuning", "instruct", "train"), ("sft", "the loss is of answers")),
        "lora": ("sft", "adapters are the section `lora`, in any phase"),
    },
    ("train", "loss"): {
        **dict.fromkeys(
            (*_PREFERENCE, "sigmoid", "hinge"), ("preference.loss", "another key, with train.phase: preference")
        ),
        **dict.fromkeys(_RL, ("rl.algorithm", "another key, with train.phase: rl")),
    },
    ("rl", "algorithm"): {
        **dict.fromkeys(_PREFERENCE, ("preference.loss", "another key, with train.phase: preference")),
        "ppo2": ("ppo", "with a critic"),
        "reinforce": ("rloo", "REINFORCE with a leave-one-out baseline"),
        "reinforce++": ("grpo", "with rl.advantage: batch"),
        "reinforce_plus_plus": ("grpo", "with rl.advantage: batch"),
    },
    ("rl", "rewards"): {
        **dict.fromkeys(
            ("accuracy", "accuracy_reward", "reasoning_accuracy_reward", "math_verify", "math_reward"),
            ("math", "it compares mathematical expressions"),
        ),
        "gsm8k": ("number", "it compares the last number"),
        **dict.fromkeys(("em", "exact", "string_match"), ("exact_match", "it compares the whole answer")),
        **dict.fromkeys(
            ("format_reward", "think_format_reward", "think_format"),
            ("format", "with a pattern for the whole completion"),
        ),
        **dict.fromkeys(
            ("soft_overlong", "soft_overlong_punishment", "get_soft_overlong_punishment"),
            ("rl.overlong", "a key of rl, in tokens"),
        ),
    },
    ("data", "on_long"): {
        **dict.fromkeys(("truncate", "right", "keep_start"), ("cut", "the beginning is kept")),
        **dict.fromkeys(("delete", "skip", "filter"), ("drop", "the row is left out")),
        "raise": ("error", "the run ends"),
    },
    ("train", "schedule"): {
        **dict.fromkeys(("cosine_with_restarts", "cosine_with_min_lr"), ("cosine", "it ends at train.min_lr, once")),
        **dict.fromkeys(("wsd", "warmup_stable_decay"), ("constant", "with train.warmup; there is no decay")),
        **dict.fromkeys(("constant_with_warmup", "fixed"), ("constant", "train.warmup applies to every schedule")),
    },
    ("optimizer", "states"): {
        **dict.fromkeys(("fp16", "float16", "16bit"), ("bf16", "16 bits are BF16 here")),
        **dict.fromkeys(("8bit", "adamw_8bit", "paged_adamw_8bit", "int8"), ("fp8", "8 bits with scales of groups")),
        **dict.fromkeys(("adam", "adamw", "adamw_torch", "adamw_torch_fused"), ("fp32", "the optimizer is AdamW")),
    },
    ("fp8", "recipe"): {
        **dict.fromkeys(("per_tensor", "current", "tensor"), ("tensorwise", "one scale a tensor")),
        **dict.fromkeys(("per_token", "per_row", "per_channel", "row", "rows"), ("rowwise", "one scale a row")),
        **dict.fromkeys(("deepseek", "deepgemm"), ("blockwise_1d", "DeepSeek-V3's casts")),
        **dict.fromkeys(("mx", "mxfp8_e4m3"), ("mxfp8", "blocks of 32")),
        **dict.fromkeys(("hybrid", "e4m3"), ("fp8.format", "a recipe says which values share a scale")),
        "none": ("off", "high precision"),
    },
}
"""Key -> value of another trainer -> Octavo's value."""

OBJECTIVES = frozenset({("train", "phase"), ("preference", "loss"), ("rl", "algorithm"), ("train", "loss")})
"""Keys whose values are objectives: short names, of which two different letters make another one."""


def key_of(section: str, name: str, valid: Collection[str]) -> Word | None:
    """Return Octavo's key for a key of another trainer in a section with these ``valid`` keys; "" is the top."""
    word = _form(name)
    if (component := COMPONENT_WORDS.get(word)) is not None:
        if component in valid:
            return component, "components have one name each"
        if section in ("", "model", "train"):
            return f"fp8.{component}", f"how it computes; model.freeze: [{component}] keeps its weights"
    if (scoped := IN_SECTION.get((section, word))) is not None:
        return scoped
    # Other trainers have one flat list of arguments, which may be written under any section.
    return KEYS.get(word) if word not in SEVERAL_MEANINGS or section in ("", "train") else None


def near_key(section: str, name: str, valid: Collection[str]) -> Word | None:
    """Return the key, of Octavo or translated, of which ``name`` is a typing error, or None."""
    scoped = {word: key for (at, word), key in IN_SECTION.items() if at == section}
    general = {word: key for word, key in KEYS.items() if word not in SEVERAL_MEANINGS}
    return _near(name, {**general, **scoped}, valid)


def without_counterpart(name: str) -> str:
    """Return what is true here instead of a key of another trainer that has no counterpart, or nothing."""
    return WITHOUT_COUNTERPART.get(_form(name), "")


def value_of(path: tuple[str, ...], value: object) -> Word | None:
    """Return Octavo's value for a value that another trainer has for the key at ``path``."""
    return _values(path).get(_form(value)) if isinstance(value, str) else None


def near_value(path: tuple[str, ...], value: str, valid: Collection[str]) -> Word | None:
    """Return the value, of Octavo or translated, of which ``value`` is a typing error, or None."""
    most = 1 if path in OBJECTIVES else 2
    here = {word: meaning for word, meaning in _values(path).items() if "." not in meaning[0]}
    # Among words that are equally near, those for this key come before those that belong to another.
    return _near(value, here, valid, most) or _near(value, _values(path), valid, most)


def component_of(name: str, valid: Collection[str] = ()) -> str | None:
    """Return Octavo's component for a name of another trainer; with ``valid``, for a typing error in either too."""
    meanings = {**{word: word for word in valid}, **COMPONENT_WORDS}
    word = typing_error(name, meanings) if valid else None
    return COMPONENT_WORDS.get(_form(name)) or (meanings[word] if word is not None else None)


def suggest(word: str, why: str) -> str:
    """Return the question whether a word was meant, with the reason after it."""
    return f"did you mean {word}{f' ({why})' if why else ''}?"


def _near(name: str, translations: Mapping[str, Word], valid: Collection[str], most: int = 2) -> Word | None:
    words = {**{word: (word, "") for word in valid}, **translations}
    word = typing_error(name, {word: meaning[0] for word, meaning in words.items()}, most)
    return words[word] if word is not None else None


def _values(path: tuple[str, ...]) -> Mapping[str, Word]:
    # A recipe is the same word for a component, in a rule, and as the codes of frozen weights.
    is_recipe = path[:1] == ("fp8",) and path[-1] in ("recipe", "candidates")
    return VALUES.get(("fp8", "recipe") if is_recipe or "load_in_fp8" in path else path, {})


def _form(name: str) -> str:
    return name.lower().replace("-", "_").replace(" ", "_")
