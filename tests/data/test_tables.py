"""Rows of CSV, parquet, folders of shards and folders of `datasets` equal those of JSON."""

import datetime
import decimal
import json
import pickle

import datasets
import pyarrow as pa
import pyarrow.parquet as parquet
import pytest

from octavo.config import Dataset
from octavo.data import BadSample, DataError, Encoder, Loader, Mixture
from octavo.data.formats import streaming
from octavo.data.rows import image_refs
from octavo.data.storage import cache
from octavo.data.storage.open_rows import open_rows
from octavo.data.tasks.sources import detect_preference_kind

TEXT = [{"instruction": f"Say {n}", "input": "é" * (n % 3), "output": f"<{n}>"} for n in range(40)]


def save_rows(folder, rows, kind: str):
    """Write the rows as a file or folder of a format."""
    path = folder.path / f"rows.{kind}"
    if kind in ("json", "jsonl"):
        return folder.json(rows, path.name)
    if kind in ("csv", "tsv"):
        mark = "\t" if kind == "tsv" else ","
        lines = [mark.join(rows[0]), *(mark.join(f'"{value}"' for value in row.values()) for row in rows)]
        path.write_text("\r\n".join(lines) + "\r\n")
    elif kind == "parquet":
        parquet.write_table(pa.Table.from_pylist(rows), path, row_group_size=7)
    elif kind == "saved":
        datasets.Dataset.from_list(rows[::-1]).select(range(len(rows))[::-1]).save_to_disk(path)
    else:
        path.mkdir()
        for start in range(0, len(rows), 16):
            part = save_rows(folder, rows[start : start + 16], kind.removeprefix("shards of "))
            part.rename(path / f"part-{start:03}{part.suffix}")
    return path


KINDS = ("json", "jsonl", "csv", "tsv", "parquet", "saved", "shards of parquet", "shards of jsonl")
STREAMED = ("jsonl", "csv", "tsv", "parquet", "shards of parquet", "shards of csv")


@pytest.mark.parametrize(("kind", "stream"), [*((kind, False) for kind in KINDS), *((kind, True) for kind in STREAMED)])
def test_every_file_format_gives_equal_batches(folder, models, kind, stream, monkeypatch):
    """Compares rows, tokens, order and a resume, with and without the cache."""
    monkeypatch.setattr(cache, "SMALL_FILE", 0)
    monkeypatch.setenv("OCTAVO_CACHE", str(folder.path / "cache"))
    encoder = Encoder(models("qwen3"), 64)

    def tokens(kind: str, first: int = 0, stream: bool = False) -> list:
        path = save_rows(folder, TEXT, kind) if not first else folder.path / f"rows.{kind}"
        source = pickle.loads(pickle.dumps(folder.read(path, stream=stream)))  # as a worker receives it
        assert (source.format, len(source)) == ("alpaca", 40)
        loader = Loader(Mixture([source], seed=3), encoder, 4, 4, start_row=first)
        return [next(loader)[0]["input_ids"].tolist() for _ in range(15 - first // 4)]

    whole = tokens(kind, stream=stream)
    assert whole[8:] == tokens(kind, 32, stream) and any((folder.path / "cache").glob("*.arrow")) == (
        not stream and kind != "saved"
    )
    assert whole == tokens("json")


def test_stream_caches_few_row_groups_and_reads_quoted_lines(folder, monkeypatch):
    """Cells with line breaks, delimiters and quotes, long cells, blank lines, a BOM; row groups are evicted."""
    content = b'\xef\xbb\xbfa,b\r\n"x\r\ny","1,""2"""\r\n\r\n"' + b"z" * 200_000 + 'é",\u2028\n3,4'.encode()
    (folder.path / "x.csv").write_bytes(content)
    streamed, converted = (open_rows(folder.path / "x.csv", stream=stream) for stream in (True, False))
    assert [streamed[n] for n in (2, 0, 1)] == [converted[n] for n in (2, 0, 1)]
    assert converted[0] == {"a": "x\r\ny", "b": '1,"2"'} and len(streamed) == len(converted) == 3
    monkeypatch.setattr("octavo.data.formats.streaming.CACHE_BYTES", 1)
    rows = open_rows(save_rows(folder, TEXT, "parquet"), stream=True)
    assert [rows[n] for n in (39, 0, 6, 7, 20)] == [TEXT[n] for n in (39, 0, 6, 7, 20)]
    assert len(streaming.TABLES) == 1


@pytest.mark.parametrize("kind", ("json", "jsonl", "parquet", "saved", "shards of jsonl"))
def test_reward_columns_include_keys_of_any_row(folder, kind, monkeypatch):
    monkeypatch.setattr(cache, "SMALL_FILE", 0)
    monkeypatch.setenv("OCTAVO_CACHE", str(folder.path / "cache"))
    rows = [{"question": f"{n}?", "answer": "1"} for n in range(20)]
    rows[17]["level"] = rows[18]["output"] = "2"
    columns = dict.fromkeys(("level", "output")) if kind in ("parquet", "saved") else {}
    path = save_rows(folder, [columns | row for row in rows], kind)
    if kind == "jsonl":
        path.write_text(path.read_text() + '{"bad": \n[{"list": 1}]\n')
    source = folder.read(path, kind="prompts", columns={"prompt": "question", "hint": "level"})
    assert source[17].columns["hint"] == "2" and sorted(source.columns()) == ["hint", "output"]
    if kind in STREAMED:
        again = folder.read(path, kind="prompts", columns={"prompt": "question", "hint": "level"}, stream=True)
        assert sorted(again.columns()) == ["hint", "output"]
    if kind == "jsonl":  # and they are kept
        monkeypatch.setattr("octavo.data.formats.arrow_rows.parse_json", None)
        assert sorted(source.columns()) == ["hint", "output"]


def test_table_rows_equal_json_rows(folder):
    day, price = datetime.date(2026, 1, 2), decimal.Decimal("1.20")
    rows = [
        {"a": None, "b": {"c": None, "d": [1, 2.5]}, "when": day, "price": price},
        {"a": "x", "b": None, "when": None, "price": None},
    ]
    for kind in ("parquet", "saved"):
        found = open_rows(save_rows(folder, rows, kind))
        assert [found[0], found[1]] == [{"b": {"d": [1, 2.5]}, "when": "2026-01-02", "price": "1.20"}, {"a": "x"}]
        assert pickle.loads(pickle.dumps(found))[1] == {"a": "x"}


@pytest.mark.parametrize(
    "content", (b"a,b\r1,2\r3,4\r", b'a,b\r"1\r\n2",3\r\n4,5', b"a,b\n1\r2,3\n4,5\n", b"\xef\xbb\xbfa,b\r\r\n\r1,2")
)
def test_cr_line_ends_are_streamed(folder, content):
    (folder.path / "x.csv").write_bytes(content)
    converted, streamed = (open_rows(folder.path / "x.csv", stream=stream) for stream in (False, True))

    def rows_and_errors(rows) -> list:
        results = []
        for row in range(len(rows)):
            try:
                results.append(rows[row])
            except BadSample as bad:
                results.append(str(bad))
        return results

    assert rows_and_errors(converted) == rows_and_errors(streamed) and len(converted) > 0
    assert [converted.line(n) for n in range(len(converted))] == [streamed.line(n) for n in range(len(converted))]


def not_utf8(*values: bytes) -> pa.Array:
    return pa.array(values, pa.binary()).view(pa.string())


@pytest.mark.parametrize("kind", ("parquet", "stream", "saved"))
def test_unreadable_value_affects_only_its_row(folder, kind):
    """Times that Python cannot represent are accepted; invalid UTF-8 makes a bad row."""
    numbers = pa.array([0, 1 << 38])
    table = pa.table({
        "a": not_utf8(b"x", b"y\xff"),
        "when": numbers.cast(pa.timestamp("s")), "there": numbers.cast(pa.timestamp("us", "Mars/Utopia")),
        "day": pa.array([0, 1 << 30], pa.int32()).cast(pa.date32()),
        "took": pa.array([0, 1 << 62]).cast(pa.duration("s")),
    })  # fmt: skip
    path = folder.path / ("rows" if kind == "saved" else "rows.parquet")

    def opened(table: pa.Table):
        if kind == "saved":
            datasets.Dataset(table).save_to_disk(path)
        else:
            parquet.write_table(table, path)
        return open_rows(path, stream=kind == "stream")

    rows = opened(table)
    assert rows[0]["a"] == "x" and rows[0]["when"] == "1970-01-01 00:00:00"
    with pytest.raises(BadSample, match=r"rows.*, row 1: its column 'a' \(string\) cannot be read \('utf-8' codec"):
        rows[1]
    path = folder.path / ("times" if kind == "saved" else "times.parquet")
    times = opened(table.drop_columns(["a"]))[1]
    assert (
        times["when"].startswith("10680-07-14 06:09:04")
        and "1073741824" in times["day"]
        and times["took"] == str(1 << 62)
    )
    assert times["there"].startswith("1970-01-04 04:21:17")


@pytest.mark.parametrize("kind", ("json", "jsonl", "parquet", "saved"))
def test_null_keys_are_dropped(folder, kind):
    """In JSON and tables, for format detection and for rows."""
    spare = dict.fromkeys(("messages", "prompt", "instruction", "output", "chosen", "rejected", "label", "text", "id"))
    talk = {"conversations": folder.llava("hi", "yo")["conversations"]}
    made = {
        "conversations": spare | talk,
        "prompts": spare | {"prompt": "2+3?", "answer": "5"},
        "pairs": spare | {"prompt": "p", "chosen": "c", "rejected": "r"},
        "labelled": spare | {"prompt": "p", "completion": "c", "label": True},
        "documents": spare | {"text": "once", "texts": None},
    }
    for of, row in made.items():
        (folder.path / of).mkdir()
        path = save_rows(type(folder)(folder.path / of), [row, row], kind)
        if of in ("pairs", "labelled"):
            assert detect_preference_kind(Dataset(path=str(path))) == of
        full = {key: value for key, value in row.items() if value is not None}
        source, truth = folder.read(path, kind=of), folder.read([full] * 2, f"{of}.json", kind=of)
        text = repr(source[1]).replace(str(path), str(folder.path / f"{of}.json"))
        assert (source.format, text) == (truth.format, repr(truth[1]))


def test_images_are_read_from_bytes_in_rows(folder, models):
    """As `datasets` writes them; pixels and tokens equal those of the files."""
    names = [folder.image(f"{n}.png", color=(9 * n, 80, 200)) for n in range(3)]
    rows = [{"image": name, "conversations": folder.llava("<image>What?", name)["conversations"]} for name in names]
    inside = [{**row, "image": {"bytes": (folder.path / row["image"]).read_bytes(), "path": None}} for row in rows]
    inside[2]["image"]["path"] = "2.png"
    named = [{**row, "image": {"bytes": None, "path": row["image"]}} for row in rows]
    encoder = Encoder(models("qwen3_vl"), 64)
    truth = folder.read(rows)
    for given in (save_rows(folder, inside, "parquet"), save_rows(folder, named, "saved")):
        source = folder.read(given, images=str(folder.path))
        for row in range(3):
            one, other = encoder.encode(truth[row]), encoder.encode(source[row])
            assert (one.pixel_values == other.pixel_values).all() and (one.input_ids == other.input_ids).all()
    pictures = [folder.read(folder.path / "rows.parquet")[row].images[0] for row in range(3)]
    assert len({*map(str, pictures)}) == 3 and str(pictures[2]).startswith("2.png (")
    broken = folder.read(save_rows(folder, [{**inside[0], "image": {"bytes": b"no", "path": "x.png"}}], "parquet"))
    with pytest.raises(BadSample, match=r"rows\.parquet, row 0: image x\.png \(\w{12}\) cannot be decoded"):
        encoder.encode(broken[0])
    bomb = image_refs.InlineImage((folder.path / names[0]).read_bytes())
    with pytest.raises(image_refs.MediaProblem, match="decompression bomb"):
        image_refs.load(bomb, 1e-5)


@pytest.mark.parametrize("kind", ("json", "parquet", "saved"))
def test_image_without_bytes_and_path_is_null(folder, kind):
    """`datasets` and Arrow write a null struct like this."""
    none, name = {"bytes": None, "path": None}, folder.image()
    there = {"bytes": None, "path": name}
    made = {
        "talk": {"image": none, "conversations": folder.llava("hi", "yo")["conversations"]},
        "parts": {"images": [there], "messages": [
            {"role": "user", "content": [{"type": "image", "image": none}]}, {"role": "assistant", "content": [
                {"type": "text", "text": "yo"}]}]},
        "prose": {"texts": ["a", None], "images": [none, there]},
    }  # fmt: skip
    for of, row in made.items():
        (folder.path / of).mkdir()
        rows = [row, row | {"image": there} if of == "talk" else row]  # so that the column has a type
        path = save_rows(type(folder)(folder.path / of), rows, kind)
        found = folder.read(path, kind="documents" if of == "prose" else "conversations", images=str(folder.path))[0]
        assert len(found.images) == (of != "talk")


@pytest.mark.parametrize("stream", (False, True))
def test_duplicate_columns_are_rejected(folder, stream):
    table = pa.Table.from_arrays([pa.array(["a"])] * 3, names=["text", "x", "text"])
    parquet.write_table(table, folder.path / "x.parquet")
    with pytest.raises(DataError, match=r"its columns are \['text', 'x', 'text'\], 'text' more than once; rename one"):
        open_rows(folder.path / "x.parquet", stream=stream)


def test_columns_are_renamed(folder):
    rows = [{"question": "q", "solution": f"a{n}", "prompt": "not this", "level": n} for n in range(2)]
    source = folder.read(rows, kind="prompts", columns={"prompt": "question", "answer": "solution"})
    assert source[1].answer == "a1" and source[1].conversation.turns[0].text == "q"
    assert source[1].columns["level"] == 1 and not {"question", "solution"} & source[1].columns.keys()
    with pytest.raises(DataError, match=r"columns names answer: truth, but none of its first 2 rows has it; they have"):
        folder.read(rows, kind="prompts", columns={"answer": "truth"})


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"instruction": ["a"], "output": "b"}, r"'instruction' is \['a'\]; expected text"),
        ({"instruction": "a", "output": "b", "history": [["c"]]}, r"has the history .*expected a list of \[question"),
        ({"instruction": "a", "input": "b"}, "an alpaca row has instruction and output"),
        ({"instruction": " ", "input": "", "output": "b"}, "has an empty 'instruction' and no 'input', so there is no"),
        ({"instruction": "a", "output": ""}, "turn 2 is an assistant turn without text"),
    ],
)  # fmt: skip
def test_bad_alpaca_rows_are_rejected(folder, row, message):
    with pytest.raises(BadSample, match=rf"rows\.json, row 1: .*{message}"):
        folder.read([TEXT[0], row], format="alpaca")[1]


def test_alpaca_row_with_all_keys(folder):
    row = {"system": "s", "history": [["q1", "a1"]], "instruction": "q2", "input": "i", "output": "a2"}
    turns = [(turn.role, turn.text) for turn in folder.read([row])[0].turns]
    assert turns == [("system", "s"), ("user", "q1"), ("assistant", "a1"), ("user", "q2\ni"), ("assistant", "a2")]
    prompt = folder.read([row], kind="prompts")[0]
    assert (prompt.answer, prompt.columns["prompt"]) == ("a2", "q2\ni") and "instruction" not in prompt.columns


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("x.csv", b"a,b\n1,2\n3\n", "row 1: line 3 has 1 cells, and the first line names 2 columns"),
        ("x.csv", b'a,b\n1,2\n3,"\xff"\n', r"row 1: line 3 holds half a character"),
        ("x.csv", b"a,a\n1,2\n", r"its first line is \['a', 'a'\]; it must name every column, each once"),
        ("x.csv", b'a,b\n1,"2\n', r"is no CSV file: unexpected end of data \(line 2\)"),
        ("x.csv", b"a,b\n", "has no rows"),
        ("x.parquet", b"PAR1no table", r"x\.parquet is not a readable parquet file"),
    ],
)
@pytest.mark.parametrize("stream", (False, True))
def test_unusable_tables_are_rejected(folder, name, content, message, stream):
    (folder.path / name).write_bytes(content)
    with pytest.raises(DataError, match=message):
        open_rows(folder.path / name, stream=stream)[1]


@pytest.mark.parametrize("small", (1 << 30, 0))
def test_broken_page_is_an_error_of_the_file(folder, small, monkeypatch):
    """Arrow raises OSError, which must not be reported as an error of the cache folder."""
    monkeypatch.setattr(cache, "SMALL_FILE", small)
    path = save_rows(folder, TEXT, "parquet")
    data = path.read_bytes()
    path.write_bytes(data[:4] + b"\xff" * 60 + data[64:])
    with pytest.raises(DataError, match=r"rows\.parquet is not a readable parquet file"):
        open_rows(path, folder.path / "cache")


def test_unusable_folders_are_rejected(folder):
    (folder.path / "shards").mkdir()
    (folder.path / "shards" / "a.parquet").write_bytes(b"no")
    with pytest.raises(DataError, match=r"a\.parquet is not a readable parquet file"):
        open_rows(folder.path / "shards")
    folder.json(TEXT, "shards/b.json")
    with pytest.raises(DataError, match=r"shards is a folder with files of several kinds \(\.json, \.parquet\)"):
        open_rows(folder.path / "shards")
    path = save_rows(folder, TEXT, "saved")
    with pytest.raises(DataError, match="folders of `datasets` are never copied; remove `stream`"):
        open_rows(path, stream=True)
    both = folder.path / "both"
    datasets.DatasetDict(train=datasets.load_from_disk(str(path))).save_to_disk(str(both))
    with pytest.raises(DataError, match=r"has several splits; name the folder of one of them, such as .*both/train"):
        open_rows(both)
    state = json.loads((path / "state.json").read_text())
    state["_data_files"] = [{"filename": "gone.arrow"}]
    (path / "state.json").write_text(json.dumps(state))
    with pytest.raises(DataError, match=r"is not a readable folder of `datasets` \(FileNotFoundError"):
        open_rows(path)


def test_folder_of_many_small_files_is_not_kept_in_memory(folder, monkeypatch):
    """Measures Arrow's memory; a few small files are kept in memory."""
    monkeypatch.setenv("OCTAVO_CACHE", str(folder.path / "cache"))
    path = save_rows(folder, [{"text": "a" * 3000 + str(n)} for n in range(400)], "shards of jsonl")
    monkeypatch.setattr("octavo.data.storage.open_rows.MAX_FILES_IN_MEMORY", 25)
    before = pa.total_allocated_bytes()
    opened = open_rows(path)
    assert pa.total_allocated_bytes() - before > 1 << 20 and not (folder.path / "cache").exists()
    truth = [opened[n] for n in (399, 0, 17)]
    del opened
    monkeypatch.setattr("octavo.data.storage.open_rows.MAX_BYTES_IN_MEMORY", 1 << 20)
    monkeypatch.setattr("octavo.data.storage.open_rows.MAX_OPEN_FILES", 2)
    before = pa.total_allocated_bytes()
    rows = open_rows(path)
    assert [rows[n] for n in (399, 0, 17)] == truth and len({*rows.keys()}) == 1 and len(rows._rows) == 2
    assert pa.total_allocated_bytes() - before < 200_000 and len([*(folder.path / "cache").glob("*.arrow")]) == 25
