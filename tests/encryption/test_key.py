"""Sources of keys, rejected keys, and that a key is never shown."""

from __future__ import annotations

import base64
import copy
import os
import resource
import subprocess
import sys
import traceback

import pytest

from octavo.base import encryption
from octavo.base.encryption.key import environment_without_key, from_file, write_new
from tests.encryption.conftest import SECRET

FORMS = {
    "hex": SECRET.hex().encode(), "HEX": SECRET.hex().upper().encode() + b"\n", "raw": SECRET,
    "base64": base64.b64encode(SECRET) + b"\n", "urlsafe": base64.urlsafe_b64encode(SECRET).rstrip(b"="),
}  # fmt: skip


@pytest.mark.parametrize("form", FORMS)
def test_key_file_formats(tmp_path, monkeypatch, form):
    file = tmp_path / "key"
    file.write_bytes(FORMS[form])
    file.chmod(0o600)
    monkeypatch.delenv(encryption.VALUE, raising=False)
    monkeypatch.setenv(encryption.FILE, str(file))
    assert encryption.find_key().id == encryption.Key(SECRET).id


@pytest.mark.parametrize(
    "wrong", [b"", b"words", SECRET[:31], SECRET + b"!", SECRET.hex().encode()[:-2], b"zz" * 32,
     b"0123456789abcdef" * 2],
    ids=["empty", "words", "short", "long", "cut", "no-hex", "half a key"],
)  # fmt: skip
def test_invalid_key_is_rejected_without_showing_it(tmp_path, wrong):
    file = tmp_path / "key"
    file.write_bytes(wrong)
    file.chmod(0o600)
    with pytest.raises(encryption.NoKey, match=r"key holds no key: a key is 64 hex digits") as found:
        from_file(file)
    told = "".join(traceback.format_exception(found.value))
    assert not wrong or wrong.decode("latin1") not in told


def test_invalid_key_file_is_rejected(tmp_path, monkeypatch, key):
    with pytest.raises(encryption.NoKey, match="No such file"):
        from_file(tmp_path / "none")
    with pytest.raises(encryption.NoKey, match="neither a regular file nor a pipe"):
        from_file(tmp_path)
    file = tmp_path / "open.key"
    file.write_text(SECRET.hex())
    file.chmod(0o644)
    with pytest.raises(encryption.NoKey, match="can be read by everybody"):
        from_file(file)
    with pytest.raises(encryption.NoKey, match="existing keys are never replaced"):
        write_new(file)
    monkeypatch.setenv(encryption.FILE, str(file))
    with pytest.raises(encryption.NoKey, match="are both set"):
        encryption.find_key()
    monkeypatch.delenv(encryption.FILE)
    monkeypatch.delenv(encryption.VALUE)
    with pytest.raises(encryption.NoKey, match="--new-key"):
        encryption.find_key()


def test_new_key_is_readable_only_by_its_user(tmp_path):
    made = write_new(tmp_path / "key")
    assert (tmp_path / "key").stat().st_mode & 0o777 == 0o600
    assert from_file(tmp_path / "key").id == made.id != write_new(tmp_path / "another").id


def test_key_is_never_shown(key):
    shown = [repr(key), str(key), f"{key}", format(key), repr([key]), repr(vars(encryption.Key))]
    assert not any(form in text for text in shown for form in (SECRET.hex(), repr(SECRET)[2:-1]))
    for taken in (copy.copy, copy.deepcopy):
        with pytest.raises(TypeError, match="not pickled and not copied"):
            taken(key)
    assert not {encryption.FILE, encryption.VALUE} & environment_without_key().keys()


def test_core_files_are_disabled(key):
    """At 0 Linux still pipes one to the program that core_pattern names; 1 is its word for none at all."""
    encryption.process_secret()
    soft, hard = resource.getrlimit(resource.RLIMIT_CORE)
    assert soft == (0 if hard == 0 else 1)


@pytest.mark.parametrize("wrong", [bytes(32), b"\xff" * 32, b"00" * 32, b"Aa" * 32, base64.b64encode(bytes(32))],
                         ids=["zeros", "raw", "hex", "hex of one byte", "base64"])  # fmt: skip
def test_repeated_byte_is_not_a_key(tmp_path, monkeypatch, wrong):
    file = tmp_path / "key"
    file.write_bytes(wrong)
    file.chmod(0o600)
    with pytest.raises(encryption.NoKey, match=r"is one byte, 32 times: a placeholder"):
        from_file(file)
    if wrong.isascii() and len(wrong) != 32:
        monkeypatch.delenv(encryption.FILE, raising=False)
        monkeypatch.setenv(encryption.VALUE, wrong.decode())
        with pytest.raises(encryption.NoKey, match=r"OCTAVO_KEY is one byte, 32 times"):
            encryption.find_key()
    encryption.Key(bytes([0] * 31 + [1]))  # nearly so is one


def pipe(raw: bytes) -> int:
    """The end of a pipe from which these bytes are read, once."""
    end, start = os.pipe()
    os.write(start, raw)
    os.close(start)
    return end


def key_of(words: list[str], **more) -> subprocess.CompletedProcess[str]:
    """What a process whose key comes by `words` finds, what it finds again, and what a child of its finds."""
    script = (
        "import subprocess, sys; from argparse import Namespace as Given; from octavo.base import encryption as vault;"
        "from octavo.cli import arguments;"
        "arguments.use_key(Given(key_file=sys.argv[1] if len(sys.argv) > 1 else None));"
        "print(vault.find_key().id.hex(), vault.Key(vault.process_secret()).id.hex(), subprocess.run([sys.executable, "
        "'-c','from octavo.base import encryption as vault; print(vault.find_key().id.hex())'], capture_output=True, "
        "text=True, check=True).stdout)"
    )
    env = {name: value for name, value in os.environ.items() if name not in (encryption.FILE, encryption.VALUE)}
    env |= more.pop("environment", {})
    return subprocess.run(
        [sys.executable, "-c", script, *words], env=env, capture_output=True, text=True, check=False, **more
    )


@pytest.mark.parametrize("how", ["--key-file", "OCTAVO_KEY_FILE", "a file behind the handle"])
def test_key_from_handle_is_read_once_and_inherited(tmp_path, how):
    """`--key-file <(pass show octavo)`: the pipe is empty after the first reading, and no child has the handle."""
    if how == "a file behind the handle":
        (tmp_path / "key").write_text(SECRET.hex())
        (tmp_path / "key").chmod(0o600)
        handle = os.open(tmp_path / "key", os.O_RDONLY)
    else:
        handle = pipe(SECRET.hex().encode() + b"\n")
    path = f"/dev/fd/{handle}"
    environment = {encryption.FILE: path} if how == "OCTAVO_KEY_FILE" else {}
    done = key_of([] if environment else [path], environment=environment, pass_fds=[handle])
    os.close(handle)
    assert done.stdout.split() == [encryption.Key(SECRET).id.hex()] * 3, done.stderr


@pytest.mark.parametrize("raw", [b"", b"words", bytes(5000), b"00" * 32])
def test_handle_without_key_is_rejected(tmp_path, monkeypatch, raw):
    handle = pipe(raw)
    monkeypatch.delenv(encryption.VALUE, raising=False)
    monkeypatch.setenv(encryption.FILE, f"/dev/fd/{handle}")
    with pytest.raises(encryption.NoKey, match=rf"/dev/fd/{handle} "):
        encryption.find_key()
    os.close(handle)
    with pytest.raises(encryption.NoKey, match=rf"/dev/fd/{handle} cannot be read"):
        encryption.find_key()
