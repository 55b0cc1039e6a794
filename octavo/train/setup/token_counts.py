"""Counts the tokens of each component in one forward (the M of its GEMMs) from the data."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from octavo import models
from octavo.config import Config
from octavo.config.sections.rl import BEYOND_SFT
from octavo.data.loaders.from_config import train_loader
from octavo.train.errors import TrainError

MICRO_BATCHES = 8  # number of micro-batches to read
_PIXELS = 1024 * 1024  # pixels per image if data.max_pixels is not set


@dataclass(frozen=True)
class Tokens:
    """Token numbers of one forward.

    ``counts`` gives the tokens of each component. ``row``, ``image`` and ``sound`` are the numbers of tokens that
    attend to each other: the tokens of a row of the batch, the patches of an image and the positions of a sound.
    ``sample`` is, for packs, the mean length of a sample weighted by its cost, sum(l^2) / sum(l); 0 means the row.
    """

    counts: Mapping[str, int]
    row: int
    image: int
    sample: int = 0
    sound: int = 0

    @property
    def rows(self) -> int:
        """The number of rows of the batch."""
        return max(1, self.counts.get("foundation", 0) // self.row)

    def shared(self, ranks: int) -> Tokens:
        """Return the tokens of one of the ranks that share a row.

        A rank has a part of the tokens, which still attend to the whole row, and a part of the images, which are not
        split.
        """
        if ranks == 1:
            return self
        part = {name: -(-n // ranks) for name, n in self.counts.items() if not name.startswith("image_")}
        patches, out = (self.counts.get(name, 0) for name in ("image_encoder", "image_projector"))
        share = min(patches, max(self.image, -(-patches // ranks)))
        features = -(-out * share // patches) if patches else 0
        seen = {"image_encoder": share, "image_projector": features}
        row = max(-(-self.row // ranks), features + 2 if features else 0)
        part |= {name: n for name, n in seen.items() if name in self.counts}
        return Tokens(part, row, self.image, self.sample or self.row)


def rows_per_micro_batch(cfg: Config) -> int:
    """Return the number of rows of a micro-batch; a pair makes two rows."""
    return cfg.train.micro_batch * (2 if _has_pairs(cfg) else 1)


def _has_pairs(cfg: Config) -> bool:
    return cfg.train.phase == "preference" and (cfg.preference is None or cfg.preference.loss != "kto")


def count_tokens(cfg: Config, processor: Any, family: models.Family, config: Any) -> Tokens:
    """Return the mean token counts over the first micro-batches of the training data.

    Padding is included, because GEMMs run over it too. The mean for towers is over micro-batches with an image. Skipped
    rows do not count; micro-batches are assumed to be full. If text-only rows make the mean too short for an image,
    the row length is taken from rows with an image. Counts are rounded up to a multiple of 16, or of 128 from 1024 on,
    since similar sizes cost the same and can share a measurement.

    For phases rl and preference, returns :func:`assume_tokens`. Raises the DataErrors of training on these rows.
    """
    if cfg.train.phase in BEYOND_SFT:
        return assume_tokens(cfg, family.components, config)[0]
    train = cfg.train.model_copy(update={"global_batch": cfg.train.micro_batch})
    plain = cfg.model_copy(update={"train": train, "data": cfg.data.model_copy(update={"workers": 0})})
    loader = train_loader(plain, processor)
    try:
        micro_batches = (batch for step in loader for batch in step)
        batches = [*itertools.islice((b for b in micro_batches if b["meta"].samples), MICRO_BATCHES)]
    finally:
        loader.close()
    with_image = [batch for batch in batches if batch["meta"].sees]
    rows = cfg.train.micro_batch
    decoder = _mean_of_full(batches, [batch["input_ids"].numel() for batch in batches], rows)
    counts = {"foundation": decoder, "lm_head": decoder, "image_encoder": 0, "image_projector": 0}
    image = 0
    if with_image and family.has_vision:
        patches, features, images = zip(*(_patches(batch, config) for batch in with_image), strict=True)
        counts["image_encoder"] = _mean_of_full(with_image, patches, rows)
        counts["image_projector"] = _mean_of_full(with_image, features, rows)
        image = max(1, sum(patches) // sum(images))
        rounding = _round_up(counts["image_encoder"]) / counts["image_encoder"]
        room = math.ceil(counts["image_projector"] * rounding) + _mean_of_full(
            with_image, images, rows
        )  # one text token after each image
        if room > decoder:
            decoder = max(room, _mean_of_full(with_image, [batch["input_ids"].numel() for batch in with_image], rows))
            counts |= {"foundation": decoder, "lm_head": decoder}
    row = max(1, -(-decoder // rows))
    sound = 0
    if family.has_audio:
        audio = models.audio_of(config)
        with_sound = [batch for batch in batches if batch["meta"].has_audio]
        sound = audio.positions if with_sound else 0
        sounds = (
            _mean_of_full(with_sound, [sum(batch["meta"].sounds) for batch in with_sound], rows) if with_sound else 0
        )
        counts |= {"audio_encoder": sounds * sound, "audio_projector": sounds * audio.features}
    known = {name: _round_up(counts[name]) for name in family.components if name in counts}
    lengths = [length for batch in batches for length in batch["meta"].lengths] if cfg.data.packing else []
    sample = sum(length**2 for length in lengths) // max(1, sum(lengths))
    return Tokens(known, row, image, sample, sound)


def complete_tokens(cfg: Config, family: models.Family, tokens: Mapping[str, int]) -> Tokens:
    """Return the given token counts, completed for every component of the family.

    Raises TrainError for an unknown component, and for a component without a count.
    """
    unknown = [name for name in tokens if name not in family.components]
    if unknown:
        raise TrainError(
            f"tokens were given for {', '.join(unknown)}, but {family.name} has no such component; it has "
            f"{', '.join(family.components)}"
        )
    derived = ("lm_head", "image_projector", "audio_projector")
    missing = [name for name in family.components if name not in tokens and name not in derived]
    if missing:
        raise TrainError(
            f"tokens are missing for {', '.join(missing)}; give the number of tokens per forward of each, or 0"
        )
    counts = dict(tokens)
    counts.setdefault("lm_head", tokens.get("foundation", 0))
    if "image_projector" in family.components:
        counts.setdefault("image_projector", tokens.get("image_encoder", 0) // 4)  # all families merge 2 x 2 patches
    if "audio_projector" in family.components:
        counts.setdefault("audio_projector", tokens.get("audio_encoder", 0) // 2)  # pooled by two
    rows = rows_per_micro_batch(cfg)
    image, sound = counts.get("image_encoder", 0) // rows, 0
    if counts.get("audio_encoder", 0):
        sound = models.audio_of(models.read_config(cfg.model.path)).positions  # the same for every sound
    return Tokens(counts, max(1, counts.get("foundation", 0) // rows), image, sound=sound)


def assume_tokens(cfg: Config, components: Any, config: Any) -> tuple[Tokens, str]:
    """Return (tokens of the largest micro-batch that a configuration allows, sentence with the assumptions).

    Rows have `train.seq_length` tokens. For a vision model each row has an image of `data.max_pixels` (by default 1
    megapixel), or as much of it as fits into the row.
    """
    rows, row, answer, each = rows_per_micro_batch(cfg), cfg.train.seq_length, 0, 1
    message = f"assumed: train.micro_batch {cfg.train.micro_batch} x train.seq_length {row} tokens, rows of one length"
    if cfg.data.packing:
        message = f"assumed: a pack of train.seq_length {row} tokens, as if one sample were all of it"
    if _has_pairs(cfg):
        message += ", two for each sample"
    if cfg.train.phase == "rl" and cfg.rl is not None:
        answer = cfg.rl.max_new_tokens
        message += f", {answer} of them (rl.max_new_tokens) a completion"
    counts = {"foundation": rows * row, "lm_head": rows * (answer or row)}
    image = 0
    vision = _vision(config) if "image_encoder" in components else None
    if "image_encoder" in components and vision is None:
        message += ", without images, because their number of tokens is not known for this family"
    elif vision is not None:
        room, breaks, tiles = row - answer - 2, 0, 0
        pixels = (cfg.data.max_pixels or _PIXELS) // (vision.patch[0] * vision.patch[1])
        if vision.kind == "tiles":
            tiles = max(1, min(pixels // vision.cells, vision.most, room // (vision.length + vision.ends + 1)))
            image, out = vision.seen(tiles)
            breaks = tiles * (vision.ends + 1)  # with one text token after each
        else:
            out = min(pixels // vision.merge**2, room)
            image = out * vision.merge**2
        if cfg.data.packing and out > 0:
            each = max(1, row // (out + breaks + 2))  # as many as fit
        counts |= {"image_encoder": rows * each * max(0, image), "image_projector": rows * each * max(0, out)}
        many = "an image" if each == 1 else f"{each} images"
        leading = tiles * vision.prefix if vision.kind == "tiles" else 0
        prefix = f" and {leading} leading tokens" if leading else ""
        message += f", in each {many} of {max(0, image) - leading} patches{prefix} ({max(0, out)} of its tokens)"
    sound = 0
    if "audio_encoder" in components:
        audio = models.audio_of(config)
        sound_tokens = min(audio.features, row - answer - 2)  # the tower pads every sound to the longest
        fits = sound_tokens >= audio.least
        sound = audio.positions if fits else 0
        counts |= {"audio_encoder": rows * sound, "audio_projector": rows * audio.features if fits else 0}
        longest = "the longest" if sound_tokens == audio.features else f"{sound_tokens} tokens"
        message += f", in each a sound of {longest}" if fits else f", no sound: one is {audio.least} tokens or more"
    known = {name: n for name, n in counts.items() if name in components}
    return Tokens(known, row, max(0, image), sound=sound), f"{message}; --tokens says otherwise"


def _vision(config: Any) -> models.Vision | None:
    """Return the input format of the vision tower, or None for a family without a known vision tower."""
    try:
        return models.vision_of(config)
    except models.ModelError:
        return None


def attention_flops(config: Any, tokens: Tokens) -> float | None:
    """Return the FLOPs of attention in one forward and backward, or None if the configuration has no sizes.

    The forward has 2 products of 2 T S d FLOPs, or half of that under the causal mask. The backward of flash attention,
    which recomputes the scores, has 5 products: 3.5 times the forward in total.
    """
    text = config.get_text_config()
    try:
        width = _head_dim(text) * text.num_attention_heads
        seen = tokens.sample or tokens.row
        decoder = 2 * tokens.counts.get("foundation", 0) * seen * width * text.num_hidden_layers
        tower = 0
        vision = getattr(config, "vision_config", None)
        if vision is not None and tokens.image:
            depth = getattr(vision, "depth", None) or vision.num_hidden_layers
            tower = 4 * tokens.counts.get("image_encoder", 0) * tokens.image * vision.hidden_size * depth
        audio = getattr(config, "audio_config", None)
        if audio is not None and tokens.sound:
            places = tokens.counts.get("audio_encoder", 0) * tokens.sound
            tower += 4 * places * audio.hidden_size * audio.num_hidden_layers
    except AttributeError:
        return None
    return 3.5 * (decoder + tower)


def _head_dim(text: Any) -> int:
    return getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads


def _patches(batch: Mapping[str, Any], config: Any) -> tuple[int, int, int]:
    """Return (patches into the tower, tokens from the projector, images) of a batch with images or videos.

    Each time step of a video counts as an image.
    """
    vision = models.vision_of(config)
    patches = vision.patches(batch) if batch["meta"].has_image else []
    for time, tall, wide in batch["video_grid_thw"].tolist() if "video_grid_thw" in batch else ():
        patches += [tall * wide] * time
    return sum(patches), sum(map(vision.features, patches)), len(patches)


def _mean_of_full(batches: Sequence[Mapping[str, Any]], values: Sequence[int], rows: int) -> int:
    """Scale the values of these batches to the mean of a micro-batch with ``rows`` rows."""
    return -(-sum(values) * rows // sum(len(batch["input_ids"]) for batch in batches))


def _round_up(value: int) -> int:
    unit = 128 if value >= 1024 else 16
    return -(-value // unit) * unit
