"""Flags of VILA and of COAT's examples: llava/train with the language model in FP8 (as of the
commits of 2025). Only COAT's own repository has its optimizer; VILA parses its flags but does not use them."""

from __future__ import annotations

from typing import Any

from octavo.importers.common import model_and_data, steps_and_schedule
from octavo.importers.common.draft import Draft
from octavo.importers.frameworks import hf_trainer, megatron
from octavo.importers.source.root_folder import get_mapping, get_positive_int

NAME = "vila"
MARKS = (
    "tune_vision_tower",
    "tune_language_model",
    "tune_mm_projector",
    "data_mixture",
    "vision_tower",
    "mm_projector",
    "quantize_model",
    "vflan_no_system_prompt",
    "fp8_model_name_or_path",
    "seq_parallel_size",
)
FIRST_WINS = False
_DEFAULTS = hf_trainer.Defaults(micro=8)
_LINEAR = ("fp8linear_qwen2", "fp8linear_llama")
_ACTIVATIONS = (
    "fp8linearandactivation_llama",
    "fp8activation_qwen2",
    "fp8activationresidual_qwen2",
    "true",
    "coat_real",
)
#: VILA's FP8 layer computes in FP8 if the smaller side of the weight is at least this
SMALLEST = 3584
_BITS = ("fabit", "fwbit", "fobit", "babit", "bwbit", "bobit")
_OPTIMIZER = (
    "use_quantize_optimizer row_blocksize_optimizer col_blocksize_optimizer pad_block first_order_bit "
    "first_order_quant_type second_order_bit second_order_quant_type epsilon_optimizer"
)

NONE = {
    "the tower, its output layer and the projector come from the model folder": "vision_tower mm_projector "
    "mm_vision_select_* mm_use_im_* vision_resolution interpolate_mode drop_path_rate mlp_path s2 dynamic_s2 s2_* "
    "image_encoder video_encoder image_aspect_ratio min_tiles max_tiles version chat_template conv_template",
    model_and_data.VIDEO_REASON: "num_video_frames fps downsample_video num_time_tokens time_token_format soft_ce_std",
    "model code is Octavo's": "mpt_attn_impl model_dtype",
    "all parameters have the same learning rate": "mm_projector_lr vision_tower_lr",
    "bitsandbytes is not used": "double_quant quant_type",
    "rows need no preprocessing": "lazy_preprocess is_multimodal vflan_no_system_prompt group_by_modality_length "
    "longvila_sampler cache_dir source_model_max_length eval_data_path",
    "a run saves a checkpoint and ends on SIGTERM": "total_time_limit pre_terminate_time",
    "not implemented": "debug_e2e lora_bias",
}  # fmt: skip
_DEAD = {
    "parsed, but not read by any layer of these recipes": "Ubit qchoice symm min_blockunit_* refine_* "
    "draw_distribution_*",
}


def translate(draft: Draft) -> None:
    # COAT's examples use VILA's trainer with these additional flags.
    coat = draft.has("fp8_model_name_or_path") or draft.has("first_order_expansion") or draft.has("qgroup_size")
    world = steps_and_schedule.count_processes(draft)
    path = model_and_data.set_model_path(draft, "model_name_or_path")
    draft.mark_unsupported(
        "fp8_model_name_or_path",
        why="a copy of the model with layers fused for COAT's kernels, which Octavo does not need",
    )
    phase = "preference" if draft.flag("dpo") else "sft"
    draft.set("train.phase", phase, "dpo")
    if phase == "preference":
        draft.set("preference.beta", draft.number("dpo_beta", 0.1), "dpo_beta")
    else:
        draft.mark_ignored("dpo_beta", why="dpo is not true")
    _translate_data(draft)
    lora = _translate_trained_parts(draft, coat)
    context = _translate_context_parallel(draft)
    ranks = max(1, world // context)
    hf_trainer.set_steps(draft, _DEFAULTS, ranks, context > 1)
    if phase != "preference":
        draft.set("train.loss", "microbatch", why="the model returns the mean over the tokens of a micro-batch")
    hf_trainer.set_optimizer(draft, _DEFAULTS)
    hf_trainer.set_precision(draft, lora)
    hf_trainer.set_recompute(draft, _DEFAULTS)
    hf_trainer.set_saving(draft, _DEFAULTS, ranks)
    hf_trainer.set_sharding(draft)
    _translate_fp8(draft, model_and_data.read_config(draft, path), lora)
    _translate_optimizer_states(draft, coat, lora)
    draft.mark_many("none", NONE)
    draft.mark_many("dead", _DEAD)
    hf_trainer.mark_remaining(draft)


def _translate_data(draft: Draft) -> None:
    path = draft.text("data_path")
    mixture = draft.text("data_mixture")
    if path:
        at = model_and_data.add_dataset(draft, "train", 0, path, "data_path", hub=False)
        if folder := draft.text("image_folder"):
            draft.set(f"{at}.images", draft.path(folder, hub=False), "image_folder")
        if draft.num_rows is None:
            draft.num_rows = steps_and_schedule.count_rows(draft, path)
        draft.mark_unsupported("data_mixture", why="data_path takes precedence")
    for number, name in enumerate((mixture or "").split("+") if not path else ()):
        why = f"FILL IN: the file that VILA's dataset registry lists for {name}"
        model_and_data.add_dataset(draft, "train", number, f"{name or 'data'}.json", "data_mixture", hub=False, why=why)
        draft.add_note(f"FILL IN: set data.train.{number}.path: {name or 'no flag names training data'}")
    draft.set("train.seq_length", draft.integer("model_max_length") or 512, "model_max_length")
    draft.set("data.on_long", "cut", why="longer rows are truncated")
    for number, name in enumerate((draft.text("eval_data_mixture") or "").split("+")):
        if name:
            model_and_data.add_dataset(
                draft, "eval", number, f"{name}.json", "eval_data_mixture", hub=False, why="FILL IN: set the path"
            )


def _translate_trained_parts(draft: Draft, coat: bool) -> bool:
    components = {
        "tune_vision_tower": "image_encoder",
        "tune_mm_projector": "image_projector",
        "tune_language_model": "foundation",
    }
    enabled = {key: bool(draft.flag(key)) for key in components}
    if (bits := draft.integer("bits")) in (4, 8):
        model_and_data.set_quantized_base(draft, "bits", bits)
    elif bits:
        draft.mark_default("bits", why="16 bits")
    if draft.flag("lora_enable"):
        names = [
            component
            for component, key in (("foundation", "lora_llm"), ("image_encoder", "lora_vt"))
            if draft.flag(key)
        ]
        keys = {"rank": "lora_r", "alpha": "lora_alpha", "dropout": "lora_dropout"}
        model_and_data.set_lora(
            draft,
            draft.integer("lora_r", 64),
            draft.number("lora_alpha", 16),
            draft.number("lora_dropout", 0.05),
            names or ["foundation"],
            keys=keys,
        )
        draft.set("lora.targets", names or ["foundation"], "lora_llm", "lora_vt", "lora_enable")
        model_and_data.set_lora_variants(draft, keys, "", "use_dora")
        draft.mark_unsupported(*[key for key in components if enabled[key]], why="only adapters are trained")
        draft.mark_default(*[key for key in components if not enabled[key]], why="frozen")
        if folder := draft.text("lora_weight_path"):
            draft.set("lora.adapter", draft.path(folder), "lora_weight_path")
        return True
    draft.mark_many(
        "dead", {"lora_enable is not true": "lora_r lora_alpha lora_dropout lora_llm lora_vt use_dora lora_weight_path"}
    )
    draft.mark_default("lora_enable", why="no adapters")
    # With COAT's flags and no tune_* flag, nothing is frozen.
    if not coat or draft.keys_under("tune_"):
        frozen = {component: (key,) for key, component in components.items() if not enabled[key]}
        if frozen and len(frozen) < len(components):
            model_and_data.set_freeze(draft, frozen)
        elif frozen:
            draft.add_note("no tune_* flag is true: VILA would train nothing; Octavo trains all components")
        draft.mark_default(*[key for key in components if enabled[key]], why="trained")
    return False


def _translate_context_parallel(draft: Draft) -> int:
    size = draft.integer("seq_parallel_size") or -1
    ring = draft.integer("seq_parallel_ring_size") or -1
    if size <= 1:
        draft.mark_default("seq_parallel_size", why="rows are not split across ranks")
        draft.mark_ignored("seq_parallel_ring_size", "seq_parallel_ring_type", why="seq_parallel_size is not above 1")
        return 1
    ulysses = size // ring if ring > 1 else size
    why = megatron.USP if ring > 1 and ulysses > 1 else megatron.RING if ring > 1 else megatron.ULYSSES
    draft.set("parallel.context", size, "seq_parallel_size", why=why)
    draft.set("parallel.ulysses", ulysses, "seq_parallel_ring_size", "seq_parallel_size")
    draft.mark_unsupported("seq_parallel_ring_type", why=megatron.RING)
    draft.set("data.packing", True, why="context parallelism needs packed rows")
    return size


def _translate_fp8(draft: Draft, config: dict[str, Any], lora: bool) -> None:
    word = (draft.text("quantize_model") or "false").lower()
    inner = (
        *_BITS,
        "row_blocksize",
        "col_blocksize",
        "pad_to_multiple_of",
        "group_size",
        "epsilon",
        "weight_memory_efficient",
    )
    if word in ("false", "none"):
        draft.mark_default("quantize_model", why="off")
        draft.mark_ignored(*inner, why="quantize_model is false, so nothing runs in FP8")
        model_and_data.disable_fp8_if_unset(draft)
        return
    if word not in (*_LINEAR, *_ACTIVATIONS):
        draft.mark_invalid("quantize_model", f"one of {', '.join((*_LINEAR, *_ACTIVATIONS[:3]))}, true or false")
        return
    hidden, kv = _read_widths(config)
    blocks = [draft.integer(key) for key in ("row_blocksize", "col_blocksize")]
    if any(block not in (None, -1) for block in blocks):
        draft.mark_unsupported(
            "row_blocksize",
            "col_blocksize",
            why="only per-tensor scales are translated; blockwise_1d (1x128) is the closest to these block sizes",
        )
    else:
        draft.mark_default("row_blocksize", "col_blocksize", why="-1: one scale per tensor")
    if word in _LINEAR and hidden is not None and hidden < SMALLEST:
        why = (
            f"VILA's FP8 layer computes in BF16 if its smaller side is below {SMALLEST}; this model has width {hidden}"
        )
        draft.mark_ignored("quantize_model", *inner, why=why)
        model_and_data.disable_fp8_if_unset(draft)
        return
    recipe, why = (
        "tensorwise",
        "one scale per tensor, computed from the current tensor; only in the language model",
    )
    draft.set("fp8.foundation.recipe", recipe, "quantize_model", why=why)
    hybrid = any((draft.text(key) or "E5M2").upper() == "E5M2" for key in ("bobit", "babit"))
    draft.set("fp8.foundation.format", "hybrid" if hybrid else "e4m3", "bobit", "babit", why="format of dy")
    draft.mark_default("fabit", "fwbit", "fobit", why="E4M3 in the forward")
    draft.mark_unsupported("bwbit", why="weights have one format, E4M3, in fwd and dgrad")
    if word in _LINEAR:
        # Without the model its widths are unknown. With grouped-query attention k_proj and v_proj are usually narrow.
        if kv is None or kv < SMALLEST:
            why = f"VILA's layer stays in BF16 if its smaller side is below {SMALLEST}, as in grouped-query attention"
            for number, name in enumerate(("k_proj", "v_proj")):
                draft.set(f"fp8.rules.{number}.match", f"**.{name}", "quantize_model", why=why)
                draft.set(f"fp8.rules.{number}.recipe", "off", why=why)
        if hidden is None:
            draft.add_note(
                f"{word} stays in BF16 if the smaller side of a layer is below {SMALLEST}; the model is not on this "
                "machine, so only k_proj and v_proj are assumed to be below it"
            )
        draft.mark_default("group_size", why="for activations, which stay in BF16")
    else:
        draft.set("fp8.foundation.activations", "fp8", "quantize_model", "group_size",
                  why="saved activations in FP8, in groups of 128 (COAT: 16)")  # fmt: skip
    draft.mark_default("pad_to_multiple_of", why="shapes are padded if a kernel needs it")
    draft.mark_unsupported("epsilon", why="Octavo adds no epsilon to scales")
    efficient = draft.flag("weight_memory_efficient")
    if efficient or efficient is None:
        draft.set(
            "fp8.weight_codes", "recast", "weight_memory_efficient", why="weights are cast at each use, as in VILA"
        )
    else:
        draft.mark_default("weight_memory_efficient", why="FP8 codes are cached")


def _read_widths(config: dict[str, Any]) -> tuple[int | None, int | None]:
    """Return (hidden width, width of the keys) of the language model, or (None, None) without its config.json."""
    inner = get_mapping(config, "llm_cfg") or get_mapping(config, "text_config") or config
    hidden, heads = get_positive_int(inner, "hidden_size"), get_positive_int(inner, "num_attention_heads")
    if hidden is None or heads is None:
        return None, None
    size = get_positive_int(inner, "head_dim") or hidden // heads
    return hidden, size * (get_positive_int(inner, "num_key_value_heads") or heads)


def _translate_optimizer_states(draft: Draft, coat: bool, lora: bool) -> None:
    """Translate COAT's optimizer, which has moments in FP8 with range expansion; VILA ignores flags of these names."""
    expansion = draft.text("first_order_expansion"), draft.text("second_order_expansion")
    keys = ("use_quantize_optimizer", "first_order_expansion", "second_order_expansion", "qgroup_size", "expand_min",
            "first_order_bit", "second_order_bit")  # fmt: skip
    enabled = [word not in (None, "false", "none") for word in expansion]
    bits = {(draft.text(key) or "E4M3").upper() for key in ("first_order_bit", "second_order_bit")}
    if coat and any(enabled) and bits <= {"E4M3", "E5M2"}:
        draft.set("optimizer.states", "coat", *keys, why="E4M3 with range expansion in groups of 128, as published")
    elif coat and bits <= {"E4M3", "E5M2"} and (draft.has("qgroup_size") or draft.has("use_quantize_optimizer")):
        draft.set("optimizer.states", "fp8", *keys, why="without expansion: FP8 with one scale per block")
    draft.mark_many("dead", {
        "VILA parses these flags but does not use them: states stayed in fp32 (optimizer.states: coat has them in FP8)":
        f"{_OPTIMIZER} first_order_expansion second_order_expansion qgroup_size expand_min",
    })  # fmt: skip
