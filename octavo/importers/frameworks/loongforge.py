"""LoongForge: the YAML of a model's components, and the flags of its launch script (read at v0.2.0).

The YAML takes precedence over flags of the same name, for each component. Octavo reads the architecture from the
model folder instead; the settings of FP8, freezing and adapters are translated.
"""

from __future__ import annotations

import fnmatch
import re
from pathlib import Path
from typing import NamedTuple, NoReturn

from octavo.importers.common import model_and_data, steps_and_schedule
from octavo.importers.common.draft import Draft, choice
from octavo.importers.common.prefixed_keys import PrefixedDraft
from octavo.importers.errors import TranslateError
from octavo.importers.frameworks import hf_trainer, megatron
from octavo.importers.source import files

NAME = "loongforge"
MARKS = (
    "model.foundation.*",
    "training_phase",
    "hf_tokenizer_path",
    "sft_dataset",
    "sft_dataset_config",
    "task_encoder",
    "packing_sft_data",
    "init_method_std",
    "dataloader_save",
    "enable_discard_sample",
    "packing_buffer_size",
    "model.image_encoder.*",
    "defaults.*@model.foundation",
)
FIRST_WINS = True
_COMPONENTS = {"foundation": "foundation", "image_encoder": "image_encoder", "image_projector": "image_projector"}
#: Megatron's names of linear layers -> their names in transformers
_TARGETS = {"linear_qkv": ["q_proj", "k_proj", "v_proj", "qkv_proj"], "linear_proj": ["o_proj"],
            "linear_fc1": ["gate_proj", "up_proj"], "linear_fc2": ["down_proj"]}  # fmt: skip
#: the same for latent attention, whose layers are selected by name
_LATENT = {"linear_q_proj": "q_proj", "linear_q_down_proj": "q_a_proj", "linear_q_up_proj": "q_b_proj",
           "linear_kv_down_proj": "kv_a_proj_with_mqa", "linear_kv_up_proj": "kv_b_proj"}  # fmt: skip
_INNER = ("fp8_recipe", "fp8_param", "selective_fp8", "fp8_dynamic_policy_path", "fp8_dynamic_num_tokens")

NONE = {
    "Hydra defaults; Octavo reads the architecture from the config.json of the model folder":
    "defaults defaults.*",
    "functions of LoongForge's own model code": "model.position_idx_func model.loss_func model.*.model_spec "
    "model.*.rotary_emb_func model.*.activation_func model.model_type model.*.model_type *_target_* model.*.provider",
    "the architecture comes from the model's config.json": "model.foundation.* model.image_encoder.* "
    "model.image_projector.* model.video_* model.audio_* model.*_token_id convert_file",
    "Octavo reads JSON, JSONL, parquet and tar, and packs while reading": "dataloader_type split packing_buffer_size "
    "sft_sort_batch sft_num_preprocess_workers is_tokenized_data use_fixed_seq_lengths sample_type sft_dataset_config "
    "sft_test_dataset task_encoder sft_data_mix_strategy max_buffer_size max_packed_tokens num_images_expected "
    "strict_mode replacement group_by_length dataset_metadata_path valid_data_path test_data_path",
    model_and_data.TEMPLATE_REASON: "chat_template conv_style",
    model_and_data.VIDEO_REASON: "latent_* num_latent_frames max_latent_* caption_channels max_video_length "
    "min_num_frame max_num_frame frame_* fps* video_*",
    "the model's processor prepares images": "force_image_size down_sample_ratio patch_size pad2square "
    "dynamic_image_size max_image_length use_thumbnail min_dynamic_patch max_dynamic_patch",
    "for converting FP8 checkpoints; Octavo reads and writes FP8 folders directly (octavo export)":
    "fp8_force_no_requant force_pow_2_scales amax_epsilon quant_method pretrain_as_fp8 hf_dequantize_* "
    "hf_quant_config_file",
    "run.health_every records tensor statistics": "enable_log_tensor log_tensor_* save_tensor save_tensor_dir",
    "gradients are reduced in their storage dtype, or in BF16 (train.gather)": "enable_fp8_comm",
    "name from LoongForge's registry": "model_name allow_missing_adapter_checkpoint",
    "not implemented": "enable_encoder_hetero_dp use_vit_dp_balance use_vlm_dp_balance enable_chunkpipe chunkpipe_* "
    "random_fallback_cpu loss_reduction loss_reduction_all_gather training_rice_vl_max_answer_length freeze_parameters "
    "freeze_parameters_regex max_text_length max_timestep_boundary min_timestep_boundary",
}  # fmt: skip
SAME = {
    "checkpoints record the position in the data": "dataloader_save",
    "pretraining samples are conversations that include the question": "add_question_in_pretrain",
    "the model's processor decides where to pad": "padding_side",
}
_AMAX = "$FP8_QUANT_*"
_PART = re.compile(r"defaults\.\d+\.(?:.*/)?([^/@]+)@model\.(image_encoder|foundation)")
#: vision towers in configs/models -> folders of the language models that published models combine with them
_PUBLISHED = {
    "qwen2_vit": ("qwen2",), "qwen2_5_vit": ("qwen2.5",), "qwen3_vit": ("qwen3",),
    "qwen3_5_vit": ("qwen3.5", "qwen3.6"),
    "intern_vit_0.3b": ("internlm2.5", "qwen2.5", "qwen3"), "intern_vit_6b": ("internlm2.5", "qwen2.5", "qwen3"),
    "llava_vit": ("qwen3",), "ernie4_5_vit": ("ernie4_5_vl",), "minicpm_v_4_6_vit": ("minicpm_v_4_6",),
    "moon_vit_3d": ("kimi_k2",),
}  # fmt: skip
#: towers and folders of language models that octavo compose combines
_COMPOSABLE = ("qwen2_vit", "qwen2_5_vit", "qwen3_vit")
_DECODERS = ("llama", "qwen", "mistral")
_WHOLE_MODEL = re.compile(r"qwen[-_]?\d?(\.\d)?[-_]?vl", re.IGNORECASE)
_WEIGHTS = ("load", "pretrained_checkpoint", "load_hf_path", "hf_checkpoint_path")


def translate(draft: Draft) -> None:
    u = PrefixedDraft(draft)
    world = steps_and_schedule.count_processes(draft)
    ranks = megatron.data_parallel_size(draft, u, world)
    composed = _read_description(draft)
    phase = choice(draft, "training_phase", {"pretrain": "pretrain", "sft": "sft", "midtrain": "pretrain"}) or "sft"
    draft.set("train.phase", phase, "training_phase")
    if composed is None:
        model_and_data.set_model_path(draft, "load_hf_path", "hf_checkpoint_path", "hf_tokenizer_path",
                    why="the tokenizer folder also contains the model")  # fmt: skip
        model = draft.settings["model.path"].source
    else:
        _set_parts(draft, composed)
        model = ()
    # A checkpoint in Megatron's layout is only a copy of the model if its name says so.
    for key in ("load", "pretrained_checkpoint"):
        is_same = bool(model) and model_and_data.is_same_model(draft.text(key) or "", str(model[0].value))
        why = "Megatron checkpoint; Octavo reads the Hugging Face folder"
        (draft.mark_default if is_same else draft.mark_unsupported)(
            key, why=why + (" of the same model" if is_same else "")
        )
    _translate_kernels(draft)
    _translate_data(draft, phase)
    packed = bool(draft.flag("packing_sft_data"))
    if packed:
        model_and_data.set_packing(draft, "packing_sft_data")
    else:
        draft.mark_default("packing_sft_data", why="each row is one sample")
        draft.mark_ignored("packing_buffer_size", why="only used with packing_sft_data")
    defaults = megatron.Defaults(lr=1e-4)
    megatron.set_steps(draft, u, defaults, ranks, packed)
    draft.set("train.loss", "token", why="LoongForge divides the summed loss by the tokens of the global batch")
    draft.mark_default("calculate_per_token_loss", why="the loss is a mean over tokens")
    megatron.set_optimizer(draft, u, defaults)
    megatron.set_precision(draft, u)
    lora = _translate_lora(draft)
    _translate_freeze(draft, lora)
    _translate_init(draft, phase, lora)
    _translate_fp8(draft, u, lora)
    megatron.set_aux_loss(draft, u)
    megatron.set_recompute(draft, u)
    megatron.set_saving(draft, u)
    megatron.set_context_parallel(draft, u)
    megatron.set_expert_parallel(draft, u, lora=lora)
    draft.mark_unsupported(*[key for key in draft.source_keys if fnmatch.fnmatchcase(key, _AMAX)],
               why="patch of Transformer Engine; Octavo's scales are never below the smallest normal "
               "number")  # fmt: skip
    draft.mark_many("none", NONE)
    draft.mark_many("default", SAME)
    megatron.mark_remaining(draft, u)
    draft.mark_many("none", hf_trainer.ENVIRONMENT)
    draft.mark_many("default", hf_trainer.SAME)


class _Composed(NamedTuple):
    """A combination of components that no published model has: names in configs/models."""

    tower: str
    decoder: str


def _read_description(draft: Draft) -> _Composed | None:
    """Read the YAML of the model's components, which a script may name. Returns a combination that no published model
    has, because the tokenizer folder would contain a different model, or None. Raises TranslateError for one that
    `octavo compose` does not make."""
    word = draft.text("config_file")
    has_description = bool(draft.keys_under("model."))
    if word and not has_description and (file := draft.folder.find(word)) is not None:
        draft.add(files.read_files([file], {}, draft.folder)[0].source_keys, "")
        has_description = True
    chosen, composed = {}, None
    for key in draft.keys_under("defaults."):
        if match := _PART.fullmatch(key):
            chosen[match[2]] = (match[1], draft.text(key), draft.source_keys[key].place)
    tower, language = chosen.get("image_encoder"), chosen.get("foundation")
    if tower and language and language[0] not in _PUBLISHED.get(tower[1] or "", (language[0],)):
        kind = draft.text("model.model_type") or Path(tower[2].source).stem
        if tower[1] not in _COMPOSABLE or not language[0].startswith(_DECODERS):
            _reject_composed(f"{tower[2]}: {kind}", f"{tower[1]} and {language[1]}")
        composed = _Composed(tower[1], language[1] or language[0])
    if word and not has_description and "custom" in Path(word).parts:
        _reject_composed(f"{draft.source_keys['config_file'].place}: {word}", "custom components")
    if has_description:
        draft.mark_default("config_file", why="this is the translated file")
    else:
        draft.mark_unsupported(
            "config_file", why="the YAML of the model's components was not passed; run octavo import YAML SCRIPT"
        )
    return composed


def _set_parts(draft: Draft, composed: _Composed) -> None:
    """Name the parts of a composed model: the tower of the tokenizer's folder if that has a Qwen-VL, and a folder to
    fill in, because LoongForge's decoder has none."""
    key = "hf_tokenizer_path"
    word = draft.text(key) or ""
    if _WHOLE_MODEL.search(word):
        why = f"{composed.tower} is the tower of this model, of which only the tower is read"
        draft.set("model.image_encoder.path", draft.path(word), key, why=why)
    else:
        draft.set("model.image_encoder.path", "/path/to/image_encoder", why=f"FILL IN: {composed.tower} has no folder")
        draft.add_note(
            f"FILL IN: set model.image_encoder.path to the folder of a Qwen-VL with the tower {composed.tower}"
        )
    draft.mark_default(key, why="the tokenizer is the decoder's, to which <image> is added")
    draft.set("model.foundation.path", "/path/to/decoder", why=f"FILL IN: {composed.decoder} has no folder")
    draft.add_note(f"FILL IN: set model.foundation.path to the Hugging Face folder of {composed.decoder}")
    draft.add_note(
        "the model is composed of a tower, a new projector and a decoder (octavo compose); LoongForge gives the "
        "decoder the tokenizer of hf_tokenizer_path, and Octavo keeps the decoder's"
    )


def _reject_composed(where: str, parts_of_it: str) -> NoReturn:
    raise TranslateError(
        f"{where} is composed of {parts_of_it}, which cannot be translated: no published model has this combination, "
        f"and octavo compose takes the towers {', '.join(_COMPOSABLE)}. Use the YAML of a published model."
    )


def _translate_init(draft: Draft, phase: str, lora: bool) -> None:
    """Translate initialization: without a flag that loads weights, training starts from random weights. If anything is
    frozen, that cannot be intended, so model.path is kept."""
    if any(key in draft.source_keys for key in _WEIGHTS):
        draft.mark_ignored("init_method_std", why="weights come from the checkpoint")
        return
    if lora or "model.freeze" in draft.settings or not (phase == "pretrain" or draft.has("init_method_std")):
        draft.add_note(
            "no flag loads weights: LoongForge would start from random weights, Octavo starts from model.path"
        )
        return
    draft.set("model.init", "random", why="no flag loads weights")
    draft.set("model.init_std", draft.number("init_method_std", 0.02), "init_method_std")


def _translate_kernels(draft: Draft) -> None:
    word = draft.text("attention_backend")
    if word in ("flash", "fused", "auto"):
        draft.set(
            "model.attention",
            "sdpa",
            "attention_backend",
            why="torch selects a kernel at each call, flash attention if possible",
        )
    elif word:
        draft.set("model.attention", "eager" if word in ("unfused", "local") else "sdpa", "attention_backend")
    draft.mark_default("use_flash_attn", why="torch selects a kernel at each call, flash attention if possible")


def _translate_data(draft: Draft, phase: str) -> None:
    paths = draft.words("train_data_path", " ") or draft.words("data_path", " ")
    key = "train_data_path" if draft.has("train_data_path") else "data_path"
    names = draft.words("sft_dataset", " ") or draft.words("sft_train_dataset", " ")
    for number, path in enumerate(paths):
        at = model_and_data.add_dataset(draft, "train", number, path, key, hub=False)
        if names:
            layout = names[min(number, len(names) - 1)]  # the last name applies to all further paths
            if "sharegpt" in layout:
                draft.set(f"{at}.format", "sharegpt", "sft_dataset", "sft_train_dataset")
            elif "alpaca" in layout:
                draft.set(f"{at}.format", "alpaca", "sft_dataset", "sft_train_dataset")
        if draft.flag("sft_data_streaming"):
            streamed = model_and_data.set_streaming(draft, at, "sft_data_streaming")
            if streamed and (size := draft.integer("streaming_buffer_size")):
                draft.set(f"{at}.shuffle_buffer", size, "streaming_buffer_size")
    draft.mark_unsupported("sft_dataset", "sft_train_dataset", "sft_valid_dataset",
               why="name from LoongForge's registry of layouts; Octavo detects the layout "
               "(data.train.0.format)")  # fmt: skip
    if not paths:
        draft.set("data.train.0.path", "/path/to/data.json", why="FILL IN: no flag names training data")
        draft.add_note("FILL IN: set data.train")
    else:
        draft.add_note(
            "LoongForge reads Energon's WebDataset for images: use the JSON, JSONL or tar files that it was created "
            "from"
        )
    for number, path in enumerate(draft.words("valid_data_path", " ")):
        model_and_data.add_dataset(draft, "eval", number, path, "valid_data_path", hub=False)
    if (draft.words("split") or ["0"])[0] in ("100", "1", "1.0"):
        draft.mark_default("split", why="all rows are used for training")
    draft.set("train.seq_length", draft.integer("seq_length") or 2048, "seq_length")
    drop = draft.flag("enable_discard_sample")
    draft.set(
        "data.on_long",
        "drop" if drop else "cut",
        "enable_discard_sample",
        why="" if drop else "longer rows are truncated",
    )
    if draft.flag("train_on_prompt") and phase == "sft":
        draft.set("data.train_on_prompt", True, "train_on_prompt")
    if draft.flag("history_mask_loss") and phase == "sft":
        model_and_data.mark_last_answer_loss(draft, "history_mask_loss")
    template_args = draft.mapping("chat_template_kwargs")
    if template_args:
        draft.set(
            "data.template_args", template_args, "chat_template_kwargs", *draft.keys_under("chat_template_kwargs.")
        )


def _translate_lora(draft: Draft) -> bool:
    """Translate the Hydra group `lora@peft_config`. Returns whether there are adapters."""
    at = next(
        (key.rpartition(".")[0] + "." for key in draft.source_keys if key.endswith(".apply_to_foundation")),
        "peft_config.",
    )
    u = PrefixedDraft(draft, at)
    applied = {part: u.flag(f"apply_to_{part}") for part in ("image_encoder", "image_projector", "foundation")}
    u.mark_unsupported("apply_to_video_projector", "apply_to_video_encoder", why=model_and_data.VIDEO_REASON)
    if not any(applied.values()):
        u.mark_default(*[f"apply_to_{part}" for part in applied], why="no adapters")
        return False
    targets = [part for part, on in applied.items() if on]
    names = u.words("target_modules") or list(_TARGETS)
    keys = {"rank": u("dim"), "alpha": u("alpha"), "dropout": u("dropout"), "targets": u("target_modules")}
    model_and_data.set_lora(
        draft,
        u.integer("dim", 16),
        u.number("alpha", 32),
        u.number("dropout", 0.0),
        targets,
        keys=keys,
    )
    for part in targets:
        draft.set("lora.targets", targets, u(f"apply_to_{part}"))
    # Names of fused modules select several layers of a Hugging Face model.
    if set(names) & set(_LATENT):
        component = [
            _LATENT.get(name, name) for key in names for name in _TARGETS.get(key, [key]) if name != "qkv_proj"
        ]
        draft.set(
            "lora.targets", [f"**.{name}" for name in component], u("target_modules"), why="modules selected by name"
        )
    elif set(names) < set(_TARGETS):
        excluded = [name for key, source in _TARGETS.items() if key not in names for name in source]
        draft.set("lora.exclude", [f"**.{name}" for name in excluded if name != "qkv_proj"], u("target_modules"),
                  why="all linear layers of the component except these")  # fmt: skip
    u.mark_default(*[f"apply_to_{part}" for part, on in applied.items() if not on], why="no adapters")
    return True


def _translate_freeze(draft: Draft, lora: bool) -> None:
    frozen = {}
    for source, component in _COMPONENTS.items():
        key = f"model.{source}.freeze"
        if draft.flag(key):
            frozen[component] = (key,)
        else:
            draft.mark_default(key, why="trained")
    if frozen and not lora:
        model_and_data.set_freeze(draft, frozen)
    for keys in frozen.values() if lora else ():
        draft.mark_default(*keys, why="the base of the adapters is always frozen")


def _translate_fp8(draft: Draft, u: PrefixedDraft, lora: bool) -> None:
    """Translate FP8: flags apply to the whole model, the YAML to components, and the YAML takes precedence."""
    global_recipe = megatron.set_fp8(draft, u, param=not lora)
    has_fp8 = False
    for source, component in _COMPONENTS.items():
        at = PrefixedDraft(draft, f"model.{source}.")
        form = at.text("fp8")  # of the component; takes precedence over the flag for the whole model
        on = form not in (None, "false", "none", "null")
        recipe = choice(draft, at("fp8_recipe"), megatron.RECIPES)
        if source == "image_projector":
            at.mark_ignored(
                "fp8", *_INNER, why="LoongForge builds the projector outside any FP8 context, so it never ran in FP8"
            )
            continue
        if form is not None and not on:
            draft.set(f"fp8.{component}.recipe", "off", at("fp8"))
        elif on or (global_recipe and recipe):
            has_fp8 = True
            chosen = recipe or global_recipe or "delayed"
            why = megatron.WHY_RECIPE.get(chosen, "")
            draft.set(f"fp8.{component}.recipe", chosen, at("fp8_recipe"), at("fp8"), why=why)
            if form in ("e4m3", "hybrid"):
                draft.set(f"fp8.{component}.format", form, at("fp8"))
        elif not global_recipe:
            at.mark_ignored(
                *_INNER, why="fp8 is set neither here nor by --fp8-format, so this component did not run in FP8"
            )
            continue
        if at.flag("fp8_param") and not lora:
            draft.set(f"fp8.{component}.param", True, at("fp8_param"))
        elif at.has("fp8_param"):
            at.mark_default("fp8_param", why="weights stay in high precision, with cached FP8 codes")
        _translate_selective(draft, at, component)
    if global_recipe:
        draft.set("fp8.image_projector.recipe", "off", why="LoongForge builds the projector outside any FP8 context")
    elif not has_fp8:
        model_and_data.disable_fp8_if_unset(draft)


def _translate_selective(draft: Draft, at: PrefixedDraft, component: str) -> None:
    if at.flag("selective_fp8"):
        why = (
            "LoongForge selects layers by measured times from a file that is not published; Octavo's plan measures them"
        )
        draft.set(f"fp8.{component}.recipe", "auto", at("selective_fp8"), why=why)
        draft.settings.pop(f"fp8.{component}.format", None)
        at.mark_unsupported(
            "fp8_dynamic_policy_path", why="a table of times by layer kind and tokens; Octavo measures at startup"
        )
        at.mark_unsupported("fp8_dynamic_num_tokens", why="the plan counts the tokens of each component")
    else:
        at.mark_ignored("fp8_dynamic_policy_path", "fp8_dynamic_num_tokens", why="only used with selective_fp8")
        at.mark_default("selective_fp8", why="off")
