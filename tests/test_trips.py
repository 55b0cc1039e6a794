"""How many files three trips through a run go through (benchmarks/hot_path.py): a row that becomes a batch, a step of
GRPO, and a configuration that becomes a running command. The fourth, a linear layer, is tests/fp8/dense's."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import pytest

from benchmarks import hot_path

LIMITS = {"row": 18, "grpo": 55, "yaml": 75, "cast": 179}  # files; they only fall


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("trips")


@pytest.mark.parametrize("trip", ["row", "grpo", "yaml", pytest.param("cast", marks=pytest.mark.long)])
def test_a_trip_goes_through_few_files(trip: str, inputs: Path) -> None:
    result = hot_path.follow(trip, inputs)
    assert 10 < result["count"] == len({*result["files"]}) <= LIMITS[trip], "\n".join(result["files"])
    assert all((hot_path.ROOT / file).is_file() for file in result["files"])
    through = {"yaml": hot_path.KERNELS, "cast": hot_path.CASTS}.get(trip, "")
    assert any(file.startswith(through) for file in result["files"])


def test_functions_are_counted_and_what_runs_while_modules_are_imported_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = {
        "trip_start": "import threading\n\ndef go():\n    import trip_lazy\n    import trip_classes, trip_thread\n"
        "    thread = threading.Thread(target=trip_thread.called)\n    thread.start()\n    thread.join()\n"
        "    return trip_lazy.called()\n\ndef further():\n    return 1\n",
        "trip_thread": "def called():\n    return 1\n",
        "trip_lazy": "import trip_helper\nX = trip_helper.at_import()\n\ndef called():\n    return [x for x in '12']\n",
        "trip_helper": "def at_import():\n    return 1\n",
        "trip_classes": "class A:\n    squares = [n for n in (1, 2)]\n",
    }
    for name, source in files.items():
        (tmp_path / f"{name}.py").write_text(source)
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.syspath_prepend(tmp_path)
    start = importlib.import_module("trip_start")
    passed: list[str] = []
    trip = hot_path.Trip(lambda file, code: passed.append(file), tmp_path)
    start.go()
    for name in ("trip_lazy", "trip_helper", "trip_classes", "trip_thread"):
        del sys.modules[name]
    before = sys.getprofile()
    trip.start()
    start.go()
    trip.stop()
    start.further()
    assert trip.files == ["trip_start.py", "trip_lazy.py"] == [*dict.fromkeys(passed)]
    assert trip.functions == {("trip_start.py", "go"), ("trip_lazy.py", "called")}
    assert sys.getprofile() is before
