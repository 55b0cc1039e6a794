"""LoongForge: the YAML of a model's components, and the flags of its launch script (read at v0.2.0).

The YAML wins over flags of the same name, component by component. It describes the architecture, which Octavo takes
from the folder of the model; what it says of FP8, freezing and adapters is what is translated.
"""

from __future__ import annotations

import fnmatch
import re
from pathlib import Path
from typing import NoReturn

from octavo.importers.common import model_and_data, steps_and_schedule
from octavo.importers.common.draft import Draft, choice
from octavo.importers.common.prefixed_keys import Under
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
#: Megatron's names of a layer's products -> what transformers calls them
_TARGETS = {"linear_qkv": ["q_proj", "k_proj", "v_proj", "qkv_proj"], "linear_proj": ["o_proj"],
            "linear_fc1": ["gate_proj", "up_proj"], "linear_fc2": ["down_proj"]}  # fmt: skip
#: ... and the layers of latent attention, which are selected by name
_LATENT = {"linear_q_proj": "q_proj", "linear_q_down_proj": "q_a_proj", "linear_q_up_proj": "q_b_proj",
           "linear_kv_down_proj": "kv_a_proj_with_mqa", "linear_kv_up_proj": "kv_b_proj"}  # fmt: skip
_INNER = ("fp8_recipe", "fp8_param", "selective_fp8", "fp8_dynamic_policy_path", "fp8_dynamic_num_tokens")

NONE = {
    "files of Hydra that this one is merged over; what they say of layers is the model folder's config.json here":
    "defaults defaults.*",
    "functions of LoongForge's own model code": "model.position_idx_func model.loss_func model.*.model_spec "
    "model.*.rotary_emb_func model.*.activation_func model.model_type model.*.model_type *_target_* model.*.provider",
    "the architecture comes from the model's config.json": "model.foundation.* model.image_encoder.* "
    "model.image_projector.* model.video_* model.audio_* model.*_token_id convert_file",
    "rows are JSON, JSONL, parquet or tar; packs are made while reading": "dataloader_type split "
    "packing_buffer_size sft_sort_batch sft_num_preprocess_workers is_tokenized_data use_fixed_seq_lengths sample_type "
    "sft_dataset_config sft_test_dataset task_encoder sft_data_mix_strategy max_buffer_size max_packed_tokens "
    "num_images_expected strict_mode replacement group_by_length dataset_metadata_path valid_data_path test_data_path",
    model_and_data.TEMPLATE: "chat_template conv_style",
    model_and_data.VIDEO: "latent_* num_latent_frames max_latent_* caption_channels max_video_length min_num_frame "
    "max_num_frame "
    "frame_* fps* video_*",
    "images are prepared by the model's own processor": "force_image_size down_sample_ratio patch_size pad2square "
    "dynamic_image_size max_image_length use_thumbnail min_dynamic_patch max_dynamic_patch",
    "of the conversion between FP8 checkpoints: Octavo reads and writes FP8 folders itself (octavo export)":
    "fp8_force_no_requant force_pow_2_scales amax_epsilon quant_method pretrain_as_fp8 hf_dequantize_* "
    "hf_quant_config_file",
    "tensors are watched by run.health_every": "enable_log_tensor log_tensor_* save_tensor save_tensor_dir",
    "gradients go between ranks as stored, or in BF16 (train.gather)": "enable_fp8_comm",
    "names of a registry there": "model_name allow_missing_adapter_checkpoint",
    "not built": "enable_encoder_hetero_dp use_vit_dp_balance use_vlm_dp_balance enable_chunkpipe chunkpipe_* "
    "random_fallback_cpu loss_reduction loss_reduction_all_gather training_rice_vl_max_answer_length freeze_parameters "
    "freeze_parameters_regex max_text_length max_timestep_boundary min_timestep_boundary",
}  # fmt: skip
SAME = {
    "checkpoints hold the place in the data": "dataloader_save",
    "samples of pretraining are conversations with their question": "add_question_in_pretrain",
    "padding is where the model's processor puts it": "padding_side",
}
_AMAX = "$FP8_QUANT_*"
_PART = re.compile(r"defaults\.\d+\.(?:.*/)?([^/@]+)@model\.(image_encoder|foundation)")
#: vision towers of configs/models -> folders there of the language models that a published model has with them
_PUBLISHED = {
    "qwen2_vit": ("qwen2",), "qwen2_5_vit": ("qwen2.5",), "qwen3_vit": ("qwen3",),
    "qwen3_5_vit": ("qwen3.5", "qwen3.6"),
    "intern_vit_0.3b": ("internlm2.5", "qwen2.5", "qwen3"), "intern_vit_6b": ("internlm2.5", "qwen2.5", "qwen3"),
    "llava_vit": ("qwen3",), "ernie4_5_vit": ("ernie4_5_vl",), "minicpm_v_4_6_vit": ("minicpm_v_4_6",),
    "moon_vit_3d": ("kimi_k2",),
}  # fmt: skip
_WEIGHTS = ("load", "pretrained_checkpoint", "load_hf_path", "hf_checkpoint_path")


def translate(draft: Draft) -> None:
    u = Under(draft)
    world = steps_and_schedule.processes(draft)
    ranks = megatron.data_parallel(draft, u, world)
    _description(draft)
    phase = choice(draft, "training_phase", {"pretrain": "pretrain", "sft": "sft", "midtrain": "pretrain"}) or "sft"
    draft.put("train.phase", phase, "training_phase")
    model_and_data.model(draft, "load_hf_path", "hf_checkpoint_path", "hf_tokenizer_path",
                why="the folder of the tokenizer: it holds the model too")  # fmt: skip
    model = draft.settings["model.path"].source
    # A checkpoint in Megatron's layout is only a copy of the model if its name says so.
    for key in ("load", "pretrained_checkpoint"):
        same = bool(model) and model_and_data.same_model(draft.text(key) or "", str(model[0].value))
        why = "a checkpoint of Megatron's layout; Octavo reads the Hugging Face folder"
        (draft.same if same else draft.none)(key, why=why + (" of the same model" if same else ""))
    _kernels(draft)
    _data(draft, phase)
    packed = bool(draft.flag("packing_sft_data"))
    if packed:
        model_and_data.packing(draft, "packing_sft_data")
    else:
        draft.same("packing_sft_data", why="a row is a sample")
        draft.dead("packing_buffer_size", why="only read with packing_sft_data")
    usual = megatron.Usual(lr=1e-4)
    megatron.steps(draft, u, usual, ranks, packed)
    draft.put("train.loss", "token", why="their loss is a sum over tokens, divided by the tokens of the global batch")
    draft.same("calculate_per_token_loss", why="loss by tokens")
    megatron.optimizer(draft, u, usual)
    megatron.precision(draft, u)
    lora = _lora(draft)
    _freeze(draft, lora)
    _first_weights(draft, phase, lora)
    _fp8(draft, u, lora)
    megatron.aux_loss(draft, u)
    megatron.recompute(draft, u)
    megatron.saving(draft, u)
    megatron.context(draft, u)
    megatron.expert(draft, u, lora=lora)
    draft.none(*[key for key in draft.source_keys if fnmatch.fnmatchcase(key, _AMAX)],
               why="a patch of Transformer Engine; scales here are never below the smallest normal number")  # fmt: skip
    draft.table("none", NONE)
    draft.table("default", SAME)
    megatron.rest(draft, u)
    draft.table("none", hf_trainer.ENVIRONMENT)
    draft.table("default", hf_trainer.SAME)


def _description(draft: Draft) -> None:
    """The YAML of the model's components, which a script names too. One that is put together of parts that no published
    model has together is refused: the folder of the tokenizer would be another model."""
    word = draft.text("config_file")
    described = bool(draft.under("model."))
    if word and not described and (file := draft.folder.named(word)) is not None:
        draft.add(files.read([file], {}, draft.folder)[0].source_keys, "")
        described = True
    chosen = {}
    for key in draft.under("defaults."):
        if match := _PART.fullmatch(key):
            chosen[match[2]] = (match[1], draft.text(key), draft.source_keys[key].place)
    tower, language = chosen.get("image_encoder"), chosen.get("foundation")
    if tower and language and language[0] not in _PUBLISHED.get(tower[1] or "", (language[0],)):
        kind = draft.text("model.model_type") or Path(tower[2].source).stem
        _composed(f"{tower[2]}: {kind}", f"{tower[1]} and {language[1]}")
    if word and not described and "custom" in Path(word).parts:
        _composed(f"{draft.source_keys['config_file'].place}: {word}", "parts of its own")
    if described:
        draft.same("config_file", why="the file that was given")
    else:
        draft.none("config_file", why="the YAML of the model's components was not given: octavo import YAML SCRIPT")


def _composed(where: str, parts_of_it: str) -> NoReturn:
    raise TranslateError(
        f"{where} is composed of {parts_of_it}, which is not translated: Octavo trains the model of one folder, and no "
        "published one holds these parts. Name a published model's YAML."
    )


def _first_weights(draft: Draft, phase: str, lora: bool) -> None:
    """Where no flag loads weights, training begins with random ones; nothing that is frozen is meant to."""
    if any(key in draft.source_keys for key in _WEIGHTS):
        draft.dead("init_method_std", why="weights come from the checkpoint")
        return
    if lora or "model.freeze" in draft.settings or not (phase == "pretrain" or draft.has("init_method_std")):
        draft.note(
            "no flag loads weights: training would start there with random weights, here it starts with model.path"
        )
        return
    draft.put("model.init", "random", why="no flag loads weights there")
    draft.put("model.init_std", draft.number("init_method_std", 0.02), "init_method_std")


def _kernels(draft: Draft) -> None:
    word = draft.text("attention_backend")
    if word in ("flash", "fused", "auto"):
        draft.put("model.attention", "sdpa", "attention_backend", why="torch chooses at each call, flash where it can")
    elif word:
        draft.put("model.attention", "eager" if word in ("unfused", "local") else "sdpa", "attention_backend")
    draft.same("use_flash_attn", why="torch chooses at each call, flash where it can")


def _data(draft: Draft, phase: str) -> None:
    paths = draft.words("train_data_path", " ") or draft.words("data_path", " ")
    key = "train_data_path" if draft.has("train_data_path") else "data_path"
    names = draft.words("sft_dataset", " ") or draft.words("sft_train_dataset", " ")
    for number, path in enumerate(paths):
        at = model_and_data.dataset(draft, "train", number, path, key, hub=False)
        if names:
            layout = names[min(number, len(names) - 1)]  # the last name applies to all further paths
            if "sharegpt" in layout:
                draft.put(f"{at}.format", "sharegpt", "sft_dataset", "sft_train_dataset")
            elif "alpaca" in layout:
                draft.put(f"{at}.format", "alpaca", "sft_dataset", "sft_train_dataset")
        if draft.flag("sft_data_streaming"):
            able = model_and_data.stream(draft, at, "sft_data_streaming")
            if able and (size := draft.whole("streaming_buffer_size")):
                draft.put(f"{at}.shuffle_buffer", size, "streaming_buffer_size")
    draft.none("sft_dataset", "sft_train_dataset", "sft_valid_dataset",
               why="a name of their register of layouts; Octavo looks at the rows (data.train.0.format)")  # fmt: skip
    if not paths:
        draft.put("data.train.0.path", "/path/to/data.json", why="to be filled in: no flag named data")
        draft.note("data.train is to be filled in")
    else:
        draft.note(
            "LoongForge reads WebDataset of Energon for images: name the JSON, JSONL or tar files that it was made of"
        )
    for number, path in enumerate(draft.words("valid_data_path", " ")):
        model_and_data.dataset(draft, "eval", number, path, "valid_data_path", hub=False)
    if (draft.words("split") or ["0"])[0] in ("100", "1", "1.0"):
        draft.same("split", why="all rows are trained")
    draft.put("train.seq_length", draft.whole("seq_length") or 2048, "seq_length")
    drop = draft.flag("enable_discard_sample")
    draft.put(
        "data.on_long",
        "drop" if drop else "cut",
        "enable_discard_sample",
        why="" if drop else "longer rows are truncated",
    )
    if draft.flag("train_on_prompt") and phase == "sft":
        draft.put("data.train_on_prompt", True, "train_on_prompt")
    if draft.flag("history_mask_loss") and phase == "sft":
        model_and_data.last_answer(draft, "history_mask_loss")
    further = draft.mapping("chat_template_kwargs")
    if further:
        draft.put("data.template_args", further, "chat_template_kwargs", *draft.under("chat_template_kwargs."))


def _lora(draft: Draft) -> bool:
    """The group `lora@peft_config`, wherever Hydra put it."""
    at = next(
        (key.rpartition(".")[0] + "." for key in draft.source_keys if key.endswith(".apply_to_foundation")),
        "peft_config.",
    )
    u = Under(draft, at)
    applied = {part: u.flag(f"apply_to_{part}") for part in ("image_encoder", "image_projector", "foundation")}
    u.none("apply_to_video_projector", "apply_to_video_encoder", why=model_and_data.VIDEO)
    if not any(applied.values()):
        u.same(*[f"apply_to_{part}" for part in applied], why="no adapters")
        return False
    targets = [part for part, on in applied.items() if on]
    names = u.words("target_modules") or list(_TARGETS)
    keys = {"rank": u("dim"), "alpha": u("alpha"), "dropout": u("dropout"), "targets": u("target_modules")}
    model_and_data.lora(
        draft,
        u.whole("dim", 16),
        u.number("alpha", 32),
        u.number("dropout", 0.0),
        targets,
        keys=keys,
    )
    for part in targets:
        draft.put("lora.targets", targets, u(f"apply_to_{part}"))
    # Names of fused modules select several layers of a Hugging Face model.
    if set(names) & set(_LATENT):
        ours = [_LATENT.get(name, name) for key in names for name in _TARGETS.get(key, [key]) if name != "qkv_proj"]
        draft.put("lora.targets", [f"**.{name}" for name in ours], u("target_modules"), why="modules by their names")
    elif set(names) < set(_TARGETS):
        left = [name for key, theirs in _TARGETS.items() if key not in names for name in theirs]
        draft.put("lora.exclude", [f"**.{name}" for name in left if name != "qkv_proj"], u("target_modules"),
                  why="all linear layers of the component but those")  # fmt: skip
    u.same(*[f"apply_to_{part}" for part, on in applied.items() if not on], why="gets no adapters")
    return True


def _freeze(draft: Draft, lora: bool) -> None:
    frozen = {}
    for theirs, ours in _COMPONENTS.items():
        key = f"model.{theirs}.freeze"
        if draft.flag(key):
            frozen[ours] = (key,)
        else:
            draft.same(key, why="trained")
    if frozen and not lora:
        model_and_data.freeze(draft, frozen)
    for keys in frozen.values() if lora else ():
        draft.same(*keys, why="the base of adapters is frozen anyway")


def _fp8(draft: Draft, u: Under, lora: bool) -> None:
    """Flags are of the whole model, the YAML of components, and it wins; the projector stays in high precision "
    "there."""
    whole = megatron.fp8(draft, u, param=not lora)
    any_part = False
    for theirs, ours in _COMPONENTS.items():
        at = Under(draft, f"model.{theirs}.")
        form = at.text("fp8")  # of the component; it wins over the flag for the whole model
        on = form not in (None, "false", "none", "null")
        recipe = choice(draft, at("fp8_recipe"), megatron.RECIPES)
        if theirs == "image_projector":
            at.dead("fp8", *_INNER, why="their projector is built outside any FP8 context: it never ran in FP8")
            continue
        if form is not None and not on:
            draft.put(f"fp8.{ours}.recipe", "off", at("fp8"))
        elif on or (whole and recipe):
            any_part = True
            draft.put(f"fp8.{ours}.recipe", recipe or whole or "delayed", at("fp8_recipe"), at("fp8"))
            if form in ("e4m3", "hybrid"):
                draft.put(f"fp8.{ours}.format", form, at("fp8"))
        elif not whole:
            at.dead(*_INNER, why="fp8 is set neither here nor by --fp8-format, so nothing of it ran in FP8")
            continue
        if at.flag("fp8_param") and not lora:
            draft.put(f"fp8.{ours}.param", True, at("fp8_param"))
        elif at.has("fp8_param"):
            at.same("fp8_param", why="weights stay in high precision, with codes")
        _selective(draft, at, ours)
    if whole:
        draft.put("fp8.image_projector.recipe", "off", why="their projector is built outside any FP8 context")
    elif not any_part:
        model_and_data.no_fp8(draft)


def _selective(draft: Draft, at: Under, ours: str) -> None:
    if at.flag("selective_fp8"):
        why = "times measured ahead chose the layers there (none of those files is published); here the plan times them"
        draft.put(f"fp8.{ours}.recipe", "auto", at("selective_fp8"), why=why)
        draft.settings.pop(f"fp8.{ours}.format", None)
        at.none(
            "fp8_dynamic_policy_path", why="a table of times by layer kind and tokens; Octavo measures at the start"
        )
        at.none("fp8_dynamic_num_tokens", why="the plan counts each component's tokens itself")
    else:
        at.dead("fp8_dynamic_policy_path", "fp8_dynamic_num_tokens", why="only read with selective_fp8")
        at.same("selective_fp8", why="off")
