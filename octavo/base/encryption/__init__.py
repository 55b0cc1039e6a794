"""Encryption of files at rest with AES-256-GCM: the key, the file format, the reader and the writer. For libraries that
open paths, plain text stays in memory and is never written to a disk."""

from octavo.base.encryption.encrypted_lines import SUFFIX, append_lines, decrypt_line, encrypt_line
from octavo.base.encryption.errors import Damaged, NoKey, VaultError, WrongKey
from octavo.base.encryption.folders import (
    LIST,
    Folder,
    check_file,
    check_folder,
    check_plain,
    open_decrypted,
    write_file,
)
from octavo.base.encryption.key import FILE, VALUE, Key, find_key, process_secret
from octavo.base.encryption.reader import Reader, decrypt, has_magic, is_encrypted
from octavo.base.encryption.writer import Writer, encrypt

__all__ = [
    "Damaged", "FILE", "Folder", "Key", "LIST", "NoKey", "Reader", "SUFFIX", "VALUE", "VaultError", "Writer",
    "WrongKey", "append_lines", "check_file", "check_folder", "check_plain", "decrypt", "decrypt_line", "encrypt",
    "encrypt_line", "find_key", "has_magic", "is_encrypted", "open_decrypted", "process_secret", "write_file",
]  # fmt: skip
