"""The verdict over whole runs, and the page: complete, offline, and honest about what is missing."""

from __future__ import annotations

import dataclasses
import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from synthetic_runs import LAYERS, health, held, losses, plan

from octavo.config import override
from octavo.report import LayerHealth, ReportError, Trial
from octavo.report.evidence.trust_table import Check, loss_gap, seed_noise
from octavo.report.run import page_parts
from octavo.report.run.page_parts import format_bytes, plan_groups
from octavo.report.run.plots import health_figure, running_gap, running_noise, smooth
from octavo.report.trial.judge import Verdict
from octavo.report.trial.judge import judge as judge_runs
from octavo.report.trial.report_page import Interview, computed_on, write
from octavo.report.trial.reuse import read_finished


def judge(records):
    """The verdict with sound held-out answers: what else there is decides."""
    return judge_runs(records, Trial(held([run for run, _ in records])))


def records_of(made):
    return [(run, read_finished(run)) for run in made.runs]


@pytest.fixture(scope="module")
def shared(tmp_path_factory):
    return {}


@pytest.fixture
def page(trial, tmp_path: Path, shared):
    """One written report, shared by the tests that only read it."""
    if not shared:
        records = records_of(trial(tmp_path / "trial", recipes=("blockwise", "tensorwise")))
        verdict = judge(records)
        paths = write(verdict, records, tmp_path / "report")
        shared.update(verdict=verdict, paths=paths, html=paths[0].read_text(), json=json.loads(paths[1].read_text()))
        shared["images"] = {p.name: Image.open(p).size for p in paths[2:]}
    return shared


def test_verdict_is_in_the_first_line(page) -> None:
    assert page["verdict"].status == "pass" and page["verdict"].reasons == ()
    body = page["html"].split("<body>", 1)[1].strip()
    assert body.startswith('<h1><span class="pill pass">pass</span> blockwise pass, tensorwise pass</h1>')
    opened = body.split("<h3>Not decided here</h3>")
    assert "<h2>Claims</h2>" in opened[0] and 'class="edge"' in opened[0]
    assert 'class="pill untried">untried' in body and "use --forks 3" in body


def test_page_has_every_section(page) -> None:
    heads = re.findall(r"<h2>(.*?)</h2>", page["html"])
    assert heads == [
        "Claims", "Checks", "Loss", "Accuracy", "The plan", "Health of the FP8 layers", "Memory", "Speed",
        "Proof that FP8 ran", "Environment", "Configuration",
    ]  # fmt: skip
    for text in ("emulated FP8", "per-tensor amax is local", "lm_head stays in high precision", *LAYERS[:1]):
        assert text in page["html"]


def test_zero_underflow_is_shown_as_exact_zero(trial, tmp_path: Path) -> None:
    records = records_of(trial(tables={1: health(underflow=0.0)}))
    html = write(judge(records), records, tmp_path / "report")[0].read_text()
    assert re.search('data-as="underflow x">0</td>', html) and ">0.000 %" not in html


def test_page_opens_offline(page) -> None:
    assert not re.findall(r"""(?:https?:)?//[\w.]""", page["html"])
    links = re.findall(r"""(?:src|href|url)\s*[=(]\s*["']?([^"')\s>]+)""", page["html"])
    assert links and all(link.startswith("#") for link in links)
    assert "<script" not in page["html"]


def test_page_is_well_formed_and_escaped(page) -> None:
    class Checker(HTMLParser):
        open: list[str] = []
        ids: list[str] = []
        void = {"meta", "br", "wbr", "link", "img", "input", "hr"}

        def handle_starttag(self, tag, attrs):
            self.ids += [v for k, v in attrs if k == "id"]
            if tag not in self.void:
                self.open.append(tag)

        def handle_endtag(self, tag):
            assert self.open.pop() == tag

    checker = Checker()
    checker.feed(page["html"])
    assert checker.open == []
    assert len(checker.ids) == len(set(checker.ids)), "two elements share an id"
    assert "some &lt;cpu&gt;" in page["html"]


def test_page_follows_dark_mode(page) -> None:
    drawings = re.findall(r"<svg.*?</svg>", page["html"], flags=re.DOTALL)
    assert len(drawings) == 2 * 5  # loss, gap, health of each recipe, memory: wide and narrow
    for drawing in drawings:
        assert "var(--ink)" in drawing and "#22262b" not in drawing


def test_json_contains_all_measurements(page) -> None:
    data = page["json"]
    assert data["verdict"] == {"status": "pass", "line": page["verdict"].line, "reasons": [], "exit_code": 0}
    assert [run["kind"] for run in data["arms"]] == ["reference", "noise", "fp8", "fp8"]
    run = data["arms"][2]
    assert run["gap"] == pytest.approx(0.001)
    assert len(run["curve"]["loss"]) == 100 and len(run["health"]) == len(LAYERS)
    assert run["plan"]["rows"] and run["proof"]["fp8_gemms"] == 30 and run["environment"]["torch"] == "2.13"
    assert {check["status"] for check in data["checks"]} == {"pass", "untried"}
    accuracy = data["checks"][0]
    assert accuracy["low"] < accuracy["figure"] < accuracy["high"] and accuracy["margin"] == 0.01


def test_plots_are_written_next_to_the_page(page) -> None:
    names = {"claims.png", "loss.png", "gap.png", "memory.png", "health-fp8-blockwise.png", "health-fp8-tensorwise.png"}
    assert set(page["images"]) == names
    assert all(width > 800 and height > 200 for width, height in page["images"].values())


def test_page_renders_with_missing_figures(trial, tmp_path: Path) -> None:
    """No health, no proof, no evaluation, no memory, no environment, a NaN: said, and never a pass."""
    made = trial(tables=None, proof=None, plan_json=None, environment={})
    records = [
        (run, dataclasses.replace(record, eval=None, memory={}, losses=np.append(record.losses[:-1], np.nan)))
        for run, record in ((run, read_finished(run) or _read(run)) for run in made.runs)
    ]
    verdict = judge(records)
    assert verdict.status == "fail" and verdict.exit_code == 1
    assert any("proof.json" in reason for reason in verdict.reasons)
    html = write(verdict, records, tmp_path / "report")[0].read_text()
    for text in ("The run has no proof", "No health figures were recorded", "recorded no memory figures"):
        assert text in html
    assert "Accuracy" not in re.findall(r"<h2>(.*?)</h2>", html)
    json.loads((tmp_path / "report" / "report.json").read_text())


def _read(run):
    from octavo.report import read

    return read(run.cfg.run.dir)


@pytest.mark.parametrize(
    ("change", "status", "reason"),
    [
        ({"tables": {1: health(underflow=0.06)}}, "fail", "Underflow, fwd and dgrad"),
        ({"tables": {1: health(sqnr=22.0)}}, "warn", "SQNR, E4M3"),
        ({"tables": {1: health(sqnr=22.0)}, "plan_json": plan(fmt="hybrid")}, "warn", "SQNR, E4M3"),
        ({"tables": {1: health(cosine=0.9)}}, "warn", "Cosine"),
        ({"tables": {1: health(nan_codes=1)}}, "fail", "NaN codes"),
        ({"tokens": 999}, "fail", "Same data"),
        ({"environment": {"torch": "2.12"}}, "warn", "Same machine"),
        ({"skipped": (5,)}, "warn", "Steps skipped"),
        ({"skipped": tuple(range(1, 100, 2))}, "fail", "Steps skipped"),
        ({"proof": {"fp8_gemms": 0}}, "fail", "FP8 GEMMs"),
    ],
    ids=lambda v: v if isinstance(v, str) else None,
)
def test_one_fault_decides_the_verdict(trial, change: dict, status: str, reason: str) -> None:
    verdict = judge(records_of(trial(**change)))
    assert verdict.status == status
    assert all(reason in r for r in verdict.reasons), verdict.reasons
    assert verdict.line.startswith(f"{status.upper()}: FP8 blockwise compared with fp32: held-out accuracy pass")
    assert verdict.data["arms"][2]["status"] == status


def test_hybrid_uses_e5m2_threshold_for_dy(trial) -> None:
    """22 dB are fine for E5M2 dy and too few for E4M3: the plan says which operand is which."""
    table = health()
    for row in table.values():
        row["dy"]["sqnr"] = row["dy_wgrad"]["sqnr"] = 22.0
    assert judge(records_of(trial(tables={1: table}, plan_json=plan("tensorwise", "hybrid")))).status == "pass"
    assert judge(records_of(trial(tables={1: table}))).status == "warn"


def test_gradients_in_e5m2_miss_no_e4m3_operand(trial) -> None:
    only_dy = {name: {"dy": figures["dy"], "nan_codes": 0} for name, figures in health().items()}
    records = records_of(trial(tables={1: only_dy}, plan_json=plan(fmt="hybrid")))
    names = [check.name for check in judge(records).checks]
    assert "sqnr_e5m2" in names and "sqnr_e4m3" not in names
    without = records_of(trial(tables={}))
    assert any(check.name == "sqnr_e4m3" and check.status == "warn" for check in judge(without).checks)


def test_runs_with_different_log_steps_are_matched_by_step(trial) -> None:
    """A run with log_every=10 also writes its health steps: the gap must not shift by them."""
    records = records_of(trial())
    thinned = []
    for run, record in records:
        keep = np.isin(record.steps, [*range(10, 101, 10), *([25, 75] if run.kind == "fp8" else [])])
        run = dataclasses.replace(run, cfg=override(run.cfg, ["run.log_every=10"]))
        left = {"steps": record.steps[keep], "losses": record.losses[keep], "rates": record.rates[keep]}
        thinned.append((run, dataclasses.replace(record, **left, tokens=record.steps[keep] * 1.0)))
    verdict = judge(thinned)
    assert verdict.status == "pass"
    assert verdict.data["arms"][2]["gap"] == pytest.approx(0.001)


def test_truncated_metrics_fail(trial) -> None:
    """Lines taken out of a run's metrics shift its mean without a trace in the steps that both runs have."""
    made = trial()
    file = Path(made.runs[2].cfg.run.dir) / "metrics.jsonl"
    lines = file.read_text().splitlines()
    file.write_text("\n".join(lines[:9] + lines[59:]) + "\n")
    verdict = judge(records_of(made))
    assert verdict.status == "fail"
    assert any("Steps recorded: metrics.jsonl is missing 50 steps (10, 11" in reason for reason in verdict.reasons)


def test_verdict_needs_reference_noise_and_fp8_runs(trial) -> None:
    records = records_of(trial())
    with pytest.raises(ReportError, match="missing: noise"):
        judge([r for r in records if r[0].kind != "noise"])


def test_smooth_and_running_gap() -> None:
    values = np.array([1.0, np.nan, 3.0, 5.0])
    assert smooth(values, 1)[0] == 1.0 and np.isnan(smooth(values, 1)[1])
    assert smooth(values, 3).tolist() == [1.0, 2.0, 4.0, 4.0]
    reference = losses(50)
    gap = running_gap(reference * 1.02, reference)
    assert gap == pytest.approx(np.full(50, 0.02))
    other = losses(50, 0.01, seed=1)
    assert running_gap(other, reference)[-1] == pytest.approx(loss_gap(other, reference))
    assert running_noise(other, reference)[-1] == pytest.approx(seed_noise(other, reference))


def test_interleaved_components_are_labelled_once() -> None:
    """Qwen3-VL's projector lies between blocks of its tower: names would lie over each other."""
    layers = [f"{name}.{n}" for name in ("tower", "merger", "tower2", "merger2", "decoder") for n in range(3)]
    health = [LayerHealth(name, {"x": 31.0}, {"x": 0.0}, {}, None, 0) for name in layers]
    components = {name: name.split(".")[0].rstrip("2") for name in layers}
    names = [text.get_text() for text in health_figure(health, components, "FP8").axes[0].texts]
    assert sorted(name for name in names if name in components.values()) == ["decoder", "merger", "tower"]


def test_plan_groups_merge_layers_that_differ_in_number() -> None:
    groups = plan_groups(plan())
    assert [g["count"] for g in groups] == [2] * 5 + [1]
    assert groups[0]["pattern"] == "model.visual.blocks.*.attn.qkv" and groups[0]["recipe"] == "blockwise e4m3"
    assert groups[0]["share"] == pytest.approx(0.18)
    assert plan_groups({}) == []
    mixed = {"name": "up", "recipe": {"name": "tensorwise", "fwd": "rowwise", "dgrad": "bf16", "wgrad": "bf16"}}
    (group,) = plan_groups({"rows": [mixed]})
    assert group["recipe"] == "tensorwise (fwd rowwise; dgrad, wgrad in high precision)"


def test_bytes_are_formatted_with_units() -> None:
    assert [format_bytes(n) for n in (0, 512, 2048, 3 * 2**20, 5 * 2**30)] == [
        "0",
        "0.5 KiB",
        "2.0 KiB",
        "3.0 MiB",
        "5.0 GiB",
    ]


@pytest.mark.parametrize(
    ("environment", "kind"),
    [
        ({}, "cpu"),
        ({"gpus": [{"name": "NVIDIA H200"}]}, "gpu"),  # of 0.4.0
        ({"gpus": [{"name": "NVIDIA H200"}], "accelerator": {"type": "cuda"}}, "gpu"),
        ({"gpus": [{"name": "NVIDIA H200"}], "accelerator": {"type": "cpu"}}, "cpu"),  # OCTAVO_DEVICE
        ({"gpus": [], "accelerator": {"type": "npu"}}, "npu"),
    ],
)
def test_page_names_the_device_that_computed(environment: dict, kind: str) -> None:
    assert computed_on(environment) == kind


@pytest.mark.parametrize(
    ("status", "check", "headline"),
    [
        ("pass", None, "FP8 blockwise answers as well as fp32, within the margin"),
        ("fail", ("accuracy", "Held-out accuracy"), "FP8 blockwise is worse than fp32: held-out accuracy"),
        ("fail", ("fp8_gemms", "FP8 GEMMs ran where planned"), "FP8 blockwise: FP8 GEMMs ran where planned"),
        ("fail", ("nan_codes", "NaN codes in an applied step"), "FP8 blockwise: NaN codes in an applied step"),
        (
            "warn",
            ("accuracy", "Held-out accuracy"),
            "FP8 blockwise beats fp32 beyond the margin: held-out accuracy",
        ),
        ("undecided", ("loss_forks", "Loss of forks"), "FP8 blockwise: loss of forks"),
    ],
)
def test_headline_has_at_most_twelve_words(status: str, check: tuple[str, str] | None, headline: str) -> None:
    passed = Check("accuracy", "Held-out accuracy", "FP8 blockwise", 0.0, "", "", "pass", "", -0.01, 0.01, 0.03)
    other = () if check is None else (Check(*check, "FP8 blockwise", 0.0, "", "", status, ""),)
    arms = [{"kind": "fp8", "label": "FP8 blockwise", "failure": "", "status": status, "steps": 9}]
    verdict = Verdict(status, "", (), (*other, passed), {"arms": arms, "reference_dtype": "fp32"})
    assert verdict.headline.startswith(headline) and len(verdict.headline.split()) <= 12
    arms[0]["failure"] = "step 9: weights"
    assert verdict.headline == "FP8 blockwise failed after step 9"


def test_interval_beyond_the_axis_keeps_its_numbers_and_the_edge_is_shown(tmp_path: Path) -> None:
    shown = "-5.0 % (-80 % to +70 %)"
    wide = Check("loss_forks", "Loss of forks", "FP8", -0.05, shown, "interval", "undecided", "", -0.8, 0.7, 0.0025)
    (tmp_path / "one.jinja").write_text('{% import "parts.html.jinja" as parts %}{{ parts.claim(claim, "") }}')
    html = page_parts.render("one.jinja", tmp_path, claim=wide)
    assert shown in html and html.count('class="beyond"') == 2 and 'class="edge"' in html
    assert 'class="dot"' not in html, "the estimate is beyond the axis"


def test_claims_without_a_margin_or_with_odd_figures_are_drawn_as_text(tmp_path: Path) -> None:
    (tmp_path / "one.jinja").write_text('{% import "parts.html.jinja" as parts %}{{ parts.claim(claim, "") }}')
    shown = Check("accuracy", "Held-out accuracy", "FP8", 0.01, "+1 %", "no margin", "reported", "so it is", -0.1, 0.1)
    html = page_parts.render("one.jinja", tmp_path, claim=shown)
    assert "+1 %" in html and "Passes with" not in html and "So it is." in html and "interval" not in html
    for figure, low in ((float("nan"), float("nan")), (None, -0.1)):
        odd = dataclasses.replace(shown, status="undecided", margin=0.01, figure=figure, low=low)
        assert "nan" not in page_parts.render("one.jinja", tmp_path, claim=odd)


# --- on a telephone ---------------------------------------------------------------------------------------------------

PHONE = 370  # pixels of a page 400 pixels wide that a drawing has


def test_narrow_drawings_can_be_read_on_a_telephone(page) -> None:
    """Each wide drawing has a narrow one, whose smallest text is at least 9.5 pixels high there."""
    pattern = r'<div class="wide"><svg.*?</svg>\s*</div><div class="narrow">(<svg.*?</svg>)\s*</div>'
    pairs = re.findall(pattern, page["html"], re.DOTALL)
    assert len(pairs) == page["html"].count('<div class="wide">') == 5
    for drawing in pairs:
        width = float(re.search(r'viewBox="0 0 ([\d.]+)', drawing)[1])
        sizes = [float(size) for size in re.findall(r'<text style="[^"]*?font-size: ([\d.]+)px', drawing)]
        assert sizes and min(sizes) * PHONE / width >= 9.5
        places = [float(x) for x in re.findall(r'<text[^>]* x="(-?[\d.]+)"', drawing)]
        assert places and all(0 <= x <= width for x in places)


def test_tables_on_a_telephone_carry_the_heads_of_their_columns(page) -> None:
    for table in re.findall(r"<table[^>]*inline.*?</table>", page["html"], re.DOTALL):
        heads = re.findall(r'<th class="n">(.*?)</th>', table)
        assert heads and table.count("data-as=") % len(heads) == 0, heads


def test_single_step_is_a_table_and_no_plot(trial, tmp_path: Path) -> None:
    records = [(run, replace_steps(record, 1)) for run, record in records_of(trial())]
    html = write(judge(records), records, tmp_path / "report")[0].read_text()
    assert 'aria-label="loss' not in html and "<td>high precision</td>" in html and "mean loss" in html


def replace_steps(record: Any, steps: int) -> Any:
    arrays = {key: getattr(record, key)[:steps] for key in ("steps", "losses", "tokens", "tokens_per_s", "rates")}
    return dataclasses.replace(
        record, **arrays, figures={key: values[:steps] for key, values in record.figures.items()}
    )


def test_answer_in_words_has_no_picture_and_no_mark(trial, tmp_path: Path) -> None:
    records = records_of(trial())
    row = {"question": "What does `a` do?", "answer": "", "truth": "<b>", "right": None}
    interview = Interview("Asked about a function", "FP8 blockwise", [row], note="Pretrained weights.")
    html = write(judge(records), records, tmp_path / "report", interview)[0].read_text()
    part = html[html.index("Asked about a function") : html.index("<h2>Claims")]
    assert "<img" not in part and "pill" not in part and "(nothing)" in part and "&lt;b&gt;" in part
    assert "Pretrained weights." in part
