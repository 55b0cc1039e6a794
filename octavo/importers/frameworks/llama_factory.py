"""LLaMA-Factory's YAML (read in 0.9.5): SFT, pretraining and preferences, full or LoRA, with its dataset_info.json."""

from __future__ import annotations

import re
from pathlib import Path

from octavo.base import safe_read
from octavo.importers.common import model_and_data, steps_and_schedule
from octavo.importers.common.draft import Draft, choice
from octavo.importers.common.prefixed_keys import PrefixedDraft
from octavo.importers.errors import TranslateError
from octavo.importers.frameworks import hf_trainer, megatron

NAME = "llama-factory"
#: keys that only this framework has, which identify a file
MARKS = ("finetuning_type", "lora_target", "stage", "cutoff_len", "neat_packing", "freeze_vision_tower", "pref_loss")
FIRST_WINS = False
_DEFAULTS = hf_trainer.Defaults(recompute=True)
_PHASES = {"pt": "pretrain", "sft": "sft", "dpo": "preference", "kto": "preference", "rm": None, "ppo": None}
_LOSSES = {"sigmoid": "sigmoid", "hinge": "hinge", "ipo": "ipo", "orpo": "orpo", "simpo": "simpo"}
_KERNELS = {"auto": "sdpa", "sdpa": "sdpa", "disabled": "eager", "fa2": "flash_attention_2", "fa3": "flash_attention_3"}
_LORA_KEYS = "lora_rank lora_alpha lora_dropout lora_target use_rslora use_dora additional_target create_new_adapter"
_COLUMNS = {"prompt": "instruction", "query": "input", "response": "output", "messages": "conversations",
            "system": "system", "chosen": "chosen", "rejected": "rejected", "images": "images"}  # fmt: skip
_FORMATS = {"alpaca": "alpaca", "sharegpt": "sharegpt", "openai": "messages"}

NONE = {
    model_and_data.TEMPLATE_REASON: "template tool_format",
    "the audio track of videos is not used": "use_audio_in_video",
    "setting of the image processor, which is loaded from the model folder": "image_do_pan_and_scan crop_to_patches "
    "audio_sampling_rate",
    "rows need no preprocessing; they are cached as Arrow (data.cache)": "overwrite_cache preprocessing_* "
    "tokenized_path cache_dir",
    "model code comes from Octavo or transformers; remote code is not loaded": "trust_remote_code",
    "tokens cannot be added; use a model folder that already has them": "resize_vocab add_tokens add_special_tokens "
    "new_special_tokens_config init_special_tokens split_special_tokens",
    "positions are set by config.json, and every layer is executed": "rope_scaling shift_attn mixture_of_depths",
    "kernels are Octavo's": "use_unsloth use_unsloth_gc use_v1_kernels use_kt kt_* chunk_size cpu_infer mode use_mca",
    "AdamW is the only optimizer; optimizer: {states: fp8, master: bf16+sr} saves memory": "use_galore galore_* "
    "use_apollo apollo_* use_badam badam_* use_adam_mini use_muon",
    "LoRA has one learning rate and starts with B = 0":
    "loraplus_lr_ratio loraplus_lr_embedding pissa_init pissa_iter pissa_convert",
    "OFT, LLaMA-Pro and freezing by layer number are not implemented": "oft_* module_dropout use_llama_pro "
    "freeze_trainable_* freeze_extra_modules",
    "only adapters are trained": "additional_target",
    "this loss is not implemented": "use_dft_loss ld_alpha pref_bco_weight use_asft_loss use_eaft_loss eaft_alpha "
    "asft_alpha",
    "reference and reward models belong to phase rl": "ref_model_adapters ref_model_quantization_bit reward_model* "
    "ppo_*",
    "evaluation reports loss and exact match for each data set": "compute_accuracy eval_num_beams eval_on_each_dataset",
    "for inference, serving or export, not for training": "export_* infer_* vllm_* sglang_* offload_folder "
    "use_kv_cache print_param_status do_sample temperature top_p top_k num_beams max_length max_new_tokens "
    "repetition_penalty length_penalty skip_special_tokens task task_dir batch_size lang n_shot save_dir download_mode",
    "hub tokens are read from the environment": "hf_hub_token ms_hub_token om_hub_token",
    "there is one process group, started by --nproc or torchrun": "ray_* resources_per_worker placement_strategy "
    "use_hyper_parallel hyper_parallel_args data_shared_file_system",
    "LLaMA-Factory sets this internally": "compute_dtype device_map model_max_length block_diag_attn",
    "set in the tracker's environment variables": "swanlab_*",
    "bitsandbytes is not used": "quantization_method quantization_type double_quantization quantization_device_map",
}  # fmt: skip
SAME = {
    "fast tokenizers are always used": "use_fast_tokenizer",
    "padding has no loss": "ignore_pad_token_for_loss",
    "weights are loaded shard by shard": "low_cpu_mem_usage",
    "recomputation is non-reentrant": "use_reentrant_gc",
    "norms compute in fp32, and full logits are never materialized": "upcast_layernorm upcast_lmhead_output",
}


def translate(draft: Draft) -> None:
    stage = choice(draft, "stage", {name: name for name in _PHASES}) or "sft"
    kind = choice(draft, "finetuning_type", {n: n for n in ("lora", "full", "freeze", "oft")}) or "lora"
    world = steps_and_schedule.count_processes(draft)
    has_tower = _translate_model(draft, kind)
    # The order matters: adapters and losses depend on the phase, batch sizes on packing.
    phase = _translate_phase(draft, stage)
    path = draft.text("model_name_or_path")
    kind = _translate_adapters(draft, kind, has_tower, path)
    _translate_data(draft, phase)
    if has_tower or any(key.startswith("video_") for key in draft.source_keys):
        video_keys = {target: f"video_{source}" for target, source in model_and_data.VIDEO_KEYS.items()}
        model_and_data.set_video(
            draft, model_and_data.video_family(draft, path), phase, video_keys, model_and_data.VIDEO_DEFAULTS
        )
    packed = _translate_packing(draft, phase)
    ranks = _count_data_parallel(draft, world, kind)
    hf_trainer.set_steps(draft, _DEFAULTS, ranks, packed)
    if phase != "preference":
        loss = "microbatch" if has_tower else "token"
        why = (
            "with a processor LLaMA-Factory averages the loss per micro-batch"
            if has_tower
            else "mean over the tokens of the whole step"
        )
        draft.set("train.loss", loss, why=why)
    hf_trainer.set_optimizer(draft, _DEFAULTS)
    if draft.flag("pure_bf16"):
        draft.set("optimizer.master", "bf16+sr", "pure_bf16", why="BF16 weights, which Octavo rounds stochastically")
        if kind == "lora":
            draft.set("lora.dtype", "bf16", "pure_bf16")
    hf_trainer.set_precision(draft, kind == "lora")
    _translate_recompute(draft)
    hf_trainer.set_saving(draft, _DEFAULTS, ranks)
    if draft.flag("use_swanlab"):
        draft.set("run.trackers", ["swanlab"], "use_swanlab")
    hf_trainer.set_sharding(draft)
    _translate_fp8(draft, kind)
    draft.mark_many("none", NONE)
    draft.mark_many("default", SAME)
    if kind != "lora":
        draft.mark_many("dead", {f"finetuning_type is {kind}, so there are no adapters": _LORA_KEYS})
    if stage not in ("dpo", "kto"):
        group = "pref_loss pref_beta pref_ftx dpo_label_smoothing simpo_gamma kto_chosen_weight kto_rejected_weight"
        group += " ref_model"
        draft.mark_many("dead", {f"stage is {stage}, which has no preference loss": group})
    draft.mark_many("none", {"not used by this kind of run": "adapter_folder create_new_adapter"})
    draft.mark_many("dead", {"only used with streaming: true": "buffer_size"})
    hf_trainer.mark_remaining(draft)


def _translate_model(draft: Draft, kind: str) -> bool:
    path = model_and_data.set_model_path(draft, "model_name_or_path")
    if (revision := draft.text("model_revision")) not in (None, "main"):
        draft.set("model.revision", revision, "model_revision")
    elif revision:
        draft.mark_default("model_revision", why="the default revision")
    if draft.flag("train_from_scratch"):
        draft.set("model.init", "random", "train_from_scratch")
    model_and_data.set_attention_kernel(
        draft, "flash_attn", _KERNELS, bool(draft.flag("packing") or draft.flag("neat_packing"))
    )
    if (bits := draft.integer("quantization_bit")) is not None:
        model_and_data.set_quantized_base(draft, "quantization_bit", bits)
    if (coefficient := draft.number("moe_aux_loss_coef")) is not None:
        draft.set("train.router_aux_loss_coef", coefficient, "moe_aux_loss_coef")
    for side in ("max", "min"):
        if (pixels := draft.integer(f"image_{side}_pixels")) is not None:
            draft.set(f"data.{side}_pixels", pixels, f"image_{side}_pixels")
    has_tower = model_and_data.has_vision(draft, path)
    if has_tower and not draft.has("image_max_pixels"):
        draft.set("data.max_pixels", 768 * 768, why="the framework's default")
    return has_tower


def _translate_phase(draft: Draft, stage: str) -> str:
    phase = _PHASES[stage]
    if phase is None:
        instead = (
            "Octavo uses reward models but does not train them" if stage == "rm" else "phase rl has ppo (docs/rl.md)"
        )
        draft.refuse("stage", f"it trains neither on answers nor on pairs; {instead}")
    draft.set("train.phase", phase, "stage")
    if stage == "kto":
        draft.set("preference.loss", "kto", "stage")
        draft.set("preference.beta", draft.number("pref_beta", 0.1), "pref_beta")
        for target, source in (
            ("desirable_weight", "kto_chosen_weight"),
            ("undesirable_weight", "kto_rejected_weight"),
        ):
            if (weight := draft.number(source)) is not None:
                draft.set(f"preference.{target}", weight, source)
        draft.mark_ignored("pref_loss", why="stage is kto")
    elif stage == "dpo":
        loss = hf_trainer.set_preference(draft, "pref_loss", _LOSSES, draft.number("pref_beta", 0.1), "pref_beta")
        if (share := draft.number("pref_ftx")) and loss != "orpo":
            draft.set("preference.sft", share, "pref_ftx")
        if label_smoothing := draft.number("dpo_label_smoothing"):
            draft.set("preference.label_smoothing", label_smoothing, "dpo_label_smoothing")
        # Without simpo_gamma the margin is the trainer's default, 0.5.
        if loss == "simpo":
            margin = draft.number("simpo_gamma")
            beta = draft.settings["preference.beta"].value
            draft.set(
                "preference.gamma",
                0.5 if margin is None else margin,
                "simpo_gamma",
                why=f"with beta {beta:g}, as in LLaMA-Factory",
            )
        if reference := draft.text("ref_model"):
            policy = draft.text("model_name_or_path")
            why = "the reference is the policy's initial weights"
            (draft.mark_default if reference == policy else draft.mark_unsupported)("ref_model", why=why)
    return phase


def _count_data_parallel(draft: Draft, world: int, kind: str) -> int:
    """Return the number of processes that read different rows: all of them, except with the Megatron trainer."""
    u = PrefixedDraft(draft)
    if not any(key.endswith("_model_parallel_size") for key in draft.source_keys):
        return world
    megatron.set_expert_parallel(draft, u, lora=kind == "lora")
    megatron.set_recompute(draft, u)
    megatron.mark_remaining(draft, u)
    draft.mark_many("none", {"layers are Octavo's, not Megatron's": "apply_rope_fusion bias_*_fusion"})
    return megatron.data_parallel_size(draft, u, world)


def _translate_recompute(draft: Draft) -> None:
    """Translate recomputation, which LLaMA-Factory does by default; transformers' flag can only switch it on."""
    off, key = "disable_gradient_checkpointing", "gradient_checkpointing"
    disabled, enabled = draft.flag(off), draft.flag(key)
    if "recompute_granularity" in draft.source_keys:
        draft.mark_unsupported(off, key, why="recompute_granularity takes precedence")
    elif enabled or not disabled:
        why = "" if enabled or disabled is False else "the framework's default"
        draft.set(
            "train.recompute", "full", *([key] if enabled else []), *([off] if disabled is False else []), why=why
        )
        draft.mark_ignored(
            *([key] if enabled is False else []), why=f"LLaMA-Factory recomputes blocks unless {off} is true"
        )
        draft.mark_ignored(*([off] if disabled else []), why=f"{key} is true and takes precedence")
    else:
        draft.set("train.recompute", "none", off, key)


#: families whose projector layers share names with other layers: Qwen3-VL's with the tower, GLM-4V's with the LLM
_REACHED = (("qwen3_vl", r"qwen-?3[-_]?vl", "image_encoder"), ("qwen3_5", r"qwen-?3\.[5-9]", "image_encoder"),
            ("glm4v", r"glm-?4(\.\d)?v", ""))  # fmt: skip


def _reaches_projector(draft: Draft, path: str | None, trained: list[str]) -> bool:
    """Whether `lora_target: all` selects the projector's layers: it collects layer names outside the projector, then
    selects every layer with such a name that is not frozen."""
    kind = str(model_and_data.read_config(draft, path).get("model_type") or "")
    for model_type, name, needs in _REACHED:
        if kind.startswith(model_type) or (not kind and path and re.search(name, path, re.IGNORECASE)):
            return not needs or needs in trained
    return False


def _translate_adapters(draft: Draft, kind: str, has_tower: bool, path: str | None) -> str:
    """Translate the adapters. Returns the resulting kind of training."""
    requested = kind
    if kind == "oft":
        draft.mark_unsupported("finetuning_type", why="OFT is not implemented: LoRA is used instead")
        draft.add_note("OFT is not implemented: LoRA is used instead; check lora.rank and train.lr")
        kind = "lora"
    defaults = {"freeze_vision_tower": True, "freeze_multi_modal_projector": True, "freeze_language_model": False}
    # An absent flag means its default, which freezes the tower and the projector.
    frozen = {key: defaults[key] if (value := draft.flag(key)) is None else value for key in defaults}
    names = dict(zip(defaults, model_and_data.COMPONENTS, strict=True))
    if not has_tower:
        draft.mark_ignored(*defaults, why="a text model has no vision tower or projector")
    elif kind == "lora":
        trained = [names[key] for key in reversed(defaults) if not frozen[key]]
        draft.mark_default(*[key for key in defaults if frozen[key]], why="not in lora.targets")
    else:
        model_and_data.set_freeze(draft, {names[key]: (key,) for key in defaults if frozen[key]})
        draft.mark_default(*[key for key in defaults if not frozen[key]], why="trained")
    if kind == "lora":
        rank = draft.integer("lora_rank", 8)
        targets = draft.words("lora_target") or ["all"]
        all_layers = targets == ["all"]
        if all_layers:
            reached = has_tower and _reaches_projector(draft, path, trained)
            excluded = () if reached else ("image_projector",)
            targets = [name for name in trained if name not in excluded] if has_tower else ["foundation"]
            for key in defaults if has_tower else ():
                if not frozen[key] and names[key] in targets:
                    why = "all selects its layers by name" if names[key] == "image_projector" else ""
                    draft.set("lora.targets", targets, key, why=why)
            if has_tower and not frozen["freeze_multi_modal_projector"] and not reached:
                draft.mark_ignored(
                    "freeze_multi_modal_projector", why="lora_target: all does not select the projector's layers"
                )
        keys = {"rank": "lora_rank", "alpha": "lora_alpha", "dropout": "lora_dropout", "targets": "lora_target"}
        exclude = [names[key] for key in defaults if has_tower and not all_layers and frozen[key]]
        alpha, dropout = draft.number("lora_alpha", 2 * rank), draft.number("lora_dropout", 0.0)
        model_and_data.set_lora(draft, rank, alpha, dropout, targets, keys=keys, exclude=exclude)
        model_and_data.set_lora_variants(draft, keys, "use_rslora", "use_dora")
        if adapter := draft.words("adapter_name_or_path"):
            draft.set("lora.adapter", draft.path(adapter[0]), "adapter_name_or_path")
            if len(adapter) > 1:
                draft.mark_unsupported(
                    "adapter_name_or_path", why="only one adapter can be loaded; merge the others first"
                )
    elif kind == "freeze":
        draft.mark_unsupported(
            "finetuning_type", why=f"{kind} is not implemented; all parameters are trained (see model.freeze)"
        )
    if requested in ("lora", "full"):
        draft.mark_default("finetuning_type", why="the lora section selects it")
    return kind


def _translate_data(draft: Draft, phase: str) -> None:
    dataset_dir = draft.text("dataset_dir") or "data"
    dataset_info = _read_dataset_info(draft, dataset_dir)
    limit = draft.integer("max_samples")
    streaming = draft.flag("streaming")
    for group, key in (("train", "dataset"), ("eval", "eval_dataset")):
        for number, name in enumerate(draft.words(key)):
            at = _add_dataset_entry(draft, group, number, name, key, dataset_dir, dataset_info)
            if media := draft.text("media_dir"):
                draft.set(f"{at}.images", draft.path(media, hub=False), "media_dir")
            if limit is not None:
                draft.set(f"{at}.max_samples", limit, "max_samples")
            if streaming:
                streamed = model_and_data.set_streaming(draft, at, "streaming")
                if streamed and group == "train" and (size := draft.integer("buffer_size")):
                    draft.set(f"{at}.shuffle_buffer", size, "buffer_size")
    if not draft.has("dataset"):
        draft.set("data.train.0.path", "/path/to/data.json", why="FILL IN: no key names training data")
        draft.add_note("FILL IN: set data.train")
    if streaming is False:
        draft.mark_default("streaming", why="rows are read into the cache")
    _translate_mixture(draft)
    # LLaMA-Factory truncates rows at cutoff_len.
    if (length := draft.integer("cutoff_len")) is None:
        length = 2048
    draft.set("train.seq_length", length, "cutoff_len")
    draft.set("data.on_long", "cut", why="longer rows are truncated")
    if draft.flag("train_on_prompt") and phase == "sft":
        draft.set("data.train_on_prompt", True, "train_on_prompt")
    else:
        draft.mark_default("train_on_prompt", why="only answers have loss")
    if draft.flag("mask_history") is False:
        draft.mark_default("mask_history", why="all answers have loss")
    if draft.flag("mask_history") and phase == "sft":
        model_and_data.mark_last_answer_loss(draft, "mask_history")
    if system := draft.text("default_system"):
        draft.set("data.system", system, "default_system")
    model_and_data.set_template_flags(draft, "enable_thinking", "preserve_thinking")
    if (share := draft.number("val_size")) and not draft.has("eval_dataset"):
        draft.mark_unsupported("val_size", why=f"Octavo does not split off evaluation rows ({share:g}); set data.eval")
    else:
        draft.mark_default("val_size", why="no rows are split off for evaluation")


def _read_dataset_info(draft: Draft, dataset_dir: str) -> dict:
    return draft.folder.json(dataset_dir, "dataset_info.json")


def _add_dataset_entry(
    draft: Draft, group: str, number: int, name: str, key: str, dataset_dir: str, dataset_info: dict
) -> str:
    """Add one data set: from dataset_info.json, from a file of that name, or as a path to fill in."""
    entry = dataset_info.get(name)
    if not isinstance(entry, dict):
        direct = draft.folder.exists(dataset_dir, name)
        if direct or Path(name).suffix:
            return model_and_data.add_dataset(
                draft, group, number, str(Path(dataset_dir) / name), key, "dataset_dir", hub=False
            )
        why = f"FILL IN: the file that {dataset_dir}/dataset_info.json lists for {name}, which is not on this machine"
        draft.add_note(f"FILL IN: set data.{group}.{number}.path to the data set {name}")
        return model_and_data.add_dataset(
            draft, group, number, f"{dataset_dir}/{name}.json", key, "dataset_dir", hub=False, why=why
        )
    safe_read.check_schema(entry, _ENTRY, f"{dataset_dir}/dataset_info.json: {name}", TranslateError)
    if entry.get("file_name"):
        at = model_and_data.add_dataset(
            draft, group, number, str(Path(dataset_dir) / entry["file_name"]), key, "dataset_dir", hub=False, why=name
        )
        if draft.num_rows is None and group == "train" and number == 0:
            draft.num_rows = steps_and_schedule.count_rows(draft, dataset_dir, entry["file_name"])
    elif entry.get("hf_hub_url"):
        at = model_and_data.add_dataset(draft, group, number, entry["hf_hub_url"], key, why=name)
        for target, source in (("split", "split"), ("subset", "subset")):
            if isinstance(entry.get(source), str):
                draft.set(f"{at}.{target}", entry[source], key)
    else:
        draft.add_note(
            f"data.{group}.{number}: dataset_info.json loads {name} through {', '.join(entry)}, which is not supported"
        )
        at = model_and_data.add_dataset(
            draft, group, number, f"{dataset_dir}/{name}.json", key, hub=False, why="FILL IN: set the path"
        )
    formatting = entry.get("formatting") or "alpaca"
    if formatting in _FORMATS and not entry.get("ranking"):
        draft.set(f"{at}.format", _FORMATS[formatting], key)
    columns = entry.get("columns") or {}
    # Octavo recognizes usual column names, so only others are written.
    renamed = {_COLUMNS[k]: v for k, v in columns.items() if k in _COLUMNS and isinstance(v, str) and _COLUMNS[k] != v}
    if formatting == "sharegpt" and columns.get("messages") == "messages":
        renamed.pop("conversations", None)
        draft.set(f"{at}.format", "messages", key)
    if renamed:
        draft.set(f"{at}.columns", renamed, key)
    tags = {k: v for k, v in (entry.get("tags") or {}).items() if (k, v) not in _DEFAULT_TAGS}
    if tags:
        draft.add_note(
            f"data.{group}.{number}: tags of {name} ({tags}) rename roles or keys, which Octavo may not detect"
        )
    if "images" in columns:
        draft.set(f"{at}.images", draft.path(dataset_dir, hub=False), why="image paths are relative to dataset_dir")
    return at


_ENTRY = {"file_name": safe_read.TEXT, "hf_hub_url": safe_read.TEXT, "formatting": safe_read.TEXT,
          "columns": {...: safe_read.TEXT}, "tags": {...: safe_read.TEXT}}  # fmt: skip
_DEFAULT_TAGS = {("role_tag", "from"), ("role_tag", "role"), ("content_tag", "value"), ("content_tag", "content"),
               ("user_tag", "human"), ("user_tag", "user"), ("assistant_tag", "gpt"), ("assistant_tag", "assistant"),
               ("system_tag", "system")}  # fmt: skip


def _translate_mixture(draft: Draft) -> None:
    strategy = draft.text("mix_strategy")
    weights = draft.numbers("interleave_probs")
    if strategy in (None, "concat"):
        draft.mark_default("mix_strategy", why="data sets are weighted by their number of rows")
        draft.mark_ignored("interleave_probs", why="mix_strategy is concat")
        return
    for number, weight in enumerate(weights):
        draft.set(f"data.train.{number}.weight", weight, "interleave_probs", "mix_strategy", why="share of the rows")


def _translate_packing(draft: Draft, phase: str) -> bool:
    neat, plain = draft.flag("neat_packing"), draft.flag("packing")
    if phase == "pretrain":
        if plain is False:
            draft.set("data.join", False, "packing", why="each document is a separate sample")
        else:
            draft.mark_default(
                "packing", "neat_packing", why="documents are concatenated and split at seq_length (data.join)"
            )
        return False
    if phase == "preference":
        draft.mark_unsupported("packing", "neat_packing", why="preference pairs are not packed")
        return False
    if neat or plain:
        why = (
            ""
            if neat
            else "without neat_packing samples of a pack attend to each other in LLaMA-Factory; in Octavo they do not"
        )
        model_and_data.set_packing(draft, "neat_packing", "packing", why=why)
        return True
    draft.mark_default("packing", "neat_packing", why="each row is one sample")
    return False


def _translate_fp8(draft: Draft, kind: str) -> None:
    backend = (draft.text("fp8_backend") or "auto").lower()
    inner = ("fp8_backend", "fp8_enable_fsdp_float8_all_gather")
    if not draft.flag("fp8"):
        draft.mark_ignored(*inner, why="fp8 is off, without which these keys have no effect")
        draft.mark_default("fp8", why="off")
        model_and_data.disable_fp8_if_unset(draft)
        return
    if backend in ("te", "msamp"):
        draft.set("fp8.recipe", "delayed", "fp8", "fp8_backend", why="Transformer Engine: amax histories, E5M2 for dy")
        draft.set("fp8.format", "hybrid", "fp8")
        if backend == "msamp":
            draft.mark_unsupported(
                "fp8_backend", why="MS-AMP's FP8 gradients and states have no equivalent; see optimizer.states"
            )
    else:
        draft.set("fp8.recipe", "tensorwise", "fp8", "fp8_backend", why="torchao's default: one scale per tensor")
    if draft.flag(inner[1]):
        if kind == "lora":
            draft.mark_unsupported(inner[1], why="with model.load_in_fp8 a frozen base is gathered as FP8 codes")
        else:
            draft.set("fp8.param", True, inner[1], why="FSDP2 gathers FP8 codes")
    else:
        draft.mark_default(inner[1], why="weights are gathered in their storage dtype")
