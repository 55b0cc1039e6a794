"""LLM-Foundry's YAML for Composer (read at its release of 2025): MPT described by numbers, or a model of the hub.

Lengths there carry a unit: ``24800ba`` are batches (our steps), ``1ep`` epochs, ``26e9tok`` tokens, ``0.1dur`` a share.
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
    "tokenizer and template come from the model's folder": "tokenizer.* tokenizer_name",
    "rows are JSON, JSONL, parquet or tar; MDS shards of mosaicml-streaming are not read": "*.dataset.remote "
    "*.dataset.shuffle_seed *.dataset.shuffle_algo *.dataset.shuffle_block_size *.dataset.num_canonical_nodes "
    "*.dataset.predownload *.dataset.cache_limit *.dataset.download_* *.dataset.validate_hash *.dataset.keep_zip "
    "*.dataset.streams.* *.dataset.epoch_size *.dataset.batching_method *.dataset.partition_algo *.dataset.safe_*",
    "a function that makes prompts there; rows of known layouts need none (docs/data.md)": "*.dataset.preprocessing_fn "
    "*.dataset.hf_kwargs* *.dataset.target_prompts *.dataset.target_responses *.dataset.max_leftover* "
    "*.dataset.decoder_only_format *.dataset.allow_pad_trimming *.dataset.pad_to_longest *.dataset.eos_token_id "
    "*.dataset.bos_token_id *.dataset.packing_ratio",
    "workers bring rows in their order": "*.pin_memory *.prefetch_factor *.persistent_workers *.timeout *.drop_last "
    "*.num_workers *.collate_fn*",
    "tasks in context are not evaluated here": "icl_* eval_gauntlet* eval_loaders* device_eval_batch_size "
    "eval_subset_num_batches eval_first",
    "figures of speed, memory and learning rate are in metrics.jsonl": "callbacks* callbacks.* console_log_interval "
    "log_to_console progress_bar python_log_level log_config profiler*",
    "FSDP2 wraps and shards blocks by itself": "fsdp_config.mixed_precision fsdp_config.limit_all_gathers "
    "fsdp_config.verbose fsdp_config.forward_prefetch fsdp_config.backward_prefetch fsdp_config.state_dict_type "
    "fsdp_config.use_orig_params fsdp_config.sync_module_states fsdp_config.load_planner* fsdp_config.* "
    "parallelism_config.*",
    "names, metadata and saving elsewhere are not of the configuration": "only_hf_checkpoint only_composer_checkpoint "
    "run_name metadata* save_latest_filename "
    "save_filename save_ignore_keys load_ignore_keys load_strict_model_weights save_overwrite run_id",
    "of the process there": "spin_dataloaders flatten_metadata tp_config* max_split_size_mb expandable_segments "
    "cuda_load_lazy code_paths* dist_timeout "
    "compile_config* autoresume_* device_train_batch_size n_gpus device_train_grad_accum train_loader.replication",
    "an epoch is all rows": "train_subset_num_batches",
    "layers are Octavo's": "model.convert_to model.trust_remote_code model.use_cache model.use_pad_tok_in_ffn "
    "model.attn_config.attn_impl "
    "model.attn_config.fused_qkv model.attn_config.rope_* model.attn_config.flex_attn_*",
    "the architecture of a model of the hub is its config.json's": "model.config_overrides* model.use_auth_token "
    "model.use_train_metrics model.additional_*metrics* model.shift_labels model.attn_config.* model.init_config.* "
    "model.allow_embedding_resizing model.use_flash_attention_2 model.should_save_peft_only",
    "losses never make full logits (train.logits: chunked)": "model.loss_fn model.return_lm_predictions",
    "FP8 codes are kept between steps": "precision_config.*",
}  # fmt: skip
SAME = {
    "a value that other keys refer to": "variables variables.* data_local data_remote global_seed seed_everything",
    "weights are made after sharding": "model.init_device",
    "every batch holds different rows, in an order from run.seed": "*.dataset.shuffle",
}


def translate(draft: Draft) -> None:
    world = steps_and_schedule.processes(draft)
    hub = _model(draft)
    phase = "sft" if draft.text("train_loader.name") == "finetuning" else "pretrain"
    draft.put("train.phase", phase, "train_loader.name")
    lora = _lora(draft)
    _data(draft, phase)
    packed = _packing(draft, phase)
    _steps(draft, world, packed)
    draft.put("train.loss", "token", why="by tokens")
    draft.same("accumulate_train_batch_on_tokens", why="loss by tokens")
    _optimizer(draft)
    _precision(draft, hub)
    _memory(draft)
    _saving(draft, world)
    draft.table("none", NONE)
    draft.table("default", SAME)
    draft.table("none", hf_trainer.ENVIRONMENT)
    draft.table("default", hf_trainer.SAME)
    del lora


def _model(draft: Draft) -> bool:
    """True for a model of the hub, False for one that the file describes."""
    name = draft.text("model.name") or ""
    if name == "mpt_causal_lm":
        mpt_configs.folder(draft, f"{draft.home_name}_model")
        return False
    if name in ("hf_t5", "hf_prefix_lm"):
        draft.refuse("model.name", "it is no decoder, and Octavo trains decoders")
    if name == "hf_causal_lm":
        model_and_data.model(draft, "model.pretrained_model_name_or_path")
        draft.same("model.name", why="a model of a folder or of the hub")
        pretrained = draft.flag("model.pretrained")
        if pretrained is False:
            draft.put("model.init", "random", "model.pretrained")
        else:
            draft.same("model.pretrained", why="begins with its weights")
        return True
    draft.wrong("model.name", "mpt_causal_lm or hf_causal_lm") if "model.name" in draft.source_keys else None
    model_and_data.model(draft)
    return True


def _lora(draft: Draft) -> bool:
    keys = draft.under("model.peft_config.") or draft.under("lora.args.")
    if not keys:
        return False
    at = "model.peft_config." if draft.under("model.peft_config.") else "lora.args."
    named = {
        "rank": f"{at}r",
        "alpha": f"{at}lora_alpha",
        "dropout": f"{at}lora_dropout",
        "targets": f"{at}target_modules",
    }
    targets = draft.words(named["targets"]) or ["foundation"]
    targets = ["foundation" if word == "all-linear" else word for word in targets]
    model_and_data.lora(
        draft,
        draft.whole(named["rank"], 8),
        draft.number(named["alpha"], 8),
        draft.number(named["dropout"], 0.0),
        targets,
        keys=named,
    )
    model_and_data.adapt(draft, named, f"{at}use_rslora", f"{at}use_dora")
    draft.same(f"{at}peft_type", f"{at}task_type", why="LoRA of a causal model")
    draft.none(f"{at}bias", f"{at}modules_to_save", why="only the adapters are trained")
    return True


#: how MDS shards become rows, by the library that wrote them
_SHARDS = (
    "data.{of}.0.path: {folder} holds MDS shards, which are not read. Where mosaicml-streaming is installed, write "
    "them as JSON lines: python -c \"import json, streaming; rows = streaming.StreamingDataset(local='{folder}', "
    'shuffle=False, batch_size=1); print(*map(json.dumps, rows), sep=chr(10))" > {rows} (rows of text or of messages; '
    "shards of token ids have to be made again from their text)"
)


def _data(draft: Draft, phase: str) -> None:
    for of, loader in (("train", "train_loader"), ("eval", "eval_loader")):
        at = f"{loader}.dataset."
        name, local, split = (draft.text(f"{at}{key}") for key in ("hf_name", "local", "split"))
        if not name and not local:
            continue
        if name:
            entry = model_and_data.dataset(draft, of, 0, name, f"{at}hf_name")
            if of == "train" and draft.sizes is None:
                draft.sizes = steps_and_schedule.rows_of(draft, name)
            if split and not draft.folder.there(name):
                draft.put(f"{entry}.split", split, f"{at}split")
        # A local folder otherwise holds MDS shards, which need a conversion first.
        elif str(local).endswith((*suffixes.ROWS, ".txt")):
            model_and_data.dataset(draft, of, 0, str(local), f"{at}local", hub=False)
        else:
            why = "to be filled in: MDS shards are not read; a note says how they become JSON lines"
            rows = f"{str(local).rstrip('/')}{f'-{split}' if split else ''}.jsonl"
            model_and_data.dataset(draft, of, 0, rows, f"{at}local", hub=False, why=why)
            draft.note(_SHARDS.format(of=of, folder="/".join(word for word in (local, split) if word), rows=rows))
        draft.same(f"{at}split", f"{at}local", why="part of the data folder")
        draft.same(f"{at}max_seq_len", why="train.seq_length")
        draft.same(f"{loader}.name", why="by train.phase")
    if "data.train.0.path" not in draft.settings:
        draft.put("data.train.0.path", "/path/to/data.json", why="to be filled in: no loader named data")
        draft.note("data.train is to be filled in")
    draft.put("train.seq_length", draft.whole("max_seq_len") or 2048, "max_seq_len")
    if phase == "sft":
        draft.put("data.on_long", "cut", why="longer rows are truncated")
    workers = draft.whole("train_loader.num_workers")
    if workers is not None:
        draft.put("data.workers", workers, "train_loader.num_workers")
    for key in draft.under("model.max_seq_len"):
        draft.same(key, why="as max_seq_len")


def _packing(draft: Draft, phase: str) -> bool:
    ratio = draft.text("train_loader.dataset.packing_ratio")
    if phase == "sft" and ratio not in (None, "1", "1.0"):
        model_and_data.packing(
            draft, "train_loader.dataset.packing_ratio", why="rows are as full as data.window makes them"
        )
        draft.same("model.attn_config.attn_uses_sequence_id", why="samples never see each other")
        return True
    apart = draft.flag("model.attn_config.attn_uses_sequence_id")
    if phase == "pretrain" and apart:
        why = "documents of a row see each other here; data.packing: true with data.join: false keeps them apart"
        draft.none("model.attn_config.attn_uses_sequence_id", why=why)
        return False
    if phase == "pretrain":
        draft.same("model.attn_config.attn_uses_sequence_id", why="documents are joined and see each other (data.join)")
    draft.same("train_loader.dataset.packing_ratio", "model.attn_config.attn_uses_sequence_id", why="a row is a sample")
    return False


def _time(draft: Draft, key: str, batch: int, length: int) -> tuple[float, str] | None:
    """A duration as (number, unit), tokens and samples turned into batches."""
    word = draft.text(key)
    if word is None:
        return None
    match = _TIME.fullmatch(word)
    number = float(match[1]) if match else math.inf
    if match is None or number > LARGEST:
        draft.wrong(key, "a duration such as 100ba, 1ep, 26000000tok or 0.1dur")
        return None
    unit = match[2] or "ep"
    if unit == "tok":
        return max(1.0, number // (batch * length)), "ba"
    if unit == "sp":
        return max(1.0, number // batch), "ba"
    return number, unit


def _steps(draft: Draft, world: int, packed: bool) -> None:
    total = steps_and_schedule.counted(draft, "global_train_batch_size") or 1
    word = draft.text("device_train_microbatch_size")
    per_rank = max(1, total // world)
    if word in (None, "auto"):
        micro = per_rank
        draft.note("device_train_microbatch_size is auto: each process takes its whole share at once; octavo plan FILE "
                   "--card 80GB --fit finds one that fits")  # fmt: skip
        draft.none("device_train_microbatch_size", why="octavo plan --fit finds the micro-batch before the run")
    else:
        micro_batch = steps_and_schedule.counted(draft, "device_train_microbatch_size") or 1
        micro = min(micro_batch, per_rank)  # Composer takes no more than its share
    micro = _largest_divisor(per_rank, micro)
    why = "one pack" if packed else f"of {per_rank} a process" if word not in (None, "auto", str(micro)) else ""
    keys = ["device_train_microbatch_size"] if word != "auto" else []
    draft.put("train.micro_batch", 1 if packed else micro, *keys, why=why)
    draft.put("train.global_batch", total, "global_train_batch_size", why="packs" if packed else "")
    length = draft.settings["train.seq_length"].value
    duration = _time(draft, "max_duration", total, length)
    if duration:
        number, unit = duration
        if unit == "ba":
            draft.put("train.steps", int(number), "max_duration")
        elif unit == "ep":
            draft.put("train.epochs", number, "max_duration")
        else:
            draft.wrong("max_duration", "a duration in ba, ep, tok or sp")
    draft.put("train.lr", draft.number("optimizer.lr", 1e-3), "optimizer.lr")
    name = draft.text("scheduler.name") or "constant"
    if name in _SCHEDULES:
        draft.put("train.schedule", _SCHEDULES[name], "scheduler.name")
    else:
        draft.put("train.schedule", "cosine", why=f"in the place of {name}, which Octavo lacks")
        draft.none("scheduler.name", why=f"there is no schedule {name} here; cosine is the nearest")
    last = draft.number("scheduler.alpha_f")
    if last is not None and draft.settings["train.schedule"].value != "constant":
        draft.put("train.min_lr", last * draft.settings["train.lr"].value, "scheduler.alpha_f", why=f"{last:g} x lr")
    elif last is not None:
        draft.dead("scheduler.alpha_f", why="only read with a decay")
    _warmup(draft, world, total, length)
    draft.none("scheduler.t_max", "scheduler.scale_warmup", "scheduler.t_scale", why="schedules end with the run here")
    clip = draft.number("algorithms.gradient_clipping.clipping_threshold")
    kind = draft.text("algorithms.gradient_clipping.clipping_type")
    if kind not in (None, "norm"):
        why = f"gradients can only be clipped by their norm, so {kind} is dropped without a substitute"
        draft.none(*draft.under("algorithms.gradient_clipping."), why=why)
        clip = None
    draft.same("algorithms.gradient_clipping.clipping_type", why="by the norm of all")
    draft.put(
        "train.clip",
        clip or 0.0,
        *(["algorithms.gradient_clipping.clipping_threshold"] if clip else []),
        why="" if clip else "not clipped by norm there",
    )
    draft.table("none", {"algorithms of Composer are not built": "algorithms.*"})


def _largest_divisor(number: int, most: int) -> int:
    """Return the largest divisor of a number that is at most ``most``."""
    pairs = ((n, number // n) for n in range(1, min(math.isqrt(number), _BATCH) + 1) if number % n == 0)
    return max(n for pair in pairs for n in pair if n <= most or n == 1)


def _warmup(draft: Draft, world: int, total: int, length: int) -> None:
    duration = _time(draft, "scheduler.t_warmup", total, length)
    if not duration:
        return
    number, unit = duration
    whole = steps_and_schedule.total_steps(draft, world)
    if unit == "dur" and whole is not None:
        number, unit = math.ceil(number * whole), "ba"
    elif unit == "ep" and (one := steps_and_schedule.steps_of_epoch(draft, world)):
        number, unit = number * one, "ba"
    if unit != "ba":
        draft.none("scheduler.t_warmup", why="Octavo counts warm-up in steps: give --rows N, or set train.warmup")
    elif number:
        draft.put("train.warmup", int(number), "scheduler.t_warmup")
    else:
        draft.same("scheduler.t_warmup", why="no warm-up")


def _optimizer(draft: Draft) -> None:
    name = draft.text("optimizer.name") or "decoupled_adamw"
    if "adamw" not in name:
        draft.none("optimizer.name", why=f"AdamW is the only optimizer, there is no {name}")
    else:
        draft.same("optimizer.name", why="AdamW, decoupled")
    betas = draft.numbers("optimizer.betas")
    draft.put("optimizer.betas", betas if len(betas) == 2 else [0.9, 0.95], "optimizer.betas")
    if (eps := draft.number("optimizer.eps")) is not None:
        draft.put("optimizer.eps", eps, "optimizer.eps")
    decay = draft.number("optimizer.weight_decay")
    if decay is None:  # Composer's own defaults
        decay = 1e-5 if name.startswith("decoupled") else 1e-2
    lr = draft.settings["train.lr"].value
    if decay and lr and name.startswith("decoupled"):
        why = f"{name} takes it off whole at the peak; here it is times the learning rate: {decay:g} / {lr:g}"
        if decay / lr <= 100:
            draft.put("optimizer.weight_decay", decay / lr, "optimizer.weight_decay", why=why)
        else:
            draft.none("optimizer.weight_decay", why=f"{why}, which is above Octavo's limit of 100")
    else:
        draft.put("optimizer.weight_decay", decay, "optimizer.weight_decay")


def _precision(draft: Draft, hub: bool) -> None:
    """Translate the precision. `amp_fp8` is a context of Transformer Engine that only affects te.Linear, which
    `fc_type: te` creates."""
    word = (draft.text("precision") or "amp_bf16").lower()
    fc = (draft.text("model.fc_type") or draft.text("model.fc_type.name") or "torch").lower()
    fused = "fp8.fuse" in draft.settings
    keys = ("model.fc_type", "model.fc_type.name")
    if word == "amp_fp8" and (fc == "te" or fused):
        why = "Transformer Engine's delayed scaling: hybrid (E5M2 for dy), amax histories of 16, their maximum"
        draft.put("fp8.recipe", "delayed", "precision", *keys, why=why)
        draft.put("fp8.format", "hybrid", "precision")
        if fc != "te":
            draft.put("fp8.rules.0.match", "**.attn.**", why="only te_ln_mlp uses Transformer Engine, fc_type does not")
            draft.put("fp8.rules.0.recipe", "off", why="attention's projections ran in BF16 there")
        length = draft.whole("precision_config.amax_history_len")
        (draft.same if length == 16 else draft.none)("precision_config.amax_history_len", why="histories are 16 long")
        draft.put("train.precision", "bf16", why="what is not FP8")
    elif word == "amp_fp8":
        why = "without fc_type: te there is no layer of Transformer Engine, and the run was BF16 (with a warning)"
        draft.dead("precision", why=why)
        draft.dead(*draft.under("precision_config"), why=why)
        draft.put("train.precision", "bf16", why="what amp_fp8 was without fc_type: te")
    elif word in ("amp_bf16", "fp32", "amp_fp16"):
        draft.put("train.precision", word.removeprefix("amp_"), "precision")
    else:
        draft.wrong("precision", "amp_fp8, amp_bf16, amp_fp16 or fp32")
    if fc == "te" and word != "amp_fp8":
        draft.dead(*keys, why="layers of Transformer Engine, which compute in BF16 unless precision is amp_fp8")
    elif fc == "torch":
        draft.same(*keys, why="plain linear layers")
    elif fc not in ("te", "torch"):
        draft.none(*keys, why=f"{fc} is a layer of their registry")
    # fp8.fuse belongs to FP8; without amp_fp8 the fused layers ran in BF16.
    if fused and word != "amp_fp8":
        draft.settings.pop("fp8.fuse")
    parts_on = any(target.startswith("fp8.recipe") for target in draft.settings)
    if not parts_on:
        model_and_data.no_fp8(draft)
    del hub


def _memory(draft: Draft) -> None:
    f = "fsdp_config."
    on = draft.flag(f"{f}activation_checkpointing")
    draft.put("train.recompute", "full" if on else "none", f"{f}activation_checkpointing")
    draft.same(f"{f}activation_checkpointing_reentrant", why="never reentrant")
    # Full recomputation keeps only the inputs of blocks, so there is nothing worth offloading.
    if draft.flag(f"{f}activation_cpu_offload"):
        if on:
            draft.none(f"{f}activation_cpu_offload", why="with full recomputation almost nothing is left to offload")
        else:
            draft.put("train.offload_activations", True, f"{f}activation_cpu_offload")
    else:
        draft.same(f"{f}activation_cpu_offload", why="off")
    strategy = (draft.text(f"{f}sharding_strategy") or "").upper()
    if "HYBRID" in strategy:
        draft.none(
            f"{f}sharding_strategy", why="copies of the model are parallel.replicate: set it to the number of hosts"
        )
    elif strategy:
        draft.put(
            "parallel.shard",
            "auto",
            f"{f}sharding_strategy",
            why="sharding does not change the numbers",
        )
    compiled = bool(draft.under("compile_config"))
    if compiled:
        draft.put("train.compile", True, *draft.under("compile_config"))


def _saving(draft: Draft, world: int) -> None:
    total, length = draft.settings["train.global_batch"].value, draft.settings["train.seq_length"].value
    for target, key in (("run.save_every", "save_interval"), ("run.eval_every", "eval_interval")):
        interval = _time(draft, key, total, length)
        if not interval:
            continue
        number, unit = interval
        if target == "run.eval_every" and "data.eval.0.path" not in draft.settings:
            draft.none(key, why="the translated files have no held-out rows (data.eval)")
            continue
        # Composer counts in batches ("ba") or epochs ("ep"); Octavo only in steps.
        one = steps_and_schedule.steps_of_epoch(draft, world)
        if unit == "ep" and one:
            number, unit = number * one, "ba"
        if unit == "ba":
            draft.put(target, int(number), key)
        else:
            draft.none(
                key, why=f"{target} counts steps, and the steps of an epoch are unknown: set --rows N, or set it"
            )
    if folder := draft.text("save_folder"):
        draft.put("run.dir", folder.replace("{run_name}", draft.text("run_name") or "run"), "save_folder")
    if (keep := draft.whole("save_num_checkpoints_to_keep")) is not None and keep > 0:
        draft.put("run.keep", keep, "save_num_checkpoints_to_keep")
    elif keep is not None:
        draft.none(
            "save_num_checkpoints_to_keep", why="all are kept there; here run.keep of the newest, and run.milestones"
        )
    if draft.flag("save_weights_only"):
        draft.put("run.save_states", False, "save_weights_only")
    draft.none(
        "load_path", why="a checkpoint of Composer is a pickle, which is never opened; name a Hugging Face folder"
    )
    if draft.has("load_path"):
        draft.none("load_weights_only", why="run.start_from starts a new run from the weights of an Octavo checkpoint")
    else:
        draft.dead("load_weights_only", why="load_path is empty: nothing is loaded")
    if draft.flag("autoresume"):
        draft.put("run.resume", "auto", "autoresume")
    draft.put("run.seed", 17 if (seed := draft.whole("seed")) is None else seed, "seed")
    draft.read_keys.add("loggers")
    names = {key.split(".")[1] for key in draft.under("loggers.")}
    ours = sorted(names & {"wandb", "mlflow"})
    if ours:
        draft.put("run.trackers", ours, *draft.under("loggers."))
    draft.table("none", {"there are wandb, mlflow, trackio, swanlab and TensorBoard": "loggers.*"})
    if (log := draft.number("log_every")) is not None:
        draft.put("run.log_every", int(log), "log_every")
