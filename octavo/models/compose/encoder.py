"""The image encoder of a composed model, of either kind: for images of one size, or of any size."""

from __future__ import annotations

from pathlib import Path

from octavo.base.encryption import is_encrypted
from octavo.models.compose.grid import MERGER, WHOLE, GridEncoder, read_grid_encoder
from octavo.models.compose.tile import FEATURE_LAYER, TileEncoder, read_tile_encoder
from octavo.models.custom.composed import TOWERS
from octavo.models.errors import ModelError
from octavo.models.folder.folder import check_weight_files, read_json
from octavo.models.folder.quantization import read_quantization
from octavo.models.processors.image import settings_file

LLAVA = "mlp2"
"""The projector of towers for images of one size if none is named."""
_FLOATS = ("F32", "F16", "BF16", "F64")


def read_encoder(
    folder: Path, image_size: int | None, feature_layer: int, projector: str | None, problems: list[str]
) -> TileEncoder | GridEncoder | None:
    """Read the configuration and the image processor of an image encoder's folder. Adds a sentence to `problems` for
    each thing that keeps it from being composed, and returns None if there is any. `projector` is a known name or
    None."""
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
    entries = content.get("image_processor", content)
    if not isinstance(entries, dict):
        problems.append(f"{file}: image_processor is {entries!r:.80}; it must be a mapping")
        return None
    settings = dict(entries)
    # The towers of Qwen-VL are recognised by their kind; all others are judged as towers for images of one size.
    if isinstance(kind, str) and (kind in WHOLE or kind in TOWERS):
        if feature_layer != FEATURE_LAYER:
            problems.append(
                f"--feature-layer: {folder} has a merger, which takes the output of the last block; remove it"
            )
        if projector not in (None, MERGER):
            problems.append(
                f"--projector {projector}: {folder} has a merger, which is the projector; remove it, or name {MERGER}"
            )
        return read_grid_encoder(folder, settings, image_size, problems)
    return read_tile_encoder(folder, settings, image_size, feature_layer, projector or LLAVA, problems)


def check_weights(folder: Path) -> None:
    """Read the headers of a part's weight files. Raises ModelError for missing, damaged, pickled, encrypted and
    quantized weights."""
    headers = check_weight_files(folder)
    if encrypted := [header.file for header in headers if is_encrypted(folder / header.file)]:
        raise ModelError(f"{folder}/{encrypted[0]} is encrypted; an image encoder must be plain: octavo decrypt")
    codes = [entry.name for header in headers for entry in header.entries if entry.dtype not in _FLOATS]
    if read_quantization(folder) is not None or codes:
        named = f" ({codes[0]})" if codes else ""
        raise ModelError(f"{folder} is quantized{named}; an image encoder must be in high precision: octavo export")
