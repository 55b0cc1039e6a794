"""The format of encrypted files in docs/encryption.md, and the detection of every change."""

from __future__ import annotations

import hashlib
import hmac
import io
import pickle
import random

import pytest
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from octavo.base import encryption
from octavo.base.encryption import file_format
from octavo.base.encryption.file_format import Place, header_tag
from octavo.base.encryption.writer import open_encrypted
from tests.encryption.conftest import SECRET

CHUNK, HEADER, TAG = 4096, 70, 16
#: b"octavo" under bytes 0 to 31, in chunks of 4096 bytes: they must be read for ever. In version 1; in version 2; and
#: bound to hf/a.json of the folder whose id is bytes 0 to 15
KNOWN = [
    "8f4f43544145530100001000eeeacf5d17c307225134f9a2ca28ab769a53a317f36232ed7afd8384872ed10e08134f71f8319118bddf12cb"
    "f22dc22e71a3e9ee5e54483ba45e9432d4b3ef052cff6fa8156831465b7de91ce6b4",
    "8f4f43544145530200001000eeeacf5d17c30722404142434445464748494a4b4c4d4e4f505152535455565758595a5b5c5d5e5f0000dcf0"
    "72af4c90ff7e38bfb92e7124f2a320ba1d4f5d364127d9045d43038ff16ff48a85dd3b02",
    "8f4f43544145530200001000eeeacf5d17c30722404142434445464748494a4b4c4d4e4f505152535455565758595a5b5c5d5e5f00090001"
    "02030405060708090a0b0c0d0e0f68662f612e6a736f6e0fd2ca76e7392c08ba01071d16d4fba820ba1d4f5d364127d9045d43038ff16ff4"
    "8a85dd3b02",
]
PLACE = Place(bytes(range(16)), b"hf/a.json")


def by_the_page(stored: bytes, key: bytes) -> bytes:
    """The plain text, and before it the name, by docs/encryption.md alone, with HKDF of the standard library."""

    def hkdf(salt: bytes, info: bytes) -> bytes:
        secret = hmac.digest(salt or bytes(32), key, hashlib.sha256)
        return hmac.digest(secret, info + b"\x01", hashlib.sha256)

    assert stored[:7] == b"\x8fOCTAES" and stored[7] in (1, 2)
    length = int.from_bytes(stored[52:54], "big") if stored[7] == 2 else 0
    begin = 52 if stored[7] == 1 else 70 + length if length else 54
    assert stored[12:20] == hkdf(b"", b"octavo key id")[:8]
    size, aead = int.from_bytes(stored[8:12], "big"), AESGCM(hkdf(stored[20:52], stored[:20]))
    assert aead.decrypt(bytes(11) + b"\x02", stored[begin : begin + 16], stored[:begin]) == b""
    pieces = [stored[n : n + size + 16] for n in range(begin + 16, len(stored), size + 16)]
    last = len(pieces) - 1
    return stored[70 : 70 + length] + b"".join(
        aead.decrypt(bytes(3) + n.to_bytes(8, "big") + bytes([n == last]), piece, None)
        for n, piece in enumerate(pieces)
    )


@pytest.mark.parametrize("known", KNOWN)
def test_known_answer(key, known):
    stored = bytes.fromhex(known)
    reader = encryption.Reader(stored, "a")
    name = b"" if reader.place is None else reader.place.name
    assert encryption.decrypt(stored, "a") == b"octavo" and by_the_page(stored, SECRET) == name + b"octavo"
    assert key.id.hex() == "eeeacf5d17c30722" and reader.version == stored[7]
    assert header_tag(stored) == reader.tag


def test_name_is_part_of_the_header(key):
    stored = encryption.encrypt(b"words", place=PLACE)
    assert encryption.Reader(stored, "a").place == PLACE and len(stored) == 86 + len(PLACE.name) + 5 + TAG
    for at in range(52, 86 + len(PLACE.name)):  # the length, the folder, the name, the tag
        for bit in range(8):
            broken = bytearray(stored)
            broken[at] ^= 1 << bit
            assert "its header" in refused(bytes(broken))
    older = stored[:7] + b"\x01" + stored[8:]  # to take the name off
    assert "its header" in refused(older)
    assert "its header" in refused(older[:52] + stored[-TAG - 21 : -21] + older[68:])
    for left in range(8, len(stored)):
        refused(stored[:left])
    longest = Place(PLACE.folder, b"a" * 4096)
    assert encryption.Reader(encryption.encrypt(b"words", place=longest), "a").place == longest


@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(
    chunks=st.integers(0, 3), more=st.integers(-2, 2), cuts=st.lists(st.integers(1, 3 * CHUNK), max_size=4),
    start=st.integers(0, 4 * CHUNK), count=st.integers(0, 2 * CHUNK),
)  # fmt: skip
def test_round_trip_of_all_sizes(key, chunks, more, cuts, start, count):
    plain = random.Random(chunks).randbytes(max(0, chunks * CHUNK + more))
    out = io.BytesIO()
    writer = encryption.Writer(out, CHUNK)
    rest = plain
    for cut in cuts:
        writer.write(rest[:cut])
        rest = rest[cut:]
    writer.write(rest)
    assert writer.tell() == len(plain)
    writer.finish()
    stored = out.getvalue()
    assert len(stored) == HEADER + len(plain) + TAG * max(1, -(-len(plain) // CHUNK))
    assert by_the_page(stored, SECRET) == plain
    reader = io.BufferedReader(encryption.Reader(stored, "a"))
    assert reader.seek(0, 2) == len(plain)
    reader.seek(start)
    assert reader.read(count) == plain[start : start + count]
    reader.seek(0)
    assert reader.read() == plain


def test_equal_texts_give_different_files(key):
    stored = [encryption.encrypt(b"the same words" * 99) for _ in range(2)]
    assert stored[0] != stored[1] and not any(b"words" in one for one in stored)


def refused(stored: bytes) -> str:
    with pytest.raises(encryption.Damaged) as found:
        encryption.decrypt(stored, "FILE")
    assert "FILE is damaged" in str(found.value) or "FILE is encrypted in version" in str(found.value)
    return str(found.value)


def test_flipped_bits_are_rejected(key):
    plain = random.Random(0).randbytes(3 * CHUNK + 5)
    stored = encryption.encrypt(plain, CHUNK)
    at = {*range(7, HEADER), *random.Random(1).sample(range(HEADER, len(stored)), 60), len(stored) - 1}
    for byte in at:
        broken = bytearray(stored)
        broken[byte] ^= 1 << byte % 8
        with pytest.raises(encryption.WrongKey if 12 <= byte < 20 else encryption.Damaged, match="FILE"):
            encryption.decrypt(bytes(broken), "FILE")
    assert not encryption.has_magic(b"\x8eOCTAES\x02")  # and a file that does not begin so is none


def test_moved_chunks_are_rejected(key):
    whole = CHUNK + TAG
    stored, other = (encryption.encrypt(random.Random(n).randbytes(3 * CHUNK + 5), CHUNK) for n in range(2))
    head, chunks, tail = (
        stored[:HEADER],
        [stored[HEADER + n * whole :][:whole] for n in range(3)],
        stored[HEADER + 3 * whole :],
    )
    for number, broken in (
        (0, [chunks[1], chunks[0], chunks[2], tail]), (1, [chunks[0], chunks[0], chunks[2], tail]),
        (1, [chunks[0], other[HEADER + whole : HEADER + 2 * whole], chunks[2], tail]),
        (2, [chunks[0], chunks[2], tail]), (4, [*chunks, chunks[0], tail]), (3, [*chunks, other[-len(tail) :]]),
    ):  # fmt: skip
        assert f"chunk {number} of" in refused(head + b"".join(broken))
    assert "chunk 2 of 3" in refused(head + b"".join(chunks))  # cut at a border: the last is not marked as the last
    assert "chunk 0 of 1" in refused(head + chunks[0])
    assert "chunk" in refused(other[:HEADER] + stored[HEADER:])
    assert "(bytes 70 to 4181)" in refused(head + b"".join([chunks[1], chunks[0], chunks[2], tail]))


@pytest.mark.parametrize("left", [0, 7, 8, 67, 69, 70, 71, 85, 86, 5000])
def test_truncated_files_are_rejected(key, left):
    stored = encryption.encrypt(bytes(3 * CHUNK), CHUNK)
    if left >= 8:
        refused(stored[:left])
    else:
        assert not encryption.has_magic(stored[:left][:7]) or refused(stored[:left].ljust(8, b"\x01"))


def test_empty_file_round_trip(key):
    assert encryption.decrypt(encryption.encrypt(b""), "a") == b""


def test_unfinished_file_cannot_be_read(key, tmp_path):
    with pytest.raises(RuntimeError, match="power"), open_encrypted(tmp_path / "a", CHUNK) as out:
        out.write(bytes(5 * CHUNK))
        raise RuntimeError("power")
    assert (tmp_path / "a").stat().st_size > 4 * CHUNK
    refused((tmp_path / "a").read_bytes())


def test_later_version_and_other_key_are_reported(key, other, monkeypatch):
    stored = encryption.encrypt(b"words")
    assert "in version 3 of the format" in refused(stored[:7] + b"\x03" + stored[8:])
    monkeypatch.delenv(encryption.VALUE)
    monkeypatch.setenv(encryption.FILE, str(other))
    with pytest.raises(
        encryption.WrongKey, match=rf"FILE was encrypted with another key, {key.id.hex()}; the key in use is"
    ):
        encryption.decrypt(stored, "FILE")


def test_each_line_is_a_separate_file(key):
    line = encryption.encrypt_line(b"words\n")
    assert encryption.decrypt_line(line[:-1], "L") == b"words\n" and b"words" not in line
    for broken in (line[:-9], line[:50] + (b"A" if line[50:51] != b"A" else b"B") + line[51:-1], b"{}", b""):
        with pytest.raises(encryption.Damaged, match="L"):
            encryption.decrypt_line(broken, "L")


def test_number_of_chunks_per_key_is_limited(key, monkeypatch):
    monkeypatch.setattr(file_format, "MAX_CHUNKS", 2)
    with pytest.raises(encryption.VaultError, match="more than 2 chunks"):
        encryption.encrypt(bytes(3 * CHUNK), CHUNK)


def test_reader_has_no_fileno(key, tmp_path):
    (tmp_path / "a").write_bytes(encryption.encrypt(b"words"))
    with pytest.raises(io.UnsupportedOperation, match="is encrypted"), open(tmp_path / "a", "rb") as file:
        encryption.Reader(file.read(), "a").fileno()
    told = pickle.loads(pickle.dumps(encryption.Damaged("it is damaged")))  # as a data worker hands it over
    assert isinstance(told, encryption.Damaged) and isinstance(told, OSError) and str(told) == "it is damaged"


def test_nonce_is_not_reused_after_failed_write(key):
    """What was half written under a nonce may lie on the disk: other bytes under the same one would give both away."""

    class Full(io.BytesIO):
        def write(self, data):
            if len(data) > 100:
                raise OSError(28, "No space left on device")
            return super().write(data)

    writer, used = encryption.Writer(Full(), CHUNK), []
    object.__setattr__(
        writer._cipher,
        "aead",
        type("", (), {"encrypt": lambda self, nonce, *rest: used.append(nonce) or bytes(CHUNK)})(),
    )
    for _ in range(2):
        with pytest.raises(OSError, match="No space"):
            writer.write(bytes(2 * CHUNK))
    assert len(used) == len(set(used)) == 2
    done = encryption.Writer(io.BytesIO(), CHUNK)
    done.finish()
    with pytest.raises(ValueError, match="last chunk"):
        done.write(b"more")
