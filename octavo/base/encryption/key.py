"""The encryption key: 32 bytes from a file or the environment.

    OCTAVO_KEY_FILE=/run/secrets/octavo.key     a file: 64 hex digits, base64, or 32 raw bytes (`--key-file` sets it)
    --key-file <(pass show octavo)              a pipe or another open handle (/dev/fd/N): read once and kept in memory
    OCTAVO_KEY=...                              the key in hex or base64, for launchers that pass secrets as variables

Ranks and data workers inherit both environment variables. Processes that run third-party code (rewards) are started
without them (:func:`environment_without_key`). A `Key` shows its id and never its bytes: not in repr, format, a pickle
or a copy.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import os
import resource
import stat
from types import ModuleType
from typing import TYPE_CHECKING, NoReturn

from octavo.base.encryption.errors import NoKey

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.kdf.hkdf import HKDF

SIZE = 32  # bytes, for AES-256 and HKDF
FILE, VALUE = "OCTAVO_KEY_FILE", "OCTAVO_KEY"
_MAX_FILE_BYTES = 1024  # bytes of a key file
_HOW_TO_GIVE = f"Pass one with --key-file FILE or {FILE}; `octavo encrypt --new-key FILE` creates one"


class Key:
    """A key, from which file keys are derive by HKDF-SHA256 (RFC 5869). `id`: 8 bytes that identify it in the files
    that it encrypts, and from which the key cannot be computed."""

    __slots__ = ("__secret", "id")

    def __init__(self, secret: bytes) -> None:
        if len(secret) != SIZE:
            raise NoKey(f"a key has {SIZE} bytes, but this one has {len(secret)}. {_HOW_TO_GIVE}")
        _refuse_repeated(secret, "the key")
        self.__secret = bytes(secret)
        self.id = self.derive(b"octavo key id", b"", 8)

    def derive(self, info: bytes, salt: bytes, size: int = SIZE) -> bytes:
        """Derive bytes for one purpose, `info`, and one file, `salt`."""
        hashes, hkdf = _import_cryptography()
        return bytes(hkdf(algorithm=hashes.SHA256(), length=size, salt=salt, info=info).derive(self.__secret))

    def __repr__(self) -> str:
        return f"Key({self.id.hex()})"

    def __reduce__(self) -> NoReturn:
        raise TypeError("a key is not pickled and not copied; get it in each process (octavo.base.encryption.find_key)")

    def __getstate__(self) -> NoReturn:
        self.__reduce__()


def find_key() -> Key:
    """Return the key of this process, which from then on writes no core file. Raises NoKey as :func:`process_secret`
    does."""
    file, value = _source()
    source = file or hashlib.sha256((value or "").encode()).hexdigest()
    if source not in _cached:
        secret = process_secret()
        _cached.clear()
        _cached[source] = Key(secret)
    return _cached[source]


def process_secret() -> bytes:
    """Return the 32 bytes of this process's key; from then on it writes no core file. Raises NoKey if there is no key,
    if there are two, and for a value that is not a key."""
    file, value = _source()
    # A core file would contain the key. A limit of 0 applies to files only: with 1 Linux also pipes none to a program.
    hard = resource.getrlimit(resource.RLIMIT_CORE)[1]
    resource.setrlimit(resource.RLIMIT_CORE, (0 if hard == 0 else 1, hard))
    return read_secret(file) if file else _decode_secret((value or "").encode(), VALUE)


def buffer_key_file() -> None:
    """Copy the key to a file in memory if its file is an open handle of this process (/dev/fd/N) or a pipe: these can
    be read only once, while ranks and workers can open the new file by its path as long as this process lives. Raises
    NoKey as :func:`read_secret` does, and if this system has no files in memory."""
    path = os.environ.get(FILE)
    if path and (path.startswith(_HANDLES) or _is_pipe(path)):
        if not hasattr(os, "memfd_create"):
            raise NoKey(
                f"the key file {path} can be read only once, and this system has no in-memory files. Use a regular file"
            )
        secret = read_secret(path)
        handle = os.memfd_create("octavo")
        os.fchmod(handle, 0o600)
        os.write(handle, secret.hex().encode())
        _kept_open.append(handle)
        os.environ[FILE] = f"/proc/{os.getpid()}/fd/{handle}"


_HANDLES = ("/dev/fd/", "/dev/stdin", "/proc/self/fd/", "/proc/thread-self/fd/")
_kept_open: list[int] = []  # files in memory that hold a key


def _is_pipe(path: str) -> bool:
    try:
        return stat.S_ISFIFO(os.stat(path).st_mode)
    except (OSError, ValueError):
        return False


def _source() -> tuple[str | None, str | None]:
    """Return the file of the key and the key as text, of which one is set."""
    buffer_key_file()
    file, value = os.environ.get(FILE), os.environ.get(VALUE)
    if not file and not value:
        raise NoKey(f"there is no key. {_HOW_TO_GIVE}")
    if file and value:
        raise NoKey(f"{FILE} and {VALUE} are both set, but only one key is used. Unset one of them")
    return file, value


_cached: dict[str, Key] = {}  # the key of this process, by its source


def from_file(path: str | os.PathLike[str]) -> Key:
    """Return the key in a file. Raises NoKey as :func:`read_secret` does."""
    return Key(read_secret(path))


def read_secret(path: str | os.PathLike[str]) -> bytes:
    """Return the 32 bytes in a key file; store them in a class that does not print them. Raises NoKey for a file that
    is missing, that all users may read, or that contains no key."""
    try:
        handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except (OSError, ValueError) as cause:
        raise NoKey(f"the key file {path} cannot be read: {getattr(cause, 'strerror', None) or cause}") from cause
    try:
        info = os.fstat(handle)
        if not stat.S_ISREG(info.st_mode) and not stat.S_ISFIFO(info.st_mode):
            raise NoKey(f"the key file {path} is neither a regular file nor a pipe")
        if info.st_mode & stat.S_IROTH:
            raise NoKey(f"the key file {path} can be read by everybody on this machine; run chmod o-rwx on it")
        os.set_blocking(handle, True)  # the writer of a pipe may take a while: a password manager prompts first
        raw = b""
        while len(raw) <= _MAX_FILE_BYTES and (piece := os.read(handle, _MAX_FILE_BYTES)):
            raw += piece
        return _decode_secret(raw, f"the key file {path}")
    finally:
        os.close(handle)


def write_new(path: str | os.PathLike[str]) -> Key:
    """Generate a key and write its file. Raises NoKey as :func:`new_secret` does."""
    return Key(new_secret(path))


def new_secret(path: str | os.PathLike[str]) -> bytes:
    """Generate 32 random bytes and write them, in hex, to a new file that only this user can read. Raises NoKey if the
    path exists."""
    secret = os.urandom(SIZE)
    try:
        handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    except OSError as cause:
        raise NoKey(
            f"a new key cannot be written to {path}: {cause.strerror}; existing keys are never replaced"
        ) from cause
    with open(handle, "wb") as out:
        out.write(secret.hex().encode() + b"\n")
        out.flush()
        os.fsync(handle)
    return secret


def environment_without_key() -> dict[str, str]:
    """Return the environment for a process that runs third-party code: without variables whose names begin with
    OCTAVO_KEY."""
    return {name: value for name, value in os.environ.items() if not name.upper().startswith(VALUE)}


def _refuse_repeated(secret: bytes, where: str) -> None:
    """Raise NoKey for a placeholder: no generator returns one byte 32 times, and such keys are guessed first."""
    if len(set(secret)) == 1:
        raise NoKey(f"{where} is one byte, {SIZE} times: a placeholder, which is easy to guess. {_HOW_TO_GIVE}")


def _decode_secret(raw: bytes, where: str) -> bytes:
    """Return the key in the bytes of a file or variable: hex, base64 or raw. Raises NoKey, which does not quote
    them."""
    secret = _parse_secret(raw, where)
    _refuse_repeated(secret, f"the key in {where}" if where == VALUE else where)
    return secret


def _parse_secret(raw: bytes, where: str) -> bytes:
    text = raw.strip()
    # 32 printable characters are not raw random bytes: `openssl rand -hex 16` writes them, and they are half a key.
    if len(raw) == SIZE and not (raw.isascii() and raw.decode().isprintable()):
        return raw
    try:
        if len(text) == 2 * SIZE:
            return binascii.unhexlify(text)
        key = base64.b64decode(text.translate(bytes.maketrans(b"-_", b"+/")) + b"=" * (-len(text) % 4), validate=True)
        if len(key) == SIZE:
            return key
    except (ValueError, binascii.Error):
        pass
    raise NoKey(f"{where} holds no key: a key is {2 * SIZE} hex digits, base64 of {SIZE} bytes, or {SIZE} bytes")


def _import_cryptography() -> tuple[ModuleType, type[HKDF]]:
    """Return the hashes and HKDF of `cryptography`. Raises NoKey if it is not installed."""
    try:
        from cryptography.hazmat.primitives import hashes
        from cryptography.hazmat.primitives.kdf.hkdf import HKDF
    except ImportError as cause:
        raise NoKey("encrypted files need the package cryptography: pip install 'octavo[sealed]'") from cause
    return hashes, HKDF
