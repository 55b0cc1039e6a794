"""Adapters merged into weights match PEFT's merge and the adapted model; metrics of merge errors."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import peft
import pytest
import torch
from torch import Tensor, nn

from octavo import adapters, fp8, models
from octavo.adapters.merge import AdaptedWeight, adapted_weights, merged_weights
from octavo.adapters.merge_error import MIN_KEPT, MergeErrors
from octavo.fp8.weights import FROZEN, codes_of_frozen, frozen_from_codes, frozen_weights
from tests.adapters.conftest import components, inputs, logits, lora, quantized

USUAL = [("qwen3_vl", "block"), ("qwen3", None), ("qwen3_moe", "row"), ("qwen3_vl_moe", "block")]
FAMILIES = ("qwen3_vl", "qwen2_5_vl", "internvl", "llavaonevision1_5", "qwen3", "qwen3_moe", "qwen3_vl_moe")
OTHERS = [(f, k) for f in FAMILIES for k in (None, "row", "block", "tensor") if (f, k) not in USUAL]
Folder = Callable[[str], Path]


def filled(model: nn.Module, std: float = 0.05, seed: int = 3) -> nn.Module:
    """B is not zero, and magnitudes are not the norms, as after some training."""
    g = torch.Generator().manual_seed(seed)
    for name, p in adapters.adapter_parameters(model):
        if "lora_B" in name:
            p.data.copy_(torch.randn(p.shape, generator=g) * std)
        if "magnitude" in name:
            p.data.mul_(1 + 0.1 * torch.rand(p.shape, generator=g))
    return model


def adapted(path: Path, kind: str | None = None, dtype: torch.dtype = torch.float32, **settings) -> nn.Module:
    model = models.load(path, dtype=dtype)
    if kind is not None:
        quantized(model, kind)
    family = models.describe(model)
    adapters.attach(model, family, lora(**{"targets": components(family), **settings}))
    return filled(model)


def rebuilt(path: Path, values, dtype: torch.dtype = torch.float32) -> nn.Module:
    """The stock model with these values; codes are dequantized."""
    model = models.load(path, dtype=dtype)
    state = dict(model.named_parameters()) | dict(model.named_buffers())
    tied = set(getattr(model, "all_tied_weights_keys", {}))
    seen = set()
    for name, value in values:
        assert name not in seen and name not in tied
        seen.add(name)
        if isinstance(value, fp8.Quantized):
            value = frozen_from_codes(value.data, value.scale, value.spec, torch.float32).dequantize()
        state[name].data.copy_(value)
    assert seen == set(model.state_dict()) - tied
    return model


def near(ours: Tensor, theirs: Tensor, ulps: float = 256) -> None:
    limit = ulps * torch.finfo(theirs.dtype).eps * float(theirs.abs().max())
    assert float((ours - theirs).abs().max()) <= limit


@pytest.mark.parametrize(("name", "kind"), [*USUAL, *(pytest.param(*x, marks=pytest.mark.long) for x in OTHERS)])
def test_merged_model_matches_adapted_model(name: str, kind: str | None, folder: Folder) -> None:
    path = folder(name)
    model = adapted(path, kind, rslora=True)
    batch = inputs(model, models.describe(models.load(path)))
    found = rebuilt(path, merged_weights(model, torch.float32))
    near(logits(found, batch), logits(model, batch))
    assert float((logits(found, batch) - logits(models.load(path), batch)).abs().max()) > 1e-2


@pytest.mark.parametrize("settings", [{}, {"rslora": True}, {"dora": True}], ids=["lora", "rslora", "dora"])
@pytest.mark.parametrize("name", ["qwen3", "qwen3_moe"])
def test_merge_matches_peft(name: str, settings: dict, folder: Folder, tmp_path: Path) -> None:
    if name == "qwen3_moe" and "dora" in settings:
        settings = {**settings, "exclude": ("**.experts",)}
    path = folder(name)
    model = adapted(path, **settings)
    adapters.save(model, tmp_path / "adapter", path)
    for dtype in (torch.float32, torch.bfloat16) if not settings else (torch.float32,):
        theirs = peft.PeftModel.from_pretrained(models.load(path, dtype=dtype), str(tmp_path / "adapter"))
        theirs = dict(theirs.merge_and_unload().named_parameters())
        changed = adapted_weights(model)
        for stock, value in merged_weights(model, dtype):
            if stock in changed:
                # PEFT rounds s B A, and then the sum.
                error = (value.float() - theirs[stock].float()).abs()
                assert float(error.max()) <= 2 * torch.finfo(dtype).eps * float(value.abs().max()), stock
            elif stock in theirs:
                assert torch.equal(value.to(dtype), theirs[stock]), stock


def test_weights_without_adapter_are_unchanged(folder: Folder) -> None:
    path = folder("qwen3_moe")
    model = adapted(path, "block", targets=("q_proj", "**.layers.0.mlp.experts.down_proj"))
    before = {n.replace(".base_layer", ""): w for n, w in frozen_weights(model)}
    changed = adapted_weights(model)
    assert any(n.endswith("experts.down_proj") for n in changed)
    codes = 0
    for name, value in merged_weights(model):
        if isinstance(value, fp8.Quantized):
            own = codes_of_frozen(before[name])
            assert value.data.data_ptr() == own.data.data_ptr() and value.scale.data_ptr() == own.scale.data_ptr()
            codes += 1
        assert (name in changed) == (name in before and not isinstance(value, fp8.Quantized))
        if name in changed:
            assert value.dtype is torch.bfloat16
    assert codes == len(before) - len(changed)


def test_merge_into_another_base(folder: Folder) -> None:
    """The adapter of a model over codes, folded into the high-precision weights."""
    path = folder("qwen3")
    model, plain = adapted(path, "block"), models.load(path)
    over = adapted(path)
    for (name, a), (_, b) in zip(
        merged_weights(model, torch.float32, base=plain), merged_weights(over, torch.float32), strict=True
    ):
        torch.testing.assert_close(a, b, msg=name)
    with pytest.raises(adapters.AdapterError, match="another model"):
        adapted_weights(model, nn.Linear(2, 2))


def test_iteration_keeps_the_callers_grad_mode(folder: Folder) -> None:
    model = adapted(folder("qwen3"))
    taken = merged_weights(model)
    assert all(torch.is_grad_enabled() for _ in taken)
    taken = merged_weights(model)
    while next(taken)[0] not in adapted_weights(model):
        pass
    taken.close()
    assert torch.is_grad_enabled()


def test_missing_and_merged_adapters_raise(folder: Folder) -> None:
    model = models.load(folder("qwen3"))
    with pytest.raises(adapters.AdapterError, match="no adapters to merge"):
        merged_weights(model)
    model = adapted(folder("qwen3"))
    next(iter(adapters.adapted_layers(model).values())).merge()
    with pytest.raises(adapters.AdapterError, match="merged in place already"):
        merged_weights(model)


# --- what survives ----------------------------------------------------------------------------------------------------


def fold(w: Tensor, scale: float, kind: str | None, rank: int = 4) -> tuple[AdaptedWeight, Tensor]:
    """A linear layer's fold with |D| = scale |W|, over codes or not, and its W."""
    g = torch.Generator().manual_seed(0)
    layer = nn.Linear(w.shape[1], w.shape[0], bias=False)
    layer.weight = nn.Parameter(w, False) if kind is None else fp8.freeze_weight(w, kind)
    block = nn.ModuleDict({"q_proj": layer})
    adapters.attach(block, None, lora(rank=rank, targets=("q_proj",)))
    for _, p in adapters.adapter_parameters(block):
        p.data.copy_(torch.randn(p.shape, generator=g))
    made = adapted_weights(block)["q_proj.weight"]
    size = (made.merged() - made.base_values()).norm()
    block["q_proj"].lora_B["default"].weight.data.mul_(scale * made.base_values().norm() / size)
    return made, made.base_values()


def survived(made: AdaptedWeight, kind: str) -> MergeErrors:
    found = MergeErrors({made.name: made})
    found.add(made.name, None, (0, made.shape[0]), fp8.quantize(made.merged(), FROZEN[kind]))
    return found


@pytest.mark.parametrize("kind", ["block", "row"])
def test_small_change_is_rounded_away_in_codes(kind: str) -> None:
    w = torch.randn(256, 256, generator=torch.Generator().manual_seed(1))
    kept = []
    for scale in (1e-5, 1e-2, 0.1, 1.0):
        found = survived(fold(w, scale, kind)[0], kind)
        own = found.weights["q_proj.weight"]
        kept.append(own.kept)
        assert abs(own.relative - scale) < 1e-2 * scale
        if scale < 0.5:
            assert own.error <= 1 + 1e-6  # no element moves further than it was pushed
        assert found.is_lost == (own.kept < MIN_KEPT)
    assert kept == sorted(kept) and kept[0] < 1e-2 and 0.1 < kept[1] < 0.6 and kept[3] > 0.98


def test_small_change_survives_in_bf16_until_noise_exceeds_it() -> None:
    w = torch.randn(256, 256, generator=torch.Generator().manual_seed(1))
    figures = {scale: survived(fold(w, scale, None)[0], "block") for scale in (1e-3, 1e-2, 0.1)}
    own = {scale: found.weights["q_proj.weight"] for scale, found in figures.items()}
    assert 0.95 < own[0.1].kept < 1.05 and 0.7 < own[1e-2].kept < 1.3
    assert 2 < own[1e-2].error < 4  # 2 to 3 % of W over 1 %
    assert [found.is_lost for found in figures.values()] == [True, False, False]
    assert figures[1e-3].noise_ratio > 1 > figures[1e-2].noise_ratio
    # louder along its own directions than its norm says, as `noise_ratio` measures
    made, _ = fold(w, 1e-2, None)
    d = made.merged() - made.base_values()
    noise = fp8.dequantize(fp8.quantize(made.merged(), FROZEN["block"])) - made.merged()
    along = torch.linalg.svd(d).Vh[:4]
    loud = float((noise @ along.T).norm() / (d @ along.T).norm())
    assert 0.8 < loud / own[1e-2].noise_ratio < 1.2


def test_metrics_match_their_definitions() -> None:
    w = torch.randn(64, 48, generator=torch.Generator().manual_seed(1))
    made, base = fold(w, 0.2, "row")
    q = fp8.quantize(made.merged(), FROZEN["row"])
    found = MergeErrors({made.name: made})
    for rows in ((0, 16), (16, 64)):  # in pieces
        found.add(made.name, None, rows, fp8.Quantized(q.data[slice(*rows)], q.scale[slice(*rows)], q.spec))
    found.add("another.weight", None, None, torch.zeros(1))
    own = found.weights[made.name]
    d, applied = made.merged() - base, fp8.dequantize(q) - base
    want = {
        "relative": d.norm() / base.norm(),
        "kept": (applied * d).sum() / d.square().sum(),
        "error": (applied - d).norm() / d.norm(),
        "cosine": torch.cosine_similarity(applied.flatten(), d.flatten(), 0),
        "changed": (applied != 0).float().mean(),
        "noise_ratio": (applied - d).norm() / d.norm() * (4 / 48) ** 0.5,
    }
    for figure, value in want.items():
        assert getattr(own, figure) == pytest.approx(float(value), rel=1e-4), figure
    assert found.to_json()["weights"][0]["kept"] == own.kept


def test_adapter_without_change_is_not_lost() -> None:
    found = survived(fold(torch.randn(32, 32), 0.0, "row")[0], "row")
    assert (
        not found.is_lost and found.fp8_weights() == [] and found.kept == 1 and found.weights["q_proj.weight"].kept == 1
    )
