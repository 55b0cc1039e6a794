"""LLaMA-Factory's YAML (read in 0.9.5): SFT, pretraining and preferences, full or LoRA, with its dataset_info.json."""

from __future__ import annotations

import re
from pathlib import Path

from octavo.base import safe_read
from octavo.importers.common import model_and_data, steps_and_schedule
from octavo.importers.common.draft import Draft, choice
from octavo.importers.common.prefixed_keys import Under
from octavo.importers.errors import TranslateError
from octavo.importers.frameworks import hf_trainer, megatron

NAME = "llama-factory"
#: keys that only this framework has, by which a file is recognized
MARKS = ("finetuning_type", "lora_target", "stage", "cutoff_len", "neat_packing", "freeze_vision_tower", "pref_loss")
FIRST_WINS = False
_USUAL = hf_trainer.Usual(recompute=True)
_PHASES = {"pt": "pretrain", "sft": "sft", "dpo": "preference", "kto": "preference", "rm": None, "ppo": None}
_LOSSES = {"sigmoid": "sigmoid", "hinge": "hinge", "ipo": "ipo", "orpo": "orpo", "simpo": "simpo"}
_KERNELS = {"auto": "sdpa", "sdpa": "sdpa", "disabled": "eager", "fa2": "flash_attention_2", "fa3": "flash_attention_3"}
_OF_LORA = "lora_rank lora_alpha lora_dropout lora_target use_rslora use_dora additional_target create_new_adapter"
_COLUMNS = {"prompt": "instruction", "query": "input", "response": "output", "messages": "conversations",
            "system": "system", "chosen": "chosen", "rejected": "rejected", "images": "images"}  # fmt: skip
_FORMATS = {"alpaca": "alpaca", "sharegpt": "sharegpt", "openai": "messages"}

NONE = {
    model_and_data.TEMPLATE: "template tool_format",
    "sound of videos is not read": "use_audio_in_video",
    "a frame of the image processor, which Octavo takes from the model's folder": "image_do_pan_and_scan "
    "crop_to_patches "
    "audio_sampling_rate",
    "rows are read as they are, and kept as Arrow (data.cache)": "overwrite_cache preprocessing_* tokenized_path "
    "cache_dir",
    "model code is Octavo's or transformers'; none is fetched": "trust_remote_code",
    "tokens are not added; take a model's folder that has them": "resize_vocab add_tokens add_special_tokens "
    "new_special_tokens_config init_special_tokens split_special_tokens",
    "positions follow config.json, and every layer is run": "rope_scaling shift_attn mixture_of_depths",
    "kernels are Octavo's own": "use_unsloth use_unsloth_gc use_v1_kernels use_kt kt_* chunk_size cpu_infer mode "
    "use_mca",
    "only AdamW; small states: optimizer: {states: fp8, master: bf16+sr}": "use_galore galore_* use_apollo apollo_* "
    "use_badam badam_* use_adam_mini use_muon",
    "LoRA has one learning rate, and begins with B = 0": "loraplus_lr_ratio loraplus_lr_embedding pissa_init "
    "pissa_iter "
    "pissa_convert",
    "OFT, LLaMA-Pro and freezing by layer number are not built": "oft_* module_dropout use_llama_pro "
    "freeze_trainable_* "
    "freeze_extra_modules",
    "only adapters are trained": "additional_target",
    "no such loss": "use_dft_loss ld_alpha pref_bco_weight use_asft_loss use_eaft_loss eaft_alpha asft_alpha",
    "reference and reward models are of phase rl": "ref_model_adapters ref_model_quantization_bit reward_model* ppo_*",
    "evaluation gives loss, exact match and per set figures": "compute_accuracy eval_num_beams eval_on_each_dataset",
    "of servers, answers and export, not of training": "export_* infer_* vllm_* sglang_* offload_folder use_kv_cache "
    "print_param_status do_sample temperature top_p top_k num_beams max_length max_new_tokens repetition_penalty "
    "length_penalty skip_special_tokens task task_dir batch_size lang n_shot save_dir download_mode",
    "tokens of hubs are read from their own environment": "hf_hub_token ms_hub_token om_hub_token",
    "one process group, by --nproc or torchrun": "ray_* resources_per_worker placement_strategy use_hyper_parallel "
    "hyper_parallel_args data_shared_file_system",
    "set by LLaMA-Factory itself": "compute_dtype device_map model_max_length block_diag_attn",
    "set in the tracker's own environment": "swanlab_*",
    "of bitsandbytes, which is not used": "quantization_method quantization_type double_quantization "
    "quantization_device_map",
}  # fmt: skip
SAME = {
    "tokenizers are fast ones": "use_fast_tokenizer",
    "padding has no loss": "ignore_pad_token_for_loss",
    "weights are read shard by shard": "low_cpu_mem_usage",
    "never reentrant": "use_reentrant_gc",
    "norms compute in fp32 inside, and logits never exist whole": "upcast_layernorm upcast_lmhead_output",
}


def translate(draft: Draft) -> None:
    stage = choice(draft, "stage", {name: name for name in _PHASES}) or "sft"
    kind = choice(draft, "finetuning_type", {n: n for n in ("lora", "full", "freeze", "oft")}) or "lora"
    world = steps_and_schedule.processes(draft)
    seeing = _model(draft, kind)
    # The order matters: adapters and losses depend on the phase, batch sizes on packing.
    phase = _phase(draft, stage)
    path = draft.text("model_name_or_path")
    kind = _adapters(draft, kind, seeing, path)
    _data(draft, phase)
    if seeing or any(key.startswith("video_") for key in draft.source_keys):
        film = {ours: f"video_{theirs}" for ours, theirs in model_and_data.FILM.items()}
        model_and_data.video(draft, model_and_data.filmed(draft, path), phase, film, model_and_data.FILMED)
    packed = _packing(draft, phase)
    ranks = _ranks(draft, world, kind)
    hf_trainer.steps(draft, _USUAL, ranks, packed)
    if phase != "preference":
        loss = "microbatch" if seeing else "token"
        why = (
            "models with a processor take the mean of each micro-batch there" if seeing else "tokens of the whole step"
        )
        draft.put("train.loss", loss, why=why)
    hf_trainer.optimizer(draft, _USUAL)
    if draft.flag("pure_bf16"):
        draft.put("optimizer.master", "bf16+sr", "pure_bf16", why="BF16 weights; here rounded stochastically")
        if kind == "lora":
            draft.put("lora.dtype", "bf16", "pure_bf16")
    hf_trainer.precision(draft, kind == "lora")
    _recompute(draft)
    hf_trainer.saving(draft, _USUAL, ranks)
    if draft.flag("use_swanlab"):
        draft.put("run.trackers", ["swanlab"], "use_swanlab")
    hf_trainer.ranks(draft)
    _fp8(draft, kind)
    draft.table("none", NONE)
    draft.table("default", SAME)
    if kind != "lora":
        draft.table("dead", {f"finetuning_type is {kind}, so there are no adapters": _OF_LORA})
    if stage not in ("dpo", "kto"):
        of = "pref_loss pref_beta pref_ftx dpo_label_smoothing simpo_gamma kto_chosen_weight kto_rejected_weight"
        of += " ref_model"
        draft.table("dead", {f"stage is {stage}, which compares no answers": of})
    draft.table("none", {"not used by this kind of run": "adapter_folder create_new_adapter"})
    draft.table("dead", {"only read with streaming: true": "buffer_size"})
    hf_trainer.rest(draft)


def _model(draft: Draft, kind: str) -> bool:
    path = model_and_data.model(draft, "model_name_or_path")
    if (revision := draft.text("model_revision")) not in (None, "main"):
        draft.put("model.revision", revision, "model_revision")
    elif revision:
        draft.same("model_revision", why="the newest")
    if draft.flag("train_from_scratch"):
        draft.put("model.init", "random", "train_from_scratch")
    model_and_data.kernel(draft, "flash_attn", _KERNELS, bool(draft.flag("packing") or draft.flag("neat_packing")))
    if (bits := draft.whole("quantization_bit")) is not None:
        model_and_data.eight_bits(draft, "quantization_bit", bits)
    if (coefficient := draft.number("moe_aux_loss_coef")) is not None:
        draft.put("train.router_aux_loss_coef", coefficient, "moe_aux_loss_coef")
    for side in ("max", "min"):
        if (pixels := draft.whole(f"image_{side}_pixels")) is not None:
            draft.put(f"data.{side}_pixels", pixels, f"image_{side}_pixels")
    seeing = model_and_data.sees(draft, path)
    if seeing and not draft.has("image_max_pixels"):
        draft.put("data.max_pixels", 768 * 768, why="their default")
    return seeing


def _phase(draft: Draft, stage: str) -> str:
    phase = _PHASES[stage]
    if phase is None:
        instead = "reward models are used here, not trained" if stage == "rm" else "phase rl has ppo (docs/rl.md)"
        draft.refuse("stage", f"it trains no answers and no pairs; {instead}")
    draft.put("train.phase", phase, "stage")
    if stage == "kto":
        draft.put("preference.loss", "kto", "stage")
        draft.put("preference.beta", draft.number("pref_beta", 0.1), "pref_beta")
        for ours, theirs in (("desirable_weight", "kto_chosen_weight"), ("undesirable_weight", "kto_rejected_weight")):
            if (weight := draft.number(theirs)) is not None:
                draft.put(f"preference.{ours}", weight, theirs)
        draft.dead("pref_loss", why="stage is kto")
    elif stage == "dpo":
        loss = hf_trainer.preference(draft, "pref_loss", _LOSSES, draft.number("pref_beta", 0.1), "pref_beta")
        if (share := draft.number("pref_ftx")) and loss != "orpo":
            draft.put("preference.sft", share, "pref_ftx")
        if smooth := draft.number("dpo_label_smoothing"):
            draft.put("preference.label_smoothing", smooth, "dpo_label_smoothing")
        # Without simpo_gamma the margin is the trainer's default, 0.5.
        if loss == "simpo":
            margin = draft.number("simpo_gamma")
            beta = draft.settings["preference.beta"].value
            draft.put(
                "preference.gamma", 0.5 if margin is None else margin, "simpo_gamma", why=f"beta {beta:g} as there"
            )
        if reference := draft.text("ref_model"):
            policy = draft.text("model_name_or_path")
            why = "the policy's own first weights are the reference"
            (draft.same if reference == policy else draft.none)("ref_model", why=why)
    return phase


def _ranks(draft: Draft, world: int, kind: str) -> int:
    """Processes that see different rows: all, but for its trainer on Megatron, which has parallel sizes."""
    u = Under(draft)
    if not any(key.endswith("_model_parallel_size") for key in draft.source_keys):
        return world
    megatron.expert(draft, u, lora=kind == "lora")
    megatron.recompute(draft, u)
    megatron.rest(draft, u)
    draft.table("none", {"layers are Octavo's own, not Megatron's": "apply_rope_fusion bias_*_fusion"})
    return megatron.data_parallel(draft, u, world)


def _recompute(draft: Draft) -> None:
    """Translate recomputation, which LLaMA-Factory does by default; transformers' flag can only switch it on."""
    off, key = "disable_gradient_checkpointing", "gradient_checkpointing"
    disabled, enabled = draft.flag(off), draft.flag(key)
    if "recompute_granularity" in draft.source_keys:
        draft.none(off, key, why="recompute_granularity decides there")
    elif enabled or not disabled:
        why = "" if enabled or disabled is False else "their default"
        draft.put(
            "train.recompute", "full", *([key] if enabled else []), *([off] if disabled is False else []), why=why
        )
        draft.dead(*([key] if enabled is False else []), why=f"blocks are recomputed there unless {off} is true")
        draft.dead(*([off] if disabled else []), why=f"{key} is true, and switches it on again")
    else:
        draft.put("train.recompute", "none", off, key)


#: projectors whose layers bear names of others': of Qwen3-VL the tower's, of GLM-4V the language model's
_REACHED = (("qwen3_vl", r"qwen-?3[-_]?vl", "image_encoder"), ("qwen3_5", r"qwen-?3\.[5-9]", "image_encoder"),
            ("glm4v", r"glm-?4(\.\d)?v", ""))  # fmt: skip


def _reaches_projector(draft: Draft, path: str | None, trained: list[str]) -> bool:
    """Whether `lora_target: all` finds the projector's layers: it looks for names of layers elsewhere, and then takes
    every layer of such a name that is not frozen."""
    kind = str(model_and_data.config_of(draft, path).get("model_type") or "")
    for model_type, name, needs in _REACHED:
        if kind.startswith(model_type) or (not kind and path and re.search(name, path, re.IGNORECASE)):
            return not needs or needs in trained
    return False


def _adapters(draft: Draft, kind: str, seeing: bool, path: str | None) -> str:
    """The adapters; gives the kind of training that it becomes."""
    requested = kind
    if kind == "oft":
        draft.none("finetuning_type", why="OFT is not implemented: LoRA is used instead")
        draft.note("OFT is not implemented: LoRA is used instead; look at lora.rank and train.lr")
        kind = "lora"
    usual = {"freeze_vision_tower": True, "freeze_multi_modal_projector": True, "freeze_language_model": False}
    # An absent flag means its default, which freezes the tower and the projector.
    frozen = {key: usual[key] if (value := draft.flag(key)) is None else value for key in usual}
    names = dict(zip(usual, model_and_data.COMPONENTS, strict=True))
    if not seeing:
        draft.dead(*usual, why="a text model has no tower, no projector")
    elif kind == "lora":
        trained = [names[key] for key in reversed(usual) if not frozen[key]]
        draft.same(*[key for key in usual if frozen[key]], why="gets no adapters (lora.targets)")
    else:
        model_and_data.freeze(draft, {names[key]: (key,) for key in usual if frozen[key]})
        draft.same(*[key for key in usual if not frozen[key]], why="trained")
    if kind == "lora":
        rank = draft.whole("lora_rank", 8)
        targets = draft.words("lora_target") or ["all"]
        everything = targets == ["all"]
        if everything:
            reached = seeing and _reaches_projector(draft, path, trained)
            left = () if reached else ("image_projector",)
            targets = [name for name in trained if name not in left] if seeing else ["foundation"]
            for key in usual if seeing else ():
                if not frozen[key] and names[key] in targets:
                    why = "its layers have names that all selects" if names[key] == "image_projector" else ""
                    draft.put("lora.targets", targets, key, why=why)
            if seeing and not frozen["freeze_multi_modal_projector"] and not reached:
                draft.dead("freeze_multi_modal_projector", why="lora_target: all leaves out the projector's layers")
        keys = {"rank": "lora_rank", "alpha": "lora_alpha", "dropout": "lora_dropout", "targets": "lora_target"}
        but = [names[key] for key in usual if seeing and not everything and frozen[key]]
        alpha, dropout = draft.number("lora_alpha", 2 * rank), draft.number("lora_dropout", 0.0)
        model_and_data.lora(draft, rank, alpha, dropout, targets, keys=keys, but=but)
        model_and_data.adapt(draft, keys, "use_rslora", "use_dora")
        if adapter := draft.words("adapter_name_or_path"):
            draft.put("lora.adapter", draft.path(adapter[0]), "adapter_name_or_path")
            if len(adapter) > 1:
                draft.none("adapter_name_or_path", why="one adapter; merge the others first")
    elif kind == "freeze":
        draft.none("finetuning_type", why=f"{kind} is not implemented; all parameters are trained: see model.freeze")
    if requested in ("lora", "full"):
        draft.same("finetuning_type", why="a lora section, or none")
    return kind


def _data(draft: Draft, phase: str) -> None:
    where = draft.text("dataset_dir") or "data"
    register = _register(draft, where)
    limit = draft.whole("max_samples")
    streaming = draft.flag("streaming")
    for of, key in (("train", "dataset"), ("eval", "eval_dataset")):
        for number, name in enumerate(draft.words(key)):
            at = _entry(draft, of, number, name, key, where, register)
            if media := draft.text("media_dir"):
                draft.put(f"{at}.images", draft.path(media, hub=False), "media_dir")
            if limit is not None:
                draft.put(f"{at}.max_samples", limit, "max_samples")
            if streaming:
                able = model_and_data.stream(draft, at, "streaming")
                if able and of == "train" and (size := draft.whole("buffer_size")):
                    draft.put(f"{at}.shuffle_buffer", size, "buffer_size")
    if not draft.has("dataset"):
        draft.put("data.train.0.path", "/path/to/data.json", why="to be filled in: no key named data")
        draft.note("data.train is to be filled in")
    if streaming is False:
        draft.same("streaming", why="rows are read into the cache")
    _mixture(draft)
    # LLaMA-Factory truncates rows at cutoff_len.
    if (length := draft.whole("cutoff_len")) is None:
        length = 2048
    draft.put("train.seq_length", length, "cutoff_len")
    draft.put("data.on_long", "cut", why="longer rows are truncated")
    if draft.flag("train_on_prompt") and phase == "sft":
        draft.put("data.train_on_prompt", True, "train_on_prompt")
    else:
        draft.same("train_on_prompt", why="loss falls on answers")
    if draft.flag("mask_history") is False:
        draft.same("mask_history", why="every answer has loss")
    if draft.flag("mask_history") and phase == "sft":
        model_and_data.last_answer(draft, "mask_history")
    if system := draft.text("default_system"):
        draft.put("data.system", system, "default_system")
    model_and_data.thinking(draft, "enable_thinking", "preserve_thinking")
    if (share := draft.number("val_size")) and not draft.has("eval_dataset"):
        draft.none("val_size", why=f"rows are not split off ({share:g}); set held-out rows in data.eval")
    else:
        draft.same("val_size", why="no rows are split off")


def _register(draft: Draft, where: str) -> dict:
    return draft.folder.json(where, "dataset_info.json")


def _entry(draft: Draft, of: str, number: int, name: str, key: str, where: str, register: dict) -> str:
    """One data set: as dataset_info.json says, a file by its name, or a path to be filled in."""
    entry = register.get(name)
    if not isinstance(entry, dict):
        direct = draft.folder.there(where, name)
        if direct or Path(name).suffix:
            return model_and_data.dataset(draft, of, number, str(Path(where) / name), key, "dataset_dir", hub=False)
        why = f"to be filled in: the file that {where}/dataset_info.json gives for {name}, which is not here"
        draft.note(f"data.{of}.{number}.path is to be filled in: the data set {name}")
        return model_and_data.dataset(draft, of, number, f"{where}/{name}.json", key, "dataset_dir", hub=False, why=why)
    safe_read.check_schema(entry, _ENTRY, f"{where}/dataset_info.json: {name}", TranslateError)
    if entry.get("file_name"):
        at = model_and_data.dataset(
            draft, of, number, str(Path(where) / entry["file_name"]), key, "dataset_dir", hub=False, why=name
        )
        if draft.sizes is None and of == "train" and number == 0:
            draft.sizes = steps_and_schedule.rows_of(draft, where, entry["file_name"])
    elif entry.get("hf_hub_url"):
        at = model_and_data.dataset(draft, of, number, entry["hf_hub_url"], key, why=name)
        for ours, theirs in (("split", "split"), ("subset", "subset")):
            if isinstance(entry.get(theirs), str):
                draft.put(f"{at}.{ours}", entry[theirs], key)
    else:
        draft.note(f"data.{of}.{number}: dataset_info.json takes {name} by {', '.join(entry)}, which Octavo does not")
        at = model_and_data.dataset(draft, of, number, f"{where}/{name}.json", key, hub=False, why="to be filled in")
    formatting = entry.get("formatting") or "alpaca"
    if formatting in _FORMATS and not entry.get("ranking"):
        draft.put(f"{at}.format", _FORMATS[formatting], key)
    columns = entry.get("columns") or {}
    # Octavo recognizes usual column names, so only others are written.
    renamed = {_COLUMNS[k]: v for k, v in columns.items() if k in _COLUMNS and isinstance(v, str) and _COLUMNS[k] != v}
    if formatting == "sharegpt" and columns.get("messages") == "messages":
        renamed.pop("conversations", None)
        draft.put(f"{at}.format", "messages", key)
    if renamed:
        draft.put(f"{at}.columns", renamed, key)
    odd = {k: v for k, v in (entry.get("tags") or {}).items() if (k, v) not in _USUAL_TAGS}
    if odd:
        draft.note(
            f"data.{of}.{number}: tags of {name} ({odd}) name roles or keys that Octavo may not know by these names"
        )
    if "images" in columns:
        draft.put(f"{at}.images", draft.path(where, hub=False), why="images are in dataset_dir")
    return at


_ENTRY = {"file_name": safe_read.TEXT, "hf_hub_url": safe_read.TEXT, "formatting": safe_read.TEXT,
          "columns": {...: safe_read.TEXT}, "tags": {...: safe_read.TEXT}}  # fmt: skip
_USUAL_TAGS = {("role_tag", "from"), ("role_tag", "role"), ("content_tag", "value"), ("content_tag", "content"),
               ("user_tag", "human"), ("user_tag", "user"), ("assistant_tag", "gpt"), ("assistant_tag", "assistant"),
               ("system_tag", "system")}  # fmt: skip


def _mixture(draft: Draft) -> None:
    strategy = draft.text("mix_strategy")
    weights = draft.numbers("interleave_probs")
    if strategy in (None, "concat"):
        draft.same("mix_strategy", why="each set by its number of rows")
        draft.dead("interleave_probs", why="mix_strategy is concat")
        return
    for number, weight in enumerate(weights):
        draft.put(f"data.train.{number}.weight", weight, "interleave_probs", "mix_strategy", why="its share of rows")


def _packing(draft: Draft, phase: str) -> bool:
    neat, plain = draft.flag("neat_packing"), draft.flag("packing")
    if phase == "pretrain":
        if plain is False:
            draft.put("data.join", False, "packing", why="each document is a sample of its own")
        else:
            draft.same("packing", "neat_packing", why="documents are joined and cut to seq_length (data.join)")
        return False
    if phase == "preference":
        draft.none("packing", "neat_packing", why="pairs are rows of one batch")
        return False
    if neat or plain:
        why = "" if neat else "there samples of a row see each other (neat_packing is off); here they never do"
        model_and_data.packing(draft, "neat_packing", "packing", why=why)
        return True
    draft.same("packing", "neat_packing", why="a row is a sample")
    return False


def _fp8(draft: Draft, kind: str) -> None:
    backend = (draft.text("fp8_backend") or "auto").lower()
    inner = ("fp8_backend", "fp8_enable_fsdp_float8_all_gather")
    if not draft.flag("fp8"):
        draft.dead(*inner, why="fp8 is off, and these keys convert no layer by themselves")
        draft.same("fp8", why="off")
        model_and_data.no_fp8(draft)
        return
    if backend in ("te", "msamp"):
        draft.put("fp8.recipe", "delayed", "fp8", "fp8_backend", why="Transformer Engine: amax histories, E5M2 for dy")
        draft.put("fp8.format", "hybrid", "fp8")
        if backend == "msamp":
            draft.none("fp8_backend", why="MS-AMP's FP8 gradients and states have no equivalent; see optimizer.states")
    else:
        draft.put("fp8.recipe", "tensorwise", "fp8", "fp8_backend", why="torchao's default: a scale a tensor")
    if draft.flag(inner[1]):
        if kind == "lora":
            draft.none(inner[1], why="a frozen base is gathered as codes with model.load_in_fp8")
        else:
            draft.put("fp8.param", True, inner[1], why="FSDP2 gathers codes")
    else:
        draft.same(inner[1], why="weights are gathered as they are stored")
