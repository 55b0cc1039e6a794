"""axolotl's YAML (read at its schema of October 2026): SFT, pretraining and preferences, full, LoRA or QLoRA."""

from __future__ import annotations

import math
import re

from octavo.base.hub import is_name
from octavo.base.recipe_specs import names_in_library
from octavo.importers.common import model_and_data, steps_and_schedule
from octavo.importers.common.draft import Draft, choice
from octavo.importers.frameworks import hf_trainer
from octavo.importers.frameworks.megatron import RING

NAME = "axolotl"
MARKS = ("base_model", "sequence_len", "sample_packing", "lora_target_linear", "datasets.*", "micro_batch_size",
         "pretraining_dataset.*", "rl", "adapter")  # fmt: skip
FIRST_WINS = False
_DEFAULTS = hf_trainer.Defaults(micro=1, schedule="cosine", epochs=1.0, save=None)
_RL = {"dpo": "sigmoid", "ipo": "ipo", "orpo": "orpo", "simpo": "simpo", "kto": "kto"}
_DPO = {name: name for name in ("sigmoid", "hinge", "ipo", "robust", "sigmoid_norm")}
_KERNELS = {"flash_attention": "flash_attention_2", "sdp_attention": "sdpa", "flex_attention": "flex",
            "eager_attention": "eager", "xformers_attention": "efficient"}  # fmt: skip
#: values of attn_implementation
_NAMED = {
    "flash_attention_2": "flash_attention_2", "flash_attention_3": "flash_attention_3", "sdpa": "sdpa",
    "flex_attention": "flex", "eager": "eager", "xformers": "efficient",
}  # fmt: skip
_LORA_KEYS = (
    "lora_r lora_alpha lora_dropout lora_target_linear lora_target_modules lora_target_parameters peft_use_dora "
    "peft_use_rslora lora_model_dir lora_modules_to_save lora_fan_in_fan_out peft_* lora_mlp_kernel lora_qkv_kernel "
    "lora_o_kernel"
)

NONE = {
    model_and_data.TEMPLATE_REASON: "chat_template chat_template_jinja datasets.*.chat_template datasets.*."
    "chat_template_jinja test_datasets.*.chat_template eot_tokens datasets.*.conversation",
    "config.json selects the model class": "model_type tokenizer_type tokenizer_config processor_type "
    "base_model_config base_model_ignore_patterns cls_model_config model_config.* processor_kwargs* "
    "tokenizer_use_mistral_common tokenizer_save_jinja_files tokenizer_use_fast tokenizer_legacy is_*_derived_model "
    "overrides_of_model_config*",
    "model code comes from Octavo or transformers; remote code is not loaded": "trust_remote_code "
    "datasets.*.trust_remote_code",
    "the tokenizer comes from the model folder": "special_tokens special_tokens.* tokens tokens.* "
    "added_tokens_overrides* resize_token_embeddings_to_32x mean_resizing_embeddings shrink_embeddings "
    "fix_untrained_tokens*",
    "layers and kernels are Octavo's (fp8.fuse), and the loss never materializes full logits": "plugins plugins.* "
    "liger_* cut_cross_entropy unsloth_* flash_attn_* flash_optimum lora_mlp_kernel lora_qkv_kernel lora_o_kernel "
    "llama4_linearized_experts flex_attn_compile_kwargs* use_kernels",
    "rows need no preprocessing; they are cached as Arrow (data.cache)": "dataset_* shuffle_merged_datasets "
    "skip_prepare_dataset shuffle_before_merging_datasets num_dataset_shards_to_save is_preprocess "
    "preprocess_iterable streaming_multipack_buffer_size total_num_tokens total_supervised_tokens "
    "push_dataset_to_hub hf_use_auth_token datasets.*.shards datasets.*.shards_idx datasets.*.preprocess_shards "
    "datasets.*.ds_type datasets.*.input_transform datasets.*.input_format pretraining_dataset.*.type",
    "the model's chat template replaces custom prompt formats; columns renames keys":
    "datasets.*.type.*",
    "roles and keys of messages are detected (role and content, from and value)": "datasets.*.message_* "
    "datasets.*.roles.* datasets.*.roles datasets.*.field_* datasets.*.template_thinking_key datasets.*.split_thinking "
    "datasets.*.drop_system_message test_datasets.*.message_* test_datasets.*.field_* test_datasets.*.roles.*",
    "the assistant's turns have loss, including their end token; weight: 0 removes it from a turn":
    "datasets.*.roles_to_train datasets.*.train_on_eos roles_to_train train_on_eos",
    "adapters start with B = 0 and one learning rate; nothing else is trained": "lora_modules_to_save "
    "lora_fan_in_fan_out peft_init_lora_weights peft_layers_to_transform peft_layers_pattern peft_layer_replication "
    "peft_trainable_token_indices peft_ensure_weight_tying peft_autocast_adapter_dtype loraplus_* lora_on_cpu "
    "lora_rank_pattern lora_alpha_pattern qlora_sharded_model_loading loftq_config peft.* bnb_config_kwargs* "
    "merge_lora merge_method relora* jagged_* lisa_* lora_target_parameters",
    "bitsandbytes and GPTQ are not used": "gptq gptq_* quantize_moe_experts model_quantization_config*",
    "layers and kernels are Octavo's": "experts_implementation expert_backend use_scattermoe use_sonicmoe "
    "use_dsv4_kernels use_glm_dsa_kernels dsv4_* nvfp4_* gemma4_* moe_grouped_backend moe_dequant_chunk_size "
    "moe_bnb_fast nonexpert_quantization tiled_mlp* fused_attn_kernel sage_attention scaling_softmax* "
    "large_head_attention sdpa_varlen lora_embedding_kernel deepcompile torch_compile_options fp32_norm* "
    "use_onebitllms",
    "sharded weights stay on the GPU": "layer_offloading ple_cpu_offload experimental_skip_move_to_device",
    "parallel.expert distributes experts": "expert_parallel_*",
    "optimizer.master: bf16+sr rounds BF16 weights stochastically": "optim_args.bf16_stochastic_round",
    "data.window determines how full packs are; each pack is a micro-batch": "sample_packing_* eval_sample_packing "
    "pad_to_sequence_len batch_flattening multipack_real_batches curriculum_sampling pretrain_multipack_* "
    "pretraining_sample_concatenation min_sample_len eval_sequence_len pad_to_multiple_of",
    "schedules only have train.min_lr, and there is one learning rate": "cosine_constant_lr_ratio lr_quadratic_warmup "
    "lr_div_factor lr_groups lr_groups.* lr_scheduler_kwargs* embedding_lr embedding_lr_scale torchdistx_path",
    "AdamW is the only optimizer": "dion_* qgalore_*",
    "not implemented": "use_eaft eaft_* dpo_loss_weights dpo_padding_free trainer_cls kd_* grokfast_* spectrum_* "
    "hatchery* nemo_gym_* mora* use_mora dense_mixer ebft* center_rewards_coefficient generate_samples "
    "num_generation_samples generation_* lm_eval_* datasets.*.step_separator datasets.*.train_on_last_step_only "
    "datasets.*.max_completion_length role_boundaries* profiler_steps_start gc_collect_steps use_pose pose_* "
    "neftune_noise_alpha s2_attention unfrozen_parameters reward_model process_reward_model num_labels qat* "
    "quantization* llmcompressor* diffusion* trl.* vllm.* dpo_use_weighting dpo_use_logits_to_keep cpo_alpha rpo_alpha "
    "loss_watchdog_* gc_steps do_bench_eval bench_* eval_table_size eval_max_new_tokens do_causal_lm_eval "
    "eval_causal_lm_metrics profiler_steps dynamic_checkpoint* adam_epsilon2 adam_beta3 batch_size "
    "chunked_cross_entropy* image_resize_algorithm skip_move_to_device",
    "set in the tracker's environment variables": "swanlab_* trackio_* hf_mlflow_* use_otel_metrics otel_* wandb_* "
    "mlflow_* comet_* use_comet gradio_*",
    "octavo plan FILE --card 24GB plans memory before the run": "max_memory* gpu_memory_limit device device_map",
    "there is one process group, started by --nproc or torchrun": "use_ray ray_* resources_per_worker* world_size ddp",
}  # fmt: skip
SAME = {
    "unknown keys are always errors": "strict",
    "weights are loaded shard by shard": "low_cpu_mem_usage",
    "FSDP2 shards over all ranks (parallel.shard, parallel.replicate)": "fsdp_version dp_shard_size dp_replicate_size",
    "train.precision sets the precision": "float16 float32 embeddings_skip_upcast",
    "written with each checkpoint": "save_safetensors save_first_step axolotl_config_path",
    "metrics.jsonl has tokens per second": "include_tkps",
    "the loss never materializes full logits": "dpo_use_liger_kernel",
}


def translate(draft: Draft) -> None:
    world = steps_and_schedule.count_processes(draft)
    for key in ("reward_model", "process_reward_model", "kd_trainer"):
        if draft.flag(key):
            draft.refuse(key, "reward models and distillation are not implemented")
    if other := draft.keys_under("diffusion."):
        draft.refuse(other[0], "a text diffusion model is not an autoregressive model")
    path = model_and_data.set_model_path(draft, "base_model")
    if draft.flag("reinit_weights"):
        draft.set("model.init", "random", "reinit_weights")
    if revision := draft.text("revision_of_model"):
        draft.set("model.revision", revision, "revision_of_model")
    has_tower = model_and_data.has_vision(draft, path)
    phase = _translate_phase(draft)
    packed = model_and_data.translate_packing(draft, phase, "sample_packing")
    # Plugins for losses and kernels have equivalents; any other plugin is reported by the table.
    if all(re.search("liger|cut_cross_entropy", word, re.IGNORECASE) for word in draft.words("plugins")):
        why = "the loss never materializes full logits, and norms are fused where that is faster (fp8.fuse)"
        draft.mark_default("plugins", why=why)
    _mark_trained_turns(draft)
    lora = _translate_adapters(draft, has_tower)
    _translate_attention(draft, packed)
    _translate_data(draft, phase)
    context = _translate_context_parallel(draft, packed)
    packed = packed or context > 1
    _translate_steps(draft, max(1, world // (context * _tensor_parallel_size(draft))), packed)
    expert = steps_and_schedule.positive_count(draft, "expert_parallel_size") or 1
    if expert > 1 and not lora and phase != "preference":
        draft.set("parallel.expert", expert, "expert_parallel_size")
    elif expert == 1:
        draft.mark_default("expert_parallel_size", why="experts are sharded by FSDP2")
    if phase != "preference":
        draft.set("train.loss", "token", why="mean over the tokens of the whole step")
    hf_trainer.set_optimizer(draft, _DEFAULTS, "optimizer")
    _translate_precision(draft, lora)
    _translate_recompute(draft)
    _translate_saving(draft, world)
    hf_trainer.set_sharding(draft)
    _translate_fp8(draft, lora)
    if not lora:
        draft.mark_many("dead", {"adapter is empty, so there are no adapters": _LORA_KEYS})
    if phase != "preference":
        draft.mark_many("dead", {"rl is empty, so there is no preference loss": "precompute_ref_log_probs "
        "dpo_loss_type rl_beta orpo_alpha simpo_gamma cpo_alpha rpo_alpha dpo_label_smoothing kto_desirable_weight "
        "kto_undesirable_weight max_prompt_len"})  # fmt: skip
    draft.mark_many("none", NONE)
    draft.mark_many("default", SAME)
    hf_trainer.mark_remaining(draft)


def _mark_trained_turns(draft: Draft) -> None:
    """Report the turns that have loss if they are Octavo's default."""
    for at in ("", *(f"{entry}." for entry in draft.list_entries("datasets"))):
        for key, default in (("roles_to_train", "assistant"), ("train_on_eos", "turn")):
            if draft.words(f"{at}{key}") == [default]:
                draft.mark_default(f"{at}{key}", why="the assistant's turns have loss, including their end token")


def _translate_phase(draft: Draft) -> str:
    word = draft.text("rl")
    if word in (None, "false", "none"):
        phase = "pretrain" if draft.keys_under("pretraining_dataset") else "sft"
        draft.set("train.phase", phase)
        return phase
    if word not in _RL:
        draft.refuse("rl", "only SFT and preference runs are; for GRPO and related methods see phase rl (docs/rl.md)")
    draft.set("train.phase", "preference", "rl")
    draft.set("preference.loss", _RL[word], "rl")
    # Three keys set beta, in this order of precedence.
    betas = [key for key in ("trl.beta", "rl_beta", "orpo_alpha") if draft.has(key)]
    draft.set("preference.beta", draft.number(betas[0]) if betas else 0.1, *betas[:1])
    draft.mark_ignored(*betas[1:], why=f"{betas[0] if betas else ''} takes precedence in axolotl if both are set")
    if word == "simpo":
        draft.set("preference.gamma", 0.5 if (g := draft.number("simpo_gamma")) is None else g, "simpo_gamma")
        why = "TRL's SimPO trainer adds cross-entropy on the chosen answers with weight 1 unless cpo_alpha is set"
        draft.set("preference.sft", 1.0 if (a := draft.number("cpo_alpha")) is None else a, "cpo_alpha", why=why)
    if draft.flag("precompute_ref_log_probs"):
        why = "computed once, before the first step"
        draft.set("preference.reference", "disk", "precompute_ref_log_probs", why=why)
    if word == "dpo":
        if kinds := draft.words("dpo_loss_type"):
            if len(kinds) > 1 or kinds[0] not in _DPO:
                why = "one loss per run: sigmoid, hinge, ipo, robust or sigmoid_norm"
                draft.mark_unsupported("dpo_loss_type", why=why)
            if kinds[0] in _DPO:
                draft.set("preference.loss", _DPO[kinds[0]], "dpo_loss_type")
        if (share := draft.number("rpo_alpha")) is not None:
            draft.set("preference.sft", share, "rpo_alpha", why="adds cross-entropy on the chosen answers to the loss")
        if label_smoothing := draft.number("dpo_label_smoothing"):
            draft.set("preference.label_smoothing", label_smoothing, "dpo_label_smoothing")
    if word == "kto":
        for key in ("kto_desirable_weight", "kto_undesirable_weight"):
            if (weight := draft.number(key)) is not None:
                draft.set(f"preference.{key.removeprefix('kto_')}", weight, key)
    return "preference"


def _translate_adapters(draft: Draft, has_tower: bool) -> bool:
    word = draft.text("adapter")
    bits = 4 if draft.flag("load_in_4bit") else 8 if draft.flag("load_in_8bit") else None
    draft.mark_default(*[key for key in ("load_in_4bit", "load_in_8bit") if draft.flag(key) is False], why="off")
    if word is None:
        if has_tower and draft.flag("freeze_mm_modules"):
            frozen_components = model_and_data.COMPONENTS[:2]
            model_and_data.set_freeze(draft, dict.fromkeys(frozen_components, ("freeze_mm_modules",)))
        elif draft.flag("freeze_mm_modules"):
            draft.mark_ignored("freeze_mm_modules", why="a text model has no vision tower or projector")
        draft.mark_default(*(["freeze_mm_modules"] if not draft.flag("freeze_mm_modules") else []), why="off")
        return False
    if word not in ("lora", "qlora"):
        draft.mark_unsupported("adapter", why=f"{word} adapters are not implemented; LoRA is used instead")
    else:
        draft.mark_default("adapter", why="the lora section enables it")
    if bits or word == "qlora":
        model_and_data.set_quantized_base(draft, "load_in_8bit" if bits == 8 else "load_in_4bit", bits or 4)
    rank = draft.integer("lora_r", 8)
    targets = draft.words("lora_target_modules")
    all_linear = draft.flag("lora_target_linear") or "all-linear" in targets or not targets
    keys = {"rank": "lora_r", "alpha": "lora_alpha", "dropout": "lora_dropout"}
    keys["targets"] = "lora_target_linear" if draft.flag("lora_target_linear") else "lora_target_modules"
    # PEFT takes one regular expression in place of names; Octavo has globs.
    pattern = len(targets) == 1 and re.search(r"[\\^$|()]", targets[0])
    if pattern:
        draft.mark_unsupported(
            "lora_target_modules", why="a regular expression: the language model's layers are used instead; write globs"
        )
    only_language_model = draft.flag("freeze_mm_modules")
    adapts_towers = has_tower and not only_language_model and not pattern
    components = ["foundation", "image_encoder", "image_projector"] if adapts_towers else ["foundation"]
    why = "only the language model gets adapters" if only_language_model else "off"
    draft.mark_default("freeze_mm_modules", why=why)
    chosen = components if all_linear or pattern else targets
    alpha = draft.number("lora_alpha", 16)
    exclude = model_and_data.COMPONENTS[:2] if has_tower and only_language_model and not all_linear else ()
    model_and_data.set_lora(draft, rank, alpha, draft.number("lora_dropout", 0.0), chosen, keys=keys, exclude=exclude)
    model_and_data.set_lora_variants(draft, keys, "peft_use_rslora", "peft_use_dora")
    if adapter := draft.text("lora_model_dir"):
        draft.set("lora.adapter", draft.path(adapter), "lora_model_dir")
    return True


def _translate_attention(draft: Draft, packed: bool) -> None:
    model_and_data.set_attention_kernel(draft, "attn_implementation", _NAMED, packed)
    for key, kernel in _KERNELS.items():
        if draft.flag(key):
            model_and_data.set_attention(draft, key, kernel, packed)
        else:
            draft.mark_default(key, why="off")


def _translate_data(draft: Draft, phase: str) -> None:
    section = "pretraining_dataset" if phase == "pretrain" else "datasets"
    if phase == "pretrain" and (single := draft.text("pretraining_dataset")):
        model_and_data.add_dataset(draft, "train", 0, single, "pretraining_dataset")
    for group, name in (("train", section), ("eval", "test_datasets")):
        for number, at in enumerate(draft.list_entries(name)):
            _add_dataset_entry(draft, group, number, f"{at}.", phase)
    streaming, trained = draft.flag("streaming"), len(draft.list_entries(section))
    if streaming or (phase == "pretrain" and streaming is None):
        for number in range(max(trained, 1)):
            if f"data.train.{number}.path" in draft.settings:
                why = "" if streaming else "axolotl streams pretraining rows"
                model_and_data.set_streaming(draft, f"data.train.{number}", "streaming", why)
    else:
        draft.mark_default("streaming", why="rows are read into the cache")
    template_args = draft.mapping("chat_template_kwargs")
    if template_args:
        keys = draft.keys_under("chat_template_kwargs.")
        draft.set("data.template_args", template_args, "chat_template_kwargs", *keys)
        draft.add_note("data.template_args: remove variables that the model's chat template does not read")
    if "data.train.0.path" not in draft.settings:
        draft.set("data.train.0.path", "/path/to/data.json", why="FILL IN: no key names training data")
        draft.add_note("FILL IN: set data.train")
    draft.set("train.seq_length", draft.integer("sequence_len") or 512, "sequence_len")
    # axolotl's default is to drop long rows.
    excess = (draft.text("excess_length_strategy") or "drop").lower()
    on_long = {"drop": "drop", "truncate": "cut", "raise": "error"}.get(excess, "drop")
    draft.set("data.on_long", on_long, "excess_length_strategy")
    if draft.flag("train_on_inputs") and phase == "sft":
        draft.set("data.train_on_prompt", True, "train_on_inputs")
    else:
        draft.mark_default("train_on_inputs", why="only answers have loss")
    if system := draft.text("default_system_message"):
        draft.set("data.system", system, "default_system_message")
    if share := draft.number("val_set_size"):
        why = f"Octavo does not split off evaluation rows ({share:g}); set data.eval"
        draft.mark_unsupported("val_set_size", why=why)
    else:
        draft.mark_default("val_set_size", why="no rows are split off for evaluation")
    if (size := draft.integer("image_size")) is not None:
        draft.set("data.max_pixels", size * size, "image_size", why="image_size squared: Octavo keeps the aspect ratio")


def _add_dataset_entry(draft: Draft, group: str, number: int, at: str, phase: str) -> None:
    files = draft.words(f"{at}data_files")
    path = files[0] if files else draft.text(f"{at}path")
    if path is None:
        return
    entry = model_and_data.add_dataset(draft, group, number, path, f"{at}path", f"{at}data_files")
    if len(files) > 1:
        draft.mark_unsupported(
            f"{at}data_files", why=f"{len(files)} files: add one entry of data.{group} per file, or name their folder"
        )
    # Rows of the first data set convert fractions of the run to steps.
    if group == "train" and number == 0 and draft.num_rows is None:
        draft.num_rows = steps_and_schedule.count_rows(draft, path)
    kind = draft.text(f"{at}type") or ""
    layout = {"alpaca": "alpaca", "completion": "text", "pretrain": "text"}.get(kind.partition(".")[0])
    mapping = draft.mapping(f"{at}message_property_mappings")
    field = draft.text(f"{at}field_messages")
    if kind.startswith("chat_template"):
        layout = "sharegpt" if mapping.get("role") == "from" else "messages" if mapping.get("role") == "role" else None
    if layout == "text" and phase != "pretrain":
        draft.mark_unsupported(f"{at}type", why="completion is plain text; use train.phase: pretrain")
    elif layout and phase != "preference":
        draft.set(f"{entry}.format", layout, f"{at}type")
    else:
        draft.mark_default(f"{at}type", why="the layout of rows is detected (docs/data.md)")
    target = "conversations" if layout == "sharegpt" else "messages"
    if phase != "preference" and field and field != target:
        draft.set(f"{entry}.columns", {target: field}, f"{at}field_messages")
    if (text := draft.text(f"{at}field") or draft.text(f"{at}text_column")) and text != "text":
        draft.set(f"{entry}.columns", {"text": text}, f"{at}field", f"{at}text_column")
    split = draft.text(f"{at}split")
    if split and "[" in split:
        draft.mark_unsupported(
            f"{at}split", why=f"part of a split ({split}); data.{group}.{number}.max_samples takes the first rows"
        )
        split = split.partition("[")[0]
    hub = is_name(path, draft.root)
    for source, value in (
        ("split", split),
        ("name", draft.text(f"{at}name")),
        ("revision", draft.text(f"{at}revision")),
    ):
        if value and hub:
            draft.set(f"{entry}.{'subset' if source == 'name' else source}", value, f"{at}{source}")
        elif value:
            draft.mark_ignored(f"{at}{source}", why="local files do not have this property")
    if skip := draft.integer(f"{at}skip"):
        draft.mark_unsupported(f"{at}skip", why=f"skipping {skip} rows is not implemented; remove them from the file")


def _translate_context_parallel(draft: Draft, packed: bool) -> int:
    key = "context_parallel_size" if draft.has("context_parallel_size") else "sequence_parallel_degree"
    size = steps_and_schedule.positive_count(draft, key) or 1
    draft.read_keys.update(("context_parallel_size", "sequence_parallel_degree"))
    if size == 1:
        draft.mark_default(key, why="rows are not split across ranks")
        draft.mark_ignored("ring_attn_func", "heads_k_stride", why=f"{key} is 1, so rows are not split across ranks")
        return 1
    draft.set("parallel.context", size, key, why=RING)
    draft.mark_unsupported("ring_attn_func", "heads_k_stride", why=RING)
    if not packed:
        draft.set("data.packing", True, why="context parallelism needs packed rows")
    return size


def _tensor_parallel_size(draft: Draft) -> int:
    """Return the ranks that share each layer. They see the same rows, so they do not multiply the batch."""
    size = steps_and_schedule.positive_count(draft, "tensor_parallel_size") or 1
    why = "tensor parallelism is not implemented; FSDP2 shards layers instead (parallel.shard: auto)"
    (draft.mark_unsupported if size > 1 else draft.mark_default)("tensor_parallel_size", why=why if size > 1 else "1")
    return size


def _translate_warmup(draft: Draft, ranks: int) -> None:
    """Translate the warm-up; axolotl's default is 0.03 of the steps, at most 100."""
    if draft.has("warmup_steps") or draft.has("warmup_ratio"):
        steps_and_schedule.set_warmup(draft, ranks, "warmup_steps", "warmup_ratio", int)
    elif (whole := steps_and_schedule.total_steps(draft, ranks)) is None:
        draft.add_note("FILL IN: set train.warmup; the framework's default is 0.03 of the steps, at most 100")
    elif steps := min(int(0.03 * whole), 100):
        draft.set("train.warmup", steps, why="the framework's default: 0.03 of the steps, at most 100")


def _translate_steps(draft: Draft, ranks: int, packed: bool) -> None:
    micro = steps_and_schedule.positive_count(draft, "micro_batch_size") or 1
    accumulation = steps_and_schedule.positive_count(draft, "gradient_accumulation_steps")
    total = draft.integer("batch_size")
    if accumulation is None:
        accumulation = max(1, total // micro) if total else 1  # in axolotl batch_size is per process
    keys = ["micro_batch_size", "gradient_accumulation_steps"]
    if total and not draft.has(keys[1]):
        keys[1] = "batch_size"
    steps_and_schedule.set_batch_size(draft, micro, accumulation, ranks, *keys, packed=packed)
    epochs = draft.number("num_epochs")
    steps_and_schedule.set_length(
        draft, draft.integer("max_steps"), 1.0 if epochs is None else epochs, "max_steps", "num_epochs"
    )
    draft.set("train.lr", draft.number("learning_rate", 5e-5), "learning_rate")
    kind = steps_and_schedule.set_schedule(draft, "lr_scheduler", "cosine")
    min_lr_ratio = draft.number("cosine_min_lr_ratio")
    if min_lr_ratio is not None and kind == "cosine":
        min_lr = min_lr_ratio * draft.settings["train.lr"].value
        draft.set("train.min_lr", min_lr, "cosine_min_lr_ratio", why=f"{min_lr_ratio:g} x lr")
    elif min_lr_ratio is not None:
        draft.mark_ignored("cosine_min_lr_ratio", why="only used with a cosine schedule")
    _translate_warmup(draft, ranks)
    if (clip := draft.number("max_grad_norm")) is not None:
        draft.set("train.clip", clip, "max_grad_norm")
    if (word := draft.text("torch_compile")) in ("true", "auto"):
        if packed:
            why = "samples end at different positions in each pack, so every pack would be recompiled"
            draft.mark_unsupported("torch_compile", why=why)
        else:
            draft.set("train.compile", True, "torch_compile")
    elif word:
        draft.mark_default("torch_compile", why="off")
    if (coefficient := draft.number("router_aux_loss_coef")) is not None:
        draft.set("train.router_aux_loss_coef", coefficient, "router_aux_loss_coef")


def _translate_precision(draft: Draft, lora: bool) -> None:
    word = draft.text("bf16")
    if draft.flag("bfloat16"):
        why = "no AMP: BF16 weights, which Octavo rounds stochastically"
        draft.set("optimizer.master", "bf16+sr", "bfloat16", why=why)
        if lora:
            draft.set("lora.dtype", "bf16", "bfloat16")
    if word in ("auto", "full"):
        draft.set("train.precision", "auto" if word == "auto" else "bf16", "bf16")
        draft.mark_default("fp16", why="bf16 takes precedence")
    else:
        hf_trainer.set_precision(draft, lora)


def _translate_recompute(draft: Draft) -> None:
    word = draft.text("gradient_checkpointing")
    if word in ("offload", "offload_disk"):
        draft.set("train.recompute", "full", "gradient_checkpointing", why="Octavo keeps block inputs on the GPU")
    elif "train.recompute" not in draft.settings:
        hf_trainer.set_recompute(draft, _DEFAULTS)
    selective = [key for key in draft.source_keys if key.partition(".")[0] == "selective_checkpointing"]
    if selective and draft.text(selective[0]) != "false":
        why = "Octavo recomputes cheap operations instead of the listed ones"
        draft.set("train.recompute", "selective", *selective, why=why)
    if draft.text("activation_offloading") in (None, "false"):
        draft.mark_default("activation_offloading", *selective, why="off")
    elif draft.settings["train.recompute"].value == "full":
        why = "full recomputation leaves almost nothing to offload; use it with recompute: selective"
        draft.mark_unsupported("activation_offloading", why=why)
    else:
        draft.set("train.offload_activations", True, "activation_offloading")


def _translate_saving(draft: Draft, world: int) -> None:
    for target, key, times in (("run.save_every", "saves_per_epoch", draft.integer("saves_per_epoch")),
                               ("run.eval_every", "evals_per_epoch", draft.integer("evals_per_epoch"))):  # fmt: skip
        if not times:
            continue
        # Octavo counts steps, so the length of an epoch must be known.
        epoch_steps = steps_and_schedule.steps_per_epoch(draft, world)
        if target == "run.eval_every" and "data.eval.0.path" not in draft.settings:
            draft.mark_unsupported(key, why="the translated files have no evaluation data (data.eval)")
        elif epoch_steps is None:
            why = f"{target} is set in steps, and the steps per epoch are unknown: set --rows N, or set {target}"
            draft.mark_unsupported(key, why=why)
        else:
            draft.set(target, max(1, math.ceil(epoch_steps / times)), key, why=f"{epoch_steps} steps per epoch")
    hf_trainer.set_saving(draft, _DEFAULTS, world)
    if draft.flag("auto_resume_from_checkpoints"):
        draft.set("run.resume", "auto", "auto_resume_from_checkpoints")
    named = {"wandb": "wandb_project", "mlflow": "mlflow_tracking_uri", "swanlab": "swanlab_project",
             "trackio": "trackio_project_name"}  # fmt: skip
    uses = {name: draft.flag(f"use_{name}") for name in named}
    names = [name for name, key in named.items() if uses[name] or (uses[name] is None and draft.text(key))]
    if names:
        keys = [key for name in names for key in (named[name], f"use_{name}")]
        draft.set("run.trackers", names, *keys, why="the tracker's environment variables set the project")
    draft.mark_default(*[f"use_{name}" for name in named if uses[name] is False], why="off")
    if draft.flag("use_tensorboard") is not None:
        draft.set("run.tensorboard", bool(draft.flag("use_tensorboard")), "use_tensorboard")


def _translate_fp8(draft: Draft, lora: bool) -> None:
    gather = "fp8_enable_fsdp_float8_all_gather"
    if not draft.flag("fp8"):
        draft.mark_default("fp8", why="off")
        draft.mark_ignored(gather, "fp8_config.recipe", why="fp8 is off, without which this key has no effect")
        model_and_data.disable_fp8_if_unset(draft)
        return
    recipe = choice(draft, "fp8_config.recipe", names_in_library("torchao")) or "tensorwise"
    draft.set("fp8.recipe", recipe, "fp8", "fp8_config.recipe", why="torchao; one scale per tensor by default")
    if draft.text("fp8_config.recipe") == "rowwise_with_gw_hp":
        draft.set("fp8.wgrad", "bf16", "fp8_config.recipe")
    if draft.flag(gather) and not lora:
        draft.set("fp8.param", True, gather, why="FSDP2 gathers FP8 codes")
    else:
        draft.mark_default(gather, why="weights are gathered in their storage dtype")
