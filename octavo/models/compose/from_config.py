"""The model of a configuration with parts: composed into the folder `model.path` before it is planned or trained."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from filelock import FileLock

from octavo.base import hub
from octavo.config import Config
from octavo.models.errors import ModelError

DONE = "config.json"


def compose_model(cfg: Config, log: Callable[[str], None]) -> None:
    """Write the composed model of a configuration to its `model.path`, unless that folder exists. Of several processes
    one writes it, and the others wait. Raises ModelError, and HubError for parts that cannot be fetched."""
    target, encoder, foundation = Path(cfg.model.path), cfg.model.image_encoder, cfg.model.foundation
    if encoder is None or foundation is None or (target / DONE).is_file():
        return
    # Imported here, because a run whose model is composed already needs none of it.
    from octavo.models.compose.compose import Parts, compose

    projector = cfg.model.image_projector
    parts = Parts(
        _folder(encoder.path, log),
        _folder(foundation.path, log),
        image_size=encoder.image_size,
        feature_layer=encoder.feature_layer,
        chat_template=None if foundation.chat_template is None else Path(foundation.chat_template),
        init_std=None if projector is None else projector.init_std,
        seed=0 if projector is None else projector.seed,
        init=("image_encoder",) if encoder.init == "random" else (),
    )
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        lock = FileLock(target.with_name(f"{target.name}.lock"))
        with lock:
            if not (target / DONE).is_file():
                done = compose(parts, target, log)
                log(f"model.path {target}: {done.why}; the projector is untrained")
    except OSError as error:
        raise ModelError(f"{target} cannot be written: {error.strerror}") from error


def _folder(path: str, log: Callable[[str], None]) -> Path:
    return hub.model_folder(path, None, None, log) if hub.is_name(path) else Path(path)
