"""The model of a configuration with parts: composed into the folder `model.path` before it is planned or trained."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

from filelock import FileLock

from octavo.base import hub
from octavo.config import Config
from octavo.config.sections.model import FoundationPart, ImageEncoderPart
from octavo.models.errors import ModelError

DONE = "config.json"
_KEYS = {
    "--image-size": "model.image_encoder.image_size",
    "--feature-layer": "model.image_encoder.feature_layer",
    "--init-std": "model.image_projector.init_std",
    "--projector": "model.image_projector.kind",
    "--chat-template": "model.foundation.chat_template",
    "--init": "model.image_encoder.init",
}
"""Option of `octavo compose` -> key of a configuration."""
_OPTION = re.compile(r"--[a-z][a-z-]*")


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
        _folder("image_encoder", encoder, log),
        _folder("foundation", foundation, log),
        None if projector is None else projector.kind,
        image_size=encoder.image_size,
        feature_layer=encoder.feature_layer,
        chat_template=None if foundation.chat_template is None else Path(foundation.chat_template),
        init_std=None if projector is None else projector.init_std,
        seed=0 if projector is None else projector.seed,
        init=("image_encoder",) if encoder.init == "random" else (),
    )
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(target.with_name(f".{target.name}.lock")):
            if not (target / DONE).is_file():
                done = compose(parts, target, log)
                log(f"model.path {target}: {done.why}; the projector is untrained")
    except OSError as error:
        raise ModelError(f"{target} cannot be written: {error.strerror}") from error
    except ModelError as error:
        raise ModelError(_OPTION.sub(lambda option: _KEYS.get(option[0], option[0]), str(error))) from error


def _folder(name: str, part: ImageEncoderPart | FoundationPart, log: Callable[[str], None]) -> Path:
    if not hub.is_name(part.path):
        return Path(part.path)
    return hub.model_folder(part.path, part.revision, None, log, f"model.{name}.path")
