"""Where a key comes from, what is refused as one, and that it is never shown."""

from __future__ import annotations

import base64
import copy
import resource
import traceback

import pytest

from octavo import vault
from tests.vault.conftest import SECRET

FORMS = {
    "hex": SECRET.hex().encode(), "HEX": SECRET.hex().upper().encode() + b"\n", "raw": SECRET,
    "base64": base64.b64encode(SECRET) + b"\n", "urlsafe": base64.urlsafe_b64encode(SECRET).rstrip(b"="),
}  # fmt: skip


@pytest.mark.parametrize("form", FORMS)
def test_every_form_of_a_key_file(tmp_path, monkeypatch, form):
    file = tmp_path / "key"
    file.write_bytes(FORMS[form])
    file.chmod(0o600)
    monkeypatch.delenv(vault.VALUE, raising=False)
    monkeypatch.setenv(vault.FILE, str(file))
    assert vault.find().id == vault.Key(SECRET).id


@pytest.mark.parametrize(
    "wrong", [b"", b"words", SECRET[:31], SECRET + b"!", SECRET.hex().encode()[:-2], b"zz" * 32,
     b"0123456789abcdef" * 2],
    ids=["empty", "words", "short", "long", "cut", "no-hex", "half a key"],
)  # fmt: skip
def test_what_is_no_key_is_refused_without_showing_it(tmp_path, wrong):
    file = tmp_path / "key"
    file.write_bytes(wrong)
    file.chmod(0o600)
    with pytest.raises(vault.NoKey, match=r"key holds no key: that is 64 hex digits") as found:
        vault.from_file(file)
    told = "".join(traceback.format_exception(found.value))
    assert not wrong or wrong.decode("latin1") not in told


def test_what_is_no_key_file_is_refused(tmp_path, monkeypatch, key):
    with pytest.raises(vault.NoKey, match="No such file"):
        vault.from_file(tmp_path / "none")
    with pytest.raises(vault.NoKey, match="no regular file"):
        vault.from_file(tmp_path)
    file = tmp_path / "open.key"
    file.write_text(SECRET.hex())
    file.chmod(0o644)
    with pytest.raises(vault.NoKey, match="can be read by everybody"):
        vault.from_file(file)
    with pytest.raises(vault.NoKey, match="no key is replaced"):
        vault.write_new(file)
    monkeypatch.setenv(vault.FILE, str(file))
    with pytest.raises(vault.NoKey, match="are both set"):
        vault.find()
    monkeypatch.delenv(vault.FILE)
    monkeypatch.delenv(vault.VALUE)
    with pytest.raises(vault.NoKey, match="--new-key"):
        vault.find()


def test_a_new_key_is_for_this_user_alone(tmp_path):
    made = vault.write_new(tmp_path / "key")
    assert (tmp_path / "key").stat().st_mode & 0o777 == 0o600
    assert vault.from_file(tmp_path / "key").id == made.id != vault.write_new(tmp_path / "another").id


def test_a_key_is_shown_nowhere(key):
    shown = [repr(key), str(key), f"{key}", format(key), repr([key]), repr(vars(vault.Key))]
    assert not any(form in text for text in shown for form in (SECRET.hex(), repr(SECRET)[2:-1]))
    for taken in (copy.copy, copy.deepcopy):
        with pytest.raises(TypeError, match="not pickled and not copied"):
            taken(key)
    assert not {vault.FILE, vault.VALUE} & vault.without_key().keys()


def test_no_core_file_and_none_through_a_pipe(key):
    """At 0 Linux still pipes one to the program that core_pattern names; 1 is its word for none at all."""
    vault.given()
    soft, hard = resource.getrlimit(resource.RLIMIT_CORE)
    assert soft == (0 if hard == 0 else 1)
