"""MindSpeed-MM's YAML, both generations: sections of the FSDP2 trainer (parallel, data, model, features, training,
tools), and the older ``gpt_args`` with ``lora_args`` and a ``model`` tree (read at its commit of August 2026)."""

from __future__ import annotations

from octavo.importers.common import model_and_data, steps_and_schedule
from octavo.importers.common.draft import Draft, choice
from octavo.importers.common.prefixed_keys import Under
from octavo.importers.frameworks import hf_trainer, megatron, mindspeed_data
from octavo.importers.source import files

NAME = "mindspeed-mm"
MARKS = ("data.dataset_param.*", "gpt_args.*", "parallel.fsdp_plan.*", "parallel.fully_shard_parallel_size",
         "features.loss_cfg.*", "training.quantization_plan.*", "data.dataloader_param.*", "mm_data",
         "mm_model", "mm_tool")  # fmt: skip
FIRST_WINS = False
_LOSSES = {"default": "microbatch", "per_sample_loss": "sample", "per_token_loss": "token", "raw": "microbatch"}
_KERNELS = {"flash_attention_2": "sdpa", "sdpa": "sdpa", "eager": "eager", "flash_attention_3": "sdpa"}
#: patterns of module names there -> components
_FROZEN = (("visual.merger", "image_projector"), ("visual.deepstack", "image_projector"), ("visual", "image_encoder"),
           ("audio_tower", "audio_encoder"), ("audio_encoder", "audio_encoder"), ("language_model", "foundation"),
           ("lm_head", "lm_head"), ("projector", "image_projector"))  # fmt: skip

NONE = {
    "FSDP2 wraps blocks, prefetches and shards them by itself": "parallel.fsdp_plan.* parallel.tp_plan.* "
    "parallel.ep_plan.* "
    "parallel.expert_fully_shard_parallel_size parallel.expert_data_parallel_size parallel.data_parallel_size",
    model_and_data.TEMPLATE: "data.*.template data.*.tool_format",
    model_and_data.VIDEO: "data.*.video_*",
    "keys of rows are recognised; others are renamed by data.train.0.columns": "data.dataset_param.attr.*",
    "rows are read as they are, and kept as Arrow (data.cache)": "data.*.cache_dir data.*.overwrite_cache "
    "data.*.preprocessing_* data.dataset_param.dataset_type data.*.use_fast_tokenizer data.*.split_special_tokens "
    "data.*.preprocess_on_fly data.*.fix_mistral_regex data.*.trust_remote_code",
    "one order of rows, from run.seed, which every number of workers gives": "data.dataloader_param.*",
    "PMCC hides weights and rows by a permutation; Octavo seals folders instead, by keys": "*use_pmcc_data",
    "the model's class is found by its config.json": "model.model_id model.*.model_id",
    "a block's inputs are kept, and all of it is computed again": "model.skip_*_recompute",
    "model code is Octavo's or transformers'; none is fetched": "model.trust_remote_code training.plugin "
    "training.plugin.*",
    "fused experts and layouts of attention are of Ascend's kernels": "model.*_implementation model.use_triton_* "
    "model.use_grouped_expert_matmul model.*.use_npu_fused_moe model.*.attn_layout "
    "model.*.is_causal model.attn_layout model.is_causal",
    "of Ascend's caches and balance": "features.swap_plan.* features.enable_chunk_mbs features.chunkmbs_plan.* "
    "features.enable_ep_balance features.ep_balance_plan.* features.skip_moe_pad_tokens "
    "features.loss_cfg.router_aux_loss_offload patch.* model.patch.*",
    "Muon, learning rates by layer and warm-up from another rate are not built": "training.matched_adamw_rms "
    "training.muon_momentum training.ns_steps training.lr_scaling_plan.* training.lr_start training.no_decay_*",
    "profiles are made by octavo bench and torch's own profiler": "tools.* training.profile.* MM_TOOL_PATH",
    "FSDP2 chooses how ranks talk": "distributed_backend",
    "not set here": "mm_tool variable_seq_lengths "
    "training.allow_hf32 training.clip_grad_foreach training.load_strict training.ckpt_manager "
    "training.load_rank0_and_broadcast training.enable_full_determinism training.use_deter_comp training.max_steps "
    "training.val_micro_batch_size "
    "training.load_format training.save_format training.manual_gc_interval gpt_args.log_tps",
}  # fmt: skip
#: of trees that Megatron builds, which describe every layer
_BUILT = {
    "the architecture comes from the model's config.json": "model.image_encoder.* model.text_decoder.* "
    "model.audio_encoder.* model.*_token_id model.text_encoder model.video_encoder",
    "towers of sound are frozen by model.freeze: [audio_encoder]": "model.freeze_audio_*",
}
SAME = {
    "held-out rows are read as training rows are": "data.val_dataset_param.*",
    "AdamW in one kernel where there is one": "training.adam_fused",
    "weights are made after sharding": "training.init_model_with_meta_device gpt_args.init_model_with_meta_device",
    "a value that other keys refer to": "HF_MODEL_LOAD_PATH MM_MODEL_LOAD_PATH DATASET_PATH FSDP2_PATH SAVE_PATH",
}
#: flags of its scripts on Megatron, each of which names a file in JSON
_FLAGS = ("mm_data", "mm_model", "mm_tool")
_UNREAD = "only read for a check of Megatron; the layers came from config.json"


def translate(draft: Draft) -> None:
    flags = _follow(draft) or any(
        key in draft.source_keys for key in _FLAGS
    )  # of a launch script, with nothing before them
    old = flags or bool(draft.under("gpt_args."))
    u = Under(draft, "gpt_args." if draft.under("gpt_args.") else "" if flags else "training.")
    world = steps_and_schedule.processes(draft)
    draft.put("train.phase", "sft")
    model_and_data.model(draft, "model.model_name_or_path", "model.init_from_hf_path",
                "data.dataset_param.preprocess_parameters.model_name_or_path")  # fmt: skip
    draft.same("data.dataset_param.preprocess_parameters.model_name_or_path", why="model.path")
    draft.none("mm_tool", why="a file of theirs in JSON, which is not read")
    mindspeed_data.rows(draft, u)
    context = _parallel_old(draft, u) if old else _parallel(draft)
    packed = context > 1 or "data.packing" in draft.settings
    ranks = megatron.data_parallel(draft, u, world) if old else max(1, world // context)
    (_steps_old if old else _steps)(draft, u, ranks, packed)
    lora = _lora(draft, flags)
    _freeze(draft, lora)
    _features(draft, old)
    if flags:
        megatron.recompute(draft, u)
    if not flags:
        _fp8(draft, lora)
    elif megatron.fp8(draft, u, param=not lora) is None:
        model_and_data.no_fp8(draft)
    _checkpoints(draft, u)
    draft.table("none", NONE)
    draft.table("default", SAME)
    if (
        flags
        or "model.freeze_vision_model" in draft.source_keys
        or draft.under("model.text_decoder.tensor_model_parallel_size")
    ):
        draft.table("none", _BUILT)
    megatron.rest(draft, u)
    draft.table("none", hf_trainer.ENVIRONMENT)
    draft.table("default", hf_trainer.SAME)


def _follow(draft: Draft) -> bool:
    """The files that the older trainer's flags `--mm-data` and `--mm-model` name, as ``data.*`` and ``model.*``; gives
    whether there are such flags."""
    names = {"mm_data": "data.", "mm_model": "model."}
    for key, prefix in names.items():
        word = draft.text(key)
        if word and (file := draft.folder.named(word)) is not None:
            draft.add(files.read([file], {}, draft.folder)[0].source_keys, prefix)
            draft.same(key, why=f"its keys are translated: {prefix}*")
        elif word:
            draft.none(key, why=f"{word} is not here: copy it to this path, as seen from --root or from the script")
    return any(key in draft.source_keys for key in names)


def _parallel(draft: Draft) -> int:
    u = Under(draft, "parallel.")
    ring, ulysses = (
        steps_and_schedule.counted(draft, u(f"{key}_size")) or 1 for key in ("ring_attention", "ulysses_parallel")
    )
    # Both divide the same rows, so the ranks that share a row are their product.
    if ring * ulysses > 1:
        why = megatron.USP if ring > 1 and ulysses > 1 else megatron.RING if ring > 1 else megatron.ULYSSES
        u.put("parallel.context", ring * ulysses, "ring_attention_size", "ulysses_parallel_size", why=why)
        u.put("parallel.ulysses", ulysses, "ulysses_parallel_size", "ring_attention_size")
        draft.put("data.packing", True, why="ranks can only share packed rows (parallel.context)")
    else:
        u.same("ring_attention_size", "ulysses_parallel_size", why="no rows are shared")
    if (size := steps_and_schedule.counted(draft, u("tensor_parallel_size")) or 1) > 1:
        u.none("tensor_parallel_size", why=f"{size}: their own FSDP2 trainer refuses it too; layers are sharded")
    else:
        u.same("tensor_parallel_size", why="1")
    (u.none if (steps_and_schedule.counted(draft, u("context_parallel_size")) or 1) > 1 else u.same)(
        "context_parallel_size", why="ring_attention_size and ulysses_parallel_size set it"
    )
    u.put("parallel.shard", "auto", "fully_shard_parallel_size", why="all remaining ranks")
    megatron.expert(draft, u, "expert_parallel_size", lora=bool(draft.flag("training.lora.enable")))
    if u.flag("recompute"):
        u.dead(
            "recompute", "recompute_plan.use_reentrant", why="nothing applied it: the trainer reads features.recompute"
        )
        for key in draft.under("parallel.recompute_plan."):
            draft.dead(key, why="nothing applied it: the trainer reads features.recompute_plan")
    return ring * ulysses


def _parallel_old(draft: Draft, u: Under) -> int:
    megatron.context(draft, u, ulysses="ulysses_degree_in_cp")
    megatron.expert(draft, u)
    _fsdp2_settings(draft, u)
    return steps_and_schedule.counted(draft, u("context_parallel_size")) or 1


def _fsdp2_settings(draft: Draft, u: Under) -> None:
    """The file that `fsdp2_config_path` of the older trainer names (how layers are sharded, moved and computed again):
    its keys are read too, as ``fsdp2_config.*``."""
    word = u.text("fsdp2_config_path")
    file = draft.folder.named(word) if word else None
    if file is None:
        why = "the file of FSDP2's settings is not here: copy it to this path, as seen from --root or from the YAML"
        u.none("fsdp2_config_path", why=why)
        return
    draft.add(files.read([file], {}, draft.folder)[0].source_keys, "fsdp2_config.")
    u.same("fsdp2_config_path", why="its keys are translated: fsdp2_config.*")
    f = Under(draft, "fsdp2_config.")
    if (steps_and_schedule.counted(draft, f("expert_parallel_size")) or 1) > 1:
        megatron.expert(draft, f, "expert_parallel_size", lora=bool(draft.under("lora_args.")))
    else:
        f.same("expert_parallel_size", why="experts are sharded, not distributed")
    if f.flag("offload_to_cpu"):
        f.put("optimizer.offload", True, "offload_to_cpu", why="states go to the host; parameters stay on the GPU here")
    else:
        f.same("offload_to_cpu", why="off")
    # The names are modules of the model; Octavo recomputes by component.
    if towers := f.words("recompute_modules"):
        components = {"image_encoder" if "visual" in word or "image" in word else "foundation" for word in towers}
        each = {part: "full" if part in components else "none" for part in model_and_data.TOWERS}
        why = "blocks of these modules are recomputed"
        f.put("train.recompute", "full" if len(components) == 2 else each, "recompute_modules", why=why)
    kinds = {"bf16": "bf16", "fp16": "fp16", "fp32": "fp32"}
    if kind := choice(draft, f("param_dtype"), kinds):
        f.put("train.precision", kind, "param_dtype")
    reduced = choice(draft, f("reduce_dtype"), kinds)
    (f.same if reduced in (None, "fp32") else f.none)("reduce_dtype", why="gradients are summed in FP32")
    f.same("output_dtype", "cast_forward_inputs", why="inputs and outputs of layers have the precision of training")
    draft.table("none", {
        "FSDP2 wraps blocks, prefetches and shards them by itself": "fsdp2_config.sharding_size "
        "fsdp2_config.reshard_* fsdp2_config.num_to_*_prefetch fsdp2_config.sub_modules_to_wrap "
        "fsdp2_config.ignored_modules fsdp2_config.use_reentrant fsdp2_config.align_fsdp_param_groups "
        "fsdp2_config.moe_modules fsdp2_config.pin_memory",
    })  # fmt: skip


def _steps(draft: Draft, u: Under, ranks: int, packed: bool) -> None:
    micro, accumulation = (
        steps_and_schedule.counted(draft, u(k)) or 1 for k in ("micro_batch_size", "gradient_accumulation_steps")
    )
    keys = (u("micro_batch_size"), u("gradient_accumulation_steps"))
    steps_and_schedule.batch(draft, micro, accumulation, ranks, *keys, packed=packed)
    if epochs := u.whole("train_epochs"):
        draft.put("train.epochs", float(epochs), u("train_epochs"))
        u.dead("train_iters", why="train_epochs decides there where both are given")
    else:
        u.put("train.steps", u.whole("train_iters") or 10000, "train_iters")
    u.put("train.lr", u.number("lr", 5e-5), "lr")
    style = choice(draft, u("lr_decay_style"), {n: n for n in ("cosine", "linear", "constant")}) or "constant"
    u.put("train.schedule", style, "lr_decay_style")
    if (least := u.number("lr_min")) and style != "constant":
        u.put("train.min_lr", least, "lr_min")
    steps_and_schedule.warmup(draft, ranks, u("lr_warmup_steps"), u("lr_warmup_ratio"))
    if (ratio := u.number("lr_decay_ratio")) not in (None, 1):
        u.none("lr_decay_ratio", why=f"Octavo's schedules end with the run, not after {ratio:g} of it")
    clip = u.number("clip_grad")
    u.put("train.clip", 1.0 if clip is None else clip, "clip_grad", why="no clipping" if clip == 0 else "")
    megatron.optimizer(draft, u, megatron.Usual(decay=0.0))


def _steps_old(draft: Draft, u: Under, ranks: int, packed: bool) -> None:
    usual = megatron.Usual()
    megatron.steps(draft, u, usual, ranks, packed)
    megatron.optimizer(draft, u, usual)
    megatron.precision(draft, u)
    u.same("use_flash_attn", why="torch chooses at each call, flash where it can")


def _lora(draft: Draft, flags: bool) -> bool:
    new, old = Under(draft, "training.lora."), Under(draft, "" if flags else "lora_args.")
    # Two generations of the YAML have different sections and names.
    if new.flag("enable"):
        u, names = new, {"rank": "rank", "alpha": "alpha", "dropout": "dropout", "targets": "target_modules"}
        targets = u.words("target_modules") or ["q_proj", "k_proj", "v_proj"]
    elif draft.under("lora_r" if flags else "lora_args."):
        u, names = (
            old,
            {"rank": "lora_r", "alpha": "lora_alpha", "dropout": "lora_dropout", "targets": "lora_target_modules"},
        )
        targets = u.words("lora_target_modules")
    else:
        for key in draft.under("training.lora."):
            draft.dead(key, why="training.lora.enable is not true")
        return False
    chosen = [t.replace("{*}", "*") if "*" in t else t for t in targets]
    chosen = [
        "foundation" if t == "all-linear" else t if "*" not in t else f"**.{t.removeprefix('model.')}" for t in chosen
    ]
    keys = {name: u(key) for name, key in names.items()}
    model_and_data.lora(
        draft,
        u.whole(names["rank"], 8),
        u.number(names["alpha"], 16),
        u.number(names["dropout"], 0.0),
        chosen,
        keys=keys,
        but=["image_encoder"],
    )
    if u is new:
        u.same("enable", why="the section lora is there")
        u.none("init_lora_weights", why="adapters begin with B = 0")
        u.none("disable_peft_moe_conversion", why="experts get adapters where a target names them")
        if path := u.text("pretrained_lora_path"):
            draft.put("lora.adapter", draft.path(path), u("pretrained_lora_path"))
    else:
        u.none("lora_register_forward_hook", why="inputs need no hook for gradients here")
    return True


def _freeze(draft: Draft, lora: bool) -> None:
    """Patterns of names (new), or a flag of each part (old); nothing is frozen that is not named, but for the old
    trainer's vision tower and projector."""
    frozen: dict[str, tuple[str, ...]] = {}
    globs: list[str] = []
    for word in draft.words("model.freeze"):
        plain = word.removeprefix("model.").removesuffix(".{*}").replace("{*}", "*")
        ours = next((name for mark, name in _FROZEN if plain.startswith(mark)), None) if "*" not in plain else None
        if ours in model_and_data.COMPONENTS:
            frozen[ours] = ("model.freeze",)
            if ours == "image_encoder":  # model.visual holds the merger too
                frozen["image_projector"] = ("model.freeze",)
        else:
            globs.append(ours or f"**.{plain}.**")
    flags = dict(zip(("vision_model", "vision_projection", "language_model"), model_and_data.COMPONENTS, strict=True))
    for name, ours in flags.items():
        key = f"model.freeze_{name}"
        if flag := draft.flag(key):
            frozen[ours] = (key,)
        elif flag is False:
            draft.same(key, why="trained")
    by_flags = any(f"model.freeze_{name}" in draft.source_keys for name in flags)
    tree = {
        "model.image_encoder.vision_encoder": "image_encoder",
        "model.image_encoder.vision_projector": "image_projector",
        "model.text_decoder": "foundation",
    }
    for at, ours in tree.items():
        key = f"{at}.freeze"
        flag = draft.flag(key)
        usual = ours != "foundation" and not by_flags and bool(draft.under("model.image_encoder."))
        if flag or (flag is None and usual):
            frozen[ours] = (key,)
        elif flag is False:
            draft.same(key, why="trained")
        for dead in ("num_layers", "hidden_size", "num_attention_heads", "max_position_embeddings"):
            draft.dead(f"{at}.{dead}", why=_UNREAD)
    keys = [key for of in frozen.values() for key in of]
    if lora:
        draft.same("model.freeze", *keys, why="the base of adapters is frozen anyway")
    elif frozen or globs:
        names = [name for name in model_and_data.COMPONENTS if name in frozen] + globs
        draft.put("model.freeze", names, "model.freeze", *keys)


def _features(draft: Draft, old: bool) -> None:
    """Loss, recomputation, offload, attention: of the new sections and of the old tree."""
    loss_key = next(
        (k for k in ("features.loss_cfg.loss_type", "model.loss_cfg.loss_type") if k in draft.source_keys), None
    )
    # The default loss differs between the two generations of the trainer.
    word = (draft.text(loss_key) if loss_key else None) or ("default" if old else "raw")
    known = _LOSSES.get(word)
    if known is None and loss_key:
        draft.none(loss_key, why=f"{word} is a custom loss ('custom' raises there); microbatch is used instead")
    why = {
        "raw": "the model's own loss: the mean over a micro-batch's tokens",
        "default": "mean of micro-batches' means",
    }
    draft.put("train.loss", known or "microbatch", *([loss_key] if loss_key and known else []), why=why.get(word, ""))
    for at in ("features.loss_cfg.", "model.loss_cfg."):
        if (coefficient := draft.number(f"{at}router_aux_loss_coef")) is not None:
            draft.put("train.router_aux_loss_coef", coefficient, f"{at}router_aux_loss_coef")
        draft.none(f"{at}compute_mode", f"{at}chunk_size", why="train.logits: chunked, by bytes of the head's rows")
    megatron.aux_loss(draft, Under(draft, "model.text_decoder."))
    f = Under(draft, "features.")
    chunk = f.flag("enable_chunk_loss") or f.flag("enable_dynamic_chunk_loss")
    f.put("train.logits", "chunked", "enable_chunk_loss", "enable_dynamic_chunk_loss",
          why="full logits are never made" if chunk else "results are the same, with less memory")  # fmt: skip
    for key in draft.under("features.chunkloss_plan."):
        (draft.none if chunk else draft.dead)(
            key, why="chunks are sized by memory" if chunk else "enable_chunk_loss is off"
        )
    _recompute(draft, f, old)
    on = f.flag("enable_activation_offload") or draft.flag("model.text_decoder.activation_offload")
    offload = ("features.enable_activation_offload", "model.text_decoder.activation_offload")
    for key in draft.under("features.activation_offload_plan."):
        (draft.none if on else draft.dead)(
            key,
            why="all blocks, or none" if on else "features.enable_activation_offload is not true: nothing was moved",
        )
    if on and draft.settings["train.recompute"].value == "full":
        draft.none(
            *offload, why="with full recomputation almost nothing is left to offload; use it with recompute: selective"
        )
    elif on:
        draft.put("train.offload_activations", True, *offload)
    else:
        draft.same(*offload, why="off")
    unread = [key for name in ("recompute", "recompute_plan", "enable_chunk_loss", "chunkloss_plan",
              "enable_activation_offload", "activation_offload_plan", "enable_chunk_mbs", "chunkmbs_plan")
              for key in draft.source_keys if key == f"model.{name}" or key.startswith(f"model.{name}.")]  # fmt: skip
    draft.dead(*unread, why="nothing reads it there: the trainer reads features of that name")
    kernels = {"image_encoder": "model.image_encoder.vision_encoder.", "foundation": "model.text_decoder."}
    for ours, at in kernels.items():
        if kernel := choice(draft, f"{at}attn_implementation", _KERNELS):
            draft.put(
                f"model.attention.{ours}", kernel, f"{at}attn_implementation", why="torch takes flash where it can"
            )
        if draft.flag(f"{at}synchronize_per_layer"):
            draft.put("train.synchronize_per_layer", True, f"{at}synchronize_per_layer")
    packed = "data.packing" in draft.settings
    if (kernel := choice(draft, "model.attn_implementation", _KERNELS)) == "eager":
        model_and_data.attend(draft, "model.attn_implementation", kernel, packed)
    elif kernel:
        draft.put("model.attention", kernel, "model.attn_implementation", why="torch takes flash where it can")


def _wrapped(draft: Draft) -> bool:
    """Whether it is a Qwen3-VL of the older trainer, each of whose blocks is in a checkpoint wrapper."""
    kind = draft.text("model.model_id") or ""
    path = draft.text("model.init_from_hf_path") or draft.text("model.model_name_or_path")
    return kind.startswith("qwen3_vl") or model_and_data.filmed(draft, path) == "qwen3_vl"


def _recompute(draft: Draft, f: Under, old: bool) -> None:
    trees = {"image_encoder": "model.image_encoder.vision_encoder", "foundation": "model.text_decoder"}
    keys = {ours: f"{at}.recompute_granularity" for ours, at in trees.items()}
    enabled = {
        ours: word for ours, key in keys.items() if (word := choice(draft, key, {n: n for n in ("full", "selective")}))
    }
    if old and _wrapped(draft):
        draft.put("train.recompute", "full", why="their code of Qwen3-VL recomputes every block, whatever is set")
        draft.dead(*keys.values(), f("recompute"), why="every block is recomputed by their code of this model")
        return
    if "train.recompute" in draft.settings:  # of fsdp2_config
        return
    if enabled:
        value = enabled["foundation"] if len(set(enabled.values())) == 1 and len(enabled) == 2 else enabled
        draft.put("train.recompute", value, *keys.values())
        return
    on = f.flag("recompute")
    f.put("train.recompute", "full" if on else "none", "recompute")
    for key in draft.under("features.recompute_plan."):
        why = "blocks of both towers are recomputed" if on else "features.recompute is not true: nothing was recomputed"
        (draft.same if on else draft.dead)(key, why=why)


def _fp8(draft: Draft, lora: bool) -> None:
    at = Under(draft, "training.quantization_plan.")
    word = at.text("quant_recipe") or at.text("recipe_name")
    keys = ("quant_recipe", "recipe_name", "converters", "quant_converters")
    # A recipe without converters replaces no layer.
    if word is None or not (at.words("converters") or at.words("quant_converters")):
        for key in draft.under(at.prefix):
            draft.dead(key, why="without converters no layer is replaced" if word else "no recipe is set")
        model_and_data.no_fp8(draft)
        return
    if not word.startswith("mxfp8"):
        at.none("quant_recipe", "recipe_name", why=f"{word}: their executors only take mxfp8 and mxfp8-32x32")
    draft.put("fp8.foundation.recipe", "mxfp8", *[at(key) for key in keys],
              why="by their filter only layers.N match: never the vision tower")  # fmt: skip
    at.same("quant_format", why="mxfp8 is E4M3 throughout, dy too")
    at.same("block_size", why="32 values share a scale")
    for key in ("quant_apply_modules", "apply_modules"):
        inner = all(word.startswith(("model.language_model", "language_model")) for word in at.words(key))
        (at.same if inner else at.none)(key, why="the language model's layers (fp8.foundation); others by fp8.rules")
    ignored = at.words("quant_ignored_modules") or at.words("ignored_modules")
    odd = [word for word in ignored if word.strip("*") not in ("lm_head", "gate")]
    for number, word in enumerate(odd):
        rule = word.replace("{*}", "*").strip("*").strip(".")
        draft.put(f"fp8.rules.{number}.match", f"**.{rule}", at("quant_ignored_modules"), at("ignored_modules"))
        draft.put(f"fp8.rules.{number}.recipe", "off", why="not quantized there")
    at.same("quant_ignored_modules", "ignored_modules", why="the head and routers stay in high precision")
    gather = at.flag("enable_fsdp_low_precision_all_gather")
    if (gather is None or gather) and not lora:
        draft.put("fp8.foundation.param", True, at("enable_fsdp_low_precision_all_gather"), why="FSDP2 gathers codes")
    else:
        at.same("enable_fsdp_low_precision_all_gather", why="weights are gathered as they are stored")
    at.none("fsdp_low_precision_all_gather_mode", why="fp8.weight_codes says which layouts are kept")


def _weights(draft: Draft, u: Under) -> None:
    """What training begins with. A DCP copy of the model's own folder is that folder here. With `load_base_model` it
    is the base of adapters, and `load` is the adapters' checkpoint."""
    model = draft.settings["model.path"].source
    base = u.text("load_base_model")
    if base and "lora.rank" in draft.settings:
        if not model:
            draft.put(
                "model.path",
                draft.path(base),
                u("load_base_model"),
                why="octavo convert dcp_to_hf makes a folder of it",
            )
        else:
            u.same("load_base_model", why="the base of the adapters, which is model.path here")
        if adapters := u.text("load"):
            draft.put("run.start_from", adapters, u("load"), why="the adapters to go on from")
            draft.note("run.start_from reads checkpoints that Octavo wrote: convert theirs to a PEFT folder by octavo "
                       "convert dcp_to_hf, and name that in lora.adapter instead")  # fmt: skip
    elif (word := u.text("load")) and model and model_and_data.same_model(word, str(model[0].value)):
        u.same("load", why="a copy of the model's folder, which model.path names")


def _checkpoints(draft: Draft, u: Under) -> None:
    if draft.flag("$ENABLE_GC_THRESHOLD"):
        draft.put("train.gc", "700,10,1000", "$ENABLE_GC_THRESHOLD", why="the thresholds that it sets there")
    _weights(draft, u)
    megatron.saving(draft, u)
    left = [key for key in ("load", "load_base_model", "load_checkpoint_path") if u(key) not in draft.rows]
    u.none(*left,
           why="weights of theirs: a Hugging Face folder is named in model.path, and octavo convert dcp_to_hf makes "
           "one of a DCP checkpoint")  # fmt: skip
    if save := u.whole("save_steps"):
        u.put("run.save_every", save, "save_steps")
    if not (each := u.whole("val_interval")):
        u.same("val_interval", why="nothing is evaluated on the way")
    elif "data.eval.0.path" in draft.settings:
        u.put("run.eval_every", each, "val_interval")
    else:
        u.none("val_interval", why="the translated files have no held-out rows (data.eval)")
