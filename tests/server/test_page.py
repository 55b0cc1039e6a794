"""docs/checkpoints.md has the tables of the stored record, which has no problem and no wrong prediction."""

from __future__ import annotations

import server_page as page

from octavo.bench import record


def test_section_is_written_from_the_record() -> None:
    text = page.PAGE.read_text()
    assert page.replace_section(text, page.section(record.load(page.RESULT))) == text, (
        "run python benchmarks/server_page.py"
    )


def test_record_has_no_problem() -> None:
    result = record.load(page.RESULT)
    assert not [line for kind in ("models", "updates") for row in result[kind].values() for line in row["problems"]]
    assert not [name for name, row in result["folders"].items() if row["vllm"] != row["verify"]]
    assert len(result["folders"]) >= 25 and len(result["models"]) == 6 and len(result["updates"]) == 4
