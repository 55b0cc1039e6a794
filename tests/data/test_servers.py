"""Failing servers (silent, slow, wrong length): retried, bounded and reported."""

from __future__ import annotations

import http.client
import io
import re
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import fsspec
import pytest

from octavo.data import DataError
from octavo.data.storage import remote
from octavo.data.storage.fetched import open_fetched

ROWS = b'{"n": 1}\n{"n": 2}\n'


class Server(BaseHTTPRequestHandler):
    """Answers each request by the next entry of `answers`, and all further requests correctly."""

    answers: list[str] = []
    over = threading.Event()

    def log_message(self, *words: object) -> None:
        pass

    def do_GET(self) -> None:
        how = self.answers.pop(0) if self.answers else "right"
        if how == "silent":
            self.over.wait()  # until the test is over
            return
        self.send_response(int(how) if how.isdecimal() else 200)
        body = {"shorter": ROWS[:9], "longer": ROWS * 50}.get(how, ROWS)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


class Plain(fsspec.AbstractFileSystem):
    """File system for `plain://HOST:PORT/name`, which reads from a server without a timeout."""

    protocol = "plain"
    cachable = False

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return path.removeprefix("plain://")

    def info(self, path: str, **options: object) -> dict[str, object]:
        return {"name": path, "size": len(ROWS), "type": "file"}

    def _open(self, path: str, mode: str = "rb", **options: object) -> io.BytesIO:
        host, _, name = path.partition("/")
        connection = http.client.HTTPConnection(host)
        connection.request("GET", f"/{name}")
        answer = connection.getresponse()
        if answer.status >= 400:
            raise FileNotFoundError(path) from Status(answer.status)  # like fsspec's HTTP implementation
        return io.BytesIO(answer.read())


class Status(Exception):
    """An HTTP status error like aiohttp's."""

    def __init__(self, status: int) -> None:
        super().__init__(f"the server answered {status}")
        self.status = status


@pytest.fixture
def url(monkeypatch: pytest.MonkeyPatch, tmp_path) -> Iterator[str]:
    """Return the URL of a file on a server in this process, whose first four answers are `Server.answers`."""
    fsspec.register_implementation("plain", Plain, clobber=True)
    monkeypatch.setattr(remote, "RETRY_SECONDS", 0.0)
    monkeypatch.setattr(Server, "over", threading.Event())
    monkeypatch.setenv("OCTAVO_CACHE", str(tmp_path / "cache"))
    remote.list_files.cache_clear()
    server = ThreadingHTTPServer(("127.0.0.1", 0), Server)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, args=(0.02,))
    thread.start()
    yield f"plain://127.0.0.1:{server.server_port}/rows.jsonl"
    Server.over.set()
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture
def reports(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    texts: list[str] = []
    monkeypatch.setattr(remote, "report", texts.append)
    return texts


@pytest.mark.parametrize("how", ("500", "503", "429", "shorter", "longer"))
def test_failing_server_is_retried(url, reports, monkeypatch, how):
    monkeypatch.setattr(Server, "answers", [how] * 3)
    rows = open_fetched(url, None)
    assert [rows[n] for n in range(len(rows))] == [{"n": 1}, {"n": 2}]
    why = f"answered {how}" if how.isdecimal() else r"bytes( or more)? received, expected 18"
    assert len(reports) == 3 and all(f"rows.jsonl: try {n} of 4 failed (" in text for n, text in enumerate(reports, 1))
    assert all(re.search(why, text) for text in reports), reports


@pytest.mark.parametrize("how", ("500", "shorter", "longer"))
def test_permanently_failing_server_is_reported(url, reports, monkeypatch, how, tmp_path):
    monkeypatch.setattr(Server, "answers", [how] * 99)
    with pytest.raises(DataError, match=r"rows\.jsonl could not be read in 4 tries \(.*\); check that this machine"):
        open_fetched(url, None)
    assert len(reports) == 4 and not [*tmp_path.glob("cache/fetched/*/.*tmp*")]


@pytest.mark.parametrize("how", ("404", "410", "403"))
def test_missing_remote_file_is_not_retried(url, reports, monkeypatch, how):
    monkeypatch.setattr(Server, "answers", [how] * 99)
    said_by_it = rf"rows\.jsonl cannot be read \(Status: the server answered {how}\); check the URL and who may read it"
    with pytest.raises(DataError, match=said_by_it):
        open_fetched(url, None)
    assert not reports and len(Server.answers) == 98


def test_silent_server_is_retried(url, reports, monkeypatch):
    """The limit is raised after the first try was abandoned, so that a slow machine passes."""
    monkeypatch.setattr(Server, "answers", ["silent"])
    monkeypatch.setattr(remote, "STALL_SECONDS", 0.05)
    monkeypatch.setattr(remote, "report", lambda text: reports.append(text) or setattr(remote, "STALL_SECONDS", 600.0))
    rows = open_fetched(url, None)
    assert [rows[n] for n in range(len(rows))] == [{"n": 1}, {"n": 2}]
    assert reports and "rows.jsonl: try 1 of 4 failed (no data received for 0.05 s)" in reports[0]


def test_unresponsive_server_is_reported(url, reports, monkeypatch):
    monkeypatch.setattr(Server, "answers", ["silent"] * 99)
    monkeypatch.setattr(remote, "STALL_SECONDS", 0.05)
    with pytest.raises(DataError, match=r"rows\.jsonl could not be read in 4 tries \(no data received for 0\.05 s\)"):
        open_fetched(url, None)
    assert len(reports) == 4


def test_slow_connection_gets_smaller_blocks(url, reports, monkeypatch):
    """Blocks of the first size never arrive; smaller ones arrive in time even on a slow machine."""

    class Slow(io.BytesIO):
        def read(self, size: int | None = -1) -> bytes:
            if not 0 < (size or 0) <= 2:
                Server.over.wait()
            return super().read(size)

    monkeypatch.setattr(Plain, "_open", lambda *call, **options: Slow(ROWS))
    for name, value in (("STALL_SECONDS", 0.05), ("_BLOCK", 2 * 16), ("_MIN_BLOCK", 1)):
        monkeypatch.setattr(remote, name, value)
    monkeypatch.setattr(remote, "report", lambda text: reports.append(text) or setattr(remote, "STALL_SECONDS", 600.0))
    rows = open_fetched(url, None)
    assert [rows[n] for n in range(len(rows))] == [{"n": 1}, {"n": 2}] and len(reports) == 1


def test_abandoned_try_does_not_write(tmp_path, monkeypatch):
    """An abandoned try shares its file with the next one."""
    file, watch = tmp_path / "x", remote._Watch()
    file.write_bytes(b"a" * 18)
    monkeypatch.setattr(Plain, "_open", lambda *call, **options: io.BytesIO(ROWS))
    fsspec.register_implementation("plain", Plain, clobber=True)
    watch.abandoned = True
    remote._copy(remote.Remote("plain://h/rows.jsonl", 18, ""), file, watch)
    assert file.read_bytes() == b"a" * 18


def test_failed_tries_are_printed_to_stderr(capsys):
    remote.report("x")
    assert capsys.readouterr().err == "x\n"
