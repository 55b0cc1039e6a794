"""The file that `fsdp2_config_path` of MindSpeed-MM's older trainer names: how its layers are sharded, moved and
computed again."""

from __future__ import annotations

from octavo.importers.common import model_and_data, steps_and_schedule
from octavo.importers.common.draft import Draft, choice
from octavo.importers.common.prefixed_keys import Under
from octavo.importers.frameworks import megatron
from octavo.importers.source import files


def follow(draft: Draft, u: Under) -> None:
    """The file that `fsdp2_config_path` names: its keys are read too, as ``fsdp2_config.*``."""
    word = u.text("fsdp2_config_path")
    file = draft.folder.named(word) if word else None
    if file is None:
        why = "the file of FSDP2's settings is not here: copy it to this path, as seen from --root or from the YAML"
        u.none("fsdp2_config_path", why=why)
        return
    draft.add(files.read([file], {}, draft.folder)[0].given, "fsdp2_config.")
    u.same("fsdp2_config_path", why="its keys are translated: fsdp2_config.*")
    f = Under(draft, "fsdp2_config.")
    if (steps_and_schedule.counted(draft, f("expert_parallel_size")) or 1) > 1:
        megatron.expert(draft, f, "expert_parallel_size", lora=bool(draft.under("lora_args.")))
    else:
        f.same("expert_parallel_size", why="experts are sharded, not dealt")
    if f.flag("offload_to_cpu"):
        f.put("optimizer.offload", True, "offload_to_cpu", why="states go to the host; parameters stay on the GPU here")
    else:
        f.same("offload_to_cpu", why="off")
    if towers := f.words("recompute_modules"):
        found = {"image_encoder" if "visual" in word or "image" in word else "foundation" for word in towers}
        value = (
            "full" if len(found) == 2 else {part: "full" if part in found else "none" for part in model_and_data.TOWERS}
        )
        f.put("train.recompute", value, "recompute_modules", why="blocks of these modules are computed again")
    kinds = {"bf16": "bf16", "fp16": "fp16", "fp32": "fp32"}
    if kind := choice(draft, f("param_dtype"), kinds):
        f.put("train.precision", kind, "param_dtype")
    reduced = choice(draft, f("reduce_dtype"), kinds)
    (f.same if reduced in (None, "fp32") else f.none)("reduce_dtype", why="gradients are summed in FP32")
    f.same("output_dtype", "cast_forward_inputs", why="what layers take and give has the precision of training")
    draft.table("none", {
        "FSDP2 wraps blocks, prefetches and shards them by itself": "fsdp2_config.sharding_size "
        "fsdp2_config.reshard_* fsdp2_config.num_to_*_prefetch fsdp2_config.sub_modules_to_wrap "
        "fsdp2_config.ignored_modules fsdp2_config.use_reentrant fsdp2_config.align_fsdp_param_groups "
        "fsdp2_config.moe_modules fsdp2_config.pin_memory",
    })  # fmt: skip
