"""One run from each kind of data file: the same rows, losses bit for bit, and the same resume."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as parquet
import pytest

from octavo import data, train
from octavo.config import Config
from octavo.data.loaders.rows_from_config import make_encoder
from octavo.data.storage import remote
from tests.data.test_tar import make_tar
from tests.train.conftest import at

pytestmark = pytest.mark.usefixtures("uncounted")

KINDS = (
    "json",
    "jsonl",
    "parquet",
    "saved",
    "streamed jsonl",
    "streamed parquet",
    "streamed shards",
    "fetched shards",
    "tar",
)


def written(folder: Path, rows: list[dict], kind: str) -> Path:
    """The rows as a data file of a kind, beside the folder of its images."""
    what = kind.split()[-1]
    path = folder / f"{kind.replace(' ', '-')}.{what}"
    if path.exists():
        return path
    if what == "json":
        path.write_text(json.dumps(rows))
    elif what == "jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    elif what == "parquet":
        parquet.write_table(pa.Table.from_pylist(rows), path, row_group_size=5)
    elif what == "tar":
        make_tar(path, *((f"{n}.json", row) for n, row in enumerate(rows)))
    elif what == "saved":
        import datasets

        datasets.Dataset.from_list(rows).save_to_disk(path)
    else:
        path.mkdir()
        for first in range(0, len(rows), 20):
            part = pa.Table.from_pylist(rows[first : first + 20])
            parquet.write_table(part, path / f"part-{first:03}.parquet", row_group_size=5)
    return path


@pytest.fixture
def reading(make, place, tmp_path):
    """reading(kind, ..., dir="a") -> three steps over the first of the digits in a file of that kind."""
    rows = json.loads((place / "digits/train.json").read_text())[:40]

    def build(kind: str, *over: str, dir: str = "run", more: tuple[dict, ...] = ()) -> Config:
        path = written(tmp_path, [*rows, *more], kind)
        path = f"file://{path}" if "fetched" in kind else path
        entry = f"{{path: '{path}', images: '{place / 'digits'}', stream: {str('streamed' in kind).lower()}}}"
        of = (f"data.train=[{entry}]", "data.eval=[]", "train.steps=3")
        return make(*of, *over, dir=dir)

    return build


@pytest.mark.long
def test_every_source_trains_alike(reading, tmp_path, monkeypatch):
    """Through the cache where there is one; epochs make the same steps of all, and a stream resumes as the rest do."""
    monkeypatch.setattr("octavo.data.storage.cache.SMALL_FILE", 0)
    monkeypatch.setenv("OCTAVO_CACHE", str(tmp_path / "cache"))
    losses = {kind: train.run(reading(kind, dir=f"of-{kind[-7:]}-{len(kind)}")).losses() for kind in KINDS}
    assert len(losses["json"]) == 3 and all(found == losses["json"] for found in losses.values())
    for kind in ("saved", "streamed shards", "fetched shards"):
        cfg = reading(kind, "run.resume=auto", dir="stopped-" + kind[:7])
        assert train.run(cfg, callbacks=[at(1, signal.SIGTERM)]).status == "stopped"
        assert train.run(cfg).losses() == losses["json"]
    assert data.count_epoch_rows(reading("streamed jsonl", dir="e"), lambda: None) == 40


@pytest.mark.parametrize("kind", KINDS)
def test_a_row_that_leaves_its_folder_is_named_in_every_source(reading, kind, tmp_path):
    """By file and row; left out and listed where that is asked."""
    row = {"id": "out", "image": "../../etc/x.png", "conversations": [
        {"from": "human", "value": "<image>\nWhat?"}, {"from": "gpt", "value": "1"}]}  # fmt: skip
    cfg = reading(kind, more=(row,))
    from octavo.config import override
    from octavo.models import load_processor

    processor = load_processor(cfg.model.path)
    source = data.read(cfg.data.train[0])
    assert source.name == cfg.data.train[0].path
    with pytest.raises(data.BadSample, match=r"row 40.*leaves|row 40.*outside|row 40.*\.\./"):
        make_encoder(cfg, processor).encode(source[40])
    skipping = override(cfg, ["data.on_bad_sample=skip", "train.micro_batch=41", "train.global_batch=41"])
    report = tmp_path / "skipped.jsonl"
    batch = next(data.train_loader(skipping, processor, report_path=report))[0]
    assert batch["meta"].samples == 40
    [line] = [json.loads(text) for text in report.read_text().splitlines()]
    assert (line["file"], line["row"], line["id"]) == (source.name, 40, "out")


def test_a_run_does_not_go_on_with_other_files_at_its_url(reading, tmp_path):
    cfg = reading("fetched shards", "run.resume=auto", dir="stopped")
    assert train.run(cfg, callbacks=[at(1, signal.SIGTERM)]).status == "stopped"
    file = tmp_path / "fetched-shards.shards" / "part-020.parquet"
    parquet.write_table(parquet.read_table(file).slice(0, 19), file)
    remote.list_files.cache_clear()
    with pytest.raises(
        train.TrainError, match=r"was made with different data: file://.*shards had \d+ bytes, has \d+ now"
    ):
        train.run(cfg)
