"""Untrusted columnar files: damage is reported, and decoded sizes are bounded before decoding."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.feather as feather
import pyarrow.parquet as parquet
import pytest

from octavo.data import BadSample, DataError
from octavo.data.formats import columnar, parquet_footer
from octavo.data.formats import parquet as parquet_files
from octavo.data.formats.arrow_rows import ColumnRows, open_writer
from octavo.data.storage import cache, hub_datasets
from octavo.data.storage.open_rows import open_rows

TURNS = [[{"from": "human", "value": f"é{n}"}, {"from": "gpt", "value": None}] for n in range(12)]


@pytest.fixture(autouse=True)
def _own_cache(monkeypatch, tmp_path):
    monkeypatch.setenv("OCTAVO_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def small_limits(monkeypatch):
    """Lower the limits so that kilobytes reach them."""
    monkeypatch.setattr(columnar, "TEXT_BYTES", 20_000)
    monkeypatch.setattr(columnar, "ROW_BYTES", 50_000)
    monkeypatch.setattr(parquet_files, "MAX_DECODED_BYTES", 100_000)
    monkeypatch.setattr(parquet_files, "MAX_RATIO", 10)


def save_dataset(path: Path, **columns) -> Path:
    """Write a folder with `Dataset.save_to_disk`."""
    import datasets

    datasets.disable_progress_bars()
    datasets.Dataset.from_dict(columns).save_to_disk(str(path))
    return next(path.glob("*.arrow"))


def flip_entry(file: Path, words: list[int], at: int, bit: int = 0x80) -> None:
    """Change entry `at` of a sequence of 32-bit numbers in a file."""
    raw = bytearray(file.read_bytes())
    place = raw.find(np.array(words, np.int32).tobytes())
    assert place >= 0
    raw[place + 4 * at + 3] ^= bit
    file.write_bytes(raw)


def in_a_list(file):
    flip_entry(file, [0, 2, 4, 6, 8], 3)


def in_a_struct(file):
    flip_entry(file, [0, 5, 8, 13, 16], 3)  # "human", "gpt", ...


def half(file):
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


def no_arrow(file):
    file.write_bytes(b"x" * 300)


def empty(file):
    file.write_bytes(b"")


@pytest.mark.parametrize("damage", (in_a_list, in_a_struct, half, no_arrow, empty))
def test_damaged_datasets_folder_is_named(tmp_path, damage):
    file = save_dataset(tmp_path / "set", conversations=TURNS)
    assert len(open_rows(file.parent)) == 12
    damage(file)
    with pytest.raises(DataError, match=rf"{file} is damaged \(.*\); copy it again"):
        open_rows(file.parent)


def test_file_is_validated_once(tmp_path, monkeypatch):
    """A file is not validated again while it is unchanged, also in another process."""
    file, calls = save_dataset(tmp_path / "set", conversations=TURNS), []
    check = columnar.check_file
    monkeypatch.setattr(columnar, "check_file", lambda *given: calls.append(1) or check(*given))
    open_rows(file.parent), open_rows(file.parent)
    from octavo.data import file_digests

    file_digests._LOCAL_NOTES.clear(), file_digests._LOADED.clear()
    open_rows(file.parent)
    assert len(calls) == 1
    file.write_bytes(file.read_bytes())
    open_rows(file.parent)
    assert len(calls) == 2


def write_arrow(tmp_path: Path, table: pa.Table) -> Path:
    with open_writer(tmp_path / "x.arrow", table.schema) as out:
        out.write_table(table.combine_chunks())
    return tmp_path / "x.arrow"


@pytest.mark.parametrize(
    ("column", "words", "at"),
    [
        (pa.array(["abc", "de", "f", "g"]), [0, 3, 5, 6, 7], 2),
        (pa.array([b"abc", b"de", b"f", b"g"]), [0, 3, 5, 6, 7], 1),
        (pa.array([[1], [2, 3], [4, 5]]), [0, 1, 3, 5], 2),
        (pa.array([{"a": [[1], [2, 3]]}]), [0, 1, 3], 1),
        (pa.array(["a", "b", "a", "b"]).dictionary_encode(), [0, 1, 0, 1], 2),
        (pa.array([[("k", 1)], [("l", 2), ("m", 3)]]  , pa.map_(pa.string(), pa.int64())), [0, 1, 3], 1),
    ],
    ids=("text", "bytes", "list", "list in a list", "dictionary", "map"),
)  # fmt: skip
def test_offsets_of_every_layout_are_validated(tmp_path, column, words, at):
    file = write_arrow(tmp_path, pa.table({"x": column}))
    assert len(ColumnRows(file, file)) == len(column)
    flip_entry(file, words, at)
    with pytest.raises(DataError, match=r"x\.arrow is not a valid Arrow file \(ArrowInvalid: .*\); delete it"):
        ColumnRows(file, file)


def test_flipped_null_bit_is_detected(tmp_path):
    """The count of nulls in the file no longer matches."""
    file = write_arrow(tmp_path, pa.table({"x": pa.array([1 << 40, None, 1 << 41] * 40)}))
    raw = file.read_bytes()
    bitmap = bytes([0b01101101, 0b11011011, 0b10110110])
    assert raw.count(bitmap) >= 1
    file.write_bytes(raw.replace(bitmap, b"\x6f" + bitmap[1:], 1))
    with pytest.raises(DataError, match="null"):
        ColumnRows(file, file)


def test_invalid_utf8_affects_only_its_row(tmp_path):
    """A wrong offset in another column is still detected."""
    bad = pa.array([b"good", b"\xff\xff\xff"]).view(pa.binary())
    text = pa.StringArray.from_buffers(2, bad.buffers()[1], bad.buffers()[2])
    nested = pa.ListArray.from_arrays(pa.array([0, 1, 2], pa.int32()), text)
    file = write_arrow(tmp_path, pa.table({"a": text, "b": nested, "n": [[7], [8, 9]]}))
    rows = ColumnRows(file, file)
    assert rows[0] == {"a": "good", "b": ["good"], "n": [7]}
    with pytest.raises(BadSample, match="row 1: its column 'a'"):
        rows[1]
    flip_entry(file, [0, 1, 3], 1)
    with pytest.raises(DataError, match="is not a valid Arrow file"):
        ColumnRows(file, file)


def test_file_with_other_columns_is_rejected(tmp_path):
    from octavo.data.formats.arrow_rows import TextRows

    file = write_arrow(tmp_path, pa.table({"x": [1]}))
    with pytest.raises(DataError, match="its columns are not those that Octavo writes"):
        TextRows(file, file)


@pytest.mark.parametrize("codec", ("lz4", "zstd"))
def test_compressed_buffers_are_bounded_before_decoding(tmp_path, monkeypatch, codec):
    file = tmp_path / "x.feather"
    feather.write_feather(pa.table({"x": ["y" * 1_000_000]}), file, codec)
    assert file.stat().st_size < 20_000
    hub_datasets.validate(file, tmp_path)
    monkeypatch.setattr(columnar, "COMPRESSED", 100_000)
    decoded = []
    monkeypatch.setattr(columnar, "check_batch", decoded.append)
    (tmp_path / "again").write_bytes(file.read_bytes())
    with pytest.raises(DataError, match=r"its compressed buffers take 10000\d\d bytes or more decoded, of \d+ in the"):
        hub_datasets.validate(tmp_path / "again", tmp_path)
    assert not decoded


# Sizes -----------------------------------------------------------------------------------------------------------

TEXT = "x" * 5000


@pytest.mark.parametrize(
    ("array", "expected"),
    [
        (pa.array(["ab", None, "é"]), [2, 0, 2]),
        (pa.array(["aaaa", "b", None]).dictionary_encode(), [4, 1, 0]),
        (pa.array([["a", "bb"], None, []]), [19, 0, 0]),
        (pa.array([{"a": "x", "b": [1]}, None]), [17, 0]),
        (pa.array([["a", "b"], ["cc", "d"]], pa.list_(pa.string(), 2)), [18, 19]),
        (pa.array([[("k", "vv")], []], pa.map_(pa.string(), pa.string())), [11, 0]),
        (pa.RunEndEncodedArray.from_arrays([2, 3], ["aaaa", "b"]), [4, 4, 1]),
        (pa.array(["ab", "a" * 50, None], pa.string_view()), [2, 50, 0]),
        (pa.array([["a"], ["bbb", "c"]], pa.list_view(pa.string())), [9, 20]),
        (pa.array([["a", "a"], None], pa.list_(pa.dictionary(pa.int32(), pa.string()))), [18, 0]),
        (pa.nulls(2), [0, 0]),
    ],
    ids=lambda value: str(getattr(value, "type", ""))[:30],
)
def test_value_bytes_count_decoded_size(array, expected):
    """Also for slices, because a row is a slice."""
    assert columnar.value_bytes(array).tolist() == expected
    for start in range(len(array)):
        assert columnar.value_bytes(array.slice(start)).tolist() == expected[start:]


def bomb(path: Path, rows: int, size: int, **options) -> Path:
    turns = [{"from": "human", "value": "x" * size}, {"from": "gpt", "value": "a"}]
    parquet.write_table(pa.table({"conversations": [turns] * rows}), path, compression="zstd", **options)
    return path


@pytest.mark.parametrize("small", (0, 1 << 30))
def test_repeated_text_is_not_decoded(tmp_path, small_limits, monkeypatch, small):
    """Conversion rejects the file and names both sizes; streaming decodes row by row."""
    monkeypatch.setattr(cache, "SMALL_FILE", small)
    file = bomb(tmp_path / "b.parquet", 600, 5000)
    with pytest.raises(DataError, match=r"b\.parquet has \d{3,4} bytes and takes more than \d{6,7} decoded, up to row"):
        open_rows(file)
    before = pa.total_allocated_bytes()
    rows = open_rows(file, stream=True)
    assert rows[599]["conversations"][0]["value"] == TEXT and rows[0] == rows[300]
    assert pa.total_allocated_bytes() - before < 200_000, "the row group is in memory as it is in the file"
    assert not [*tmp_path.glob("cache/*.arrow")]


@pytest.mark.parametrize("stream", (False, True))
def test_oversized_cell_makes_a_bad_row(tmp_path, small_limits, stream):
    values = ["a", "y" * 20_001, None, "z" * 20_000]
    table = pa.table({"text": values, "n": [1, 2, 3, 4], "raw": [b"1", b"2", b"3" * 60_000, b"4"]})
    parquet.write_table(table, tmp_path / "a.parquet")
    rows = open_rows(tmp_path / "a.parquet", stream=stream)
    assert len(rows) == 4 and rows.keys() == {"text", "n", "raw"}
    assert rows[0] == {"text": "a", "n": 1, "raw": b"1"} and rows[3]["text"] == values[3]
    with pytest.raises(BadSample, match=r"a\.parquet, row 1: has 20001 bytes of text, over the limit of 20000; split"):
        rows[1]
    with pytest.raises(BadSample, match=r"a\.parquet, row 2: takes 600\d\d bytes, over the limit of 50000; split or"):
        rows[2]


def test_oversized_cell_in_datasets_folder_makes_a_bad_row(tmp_path, small_limits):
    rows = open_rows(save_dataset(tmp_path / "set", text=["a", "y" * 20_001]).parent)
    assert rows[0] == {"text": "a"}
    with pytest.raises(BadSample, match=r"set, row 1: has 20001 bytes of text"):
        rows[1]


def test_repeated_dictionary_of_arrow_file_is_bounded(tmp_path, small_limits):
    """60 bytes of indices decode to a row of 300 kB."""
    names = pa.DictionaryArray.from_arrays(pa.array([0] * 60, pa.int8()), pa.array([TEXT]))
    lists = pa.ListArray.from_arrays(pa.array([0, 2, 60], pa.int32()), names)
    file = write_arrow(tmp_path, pa.table({"x": lists}))
    assert columnar.find_large_rows(pa.ipc.open_file(str(file)).read_all()) == {
        1: "has 290000 bytes of text, over the limit of 20000; split or remove it"
    }


@pytest.mark.parametrize("stream", (False, True))
def test_parquet_footer_bounds_decoded_lists_and_pages(tmp_path, small_limits, stream, monkeypatch):
    """Uses a million empty entries in a few bytes, and a compressed page of equal letters."""
    files = {
        "runs": pa.table({"x": pa.array([[None] * 1_000_000], pa.list_(pa.int64()))}),
        "page": pa.table({"x": ["y" * 1_000_000]}),
    }
    for name, table in files.items():
        parquet.write_table(table, tmp_path / f"{name}.parquet", compression="zstd", use_dictionary=name == "runs")
        with monkeypatch.context() as undecoded:
            undecoded.setattr(parquet.ParquetFile, "iter_batches", None)
            undecoded.setattr(parquet.ParquetFile, "read_row_group", None)
            with pytest.raises(DataError, match=rf"{name}\.parquet: column 'x\S*' of row group 0 takes \d{{7}} bytes "):
                open_rows(tmp_path / f"{name}.parquet", stream=stream)


@pytest.mark.parametrize("stream", (False, True))
def test_texts_with_shared_prefixes_are_bounded(tmp_path, small_limits, stream):
    table = pa.table({"x": [TEXT + str(n) for n in range(100, 400)]})
    options = {"use_dictionary": False, "column_encoding": {"x": "DELTA_BYTE_ARRAY"}, "compression": "none"}
    parquet.write_table(table, tmp_path / "a.parquet", **options)
    with pytest.raises(DataError, match=r"a\.parquet.* takes more than \d{6} .*decoded"):
        open_rows(tmp_path / "a.parquet", stream=stream)[0]


@pytest.mark.parametrize("stream", (False, True))
def test_every_parquet_layout_returns_the_written_rows(tmp_path, stream):
    """Dictionary columns are read as dictionaries, but rows have plain values."""
    rows = [
        {
            "conversations": TURNS[n], "text": ["a", "b", None][n % 3], "raw": b"x" * (n % 2), "tags": ["p"] * (n % 3),
            "deep": [[{"k": "v"}], []], "n": n,
        }
        for n in range(12)
    ]  # fmt: skip
    truth = tmp_path / "plain.parquet"
    parquet.write_table(pa.Table.from_pylist(rows), truth, use_dictionary=False)
    expected = [open_rows(truth)[n] for n in range(12)]
    table = pa.Table.from_pylist(rows)
    typed = table.set_column(1, "text", table["text"].dictionary_encode())
    for number, (one, options) in enumerate((
        (table, {"row_group_size": 5}), (typed, {}), (table, {"data_page_version": "2.0", "compression": "gzip"}),
        (table, {"store_schema": False, "use_compliant_nested_type": False}),
    )):  # fmt: skip
        parquet.write_table(one, tmp_path / f"{number}.parquet", **options)
        found = open_rows(tmp_path / f"{number}.parquet", stream=stream)
        assert [found[n] for n in range(12)] == expected and found.keys() == {*rows[0]}


@pytest.mark.parametrize("damage", ("size", "end", "list", "levels"))
def test_damaged_parquet_footer_is_named(tmp_path, damage):
    """pyarrow would end the process if statistics contradict the schema."""
    file = tmp_path / "a.parquet"
    parquet.write_table(pa.table({"x": [["a"], None]}), file)
    raw = bytearray(file.read_bytes())
    if damage == "size":
        raw[-8:-4] = (1 << 31).to_bytes(4, "little")
    elif damage == "end":
        del raw[-4:]
    elif damage == "list":
        at = len(raw) - 8 - int.from_bytes(raw[-8:-4], "little")
        raw[at + 2 : at + 4] = b"\xfc\xff"
    else:
        raw[-8:-4] = (len(raw) - 20).to_bytes(4, "little")
    file.write_bytes(raw)
    with pytest.raises(DataError, match=r"a\.parquet is not a readable parquet file \(.*\); copy or download"):
        open_rows(file)


def test_footer_matches_pyarrow(tmp_path):
    table = pa.table({"x": [["a"] * n for n in range(9)], "y": range(9), "z": [b"q"] * 9})
    parquet.write_table(table, tmp_path / "a.parquet", row_group_size=4)
    with open(tmp_path / "a.parquet", "rb") as file:
        groups = parquet_footer.read_row_groups(file)
    about = parquet.read_metadata(tmp_path / "a.parquet")
    assert [(g.rows, g.size) for g in groups] == [
        (about.row_group(n).num_rows, about.row_group(n).total_byte_size) for n in range(about.num_row_groups)
    ]
    for number, group in enumerate(groups):
        for place, chunk in enumerate(group.chunks):
            theirs = about.row_group(number).column(place)
            assert chunk[:4] == (
                theirs.path_in_schema, theirs.num_values, theirs.total_compressed_size, theirs.total_uncompressed_size
            )  # fmt: skip


def test_compressed_lines_are_not_decompressed(tmp_path):
    """Compressed JSONL is not a supported format, and the error says so."""
    import gzip

    file = tmp_path / "a.jsonl.gz"
    file.write_bytes(gzip.compress(json.dumps({"text": "x" * 10_000_000}).encode()))
    with pytest.raises(DataError, match=r"a\.jsonl\.gz is not UTF-8 text"):
        open_rows(file)
