"""Files at rest under AES-256-GCM: a key, a form, a reader and a writer. What must be seen by libraries that open paths
lies in memory meanwhile, never on a disk in plain."""

from octavo.vault.errors import Damaged, NoKey, VaultError, WrongKey
from octavo.vault.key import FILE, VALUE, Key, find, from_file, given, new_secret, secret_in, without_key, write_new
from octavo.vault.lines import SUFFIX, append, decrypted_line, encrypted_line, is_list
from octavo.vault.memory import anonymous, plain_path
from octavo.vault.reader import Reader, begins, decrypted, is_encrypted, opened
from octavo.vault.writer import Writer, encrypted, put, writing

__all__ = [
    "FILE",
    "SUFFIX",
    "VALUE",
    "Damaged",
    "Key",
    "NoKey",
    "Reader",
    "VaultError",
    "Writer",
    "WrongKey",
    "anonymous",
    "append",
    "begins",
    "decrypted",
    "decrypted_line",
    "encrypted",
    "encrypted_line",
    "find",
    "from_file",
    "given",
    "is_encrypted",
    "is_list",
    "new_secret",
    "opened",
    "plain_path",
    "put",
    "secret_in",
    "without_key",
    "write_new",
    "writing",
]
