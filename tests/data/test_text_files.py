"""Folders of text files are a corpus, a document a file; nothing in them is left out without a word."""

import shutil
from pathlib import Path

import pytest

from octavo.base import encryption
from octavo.cli.main import main
from octavo.config import Dataset, load_config_text
from octavo.data import BadSample, DataError, read
from octavo.data.formats import text_files
from octavo.data.loaders.from_config import train_loader
from octavo.data.storage.open_rows import open_rows
from octavo.train.run_dir.input_fingerprints import fingerprints


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    """Two books with a chapter each, and a text between them; one file has a BOM, one has Windows' line ends."""
    folder = tmp_path / "corpus"
    for name, text in (("b/1.txt", "It was a day."), ("a/1.txt", "\ufeffOnce."), ("a.md", "# One\r\n\r\nTwo")):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text, newline="")
    return folder


def documents(path: Path, kind: str = "documents", **options: object):
    return read(Dataset.model_construct(path=str(path), **options), kind)


def config(model: Path, data: Path, tmp_path: Path, *overrides: str):
    text = f"""
model: {{path: {model}}}
data: {{train: [{{path: {data}}}], cache: {tmp_path}/cache}}
train: {{phase: pretrain, steps: 1, seq_length: 8, micro_batch: 1, global_batch: 1}}
run: {{dir: {tmp_path}/run}}
"""
    return load_config_text(text, overrides)


def test_a_file_is_a_document_in_the_order_of_names(corpus: Path):
    (corpus / ".git").mkdir()
    (corpus / ".git/HEAD.txt").write_text("hidden")
    (corpus / "a/.draft.txt").write_text("hidden")
    source = documents(corpus)
    assert [source.raw(row) for row in range(len(source))] == [
        {"text": "Once.", "id": "a/1.txt"}, {"text": "# One\r\n\r\nTwo", "id": "a.md"},
        {"text": "It was a day.", "id": "b/1.txt"},
    ]  # fmt: skip
    assert source.format == "text" and source[1].text == "# One\r\n\r\nTwo"
    assert documents(corpus / "a.md")[0].text == source[1].text
    assert len(documents(corpus, max_samples=2)) == 2


def test_joined_documents_have_every_token(corpus: Path, models, tmp_path: Path):
    processor = models("qwen3")
    loader = train_loader(config(tmp_path, corpus, tmp_path), processor)
    [joined] = loader.mixture.sources
    ids = [token for number in range(len(joined)) for token in joined[number].input_ids.tolist()]
    tokenizer = processor.tokenizer
    texts = [tokenizer(text)["input_ids"] for text in ("Once.", "# One\r\n\r\nTwo", "It was a day.")]
    assert sorted(ids) == sorted([token for text in texts for token in [*text, tokenizer.eos_token_id]])
    # A changed file is read again, and two files of one name in different folders are two files.
    cfg = config(tmp_path, corpus, tmp_path)
    before = fingerprints(cfg)["data"][str(corpus)]
    (corpus / "a/1.txt").write_text("Another.")
    after = fingerprints(cfg)["data"][str(corpus)]
    assert before["sha256"] != after["sha256"]
    assert len(train_loader(cfg, processor).mixture.sources[0]) >= 1


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "has a text without characters"),
        (b" \n", "has a text without characters"),
        (
            "Fianc\u00e9".encode("latin-1"),
            r"is not UTF-8 \(its byte 5\); save it as UTF-8, for example with `iconv -f ENC",
        ),
        ("Fianc\u00e9".encode("utf-16"), r"is not UTF-8 \(its byte 0\); .*`iconv -f UTF-16 -t UTF-8`"),
        (b"x" * 65, r"has 65 B, and a document at most 64 B; split it"),
    ],
)
def test_files_that_are_no_documents_are_bad_rows(corpus: Path, monkeypatch, content: bytes, reason: str):
    monkeypatch.setattr(text_files, "MAX_BYTES", 64)
    (corpus / "a/2.txt").write_bytes(content)
    with pytest.raises(BadSample, match=rf"corpus, row 1 \(id a/2.txt\): {reason}"):
        documents(corpus)[1]
    assert documents(corpus)[2].text.startswith("# One"), "other files are not affected"


def test_other_files_are_counted_or_refused(corpus: Path):
    (corpus / "a/cover.png").write_bytes(b"")
    (corpus / "old.rst").write_text("not read")
    lines: list[str] = []
    open_rows(corpus, log=lines.append)
    assert lines == [f"{corpus}: 3 documents; other files are not read (1 .rst, 1 .png)"] or lines == [
        f"{corpus}: 3 documents; other files are not read (1 .png, 1 .rst)"
    ]
    (corpus / "a/rows.jsonl").write_text('{"text": "x"}')
    with pytest.raises(DataError, match=r"has text files and files of rows \(a/rows.jsonl\); name the folders"):
        documents(corpus)
    shutil.copy(corpus / "a/rows.jsonl", corpus / "rows.jsonl")
    with pytest.raises(
        DataError, match=r"has files of rows \(rows.jsonl\) and text files \(a.md\), which would be left"
    ):
        documents(corpus)
    (corpus / "a.md").rename(corpus / "README.md")
    assert documents(corpus).raw(0) == {"text": "x"}, "a description of the data is none of its documents"
    only = corpus / "b"
    (only / "1.txt").rename(only / "1.rst")
    with pytest.raises(
        DataError, match=r"a folder with none of them, but 1 .rst. .*text \(.txt, .md\) for train.phase"
    ):
        open_rows(only)


def test_links_are_followed_to_files_only(corpus: Path, tmp_path: Path):
    (corpus / "c.txt").symlink_to(corpus / "a.md")
    assert documents(corpus)[3].text.startswith("# One")
    (corpus / "d.txt").symlink_to(tmp_path / "nowhere")
    with pytest.raises(DataError, match=r"d.txt is a link to a missing file"):
        documents(corpus)
    (corpus / "d.txt").unlink()
    (corpus / "more").symlink_to(corpus / "a")
    with pytest.raises(DataError, match=r"more is a link to a folder, which is not followed; name its target"):
        documents(corpus)


@pytest.mark.parametrize("kind", ["conversations", "prompts", "pairs", "labelled"])
def test_other_phases_name_the_phase_of_texts(corpus: Path, kind: str):
    with pytest.raises(DataError, match=r"text files \(1.txt\) are documents of train.phase: pretrain; .*messages"):
        documents(corpus, kind)
    with pytest.raises(DataError, match="text files are never copied; remove `stream`"):
        documents(corpus, stream=True)


def test_encrypted_copies_are_the_same_documents(corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    key = tmp_path / "key"
    key.write_bytes(bytes(range(32)))
    key.chmod(0o600)
    monkeypatch.setenv(encryption.FILE, str(key))
    assert main(["encrypt", str(corpus), str(tmp_path / "copy")]) == 0
    copy = documents(tmp_path / "copy")
    assert encryption.is_encrypted(copy.rows.files[0])
    plain = documents(corpus)
    assert [copy.raw(row) for row in range(3)] == [plain.raw(row) for row in range(3)]
    (tmp_path / "copy/b/1.txt").unlink()
    with pytest.raises(DataError, match="missing, although it is in"):
        documents(tmp_path / "copy")
