"""The image encoder of a composed model, of either kind: for images of one size, or of any size."""

from __future__ import annotations

from pathlib import Path

from octavo.models.compose.grid import WHOLE, GridEncoder, read_grid_encoder
from octavo.models.compose.tile import TileEncoder, read_tile_encoder
from octavo.models.custom.composed import TOWERS
from octavo.models.errors import ModelError
from octavo.models.folder.folder import read_json
from octavo.models.processors.image import settings_file


def read_encoder(
    folder: Path, image_size: int | None, feature_layer: int, problems: list[str]
) -> TileEncoder | GridEncoder | None:
    """Read the configuration and the image processor of an image encoder's folder. Adds a sentence to `problems` for
    each thing that keeps it from being composed, and returns None if there is any."""
    try:
        if not folder.is_dir():
            raise ModelError(f"{folder} is not a folder: an image encoder is a local Hugging Face folder")
        kind = read_json(folder / "config.json").get("model_type")
        file = settings_file(folder)
        if not file.is_file():
            raise ModelError(f"{folder} has no preprocessor_config.json: copy it from the original image encoder")
        content = read_json(file)
    except ModelError as error:
        problems.append(str(error).removesuffix("."))
        return None
    settings = dict(content.get("image_processor", content))
    if isinstance(kind, str) and (kind in WHOLE or kind in TOWERS):
        return read_grid_encoder(folder, settings, image_size, problems)
    return read_tile_encoder(folder, settings, image_size, feature_layer, problems)
