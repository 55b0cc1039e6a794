"""A model folder for libraries that open its files by their names: configuration, tokenizer, processor, templates.

Where such files are encrypted, they get a folder of links instead: those of encrypted ones lead to their plain text in
memory (`octavo.base.encryption`), the others to the files themselves. It is gone when the library has read them.
Weights are not in it: Octavo reads them itself, a piece at a time.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from octavo.base import encryption
from octavo.base.encryption.anonymous_file import plain_path
from octavo.models.errors import ModelError
from octavo.models.folder.headers import is_weights


@contextmanager
def readable(folder: Path) -> Iterator[Path]:
    """The folder itself, or one of links for as long as the block runs. Raises ModelError where a file is damaged, or
    its key is not given."""
    try:
        encryption.check_folder(folder)
    except encryption.VaultError as cause:
        raise ModelError(f"{cause}.") from cause
    files = [file for file in sorted(folder.iterdir()) if file.is_file() and not is_weights(file)]
    files = [file for file in files if file.name != encryption.LIST]
    if not any(map(encryption.is_encrypted, files)):
        yield folder
        return
    with ExitStack() as stack:
        made = Path(stack.enter_context(TemporaryDirectory(prefix="octavo-")))
        try:
            for file in files:
                (made / file.name).symlink_to(stack.enter_context(plain_path(file.absolute())))
        except encryption.VaultError as cause:
            raise ModelError(f"{cause}.") from cause
        yield made
