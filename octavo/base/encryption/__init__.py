"""Encryption of files at rest with AES-256-GCM: the key, the file format, the reader and the writer. For libraries that
open paths, plain text is kept in memory and never written to a disk."""

from octavo.base.encryption.encrypted_lines import SUFFIX, append, decrypted_line, encrypted_line
from octavo.base.encryption.errors import Damaged, NoKey, VaultError, WrongKey
from octavo.base.encryption.folders import LIST, Folder, check_file, check_folder, check_plain, open_decrypted, put
from octavo.base.encryption.key import FILE, VALUE, Key, find, process_secret
from octavo.base.encryption.reader import Reader, decrypted, has_magic, is_encrypted
from octavo.base.encryption.writer import Writer, encrypted

__all__ = [
    "Damaged",
    "FILE",
    "Folder",
    "Key",
    "LIST",
    "NoKey",
    "Reader",
    "SUFFIX",
    "VALUE",
    "VaultError",
    "Writer",
    "WrongKey",
    "append",
    "check_file",
    "check_folder",
    "check_plain",
    "decrypted",
    "decrypted_line",
    "encrypted",
    "encrypted_line",
    "find",
    "has_magic",
    "is_encrypted",
    "open_decrypted",
    "process_secret",
    "put",
]
