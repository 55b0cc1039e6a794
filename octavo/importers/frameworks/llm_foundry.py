"""LLM-Foundry's YAML for Composer (read at its release of 2025): MPT described by numbers, or a model of the hub.

Durations have a unit: ``24800ba`` are batches (Octavo's steps), ``1ep`` epochs, ``26e9tok`` tokens, and ``0.1dur`` is
a fraction of the run.
"""

from __future__ import annotations

import math
import re

from octavo.base import suffixes
from octavo.importers.common import model_and_data, steps_and_schedule
from octavo.importers.common.draft import LARGEST, Draft
from octavo.importers.frameworks import hf_trainer, mpt_configs

NAME = "llm-foundry"
MARKS = ("max_duration", "global_train_batch_size", "device_train_microbatch_size", "model.name", "train_loader.*",
         "scheduler.t_warmup", "max_seq_len")  # fmt: skip
FIRST_WINS = False
_TIME = re.compile(r"\s*((?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?)\s*(ba|ep|tok|sp|dur|iter|sec)?\s*")
#: sizes of micro-batches that are tried
_BATCH = 1 << 16
_SCHEDULES = {
    "cosine_with_warmup": "cosine",
    "cosine": "cosine",
    "linear_decay_with_warmup": "linear",
    "linear": "linear",
    "constant_with_warmup": "constant",
    "constant": "constant",
}

NONE = {
    "the tokenizer and chat template come from the model folder": "tokenizer.* tokenizer_name",
    "Octavo reads JSON, JSONL, parquet and tar; MDS shards of mosaicml-streaming are not supported": "*.dataset.remote "
    "*.dataset.shuffle_seed *.dataset.shuffle_algo *.dataset.shuffle_block_size *.dataset.num_canonical_nodes "
    "*.dataset.predownload *.dataset.cache_limit *.dataset.download_* *.dataset.validate_hash *.dataset.keep_zip "
    "*.dataset.streams.* *.dataset.epoch_size *.dataset.batching_method *.dataset.partition_algo *.dataset.safe_*",
    "a function that formats prompts; known row layouts need none (docs/data.md)": "*.dataset.preprocessing_fn "
    "*.dataset.hf_kwargs* *.dataset.target_prompts *.dataset.target_responses *.dataset.max_leftover* "
    "*.dataset.decoder_only_format *.dataset.allow_pad_trimming *.dataset.pad_to_longest *.dataset.eos_token_id "
    "*.dataset.bos_token_id *.dataset.packing_ratio",
    "data workers return rows in order; this is not configurable": "*.pin_memory *.prefetch_factor "
    "*.persistent_workers *.timeout *.drop_last *.num_workers *.collate_fn*",
    "in-context learning evaluation is not implemented": "icl_* eval_gauntlet* eval_loaders* device_eval_batch_size "
    "eval_subset_num_batches eval_first",
    "metrics.jsonl always has throughput, memory and learning rate": "callbacks* callbacks.* console_log_interval "
    "log_to_console progress_bar python_log_level log_config profiler*",
    "Octavo configures FSDP2 automatically": "fsdp_config.mixed_precision fsdp_config.limit_all_gathers "
    "fsdp_config.verbose fsdp_config.forward_prefetch fsdp_config.backward_prefetch fsdp_config.state_dict_type "
    "fsdp_config.use_orig_params fsdp_config.sync_module_states fsdp_config.load_planner* fsdp_config.* "
    "parallelism_config.*",
    "run names, metadata and remote saving are not configured in the file": "only_hf_checkpoint "
    "only_composer_checkpoint run_name metadata* save_latest_filename save_filename save_ignore_keys load_ignore_keys "
    "load_strict_model_weights save_overwrite run_id",
    "setting of Composer's process": "spin_dataloaders flatten_metadata tp_config* max_split_size_mb "
    "expandable_segments cuda_load_lazy code_paths* dist_timeout compile_config* autoresume_* device_train_batch_size "
    "n_gpus device_train_grad_accum train_loader.replication",
    "an epoch covers all rows": "train_subset_num_batches",
    "layers are Octavo's": "model.convert_to model.trust_remote_code model.use_cache model.use_pad_tok_in_ffn "
    "model.attn_config.attn_impl model.attn_config.fused_qkv model.attn_config.rope_* model.attn_config.flex_attn_*",
    "the architecture of a hub model comes from its config.json": "model.config_overrides* model.use_auth_token "
    "model.use_train_metrics model.additional_*metrics* model.shift_labels model.attn_config.* model.init_config.* "
    "model.allow_embedding_resizing model.use_flash_attention_2 model.should_save_peft_only",
    "the loss never materializes full logits (train.logits: chunked)": "model.loss_fn model.return_lm_predictions",
    "setting of Transformer Engine's FP8": "precision_config.*",
}  # fmt: skip
SAME = {
    "only used by keys that refer to it": "variables variables.* data_local data_remote global_seed seed_everything",
    "weights are initialized after sharding": "model.init_device",
    "rows are shuffled with run.seed": "*.dataset.shuffle",
}


def translate(draft: Draft) -> None:
    world = steps_and_schedule.count_processes(draft)
    _translate_model(draft)
    phase = "sft" if draft.text("train_loader.name") == "finetuning" else "pretrain"
    draft.set("train.phase", phase, "train_loader.name")
    _translate_lora(draft)
    _translate_data(draft, phase)
    packed = _translate_packing(draft, phase)
    _translate_steps(draft, world, packed)
    draft.set("train.loss", "token", why="mean over tokens")
    draft.mark_default("accumulate_train_batch_on_tokens", why="the loss is a mean over tokens")
    _translate_optimizer(draft)
    _translate_precision(draft)
    _translate_memory(draft)
    _translate_saving(draft, world)
    draft.mark_many("none", NONE)
    draft.mark_many("default", SAME)
    draft.mark_many("none", hf_trainer.ENVIRONMENT)
    draft.mark_many("default", hf_trainer.SAME)


def _translate_model(draft: Draft) -> None:
    """Translate the model: one from the hub or a folder, or an architecture that the file describes."""
    name = draft.text("model.name") or ""
    if name == "mpt_causal_lm":
        mpt_configs.write_config(draft, f"{draft.out_name}_model")
        return
    if name in ("hf_t5", "hf_prefix_lm"):
        draft.refuse("model.name", "Octavo only trains decoder models")
    if name == "hf_causal_lm":
        model_and_data.set_model_path(draft, "model.pretrained_model_name_or_path")
        draft.mark_default("model.name", why="the model is loaded from a folder or the hub")
        pretrained = draft.flag("model.pretrained")
        if pretrained is False:
            draft.set("model.init", "random", "model.pretrained")
        else:
            draft.mark_default("model.pretrained", why="training starts from the model's weights")
        return
    draft.mark_invalid("model.name", "mpt_causal_lm or hf_causal_lm") if "model.name" in draft.source_keys else None
    model_and_data.set_model_path(draft)


def _translate_lora(draft: Draft) -> None:
    keys = draft.keys_under("model.peft_config.") or draft.keys_under("lora.args.")
    if not keys:
        return
    at = "model.peft_config." if draft.keys_under("model.peft_config.") else "lora.args."
    lora_keys = {
        "rank": f"{at}r",
        "alpha": f"{at}lora_alpha",
        "dropout": f"{at}lora_dropout",
        "targets": f"{at}target_modules",
    }
    targets = draft.words(lora_keys["targets"]) or ["foundation"]
    targets = ["foundation" if word == "all-linear" else word for word in targets]
    model_and_data.set_lora(
        draft,
        draft.integer(lora_keys["rank"], 8),
        draft.number(lora_keys["alpha"], 8),
        draft.number(lora_keys["dropout"], 0.0),
        targets,
        keys=lora_keys,
    )
    model_and_data.set_lora_variants(draft, lora_keys, f"{at}use_rslora", f"{at}use_dora")
    draft.mark_default(f"{at}peft_type", f"{at}task_type", why="LoRA on a causal model")
    draft.mark_unsupported(f"{at}bias", f"{at}modules_to_save", why="only the adapters are trained")


#: note on converting MDS shards to rows with mosaicml-streaming
_SHARDS = (
    "data.{group}.0.path: {folder} has MDS shards, which are not supported. With mosaicml-streaming installed, convert "
    "them to JSON lines: python -c \"import json, streaming; rows = streaming.StreamingDataset(local='{folder}', "
    'shuffle=False, batch_size=1); print(*map(json.dumps, rows), sep=chr(10))" > {rows} (rows of text or of messages; '
    "shards of token ids must be rebuilt from their text)"
)


def _translate_data(draft: Draft, phase: str) -> None:
    for group, loader in (("train", "train_loader"), ("eval", "eval_loader")):
        at = f"{loader}.dataset."
        name, local, split = (draft.text(f"{at}{key}") for key in ("hf_name", "local", "split"))
        if not name and not local:
            continue
        if name:
            entry = model_and_data.add_dataset(draft, group, 0, name, f"{at}hf_name")
            if group == "train" and draft.num_rows is None:
                draft.num_rows = steps_and_schedule.count_rows(draft, name)
            if split and not draft.folder.exists(name):
                draft.set(f"{entry}.split", split, f"{at}split")
        # A local folder otherwise holds MDS shards, which need a conversion first.
        elif str(local).endswith((*suffixes.ROWS, ".txt")):
            model_and_data.add_dataset(draft, group, 0, str(local), f"{at}local", hub=False)
        else:
            why = "FILL IN: convert the MDS shards to JSON lines (see the notes of the report)"
            rows = f"{str(local).rstrip('/')}{f'-{split}' if split else ''}.jsonl"
            model_and_data.add_dataset(draft, group, 0, rows, f"{at}local", hub=False, why=why)
            draft.add_note(
                _SHARDS.format(group=group, folder="/".join(word for word in (local, split) if word), rows=rows)
            )
        draft.mark_default(f"{at}split", f"{at}local", why="part of the data path")
        draft.mark_default(f"{at}max_seq_len", why="train.seq_length")
        draft.mark_default(f"{loader}.name", why="set by train.phase")
    if "data.train.0.path" not in draft.settings:
        draft.set("data.train.0.path", "/path/to/data.json", why="FILL IN: no loader names training data")
        draft.add_note("FILL IN: set data.train")
    draft.set("train.seq_length", draft.integer("max_seq_len") or 2048, "max_seq_len")
    if phase == "sft":
        draft.set("data.on_long", "cut", why="longer rows are truncated")
    workers = draft.integer("train_loader.num_workers")
    if workers is not None:
        draft.set("data.workers", workers, "train_loader.num_workers")
    for key in draft.keys_under("model.max_seq_len"):
        draft.mark_default(key, why="same as max_seq_len")


def _translate_packing(draft: Draft, phase: str) -> bool:
    ratio = draft.text("train_loader.dataset.packing_ratio")
    if phase == "sft" and ratio not in (None, "1", "1.0"):
        model_and_data.set_packing(
            draft, "train_loader.dataset.packing_ratio", why="data.window determines how full packs are"
        )
        draft.mark_default("model.attn_config.attn_uses_sequence_id", why="samples do not attend to each other")
        return True
    separated = draft.flag("model.attn_config.attn_uses_sequence_id")
    if phase == "pretrain" and separated:
        why = (
            "documents of a row attend to each other in Octavo; data.packing: true with data.join: false separates them"
        )
        draft.mark_unsupported("model.attn_config.attn_uses_sequence_id", why=why)
        return False
    if phase == "pretrain":
        draft.mark_default(
            "model.attn_config.attn_uses_sequence_id",
            why="documents are concatenated and attend to each other (data.join)",
        )
    draft.mark_default(
        "train_loader.dataset.packing_ratio", "model.attn_config.attn_uses_sequence_id", why="each row is one sample"
    )
    return False


def _parse_duration(draft: Draft, key: str, batch: int, length: int) -> tuple[float, str] | None:
    """Return a duration as (number, unit), with tokens and samples converted to batches."""
    word = draft.text(key)
    if word is None:
        return None
    match = _TIME.fullmatch(word)
    number = float(match[1]) if match else math.inf
    if match is None or number > LARGEST:
        draft.mark_invalid(key, "a duration such as 100ba, 1ep, 26000000tok or 0.1dur")
        return None
    unit = match[2] or "ep"
    if unit == "tok":
        return max(1.0, number // (batch * length)), "ba"
    if unit == "sp":
        return max(1.0, number // batch), "ba"
    return number, unit


def _translate_steps(draft: Draft, world: int, packed: bool) -> None:
    total = steps_and_schedule.positive_count(draft, "global_train_batch_size") or 1
    word = draft.text("device_train_microbatch_size")
    per_rank = max(1, total // world)
    if word in (None, "auto"):
        micro = per_rank
        draft.add_note("device_train_microbatch_size is auto: each process runs its whole batch at once; octavo plan "
                   "FILE --card 80GB --fit finds a size that fits")  # fmt: skip
        draft.mark_unsupported(
            "device_train_microbatch_size", why="octavo plan --fit finds the micro-batch before the run"
        )
    else:
        micro_batch = steps_and_schedule.positive_count(draft, "device_train_microbatch_size") or 1
        micro = min(micro_batch, per_rank)  # Composer limits it to the batch of the process
    micro = _largest_divisor(per_rank, micro)
    why = "one pack" if packed else f"of {per_rank} per process" if word not in (None, "auto", str(micro)) else ""
    keys = ["device_train_microbatch_size"] if word != "auto" else []
    draft.set("train.micro_batch", 1 if packed else micro, *keys, why=why)
    draft.set("train.global_batch", total, "global_train_batch_size", why="packs" if packed else "")
    length = draft.settings["train.seq_length"].value
    duration = _parse_duration(draft, "max_duration", total, length)
    if duration:
        number, unit = duration
        if unit == "ba":
            draft.set("train.steps", int(number), "max_duration")
        elif unit == "ep":
            draft.set("train.epochs", number, "max_duration")
        else:
            draft.mark_invalid("max_duration", "a duration in ba, ep, tok or sp")
    draft.set("train.lr", draft.number("optimizer.lr", 1e-3), "optimizer.lr")
    name = draft.text("scheduler.name") or "constant"
    if name in _SCHEDULES:
        draft.set("train.schedule", _SCHEDULES[name], "scheduler.name")
    else:
        draft.set("train.schedule", "cosine", why=f"instead of {name}, which Octavo does not implement")
        draft.mark_unsupported("scheduler.name", why=f"schedule {name} is not implemented; cosine is the closest")
    final_ratio = draft.number("scheduler.alpha_f")
    if final_ratio is not None and draft.settings["train.schedule"].value != "constant":
        draft.set(
            "train.min_lr",
            final_ratio * draft.settings["train.lr"].value,
            "scheduler.alpha_f",
            why=f"{final_ratio:g} x lr",
        )
    elif final_ratio is not None:
        draft.mark_ignored("scheduler.alpha_f", why="only used with a decaying schedule")
    _translate_warmup(draft, world, total, length)
    draft.mark_unsupported(
        "scheduler.t_max", "scheduler.scale_warmup", "scheduler.t_scale", why="Octavo's schedules end with the run"
    )
    clip = draft.number("algorithms.gradient_clipping.clipping_threshold")
    kind = draft.text("algorithms.gradient_clipping.clipping_type")
    if kind not in (None, "norm"):
        why = f"gradients can only be clipped by norm, so {kind} is dropped"
        draft.mark_unsupported(*draft.keys_under("algorithms.gradient_clipping."), why=why)
        clip = None
    draft.mark_default("algorithms.gradient_clipping.clipping_type", why="clipped by the global norm")
    draft.set(
        "train.clip",
        clip or 0.0,
        *(["algorithms.gradient_clipping.clipping_threshold"] if clip else []),
        why="" if clip else "the source does not clip by norm",
    )
    draft.mark_many("none", {"Composer algorithms are not implemented": "algorithms.*"})


def _largest_divisor(number: int, limit: int) -> int:
    """Return the largest divisor of a number that is at most ``limit``."""
    pairs = ((n, number // n) for n in range(1, min(math.isqrt(number), _BATCH) + 1) if number % n == 0)
    return max(n for pair in pairs for n in pair if n <= limit or n == 1)


def _translate_warmup(draft: Draft, world: int, total: int, length: int) -> None:
    duration = _parse_duration(draft, "scheduler.t_warmup", total, length)
    if not duration:
        return
    number, unit = duration
    run_steps = steps_and_schedule.total_steps(draft, world)
    if unit == "dur" and run_steps is not None:
        number, unit = math.ceil(number * run_steps), "ba"
    elif unit == "ep" and (epoch_steps := steps_and_schedule.steps_per_epoch(draft, world)):
        number, unit = number * epoch_steps, "ba"
    if unit != "ba":
        draft.mark_unsupported("scheduler.t_warmup", why="warm-up is set in steps: set --rows N, or set train.warmup")
    elif number:
        draft.set("train.warmup", int(number), "scheduler.t_warmup")
    else:
        draft.mark_default("scheduler.t_warmup", why="no warm-up")


def _translate_optimizer(draft: Draft) -> None:
    name = draft.text("optimizer.name") or "decoupled_adamw"
    if "adamw" not in name:
        draft.mark_unsupported("optimizer.name", why=f"{name} is not implemented, only AdamW")
    else:
        draft.mark_default("optimizer.name", why="decoupled AdamW")
    betas = draft.numbers("optimizer.betas")
    draft.set("optimizer.betas", betas if len(betas) == 2 else [0.9, 0.95], "optimizer.betas")
    if (eps := draft.number("optimizer.eps")) is not None:
        draft.set("optimizer.eps", eps, "optimizer.eps")
    decay = draft.number("optimizer.weight_decay")
    if decay is None:  # Composer's own defaults
        decay = 1e-5 if name.startswith("decoupled") else 1e-2
    lr = draft.settings["train.lr"].value
    if decay and lr and name.startswith("decoupled"):
        why = f"{name} does not multiply the decay by the learning rate, Octavo does: {decay:g} / {lr:g}"
        if decay / lr <= 100:
            draft.set("optimizer.weight_decay", decay / lr, "optimizer.weight_decay", why=why)
        else:
            draft.mark_unsupported("optimizer.weight_decay", why=f"{why}, which is above Octavo's limit of 100")
    else:
        draft.set("optimizer.weight_decay", decay, "optimizer.weight_decay")


def _translate_precision(draft: Draft) -> None:
    """Translate the precision. `amp_fp8` is a context of Transformer Engine that only affects te.Linear, which
    `fc_type: te` creates."""
    word = (draft.text("precision") or "amp_bf16").lower()
    fc = (draft.text("model.fc_type") or draft.text("model.fc_type.name") or "torch").lower()
    fused = "fp8.fuse" in draft.settings
    keys = ("model.fc_type", "model.fc_type.name")
    if word == "amp_fp8" and (fc == "te" or fused):
        why = "Transformer Engine's delayed scaling: hybrid (E5M2 for dy), maximum over amax histories of length 16"
        draft.set("fp8.recipe", "delayed", "precision", *keys, why=why)
        draft.set("fp8.format", "hybrid", "precision")
        if fc != "te":
            draft.set("fp8.rules.0.match", "**.attn.**", why="only te_ln_mlp uses Transformer Engine, fc_type does not")
            draft.set("fp8.rules.0.recipe", "off", why="the attention projections ran in BF16 in the source")
        length = draft.integer("precision_config.amax_history_len")
        (draft.mark_default if length == 16 else draft.mark_unsupported)(
            "precision_config.amax_history_len", why="amax histories have length 16"
        )
        draft.set("train.precision", "bf16", why="the dtype of everything outside FP8")
    elif word == "amp_fp8":
        why = "without fc_type: te no layer uses Transformer Engine, so the run was BF16 (with a warning)"
        draft.mark_ignored("precision", why=why)
        draft.mark_ignored(*draft.keys_under("precision_config"), why=why)
        draft.set("train.precision", "bf16", why="amp_fp8 without fc_type: te runs in BF16")
    elif word in ("amp_bf16", "fp32", "amp_fp16"):
        draft.set("train.precision", word.removeprefix("amp_"), "precision")
    else:
        draft.mark_invalid("precision", "amp_fp8, amp_bf16, amp_fp16 or fp32")
    if fc == "te" and word != "amp_fp8":
        draft.mark_ignored(*keys, why="Transformer Engine layers compute in BF16 unless precision is amp_fp8")
    elif fc == "torch":
        draft.mark_default(*keys, why="plain linear layers")
    elif fc not in ("te", "torch"):
        draft.mark_unsupported(*keys, why=f"{fc} is a layer from LLM-Foundry's registry")
    # fp8.fuse belongs to FP8; without amp_fp8 the fused layers ran in BF16.
    if fused and word != "amp_fp8":
        draft.settings.pop("fp8.fuse")
    has_fp8 = any(target.startswith("fp8.recipe") for target in draft.settings)
    if not has_fp8:
        model_and_data.disable_fp8_if_unset(draft)


def _translate_memory(draft: Draft) -> None:
    f = "fsdp_config."
    on = draft.flag(f"{f}activation_checkpointing")
    draft.set("train.recompute", "full" if on else "none", f"{f}activation_checkpointing")
    draft.mark_default(f"{f}activation_checkpointing_reentrant", why="recomputation is non-reentrant")
    # Full recomputation keeps only the inputs of blocks, so there is nothing worth offloading.
    if draft.flag(f"{f}activation_cpu_offload"):
        if on:
            draft.mark_unsupported(
                f"{f}activation_cpu_offload", why="full recomputation leaves almost nothing to offload"
            )
        else:
            draft.set("train.offload_activations", True, f"{f}activation_cpu_offload")
    else:
        draft.mark_default(f"{f}activation_cpu_offload", why="off")
    strategy = (draft.text(f"{f}sharding_strategy") or "").upper()
    if "HYBRID" in strategy:
        draft.mark_unsupported(
            f"{f}sharding_strategy", why="hybrid sharding is parallel.replicate; set it to the number of hosts"
        )
    elif strategy:
        draft.set(
            "parallel.shard",
            "auto",
            f"{f}sharding_strategy",
            why="sharding does not change results",
        )
    compiled = bool(draft.keys_under("compile_config"))
    if compiled:
        draft.set("train.compile", True, *draft.keys_under("compile_config"))


def _translate_saving(draft: Draft, world: int) -> None:
    total, length = draft.settings["train.global_batch"].value, draft.settings["train.seq_length"].value
    for target, key in (("run.save_every", "save_interval"), ("run.eval_every", "eval_interval")):
        interval = _parse_duration(draft, key, total, length)
        if not interval:
            continue
        number, unit = interval
        if target == "run.eval_every" and "data.eval.0.path" not in draft.settings:
            draft.mark_unsupported(key, why="the translated files have no evaluation data (data.eval)")
            continue
        # Composer counts in batches ("ba") or epochs ("ep"); Octavo only in steps.
        epoch_steps = steps_and_schedule.steps_per_epoch(draft, world)
        if unit == "ep" and epoch_steps:
            number, unit = number * epoch_steps, "ba"
        if unit == "ba":
            draft.set(target, int(number), key)
        else:
            draft.mark_unsupported(
                key, why=f"{target} is set in steps, and the steps per epoch are unknown: set --rows N, or set {target}"
            )
    if folder := draft.text("save_folder"):
        draft.set("run.dir", folder.replace("{run_name}", draft.text("run_name") or "run"), "save_folder")
    if (keep := draft.integer("save_num_checkpoints_to_keep")) is not None and keep > 0:
        draft.set("run.keep", keep, "save_num_checkpoints_to_keep")
    elif keep is not None:
        draft.mark_unsupported(
            "save_num_checkpoints_to_keep",
            why="Composer keeps all checkpoints; Octavo keeps run.keep of the newest, and run.milestones",
        )
    if draft.flag("save_weights_only"):
        draft.set("run.save_states", False, "save_weights_only")
    draft.mark_unsupported(
        "load_path", why="Composer checkpoints are pickles, which are never opened; use a Hugging Face folder"
    )
    if draft.has("load_path"):
        draft.mark_unsupported(
            "load_weights_only", why="run.start_from starts a new run from the weights of an Octavo checkpoint"
        )
    else:
        draft.mark_ignored("load_weights_only", why="load_path is empty, so nothing is loaded")
    if draft.flag("autoresume"):
        draft.set("run.resume", "auto", "autoresume")
    draft.set("run.seed", 17 if (seed := draft.integer("seed")) is None else seed, "seed")
    draft.read_keys.add("loggers")
    names = {key.split(".")[1] for key in draft.keys_under("loggers.")}
    trackers = sorted(names & {"wandb", "mlflow"})
    if trackers:
        draft.set("run.trackers", trackers, *draft.keys_under("loggers."))
    draft.mark_many("none", {"Octavo supports wandb, mlflow, trackio, swanlab and TensorBoard": "loggers.*"})
    if (log := draft.number("log_every")) is not None:
        draft.set("run.log_every", int(log), "log_every")
