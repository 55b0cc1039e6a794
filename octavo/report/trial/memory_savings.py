"""The cost of each memory saving: repeats the FP8 run, first without savings, then with one more at a time.

A saving is a setting that stores something in fewer bytes, or not at all. A head in FP8 is treated as one, although it
saves time and costs memory: its GEMMs are closest to the loss, and the trial must show their cost.
The last run of the ablation is the FP8 run of the trial itself, with everything on. Each setting is compared with the
one before it: bytes, mean loss and tokens per second.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from octavo.config import Config
from octavo.config.sections.model import LoadInFp8Section
from octavo.config.sections.names import COMPONENTS, canonical_name
from octavo.config.sections.train import RecomputeSection
from octavo.config.stages import stage_configs

HEAD = "lm_head in FP8"


class Saving(NamedTuple):
    """One saving: its description, and a function that turns it off."""

    words: str
    off: Callable[[Config], Config]


def enabled_savings(cfg: Config) -> list[Saving]:
    """Return the savings that a configuration enables, in the order in which the ablation adds them."""
    fp8, train, optimizer = cfg.fp8, cfg.train, cfg.optimizer
    trains = [stage.train for stage in stage_configs(cfg)]
    offloads = any(one.offload_activations for one in trains)
    recomputes = any(one.recompute != RecomputeSection() for one in trains)
    parts = {name: part for name in COMPONENTS if (part := getattr(fp8, name)) is not None}
    activations = fp8.activations == "fp8" or any(part.activations == "fp8" for part in parts.values())
    param = fp8.param or any(part.param for part in parts.values())
    recompute = train.recompute
    word = recompute.foundation if recompute.foundation == recompute.image_encoder else "by component"
    head = fp8.lm_head is not None and fp8.lm_head.recipe != "off"
    candidates = [
        (head, f"{HEAD} ({fp8.lm_head and fp8.lm_head.recipe})", lambda c: _change_fp8(c, {"lm_head": None}, {})),
        (_has_fp8_base(cfg), describe_lora_base(cfg), _with_high_precision_base),
        (
            optimizer.states != "fp32",
            f"optimizer states in {optimizer.states}",
            change_section("optimizer", states="fp32"),
        ),
        (optimizer.master != "fp32", f"weights as {optimizer.master}", _with_fp32_weights),
        (activations, "activations in FP8", lambda c: _change_fp8(c, {"activations": "bf16"}, {"activations": None})),
        (param, "FP8 weights between steps", lambda c: _change_fp8(c, {"param": False}, {"param": None})),
        (
            cfg.rl is not None and cfg.rl.kv == "fp8",
            "keys and values of rollouts in FP8",
            change_section("rl", kv="bf16"),
        ),
        (
            fp8.weight_codes == "recast",
            "weights cast at each use",
            lambda c: _change_fp8(c, {"weight_codes": "keep"}, {}),
        ),
        (recomputes, f"recompute: {word}", change_section("train", recompute=RecomputeSection())),
        (optimizer.update == "backward", "update in backward", change_section("optimizer", update="step")),
        (optimizer.offload, "optimizer states in host memory", change_section("optimizer", offload=False)),
        (
            offloads,
            "activations in host memory",
            change_section("train", offload_activations=False),
        ),
    ]
    return [Saving(words, off) for on, words, off in candidates if on]


def describe_lora_base(cfg: Config) -> str:
    """Describe the frozen base of LoRA; returns "" if the whole model is trained."""
    dtype = "fp32" if cfg.train.precision == "fp32" else "BF16"
    kinds = cfg.model.load_in_fp8.kinds
    if kinds:
        is_uniform = len(set(kinds.values())) == 1
        words = [
            canonical_name(kind) if is_uniform else f"{name}: {canonical_name(kind)}" for name, kind in kinds.items()
        ]
        return f"base in FP8 ({', '.join(words[:1] if is_uniform else words)})"
    if cfg.lora is None:
        return ""
    return (
        f"base in FP8 ({_checkpoint_quantization(cfg)}, as in its checkpoint)"
        if _has_fp8_base(cfg)
        else f"base in {dtype}"
    )


def _has_fp8_base(cfg: Config) -> bool:
    return bool(cfg.model.load_in_fp8.kinds) or (
        cfg.lora is not None and cfg.model.keep_fp8 and bool(_checkpoint_quantization(cfg))
    )


def _checkpoint_quantization(cfg: Config) -> str:
    """Return how the checkpoint is quantized, or "" if it is not."""
    if not (Path(cfg.model.path) / "config.json").is_file():  # the first run reports that it is missing
        return ""
    from octavo.models.folder.quantization import read_quantization

    quantization = read_quantization(cfg.model.path)
    return "" if quantization is None else str(canonical_name(quantization.kind))


def _with_high_precision_base(cfg: Config) -> Config:
    """Return the configuration with its base in high precision: not quantized while loading, and dequantized if the
    checkpoint is in FP8."""
    kept_codes = {"keep_fp8": False} if cfg.lora is not None and _checkpoint_quantization(cfg) else {}
    return change_section("model", load_in_fp8=LoadInFp8Section(), **kept_codes)(cfg)


def without_savings(cfg: Config) -> Config:
    """Return the configuration with every saving disabled."""
    for switch in enabled_savings(cfg):
        cfg = switch.off(cfg)
    return cfg


def with_plain_storage(cfg: Config) -> Config:
    """Return the configuration with weights and optimizer states stored as in high precision, so that it can continue
    from a high-precision checkpoint. Computation in FP8 is unchanged."""
    plain = without_savings(cfg)
    fp8 = _change_fp8(cfg, {"param": False}, {"param": None}).fp8
    update = {"fp8": fp8, "optimizer": plain.optimizer, "train": plain.train, "lora": plain.lora}
    return cfg.model_copy(update=update)


def ablation(cfg: Config) -> list[tuple[str, Config]]:
    """Return (description, configuration) of each setting before the configuration itself: without savings, then with
    one more at a time. Empty if the configuration has no savings."""
    enabled = enabled_savings(cfg)
    out = []
    for on in range(len(enabled)):
        setting = cfg
        for switch in enabled[on:]:
            setting = switch.off(setting)
        out.append(("FP8 without savings" if on == 0 else f"+ {enabled[on - 1].words}", setting))
    return out


def describe_last_saving(cfg: Config) -> str:
    """Describe the last saving that the configuration adds."""
    return f"+ {enabled_savings(cfg)[-1].words}"


def cost_rows(runs: Sequence[Mapping[str, Any]], top: Mapping[str, Any], last_saving: str) -> list[dict[str, Any]]:
    """Return the table: bytes, mean loss and speed of each setting, and their change from the setting before.

    Args:
        runs: the verdict's entries for the ablation's runs, in their order.
        top: the entry of the FP8 run with every saving on.
        words: description of the saving that ``top`` adds to the last of ``runs``.
    """
    rows: list[dict[str, Any]] = []
    for label, run in [*((entry["label"], entry) for entry in runs), (last_saving, top)]:
        size = sum(n for kind, n in run["memory"].items() if not kind.startswith("peak"))
        row = {
            "label": label, "bytes": size, "gap": run["gap"], "speed_ratio": run["speed_ratio"],
            "right": (run["eval"] or {}).get("exact_match"), "failure": run["failure"],
        }  # fmt: skip
        before = next((r for r in reversed(rows) if not r["failure"]), None)
        row["saved"] = None if before is None else before["bytes"] - size
        # Gaps are relative to the same reference, so the ratio of two mean losses follows from them.
        row["loss_change"] = None if before is None else (1 + row["gap"]) / (1 + before["gap"]) - 1
        if "reward_gap" in run:  # phase rl, where losses are not meaningful
            row["reward_gap"] = run["reward_gap"]
            row["reward_change"] = None if before is None else run["reward_gap"] - before["reward_gap"]
        row["speed_change"] = None if before is None else row["speed_ratio"] / before["speed_ratio"] - 1
        rows.append(row)
    return rows


def change_section(section: str, **values: Any) -> Callable[[Config], Config]:
    """Return a function that changes values in one section of a configuration."""

    def change(cfg: Config) -> Config:
        settings = getattr(cfg, section)
        assert values.keys() <= type(settings).model_fields.keys()
        if section == "train":  # also what a stage sets
            changed = (stage.model_copy(update=values) for stage in cfg.train.stages)
            return cfg.model_copy(update={"train": settings.model_copy(update={**values, "stages": tuple(changed)})})
        return cfg.model_copy(update={section: settings.model_copy(update=values)})

    return change


def _with_fp32_weights(cfg: Config) -> Config:
    """Return the configuration with fp32 weights that compute in BF16, as a model with BF16 weights does, so that
    settings differ only in storage. Adapters are then fp32; everything else computes as before."""
    computing = change_section("train", precision="bf16") if cfg.lora is None else change_section("lora", dtype="fp32")
    return computing(change_section("optimizer", master="fp32")(cfg))


def _change_fp8(cfg: Config, section: Mapping[str, Any], component: Mapping[str, Any]) -> Config:
    """Set ``section`` in the fp8 section, and ``component`` in each component with its own settings."""
    parts = {n: p.model_copy(update=component) for n in COMPONENTS if (p := getattr(cfg.fp8, n)) is not None}
    return cfg.model_copy(update={"fp8": cfg.fp8.model_copy(update={**section, **parts})})
