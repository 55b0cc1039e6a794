"""Words of other trainers, and what Octavo calls the same thing: keys, and values of single keys.

Each entry is (Octavo's word, why), and a suggestion always says both: a near spelling may train something else, as
`ipo` does for who writes `dpo`. So a translation comes before a near spelling, and among objectives near spellings have
to be nearly equal (:data:`OBJECTIVES`).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

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
    **_all("bf16 fp16 mixed_precision torch_dtype", "train.precision"),
    **_all("torch_compile", "train.compile"),
    **_all("stage task objective", "train.phase", "pretrain, sft, preference or rl"),
    **_all("output_dir save_dir run_dir", "run.dir"),
    **_all("logging_steps log_interval", "run.log_every"),
    **_all("save_steps save_interval save_freq", "run.save_every"),
    **_all("eval_steps eval_interval", "run.eval_every"),
    **_all("save_total_limit", "run.keep"),
    **_all("resume_from_checkpoint", "run.resume"),
    **_all("report_to logger loggers", "run.trackers"),
    **_all("model_name_or_path model_name base_model pretrained", "model.path"),
    **_all("load_in_8bit load_in_4bit quantization_bit", "model.load_in_fp8", "8 bits are FP8 codes here"),
    **_all("attn_implementation flash_attn flash_attention", "model.attention"),
    **_all("freeze_vision_tower freeze_vit freeze_vision_model", "model.freeze: [image_encoder]"),
    **_all("freeze_multi_modal_projector freeze_aligner", "model.freeze: [image_projector]"),
    **_all("freeze_language_model freeze_llm", "model.freeze: [foundation]"),
    **_all("lora_rank lora_r r", "lora.rank"),
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
    **_all("truncation_strategy truncation_mode excess_length_strategy", "data.on_long", "drop, cut or error"),
    **_all("num_generations num_samples_per_prompt n_samples_per_prompt rollout_n", "rl.group",
           "completions for one prompt"),
    **_all("max_completion_length max_response_length response_length", "rl.max_new_tokens"),
    **_all("num_iterations ppo_epochs", "rl.epochs"),
    **_all("epsilon cliprange clip_ratio", "rl.clip_low", "and rl.clip_high for the other side"),
    **_all("kl_coef init_kl_coef", "rl.kl"),
    **_all("reward_funcs reward_functions reward_fn", "rl.rewards"),
    **_all("loss_type pref_loss", "preference.loss"),
    **_all("loss", "preference.loss", "of phase preference; train.loss is how losses of tokens are averaged"),
    **_all("pref_beta dpo_beta", "preference.beta"),
    **_all("rpo_alpha pref_ftx", "preference.sft", "the weight of the loss of the chosen answer"),
    **_all("optim optimizer_type", "optimizer.states", "the optimizer is AdamW; states chooses how moments are stored"),
    **_all("adam_beta1 adam_beta2", "optimizer.betas", "both in one list"),
    **_all("adam_epsilon", "optimizer.eps"),
    **_all("context_parallel_size cp_size", "parallel.context"),
    **_all("expert_model_parallel_size ep_size", "parallel.expert"),
}  # fmt: skip
"""Key of another trainer, at the top or in the section of Octavo's key -> Octavo's key."""

IN_SECTION: Mapping[tuple[str, str], Word] = {
    **{
        ("rl", word): ("rl.clip_low", "the lower side; the upper one is rl.clip_high")
        for word in ("epsilon", "epsilon_low")
    },
    ("rl", "epsilon_high"): ("rl.clip_high", ""),
    ("rl", "beta"): ("rl.kl", "the weight of the KL term"),
    **{("rl", word): ("rl.value_weight", "of the critic's loss") for word in ("value_coef", "vf_coef")},
    ("rl", "loss_type"): ("rl.algorithm", "it names the loss too"),
    ("optimizer", "epsilon"): ("optimizer.eps", ""),
    ("optimizer", "dtype"): ("optimizer.states", "how moments are stored"),
    ("model", "dtype"): ("train.precision", "weights are kept as optimizer.master says"),
    ("train", "dtype"): ("train.precision", ""),
    ("train", "mini_batch_size"): ("rl.mini_batches", "the number of updates for one batch of completions"),
    ("parallel", "stage"): ("parallel.shard", "sharding is FSDP2's, as in ZeRO-3"),
}
"""(Section, key of another trainer) -> Octavo's key, where the same word means other things elsewhere."""

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

_GRPO = "rl", "GRPO is the default of rl.algorithm"
VALUES: Mapping[tuple[str, ...], Mapping[str, Word]] = {
    ("preference", "loss"): {
        "dpo": ("sigmoid", "DPO's own loss"),
        "kto_pair": ("kto", "pairs become one desirable and one undesirable answer"),
        "cdpo": ("sigmoid", "with preference.label_smoothing"),
        "slic": ("hinge", "SLiC's loss"),
        "rpo": ("sigmoid", "with preference.sft"),
    },
    ("train", "phase"): {
        **dict.fromkeys(("dpo", "ipo", "orpo", "simpo", "kto", "cpo"), ("preference", "the loss is preference.loss")),
        **dict.fromkeys(("grpo", "ppo", "rloo", "rlhf", "rlvr", "dapo", "gspo"), _GRPO),
        **dict.fromkeys(
            ("pt", "cpt", "pretraining", "continued_pretraining"), ("pretrain", "next-token loss on texts")
        ),
        **dict.fromkeys(("finetune", "fine_tuning", "instruct", "train"), ("sft", "the loss is of answers")),
        "lora": ("sft", "adapters are the section `lora`, in any phase"),
    },
    ("train", "loss"): dict.fromkeys(
        ("dpo", "ipo", "orpo", "simpo", "kto", "cpo", "sigmoid", "hinge"),
        ("preference.loss", "another key, with train.phase: preference"),
    ),
    ("rl", "algorithm"): {
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
        **dict.fromkeys(("8bit", "adamw_8bit", "paged_adamw_8bit", "int8"), ("fp8", "8 bits with scales of groups")),
        **dict.fromkeys(("adam", "adamw", "adamw_torch", "adamw_torch_fused"), ("fp32", "the optimizer is AdamW")),
    },
    ("fp8", "recipe"): {
        **dict.fromkeys(("per_tensor", "current", "tensor"), ("tensorwise", "one scale a tensor")),
        **dict.fromkeys(("per_token", "per_row", "per_channel", "row"), ("rowwise", "one scale a row")),
        **dict.fromkeys(("deepseek", "deepgemm"), ("blockwise_1d", "DeepSeek-V3's casts")),
        **dict.fromkeys(("mx", "mxfp8_e4m3"), ("mxfp8", "blocks of 32")),
        "none": ("off", "high precision"),
    },
}
"""Key -> value of another trainer -> Octavo's value."""

OBJECTIVES = frozenset({("train", "phase"), ("preference", "loss"), ("rl", "algorithm"), ("train", "loss")})
"""Keys whose values are objectives."""


def key_of(section: str, name: str, valid: Collection[str]) -> Word | None:
    """Return Octavo's key for a key of another trainer in a section with these ``valid`` keys; "" is the top."""
    word = _form(name)
    if (component := COMPONENT_WORDS.get(word)) is not None and component in valid:
        return component, "components have one name each"
    if (scoped := IN_SECTION.get((section, word))) is not None:
        return scoped
    general = KEYS.get(word)
    # Trainers with one flat list of arguments: they are written at the top, or all under `train`.
    return general if general is not None and section in ("", "train", general[0].partition(".")[0]) else None


def value_of(path: tuple[str, ...], value: object) -> Word | None:
    """Return Octavo's value for a value that another trainer has for the key at ``path``."""
    if not isinstance(value, str):
        return None
    # A recipe is the same word for a component and in a rule.
    key = ("fp8", "recipe") if path[:1] == ("fp8",) and path[-1] in ("recipe", "candidates") else path
    return VALUES.get(key, {}).get(_form(value))


def component_of(name: str) -> str | None:
    """Return Octavo's component for a name of another trainer."""
    return COMPONENT_WORDS.get(_form(name))


def suggest(word: str, why: str) -> str:
    """Return the question whether a word was meant, with the reason after it."""
    return f"did you mean {word}{f' ({why})' if why else ''}?"


def _form(name: str) -> str:
    return name.lower().replace("-", "_").replace(" ", "_")
