"""Progress of long commands: a bar on a terminal, otherwise a line every half minute, always on stderr."""

from __future__ import annotations

import os
import pty
import subprocess
import sys

from octavo.cli import terminal


def test_lines_without_a_terminal_are_rare_and_have_the_time_left(capsys):
    now = [100.0]
    shown = terminal.PlainProgress("export", bytes=True, clock=lambda: now[0])
    for seconds, done in ((0, 2), (10, 3), (29, 4), (31, 5), (40, 6), (62, 8), (95, 10)):
        now[0] = 100.0 + seconds
        shown.update(done * 10**9, 10 * 10**9, "x" if done == 8 else "")
    out, err = capsys.readouterr()
    # 2 GB were done before: 3 GB in 31 s, then 6 GB in 62 s
    assert not out and err.splitlines() == [
        "export: 5 GB of 10 GB, about 50 s left",
        "export: 8 GB of 10 GB, about 20 s left; now x",
        "export: 10 GB of 10 GB",
    ]


def test_short_work_prints_nothing_without_a_terminal(capsys):
    with terminal.progress("verifying") as progress:
        for done in range(5):
            progress(done, 4)
    assert capsys.readouterr() == ("", "")


def test_items_and_fallback(capsys):
    lines = []
    with terminal.progress("measuring", bytes=False, fallback=lambda *words: lines.append(words)) as progress:
        progress(1, 4)
    assert lines == [(1, 4, "")]
    now = [0.0]
    shown = terminal.PlainProgress("searching", bytes=False, clock=lambda: now[0])
    now[0] = 45.0
    shown.update(0, 9)
    assert capsys.readouterr().err == "searching: 0 of 9\n"


def test_interrupted_bar_restores_the_terminal():
    """The bar hides the cursor; whatever ends the work shows it again. Nothing is on stdout."""
    code = (
        "import os, signal, sys, types\n"
        "from octavo.cli import main, terminal\n"
        "def run(args):\n"
        "    with terminal.progress('exporting') as progress:\n"
        "        progress(1, 4, 'a tensor')\n"
        "        os.kill(os.getpid(), signal.SIGINT)\n"
        "schema = types.SimpleNamespace(add_arguments=lambda parser: None, run=run, __doc__='')\n"
        "sys.modules['octavo.cli.schema'] = schema\n"
        "sys.exit(main.main(['schema']))\n"
    )
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-c", code], stderr=theirs, stdout=subprocess.PIPE, env={**os.environ, "TERM": "xterm"}
    )
    os.close(theirs)
    written = b""
    try:
        while part := os.read(ours, 4096):
            written += part
    except OSError:  # Linux reports the end of a pseudo-terminal as an error
        pass
    os.close(ours)
    assert process.communicate()[0] == b"" and process.returncode == 130
    hidden, shown = written.rfind(b"\x1b[?25l"), written.rfind(b"\x1b[?25h")
    assert -1 < hidden < shown and written.endswith(b"octavo: interrupted\r\n")
    assert b"exporting" in written and b"Traceback" not in written
