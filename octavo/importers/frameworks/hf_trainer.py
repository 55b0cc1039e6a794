"""The arguments of transformers' Trainer, which LLaMA-Factory, ms-swift, VILA and COAT take as they are (and axolotl
under other names): steps, optimizer, precision, saving, ranks. Names and defaults as in transformers 5.23."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from octavo.importers.common import steps_and_schedule
from octavo.importers.common.draft import Draft
from octavo.importers.source.root_folder import get_mapping

_TRACKERS = ("wandb", "trackio", "mlflow", "swanlab")
_STATES = {
    **dict.fromkeys(("adamw_bnb_8bit", "adamw_8bit", "paged_adamw_8bit", "adamw_torch_8bit", "ademamix_8bit"), "fp8"),
}
_ADAMW: tuple[str, ...] = (
    "adamw_torch",
    "adamw_torch_fused",
    "adamw_hf",
    "adamw_torch_xla",
    "adamw_torch_npu_fused",
    "adamw_apex_fused",
)
_ADAMW += ("adamw", "paged_adamw_32bit", "paged_adamw", "adamw_anyprecision")

#: reasons for keys that have no other outcome
NONE = {
    "accelerate's config file is not read: FSDP2 shards over all ranks; optimizer.offload moves states to the host":
    "config_file",
    "evaluation uses batches of train.micro_batch samples": "per_device_eval_batch_size eval_accumulation_steps "
    "eval_batch_size",
    "nothing is uploaded; all output is in the run's directory": "push_to_hub hub_* run_name project trackio_*",
    "the last weights are exported; octavo export exports any other checkpoint that is kept": "load_best_model_at_end "
    "metric_for_best_model greater_is_better early_stopping_*",
    "data workers return rows in order, in pinned memory if there is a GPU; this is not configurable":
    "dataloader_pin_memory dataloader_persistent_workers dataloader_prefetch_factor dataloader_in_order "
    "dataloader_multiprocessing_context",
    "all rows of an epoch are shuffled with run.seed; there is no other sampler": "group_by_length length_column_name "
    "train_sampling_strategy data_seed disable_shuffling",
    "noise on embeddings is not implemented": "neftune_noise_alpha",
    "FSDP2 has no such setting": "ddp_backend ddp_find_unused_parameters ddp_bucket_cap_mb ddp_broadcast_buffers "
    "ddp_static_graph fsdp_min_num_params fsdp_transformer_layer_cls_to_wrap zero_hpz_partition_size "
    "deepspeed_autotp_size local_rank parallelism_config accelerator_config average_tokens_across_devices",
    "trainer options that Octavo does not have": "torch_empty_cache_steps auto_find_batch_size use_cpu debug "
    "full_determinism ignore_data_skip restore_callback_states_from_checkpoint enable_jit_checkpoint label_names "
    "skip_memory_metrics optim_args optim_target_modules batch_eval_metrics include_for_metrics prediction_loss_only "
    "enable_torch_profiler profiler_* profile_modules bf16_full_eval fp16_full_eval torch_compile_backend "
    "torch_compile_mode predict_with_generate generation_max_length generation_num_beams sortish_sampler jit_mode_eval",
    "metrics.jsonl always has the loss of each data set, throughput and token counts": "log_* logging_strategy "
    "logging_first_step logging_nan_inf_filter include_num_input_tokens_seen include_tokens_per_second disable_tqdm "
    "include_effective_tokens_per_second plot_loss logging_dir",
    "run directories are never overwritten: choose another run.dir, or resume with run.resume": "overwrite_output_dir",
}  # fmt: skip
SAME = {
    "Octavo trains, and evaluates if data.eval is set": "do_train do_eval do_predict eval_on_start eval_delay "
    "eval_do_concat_batches eval_use_gather_object",
    "unused columns are ignored": "remove_unused_columns",
    "an incomplete last batch is filled from the next epoch": "dataloader_drop_last",
    "training uses no key-value cache": "use_cache",
    "the run directory is on storage shared by all hosts": "save_on_each_node",
    "fp32 matrix products follow torch's setting; linear layers run in BF16 or FP8": "tf32",
    "recomputation is non-reentrant": "gradient_checkpointing_kwargs* activation_checkpointing_kwargs*",
    "Octavo's loss never materializes full logits (train.logits: chunked)": "use_liger_kernel liger_kernel_config* "
    "enable_liger_kernel",
    "run.timeout sets how long ranks wait for each other (default: 600 seconds)": "ddp_timeout",
    "the rendezvous is set on the command line of torchrun or octavo train --nproc": "node_rank master_addr "
    "master_port rdzv_backend rdzv_endpoint rdzv_id rdzv_conf standalone hostfile include exclude monitor_interval "
    "max_restarts machine_rank main_process_port main_process_ip mixed_precision num_cpu_threads_per_process",
}  # fmt: skip
ENVIRONMENT = {
    "environment variable that Octavo does not read; set it before octavo train if a library needs it": "$*",
}


@dataclass(frozen=True)
class Defaults:
    """The framework's defaults for keys that are not set."""

    micro: int = 8
    accumulation: int = 1
    lr: float = 5e-5
    schedule: str = "linear"
    betas: tuple[float, float] = (0.9, 0.999)
    decay: float = 0.0
    epochs: float = 3.0
    save: int | None = 500
    seed: int = 42
    recompute: bool = False


def set_steps(draft: Draft, defaults: Defaults, ranks: int, packed: bool = False) -> None:
    """Translate batch size, length and learning rate. ``ranks``: processes that read different rows."""
    keys = ("per_device_train_batch_size", "gradient_accumulation_steps")
    micro = steps_and_schedule.positive_count(draft, keys[0]) or defaults.micro
    accumulation = steps_and_schedule.positive_count(draft, keys[1]) or defaults.accumulation
    steps_and_schedule.set_batch_size(draft, micro, accumulation, ranks, *keys, packed=packed)
    epochs = draft.number("num_train_epochs")
    steps_and_schedule.set_length(
        draft,
        draft.integer("max_steps"),
        defaults.epochs if epochs is None else epochs,
        "max_steps",
        "num_train_epochs",
    )
    draft.set("train.lr", draft.number("learning_rate", defaults.lr), "learning_rate")
    kind = steps_and_schedule.set_schedule(draft, "lr_scheduler_type", defaults.schedule)
    # min_lr is a rate, min_lr_rate a fraction of the peak; other arguments of the schedule have no equivalent.
    inner = ["lr_scheduler_kwargs", *draft.keys_under("lr_scheduler_kwargs.")]
    min_lr, rate = (draft.number_in("lr_scheduler_kwargs", name) for name in ("min_lr", "min_lr_rate"))
    if kind == "cosine" and min_lr is not None:
        draft.set("train.min_lr", float(min_lr), *inner)
    elif kind == "cosine" and rate is not None:
        peak = draft.settings["train.lr"].value
        draft.set("train.min_lr", rate * peak, *inner, why="min_lr_rate x lr")
    else:
        draft.mark_unsupported(*inner, why="schedules only have train.min_lr")
    steps_and_schedule.set_warmup(draft, ranks, "warmup_steps", "warmup_ratio")
    if (clip := draft.number("max_grad_norm")) is not None:
        draft.set("train.clip", clip, "max_grad_norm")
    if label_smoothing := draft.number("label_smoothing_factor"):
        draft.set("train.label_smoothing", label_smoothing, "label_smoothing_factor")
    if draft.flag("torch_compile"):
        draft.set("train.compile", True, "torch_compile")


def set_optimizer(draft: Draft, defaults: Defaults, key: str = "optim") -> None:
    """Translate AdamW and the format of its states; other optimizers have no equivalent."""
    beta1, beta2 = draft.number("adam_beta1"), draft.number("adam_beta2")
    betas = [defaults.betas[0] if beta1 is None else beta1, defaults.betas[1] if beta2 is None else beta2]
    draft.set("optimizer.betas", betas, "adam_beta1", "adam_beta2")
    if (eps := draft.number("adam_epsilon")) is not None:
        draft.set("optimizer.eps", eps, "adam_epsilon")
    decay = draft.number("weight_decay")
    draft.set("optimizer.weight_decay", defaults.decay if decay is None else decay, "weight_decay")
    word = (draft.text(key) or "adamw_torch").lower()
    if word in _STATES:
        draft.set(
            "optimizer.states",
            _STATES[word],
            key,
            why="8 bits per moment: E4M3 with one scale per block instead of integers",
        )
    elif word in _ADAMW:
        draft.mark_default(key, why="AdamW")
    else:
        draft.mark_unsupported(
            key,
            why=f"{word} is not implemented, only AdamW; optimizer.states: fp8 and master: bf16+sr save memory",
        )


def set_precision(draft: Draft, lora: bool) -> None:
    """Translate bf16, fp16, or neither."""
    bf16, fp16 = draft.flag("bf16"), draft.flag("fp16")
    if bf16:
        draft.set("train.precision", "bf16", "bf16")
        draft.mark_default("fp16", why="bf16 takes precedence")
    elif fp16 and lora:
        draft.mark_unsupported("fp16", why="Octavo keeps the LoRA base in BF16, and adapters compute in its dtype")
    elif fp16:
        draft.set("train.precision", "fp16", "fp16", why="train.loss_scale scales losses in the same way")
    else:
        draft.mark_default("bf16", "fp16", why="off; train.precision: auto is BF16 on a GPU, fp32 on a CPU")


def set_recompute(
    draft: Draft, defaults: Defaults, key: str = "gradient_checkpointing", off: str | None = None
) -> None:
    """Translate gradient checkpointing, which keeps only the inputs of blocks: `full`."""
    key = "activation_checkpointing" if "activation_checkpointing" in draft.source_keys else key  # its newer name
    enabled = draft.flag(key)
    if off is not None and (disabled := draft.flag(off)) is not None:
        draft.set("train.recompute", "none" if disabled else "full", off)
        return
    on = defaults.recompute if enabled is None else enabled
    draft.set(
        "train.recompute",
        "full" if on else "none",
        key,
        why="" if key in draft.source_keys else "the framework's default",
    )


def set_saving(draft: Draft, defaults: Defaults, ranks: int) -> None:
    """Translate checkpoints, logs, evaluation, trackers and the seed."""
    # save_strategy decides whether save_steps is read at all.
    strategy = draft.text("save_strategy")
    if strategy in ("no", "false"):
        draft.set("run.save_every", 0, "save_strategy", why="only at the end")
        draft.mark_ignored("save_steps", why="save_strategy is no")
    elif strategy == "epoch":
        _set_interval_by_epoch(draft, "run.save_every", "save_strategy", ranks)
        draft.mark_ignored("save_steps", why="save_strategy is epoch")
    else:
        steps_and_schedule.set_interval(draft, "run.save_every", "save_steps", ranks, defaults.save)
        draft.mark_default("save_strategy", why="intervals are set in steps")
    if (limit := draft.integer("save_total_limit")) is not None:
        draft.set("run.keep", max(1, limit), "save_total_limit")
    if draft.flag("save_only_model"):
        draft.set("run.save_states", False, "save_only_model", why="such a checkpoint cannot be resumed exactly")
    else:
        draft.mark_default("save_only_model", why="optimizer and RNG states are saved")
    _set_evaluation(draft, ranks)
    if (log := draft.number("logging_steps")) is not None and log >= 1:
        draft.set("run.log_every", int(log), "logging_steps")
    elif log is not None:
        draft.mark_unsupported("logging_steps", why="a fraction of the run; run.log_every is set in steps")
    draft.set("run.seed", defaults.seed if (seed := draft.integer("seed")) is None else seed, "seed")
    if directory := draft.text("output_dir"):
        draft.set("run.dir", directory, "output_dir")
    set_resume(draft, "resume_from_checkpoint")
    set_trackers(draft, "report_to")
    if (workers := draft.integer("dataloader_num_workers")) is not None:
        draft.set("data.workers", workers, "dataloader_num_workers")


def _set_interval_by_epoch(draft: Draft, target: str, key: str, ranks: int, times: int = 1) -> None:
    epoch_steps = steps_and_schedule.steps_per_epoch(draft, ranks)
    if epoch_steps is None:
        draft.mark_unsupported(
            key, why=f"{target} is set in steps, and the steps per epoch are unknown: set --rows N, or set {target}"
        )
    else:
        draft.set(target, max(1, epoch_steps // times), key, why=f"{epoch_steps} steps per epoch")


def _set_evaluation(draft: Draft, ranks: int) -> None:
    strategy_key = "eval_strategy" if "eval_strategy" in draft.source_keys else "evaluation_strategy"
    strategy = draft.text(strategy_key)
    draft.read_keys.update(("eval_strategy", "evaluation_strategy"))
    if "data.eval.0.path" not in draft.settings and strategy in ("no", "false"):
        draft.mark_default(strategy_key, why="no evaluation")
        draft.mark_ignored("eval_steps", why=f"{strategy_key} is no")
    elif "data.eval.0.path" not in draft.settings:
        why = "the translated files have no evaluation data (data.eval)"
        draft.mark_unsupported("eval_strategy", "evaluation_strategy", "eval_steps", why=why)
    elif strategy in ("no", "false"):
        draft.set("run.eval_every", 0, strategy_key, why="only at the end")
        draft.mark_ignored("eval_steps", why=f"{strategy_key} is no")
    elif strategy == "epoch":
        _set_interval_by_epoch(draft, "run.eval_every", strategy_key, ranks)
    else:
        steps_and_schedule.set_interval(draft, "run.eval_every", "eval_steps", ranks)
        draft.mark_default(strategy_key, why="intervals are set in steps")


def set_resume(draft: Draft, key: str) -> None:
    """Translate resuming: `auto` is kept; a checkpoint of another framework cannot be resumed."""
    word = draft.text(key)
    if word in ("true", "latest", "auto"):
        draft.set("run.resume", "auto", key)
    elif word not in (None, "false", "none", "null"):
        why = "the framework's checkpoints cannot be resumed; to start from their weights, set model.path to a"
        draft.mark_unsupported(key, why=f"{why} Hugging Face folder")
    elif word is not None:
        draft.mark_default(key, why="training starts from the beginning")


def set_trackers(draft: Draft, key: str) -> None:
    """Translate the trackers."""
    words = [word.lower() for word in draft.words(key)]
    if not words or words == ["all"]:
        draft.mark_default(key, why="TensorBoard logs are always written; run.trackers adds other trackers")
        return
    supported = [word for word in words if word in _TRACKERS]
    if supported:
        draft.set("run.trackers", supported, key)
    elif words == ["tensorboard"]:
        draft.mark_default(key, why="TensorBoard logs are always written")
    if words == ["none"]:
        draft.set("run.tensorboard", False, key)
    elif "tensorboard" not in words:
        draft.set("run.tensorboard", False, why="not in report_to")
    if unsupported := [word for word in words if word not in (*_TRACKERS, "none", "tensorboard", "all")]:
        draft.mark_unsupported(
            key, why=f"{', '.join(unsupported)}: Octavo supports {', '.join(_TRACKERS)} and TensorBoard"
        )


def set_sharding(draft: Draft) -> None:
    """Translate DeepSpeed and FSDP. Sharding does not change results; offloading to the host is kept."""
    draft.mark_unsupported("fsdp_final_state_dict_type", why="all ranks write hf/ and checkpoints")
    sharded = "FSDP2 shards parameters, gradients and states over all ranks (parallel.shard: auto)"
    if word := draft.text("deepspeed"):
        stage, offload, read = _read_deepspeed(draft, word)
        why = f"{sharded}; {'ZeRO ' + stage if stage else 'its ZeRO stage'} only changes what is sharded"
        why += "" if read else "; its file is not on this machine and was not read"
        draft.set("parallel.shard", "auto", "deepspeed", why=why)
        if offload:
            draft.set("optimizer.offload", True, "deepspeed", why="DeepSpeed keeps the optimizer in host memory")
    inner = draft.keys_under("fsdp_config.")
    if words := draft.words("fsdp", " "):
        draft.set("parallel.shard", "auto", "fsdp", why=sharded)
        if "offload" in words:
            draft.set("optimizer.offload", True, "fsdp", why="states are offloaded; Octavo keeps parameters on the GPU")
    # Transformers accepts these keys with and without the prefix fsdp_.
    for key in inner:
        name = key.rpartition(".")[2].removeprefix("fsdp_")
        if name in ("offload_params", "cpu_offload") and draft.flag(key):
            draft.set("optimizer.offload", True, key, why="states are offloaded; Octavo keeps parameters on the GPU")
        elif name in ("activation_checkpointing", "activation_checkpoint") and draft.flag(key):
            draft.set("train.recompute", "full", key)
        elif name == "sharding_strategy" and "HYBRID" in (draft.text(key) or "").upper():
            draft.mark_unsupported(key, why="hybrid sharding is parallel.replicate; set it to the number of hosts")
        else:
            draft.mark_default(key, why=sharded)
    draft.mark_default("fsdp_config", why=sharded)


def _read_deepspeed(draft: Draft, word: str) -> tuple[str | None, bool, bool]:
    """Return (ZeRO stage, whether the optimizer is offloaded, whether the configuration file was read)."""
    inside = get_mapping(draft.folder.json(word), "zero_optimization") if Path(word).suffix == ".json" else {}
    name = Path(word).stem.lower()
    stage = inside.get("stage", next((d for d in "3210" if f"z{d}" in name or f"zero{d}" in name), None))
    device = get_mapping(inside, "offload_optimizer").get("device")
    offload = device not in (None, "none") if inside else "offload" in name
    return None if stage is None else str(stage), offload, bool(inside) or Path(word).suffix != ".json"


def mark_remaining(draft: Draft) -> None:
    """Report the remaining arguments of the trainer and of the launcher."""
    draft.mark_many("none", NONE)
    draft.mark_many("default", SAME)
    draft.mark_many("none", ENVIRONMENT)


def set_preference(draft: Draft, loss_key: str, known: dict[str, str], beta: float | None, beta_key: str) -> str | None:
    """Translate the preference loss; the default beta is set if it differs from Octavo's."""
    word = draft.words(loss_key)
    if len(word) > 1:
        draft.mark_unsupported(loss_key, why="one loss per run: the first is used; mixtures (MPO) are not implemented")
    name = (word or ["sigmoid"])[0].lower()
    if name not in known:
        draft.mark_unsupported(
            loss_key, why=f"preference loss {name} is not implemented; sigmoid (DPO) is used instead"
        )
        name = "sigmoid"
    draft.set("preference.loss", known.get(name, "sigmoid"), loss_key)
    if beta is not None:
        draft.set("preference.beta", beta, beta_key)
    return known.get(name)
