"""VILA's flags, with the flags of COAT's examples: llava/train with FP8 of the language model (read at the
commits of 2025). COAT's optimizer is in its own tree: in VILA's its flags are parsed and used nowhere."""

from __future__ import annotations

from typing import Any

from octavo.importers.common import model_and_data, steps_and_schedule
from octavo.importers.common.draft import Draft
from octavo.importers.frameworks import hf_trainer, megatron
from octavo.importers.source.root_folder import section, whole

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
_USUAL = hf_trainer.Usual(micro=8)
_LINEAR = ("fp8linear_qwen2", "fp8linear_llama")
_ACTIVATIONS = (
    "fp8linearandactivation_llama",
    "fp8activation_qwen2",
    "fp8activationresidual_qwen2",
    "true",
    "coat_real",
)
#: the smaller side of a linear layer from which their FP8 layer computes in FP8
SMALLEST = 3584
_BITS = ("fabit", "fwbit", "fobit", "babit", "bwbit", "bobit")
_OPTIMIZER = (
    "use_quantize_optimizer row_blocksize_optimizer col_blocksize_optimizer pad_block first_order_bit "
    "first_order_quant_type second_order_bit second_order_quant_type epsilon_optimizer"
)

NONE = {
    "the tower, its layer and the projector come from the model's folder": "vision_tower mm_projector "
    "mm_vision_select_* mm_use_im_* vision_resolution interpolate_mode drop_path_rate mlp_path s2 dynamic_s2 s2_* "
    "image_encoder video_encoder image_aspect_ratio min_tiles max_tiles version chat_template conv_template",
    model_and_data.VIDEO: "num_video_frames fps downsample_video num_time_tokens time_token_format soft_ce_std",
    "model code is Octavo's own": "mpt_attn_impl model_dtype",
    "one learning rate for all that is trained": "mm_projector_lr vision_tower_lr",
    "bitsandbytes is not used": "double_quant quant_type",
    "rows are read as they are": "lazy_preprocess is_multimodal vflan_no_system_prompt group_by_modality_length "
    "longvila_sampler cache_dir source_model_max_length eval_data_path",
    "a run ends at a signal, saved": "total_time_limit pre_terminate_time",
    "not built": "debug_e2e lora_bias",
}  # fmt: skip
_DEAD = {
    "parsed, and read by no layer of these recipes": "Ubit qchoice symm min_blockunit_* refine_* draw_distribution_*",
}


def translate(draft: Draft) -> None:
    # COAT's examples use VILA's trainer with these additional flags.
    coat = draft.has("fp8_model_name_or_path") or draft.has("first_order_expansion") or draft.has("qgroup_size")
    world = steps_and_schedule.processes(draft)
    path = model_and_data.model(draft, "model_name_or_path")
    draft.none("fp8_model_name_or_path", why="a copy with fused layers, made for their kernels; Octavo needs none")
    phase = "preference" if draft.flag("dpo") else "sft"
    draft.put("train.phase", phase, "dpo")
    if phase == "preference":
        draft.put("preference.beta", draft.number("dpo_beta", 0.1), "dpo_beta")
    else:
        draft.dead("dpo_beta", why="dpo is not true")
    _data(draft)
    lora = _trained(draft, coat)
    context = _context(draft)
    ranks = max(1, world // context)
    hf_trainer.steps(draft, _USUAL, ranks, context > 1)
    if phase != "preference":
        draft.put("train.loss", "microbatch", why="the mean of each micro-batch's tokens, as the model gives it")
    hf_trainer.optimizer(draft, _USUAL)
    hf_trainer.precision(draft, lora)
    hf_trainer.recompute(draft, _USUAL)
    hf_trainer.saving(draft, _USUAL, ranks)
    hf_trainer.ranks(draft)
    _fp8(draft, model_and_data.config_of(draft, path), lora)
    _states(draft, coat, lora)
    draft.table("none", NONE)
    draft.table("dead", _DEAD)
    hf_trainer.rest(draft)


def _data(draft: Draft) -> None:
    path = draft.text("data_path")
    mixture = draft.text("data_mixture")
    if path:
        at = model_and_data.dataset(draft, "train", 0, path, "data_path", hub=False)
        if folder := draft.text("image_folder"):
            draft.put(f"{at}.images", draft.path(folder, hub=False), "image_folder")
        if draft.sizes is None:
            draft.sizes = steps_and_schedule.rows_of(draft, path)
        draft.none("data_mixture", why="data_path names the rows")
    for number, name in enumerate((mixture or "").split("+") if not path else ()):
        why = f"to be filled in: the file that their register gives for {name}"
        model_and_data.dataset(draft, "train", number, f"{name or 'data'}.json", "data_mixture", hub=False, why=why)
        draft.note(f"data.train.{number}.path is to be filled in: {name or 'no flag named data'}")
    draft.put("train.seq_length", draft.whole("model_max_length") or 512, "model_max_length")
    draft.put("data.on_long", "cut", why="longer rows are truncated")
    for number, name in enumerate((draft.text("eval_data_mixture") or "").split("+")):
        if name:
            model_and_data.dataset(
                draft, "eval", number, f"{name}.json", "eval_data_mixture", hub=False, why="to be filled in"
            )


def _trained(draft: Draft, coat: bool) -> bool:
    parts_of = {
        "tune_vision_tower": "image_encoder",
        "tune_mm_projector": "image_projector",
        "tune_language_model": "foundation",
    }
    on = {key: bool(draft.flag(key)) for key in parts_of}
    if (bits := draft.whole("bits")) in (4, 8):
        model_and_data.eight_bits(draft, "bits", bits)
    elif bits:
        draft.same("bits", why="16")
    if draft.flag("lora_enable"):
        names = [ours for ours, key in (("foundation", "lora_llm"), ("image_encoder", "lora_vt")) if draft.flag(key)]
        keys = {"rank": "lora_r", "alpha": "lora_alpha", "dropout": "lora_dropout"}
        model_and_data.lora(
            draft,
            draft.whole("lora_r", 64),
            draft.number("lora_alpha", 16),
            draft.number("lora_dropout", 0.05),
            names or ["foundation"],
            keys=keys,
        )
        draft.put("lora.targets", names or ["foundation"], "lora_llm", "lora_vt", "lora_enable")
        model_and_data.adapt(draft, keys, "", "use_dora")
        draft.none(*[key for key in parts_of if on[key]], why="only adapters are trained")
        draft.same(*[key for key in parts_of if not on[key]], why="frozen")
        if folder := draft.text("lora_weight_path"):
            draft.put("lora.adapter", draft.path(folder), "lora_weight_path")
        return True
    draft.table(
        "dead", {"lora_enable is not true": "lora_r lora_alpha lora_dropout lora_llm lora_vt use_dora lora_weight_path"}
    )
    draft.same("lora_enable", why="no adapters")
    # With COAT's flags and no tune_* flag, nothing is frozen.
    if not coat or draft.under("tune_"):
        frozen = {ours: (key,) for key, ours in parts_of.items() if not on[key]}
        if frozen and len(frozen) < len(parts_of):
            model_and_data.freeze(draft, frozen)
        elif frozen:
            draft.note("no tune_* flag is true: nothing would be trained there; here all of it is")
        draft.same(*[key for key in parts_of if on[key]], why="trained")
    return False


def _context(draft: Draft) -> int:
    size = draft.whole("seq_parallel_size") or -1
    ring = draft.whole("seq_parallel_ring_size") or -1
    if size <= 1:
        draft.same("seq_parallel_size", why="no rows are shared")
        draft.dead("seq_parallel_ring_size", "seq_parallel_ring_type", why="seq_parallel_size is not above 1")
        return 1
    ulysses = size // ring if ring > 1 else size
    why = megatron.USP if ring > 1 and ulysses > 1 else megatron.RING if ring > 1 else megatron.ULYSSES
    draft.put("parallel.context", size, "seq_parallel_size", why=why)
    draft.put("parallel.ulysses", ulysses, "seq_parallel_ring_size", "seq_parallel_size")
    draft.none("seq_parallel_ring_type", why=megatron.RING)
    draft.put("data.packing", True, why="ranks can only share packed rows (parallel.context)")
    return size


def _fp8(draft: Draft, config: dict[str, Any], lora: bool) -> None:
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
        draft.same("quantize_model", why="off")
        draft.dead(*inner, why="quantize_model is false, so nothing runs in FP8")
        model_and_data.no_fp8(draft)
        return
    if word not in (*_LINEAR, *_ACTIVATIONS):
        draft.wrong("quantize_model", f"one of {', '.join((*_LINEAR, *_ACTIVATIONS[:3]))}, true or false")
        return
    hidden, kv = _widths(config)
    blocks = [draft.whole(key) for key in ("row_blocksize", "col_blocksize")]
    if any(block not in (None, -1) for block in blocks):
        draft.none(
            "row_blocksize",
            "col_blocksize",
            why="blocks of other sizes than a tensor: blockwise (1x128) is the nearest",
        )
    else:
        draft.same("row_blocksize", "col_blocksize", why="-1: one scale for a tensor")
    if word in _LINEAR and hidden is not None and hidden < SMALLEST:
        why = (
            f"their FP8 layer computes in BF16 where its smaller side is below {SMALLEST}; this model is {hidden} wide"
        )
        draft.dead("quantize_model", *inner, why=why)
        model_and_data.no_fp8(draft)
        return
    recipe, why = (
        "tensorwise",
        "a scale per tensor, from the tensor itself (just in time); only the language model's layers",
    )
    draft.put("fp8.foundation.recipe", recipe, "quantize_model", why=why)
    hybrid = any((draft.text(key) or "E5M2").upper() == "E5M2" for key in ("bobit", "babit"))
    draft.put("fp8.foundation.format", "hybrid" if hybrid else "e4m3", "bobit", "babit", why="what dy is cast to")
    draft.same("fabit", "fwbit", "fobit", why="E4M3 forward")
    draft.none("bwbit", why="weights have one format, E4M3, in fwd and dgrad")
    if word in _LINEAR:
        # Without the model its widths are unknown; grouped queries make k_proj and v_proj narrow in most models.
        if kv is None or kv < SMALLEST:
            why = (
                f"their layer stays BF16 where its smaller side is below {SMALLEST}: keys and values of grouped queries"
            )
            for number, name in enumerate(("k_proj", "v_proj")):
                draft.put(f"fp8.rules.{number}.match", f"**.{name}", "quantize_model", why=why)
                draft.put(f"fp8.rules.{number}.recipe", "off", why=why)
        if hidden is None:
            draft.note(
                f"{word} stays BF16 where a layer's smaller side is below {SMALLEST}; the model is not on this "
                "machine, so this is assumed of k_proj and v_proj, and of no other layer"
            )
        draft.same("group_size", why="of activations, which stay BF16")
    else:
        draft.put("fp8.foundation.activations", "fp8", "quantize_model", "group_size",
                  why="what blocks keep for backward, in FP8 (there in groups of 16, here of 128)")  # fmt: skip
    draft.same("pad_to_multiple_of", why="edges of any size are padded where a kernel wants it")
    draft.none("epsilon", why="no epsilon is added to scales here")
    efficient = draft.flag("weight_memory_efficient")
    if efficient or efficient is None:
        draft.put("fp8.weight_codes", "recast", "weight_memory_efficient", why="weights are cast at each use, as there")
    else:
        draft.same("weight_memory_efficient", why="codes are kept")


def _widths(config: dict[str, Any]) -> tuple[int | None, int | None]:
    """(width of the language model, of its keys), where its config.json is here."""
    inner = section(config, "llm_cfg") or section(config, "text_config") or config
    hidden, heads = whole(inner, "hidden_size"), whole(inner, "num_attention_heads")
    if hidden is None or heads is None:
        return None, None
    size = whole(inner, "head_dim") or hidden // heads
    return hidden, size * (whole(inner, "num_key_value_heads") or heads)


def _states(draft: Draft, coat: bool, lora: bool) -> None:
    """COAT's own optimizer keeps moments in FP8 with expanded range; VILA's flags of that name do nothing."""
    expansion = draft.text("first_order_expansion"), draft.text("second_order_expansion")
    keys = ("use_quantize_optimizer", "first_order_expansion", "second_order_expansion", "qgroup_size", "expand_min",
            "first_order_bit", "second_order_bit")  # fmt: skip
    on = [word not in (None, "false", "none") for word in expansion]
    bits = {(draft.text(key) or "E4M3").upper() for key in ("first_order_bit", "second_order_bit")}
    if coat and any(on) and bits <= {"E4M3", "E5M2"}:
        draft.put("optimizer.states", "coat", *keys, why="E4M3 with range expansion, groups of 128, as published")
    elif coat and bits <= {"E4M3", "E5M2"} and (draft.has("qgroup_size") or draft.has("use_quantize_optimizer")):
        draft.put("optimizer.states", "fp8", *keys, why="without expansion: FP8 with a scale a block")
    draft.table("dead", {
        "parsed there, and used nowhere in VILA's tree: states stayed fp32 (optimizer.states: coat has them in FP8)":
        f"{_OPTIMIZER} first_order_expansion second_order_expansion qgroup_size expand_min",
    })  # fmt: skip
