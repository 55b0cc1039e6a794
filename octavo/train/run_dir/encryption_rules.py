"""Rules of `run.encrypt`: the files and messages of such a run contain no weights and no text of its data in plain
text.

The key is looked up first. A run with encrypted inputs must encrypt its outputs. Errors that quote a row are raised
without the quotation.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from octavo.base import encryption
from octavo.base.seal_note import ONE_KEY_ONE_PURPOSE, fingerprint, read_note
from octavo.checkpoint.run_state.files import STATE
from octavo.config import Config
from octavo.data.errors import BadSample, row_place
from octavo.data.storage.cache import list_row_files
from octavo.models.folder.folder import is_weights
from octavo.train.errors import TrainError


def check(cfg: Config) -> None:
    """Raise TrainError if the run must not start: `run.encrypt` without a key or with the key that sealed an input,
    encrypted inputs without `run.encrypt`, or a key in the environment of a run with reward functions from a file."""
    _refuse_readable_key(cfg)
    if cfg.run.encrypt:
        try:
            encryption.find_key()
        except encryption.VaultError as error:
            raise TrainError(f"run.encrypt: {error}") from error
        for folder in _folders(cfg):
            note = read_note(folder, TrainError)
            if note is not None and note.key == fingerprint(encryption.process_secret()):
                raise TrainError(
                    f"run.encrypt: {folder} was sealed with the key for encrypted files. {ONE_KEY_ONE_PURPOSE}"
                )
        return
    for key, file in _inputs(cfg):
        if encryption.is_encrypted(file):
            raise TrainError(
                f"{key}: {file} is encrypted, but run.encrypt is false: checkpoints, answers and lists of this run "
                "would hold in plain text what it learned and read. Set run.encrypt: true"
            )


def _refuse_readable_key(cfg: Config) -> None:
    """Raise TrainError if reward functions could read the key.

    Reward processes do not get the key, but can read the environment of their parent (/proc/PID/environ).
    """
    rewards = () if cfg.rl is None else cfg.rl.rewards
    files = [entry.reward for entry in rewards if ".py:" in str(entry.reward)]
    if files and os.environ.get(encryption.VALUE):
        raise TrainError(
            f"{encryption.VALUE} is set, and rl.rewards names {files[0]}: code in that file could read the key in this "
            f"process's environment. Unset it, and pass the key by --key-file FILE or {encryption.FILE}"
        )


def refuse_plain_checkpoint(path: Path, cfg: Config) -> None:
    """Raise TrainError if a run with `run.encrypt` would resume from a plain checkpoint."""
    if cfg.run.encrypt and not encryption.is_encrypted(path / STATE):
        raise TrainError(
            f"{path} is not encrypted, but run.encrypt is true, so its contents are not authenticated. If you trust "
            f"it, encrypt it (octavo encrypt {path} COPY) and continue from the copy, or start a new run with its "
            f"weights: run.start_from={path}"
        )


@contextmanager
def redact_data_in_errors(cfg: Config) -> Iterator[None]:
    """With `run.encrypt`, replace errors in this context whose message may quote the data by errors without
    quotations."""
    try:
        yield
        return
    except Exception as error:
        if not cfg.run.encrypt or not getattr(error, "quotes", False):
            raise
        what: str = getattr(error, "told", type(error).__name__)  # for a reward, its name
        fix = "To see it, decrypt the data and start without run.encrypt where the data may be read"
        if isinstance(error, BadSample):
            what = f"{row_place(error.file, error.row)} cannot be used ({type(error).__name__})"
            fix = (
                f"With data.on_bad_sample: skip it is listed in {cfg.run.dir}/skipped.jsonl.aes, which octavo decrypt "
                "reads"
            )
        hidden = TrainError(f"{what}: the reason may quote the data, and run.encrypt keeps it out of messages. {fix}")
    raise hidden from None  # outside the except block, and from None: a traceback would print the original message


def _folders(cfg: Config) -> Iterator[str]:
    """Return the folders that the run reads, which may be sealed."""
    paths = [cfg.model.path, *(entry.path for entry in (*cfg.data.train, *cfg.data.eval))]
    if cfg.lora is not None and cfg.lora.adapter is not None:
        paths.append(cfg.lora.adapter)
    return (path for path in paths if Path(path).is_dir())


def _inputs(cfg: Config) -> Iterator[tuple[str, Path]]:
    """Yield (key, file) for the run's inputs, except files in image folders."""
    folders = [("model.path", Path(cfg.model.path))]
    if cfg.lora is not None and cfg.lora.adapter is not None:
        folders.append(("lora.adapter", Path(cfg.lora.adapter)))
    for key, folder in folders:
        if folder.is_dir():
            yield from ((key, file) for file in folder.iterdir() if is_weights(file) or file.suffix == ".json")
    for of in ("train", "eval"):
        for n, entry in enumerate(getattr(cfg.data, of)):
            if Path(entry.path).exists():
                yield from ((f"data.{of}.{n}", file) for file in list_row_files(Path(entry.path)))
    for key in ("resume", "fork", "start_from"):
        if (named := getattr(cfg.run, key)) is not None:
            yield f"run.{key}", Path(named) / STATE
