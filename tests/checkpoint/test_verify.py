"""`checkpoint.verify`: good folders have no findings, and each planted corruption is reported."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from octavo.checkpoint import CheckpointError
from octavo.checkpoint.verify import verify
from tests.checkpoint import folders, planted
from tests.checkpoint.folders import Good

# A tied head and a tower of images stay out of FP8 in every form alike; experts lie otherwise in each.
PASSING = [(form, model) for form in folders.FORMS for model in ("qwen3", "qwen3_moe")]
PASSING += [("plain", "qwen3_tied"), ("fp8-block", "qwen3_tied"), ("plain", "qwen3_vl"), ("ct-row", "qwen3_vl")]


@pytest.mark.parametrize(("form", "model"), PASSING)
def test_good_folders_have_no_findings(good: Good, form: str, model: str) -> None:
    folder = good(form, model)
    verified = verify(folder, against=good("plain", model))
    assert [f.text for f in verified.findings] == []
    assert verified.ok and {v.verdict for v in verified.verdicts} == {"ok"}
    assert verified.compared and all(c.status == "ok" for c in verified.compared)
    if form != "plain":
        assert verified.fp8 and 0.01 < verified.compared[0].error < 0.05
    assert verify(folder, quick=True).findings == ()


# One form of each by default; the others hold the same code and are long tests.
CASES = [
    pytest.param(
        case,
        form,
        id=f"{case.plant.__name__}-{form}{'-against' * case.against}",
        marks=() if i < 1 else pytest.mark.long,
    )
    for case in planted.CORRUPTIONS
    for i, form in enumerate(case.forms)
]


@pytest.mark.parametrize("case, form", CASES)
def test_planted_corruptions_are_reported(case: planted.Corruption, form: str, good: Good, tmp_path: Path) -> None:
    folder = tmp_path / "damaged"
    shutil.copytree(good(form, case.model), folder)
    case.plant(folder)
    verified = verify(folder, against=good("plain", case.model) if case.against else None)
    kinds = {f.kind for f in verified.findings}
    assert case.kind in kinds, [f.text for f in verified.findings]
    assert verified.ok != case.fails
    finding = next(f for f in verified.findings if f.kind == case.kind)
    assert finding.status == ("fail" if case.fails else "warn")
    assert finding.text.endswith(".") and (finding.file in finding.text and finding.tensor in finding.text)
    if case.fails:
        assert any(v.verdict != "ok" or v.warns for v in verified.verdicts)


def test_folder_without_weights_and_config_raises(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="is not a folder"):
        verify(tmp_path / "none")
    (tmp_path / "empty").mkdir()
    assert not verify(tmp_path / "empty").ok
