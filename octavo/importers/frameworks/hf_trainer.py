"""The arguments of transformers' Trainer, which LLaMA-Factory, ms-swift, VILA and COAT take as they are (and axolotl
under other names): steps, optimizer, precision, saving, ranks. Names and defaults as in transformers 5.23."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from octavo.importers.common import steps_and_schedule
from octavo.importers.common.draft import Draft, choice
from octavo.importers.source.root_folder import section

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
    "accelerate's own file, which is not read: FSDP2 shards over all ranks; optimizer.offload moves states to the host":
    "config_file",
    "evaluation takes train.micro_batch samples at a time": "per_device_eval_batch_size eval_accumulation_steps "
    "eval_batch_size",
    "nothing is uploaded; all output is in the run's directory": "push_to_hub hub_* run_name project "
    "trackio_*",
    "the last weights are exported; every checkpoint that is kept can be (octavo export)": "load_best_model_at_end "
    "metric_for_best_model greater_is_better early_stopping_*",
    "data workers return rows in order, pinned if there is a GPU, and have no such settings":
    "dataloader_pin_memory dataloader_persistent_workers dataloader_prefetch_factor dataloader_in_order "
    "dataloader_multiprocessing_context",
    "there is no such sampler: all rows of an epoch are shuffled with run.seed": "group_by_length length_column_name "
    "train_sampling_strategy data_seed disable_shuffling",
    "no noise is added to embeddings here": "neftune_noise_alpha",
    "FSDP2 has no such setting": "ddp_backend ddp_find_unused_parameters ddp_bucket_cap_mb ddp_broadcast_buffers "
    "ddp_static_graph fsdp_min_num_params fsdp_transformer_layer_cls_to_wrap zero_hpz_partition_size "
    "deepspeed_autotp_size local_rank parallelism_config accelerator_config average_tokens_across_devices",
    "options of the trainer that Octavo lacks": "torch_empty_cache_steps auto_find_batch_size use_cpu debug "
    "full_determinism ignore_data_skip restore_callback_states_from_checkpoint enable_jit_checkpoint label_names "
    "skip_memory_metrics optim_args optim_target_modules batch_eval_metrics include_for_metrics prediction_loss_only "
    "enable_torch_profiler profiler_* profile_modules "
    "bf16_full_eval fp16_full_eval torch_compile_backend torch_compile_mode predict_with_generate "
    "generation_max_length generation_num_beams sortish_sampler jit_mode_eval",
    "loss of each data set, figures of speed and of tokens are in metrics.jsonl of every run": "log_* "
    "logging_strategy logging_first_step logging_nan_inf_filter include_num_input_tokens_seen "
    "include_tokens_per_second disable_tqdm "
    "include_effective_tokens_per_second plot_loss logging_dir",
    "the folder of a run is never overwritten: name another run.dir, or go on with run.resume": "overwrite_output_dir",
}  # fmt: skip
SAME = {
    "Octavo trains, and evaluates where data.eval names rows": "do_train do_eval do_predict eval_on_start eval_delay "
    "eval_do_concat_batches eval_use_gather_object",
    "Octavo takes what it needs of a row": "remove_unused_columns",
    "an incomplete last batch is filled from the next epoch": "dataloader_drop_last",
    "no key-value cache while training": "use_cache",
    "a run's directory is on storage that all hosts see": "save_on_each_node",
    "fp32 matrix products follow torch's setting; layers multiply in BF16 or FP8": "tf32",
    "recomputation is never reentrant": "gradient_checkpointing_kwargs* activation_checkpointing_kwargs*",
    "Octavo's loss never makes full logits (train.logits: chunked)": "use_liger_kernel liger_kernel_config* "
    "enable_liger_kernel",
    "seconds that ranks wait for each other are run.timeout, 600 unless it is set": "ddp_timeout",
    "the launch says where ranks meet, to torchrun or to octavo train --nproc": "node_rank master_addr master_port "
    "rdzv_backend rdzv_endpoint rdzv_id rdzv_conf standalone hostfile include exclude monitor_interval max_restarts "
    "machine_rank "
    "main_process_port main_process_ip mixed_precision num_cpu_threads_per_process",
}  # fmt: skip
ENVIRONMENT = {
    "a variable of the environment: Octavo does not read it; set it before octavo train if a library needs it": "$*",
}


@dataclass(frozen=True)
class Usual:
    """What the framework takes where nothing is said."""

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


def steps(draft: Draft, usual: Usual, ranks: int, packed: bool = False) -> None:
    """Translate batch size, length and learning rate. ``ranks``: processes that see different rows."""
    keys = ("per_device_train_batch_size", "gradient_accumulation_steps")
    micro = steps_and_schedule.counted(draft, keys[0]) or usual.micro
    accumulation = steps_and_schedule.counted(draft, keys[1]) or usual.accumulation
    steps_and_schedule.batch(draft, micro, accumulation, ranks, *keys, packed=packed)
    epochs = draft.number("num_train_epochs")
    steps_and_schedule.length(
        draft, draft.whole("max_steps"), usual.epochs if epochs is None else epochs, "max_steps", "num_train_epochs"
    )
    draft.put("train.lr", draft.number("learning_rate", usual.lr), "learning_rate")
    kind = steps_and_schedule.schedule(draft, "lr_scheduler_type", usual.schedule)
    # min_lr is a rate, min_lr_rate a fraction of the peak; other arguments of the schedule have no equivalent.
    inner = ["lr_scheduler_kwargs", *draft.under("lr_scheduler_kwargs.")]
    least, rate = (draft.number_in("lr_scheduler_kwargs", name) for name in ("min_lr", "min_lr_rate"))
    if kind == "cosine" and least is not None:
        draft.put("train.min_lr", float(least), *inner)
    elif kind == "cosine" and rate is not None:
        peak = draft.settings["train.lr"].value
        draft.put("train.min_lr", rate * peak, *inner, why="min_lr_rate x lr")
    else:
        draft.none(*inner, why="Octavo's schedules have only train.min_lr")
    steps_and_schedule.warmup(draft, ranks, "warmup_steps", "warmup_ratio")
    if (clip := draft.number("max_grad_norm")) is not None:
        draft.put("train.clip", clip, "max_grad_norm")
    if smooth := draft.number("label_smoothing_factor"):
        draft.put("train.label_smoothing", smooth, "label_smoothing_factor")
    if draft.flag("torch_compile"):
        draft.put("train.compile", True, "torch_compile")


def optimizer(draft: Draft, usual: Usual, key: str = "optim") -> None:
    """Translate AdamW and the form of its states; other optimizers have no equivalent."""
    beta1, beta2 = draft.number("adam_beta1"), draft.number("adam_beta2")
    betas = [usual.betas[0] if beta1 is None else beta1, usual.betas[1] if beta2 is None else beta2]
    draft.put("optimizer.betas", betas, "adam_beta1", "adam_beta2")
    if (eps := draft.number("adam_epsilon")) is not None:
        draft.put("optimizer.eps", eps, "adam_epsilon")
    decay = draft.number("weight_decay")
    draft.put("optimizer.weight_decay", usual.decay if decay is None else decay, "weight_decay")
    word = (draft.text(key) or "adamw_torch").lower()
    if word in _STATES:
        draft.put(
            "optimizer.states", _STATES[word], key, why="8 bits per moment: E4M3 with a scale per block, not integers"
        )
    elif word in _ADAMW:
        draft.same(key, why="AdamW")
    else:
        draft.none(
            key,
            why=f"AdamW is the only optimizer, not {word}; optimizer.states: fp8 and master: bf16+sr save memory",
        )


def precision(draft: Draft, lora: bool) -> None:
    """Translate bf16, fp16, or neither."""
    bf16, fp16 = draft.flag("bf16"), draft.flag("fp16")
    if bf16:
        draft.put("train.precision", "bf16", "bf16")
        draft.same("fp16", why="bf16 decides")
    elif fp16 and lora:
        draft.none("fp16", why="the base of LoRA is BF16 here, and adapters compute as it does")
    elif fp16:
        draft.put("train.precision", "fp16", "fp16", why="losses are scaled as there (train.loss_scale)")
    else:
        draft.same("bf16", "fp16", why="off; train.precision: auto is BF16 on a GPU, fp32 on a CPU")


def recompute(draft: Draft, usual: Usual, key: str = "gradient_checkpointing", off: str | None = None) -> None:
    """Translate gradient checkpointing, which keeps only the inputs of blocks: `full`."""
    key = "activation_checkpointing" if "activation_checkpointing" in draft.source_keys else key  # its newer name
    enabled = draft.flag(key)
    if off is not None and (disabled := draft.flag(off)) is not None:
        draft.put("train.recompute", "none" if disabled else "full", off)
        return
    on = usual.recompute if enabled is None else enabled
    draft.put("train.recompute", "full" if on else "none", key, why="" if key in draft.source_keys else "their default")


def saving(draft: Draft, usual: Usual, ranks: int) -> None:
    """Translate checkpoints, logs, evaluation, trackers and the seed."""
    # save_strategy decides whether save_steps is read at all.
    strategy = draft.text("save_strategy")
    if strategy in ("no", "false"):
        draft.put("run.save_every", 0, "save_strategy", why="only at the end")
        draft.dead("save_steps", why="save_strategy is no")
    elif strategy == "epoch":
        _by_epoch(draft, "run.save_every", "save_strategy", ranks)
        draft.dead("save_steps", why="save_strategy is epoch")
    else:
        steps_and_schedule.every(draft, "run.save_every", "save_steps", ranks, usual.save)
        draft.same("save_strategy", why="by steps")
    if (limit := draft.whole("save_total_limit")) is not None:
        draft.put("run.keep", max(1, limit), "save_total_limit")
    if draft.flag("save_only_model"):
        draft.put("run.save_states", False, "save_only_model", why="such a checkpoint cannot be continued")
    else:
        draft.same("save_only_model", why="optimizer and random states are saved")
    _evaluation(draft, ranks)
    if (log := draft.number("logging_steps")) is not None and log >= 1:
        draft.put("run.log_every", int(log), "logging_steps")
    elif log is not None:
        draft.none("logging_steps", why="a fraction of the run: run.log_every counts steps")
    draft.put("run.seed", usual.seed if (seed := draft.whole("seed")) is None else seed, "seed")
    if directory := draft.text("output_dir"):
        draft.put("run.dir", directory, "output_dir")
    resume(draft, "resume_from_checkpoint")
    trackers(draft, "report_to")
    if (workers := draft.whole("dataloader_num_workers")) is not None:
        draft.put("data.workers", workers, "dataloader_num_workers")


def _by_epoch(draft: Draft, target: str, key: str, ranks: int, times: int = 1) -> None:
    one = steps_and_schedule.steps_of_epoch(draft, ranks)
    if one is None:
        draft.none(key, why=f"{target} counts steps, and the steps of an epoch are unknown: set --rows N, or set it")
    else:
        draft.put(target, max(1, one // times), key, why=f"{one} steps an epoch")


def _evaluation(draft: Draft, ranks: int) -> None:
    strategy_key = "eval_strategy" if "eval_strategy" in draft.source_keys else "evaluation_strategy"
    strategy = draft.text(strategy_key)
    draft.read_keys.update(("eval_strategy", "evaluation_strategy"))
    if "data.eval.0.path" not in draft.settings and strategy in ("no", "false"):
        draft.same(strategy_key, why="nothing is evaluated")
        draft.dead("eval_steps", why=f"{strategy_key} is no")
    elif "data.eval.0.path" not in draft.settings:
        why = "the translated files have no held-out rows (data.eval)"
        draft.none("eval_strategy", "evaluation_strategy", "eval_steps", why=why)
    elif strategy in ("no", "false"):
        draft.put("run.eval_every", 0, strategy_key, why="only at the end")
        draft.dead("eval_steps", why=f"{strategy_key} is no")
    elif strategy == "epoch":
        _by_epoch(draft, "run.eval_every", strategy_key, ranks)
    else:
        steps_and_schedule.every(draft, "run.eval_every", "eval_steps", ranks)
        draft.same(strategy_key, why="by steps")


def resume(draft: Draft, key: str) -> None:
    """Translate resuming: `auto` stays; a checkpoint of another framework cannot be continued."""
    word = draft.text(key)
    if word in ("true", "latest", "auto"):
        draft.put("run.resume", "auto", key)
    elif word not in (None, "false", "none", "null"):
        why = "its checkpoints have other states than Octavo's; to start from their weights, set a Hugging Face"
        draft.none(key, why=f"{why} folder in model.path")
    elif word is not None:
        draft.same(key, why="starts from the beginning")


def trackers(draft: Draft, key: str) -> None:
    """Translate the trackers."""
    words = [word.lower() for word in draft.words(key)]
    if not words or words == ["all"]:
        draft.same(key, why="TensorBoard is written; name others in run.trackers")
        return
    ours = [word for word in words if word in _TRACKERS]
    if ours:
        draft.put("run.trackers", ours, key)
    elif words == ["tensorboard"]:
        draft.same(key, why="TensorBoard is written")
    if words == ["none"]:
        draft.put("run.tensorboard", False, key)
    elif "tensorboard" not in words:
        draft.put("run.tensorboard", False, why="not in report_to")
    if odd := [word for word in words if word not in (*_TRACKERS, "none", "tensorboard", "all")]:
        draft.none(key, why=f"{', '.join(odd)}: there are {', '.join(_TRACKERS)} and TensorBoard")


def ranks(draft: Draft) -> None:
    """Translate DeepSpeed and FSDP. Sharding does not change the numbers; offloading to the host is kept."""
    draft.none("fsdp_final_state_dict_type", why="hf/ and checkpoints are written by all ranks")
    sharded = "FSDP2 shards parameters, gradients and states over all ranks (parallel.shard: auto)"
    if word := draft.text("deepspeed"):
        stage, offload, read = _deepspeed(draft, word)
        why = f"{sharded}; {'ZeRO ' + stage if stage else 'its ZeRO stage'} changes only what is kept whole"
        why += "" if read else "; its file is not on this machine, and was not read"
        draft.put("parallel.shard", "auto", "deepspeed", why=why)
        if offload:
            draft.put("optimizer.offload", True, "deepspeed", why="its optimizer is in host memory")
    inner = draft.under("fsdp_config.")
    if words := draft.words("fsdp", " "):
        draft.put("parallel.shard", "auto", "fsdp", why=sharded)
        if "offload" in words:
            draft.put("optimizer.offload", True, "fsdp", why="offload; parameters stay on the GPU here")
    # Transformers accepts these keys with and without the prefix fsdp_.
    for key in inner:
        name = key.rpartition(".")[2].removeprefix("fsdp_")
        if name in ("offload_params", "cpu_offload") and draft.flag(key):
            draft.put("optimizer.offload", True, key, why="states go to the host; parameters stay on the GPU here")
        elif name in ("activation_checkpointing", "activation_checkpoint") and draft.flag(key):
            draft.put("train.recompute", "full", key)
        elif name == "sharding_strategy" and "HYBRID" in (draft.text(key) or "").upper():
            draft.none(key, why="copies of the model are parallel.replicate: set it to the number of hosts")
        else:
            draft.same(key, why=sharded)
    draft.same("fsdp_config", why=sharded)


def _deepspeed(draft: Draft, word: str) -> tuple[str | None, bool, bool]:
    """(stage, whether the optimizer is offloaded, whether its file was read)."""
    inside = section(draft.folder.json(word), "zero_optimization") if Path(word).suffix == ".json" else {}
    name = Path(word).stem.lower()
    stage = inside.get("stage", next((d for d in "3210" if f"z{d}" in name or f"zero{d}" in name), None))
    device = section(inside, "offload_optimizer").get("device")
    offload = device not in (None, "none") if inside else "offload" in name
    return None if stage is None else str(stage), offload, bool(inside) or Path(word).suffix != ".json"


def rest(draft: Draft) -> None:
    """Report the remaining arguments of the trainer and of the launcher."""
    draft.table("none", NONE)
    draft.table("default", SAME)
    draft.table("none", ENVIRONMENT)


def preference(draft: Draft, loss_key: str, known: dict[str, str], beta: float | None, beta_key: str) -> str | None:
    """Translate the preference loss; the default beta is set if it differs from Octavo's."""
    word = draft.words(loss_key)
    if len(word) > 1:
        draft.none(loss_key, why="one loss per run: the first is used, mixtures (MPO) are not implemented")
    name = (word or ["sigmoid"])[0].lower()
    if name not in known:
        draft.none(loss_key, why=f"there is no preference loss {name}; sigmoid (DPO) is used instead")
        name = "sigmoid"
    draft.put("preference.loss", known.get(name, "sigmoid"), loss_key)
    if beta is not None:
        draft.put("preference.beta", beta, beta_key)
    return known.get(name)


__all__ = [
    "ENVIRONMENT", "NONE", "SAME", "Usual", "choice", "optimizer", "precision", "preference", "ranks", "recompute",
    "rest", "resume", "saving", "steps", "trackers",
]  # fmt: skip
