"""What a run keeps to itself: with `run.encrypt` nothing that it writes or prints holds weights or a word of its data.

The key is looked for before anything else is; a run that reads something encrypted must encrypt what it writes; and an
error that quotes a row is told without the words.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from octavo.base import encryption
from octavo.base.seal_note import ONE_PURPOSE, fingerprint, read_note
from octavo.checkpoint.run_state.files import STATE
from octavo.config import Config
from octavo.data.errors import BadSample
from octavo.data.storage.cache import files_of
from octavo.models.folder.folder import is_weights
from octavo.train.errors import TrainError


def check(cfg: Config) -> None:
    """Raises TrainError where `run.encrypt` has no key or that which sealed an input, without it for inputs that are
    encrypted, and for a key in the environment of a run whose rewards are functions of a user's file."""
    _refuse_shown_key(cfg)
    if cfg.run.encrypt:
        try:
            encryption.find()
        except encryption.VaultError as error:
            raise TrainError(f"run.encrypt: {error}") from error
        for folder in _folders(cfg):
            note = read_note(folder, TrainError)
            if note is not None and note.key == fingerprint(encryption.process_secret()):
                raise TrainError(
                    f"run.encrypt: {folder} was sealed with the key that is given for files. {ONE_PURPOSE}"
                )
        return
    for key, file in _inputs(cfg):
        if encryption.is_encrypted(file):
            raise TrainError(
                f"{key}: {file} is encrypted, and run.encrypt is false: checkpoints, answers and lists of this run "
                "would hold in plain what it learnt and read. Set run.encrypt: true"
            )


def _refuse_shown_key(cfg: Config) -> None:
    """The process of the rewards gets no key, and may read the environment of its parent (/proc/PID/environ)."""
    rewards = () if cfg.rl is None else cfg.rl.rewards
    files = [entry.reward for entry in rewards if ".py:" in str(entry.reward)]
    if files and os.environ.get(encryption.VALUE):
        raise TrainError(
            f"{encryption.VALUE} is set, and rl.rewards names {files[0]}: code of that file could read the key in this "
            f"process's environment. Unset it, and give the key by --key-file FILE or {encryption.FILE}"
        )


def refuse_plain(path: Path, cfg: Config) -> None:
    """Raises TrainError for a plain checkpoint that a run would continue from which trusts encrypted ones alone."""
    if cfg.run.encrypt and not encryption.is_encrypted(path / STATE):
        raise TrainError(
            f"{path} is not encrypted, and run.encrypt is true: nobody vouches for what it holds. Where you do, "
            f"encrypt it (octavo encrypt {path} COPY) and continue from the copy, or begin anew: run.start_from={path}"
        )


@contextmanager
def withholding(cfg: Config) -> Iterator[None]:
    """Inside, an error whose message may hold words of the data says so in their place, with `run.encrypt`."""
    try:
        yield
        return
    except Exception as error:
        if not cfg.run.encrypt or not getattr(error, "quotes", False):
            raise
        what: str = getattr(error, "told", type(error).__name__)  # of a reward its name
        fix = "Where it may be read, decrypt the data and start without run.encrypt to see it"
        if isinstance(error, BadSample):
            what = f"{error.file}, row {error.row} cannot be used ({type(error).__name__})"
            fix = (
                f"With data.on_bad_sample: skip it is listed in {cfg.run.dir}/skipped.jsonl.aes, which octavo decrypt "
                "reads"
            )
        hidden = TrainError(f"{what}: the reason may quote the data, and run.encrypt keeps it out of messages. {fix}")
    raise hidden from None  # whose message would stand in a traceback


def _folders(cfg: Config) -> Iterator[str]:
    """What may be sealed: folders that are read."""
    paths = [cfg.model.path, *(entry.path for entry in (*cfg.data.train, *cfg.data.eval))]
    if cfg.lora is not None and cfg.lora.adapter is not None:
        paths.append(cfg.lora.adapter)
    return (path for path in paths if Path(path).is_dir())


def _inputs(cfg: Config) -> Iterator[tuple[str, Path]]:
    """(key, file) of what is read: one of each kind is asked for, and no folder of images is walked."""
    folders = [("model.path", Path(cfg.model.path))]
    if cfg.lora is not None and cfg.lora.adapter is not None:
        folders.append(("lora.adapter", Path(cfg.lora.adapter)))
    for key, folder in folders:
        if folder.is_dir():
            yield from ((key, file) for file in folder.iterdir() if is_weights(file) or file.suffix == ".json")
    for of in ("train", "eval"):
        for n, entry in enumerate(getattr(cfg.data, of)):
            if Path(entry.path).exists():
                yield from ((f"data.{of}.{n}", file) for file in files_of(Path(entry.path)))
    for key in ("resume", "fork", "start_from"):
        if (named := getattr(cfg.run, key)) is not None:
            yield f"run.{key}", Path(named) / STATE
