"""Files at rest under AES-256-GCM: a key, a form, a reader and a writer. What must be seen by libraries that open paths
lies in memory meanwhile, never on a disk in plain."""

from octavo.base.encryption.anonymous_file import anonymous, plain_path
from octavo.base.encryption.encrypted_lines import SUFFIX, append, decrypted_line, encrypted_line, is_list
from octavo.base.encryption.errors import Damaged, Exchanged, NoKey, VaultError, WrongKey
from octavo.base.encryption.file_format import HEADER, Place, tag_of, was_encrypted
from octavo.base.encryption.folders import (
    LINES,
    LIST,
    Folder,
    check_file,
    check_folder,
    check_plain,
    has_list,
    opened,
    put,
    root_of,
)
from octavo.base.encryption.key import (
    FILE,
    VALUE,
    Key,
    find,
    from_file,
    given,
    keep_source,
    new_secret,
    secret_in,
    without_key,
    write_new,
)
from octavo.base.encryption.reader import Reader, begins, decrypted, is_encrypted, read_in_version_1
from octavo.base.encryption.writer import Writer, encrypted, writing

__all__ = [
    "Damaged",
    "Exchanged",
    "FILE",
    "Folder",
    "HEADER",
    "Key",
    "LINES",
    "LIST",
    "NoKey",
    "Place",
    "Reader",
    "SUFFIX",
    "VALUE",
    "VaultError",
    "Writer",
    "WrongKey",
    "anonymous",
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
    "from_file",
    "given",
    "has_list",
    "is_encrypted",
    "is_list",
    "keep_source",
    "new_secret",
    "opened",
    "plain_path",
    "put",
    "read_in_version_1",
    "root_of",
    "secret_in",
    "tag_of",
    "was_encrypted",
    "without_key",
    "write_new",
    "writing",
]
