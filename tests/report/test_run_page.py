"""The page of a run, and of several: what it holds, how large it may get, and what is refused."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest
from synthetic_runs import CONFIG, GOOD_PROOF, health, losses, plan, write_run

from octavo.report import ReportError
from octavo.report.run import run_page
from octavo.report.run.history import POINTS, History, Series

CONFIG = re.sub(r"path: (?=\w)", "path: /data/", CONFIG)  # as a run resolves them
OLD = Path(__file__).parents[1] / "made_by_0_4_0/runs"


def run_of(home: Path, seed: int = 0, config: str = CONFIG, **more) -> Path:
    text = config.replace("hf: false", f"hf: false, dir: {home}, seed: {seed}")
    options = {"tables": {1: health(), 50: health(sqnr=28.0)}, "plan_json": plan(), "proof": GOOD_PROOF} | more
    return write_run(home, losses(100, 0.01 * seed, seed), config=text, **options)


def page_of(*runs: Path, out: Path) -> str:
    page, image = run_page.write_page(run_page.read_runs(runs), out)
    assert page == out and image.read_bytes().startswith(b"\x89PNG")
    return page.read_text()


def test_page_of_one_run(tmp_path: Path) -> None:
    home = run_of(tmp_path / "first")
    row = {"step": 50, "file": "t.json", "row": 0, "prompt": "<b>?", "wanted": "9", "said": "0", "right": False,
           "reward": None}  # fmt: skip
    (home / "answers.jsonl").write_text(json.dumps(row) + "\n" + '{"step": 100, "fi')
    (home / "memory.json").write_text('{"bytes": {"weights": 4800000, "workspace": 1048576}}')
    html = page_of(home, out=home / "page.html")
    assert re.findall(r"<h2>(.*?)</h2>", html) == [
        "Curves", "Held-out data", "Answers", "Health of the FP8 layers", "Memory", "The plan", "Proof that FP8 ran",
        "Environment", "Configuration",
    ]  # fmt: skip
    assert '<h1><span class="pill pass">finished</span> first: step 100 of 100' in html
    for said in ("&lt;b&gt;?", ">wrong<", "98.0 %", "94.0 %", "28.0 dB", "1.0 MiB", "predicted", "per-tensor amax is"):
        assert said in html, said
    assert not re.findall(r"""(?:https?:)?//[\w.]""", html) and "<script" not in html
    assert "var(--fp8-0)" in html and "#c8571b;" not in html.split("</style>")[1]
    ids = re.findall(r'\bid="([^"]+)"', html)
    assert len(ids) == len(set(ids)), "two elements share an id"


def test_page_of_several_runs(tmp_path: Path) -> None:
    """Runs of one configuration but for the seed get an interval: here of (1, 3) around 2."""
    homes = [run_of(tmp_path / name / "run", seed) for name, seed in (("a", 0), ("b", 1))]
    other = run_of(tmp_path / "c/run", config=CONFIG.replace("tiny}", "tiny}\nfp8: {recipe: rowwise}"))
    for home, value in zip(homes, (1.0, 3.0), strict=True):
        lines = [json.loads(line) | {"loss": value} for line in (home / "metrics.jsonl").read_text().splitlines()]
        (home / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines if "eval" not in line))
    html = page_of(*homes, other, out=tmp_path / "beside.html")
    assert "<h1>3 runs of phase sft" in html and html.count('class="key"') == 3
    assert "2 seeds of one configuration: a/run, b/run" in html
    assert re.search(r"loss, last twentieth</td><td class=\"n\">2</td><td class=\"n\">-10.71 to 14.71</td>", html)
    differ = html.split("Settings that differ")[1].split("</table>")[0]
    assert [re.sub("<wbr>", "", key) for key in re.findall(r"<code>(.*?)</code>", differ)] == ["fp8.recipe", "run.seed"]


@pytest.mark.parametrize(
    "name", ["lora", "stopped_fp8_weights", *(pytest.param(n, marks=pytest.mark.long) for n in ("finished", "stopped"))]
)
def test_runs_of_version_0_4_0_have_a_page(name: str, tmp_path: Path) -> None:
    html = page_of(OLD / name, out=tmp_path / "page.html")
    assert f"{'not finished' if 'stopped' in name else 'finished'}</span> {name}: step" in html
    assert "Seconds per step" not in html and "Tokens per second" in html


def test_invalid_folders_are_rejected(tmp_path: Path) -> None:
    good = run_of(tmp_path / "good")

    def refused(*runs: Path) -> str:
        with pytest.raises(ReportError) as found:
            run_page.read_runs(runs)
        return str(found.value)

    assert "is not a directory; give the run directory" in refused(tmp_path / "nowhere")
    (tmp_path / "empty").mkdir()
    assert "has no config.yaml, so it is not a run directory" in refused(tmp_path / "empty")
    young = run_of(tmp_path / "young")
    (young / "metrics.jsonl").write_text('{"step": 1, "lo')
    assert "has no training step yet" in refused(young)
    (young / "metrics.jsonl").write_text('{"step": 1, "loss": "much"}\n')
    assert "metrics.jsonl:1" in refused(young) and "loss" in refused(young)
    assert "is named twice" in refused(good, good.parent / "." / "good")
    text = CONFIG.replace("steps: 100", "phase: preference, steps: 100")
    preferring = run_of(tmp_path / "preferring", config=text)
    told = refused(good, preferring)
    assert "has phase sft" in told and "has phase preference" in told
    assert "at most 24 runs" in refused(*(run_of(tmp_path / f"many-{n}") for n in range(25)))


def test_truncated_last_line_is_dropped(tmp_path: Path) -> None:
    home = run_of(tmp_path / "killed")
    with (home / "metrics.jsonl").open("a") as file:
        file.write('{"step": 101, "loss": 0.0')
    assert History.read(home).step == 100


def test_number_of_points_is_bounded() -> None:
    series, values = Series(), np.sin(np.arange(50_001) / 900)
    for step, value in enumerate(values, 1):
        series.add(step, float(value))
    series.add(1, float("nan"))
    steps, found = series.curve
    assert len(steps) <= 2 * POINTS and steps[0] == (1 + series.width) / 2 and steps[-1] <= 50_001
    assert found[3] == pytest.approx(values[3 * series.width : 4 * series.width].mean())
    assert found[-1] == pytest.approx(values[series.width * (len(found) - 1) :].mean())


def test_page_size_is_bounded(tmp_path: Path) -> None:
    home = run_of(tmp_path / "long")
    history = History.begin(home)
    for step in range(1, 4001):
        eval = {"eval": {"loss": 1 / step, "exact_match": 0.5}} if step % 10 == 0 else {}
        history.add({"step": step, "loss": 3 / step, "lr": 1e-3, **eval})
    row = {"file": "t", "row": 0, "prompt": "p" * 600, "said": "", "right": True, "reward": None}
    rows = [row | {"step": n // 4, "wanted": f"of {n // 4}"} for n in range(4, 16004)]
    (home / "answers.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    page, _ = run_page.write_page([history], home / "page.html", "running")
    html = page.read_text()
    assert len(html) < 500_000 and 'reported">running' in html
    assert html.count("of 1</td>") == 4 and html.count("of 4000</td>") == 4 and html.count("<h2>Answers") == 1
    assert [step for step, _ in history.evals] == [10, *range(3900, 4001, 10)]


@pytest.mark.parametrize(("reward", "shown"), [("exact_match", True), ("grader", False)])
def test_exact_match_is_shown_only_where_it_is_the_reward(tmp_path: Path, reward: str, shown: bool) -> None:
    """An answer in other words than the reference is not wrong if a reward judges it."""
    home = run_of(tmp_path / "grpo")
    history = History.begin(home)
    for step in (1, 2):
        scores = {"reward": 0.9, f"rewards/{reward}/mean": 0.9}
        figures = {"loss": 2.5, "exact_match": 0.0, "questions": 4, **scores}
        history.add({"step": step, "loss": 0.1, "lr": 1e-3, **scores, "eval": figures})
    page, _ = run_page.write_page([history], home / "page.html", "running")
    html = page.read_text()
    assert "held-out reward" in html and (run_page.EXACT in html) is shown
    assert bool(re.search(r"exact match</th>", html)) is shown
    assert ("Held-out answers equal" in html) is shown
