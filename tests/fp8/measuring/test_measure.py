"""What is measured, how it is kept, and what plans do with it; on fake machines whose times are known."""

import contextlib
import importlib
import json
from pathlib import Path

import pytest
import torch
from torch import nn

from octavo import fp8
from octavo.fp8.kernels import registry
from octavo.fp8.measuring import Machine, choose, timing
from octavo.fp8.measuring import measure as measurements
from octavo.fp8.measuring.cases import HIGH, Case, Entry, Measured, make_cases
from octavo.fp8.measuring.timing import Timing, time_calls
from octavo.fp8.proof.prediction import predict

measure = importlib.import_module("octavo.fp8.measuring.bench")  # fp8.measure is the function
GPU = Machine("Fake H200", "9.0", "999.1", "2.11", "13.0", {"reference": "1"})
TOKENS = {"foundation": 64, "lm_head": 64}


class Net(nn.Module):
    """Layers of three sizes, one frozen, one with a bias, and a head."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(8, 32)
        self.layers = nn.ModuleList(nn.ModuleDict({"q": nn.Linear(32, 32), "k": nn.Linear(32, 16)}) for _ in range(3))
        self.frozen = nn.Linear(32, 48, bias=False).requires_grad_(False)
        self.lm_head = nn.Linear(32, 8)


def fake(seconds):
    """A timer that calls nothing: ``seconds(case, name)`` says the device's time, or (device, host)."""

    def timer(case, calls, device):
        out = {}
        for name in calls:
            given = seconds(case, name.removesuffix(", cold"))
            device_s, host = given if isinstance(given, tuple) else (given, given / 10)
            out[name] = Timing(device_s * (1.5 if name.endswith(", cold") else 1), host, 0.0, 4)
        return out

    return timer


def by_size(case, name):
    """A GPU on which FP8 wins for N >= 32 alone, and rowwise by most."""
    high = case.n * 1e-3
    if name == HIGH:
        return high
    gain = (0.5 if name.startswith("rowwise") else 0.6) if case.n >= 32 else 1.2
    return high * gain


def measured(model, policy="auto", seconds=by_size, **more):
    return fp8.measure(model, policy, None, TOKENS, timer=fake(seconds), machine=GPU, **more)


def test_time_calls_alternates_order_and_returns_medians():
    seen = []
    found = time_calls({n: lambda n=n: seen.append(n) for n in "ab"}, "cpu", warmup=1, rounds=3)
    assert "".join(seen) == "ab" + "abba" * 2  # three rounds become four: both orders weigh the same
    assert found["a"].rounds == 4 and found["a"].device > 0 and found["a"].host == found["a"].device
    with pytest.raises(ValueError, match="found 0 functions"):
        time_calls({}, "cpu")


def test_gpu_waits_while_host_queues_call(monkeypatch):
    """The time to the first launch is the host's: the GPU sleeps between the flush and the first event. On a CPU nobody
    sleeps, and nothing of CUDA is asked."""
    order = []

    class Event:
        def __init__(self, enable_timing):
            pass

        def record(self):
            order.append("event")

        def elapsed_time(self, other):
            return 3.0

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "_sleep", lambda cycles: order.append(cycles))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: order.append("wait"))
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    clock = timing._Clock(torch.device("cuda"), flush=False)
    clock._scratch = type("Scratch", (), {"zero_": lambda self: order.append("flush")})()
    clock.time("a", lambda: order.append("call"))
    clock.collect_times()
    assert order == ["flush", timing.LEAD, "event", "call", "event", "wait"] and clock.result("a").device == 3e-3
    assert 1.5e-3 < timing.LEAD / 1.98e9 < 2.7e-3 and timing.LEAD / 1.4e9 < 3e-3  # at an H200's clocks, high and low
    order.clear()
    time_calls({"a": lambda: None}, "cpu", rounds=1, warmup=0)
    assert not order


def test_time_calls_detects_slower_function():
    x, y = torch.randn(64, 64), torch.randn(512, 512)
    found = time_calls({"small": lambda: x @ x, "large": lambda: y @ y}, "cpu", rounds=6)
    assert found["large"].device > 3 * found["small"].device


def test_each_distinct_shape_is_one_case():
    model = Net()
    cases = make_cases(model, fp8.describe_layers(model), TOKENS)
    assert set(cases) == {f"layers.{i}.{n}" for i in range(3) for n in "qk"} | {"frozen"}
    assert set(cases.values()) == {
        Case("linear", 64, 32, 32, True), Case("linear", 64, 16, 32, True), Case("linear", 64, 48, 32, frozen=True),
    }  # fmt: skip
    assert not make_cases(model, fp8.describe_layers(model), {"foundation": 0})


def test_input_without_gradient_has_no_dgrad():
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)).requires_grad_(False)
    model[1].requires_grad_(True)
    model.append(nn.Linear(8, 8).requires_grad_(False))
    cases = make_cases(model, fp8.describe_layers(model), {"foundation": 4})
    assert [cases[n].dgrad for n in "012"] == [False, False, True]
    assert "frozen no dgrad" in str(cases["0"])


def test_planned_layers_are_not_slower_than_high_precision():
    model = Net()
    found = measured(model)
    plan = fp8.plan(model, "auto", tokens=TOKENS, measurements=found)
    rows = {r.name: r for r in plan.rows}
    assert {n for n, r in rows.items() if r.fp8} == {"layers.0.q", "layers.1.q", "layers.2.q", "frozen"}
    assert all(r.recipe.name == "rowwise" for r in plan.rows if r.fp8)
    for row in plan.rows:
        if row.times is not None:
            assert row.times.planned <= row.times.high
            assert not row.fp8 or row.times.planned == row.times.fp8 < row.times.high
    assert rows["layers.0.k"].reason == "measured: BF16 16.00 ms, best FP8 28.80 ms (blockwise e4m3 on reference)"
    assert rows["layers.0.q"].reason.startswith("measured: BF16 32.00 ms, FP8 24.00 ms (rowwise e4m3 on reference)")
    assert any("measured on Fake H200" in n for n in plan.notes)
    kept = json.loads(json.dumps(plan.to_json()))["rows"]
    times = next(r["measured"] for r in kept if r["name"] == "layers.0.q")
    assert times["bf16_ms"] == pytest.approx(32) and times["planned_ms"] == pytest.approx(24)
    fp8.apply(model, plan)
    assert not isinstance(model.layers[0]["k"], fp8.Linear) and model.layers[0]["q"].recipe.name == "rowwise"


def test_plan_uses_high_precision_if_fp8_is_slower():
    model = Net()
    plan = fp8.plan(model, "auto", tokens=TOKENS, measurements=measured(model, seconds=lambda c, n: 1.0 + (n != HIGH)))
    assert not any(r.fp8 for r in plan.rows)
    asked = fp8.plan(model, "blockwise", tokens=TOKENS, measurements=measured(model, seconds=lambda c, n: 1.0))
    assert not any(r.fp8 for r in asked.rows)  # a tie buys nothing


@pytest.mark.parametrize("ratio", [0.3, 0.9, 0.975, 0.985, 1.0, 1.01, 1.04, 1.5])
def test_fp8_needs_gain_above_margin(ratio):
    found = Measured({HIGH: Entry("", {}, 1.0), "a": Entry("rowwise e4m3", {}, ratio)})
    choice = choose.choose_by_measurement(found, [fp8.recipe("rowwise")])
    assert (choice.entry is not None) == (ratio < 0.98) and choice.best[1].seconds == ratio


def test_micro_steps_share_weight_cast():
    model = Net()
    found = measured(model, seconds=lambda c, n: 1.0 if n == HIGH else 0.9)  # and 0.45 for the weights
    assert not any(r.fp8 for r in fp8.plan(model, "auto", tokens=TOKENS, measurements=found).rows)
    assert any(r.fp8 for r in fp8.plan(model, "auto", tokens=TOKENS, measurements=found, micro_steps=8).rows)


def test_launch_bound_layer_stays_in_high_precision():
    model = Net()
    found = measured(model, seconds=lambda c, n: (1.0, 0.1) if n == HIGH else (0.2, 3.0))
    plan = fp8.plan(model, "auto", tokens=TOKENS, measurements=found)
    assert not any(r.fp8 for r in plan.rows)
    assert "no compile: in layers with 100%" in predict(plan).warnings[0]


def test_requested_recipe_is_only_candidate():
    model = Net()
    policy = fp8.Policy(
        "blockwise", rules=[{"match": "layers.0.*", "recipe": "auto"}, {"match": "frozen", "recipe": "off"}]
    )
    found = measured(model, policy)
    case = next(c for c in found.cases if c.n == 32)
    assert {n.split(" ")[0] for n in found.cases[case].entries} == {
        "high",
        "blockwise",
        "rowwise",
        "tensorwise",
        "mxfp8",
    }
    assert not any(c.n == 48 for c in found.cases)
    plan = fp8.plan(model, policy, tokens=TOKENS, measurements=found)
    short = {r.name: r.recipe.name for r in plan.rows if r.fp8}
    assert short.pop("layers.0.q") == "rowwise" and set(short.values()) == {"blockwise"}


def test_candidates_and_format_limit_auto():
    model = Net()
    found = measured(model, fp8.Policy("auto", format="hybrid", candidates=("mxfp8", "tensorwise")))
    entries = {e.recipe for m in found.cases.values() for e in m.entries.values()}
    assert entries == {"", "tensorwise hybrid"}  # mxfp8 has no hybrid


def test_ties_select_finest_scales():
    high = Entry("", {}, 1.0)
    fast = {"tensorwise hybrid": 0.50, "blockwise e4m3": 0.51, "rowwise e4m3": 0.60}
    found = Measured({HIGH: high, **{f"{n} on x": Entry(n, {}, s) for n, s in fast.items()}})
    allowed = [fp8.recipe(n.split()[0]) for n in fast]
    assert choose.choose_by_measurement(found, allowed).entry.recipe == "blockwise e4m3"
    assert choose.choose_by_measurement(found, allowed[2:]).entry.recipe == "rowwise e4m3"
    edge = Measured({HIGH: high, "a": Entry("tensorwise hybrid", {}, 0.97), "b": Entry("blockwise e4m3", {}, 0.99)})
    assert choose.choose_by_measurement(edge, allowed).entry.recipe == "tensorwise hybrid"  # the finer one does not win


def test_candidates_include_registry_choice(monkeypatch):
    """A backend with a fast forward alone is measured together with one that can do the rest."""

    class Half(type(registry.get("reference"))):
        name = "half"

        def supports(self, op, what, device, shape):
            return None if op == "fwd" and shape == (64, 32, 32) else "it has a forward of 64 tokens alone"

    monkeypatch.setattr(registry, "_backends", {"reference": registry.get("reference"), "half": Half()})
    cases = [Case("linear", 64, 32, 32), Case("linear", 64, 16, 32)]
    found = [[n for n, _, _ in measure.list_candidates(c, [fp8.recipe("rowwise")], torch.device("cpu"))] for c in cases]
    assert found == [["rowwise e4m3 on half + reference"], ["rowwise e4m3 on reference"]]
    model = Net()
    plan = fp8.plan(
        model, "rowwise", tokens=TOKENS, measurements=measured(model, seconds=lambda c, n: 1.0 if n == HIGH else 0.1)
    )
    row = next(r for r in plan.rows if r.name == "layers.0.q")
    assert {g: s.backend.name for g, s in row.selections.items()} == {
        "fwd": "half",
        "dgrad": "reference",
        "wgrad": "reference",
    }
    assert row.selections["fwd"].reason == "fastest in the measurements"
    assert row.selections["dgrad"].rejected == (("half", "it has a forward of 64 tokens alone"),)


@pytest.mark.parametrize(
    ("spoil", "why"),
    [
        (lambda y: y * float("nan"), "y is not finite"),
        (lambda y: y.flip(0), "y is far from high precision: calc_diff"),
        (lambda y: (_ for _ in ()).throw(RuntimeError("no kernel\nfor this")), "RuntimeError: no kernel"),
    ],
)
def test_invalid_candidate_is_rejected_with_reason(monkeypatch, spoil, why):
    real = measure._Bench.make_fp8_module

    def converted(self, recipe, chosen):
        module = real(self, recipe, chosen)
        if recipe.name == "rowwise":
            module.register_forward_hook(lambda m, a, y: spoil(y))
        return module

    monkeypatch.setattr(measure._Bench, "make_fp8_module", converted)
    model = Net()
    found = measured(model)
    plan = fp8.plan(model, "auto", tokens=TOKENS, measurements=found)
    assert {r.recipe.name for r in plan.rows if r.fp8} == {"blockwise"}
    entry = next(e for m in found.cases.values() for n, e in m.entries.items() if n.startswith("rowwise"))
    assert why in entry.rejected
    only = fp8.plan(model, "rowwise", tokens=TOKENS, measurements=found)
    assert why in next(r.reason for r in only.rows if r.name == "frozen")


def test_experts_and_linears_are_measured_on_cpu():
    """Nothing faked: the modules run, are healthy, and their times are there. A CPU's times decide nothing."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    config = Qwen3MoeConfig(
        hidden_size=32, intermediate_size=48, moe_intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, head_dim=16, num_experts=4, num_experts_per_tok=2, vocab_size=64,
    )  # fmt: skip
    with torch.device("meta"):
        model = Qwen3MoeForCausalLM(config)
    quick = lambda case, calls, device: time_calls(calls, device, warmup=0, rounds=2, budget=0)  # noqa: E731
    found = fp8.measure(model, "auto", None, {"foundation": 24}, device="cpu", timer=quick)
    assert {c.kind for c in found.cases} == {"linear", "experts"} and found.machine.emulated
    for m in found.cases.values():
        assert len(m.entries) == 5 and not [e.rejected for e in m.entries.values() if e.rejected]
        assert all(e.seconds > 0 for e in m.entries.values())
    plan = fp8.plan(model, "auto", tokens={"foundation": 24}, measurements=found)
    assert all(r.times is None for r in plan.rows) and any("emulated on a CPU" in n for n in plan.notes)


def test_cache_stores_measurements(tmp_path):
    model, calls = Net(), []

    def count(case, name):
        calls.append(name)
        return by_size(case, name)

    cache = fp8.MeasurementCache(tmp_path / "deep" / "m.json")
    first = measured(model, seconds=count, cache=cache)
    assert len({str(c) for c in first.cases}) == 3 and calls
    calls.clear()
    seen = []
    again = measured(model, seconds=count, cache=cache, progress=lambda *a: seen.append(a))
    assert again == first and not calls
    assert seen[0][:2] == (0, 3) and seen[-1] == (3, 3, "")
    other = fp8.measure(model, "auto", None, TOKENS, timer=fake(count), cache=cache, machine=Machine("L4", "8.9"))
    assert calls and other.machine.gpu == "L4"  # another GPU measures for itself
    assert len(json.loads(cache.path.read_text())["machines"]) == 2
    calls.clear()
    assert measured(model, "rowwise", seconds=count, cache=cache).cases and not calls  # a part of what is known


def test_cache_of_0_4_0_is_read_without_siblings(tmp_path):
    path = tmp_path / "m.json"
    path.write_bytes((Path(__file__).parents[1] / "planning/files/measurements-0.4.0.json").read_bytes())
    cases = fp8.MeasurementCache(path).load(Machine("Fake H200", "9.0", "999.1", "2.11", "13.0", {"reference": "1"}))
    assert {(c.kind, c.n, c.bias) for c in cases} == {
        ("linear", 256, True),
        ("linear", 128, True),
        ("linear", 128, False),
    }
    assert {e.seconds for m in cases.values() for e in m.entries.values()} == {1e-3, 5e-4}
    case, found = next(iter(cases.items()))
    fp8.MeasurementCache(path).put(Machine("L4", "8.9"), case, found)
    assert "sisters" not in path.read_text() and fp8.MeasurementCache(path).load(Machine("L4", "8.9")) == {case: found}


def test_killed_measurement_keeps_results(tmp_path):
    model, cache, done = Net(), fp8.MeasurementCache(tmp_path / "m.json"), []

    def dies(case, name):
        if name == HIGH:
            done.append(case)
        if len(done) == 3:
            raise KeyboardInterrupt
        return by_size(case, name)

    with pytest.raises(KeyboardInterrupt):
        measured(model, seconds=dies, cache=cache)
    assert len(cache.load(GPU)) == 2 and not list(tmp_path.glob(".*tmp"))
    calls = set()
    measured(model, seconds=lambda c, n: calls.add(c) or by_size(c, n), cache=cache)
    assert calls == {done[2]}


@pytest.mark.parametrize(
    "text",
    [
        "{",
        "[]",
        '{"octavo_measurements": 99}',
        '{"octavo_measurements": 1, "machines": [3]}',
        "[" * 100_000,
        '{"octavo_measurements": 1, "machines": [{"machine": {"gpu": "x"}, "cases": [{"case": '
        '{"kind": "linear", "m": 1, "n": 1, "k": 1}, '
        '"entries": {"bf16": {"recipe": "bf16", "backends": {}, "seconds": "fast"}}}]}]}',
    ],
)
def test_damaged_cache_is_reported(tmp_path, text):
    (tmp_path / "m.json").write_text(text)
    with pytest.raises(fp8.MeasureError, match=r"m.json holds no measurements of this version.*Delete it"):
        fp8.MeasurementCache(tmp_path / "m.json").load(GPU)


def test_cache_path_follows_xdg(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert measurements.default_cache() == tmp_path / "octavo" / "measurements.json"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert measurements.default_cache().parts[-3:] == (".cache", "octavo", "measurements.json")


def test_measurement_requires_tokens():
    with pytest.raises(fp8.MeasureError, match="set the tokens"):
        fp8.measure(Net())
    with pytest.raises(fp8.PlanError, match="measurements also need tokens"):
        fp8.plan(Net(), "auto", measurements=fp8.Measurements(GPU))
    with pytest.raises(fp8.PlanError, match="tokens has no entry for foundation"):
        fp8.measure(Net(), tokens={})


@pytest.mark.parametrize(
    ("sm", "shape", "allowed", "chosen", "why"),
    [
        (None, (8, 8), None, "blockwise", "blockwise by the table"),
        ((8, 0), (8192, 8192), None, None, "no FP8 in hardware at compute capability 8.0"),
        ((8, 9), (8192, 8192), None, "rowwise", "rowwise by the table"),
        ((9, 0), (4096, 4096), None, "blockwise", "blockwise"),
        ((9, 0), (2048, 8192), None, None, "N=2048 <= 2048, where FP8 is known to be slower"),
        ((9, 0), (8192, 1024), None, None, "K=1024 <= 1024"),
        ((9, 0), (4096, 2048), None, None, "N=4096 <= 4096 and K=2048 <= 2048"),
        ((9, 0), (8200, 8192), None, None, "not a multiple of 16"),
        ((9, 0), (1024, 4096), ("tensorwise",), None, "K=4096 <= 4096 and N=1024 <= 1024"),
        ((9, 0), (1025 + 15, 4096), ("tensorwise",), "tensorwise", "tensorwise"),
        ((10, 0), (8192, 8192), None, "mxfp8", "mxfp8"),
        ((12, 0), (8192, 8192), None, "rowwise", "rowwise"),
        ((12, 0), (8192, 8192), ("delayed",), "delayed", "delayed"),
    ],
)
def test_the_documented_table(sm, shape, allowed, chosen, why):
    names = allowed or ("blockwise", "mxfp8", "rowwise", "tensorwise")
    recipe, reason = choose.choose_by_table(sm, shape, {n: fp8.recipe(n) for n in names})
    assert (recipe and recipe.name) == chosen and why in reason


def test_auto_without_measurements_uses_table():
    plan = fp8.plan(Net(), "auto")
    assert {r.recipe.name for r in plan.rows if r.fp8} == {"blockwise"}
    assert any(
        n.startswith("recipe auto: nothing was measured; recipes come from the table in docs/plan.md")
        for n in plan.notes
    )
    assert "auto, not measured: blockwise by the table" in plan.table()
    mixed = fp8.plan(Net(), fp8.Policy("rowwise", rules=[{"match": "frozen", "recipe": "auto"}]))
    assert {r.name: r.recipe.name for r in mixed.rows if r.fp8}["frozen"] == "blockwise"


def test_prediction_sums_times_and_warns():
    model = Net()
    plan = fp8.plan(model, "auto", tokens=TOKENS, measurements=measured(model), micro_steps=4)
    found = predict(plan)
    high = 4 * (3 * 32 + 3 * 16 + 48) * 1e-3
    assert found.linear_high == pytest.approx(high)
    weights = 1 + 0.5 / 4
    assert found.linear_planned == pytest.approx(4 * 1e-3 * (3 * 16 * weights + 3 * 16 + 24 * weights))
    assert set(found.estimated) == {"lm_head"} and found.gain > 0.03 and not found.warnings
    assert found.gain < found.linear_gain
    lots = predict(plan, {"attention": 1e9})
    assert "attention is about" in lots.warnings[0] and "less than 3%" in lots.sentences()[-1]
    none = fp8.plan(model, "auto", tokens=TOKENS, measurements=measured(model, seconds=lambda c, n: 1.0 + (n != HIGH)))
    assert "small GEMMs: layers with 100% of the linear time" in predict(none).warnings[0]
    assert predict(fp8.plan(model, "auto", tokens=TOKENS)) is None


def test_plan_lists_rejected_backends():
    lines = fp8.plan(Net(), "blockwise").backends()
    assert {(x.gemm, x.shape) for x in lines} == {
        (g, s) for g in ("fwd", "dgrad", "wgrad") for s in ((32, 32), (16, 32), (48, 32))
    }
    assert all(x.backend == "reference" and dict(x.rejected).get("triton") for x in lines)


@pytest.mark.parametrize("tokens", [{"foundation": -5}, {"foundation": 0}, {"foundation": 2.5}])
def test_invalid_tokens_are_rejected(tokens):
    with pytest.raises(fp8.PlanError, match="tokens has .* whole number of tokens per forward"):
        fp8.measure(nn.Sequential(nn.Linear(16, 16)), "auto", tokens=tokens)
