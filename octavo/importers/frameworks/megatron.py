"""Megatron's arguments, which LoongForge takes as launch flags, MindSpeed-MM under ``gpt_args``, and ms-swift for
`megatron sft`: parallel sizes, steps, optimizer, checkpoints, FP8, and what `no_load_optim` and its kind really do."""

from __future__ import annotations

import math
from dataclasses import dataclass

from octavo.base.recipe_specs import names_in_library
from octavo.importers.common import steps_and_schedule
from octavo.importers.common.draft import Draft, choice
from octavo.importers.common.prefixed_keys import Under

RECIPES = names_in_library("Megatron")
_STATES = {"fp32": "fp32", "bf16": "bf16", "fp8": "fp8", "fp16": None}

#: what these flags do, in Megatron's own loading and saving
NO_LOAD_OPTIM = (
    "the optimizer's states (and in Megatron the schedule's) are not read from a checkpoint and start again, while the "
    "count of iterations goes on; without a checkpoint to load it changes nothing"
)
NO_LOAD_RNG = "random states are not read from a checkpoint; without one to load it changes nothing"

NONE = {
    "tensor and pipeline parallelism are not built: FSDP2 shards layers instead (parallel.shard)":
    "sequence_parallel tp_comm_overlap* num_layers_per_virtual_pipeline_stage num_virtual_stages_per_pipeline_rank "
    "microbatch_group_size_per_virtual_pipeline_stage decoder_first_pipeline_num_layers pipeline_model_parallel_layout "
    "decoder_last_pipeline_num_layers encoder_tensor_model_parallel_size encoder_pipeline_model_parallel_size "
    "use_tp_pp_dp_mapping custom_pipeline_* virtual_pipeline_model_parallel_size microbatch_group_size_per_vp_stage "
    "account_for_* batch_p2p_comm expert_tensor_parallel_size",
    "routing comes from the model's config.json": "moe_router_* moe_token_drop_policy moe_expert_capacity_factor "
    "moe_pad_expert_input_to_capacity moe_z_loss_coeff moe_shared_expert_overlap moe_layer_recompute num_experts "
    "moe_layer_freq moe_ffn_hidden_size moe_shared_expert_intermediate_size",
    "of Megatron's dispatch of experts; Octavo deals them by parallel.expert": "moe_token_dispatcher_type "
    "moe_enable_deepep "
    "moe_permute_fusion moe_use_upcycling empty_unused_memory_level use_fused_moe*",
    "the architecture comes from the model's config.json": "num_layers hidden_size ffn_hidden_size num_attention_heads "
    "group_query_attention num_query_groups max_position_embeddings position_embedding_type rotary_* mrope_* swiglu "
    "normalization norm_epsilon untie_embeddings_and_output_weights disable_bias_linear add_qkv_bias kv_channels "
    "qk_layernorm transformer_impl multi_latent_attention q_lora_rank kv_lora_rank qk_head_dim qk_pos_emb_head_dim "
    "vocab_size padded_vocab_size make_vocab_size_divisible_by attention_dropout hidden_dropout "
    "vocab_size_in_config_file "
    "original_max_position_embeddings v_head_dim add_position_embedding add_bias_linear model_type "
    "use_rotary_position_embeddings no_position_embedding vocab_file merge_file",
    "weights come from the checkpoint": "perform_initialization data_parallel_random_init save_missing_weights "
    "init_method_std use_cpu_initialization init_model_with_meta_device "
    "no_initialization initialize_embedding",
    "layers are transformers' or Octavo's own, not Megatron's": "no_masked_softmax_fusion no_bias_* no_rope_fusion "
    "no_gradient_accumulation_fusion use_fused_* cross_entropy_* apply_query_key_layer_scaling use_mcore_models "
    "masked_softmax_fusion bias_*_fusion apply_rope_fusion gradient_accumulation_fusion te_rng_tracker "
    "apply_dsa_kernel_fusion mhc_* csa_* dsa_* engram_* use_fp32_dtype_for_param_pattern enable_experimental "
    "attention_softmax_in_fp32 no_persist_layer_norm enable_fa_within_mla",
    "checkpoints are DCP, and read and written by all ranks": "ckpt_* auto_detect_ckpt_format "
    "exit_on_missing_checkpoint "
    "distrib_optim_* use_persistent_ckpt_worker dist_ckpt_* save_retain_interval",
    "there is no FP4, and no Muon": "fp4_* muon_*",
    "multi-token prediction is not built: its layers and its loss are left out": "mtp_* num_nextn_predict_layers",
    "a step whose loss is no number stops the run": "no_check_for_nan_in_loss_and_grad check_*",
    "schedules are cosine, linear, constant and onecycle, and decay is one number": "lr_wsd_* weight_decay_incr_style "
    "start_weight_decay end_weight_decay apply_wd_to_qk_layernorm",
    "FSDP2 overlaps its own transfers": "align_* nccl_comm_warmup use_megatron_fsdp strict_fsdp_dtensor_load "
    "accumulate_allreduce_grads_in_fp32 optimizer_cuda_graph overlap_* use_distributed_optimizer use_torch_fsdp2 "
    "fsdp2_config_path "
    "distributed_backend distributed_timeout_minutes ddp_* local_rank use_dist_ckpt data_parallel_sharding_strategy",
    "figures are in metrics.jsonl; TensorBoard is in the run's directory": "tensorboard_* log_* no_log_* logging_level "
    "timing_log_level timing_log_option wandb_save_dir",
    "garbage is collected by Python, or as train.gc says": "manual_gc manual_gc_*",
    "tokenizer and template come from the model's folder": "tokenizer_type tokenizer_model hf_tokenizer_path "
    "hf_processor_path use_fast_tokenizer split_special_tokens padding_side additional_special_tokens",
    "seconds of steps are measured by octavo bench": "profile profile_* use_pytorch_profiler",
    "an evaluation takes all rows of data.eval": "eval_iters",
    "not set here": "no_create_attention_mask_in_dataloader data_sharding cp_partition_mode "
    "sequence_packing_scheduler deterministic_mode sgd_momentum use_deter_comp main_grads_dtype main_params_dtype "
    "decoupled_lr decoupled_min_lr override_opt_param_scheduler use_checkpoint_opt_param_scheduler lr_warmup_init "
    "recompute_modules megatron_extra_kwargs",
}  # fmt: skip


@dataclass(frozen=True)
class Usual:
    """Megatron's defaults; frameworks change some."""

    micro: int = 1
    total: int | None = None
    lr: float = 1e-4
    schedule: str = "linear"
    betas: tuple[float, float] = (0.9, 0.999)
    decay: float = 0.01
    seed: int = 1234


def data_parallel(draft: Draft, u: Under, world: int) -> int:
    """Ranks that see different rows: the world over tensor, pipeline and context parallel sizes."""
    divided = 1
    for key in ("tensor_model_parallel_size", "pipeline_model_parallel_size"):
        size = steps_and_schedule.counted(draft, u(key)) or 1
        divided *= size
        why = "tensor and pipeline parallelism are not built; FSDP2 shards layers instead (parallel.shard: auto)"
        (u.none if size > 1 else u.same)(key, why=why if size > 1 else "1")
    context = steps_and_schedule.counted(draft, u("context_parallel_size")) or 1
    return max(1, world // (divided * context))


def steps(draft: Draft, u: Under, usual: Usual, ranks: int, packed: bool) -> None:
    micro = steps_and_schedule.counted(draft, u("micro_batch_size")) or usual.micro
    total = steps_and_schedule.counted(draft, u("global_batch_size")) or usual.total or micro * ranks
    draft.put("train.micro_batch", 1 if packed else micro, u("micro_batch_size"), why="one pack" if packed else "")
    draft.put(
        "train.global_batch", total, u("global_batch_size"), why="" if u.has("global_batch_size") else "micro x ranks"
    )
    iters = u.whole("train_iters")
    if iters is not None:
        draft.put("train.steps", iters, u("train_iters"))
    elif samples := u.whole("train_samples"):
        draft.put("train.steps", max(1, samples // total), u("train_samples"), why=f"samples / {total}")
    elif epochs := u.number("max_epochs"):
        draft.put("train.epochs", epochs, u("max_epochs"))
    draft.put("train.lr", u.number("lr", usual.lr), u("lr"))
    style = choice(
        draft, u("lr_decay_style"), {n: n for n in ("cosine", "linear", "constant", "inverse-square-root", "wsd")}
    )
    if style in ("inverse-square-root", "wsd"):
        u.none("lr_decay_style", why=f"there is no schedule {style}; cosine is used instead")
        style = "cosine"
        draft.put("train.schedule", style, why="in its place")
    else:
        draft.put("train.schedule", style or usual.schedule, u("lr_decay_style"))
        style = style or usual.schedule
    least = u.number("min_lr")
    if least and style == "constant":
        u.dead("min_lr", why="a constant schedule does not use it")
    elif least is not None:
        draft.put("train.min_lr", least, u("min_lr"))
    # Octavo's schedules end with the run. One that ends later is cut, so the rate at the last step is kept.
    whole = steps_and_schedule.total_steps(draft, ranks)
    decay = u.whole("lr_decay_iters")
    if decay is not None and decay == whole:
        u.same("lr_decay_iters", why="the schedule ends with the run")
    elif decay is not None:
        u.none("lr_decay_iters", why=f"Octavo's schedules end with the run, not after {decay} steps")
    steps_and_schedule.warmup(draft, ranks, u("lr_warmup_iters"), u("lr_warmup_fraction"), of=decay or None)
    if decay is not None and whole is not None and decay > whole and style != "constant":
        _cut_short(draft, u, style, whole, decay)
    if samples := u.whole("lr_warmup_samples"):
        draft.put("train.warmup", samples // total, u("lr_warmup_samples"))
    if (clip := u.number("clip_grad")) is not None:
        draft.put("train.clip", clip, u("clip_grad"), why="no clipping" if not clip else "")


def _cut_short(draft: Draft, u: Under, style: str, steps: int, decay: int) -> None:
    """A run that ends before its schedule does: Octavo's ends with the run, at the rate that theirs had come to."""
    peak, least = draft.settings["train.lr"].value, u.number("min_lr") or 0.0
    begun = draft.settings["train.warmup"].value if "train.warmup" in draft.settings else 0
    share = min(1.0, max(0.0, (steps - begun) / max(1, decay - begun)))
    left = 1 - share if style == "linear" else (1 + math.cos(math.pi * share)) / 2
    why = f"what {style} of {decay} steps has come to after {steps}"
    draft.put("train.min_lr", least + (peak - least) * left, u("min_lr"), u("lr_decay_iters"), why=why)


def optimizer(draft: Draft, u: Under, usual: Usual) -> None:
    word = u.text("optimizer") or u.text("optimizer_selection")
    if word and not word.lower().replace("fused_torch_", "").replace("fused_", "").startswith("adam"):
        u.none("optimizer", "optimizer_selection", why=f"AdamW is the only optimizer, there is no {word}")
    else:
        u.same("optimizer", "optimizer_selection", why="AdamW: Megatron's adam decays apart from the gradient too")
    beta1, beta2, decay = u.number("adam_beta1"), u.number("adam_beta2"), u.number("weight_decay")
    betas = [usual.betas[0] if beta1 is None else beta1, usual.betas[1] if beta2 is None else beta2]
    draft.put("optimizer.betas", betas, u("adam_beta1"), u("adam_beta2"))
    draft.put("optimizer.weight_decay", usual.decay if decay is None else decay, u("weight_decay"))
    if (eps := u.number("adam_eps")) is not None:
        draft.put("optimizer.eps", eps, u("adam_eps"))
    if u.flag("optimizer_cpu_offload"):
        draft.put("optimizer.offload", True, u("optimizer_cpu_offload"))
        if u.number("optimizer_offload_fraction") not in (None, 1):
            u.none("optimizer_offload_fraction", why="all states go to the host, or none")
    else:
        u.dead("optimizer_offload_fraction", why="only read with optimizer_cpu_offload")
    # The dtypes of the moments are only read with this flag.
    if u.flag("use_precision_aware_optimizer"):
        kinds = {
            choice(draft, u(key), _STATES | {"fp16": "fp16"}) or "fp32" for key in ("exp_avg_dtype", "exp_avg_sq_dtype")
        }
        keys = [u(key) for key in ("use_precision_aware_optimizer", "exp_avg_dtype", "exp_avg_sq_dtype")]
        if len(kinds) == 1 and (kind := kinds.pop()) in ("fp32", "bf16", "fp8"):
            draft.put("optimizer.states", kind, *keys)
        else:
            draft.none(*keys, why="both moments have the same form: fp32, bf16, fp8 or coat")
    else:
        u.dead("exp_avg_dtype", "exp_avg_sq_dtype", why="only read with use_precision_aware_optimizer")


def precision(draft: Draft, u: Under) -> None:
    if u.flag("bf16"):
        draft.put("train.precision", "bf16", u("bf16"))
        u.dead("initial_loss_scale", "min_loss_scale", "loss_scale_window", "hysteresis", "loss_scale",
               why="losses are only scaled with fp16")  # fmt: skip
    elif u.flag("fp16"):
        draft.put("train.precision", "fp16", u("fp16"))
        if (scale := u.whole("loss_scale")) is not None:
            draft.put("train.loss_scale", scale, u("loss_scale"))
        if u.number("initial_loss_scale") == 1 << 16:
            u.same("initial_loss_scale", why="dynamic scales begin at 65536")
        left = ["initial_loss_scale"] if u("initial_loss_scale") not in draft.rows else []
        u.none(
            *left,
            "min_loss_scale",
            "loss_scale_window",
            "hysteresis",
            why="dynamic scales begin at 65536",
        )


def fp8(draft: Draft, u: Under, *, usual_recipe: str = "delayed", param: bool = True) -> str | None:
    """The recipe of the whole model, if FP8 is on; ``--fp8-format`` is what switches it."""
    form = choice(draft, u("fp8_format"), {"e4m3": "e4m3", "hybrid": "hybrid", "hif8": "hif8"})
    recipe = choice(draft, u("fp8_recipe"), RECIPES | {"mxfp8-32x32": "mxfp8"}) or usual_recipe
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
        u.dead(*inner, why="without fp8_format nothing runs in FP8 there, whatever the others say")
        return None
    if form == "hif8":
        u.none("fp8_format", why="HiF8 is a format of Ascend; e4m3 is used instead")
        form = "e4m3"
    draft.put("fp8.recipe", recipe, u("fp8_recipe"), u("fp8_format"))
    if not (recipe == "mxfp8" and form == "hybrid"):
        draft.put("fp8.format", form, u("fp8_format"))
    else:
        u.none("fp8_format", why="mxfp8 is E4M3 throughout")
    if recipe == "delayed":
        length, rule = u.whole("fp8_amax_history_len"), u.text("fp8_amax_compute_algo")
        (u.same if length == 16 else u.none)("fp8_amax_history_len", why="histories of delayed are 16 long")
        (u.same if rule == "max" else u.none)("fp8_amax_compute_algo", why="the scale is by the history's maximum")
    else:
        u.dead("fp8_amax_history_len", "fp8_amax_compute_algo", why=f"{recipe} scales by what it casts: no history")
    if u.flag("fp8_param_gather") and param:
        draft.put(
            "fp8.param", True, u("fp8_param_gather"), why="weights are codes between steps, and FSDP2 gathers those"
        )
    elif u.flag("fp8_param_gather"):
        u.dead(
            "fp8_param_gather", why="with adapters the base is frozen: it saved no memory there; see model.load_in_fp8"
        )
    u.none(
        "first_last_layers_bf16",
        "num_layers_at_start_in_bf16",
        "num_layers_at_end_in_bf16",
        "fp8_margin",
        "fp8_wgrad",
        why='exceptions are rules: fp8: {rules: [{match: "**.layers.0.**", recipe: off}]}',
    )
    return recipe


def saving(draft: Draft, u: Under) -> None:
    if (save := u.whole("save_interval")) is not None:
        draft.put("run.save_every", save, u("save_interval"))
    if directory := u.text("save"):
        draft.put("run.dir", directory, u("save"))
    if (log := u.whole("log_interval")) is not None:
        draft.put("run.log_every", log, u("log_interval"))
    if (seed := u.whole("seed")) is not None:
        draft.put("run.seed", seed, u("seed"))
    if (workers := u.whole("num_workers")) is not None:
        draft.put("data.workers", workers, u("num_workers"))
    if u.flag("async_save") or u.flag("save_async"):
        draft.put("run.save", "async", u("async_save"), u("save_async"))
    if u.text("wandb_project"):
        draft.put("run.trackers", ["wandb"], u("wandb_project"), why="set WANDB_PROJECT in the environment")
    u.none("wandb_exp_name", why="set WANDB_NAME in the environment")
    if (each := u.whole("eval_interval")) is not None:
        if "data.eval.0.path" in draft.settings:
            draft.put("run.eval_every", each, u("eval_interval"))
        else:
            u.none("eval_interval", why="the translated files have no held-out rows (data.eval)")
    states(draft, u)


def states(draft: Draft, u: Under, load: tuple[str, ...] = ("load",)) -> None:
    """What a checkpoint holds and gives back."""
    # a copy of the model's own folder has weights and no states
    loads = any(u.has(key) and (u(key) not in draft.rows or draft.rows[u(key)].kind != "default") for key in load)
    if u.flag("no_save_optim"):
        why = "checkpoints had only weights, so that the run could not be continued exactly; run.save_states: "
        draft.put(
            "run.save_states", False, u("no_save_optim"), u("no_save_rng"), why=why + "true (or no line) mends that"
        )
        draft.note(
            "checkpoints have no optimizer states, as there: the run cannot be continued; remove run.save_states"
        )
    elif u.flag("no_save_rng"):
        u.none("no_save_rng", why="random states are a few bytes and are always saved with the optimizer's")
    for key, does in (("no_load_optim", NO_LOAD_OPTIM), ("no_load_rng", NO_LOAD_RNG)):
        if not u.flag(key):
            u.same(key, why="a continued run has all that it had")
        elif "run.start_from" in draft.settings:
            u.same(key, why="run.start_from begins with a new optimizer and new random states")
        elif loads:
            u.none(
                key,
                why=f"{does}; run.start_from starts a new run from the weights, run.resume continues with everything",
            )
        else:
            u.dead(key, why=does)
    if not u.flag("no_save_optim"):
        u.same("no_save_optim", "no_save_rng", why="checkpoints hold optimizer and random states")


def context(draft: Draft, u: Under, key: str = "context_parallel_size", kind: str = "context_parallel_algo",
            ulysses: str = "context_parallel_ulysses_degree") -> None:  # fmt: skip
    """Ulysses, ring and USP: all are `parallel.context`; which part exchanges heads is `parallel.ulysses`."""
    size = steps_and_schedule.counted(draft, u(key)) or 1
    algo, degree = u.text(kind), steps_and_schedule.counted(draft, u(ulysses))
    hybrid = "hybrid" in (algo or "")  # USP: both at once
    if size == 1:
        u.same(key, why="no rows are shared")
        u.dead(kind, ulysses, "cp_comm_type", why=f"{key} is 1, so no row is shared by ranks")
        return
    draft.put("parallel.context", size, u(key), why=USP if hybrid else ULYSSES if "ulysses" in (algo or "") else RING)
    if degree and (hybrid or algo is None or "ulysses" in algo):
        draft.put(
            "parallel.ulysses",
            degree,
            u(ulysses),
            *([u(kind)] if hybrid else []),
            why="ranks that exchange heads; the others gather keys and values",
        )
    elif algo and "ulysses" in algo:
        draft.put("parallel.ulysses", size, u(kind), why=ULYSSES)
    elif algo and not hybrid:
        draft.put("parallel.ulysses", 1, u(kind), why=RING)
    u.none("cp_comm_type", why=RING)
    if "data.packing" not in draft.settings:
        draft.put("data.packing", True, why="ranks can only share packed rows (parallel.context)")
        draft.put("train.micro_batch", 1, why="one pack (data.packing)")


ULYSSES = "heads are exchanged for tokens, as there (parallel.ulysses)"
RING = (
    "ring attention passes keys and values round block by block; here they are gathered once a layer: the same "
    "products "
    "and gradients, other memory and other timing, and any mask of packs"
)
USP = (
    "USP is a ring of groups that exchange heads: context is their product, ulysses the heads' part; keys and values "
    "of the ring's part are gathered"
)


def expert(draft: Draft, u: Under, key: str = "expert_model_parallel_size", lora: bool = False) -> None:
    size = steps_and_schedule.counted(draft, u(key)) or 1
    if size == 1:
        u.same(key, why="experts are sharded, not distributed")
    elif lora:
        u.none(key, why="experts are not distributed to ranks with adapters; they are still sharded")
    else:
        draft.put("parallel.expert", size, u(key))


def aux_loss(draft: Draft, u: Under, key: str = "moe_aux_loss_coeff") -> None:
    kind = "moe_router_load_balancing_type"
    if u.words(kind) == ["none"]:
        draft.put("train.router_aux_loss_coef", 0.0, u(kind))
        u.dead(key, why=f"{kind} is none, so routers are not balanced by a loss")
        return
    if u.words(kind) == ["aux_loss"]:
        u.same(kind, why="train.router_aux_loss_coef")
    if (coefficient := u.number(key)) is not None:
        draft.put("train.router_aux_loss_coef", coefficient, u(key))


def recompute(draft: Draft, u: Under, usual: str = "none") -> None:
    word = choice(draft, u("recompute_granularity"), {name: name for name in ("full", "selective", "none")})
    method, layers = u.text("recompute_method"), u.whole("recompute_num_layers")
    if word != "full":
        u.dead("recompute_method", "recompute_num_layers", why="only read with recompute_granularity: full")
    elif method == "block":
        u.none("recompute_method", "recompute_num_layers", why="all blocks are recomputed, or none of a component")
    elif layers not in (None, 1):
        u.none("recompute_num_layers", why=f"each block keeps its input; there every {layers}th one's is kept")
        u.same("recompute_method", why="every block is recomputed")
    else:
        u.same("recompute_method", "recompute_num_layers", why="each block keeps only its input")
    if word == "selective":
        draft.put(
            "train.recompute", "selective", u("recompute_granularity"), why="here what is cheap; there core attention"
        )
    elif word:
        draft.put("train.recompute", word, u("recompute_granularity"))
    elif usual != "none":
        draft.put("train.recompute", usual, why="their default")
    if u.flag("recompute_activations"):
        draft.put("train.recompute", "selective", u("recompute_activations"))


SAME = {
    "experts are grouped products": "moe_grouped_gemm",
    "training begins with the weights, and a new optimizer": "finetune",
    "losses never make full logits (train.logits: chunked)": "cross_entropy_loss_fusion cross_entropy_fusion_impl",
}


def rest(draft: Draft, u: Under) -> None:
    draft.table("default", {why: " ".join(u(name) for name in names.split()) for why, names in SAME.items()})
    draft.table("none", {why: " ".join(u(name) for name in names.split()) for why, names in NONE.items()})
