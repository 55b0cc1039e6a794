"""One server for all tests, folders of four layers built once, and the record of what was seen."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from octavo.bench import record
from octavo.train.artifacts.export import export_model
from tests.requirements_real import require
from tests.server import checks, folders, outcomes, reference
from tests.server.client import Server

RESULTS = "OCTAVO_SERVER_RESULTS"  # a file for what the tests saw


@pytest.fixture(scope="session")
def model() -> Path:
    """The folder of SmolLM2."""
    return require("real")


@pytest.fixture(scope="session")
def server(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    environment = require("server")
    with Server(environment, tmp_path_factory.mktemp("server")) as running:
        yield running


class FourLayers:
    """Folders of the first four layers of the model, each built when first asked for, and vLLM's answers for them."""

    def __init__(self, server: Server, model: Path, folder: Path) -> None:
        self.server, self.model, self.folder = server, model, folder
        self.rows = reference.held_rows(model, 2, 64)
        self._scores: dict[str, reference.Scores] = {}
        self._observed: dict[str, tuple[outcomes.Outcome, str]] = {}

    def base(self, name: str) -> Path:
        """The good folder of this name (`folders.BASES`)."""
        base, folder = folders.BASES[name], self.folder / name
        if folder.is_dir():
            return folder
        if base.format:
            # damaged copies have no list of an export's files, and a good folder is compared with them
            export_model(self.base(base.plain), folder, base.format)
            (folder / "octavo_export.json").unlink()
            return folder
        if name in folders.PADDED:
            return folders.pad(self.base("bf16"), folder, *folders.PADDED[name])
        return folders.cut(self.model, folder)

    def update(self, name: str) -> list[str]:
        """What is wrong with updates of an engine that serves a good folder, by `checks.update`."""
        folder, other = self.base(name), self.folder / f"{name}-update"
        if not other.is_dir():
            folders.write_changed(folder, other)
        return checks.update(self.server, folder, other, self.rows, folders.BASES[name].kernel)

    def scores(self, name: str) -> reference.Scores:
        """vLLM's log-probabilities of `rows` with a good folder."""
        if name not in self._scores:
            self.server.load(self.base(name), folders.BASES[name].kernel)
            self._scores[name] = self.server.score(self.rows)
        return self._scores[name]

    @property
    def far(self) -> float:
        """Nats: TIMES the mean distance that FP8 itself makes on these rows; right answers are nearer to right ones."""
        return reference.TIMES * reference.distance(self.scores("dyn"), self.scores("bf16")).mean

    def observe(self, damage: folders.Damage) -> tuple[outcomes.Outcome, str]:
        """What vLLM does with a damaged folder, and what `octavo verify` says that it does.

        The short and the full form have folders in common; each is loaded once.
        """
        if damage.name in self._observed:
            return self._observed[damage.name]
        for name in ("bf16", folders.BASES[damage.base].plain, damage.base):
            self.base(name)
        folder = folders.damaged(damage, self.folder, self.folder / damage.name)
        good = self.scores(damage.base)
        if damage.right:
            self.server.load(folders.right(damage, self.folder, self.folder / f"{damage.name}-right"), damage.kernel)
            good = self.server.score(self.rows)
        seen = outcomes.observe(self.server, folder, damage.kernel, self.rows, good, self.far)
        self._observed[damage.name] = seen, outcomes.predict(folder)
        return self._observed[damage.name]


@pytest.fixture(scope="session")
def four_layers(server: Server, model: Path, tmp_path_factory: pytest.TempPathFactory) -> FourLayers:
    return FourLayers(server, model, tmp_path_factory.mktemp("four_layers"))


@pytest.fixture(scope="session")
def seen(server: Server) -> Iterator[dict[str, dict[str, Any]]]:
    """What tests add to is written to the file that `RESULTS` names, when the last test has ended."""
    results: dict[str, dict[str, Any]] = {"models": {}, "updates": {}, "folders": {}}
    versions = server.versions()
    yield results
    if path := os.environ.get(RESULTS):
        _write_record(Path(path), versions, results)


def _write_record(path: Path, versions: dict[str, str], results: dict[str, dict[str, Any]]) -> None:
    """Write what was seen. Rows that a record of the same versions has and that no test measured again are kept; each
    row has the commit of its run."""
    machine = record.describe_machine()
    for rows in results.values():
        for row in rows.values():
            row["commit"] = machine["octavo"]["commit"]
    if path.exists() and (old := record.load(path))["server"] == versions:
        commit = old["machine"]["octavo"]["commit"]
        for kind, rows in results.items():
            kept = {name: {"commit": commit} | row for name, row in old[kind].items()}
            results[kind] = kept | rows
    record.save({"command": "make test-server OUT=FILE", "server": versions, "machine": machine} | results, path)
