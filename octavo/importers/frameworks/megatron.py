"""Megatron's arguments: launch flags of LoongForge, ``gpt_args`` of MindSpeed-MM, and flags of ms-swift's
`megatron sft`. Covers parallel sizes, steps, optimizer, checkpoints, FP8, and flags such as `no_load_optim`."""

from __future__ import annotations

import math
from dataclasses import dataclass

from octavo.base.recipe_specs import names_in_library
from octavo.importers.common import steps_and_schedule
from octavo.importers.common.draft import Draft, choice
from octavo.importers.common.prefixed_keys import PrefixedDraft

RECIPES = names_in_library("Megatron")
WHY_RECIPE = {"blockwise_1d": "its blocks are 1x128 in wgrad; `blockwise`, with x in 128x128, has a faster wgrad"}
_STATES = {"fp32": "fp32", "bf16": "bf16", "fp8": "fp8", "fp16": None}

#: the effect of these flags on loading in Megatron
NO_LOAD_OPTIM = (
    "the states of the optimizer (and in Megatron of the schedule) are not loaded and start again, while the "
    "iteration count continues; no effect without a checkpoint to load"
)
NO_LOAD_RNG = "RNG states are not loaded from the checkpoint; no effect without one"

NONE = {
    "tensor and pipeline parallelism are not implemented: FSDP2 shards layers instead (parallel.shard)":
    "sequence_parallel tp_comm_overlap* num_layers_per_virtual_pipeline_stage num_virtual_stages_per_pipeline_rank "
    "microbatch_group_size_per_virtual_pipeline_stage decoder_first_pipeline_num_layers pipeline_model_parallel_layout "
    "decoder_last_pipeline_num_layers encoder_tensor_model_parallel_size encoder_pipeline_model_parallel_size "
    "use_tp_pp_dp_mapping custom_pipeline_* virtual_pipeline_model_parallel_size microbatch_group_size_per_vp_stage "
    "account_for_* batch_p2p_comm expert_tensor_parallel_size",
    "routing comes from the model's config.json": "moe_router_* moe_token_drop_policy moe_expert_capacity_factor "
    "moe_pad_expert_input_to_capacity moe_z_loss_coeff moe_shared_expert_overlap moe_layer_recompute num_experts "
    "moe_layer_freq moe_ffn_hidden_size moe_shared_expert_intermediate_size",
    "for Megatron's expert dispatch; parallel.expert distributes experts": "moe_token_dispatcher_type "
    "moe_enable_deepep moe_permute_fusion moe_use_upcycling empty_unused_memory_level use_fused_moe*",
    "the architecture comes from the model's config.json":
    "num_layers hidden_size ffn_hidden_size num_attention_heads group_query_attention num_query_groups "
    "max_position_embeddings position_embedding_type rotary_* mrope_* swiglu normalization norm_epsilon "
    "untie_embeddings_and_output_weights disable_bias_linear add_qkv_bias kv_channels qk_layernorm transformer_impl "
    "multi_latent_attention q_lora_rank kv_lora_rank qk_head_dim qk_pos_emb_head_dim vocab_size padded_vocab_size "
    "make_vocab_size_divisible_by attention_dropout hidden_dropout vocab_size_in_config_file "
    "original_max_position_embeddings v_head_dim add_position_embedding add_bias_linear model_type "
    "use_rotary_position_embeddings no_position_embedding vocab_file merge_file",
    "weights come from the checkpoint": "perform_initialization data_parallel_random_init save_missing_weights "
    "init_method_std use_cpu_initialization init_model_with_meta_device no_initialization initialize_embedding",
    "layers come from transformers or Octavo, not from Megatron": "no_masked_softmax_fusion no_bias_* no_rope_fusion "
    "no_gradient_accumulation_fusion use_fused_* cross_entropy_* apply_query_key_layer_scaling use_mcore_models "
    "masked_softmax_fusion bias_*_fusion apply_rope_fusion gradient_accumulation_fusion te_rng_tracker "
    "apply_dsa_kernel_fusion mhc_* csa_* dsa_* engram_* use_fp32_dtype_for_param_pattern enable_experimental "
    "attention_softmax_in_fp32 no_persist_layer_norm enable_fa_within_mla",
    "checkpoints are in DCP format; all ranks read and write them": "ckpt_* auto_detect_ckpt_format "
    "exit_on_missing_checkpoint distrib_optim_* use_persistent_ckpt_worker dist_ckpt_* save_retain_interval",
    "FP4 and Muon are not implemented": "fp4_* muon_*",
    "multi-token prediction is not implemented: its layers and loss are omitted": "mtp_* num_nextn_predict_layers",
    "a non-finite loss stops the run": "no_check_for_nan_in_loss_and_grad check_*",
    "schedules are cosine, linear, constant and onecycle; weight decay is constant": "lr_wsd_* weight_decay_incr_style "
    "start_weight_decay end_weight_decay apply_wd_to_qk_layernorm",
    "FSDP2 overlaps communication automatically":
    "align_* nccl_comm_warmup use_megatron_fsdp strict_fsdp_dtensor_load accumulate_allreduce_grads_in_fp32 "
    "optimizer_cuda_graph overlap_* use_distributed_optimizer use_torch_fsdp2 fsdp2_config_path distributed_backend "
    "distributed_timeout_minutes ddp_* local_rank use_dist_ckpt data_parallel_sharding_strategy",
    "metrics.jsonl and TensorBoard logs are in the run directory": "tensorboard_* log_* no_log_* logging_level "
    "timing_log_level timing_log_option wandb_save_dir",
    "train.gc configures garbage collection": "manual_gc manual_gc_*",
    "the tokenizer and chat template come from the model folder": "tokenizer_type tokenizer_model hf_tokenizer_path "
    "hf_processor_path use_fast_tokenizer split_special_tokens padding_side additional_special_tokens",
    "octavo bench measures step times": "profile profile_* use_pytorch_profiler",
    "evaluation uses all rows of data.eval": "eval_iters",
    "not used by Octavo": "no_create_attention_mask_in_dataloader data_sharding cp_partition_mode "
    "sequence_packing_scheduler deterministic_mode sgd_momentum use_deter_comp main_grads_dtype main_params_dtype "
    "decoupled_lr decoupled_min_lr override_opt_param_scheduler use_checkpoint_opt_param_scheduler lr_warmup_init "
    "recompute_modules megatron_extra_kwargs",
}  # fmt: skip


@dataclass(frozen=True)
class Defaults:
    """Megatron's defaults; frameworks change some."""

    micro: int = 1
    total: int | None = None
    lr: float = 1e-4
    schedule: str = "linear"
    betas: tuple[float, float] = (0.9, 0.999)
    decay: float = 0.01
    seed: int = 1234


def data_parallel_size(draft: Draft, u: PrefixedDraft, world: int) -> int:
    """Return the data-parallel size: the world size over the tensor, pipeline and context parallel sizes."""
    divided = 1
    for key in ("tensor_model_parallel_size", "pipeline_model_parallel_size"):
        size = steps_and_schedule.positive_count(draft, u(key)) or 1
        divided *= size
        why = "tensor and pipeline parallelism are not implemented; FSDP2 shards layers instead (parallel.shard: auto)"
        (u.mark_unsupported if size > 1 else u.mark_default)(key, why=why if size > 1 else "size 1")
    context = steps_and_schedule.positive_count(draft, u("context_parallel_size")) or 1
    return max(1, world // (divided * context))


def set_steps(draft: Draft, u: PrefixedDraft, defaults: Defaults, ranks: int, packed: bool) -> None:
    micro = steps_and_schedule.positive_count(draft, u("micro_batch_size")) or defaults.micro
    total = steps_and_schedule.positive_count(draft, u("global_batch_size")) or defaults.total or micro * ranks
    draft.set("train.micro_batch", 1 if packed else micro, u("micro_batch_size"), why="one pack" if packed else "")
    draft.set(
        "train.global_batch", total, u("global_batch_size"), why="" if u.has("global_batch_size") else "micro x ranks"
    )
    iters = u.integer("train_iters")
    if iters is not None:
        draft.set("train.steps", iters, u("train_iters"))
    elif samples := u.integer("train_samples"):
        draft.set("train.steps", max(1, samples // total), u("train_samples"), why=f"samples / {total}")
    elif epochs := u.number("max_epochs"):
        draft.set("train.epochs", epochs, u("max_epochs"))
    draft.set("train.lr", u.number("lr", defaults.lr), u("lr"))
    style = choice(
        draft, u("lr_decay_style"), {n: n for n in ("cosine", "linear", "constant", "inverse-square-root", "wsd")}
    )
    if style in ("inverse-square-root", "wsd"):
        u.mark_unsupported("lr_decay_style", why=f"schedule {style} is not implemented; cosine is used instead")
        style = "cosine"
        draft.set("train.schedule", style, why="closest schedule")
    else:
        draft.set("train.schedule", style or defaults.schedule, u("lr_decay_style"))
        style = style or defaults.schedule
    min_lr = u.number("min_lr")
    if min_lr and style == "constant":
        u.mark_ignored("min_lr", why="a constant schedule does not use it")
    elif min_lr is not None:
        draft.set("train.min_lr", min_lr, u("min_lr"))
    # Octavo's schedules end with the run. One that ends later is cut, so the rate at the last step is kept.
    run_steps = steps_and_schedule.total_steps(draft, ranks)
    decay = u.integer("lr_decay_iters")
    if decay is not None and decay == run_steps:
        u.mark_default("lr_decay_iters", why="the schedule ends with the run")
    elif decay is not None:
        u.mark_unsupported("lr_decay_iters", why=f"Octavo's schedules end with the run, not after {decay} steps")
    steps_and_schedule.set_warmup(
        draft, ranks, u("lr_warmup_iters"), u("lr_warmup_fraction"), schedule_steps=decay or None
    )
    if decay is not None and run_steps is not None and decay > run_steps and style != "constant":
        _set_min_lr_of_cut_schedule(draft, u, style, run_steps, decay)
    if samples := u.integer("lr_warmup_samples"):
        draft.set("train.warmup", samples // total, u("lr_warmup_samples"))
    if (clip := u.number("clip_grad")) is not None:
        draft.set("train.clip", clip, u("clip_grad"), why="no clipping" if not clip else "")


def _set_min_lr_of_cut_schedule(draft: Draft, u: PrefixedDraft, style: str, steps: int, decay: int) -> None:
    """Set train.min_lr for a run that ends before its schedule: the learning rate of the source at its last step."""
    peak, min_lr = draft.settings["train.lr"].value, u.number("min_lr") or 0.0
    warmup = draft.settings["train.warmup"].value if "train.warmup" in draft.settings else 0
    share = min(1.0, max(0.0, (steps - warmup) / max(1, decay - warmup)))
    remaining = 1 - share if style == "linear" else (1 + math.cos(math.pi * share)) / 2
    why = f"value of the {style} schedule over {decay} steps after {steps} steps"
    draft.set("train.min_lr", min_lr + (peak - min_lr) * remaining, u("min_lr"), u("lr_decay_iters"), why=why)


def set_optimizer(draft: Draft, u: PrefixedDraft, defaults: Defaults) -> None:
    word = u.text("optimizer") or u.text("optimizer_selection")
    if word and not word.lower().replace("fused_torch_", "").replace("fused_", "").startswith("adam"):
        u.mark_unsupported("optimizer", "optimizer_selection", why=f"{word} is not implemented, only AdamW")
    else:
        u.mark_default("optimizer", "optimizer_selection", why="AdamW: Megatron's adam also decouples weight decay")
    beta1, beta2, decay = u.number("adam_beta1"), u.number("adam_beta2"), u.number("weight_decay")
    betas = [defaults.betas[0] if beta1 is None else beta1, defaults.betas[1] if beta2 is None else beta2]
    draft.set("optimizer.betas", betas, u("adam_beta1"), u("adam_beta2"))
    draft.set("optimizer.weight_decay", defaults.decay if decay is None else decay, u("weight_decay"))
    if (eps := u.number("adam_eps")) is not None:
        draft.set("optimizer.eps", eps, u("adam_eps"))
    if u.flag("optimizer_cpu_offload"):
        draft.set("optimizer.offload", True, u("optimizer_cpu_offload"))
        if u.number("optimizer_offload_fraction") not in (None, 1):
            u.mark_unsupported("optimizer_offload_fraction", why="offload applies to all states or none")
    else:
        u.mark_ignored("optimizer_offload_fraction", why="only used with optimizer_cpu_offload")
    # The dtypes of the moments are only used with this flag.
    if u.flag("use_precision_aware_optimizer"):
        kinds = {
            choice(draft, u(key), _STATES | {"fp16": "fp16"}) or "fp32" for key in ("exp_avg_dtype", "exp_avg_sq_dtype")
        }
        keys = [u(key) for key in ("use_precision_aware_optimizer", "exp_avg_dtype", "exp_avg_sq_dtype")]
        if len(kinds) == 1 and (kind := kinds.pop()) in ("fp32", "bf16", "fp8"):
            draft.set("optimizer.states", kind, *keys)
        else:
            draft.mark_unsupported(*keys, why="both moments have the same format: fp32, bf16, fp8 or coat")
    else:
        u.mark_ignored("exp_avg_dtype", "exp_avg_sq_dtype", why="only used with use_precision_aware_optimizer")


def set_precision(draft: Draft, u: PrefixedDraft) -> None:
    if u.flag("bf16"):
        draft.set("train.precision", "bf16", u("bf16"))
        u.mark_ignored("initial_loss_scale", "min_loss_scale", "loss_scale_window", "hysteresis", "loss_scale",
               why="loss scaling is only used with fp16")  # fmt: skip
    elif u.flag("fp16"):
        draft.set("train.precision", "fp16", u("fp16"))
        if (scale := u.integer("loss_scale")) is not None:
            draft.set("train.loss_scale", scale, u("loss_scale"))
        if u.number("initial_loss_scale") == 1 << 16:
            u.mark_default("initial_loss_scale", why="dynamic loss scaling starts at 65536")
        remaining = ["initial_loss_scale"] if u("initial_loss_scale") not in draft.rows else []
        u.mark_unsupported(
            *remaining,
            "min_loss_scale",
            "loss_scale_window",
            "hysteresis",
            why="dynamic loss scaling starts at 65536",
        )


def set_fp8(draft: Draft, u: PrefixedDraft, *, default_recipe: str = "delayed", param: bool = True) -> str | None:
    """Translate FP8 and return the recipe of the whole model, or None if FP8 is off; ``--fp8-format`` turns it on."""
    form = choice(draft, u("fp8_format"), {"e4m3": "e4m3", "hybrid": "hybrid", "hif8": "hif8"})
    recipe = choice(draft, u("fp8_recipe"), RECIPES | {"mxfp8-32x32": "mxfp8"}) or default_recipe
    inner = (
        "fp8_recipe",
        "fp8_amax_history_len",
        "fp8_amax_compute_algo",
        "fp8_param_gather",
        "fp8_margin",
        "fp8_wgrad",
        "first_last_layers_bf16",
        "num_layers_at_start_in_bf16",
        "num_layers_at_end_in_bf16",
    )
    # In Megatron only fp8_format turns FP8 on.
    if form is None:
        u.mark_ignored(*inner, why="nothing runs in FP8 unless fp8_format is set")
        return None
    if form == "hif8":
        u.mark_unsupported("fp8_format", why="HiF8 is specific to Ascend; e4m3 is used instead")
        form = "e4m3"
    draft.set("fp8.recipe", recipe, u("fp8_recipe"), u("fp8_format"), why=WHY_RECIPE.get(recipe, ""))
    if not (recipe == "mxfp8" and form == "hybrid"):
        draft.set("fp8.format", form, u("fp8_format"))
    else:
        u.mark_unsupported("fp8_format", why="mxfp8 uses E4M3 for all operands")
    if recipe == "delayed":
        length, rule = u.integer("fp8_amax_history_len"), u.text("fp8_amax_compute_algo")
        (u.mark_default if length == 16 else u.mark_unsupported)(
            "fp8_amax_history_len", why="recipe delayed has amax histories of length 16"
        )
        (u.mark_default if rule == "max" else u.mark_unsupported)(
            "fp8_amax_compute_algo", why="the scale comes from the maximum of the history"
        )
    else:
        u.mark_ignored(
            "fp8_amax_history_len",
            "fp8_amax_compute_algo",
            why=f"{recipe} computes scales from the current tensor, without a history",
        )
    if u.flag("fp8_param_gather") and param:
        draft.set(
            "fp8.param", True, u("fp8_param_gather"), why="weights are stored as FP8 codes, and FSDP2 gathers the codes"
        )
    elif u.flag("fp8_param_gather"):
        u.mark_ignored(
            "fp8_param_gather", why="with adapters the base is frozen, so this saved no memory; see model.load_in_fp8"
        )
    u.mark_unsupported(
        "first_last_layers_bf16",
        "num_layers_at_start_in_bf16",
        "num_layers_at_end_in_bf16",
        "fp8_margin",
        "fp8_wgrad",
        why='use rules for exceptions: fp8: {rules: [{match: "**.layers.0.**", recipe: off}]}',
    )
    return recipe


def set_saving(draft: Draft, u: PrefixedDraft) -> None:
    if (save := u.integer("save_interval")) is not None:
        draft.set("run.save_every", save, u("save_interval"))
    if directory := u.text("save"):
        draft.set("run.dir", directory, u("save"))
    if (log := u.integer("log_interval")) is not None:
        draft.set("run.log_every", log, u("log_interval"))
    if (seed := u.integer("seed")) is not None:
        draft.set("run.seed", seed, u("seed"))
    if (workers := u.integer("num_workers")) is not None:
        draft.set("data.workers", workers, u("num_workers"))
    if u.flag("async_save") or u.flag("save_async"):
        draft.set("run.save", "async", u("async_save"), u("save_async"))
    if u.text("wandb_project"):
        draft.set("run.trackers", ["wandb"], u("wandb_project"), why="set WANDB_PROJECT in the environment")
    u.mark_unsupported("wandb_exp_name", why="set WANDB_NAME in the environment")
    if (interval := u.integer("eval_interval")) is not None:
        if "data.eval.0.path" in draft.settings:
            draft.set("run.eval_every", interval, u("eval_interval"))
        else:
            u.mark_unsupported("eval_interval", why="the translated files have no evaluation data (data.eval)")
    set_saved_states(draft, u)


def set_saved_states(draft: Draft, u: PrefixedDraft, load: tuple[str, ...] = ("load",)) -> None:
    """Translate which states checkpoints save and load."""
    # a copy of the model folder has weights but no states
    loads = any(u.has(key) and (u(key) not in draft.rows or draft.rows[u(key)].kind != "default") for key in load)
    if u.flag("no_save_optim"):
        why = "checkpoints only had weights, so the run could not be resumed exactly; run.save_states: "
        draft.set(
            "run.save_states",
            False,
            u("no_save_optim"),
            u("no_save_rng"),
            why=why + "true (the default) saves all states",
        )
        draft.add_note(
            "checkpoints have no optimizer states, as in the source, so the run cannot be resumed; to save them, "
            "remove run.save_states"
        )
    elif u.flag("no_save_rng"):
        u.mark_unsupported("no_save_rng", why="RNG states are small and are always saved with the optimizer states")
    for key, effect in (("no_load_optim", NO_LOAD_OPTIM), ("no_load_rng", NO_LOAD_RNG)):
        if not u.flag(key):
            u.mark_default(key, why="resuming restores all states")
        elif "run.start_from" in draft.settings:
            u.mark_default(key, why="run.start_from starts with a new optimizer and new RNG states")
        elif loads:
            u.mark_unsupported(
                key,
                why=f"{effect}; run.start_from starts a new run from the weights; run.resume restores all states",
            )
        else:
            u.mark_ignored(key, why=effect)
    if not u.flag("no_save_optim"):
        u.mark_default("no_save_optim", "no_save_rng", why="checkpoints contain optimizer and RNG states")


def set_context_parallel(
    draft: Draft,
    u: PrefixedDraft,
    key: str = "context_parallel_size",
    kind: str = "context_parallel_algo",
    ulysses: str = "context_parallel_ulysses_degree",
) -> None:
    """Translate Ulysses, ring attention and USP to `parallel.context` and `parallel.ulysses`."""
    size = steps_and_schedule.positive_count(draft, u(key)) or 1
    algo, degree = u.text(kind), steps_and_schedule.positive_count(draft, u(ulysses))
    hybrid = "hybrid" in (algo or "")  # USP: both at once
    if size == 1:
        u.mark_default(key, why="rows are not split across ranks")
        u.mark_ignored(kind, ulysses, "cp_comm_type", why=f"{key} is 1, so rows are not split across ranks")
        return
    draft.set("parallel.context", size, u(key), why=USP if hybrid else ULYSSES if "ulysses" in (algo or "") else RING)
    if degree and (hybrid or algo is None or "ulysses" in algo):
        draft.set(
            "parallel.ulysses",
            degree,
            u(ulysses),
            *([u(kind)] if hybrid else []),
            why="ranks that exchange heads; the others gather keys and values",
        )
    elif algo and "ulysses" in algo:
        draft.set("parallel.ulysses", size, u(kind), why=ULYSSES)
    elif algo and not hybrid:
        draft.set("parallel.ulysses", 1, u(kind), why=RING)
    u.mark_unsupported("cp_comm_type", why=RING)
    if "data.packing" not in draft.settings:
        draft.set("data.packing", True, why="context parallelism needs packed rows")
        draft.set("train.micro_batch", 1, why="one pack (data.packing)")


ULYSSES = "heads are exchanged for tokens in the same way (parallel.ulysses)"
RING = (
    "ring attention passes keys and values around block by block; Octavo gathers them once per layer: the same "
    "products and gradients, with different memory and timing, and support for packing"
)
USP = (
    "USP is a ring of groups that exchange heads: parallel.context is the product, parallel.ulysses the group size; "
    "Octavo gathers keys and values instead of using a ring"
)


def set_expert_parallel(
    draft: Draft, u: PrefixedDraft, key: str = "expert_model_parallel_size", lora: bool = False
) -> None:
    size = steps_and_schedule.positive_count(draft, u(key)) or 1
    if size == 1:
        u.mark_default(key, why="experts are sharded by FSDP2")
    elif lora:
        u.mark_unsupported(key, why="expert parallelism is not available with adapters; experts are still sharded")
    else:
        draft.set("parallel.expert", size, u(key))


def set_aux_loss(draft: Draft, u: PrefixedDraft, key: str = "moe_aux_loss_coeff") -> None:
    kind = "moe_router_load_balancing_type"
    if u.words(kind) == ["none"]:
        draft.set("train.router_aux_loss_coef", 0.0, u(kind))
        u.mark_ignored(key, why=f"{kind} is none, so there is no load-balancing loss")
        return
    if u.words(kind) == ["aux_loss"]:
        u.mark_default(kind, why="train.router_aux_loss_coef")
    if (coefficient := u.number(key)) is not None:
        draft.set("train.router_aux_loss_coef", coefficient, u(key))


def set_recompute(draft: Draft, u: PrefixedDraft, default: str = "none") -> None:
    word = choice(draft, u("recompute_granularity"), {name: name for name in ("full", "selective", "none")})
    method, layers = u.text("recompute_method"), u.integer("recompute_num_layers")
    if word != "full":
        u.mark_ignored("recompute_method", "recompute_num_layers", why="only used with recompute_granularity: full")
    elif method == "block":
        u.mark_unsupported(
            "recompute_method", "recompute_num_layers", why="either all blocks of a component are recomputed or none"
        )
    elif layers not in (None, 1):
        u.mark_unsupported(
            "recompute_num_layers", why=f"Octavo keeps the input of every block; the source kept every {layers}th one"
        )
        u.mark_default("recompute_method", why="every block is recomputed")
    else:
        u.mark_default("recompute_method", "recompute_num_layers", why="each block only keeps its input")
    if word == "selective":
        draft.set(
            "train.recompute",
            "selective",
            u("recompute_granularity"),
            why="Octavo recomputes cheap operations, Megatron core attention",
        )
    elif word:
        draft.set("train.recompute", word, u("recompute_granularity"))
    elif default != "none":
        draft.set("train.recompute", default, why="the framework's default")
    # Set last: in Megatron the flag overrides recompute_granularity.
    if u.flag("recompute_activations"):
        draft.set("train.recompute", "selective", u("recompute_activations"))


SAME = {
    "experts always use grouped GEMMs": "moe_grouped_gemm",
    "training starts from the weights with a new optimizer": "finetune",
    "the loss never materializes full logits (train.logits: chunked)": "cross_entropy_loss_fusion "
    "cross_entropy_fusion_impl",
}


def mark_remaining(draft: Draft, u: PrefixedDraft) -> None:
    draft.mark_many("default", {why: " ".join(u(name) for name in names.split()) for why, names in SAME.items()})
    draft.mark_many("none", {why: " ".join(u(name) for name in names.split()) for why, names in NONE.items()})
