"""Files at rest under AES-256-GCM: a key, a form, a reader and a writer. What must be seen by libraries that open paths
lies in memory meanwhile, never on a disk in plain."""

from octavo.base.encryption.encrypted_lines import SUFFIX, append, decrypted_line, encrypted_line
from octavo.base.encryption.errors import Damaged, NoKey, VaultError, WrongKey
from octavo.base.encryption.folders import LIST, Folder, check_file, check_folder, check_plain, opened, put
from octavo.base.encryption.key import FILE, VALUE, Key, find, given
from octavo.base.encryption.reader import Reader, begins, decrypted, is_encrypted
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
    "begins",
    "check_file",
    "check_folder",
    "check_plain",
    "decrypted",
    "decrypted_line",
    "encrypted",
    "encrypted_line",
    "find",
    "given",
    "is_encrypted",
    "opened",
    "put",
]
