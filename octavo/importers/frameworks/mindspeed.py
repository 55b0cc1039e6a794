"""MindSpeed-MM's YAML, both generations: sections of the FSDP2 trainer (parallel, data, model, features, training,
tools), and the older ``gpt_args`` with ``lora_args`` and a ``model`` tree (read at its commit of August 2026)."""

from __future__ import annotations

from octavo.importers.common import model_and_data, steps_and_schedule
from octavo.importers.common.draft import Draft, choice
from octavo.importers.common.prefixed_keys import PrefixedDraft
from octavo.importers.frameworks import hf_trainer, megatron, mindspeed_data
from octavo.importers.source import files

NAME = "mindspeed-mm"
MARKS = ("data.dataset_param.*", "gpt_args.*", "parallel.fsdp_plan.*", "parallel.fully_shard_parallel_size",
         "features.loss_cfg.*", "training.quantization_plan.*", "data.dataloader_param.*", "mm_data",
         "mm_model", "mm_tool")  # fmt: skip
FIRST_WINS = False
_LOSSES = {"default": "microbatch", "per_sample_loss": "sample", "per_token_loss": "token", "raw": "microbatch"}
_KERNELS = {"flash_attention_2": "sdpa", "sdpa": "sdpa", "eager": "eager", "flash_attention_3": "sdpa"}
#: patterns of MindSpeed-MM's module names -> components
_FROZEN = (("visual.merger", "image_projector"), ("visual.deepstack", "image_projector"), ("visual", "image_encoder"),
           ("audio_tower", "audio_encoder"), ("audio_encoder", "audio_encoder"), ("language_model", "foundation"),
           ("lm_head", "lm_head"), ("projector", "image_projector"))  # fmt: skip

NONE = {
    "Octavo configures FSDP2 automatically": "parallel.fsdp_plan.* parallel.tp_plan.* parallel.ep_plan.* "
    "parallel.expert_fully_shard_parallel_size parallel.expert_data_parallel_size parallel.data_parallel_size",
    model_and_data.TEMPLATE_REASON: "data.*.template data.*.tool_format",
    model_and_data.VIDEO_REASON: "data.*.video_*",
    "keys of rows are detected; data.train.0.columns renames others": "data.dataset_param.attr.*",
    "rows need no preprocessing; they are cached as Arrow (data.cache)": "data.*.cache_dir data.*.overwrite_cache "
    "data.*.preprocessing_* data.dataset_param.dataset_type data.*.use_fast_tokenizer data.*.split_special_tokens "
    "data.*.preprocess_on_fly data.*.fix_mistral_regex data.*.trust_remote_code",
    "only data.workers is configurable; the order of rows depends only on run.seed": "data.dataloader_param.*",
    "PMCC permutes weights and rows to hide them; Octavo seals folders with keys instead": "*use_pmcc_data",
    "config.json selects the model class": "model.model_id model.*.model_id",
    "full recomputation keeps only the input of each block": "model.skip_*_recompute",
    "model code comes from Octavo or transformers; remote code is not loaded": "model.trust_remote_code "
    "training.plugin training.plugin.*",
    "fused experts and attention layouts belong to Ascend kernels": "model.*_implementation model.use_triton_* "
    "model.use_grouped_expert_matmul model.*.use_npu_fused_moe model.*.attn_layout model.*.is_causal model.attn_layout "
    "model.is_causal",
    "for Ascend's caches and load balancing": "features.swap_plan.* features.enable_chunk_mbs features.chunkmbs_plan.* "
    "features.enable_ep_balance features.ep_balance_plan.* features.skip_moe_pad_tokens "
    "features.loss_cfg.router_aux_loss_offload patch.* model.patch.*",
    "Muon, learning rates per layer and a nonzero initial learning rate are not implemented":
    "training.matched_adamw_rms training.muon_momentum training.ns_steps training.lr_scaling_plan.* training.lr_start "
    "training.no_decay_*",
    "use octavo bench or torch's profiler for profiles": "tools.* training.profile.* MM_TOOL_PATH",
    "FSDP2 selects the communication backend": "distributed_backend",
    "not used by Octavo": "mm_tool variable_seq_lengths training.allow_hf32 training.clip_grad_foreach "
    "training.load_strict training.ckpt_manager training.load_rank0_and_broadcast training.enable_full_determinism "
    "training.use_deter_comp training.max_steps training.val_micro_batch_size training.load_format "
    "training.save_format training.manual_gc_interval gpt_args.log_tps",
}  # fmt: skip
#: keys of model trees that Megatron builds, which describe every layer
_BUILT = {
    "the architecture comes from the model's config.json": "model.image_encoder.* model.text_decoder.* "
    "model.audio_encoder.* model.*_token_id model.text_encoder model.video_encoder",
    "model.freeze: [audio_encoder] freezes audio towers": "model.freeze_audio_*",
}
SAME = {
    "evaluation rows are read in the same way as training rows": "data.val_dataset_param.*",
    "AdamW is fused if possible": "training.adam_fused",
    "weights are initialized after sharding": "training.init_model_with_meta_device "
    "gpt_args.init_model_with_meta_device",
    "only used by keys that refer to it": "HF_MODEL_LOAD_PATH MM_MODEL_LOAD_PATH DATASET_PATH FSDP2_PATH SAVE_PATH",
}
#: flags of the Megatron scripts, each of which names a JSON file
_FLAGS = ("mm_data", "mm_model", "mm_tool")
_UNREAD = "Megatron only checks this value; the layers came from config.json"
_SDPA_REASON = "torch uses flash attention if possible"


def translate(draft: Draft) -> None:
    flags = _read_flag_files(draft) or any(key in draft.source_keys for key in _FLAGS)  # keys without a prefix
    is_old = flags or bool(draft.keys_under("gpt_args."))
    u = PrefixedDraft(draft, "gpt_args." if draft.keys_under("gpt_args.") else "" if flags else "training.")
    world = steps_and_schedule.count_processes(draft)
    draft.set("train.phase", "sft")
    model_and_data.set_model_path(draft, "model.model_name_or_path", "model.init_from_hf_path",
                "data.dataset_param.preprocess_parameters.model_name_or_path")  # fmt: skip
    draft.mark_default("data.dataset_param.preprocess_parameters.model_name_or_path", why="model.path")
    draft.mark_unsupported("mm_tool", why="JSON file of MindSpeed-MM that is not read")
    mindspeed_data.translate_rows(draft, u)
    context = _translate_parallel_old(draft, u) if is_old else _translate_parallel(draft)
    packed = context > 1 or "data.packing" in draft.settings
    ranks = megatron.data_parallel_size(draft, u, world) if is_old else max(1, world // context)
    (_translate_steps_old if is_old else _translate_steps)(draft, u, ranks, packed)
    lora = _translate_lora(draft, flags)
    _translate_freeze(draft, lora)
    _translate_features(draft, is_old)
    if flags:
        megatron.set_recompute(draft, u)
    if not flags:
        _translate_fp8(draft, lora)
    elif megatron.set_fp8(draft, u, param=not lora) is None:
        model_and_data.disable_fp8_if_unset(draft)
    _translate_checkpoints(draft, u)
    draft.mark_many("none", NONE)
    draft.mark_many("default", SAME)
    megatron_keys = draft.keys_under("model.text_decoder.tensor_model_parallel_size")
    if flags or megatron_keys or "model.freeze_vision_model" in draft.source_keys:
        draft.mark_many("none", _BUILT)
    megatron.mark_remaining(draft, u)
    draft.mark_many("none", hf_trainer.ENVIRONMENT)
    draft.mark_many("default", hf_trainer.SAME)


def _read_flag_files(draft: Draft) -> bool:
    """Read the files named by the older trainer's flags `--mm-data` and `--mm-model`, as ``data.*`` and ``model.*``.
    Returns True if there are such flags."""
    names = {"mm_data": "data.", "mm_model": "model."}
    for key, prefix in names.items():
        word = draft.text(key)
        if word and (file := draft.folder.find(word)) is not None:
            draft.add(files.read_files([file], {}, draft.folder)[0].source_keys, prefix)
            draft.mark_default(key, why=f"its keys are translated as {prefix}*")
        elif word:
            draft.mark_unsupported(
                key, why=f"{word} is not on this machine: copy it to this path, relative to --root or to the script"
            )
    return any(key in draft.source_keys for key in names)


def _translate_parallel(draft: Draft) -> int:
    u = PrefixedDraft(draft, "parallel.")
    ring, ulysses = (
        steps_and_schedule.positive_count(draft, u(f"{key}_size")) or 1
        for key in ("ring_attention", "ulysses_parallel")
    )
    # Both split the same rows, so the size of the context-parallel group is their product.
    if ring * ulysses > 1:
        why = megatron.USP if ring > 1 and ulysses > 1 else megatron.RING if ring > 1 else megatron.ULYSSES
        u.set("parallel.context", ring * ulysses, "ring_attention_size", "ulysses_parallel_size", why=why)
        u.set("parallel.ulysses", ulysses, "ulysses_parallel_size", "ring_attention_size")
        draft.set("data.packing", True, why="context parallelism needs packed rows")
    else:
        u.mark_default("ring_attention_size", "ulysses_parallel_size", why="rows are not split across ranks")
    if (size := steps_and_schedule.positive_count(draft, u("tensor_parallel_size")) or 1) > 1:
        u.mark_unsupported(
            "tensor_parallel_size", why=f"{size}: MindSpeed-MM's FSDP2 trainer rejects it too; layers are sharded"
        )
    else:
        u.mark_default("tensor_parallel_size", why="size 1")
    context = steps_and_schedule.positive_count(draft, u("context_parallel_size")) or 1
    mark = u.mark_unsupported if context > 1 else u.mark_default
    mark("context_parallel_size", why="set by ring_attention_size and ulysses_parallel_size")
    u.set("parallel.shard", "auto", "fully_shard_parallel_size", why="shards over all remaining ranks")
    megatron.set_expert_parallel(draft, u, "expert_parallel_size", lora=bool(draft.flag("training.lora.enable")))
    if u.flag("recompute"):
        why = "not applied: the trainer reads features.recompute"
        u.mark_ignored("recompute", "recompute_plan.use_reentrant", why=why)
        for key in draft.keys_under("parallel.recompute_plan."):
            draft.mark_ignored(key, why="not applied: the trainer reads features.recompute_plan")
    return ring * ulysses


def _translate_parallel_old(draft: Draft, u: PrefixedDraft) -> int:
    megatron.set_context_parallel(draft, u, ulysses="ulysses_degree_in_cp")
    megatron.set_expert_parallel(draft, u)
    _translate_fsdp2_settings(draft, u)
    return steps_and_schedule.positive_count(draft, u("context_parallel_size")) or 1


def _translate_fsdp2_settings(draft: Draft, u: PrefixedDraft) -> None:
    """Read the file named by `fsdp2_config_path` of the older trainer (sharding, offload and recomputation); its keys
    become ``fsdp2_config.*``."""
    word = u.text("fsdp2_config_path")
    file = draft.folder.find(word) if word else None
    if file is None:
        why = "the FSDP2 settings file is not on this machine: copy it to this path, relative to --root or to the YAML"
        u.mark_unsupported("fsdp2_config_path", why=why)
        return
    draft.add(files.read_files([file], {}, draft.folder)[0].source_keys, "fsdp2_config.")
    u.mark_default("fsdp2_config_path", why="its keys are translated as fsdp2_config.*")
    f = PrefixedDraft(draft, "fsdp2_config.")
    if (steps_and_schedule.positive_count(draft, f("expert_parallel_size")) or 1) > 1:
        megatron.set_expert_parallel(draft, f, "expert_parallel_size", lora=bool(draft.keys_under("lora_args.")))
    else:
        f.mark_default("expert_parallel_size", why="experts are sharded by FSDP2")
    if f.flag("offload_to_cpu"):
        why = "states are offloaded; Octavo keeps parameters on the GPU"
        f.set("optimizer.offload", True, "offload_to_cpu", why=why)
    else:
        f.mark_default("offload_to_cpu", why="off")
    # The names are modules of the model; Octavo recomputes by component.
    if towers := f.words("recompute_modules"):
        components = {"image_encoder" if "visual" in word or "image" in word else "foundation" for word in towers}
        interval = {part: "full" if part in components else "none" for part in model_and_data.TOWERS}
        why = "blocks of these modules are recomputed"
        f.set("train.recompute", "full" if len(components) == 2 else interval, "recompute_modules", why=why)
    kinds = {"bf16": "bf16", "fp16": "fp16", "fp32": "fp32"}
    if kind := choice(draft, f("param_dtype"), kinds):
        f.set("train.precision", kind, "param_dtype")
    reduced = choice(draft, f("reduce_dtype"), kinds)
    mark = f.mark_default if reduced in (None, "fp32") else f.mark_unsupported
    mark("reduce_dtype", why="gradients are reduced in FP32")
    why = "inputs and outputs of layers have the training precision"
    f.mark_default("output_dtype", "cast_forward_inputs", why=why)
    draft.mark_many("none", {
        "Octavo configures FSDP2 automatically": "fsdp2_config.sharding_size fsdp2_config.reshard_* "
        "fsdp2_config.num_to_*_prefetch fsdp2_config.sub_modules_to_wrap fsdp2_config.ignored_modules "
        "fsdp2_config.use_reentrant fsdp2_config.align_fsdp_param_groups fsdp2_config.moe_modules "
        "fsdp2_config.pin_memory",
    })  # fmt: skip


def _translate_steps(draft: Draft, u: PrefixedDraft, ranks: int, packed: bool) -> None:
    micro, accumulation = (
        steps_and_schedule.positive_count(draft, u(k)) or 1 for k in ("micro_batch_size", "gradient_accumulation_steps")
    )
    keys = (u("micro_batch_size"), u("gradient_accumulation_steps"))
    steps_and_schedule.set_batch_size(draft, micro, accumulation, ranks, *keys, packed=packed)
    if epochs := u.integer("train_epochs"):
        draft.set("train.epochs", float(epochs), u("train_epochs"))
        u.mark_ignored("train_iters", why="train_epochs takes precedence if both are set")
    else:
        u.set("train.steps", u.integer("train_iters") or 10000, "train_iters")
    u.set("train.lr", u.number("lr", 5e-5), "lr")
    style = choice(draft, u("lr_decay_style"), {n: n for n in ("cosine", "linear", "constant")}) or "constant"
    u.set("train.schedule", style, "lr_decay_style")
    if (min_lr := u.number("lr_min")) and style != "constant":
        u.set("train.min_lr", min_lr, "lr_min")
    steps_and_schedule.set_warmup(draft, ranks, u("lr_warmup_steps"), u("lr_warmup_ratio"))
    if (ratio := u.number("lr_decay_ratio")) not in (None, 1):
        u.mark_unsupported("lr_decay_ratio", why=f"Octavo's schedules end with the run, not after {ratio:g} of it")
    clip = u.number("clip_grad")
    u.set("train.clip", 1.0 if clip is None else clip, "clip_grad", why="no clipping" if clip == 0 else "")
    megatron.set_optimizer(draft, u, megatron.Defaults(decay=0.0))


def _translate_steps_old(draft: Draft, u: PrefixedDraft, ranks: int, packed: bool) -> None:
    defaults = megatron.Defaults()
    megatron.set_steps(draft, u, defaults, ranks, packed)
    megatron.set_optimizer(draft, u, defaults)
    megatron.set_precision(draft, u)
    u.mark_default("use_flash_attn", why="torch selects a kernel at each call, flash attention if possible")


def _translate_lora(draft: Draft, flags: bool) -> bool:
    new, old = PrefixedDraft(draft, "training.lora."), PrefixedDraft(draft, "" if flags else "lora_args.")
    # Two generations of the YAML have different sections and names.
    if new.flag("enable"):
        u, names = new, {"rank": "rank", "alpha": "alpha", "dropout": "dropout", "targets": "target_modules"}
        targets = u.words("target_modules") or ["q_proj", "k_proj", "v_proj"]
    elif draft.keys_under("lora_r" if flags else "lora_args."):
        u, names = old, {"rank": "lora_r", "alpha": "lora_alpha", "dropout": "lora_dropout"}
        names["targets"] = "lora_target_modules"
        targets = u.words("lora_target_modules")
    else:
        for key in draft.keys_under("training.lora."):
            draft.mark_ignored(key, why="training.lora.enable is not true")
        return False
    globs = [target.replace("{*}", "*") for target in targets]
    globs = [f"**.{glob.removeprefix('model.')}" if "*" in glob else glob for glob in globs]
    layers = ["foundation" if glob == "all-linear" else glob for glob in globs]
    keys = {name: u(key) for name, key in names.items()}
    rank, alpha, dropout = u.integer(names["rank"], 8), u.number(names["alpha"], 16), u.number(names["dropout"], 0.0)
    model_and_data.set_lora(draft, rank, alpha, dropout, layers, keys=keys, exclude=["image_encoder"])
    if u is new:
        u.mark_default("enable", why="the lora section enables it")
        u.mark_unsupported("init_lora_weights", why="adapters start with B = 0")
        u.mark_unsupported("disable_peft_moe_conversion", why="experts get adapters if lora.targets names them")
        if path := u.text("pretrained_lora_path"):
            draft.set("lora.adapter", draft.path(path), u("pretrained_lora_path"))
    else:
        u.mark_unsupported("lora_register_forward_hook", why="Octavo needs no hook for input gradients")
    return True


def _translate_freeze(draft: Draft, lora: bool) -> None:
    """Translate freezing: name patterns in the new trainer, flags for each component in the old one. Only named
    components are frozen, except for the old trainer's vision tower and projector, which are frozen by default."""
    frozen: dict[str, tuple[str, ...]] = {}
    globs: list[str] = []
    for word in draft.words("model.freeze"):
        plain = word.removeprefix("model.").removesuffix(".{*}").replace("{*}", "*")
        component = next((name for mark, name in _FROZEN if plain.startswith(mark)), None) if "*" not in plain else None
        if component in model_and_data.COMPONENTS:
            frozen[component] = ("model.freeze",)
            if component == "image_encoder":  # model.visual holds the merger too
                frozen["image_projector"] = ("model.freeze",)
        else:
            globs.append(component or f"**.{plain}.**")
    flags = dict(zip(("vision_model", "vision_projection", "language_model"), model_and_data.COMPONENTS, strict=True))
    for name, component in flags.items():
        key = f"model.freeze_{name}"
        if flag := draft.flag(key):
            frozen[component] = (key,)
        elif flag is False:
            draft.mark_default(key, why="trained")
    by_flags = any(f"model.freeze_{name}" in draft.source_keys for name in flags)
    freezes_towers = not by_flags and bool(draft.keys_under("model.image_encoder."))  # by default
    tree = {
        "model.image_encoder.vision_encoder": "image_encoder",
        "model.image_encoder.vision_projector": "image_projector",
        "model.text_decoder": "foundation",
    }
    for at, component in tree.items():
        key = f"{at}.freeze"
        flag = draft.flag(key)
        if flag or (flag is None and freezes_towers and component != "foundation"):
            frozen[component] = (key,)
        elif flag is False:
            draft.mark_default(key, why="trained")
        for dead in ("num_layers", "hidden_size", "num_attention_heads", "max_position_embeddings"):
            draft.mark_ignored(f"{at}.{dead}", why=_UNREAD)
    keys = [key for keys_of_component in frozen.values() for key in keys_of_component]
    if lora:
        draft.mark_default("model.freeze", *keys, why="the base of the adapters is always frozen")
    elif frozen or globs:
        names = [name for name in model_and_data.COMPONENTS if name in frozen] + globs
        draft.set("model.freeze", names, "model.freeze", *keys)


def _translate_features(draft: Draft, is_old: bool) -> None:
    """Translate loss, recomputation, offload and attention, from the new sections and the old tree."""
    loss_keys = ("features.loss_cfg.loss_type", "model.loss_cfg.loss_type")
    loss_key = next((key for key in loss_keys if key in draft.source_keys), None)
    # The default loss differs between the two generations of the trainer.
    word = (draft.text(loss_key) if loss_key else None) or ("default" if is_old else "raw")
    known = _LOSSES.get(word)
    if known is None and loss_key:
        why = f"{word} is a custom loss ('custom' raises an error in MindSpeed-MM); microbatch is used instead"
        draft.mark_unsupported(loss_key, why=why)
    reasons = {"raw": "the model's loss: mean over the tokens of a micro-batch"}
    reasons["default"] = "mean of the micro-batch means"
    known_keys = [loss_key] if loss_key and known else []
    draft.set("train.loss", known or "microbatch", *known_keys, why=reasons.get(word, ""))
    for at in ("features.loss_cfg.", "model.loss_cfg."):
        if (coefficient := draft.number(f"{at}router_aux_loss_coef")) is not None:
            draft.set("train.router_aux_loss_coef", coefficient, f"{at}router_aux_loss_coef")
        draft.mark_unsupported(
            f"{at}compute_mode", f"{at}chunk_size", why="train.logits: chunked selects the chunk size by memory"
        )
    megatron.set_aux_loss(draft, PrefixedDraft(draft, "model.text_decoder."))
    f = PrefixedDraft(draft, "features.")
    chunk = f.flag("enable_chunk_loss") or f.flag("enable_dynamic_chunk_loss")
    f.set("train.logits", "chunked", "enable_chunk_loss", "enable_dynamic_chunk_loss",
          why="full logits are never materialized" if chunk else "same results with less memory")  # fmt: skip
    for key in draft.keys_under("features.chunkloss_plan."):
        (draft.mark_unsupported if chunk else draft.mark_ignored)(
            key, why="the chunk size is selected by memory" if chunk else "enable_chunk_loss is off"
        )
    _translate_recompute(draft, f, is_old)
    on = f.flag("enable_activation_offload") or draft.flag("model.text_decoder.activation_offload")
    offload = ("features.enable_activation_offload", "model.text_decoder.activation_offload")
    for key in draft.keys_under("features.activation_offload_plan."):
        if on:
            draft.mark_unsupported(key, why="offload applies to all blocks or none")
        else:
            draft.mark_ignored(key, why="features.enable_activation_offload is not true, so nothing was offloaded")
    if on and draft.settings["train.recompute"].value == "full":
        draft.mark_unsupported(
            *offload, why="full recomputation leaves almost nothing to offload; use it with recompute: selective"
        )
    elif on:
        draft.set("train.offload_activations", True, *offload)
    else:
        draft.mark_default(*offload, why="off")
    unread = [key for name in ("recompute", "recompute_plan", "enable_chunk_loss", "chunkloss_plan",
              "enable_activation_offload", "activation_offload_plan", "enable_chunk_mbs", "chunkmbs_plan")
              for key in draft.source_keys if key == f"model.{name}" or key.startswith(f"model.{name}.")]  # fmt: skip
    draft.mark_ignored(*unread, why="not read: the trainer reads this name under features")
    prefixes = {"image_encoder": "model.image_encoder.vision_encoder.", "foundation": "model.text_decoder."}
    for component, at in prefixes.items():
        if kernel := choice(draft, f"{at}attn_implementation", _KERNELS):
            draft.set(f"model.attention.{component}", kernel, f"{at}attn_implementation", why=_SDPA_REASON)
        if draft.flag(f"{at}synchronize_per_layer"):
            draft.set("train.synchronize_per_layer", True, f"{at}synchronize_per_layer")
    packed = "data.packing" in draft.settings
    if (kernel := choice(draft, "model.attn_implementation", _KERNELS)) == "eager":
        model_and_data.set_attention(draft, "model.attn_implementation", kernel, packed)
    elif kernel:
        draft.set("model.attention", kernel, "model.attn_implementation", why=_SDPA_REASON)


def _has_wrapped_blocks(draft: Draft) -> bool:
    """Return True for Qwen3-VL, whose blocks the older trainer always wraps for recomputation."""
    kind = draft.text("model.model_id") or ""
    path = draft.text("model.init_from_hf_path") or draft.text("model.model_name_or_path")
    return kind.startswith("qwen3_vl") or model_and_data.video_family(draft, path) == "qwen3_vl"


def _translate_recompute(draft: Draft, f: PrefixedDraft, is_old: bool) -> None:
    trees = {"image_encoder": "model.image_encoder.vision_encoder", "foundation": "model.text_decoder"}
    keys = {component: f"{at}.recompute_granularity" for component, at in trees.items()}
    enabled = {
        component: word
        for component, key in keys.items()
        if (word := choice(draft, key, {n: n for n in ("full", "selective")}))
    }
    if is_old and _has_wrapped_blocks(draft):
        draft.set("train.recompute", "full", why="MindSpeed-MM's Qwen3-VL always recomputes every block")
        why = "MindSpeed-MM always recomputes every block of this model"
        draft.mark_ignored(*keys.values(), f("recompute"), why=why)
        return
    if "train.recompute" in draft.settings:  # set by fsdp2_config
        return
    if enabled:
        value = enabled["foundation"] if len(set(enabled.values())) == 1 and len(enabled) == 2 else enabled
        draft.set("train.recompute", value, *keys.values())
        return
    on = f.flag("recompute")
    f.set("train.recompute", "full" if on else "none", "recompute")
    for key in draft.keys_under("features.recompute_plan."):
        if on:
            draft.mark_default(key, why="blocks of the vision tower and the language model are recomputed")
        else:
            draft.mark_ignored(key, why="features.recompute is not true, so nothing was recomputed")


def _translate_fp8(draft: Draft, lora: bool) -> None:
    at = PrefixedDraft(draft, "training.quantization_plan.")
    word = at.text("quant_recipe") or at.text("recipe_name")
    keys = ("quant_recipe", "recipe_name", "converters", "quant_converters")
    # A recipe without converters replaces no layer.
    if word is None or not (at.words("converters") or at.words("quant_converters")):
        for key in draft.keys_under(at.prefix):
            draft.mark_ignored(key, why="no layer is replaced without converters" if word else "no recipe is set")
        model_and_data.disable_fp8_if_unset(draft)
        return
    if not word.startswith("mxfp8"):
        at.mark_unsupported(
            "quant_recipe", "recipe_name", why=f"{word}: MindSpeed-MM only implements mxfp8 and mxfp8-32x32"
        )
    draft.set("fp8.foundation.recipe", "mxfp8", *[at(key) for key in keys],
              why="MindSpeed-MM's filter only matches layers.N, never the vision tower")  # fmt: skip
    at.mark_default("quant_format", why="mxfp8 uses E4M3 for all operands, including dy")
    at.mark_default("block_size", why="32 values share one scale")
    for key in ("quant_apply_modules", "apply_modules"):
        inner = all(word.startswith(("model.language_model", "language_model")) for word in at.words(key))
        (at.mark_default if inner else at.mark_unsupported)(
            key, why="the language model's layers (fp8.foundation); use fp8.rules for others"
        )
    ignored = at.words("quant_ignored_modules") or at.words("ignored_modules")
    rules = [word for word in ignored if word.strip("*") not in ("lm_head", "gate")]
    for number, word in enumerate(rules):
        rule = word.replace("{*}", "*").strip("*").strip(".")
        draft.set(f"fp8.rules.{number}.match", f"**.{rule}", at("quant_ignored_modules"), at("ignored_modules"))
        draft.set(f"fp8.rules.{number}.recipe", "off", why="not quantized in the source")
    at.mark_default("quant_ignored_modules", "ignored_modules", why="the head and routers stay in high precision")
    gather = at.flag("enable_fsdp_low_precision_all_gather")
    if (gather is None or gather) and not lora:
        draft.set(
            "fp8.foundation.param", True, at("enable_fsdp_low_precision_all_gather"), why="FSDP2 gathers FP8 codes"
        )
    else:
        at.mark_default("enable_fsdp_low_precision_all_gather", why="weights are gathered in their storage dtype")
    at.mark_unsupported("fsdp_low_precision_all_gather_mode", why="fp8.weight_codes selects which layouts are kept")


def _translate_weights(draft: Draft, u: PrefixedDraft) -> None:
    """Translate the initial weights. A DCP copy of the model folder is that folder. With `load_base_model` it
    is the base of the adapters, and `load` is the checkpoint of the adapters."""
    model = draft.settings["model.path"].source
    base = u.text("load_base_model")
    if base and "lora.rank" in draft.settings:
        if not model:
            why = "octavo convert dcp_to_hf converts it to a folder"
            draft.set("model.path", draft.path(base), u("load_base_model"), why=why)
        else:
            u.mark_default("load_base_model", why="the base of the adapters is model.path")
        if adapters := u.text("load"):
            draft.set("run.start_from", adapters, u("load"), why="the adapters to continue from")
            draft.add_note("run.start_from reads checkpoints that Octavo wrote: convert the checkpoint to a PEFT "
                       "folder with octavo convert dcp_to_hf, and set lora.adapter to that folder instead")  # fmt: skip
    elif (word := u.text("load")) and model and model_and_data.is_same_model(word, str(model[0].value)):
        u.mark_default("load", why="a copy of the model folder, which is model.path")


def _translate_checkpoints(draft: Draft, u: PrefixedDraft) -> None:
    if draft.flag("$ENABLE_GC_THRESHOLD"):
        draft.set("train.gc", "700,10,1000", "$ENABLE_GC_THRESHOLD", why="the thresholds that this variable sets")
    _translate_weights(draft, u)
    megatron.set_saving(draft, u)
    remaining = [key for key in ("load", "load_base_model", "load_checkpoint_path") if u(key) not in draft.rows]
    u.mark_unsupported(*remaining,
           why="model.path takes a Hugging Face folder; octavo convert dcp_to_hf creates one from a DCP "
           "checkpoint")  # fmt: skip
    if save := u.integer("save_steps"):
        u.set("run.save_every", save, "save_steps")
    if not (interval := u.integer("val_interval")):
        u.mark_default("val_interval", why="no evaluation during training")
    elif "data.eval.0.path" in draft.settings:
        u.set("run.eval_every", interval, "val_interval")
    else:
        u.mark_unsupported("val_interval", why="the translated files have no evaluation data (data.eval)")
