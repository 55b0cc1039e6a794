"""What each memory saving costs: repeats the FP8 run, first without savings, then with one more at a time.

A saving is a configuration switch that stores something in fewer bytes, or not at all. A head in FP8 is treated
as one, although it saves time and takes memory: its GEMMs are nearest to the loss, and the trial must show their cost.
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

HEAD = "lm_head in FP8"


class Switch(NamedTuple):
    """One saving: its description, and a function that turns it off."""

    words: str
    off: Callable[[Config], Config]


def switches(cfg: Config) -> list[Switch]:
    """The savings that a configuration has on, in the order in which the ablation adds them."""
    fp8, train, optimizer = cfg.fp8, cfg.train, cfg.optimizer
    parts = {name: part for name in COMPONENTS if (part := getattr(fp8, name)) is not None}
    activations = fp8.activations == "fp8" or any(part.activations == "fp8" for part in parts.values())
    param = fp8.param or any(part.param for part in parts.values())
    recompute = train.recompute
    word = recompute.foundation if recompute.foundation == recompute.image_encoder else "by component"
    head = fp8.lm_head is not None and fp8.lm_head.recipe != "off"
    candidates = [
        (head, f"{HEAD} ({fp8.lm_head and fp8.lm_head.recipe})", lambda c: _fp8(c, {"lm_head": None}, {})),
        (_has_codes(cfg), base_of(cfg), _high_base),
        (optimizer.states != "fp32", f"optimizer states in {optimizer.states}", changing("optimizer", states="fp32")),
        (optimizer.master != "fp32", f"weights as {optimizer.master}", _fp32_weights),
        (activations, "activations in FP8", lambda c: _fp8(c, {"activations": "bf16"}, {"activations": None})),
        (param, "FP8 weights between steps", lambda c: _fp8(c, {"param": False}, {"param": None})),
        (cfg.rl is not None and cfg.rl.kv == "fp8", "keys and values of rollouts in FP8", changing("rl", kv="bf16")),
        (fp8.weight_codes == "recast", "weights cast at each use", lambda c: _fp8(c, {"weight_codes": "keep"}, {})),
        (recompute != RecomputeSection(), f"recompute: {word}", changing("train", recompute=RecomputeSection())),
        (optimizer.update == "backward", "update in backward", changing("optimizer", update="step")),
        (optimizer.offload, "optimizer states in host memory", changing("optimizer", offload=False)),
        (train.offload_activations, "activations in host memory", changing("train", offload_activations=False)),
    ]
    return [Switch(words, off) for on, words, off in candidates if on]


def base_of(cfg: Config) -> str:
    """Description of the frozen base of LoRA; "" if the whole model is trained."""
    dtype = "fp32" if cfg.train.precision == "fp32" else "BF16"
    kinds = cfg.model.load_in_fp8.kinds
    if kinds:
        alike = len(set(kinds.values())) == 1
        words = [canonical_name(kind) if alike else f"{name}: {canonical_name(kind)}" for name, kind in kinds.items()]
        return f"base in FP8 ({', '.join(words[:1] if alike else words)})"
    if cfg.lora is None:
        return ""
    return f"base in FP8 ({_on_disk(cfg)}, as in its checkpoint)" if _has_codes(cfg) else f"base in {dtype}"


def _has_codes(cfg: Config) -> bool:
    return bool(cfg.model.load_in_fp8.kinds) or (cfg.lora is not None and cfg.model.keep_fp8 and bool(_on_disk(cfg)))


def _on_disk(cfg: Config) -> str:
    """How the checkpoint itself is quantized; "" if it is not."""
    if not (Path(cfg.model.path) / "config.json").is_file():  # the first run reports that it is missing
        return ""
    from octavo.models.folder.quantization import read_quantization

    quantization = read_quantization(cfg.model.path)
    return "" if quantization is None else str(canonical_name(quantization.kind))


def _high_base(cfg: Config) -> Config:
    """A base in high precision: not quantized while loading, and dequantized if its checkpoint is in FP8."""
    kept_codes = {"keep_fp8": False} if cfg.lora is not None and _on_disk(cfg) else {}
    return changing("model", load_in_fp8=LoadInFp8Section(), **kept_codes)(cfg)


def without(cfg: Config) -> Config:
    """The configuration with every saving off."""
    for switch in switches(cfg):
        cfg = switch.off(cfg)
    return cfg


def storable(cfg: Config) -> Config:
    """The configuration with weights and optimizer states stored as in high precision, so that it can continue from a
    high-precision checkpoint: compact storage is off, computation in FP8 stays."""
    plain = without(cfg)
    fp8 = _fp8(cfg, {"param": False}, {"param": None}).fp8
    update = {"fp8": fp8, "optimizer": plain.optimizer, "train": plain.train, "lora": plain.lora}
    return cfg.model_copy(update=update)


def ablation(cfg: Config) -> list[tuple[str, Config]]:
    """(description, configuration) of the settings before the configuration itself, which is the last: without savings,
    then with one more at a time. Empty if it has none."""
    enabled = switches(cfg)
    out = []
    for on in range(len(enabled)):
        setting = cfg
        for switch in enabled[on:]:
            setting = switch.off(setting)
        out.append(("FP8 without savings" if on == 0 else f"+ {enabled[on - 1].words}", setting))
    return out


def last(cfg: Config) -> str:
    """Description of what the configuration itself adds to the setting before it."""
    return f"+ {switches(cfg)[-1].words}"


def costs(runs: Sequence[Mapping[str, Any]], top: Mapping[str, Any], words: str) -> list[dict[str, Any]]:
    """The table: each setting's bytes by measured kinds, mean loss and speed, and their change from the one before.

    Args:
        runs: the verdict's entries for the ablation's runs, in their order.
        top: the same of the FP8 run with every saving on.
        words: description of what that one adds to the last of ``runs``.
    """
    rows: list[dict[str, Any]] = []
    for label, run in [*((a["label"], a) for a in runs), (words, top)]:
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


def changing(section: str, **values: Any) -> Callable[[Config], Config]:
    """A function that changes values in one section of a configuration."""

    def change(cfg: Config) -> Config:
        settings = getattr(cfg, section)
        assert values.keys() <= type(settings).model_fields.keys()
        return cfg.model_copy(update={section: settings.model_copy(update=values)})

    return change


def _fp32_weights(cfg: Config) -> Config:
    """fp32 weights that compute in BF16, as a model with BF16 weights does, so that settings differ only in storage.
    Adapters are then fp32; the rest computes as before."""
    computing = changing("train", precision="bf16") if cfg.lora is None else changing("lora", dtype="fp32")
    return computing(changing("optimizer", master="fp32")(cfg))


def _fp8(cfg: Config, whole: Mapping[str, Any], part: Mapping[str, Any]) -> Config:
    """Set ``whole`` in the fp8 section, and ``part`` in each component with its own settings."""
    parts = {n: p.model_copy(update=part) for n in COMPONENTS if (p := getattr(cfg.fp8, n)) is not None}
    return cfg.model_copy(update={"fp8": cfg.fp8.model_copy(update={**whole, **parts})})
