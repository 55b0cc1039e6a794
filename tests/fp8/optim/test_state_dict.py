"""State dicts: what was saved comes back in every bit, torch's AdamW loads and is loaded, misfits are named."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from octavo.fp8.arithmetic import moments
from octavo.fp8.optim import convert, layout, old_coat_note
from octavo.fp8.optim.adamw import AdamW

SHAPES = [(5, 60), (3,), (2, 128), (1, 2), (7, 40)]
STATES = ["fp8", "coat", "bf16", "fp32"]
MASTERS = ["fp32", "bf16+16", "bf16+sr"]


def _parameters(dtype: torch.dtype, seed: int = 0) -> list[nn.Parameter]:
    gen = torch.Generator().manual_seed(seed)
    return [nn.Parameter(torch.randn(shape, generator=gen).to(dtype)) for shape in SHAPES]


def _make(states: str = "fp8", master: str = "fp32", dtype: torch.dtype | None = None, seed: int = 0) -> AdamW:
    dtype = dtype or (torch.float32 if master == "fp32" else torch.bfloat16)
    params = _parameters(dtype, seed)
    groups = [{"params": params[:2], "weight_decay": 0.1}, {"params": params[2:]}]
    return AdamW(groups, lr=1e-2, states=states, master=master, seed=seed)


def _run(optimizer: torch.optim.Optimizer, steps: range) -> None:
    for step in steps:
        gen = torch.Generator().manual_seed(1000 + step)
        for i, p in enumerate(p for group in optimizer.param_groups for p in group["params"]):
            grad = torch.randn(p.shape, generator=gen) * 10.0 ** (i - 3)
            p.grad = None if i == 3 else grad.to(p.dtype)  # the fourth never has a gradient, and no state
        optimizer.step()


def _bits(value: object) -> object:
    """For comparing down to the last bit, NaN included."""
    if isinstance(value, torch.Tensor):
        return value.dtype, tuple(value.shape), value.detach().contiguous().view(-1).view(torch.uint8).tolist()
    if isinstance(value, dict):
        return {key: _bits(v) for key, v in value.items()}
    return [_bits(v) for v in value] if isinstance(value, list) else value


def _weights(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [p.detach() for group in optimizer.param_groups for p in group["params"]]


@pytest.mark.parametrize("states", STATES)
@pytest.mark.parametrize(("master", "dtype"), [(m, None) for m in MASTERS] + [("fp32", torch.bfloat16)])
def test_state_dict_round_trips_layout(states, master, dtype):
    optimizer = _make(states, master, dtype)
    _run(optimizer, range(2))
    for group in optimizer.param_groups:
        for p in group["params"]:
            state = optimizer.state.get(p, {})
            made = layout.init_state(p, group)
            if state:
                assert {k: (v.dtype, v.shape) for k, v in state.items()} == {
                    k: (v.dtype, v.shape) for k, v in made.items()
                }
                assert {k for k in state if k in layout.PER_GROUP} == {
                    k for k, v in made.items() if v.shape != p.shape and k != "step"
                } or p.numel() <= 3
    saved = copy.deepcopy(optimizer.state_dict())
    other = _make(states, master, dtype, seed=5)
    for mine, theirs in zip(_weights(other), _weights(optimizer), strict=True):
        mine.copy_(theirs)
    other.load_state_dict(saved)
    assert _bits(other.state_dict()) == _bits(saved)
    _run(optimizer, range(2, 5))
    _run(other, range(2, 5))
    assert _bits(_weights(other)) == _bits(_weights(optimizer))
    assert _bits(other.state_dict()) == _bits(optimizer.state_dict())
    assert other.param_groups[0]["seed"] == 0 and other.param_groups[0]["weight_decay"] == 0.1
    assert _bits(saved) == _bits(copy.deepcopy(saved))


def test_loading_copies_dict():
    optimizer, other = _make(), _make()
    _run(optimizer, range(1))
    saved = optimizer.state_dict()
    other.load_state_dict(saved)
    before = _bits(saved)
    _run(other, range(1, 2))
    assert _bits(saved) == before


@pytest.mark.parametrize("states", STATES)
@pytest.mark.parametrize("master", MASTERS)
def test_torch_state_dict_round_trips(states, master):
    torchs = torch.optim.AdamW(_parameters(torch.float32), lr=3e-3, weight_decay=0.2)
    _run(torchs, range(6))
    mine = AdamW(_parameters(torch.float32 if master == "fp32" else torch.bfloat16), states=states, master=master)
    mine.load_state_dict(torchs.state_dict())
    assert mine.param_groups[0]["lr"] == 3e-3 and mine.param_groups[0]["states"] == states
    assert "amsgrad" not in mine.param_groups[0]
    back = convert.to_torch(mine)
    assert back["param_groups"][0].keys() == torchs.state_dict()["param_groups"][0].keys()
    for i, want in torchs.state_dict()["state"].items():
        got = back["state"][i]
        assert got["step"] == want["step"] == 6
        for key, close in (("exp_avg", {"rtol": 0.2}), ("exp_avg_sq", {"rtol": 0.1})):
            assert got[key].dtype == torch.float32
            if states == "fp32":
                assert torch.equal(got[key], want[key])
            else:
                atol = 0.05 * want[key].abs().max().item() if key == "exp_avg" else 0.0
                torch.testing.assert_close(got[key], want[key], atol=atol, **close)
    assert 3 not in back["state"]
    again = torch.optim.AdamW(_parameters(torch.float32))
    again.load_state_dict(back)
    _run(again, range(6, 7))
    if (states, master) == ("fp32", "fp32"):
        for p, q in zip(_weights(again), _weights(torchs), strict=True):
            p.copy_(q)
        assert again.param_groups[0]["weight_decay"] == 0.2


def test_encoding_decoded_v_is_exact():
    optimizer = _make("fp8")
    _run(optimizer, range(4))
    other = _make("fp8")
    other.load_state_dict(convert.to_torch(optimizer))
    for p, q in zip(*([p for g in o.param_groups for p in g["params"]] for o in (optimizer, other)), strict=True):
        if p in optimizer.state:
            _, before = convert.decode(p, optimizer.param_groups[0], optimizer.state[p])
            _, after = convert.decode(q, other.param_groups[0], other.state[q])
            torch.testing.assert_close(after, before, rtol=0.02, atol=0)
            assert torch.equal(after == 0, before == 0)


def test_fp32_weights_of_all_masters():
    exact = [w.clone() for w in _weights(_make())]
    for master in MASTERS:
        optimizer = _make(master=master)
        _run(optimizer, range(1))
        for group in optimizer.param_groups:
            for p in group["params"]:
                whole = convert.fp32_weight(optimizer, p)
                assert whole.dtype == torch.float32 and whole.data_ptr() != p.data_ptr()
                assert torch.equal(whole.bfloat16(), p.bfloat16()) or master == "bf16+16"
                assert (whole - p.float()).abs().max() <= p.float().abs().max() / 256
    assert all(not torch.equal(w, w.bfloat16().float()) for w in exact)


def test_bf16_plus_16_equals_fp32_run():
    whole = _make("fp32", "fp32")
    model = nn.ParameterList(p.detach().clone() for group in whole.param_groups for p in group["params"])
    lows = {}
    for name, p in model.named_parameters():
        high, lows[name] = convert.master.split(p.detach())
        p.data = high
    params = list(model.parameters())
    params[1].requires_grad_(False)
    halves = AdamW([p for i, p in enumerate(params) if i != 1], lr=1e-2, states="fp32", master="bf16+16")
    convert.set_low(halves, model, lows)  # those of the frozen one are for nobody
    for i, p in enumerate(params):
        if i != 1:
            assert torch.equal(convert.fp32_weight(halves, p), _weights(whole)[i])
    for wrong, words in (
        ({"9": lows["0"]}, "9 were given, but the model has no 9"),
        ({"0": lows["0"].int()}, r"of 0 are torch.int32 \[5, 60\]; int16 \[5, 60\]"),
        ({"0": lows["0"][1:]}, r"int16 \[4, 60\]; int16 \[5, 60\]"),
    ):
        with pytest.raises(ValueError, match=words):
            convert.set_low(halves, model, wrong)
    with pytest.raises(ValueError, match=r"its master is 'bf16\+sr', which has none"):
        convert.set_low(AdamW(params, master="bf16+sr"), model, lows)
    with pytest.raises(ValueError, match="its master is 'fp32'"):
        convert.set_low(torch.optim.AdamW(params), model, lows)


@pytest.mark.parametrize("master", MASTERS)
@pytest.mark.parametrize("states", ["fp8", "fp32"])
def test_model_and_optimizer_are_copied_between_modes(states, master):
    source = _make("fp32")
    _run(source, range(3))
    target = _make(states, master, seed=7)
    _run(target, range(1))
    convert.copy_state(source, target)
    lossless = states == "fp32"
    for group, former in zip(target.param_groups, source.param_groups, strict=True):
        assert group["lr"] == former["lr"] and group["states"] == states
        for p, q in zip(group["params"], former["params"], strict=True):
            weight = convert.fp32_weight(target, p)
            if master == "bf16+sr":
                assert torch.equal(weight, q.detach().bfloat16().float())
            else:
                assert torch.equal(weight, q.detach())
            if q in source.state:
                assert target.state[p]["step"] == 3
                v = convert.decode(p, group, target.state[p])[1].view(q.shape)
                torch.testing.assert_close(v, source.state[q]["exp_avg_sq"], rtol=0 if lossless else 0.02, atol=0)
    back = torch.optim.AdamW(
        [{"params": ps} for ps in ([p.detach().float() for p in g["params"]] for g in target.param_groups)]
    )
    convert.copy_state(target, back)
    if lossless and master != "bf16+sr":
        assert _bits(_weights(back)) == _bits(_weights(source))
        for p, q in zip(*([p for g in o.param_groups for p in g["params"]] for o in (back, source)), strict=True):
            assert _bits(dict(sorted(back.state.get(p, {}).items()))) == _bits(
                dict(sorted(source.state.get(q, {}).items()))
            )
    with pytest.raises(ValueError, match="have different parameters"):
        convert.copy_state(source, AdamW(_parameters(torch.float32)))


def _drop(saved, key):
    del saved["state"][0][key]


def _put(saved, key, value):
    saved["state"][0][key] = value


MISFITS = [
    (lambda s: _drop(s, "exp_avg_scale"), r"has exp_avg_codes, exp_avg_sq_codes, .* of parameter 0 of shape \[5, 60\]"),
    (lambda s: _put(s, "exp_avg", torch.zeros(5, 60)), "Load a state dict of this kind of optimizer, whole"),
    (
        lambda s: _put(s, "exp_avg_codes", torch.zeros(60, 5).char()),
        r"is int8 \[60, 5\], where int8 \[5, 60\] is needed",
    ),
    (lambda s: _put(s, "exp_avg_scale", torch.zeros(2)), r"exp_avg_scale .* is float32 \[2\], where float32 \[3\]"),
    (lambda s: _put(s, "exp_avg_sq_codes", torch.zeros(5, 60)), "is float32 .*, where uint8"),
    (
        lambda s: s["param_groups"][0].update(states="coat"),
        "keeps states='coat' of .* optimizer states='fp8'.*copy_state",
    ),
    (lambda s: s["param_groups"][0].update(master="bf16+sr"), r"keeps master='bf16\+sr'"),
    (lambda s: s["param_groups"].pop(), r"groups of \[2\] parameters, this optimizer groups of \[2, 3\]"),
    (lambda s: s["param_groups"][0]["params"].pop(), r"groups of \[1, 3\] parameters"),
    (
        lambda s: s.pop("state"),
        r"is missing state; its keys are param_groups\. Pass the result of optimizer.state_dict\(\)",
    ),
    (lambda s: s.pop("param_groups"), "is missing param_groups; its keys are state"),
    (lambda s: s.clear(), "is missing state and param_groups; its keys are none"),
    (lambda s: s["state"].update({9: s["state"][0]}), "a state of parameter 9 .*none of its groups .*whole"),
]


@pytest.mark.parametrize(("spoil", "words"), MISFITS)
def test_mismatched_state_dict_is_rejected_without_change(spoil, words):
    optimizer = _make()
    _run(optimizer, range(2))
    saved = copy.deepcopy(optimizer.state_dict())
    spoil(saved)
    before = _bits(optimizer.state_dict())
    with pytest.raises(ValueError, match=words):
        optimizer.load_state_dict(saved)
    assert _bits(optimizer.state_dict()) == before


def test_errors_name_parameters_and_amsgrad_is_rejected():
    params = _parameters(torch.float32)
    torchs = torch.optim.AdamW(params, amsgrad=True)
    _run(torchs, range(1))
    with pytest.raises(ValueError, match="AdamW with amsgrad"):
        AdamW(params).load_state_dict(torchs.state_dict())
    named = AdamW([(f"layer.{i}", p) for i, p in enumerate(params)])
    _run(named, range(1))
    saved = copy.deepcopy(named.state_dict())
    saved["state"][0]["exp_avg_codes"] = torch.zeros(2)
    with pytest.raises(ValueError, match="exp_avg_codes of layer.0 is float32"):
        named.load_state_dict(saved)


def test_load_hooks_see_dict_and_states():
    optimizer, other = _make(), _make()
    _run(optimizer, range(1))
    seen: list = []
    other.register_load_state_dict_pre_hook(lambda o, d: seen.append(sorted(d["state"])))
    other.register_load_state_dict_post_hook(lambda o: seen.append(len(o.state)))
    other.load_state_dict(optimizer.state_dict())
    assert seen == [[0, 1, 2, 4], 4]


def test_a_tensor_learning_rate_is_copied():
    optimizer, other = _make(), _make()
    _run(optimizer, range(1))
    optimizer.param_groups[0]["lr"] = torch.tensor(0.3)
    other.load_state_dict(optimizer.state_dict())
    assert other.param_groups[0]["lr"] == 0.3 and other.param_groups[0]["lr"] is not optimizer.param_groups[0]["lr"]


def test_copy_and_pickle_continue_equally():
    optimizer = _make("fp8", "bf16+16")
    _run(optimizer, range(2))
    other = copy.deepcopy(optimizer)
    _run(optimizer, range(2, 3))
    _run(other, range(2, 3))
    assert _bits(_weights(other)) == _bits(_weights(optimizer))


def test_coat_of_0_4_0_is_read_exactly_with_note(monkeypatch):
    cut = moments.coat_figures
    with monkeypatch.context() as patch:  # a power between two that are kept now
        patch.setattr(moments, "coat_figures", lambda lo, hi: cut(lo, hi) - torch.tensor([0.0, 1 / 64, 0.0]))
        former = _make("coat")
        _run(former, range(2))
    saved = copy.deepcopy(former.state_dict())
    optimizer = _make("coat", seed=3)
    with pytest.warns(UserWarning, match=r"'coat' as version 0\.4\.0 wrote it: exp_avg_figures has powers as \d+\.\d"):
        optimizer.load_state_dict(saved)
    assert _bits(optimizer.state_dict()["state"]) == _bits(saved["state"])
    _run(optimizer, range(2, 3))
    assert old_coat_note(optimizer) is None and old_coat_note(former) is not None
    for p, q in zip(_weights(optimizer), _weights(former), strict=True):
        state = optimizer.state.get(p, {}), former.state.get(q, {})
        for now, then in zip(*(convert.decode(p, {"states": "coat"}, s) if s else () for s in state), strict=True):
            assert ((now - then).norm() <= 0.5 * then.norm()).all()  # what a step changes, no more
