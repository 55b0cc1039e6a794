"""The suite `step`: candidates by name, one step by kernel, and captures that fail. And `decode`, on a tiny model."""

from __future__ import annotations

import functools
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from octavo import bench
from octavo.bench import Bench, peers, record, suite_decode
from octavo.bench.bench import BenchError, Work
from octavo.bench.profiles import kernel_profile
from octavo.bench.profiles.kernel_profile import KINDS, kind_of, own_kernels, profile_call, summarize
from octavo.bench.record import Result, Row
from octavo.bench.suite_step import step
from octavo.bench.suite_step.candidates import default_names, parse
from octavo.fp8 import measuring
from octavo.train.estimate.step_time.cluster import GPUS

CPU = torch.device("cpu")


def session(*candidates: str, **settings: object) -> Bench:
    return Bench(CPU, small=True, candidates=candidates, **settings)  # type: ignore[arg-type]


def test_candidates_have_one_name_and_a_baseline() -> None:
    full = parse("blockwise fused compiled chunked fp8 head fp8 moments again", "bf16")
    assert str(full) == "blockwise fused compiled chunked fp8 head fp8 moments again"
    preset = parse("blockwise fused compiled chunked fp8 head gradients fp8 moments", "bf16")
    assert preset.fp8_head_gradients and not preset.fp8_head and preset.fp8_moments
    assert full.fp8_head and not full.fp8_head_gradients and full.fp8_moments and full.again and not full.graph
    names = default_names(session())
    assert [str(parse(name, "fp32")) for name in names] == names and len(set(names)) == len(names)
    baselines = {
        "bf16 compiled": "bf16 compiled",
        "bf16 compiled chunked": "bf16 compiled",
        "bf16 compiled chunked fp8 moments": "bf16 compiled",
        "tensorwise compiled": "bf16 compiled",
        "tensorwise fused compiled chunked": "bf16 compiled chunked",
        "blockwise chunked graph": "bf16 compiled chunked",
    }
    assert {name: parse(name, "bf16").baseline("bf16") for name in baselines} == baselines


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("fp9 compiled", "a name is one of bf16, "),
        ("blockwise compiled fused", "in this order"),
        ("blockwise compiledly", "in this order"),
        ("bf16 fused", "bf16 casts nothing"),
        ("blockwise fp8 head", "add `chunked`"),
        ("blockwise fp8 head gradients", "add `chunked`"),
        ("blockwise chunked fp8 head gradients fp8 head", "name one of both"),
        ("blockwise compiled graph", "a run does not capture them either"),
    ],
)
def test_impossible_candidate_is_refused_with_a_reason(name: str, why: str) -> None:
    with pytest.raises(BenchError, match=why):
        parse(name, "bf16")


def test_unknown_candidate_of_a_suite_is_reported() -> None:
    result = bench.run(["gemm"], session("fp32", "fp33", cases="odd wgrad"))
    assert [r.candidate for r in result.rows] == ["fp32"] and "wgrad" in result.rows[0].case
    assert [(a.candidate, a.why) for a in result.absent] == [("fp33", "no case has a candidate of this name")]


@pytest.mark.long
def test_step_suite_runs_every_kind_of_candidate(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two recipes, in two rounds; graphs that Inductor would compile run as they were traced."""
    monkeypatch.setattr(peers, "RECIPES", ("blockwise", "mxfp8"))
    quick = functools.partial(measuring.time_calls, warmup=0, rounds=2, budget=0.0)
    monkeypatch.setattr("octavo.bench.bench.measuring.time_calls", quick)
    result = bench.run(["step"], session(layers=1))
    assert not result.absent and not result.cut
    steps, profiles = ([r for r in result.rows if bool(r.kernels) == profiled] for profiled in (False, True))
    assert [r.candidate for r in steps] == [r.candidate for r in profiles] == default_names(session())
    assert len(steps) == 4 + 5 * 2 and all(r.kernels["gemm"] > 0 for r in profiles)
    assert all(sum(r.kernels.values()) == pytest.approx(r.seconds) for r in profiles)
    head, *lines = record.columns_table(result)
    assert head[3:] == ("fp32 compiled", "fp32 compiled chunked", "fp32 compiled chunked fp8 moments")
    assert len(lines) == len(steps) and [lines[n][3 + n] for n in range(3)] == ["1.00x"] * 3
    chunked = [r for r in steps if "chunked" in r.candidate]
    assert {r.baseline for r in chunked[2:]} == {"fp32 compiled chunked"}
    assert {r.note for r in chunked} == {chunked[0].note} and "attention by flash" in chunked[0].note


class Replayed:
    """A graph without a GPU: a capture runs the work, and a replay runs it again; ``fails`` plants an error."""

    fails: BaseException | None = None

    def __init__(self, device: torch.device) -> None:
        assert device == CPU

    def capture(self, work: Callable[[], Tensor]) -> Tensor:
        if self.fails is not None:
            torch.randn(3)
            raise self.fails
        self.replay = work
        return work()


def test_captured_candidate_trains_and_runs_last(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step, "new_graph", Replayed)
    result = bench.run(["step"], session("fp32 chunked graph", "blockwise graph", "fp32", layers=1))
    steps = [row for row in result.rows if row.tokens]
    assert [row.candidate for row in steps] == ["fp32", "fp32 chunked graph", "blockwise graph"]
    assert not result.absent and not result.cut and "(1 blocks), 24 tokens" in steps[0].case
    assert steps[0].parts and not steps[1].parts


def test_failed_capture_is_reported_and_no_other_graph_follows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step, "new_graph", Replayed)
    monkeypatch.setattr(Replayed, "fails", torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9 GiB"))
    result = bench.run(["step"], session("fp32 graph", "blockwise graph", "fp32", layers=1))
    assert [row.candidate for row in result.rows if row.tokens] == ["fp32"]
    assert [(a.candidate, a.why[:34]) for a in result.absent] == [("fp32 graph", "OutOfMemoryError: CUDA out of memo")]
    assert len(result.cut) == 1 and "blockwise graph: the capture of fp32 graph failed" in result.cut[0]
    apart = session("fp32 graph", "blockwise graph", layers=1, apart=True)
    result = bench.run(["step"], apart)
    assert len(result.absent) == 1 and apart.unfinished and not result.cut, "the next process runs the next one"
    monkeypatch.undo()
    result = bench.run(["step"], session("fp32 graph", layers=1))
    assert [a.why for a in result.absent] == ["CUDA graphs need a GPU, and this runs on cpu"]


def test_each_candidate_can_have_its_own_process() -> None:
    first = session(apart=True)
    for name in "ab":
        first.case("step", "case", "a", {name: lambda: lambda: None}, Work())
    assert [row.candidate for row in first.result.rows] == ["a"] and first.unfinished
    second = session(apart=True, skip={("case", "a")})
    for name in "ab":
        second.case("step", "case", "a", {name: lambda: lambda: None}, Work())
    assert [row.candidate for row in second.result.rows] == ["b"] and not second.unfinished


NAMES = {
    "nvjet_tst_128x256_64x4_2x1_v_bz_coopA_TNT": "gemm",
    "void cutlass::device_kernel<at::cuda::detail::enable_3x_kernel_for_sm9x<cutlass::gemm::kernel": "gemm",
    "void cublasLt::splitKreduce_kernel<32, 16, int, float>": "gemm",
    "void pytorch_flash::flash_bwd_dq_dk_dv_loop_seqk_parallel_kernel<Flash_bwd_kernel_traits<cutlass": "attention",
    "cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_7_128x128x128_4x1x1": "attention",
    "fmha_cutlassF_bf16_aligned_64x128_rf_sm80": "attention",
    "triton_poi_fused__scaled_dot_product_flash_attention_backward_add_12": "generated",
    "triton_red_fused_mm_mul_sum_3": "generated",
    "void at::native::multi_tensor_apply_kernel<at::native::FusedOptimizerTensorListMetadata<3>, FusedAdamMath": (
        "optimizer"
    ),
    "adamw_step": "optimizer",
    "cast_kernel": "octavo",
    "rmsnorm_tile": "octavo",
    "gemm_kernel": "gemm",
    "void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add": "rest",
    "Memcpy DtoD (Device -> Device)": "rest",
    "aten::addmm": "gemm",
    "aten::_scaled_dot_product_flash_attention_for_cpu": "attention",
    "octavo::linear": "octavo",
}


def test_kernels_have_kinds_and_sums() -> None:
    assert {name: kind_of(name) for name in NAMES} == NAMES
    assert {"cast_kernel", "swiglu_backward", "attend_kernel"} <= own_kernels()
    profile = summarize([("nvjet", 2.0), ("cast_kernel", 1.0), ("nvjet", 3.0), ("x" * 500, 0.5)], 10.0)
    expected = dict.fromkeys(KINDS, 0.0) | {"gemm": 5.0, "octavo": 1.0, "rest": 0.5, "idle": 3.5}
    assert profile.seconds == 10.0 and profile.kinds == expected
    assert list(profile.names) == ["nvjet", "cast_kernel", "x" * kernel_profile.LETTERS]
    assert len(summarize([(str(n), 1.0) for n in range(99)], 1.0).names) == kernel_profile.NAMES


def test_profiled_call_is_a_row_after_the_timed_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """The timed row is reported first, and stays where the profiler fails."""
    x, sent = torch.ones(64, 64), []
    there = session(on_result=lambda result: sent.append([row.kernels != {} for row in result.rows]))
    there.case("step", "one", "a", {"a": lambda: lambda: x @ x}, Work(), profile=lambda call: profile_call(call, CPU))
    timed, profiled = there.result.rows
    assert sent[0] == [False] and profiled.case == "one, one call by kernel" and profiled.kernels["gemm"] > 0
    assert record.kernel_table(there.result)[0][3:] == KINDS and not record.kernel_table(Result("cpu", True, [timed]))

    def refused(call: object) -> object:
        raise RuntimeError("CUPTI_ERROR_INSUFFICIENT_PRIVILEGES")

    there.case("step", "two", "a", {"a": lambda: lambda: x @ x}, Work(), profile=refused)
    assert there.result.rows[-1].case == "two" and "INSUFFICIENT_PRIVILEGES" in there.result.cut[0]


def test_decode_counts_what_a_step_reads() -> None:
    names = ("fp32", "blockwise, cache in FP8")
    result = bench.run(["decode"], session(*names))
    rows = [row for row in result.rows if row.tokens]
    assert [row.candidate for row in rows] == list(names) and not result.absent and not result.cut
    assert {row.tokens for row in rows} == {suite_decode.FEW}
    plain = suite_decode.bytes_read(session(), None, "bf16", 3, 24)
    coded = suite_decode.bytes_read(session(), "blockwise", "fp8", 3, 24)
    assert [row.bytes for row in rows] == [sum(plain.values()), sum(coded.values())]
    assert plain["weights"] / 4 < coded["weights"] < plain["weights"]
    assert coded["cache"] / plain["cache"] == pytest.approx((32 + 4) / (32 * 4))  # heads of 32
    assert result.ratio(rows[1]) == rows[0].seconds / rows[1].seconds, "of times, although they read different bytes"


def test_share_of_the_bandwidth_bound() -> None:
    row = Row("decode", "c", "bf16", 2e-3, bytes=4.8e9, tokens=64)
    result = Result("NVIDIA H200", False, rows=[row])
    assert result.bandwidth_share(row) == pytest.approx(0.5) and result.to_json()["rows"][0]["bandwidth_share"]
    assert "32,000 tokens/s, 2.4e+03 GB/s, 50 % of the bandwidth bound" in record.table(result)[0][5]
    assert result.bandwidth_share(Row("cast", "c", "copy", 1.0, bytes=1.0)) is None
    assert Result("some GPU", False).bandwidth_share(row) is None


def test_wgrad_is_also_timed_with_vectors_of_x() -> None:
    name = "blockwise_1d reference"
    result = bench.run(["gemm"], session("fp32", "blockwise reference", name, cases="small"))
    assert [r.case.split()[1] for r in result.rows if r.candidate == name] == ["wgrad"]


def test_speeds_of_gpus_are_those_of_the_plan() -> None:
    """Two tables, because a report needs no package of a run: they may not differ."""
    for name, (bf16, _, _, bandwidth, *_) in GPUS.items():
        if name.upper() in record.BANDWIDTH:
            assert (record.BF16_PEAK[name.upper()], record.BANDWIDTH[name.upper()]) == (bf16, bandwidth)
    assert len({name.upper() for name in GPUS} & record.BANDWIDTH.keys()) == 4
