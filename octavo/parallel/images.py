"""Distribution of the images of a row that several ranks share: each rank encodes a subset of the images, and an
exchange sends the features to the ranks of their tokens.

Images are distributed by cost, independently of where their tokens are; the placeholders of one image may be on two
ranks. When the model's forward calls `get_image_features`, each rank runs the tower on its images, and one exchange
sends every rank the features of its placeholders, in order. A rank without images runs the tower on a dummy image, so
that it takes part in the collectives of the sharded tower.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from octavo import models
from octavo.fp8.observe import uncounted
from octavo.models.forward.unused_towers import dummy_image_inputs
from octavo.models.structure import anyres
from octavo.parallel.context import Context
from octavo.parallel.errors import WorldError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

LINEAR_COST = 4096  # a patch costs n (attention over n patches) + LINEAR_COST (its linear layers)


@dataclass(frozen=True)
class ImageAssignment:
    """One rank's part in the distribution of a row's images.

    images     indices of the images that this rank encodes
    sent, got  numbers of feature rows to and from each rank
    order      index of each placeholder's feature among the received rows
    """

    images: tuple[int, ...]
    sent: tuple[int, ...]
    got: tuple[int, ...]
    order: Tensor


def assign_images(patches: Sequence[int], ranks: int) -> tuple[int, ...]:
    """Return the rank of each image. Images are assigned in order of descending cost to the rank with the least load;
    ties by index."""
    loads, owners = [0] * ranks, [0] * len(patches)
    costs = [n * n + LINEAR_COST * n for n in patches]
    for image in sorted(range(len(costs)), key=lambda n: (-costs[n], n)):
        rank = min(range(ranks), key=lambda n: (loads[n], n))
        loads[rank] += costs[image]
        owners[image] = rank
    return tuple(owners)


def make_assignment(
    places: Tensor, tokens: Sequence[int], patches: Sequence[int], local: int, ranks: int, rank: int
) -> ImageAssignment:
    """Distribute a row's images and return this rank's part.

    places           int64, ascending: positions of the placeholders of all images
    tokens, patches  per image
    local            tokens of the row on each rank
    """
    owners = assign_images(patches, ranks)
    source = torch.repeat_interleave(torch.tensor(owners), torch.tensor(tokens))
    target = places // local
    sent = [int(((source == rank) & (target == to)).sum()) for to in range(ranks)]
    encoders = source[target == rank]  # the rank that encodes each of this rank's placeholders
    got = [int((encoders == by).sum()) for by in range(ranks)]
    order = encoders.argsort(stable=True).argsort()  # received rows are grouped by rank and in order within each group
    return ImageAssignment(tuple(n for n, by in enumerate(owners) if by == rank), tuple(sent), tuple(got), order)


class ImageSharding:
    """Distributes the images of shared rows and sends their features to their tokens, by replacing the model's
    `get_image_features` on the instance.

    Raises WorldError for a family without that method.
    """

    def __init__(self, model: PreTrainedModel, family: models.Family, context: Context) -> None:
        owner = model.get_submodule(family.tower.rpartition(".")[0])
        self._stock = getattr(owner, "get_image_features", None)
        if self._stock is None or family.image_token_id is None:
            raise WorldError(
                f"the images of {family.name} cannot be distributed over the ranks of a context: its model has no "
                "get_image_features. Set parallel.context: 1"
            )
        self.model, self.family, self.context = model, family, context
        self.vision = models.vision_of(model.config)
        self._current: ImageAssignment | None = None
        self._encoded: list[int] = []  # images in the order in which the tower gets them
        owner.get_image_features = self._features  # type: ignore[assignment]

    def has_local_images(self, batch: Mapping[str, Any]) -> bool:
        """Return whether this rank encodes an image of the row."""
        assignment = self._assign(batch)
        return assignment is not None and bool(assignment.images)

    def begin(self, batch: Mapping[str, Any]) -> dict[str, Tensor]:
        """Return the image tensors of this rank's next forward and exchange their features in it; {} if a row has no
        images."""
        self._current = self._assign(batch)
        if self._current is None:
            return {}
        if not self._current.images:
            return {name: x.cpu() for name, x in dummy_image_inputs(self.model, self.family).items()}
        grid, images = batch.get("image_grid_thw"), list(self._current.images)
        inputs: dict[str, Tensor] = {}
        if (
            self.vision.sized
        ):  # tiling depends on whether the row has other images, which the model reads from counts per row
            single = anyres.only_images(batch["batch_num_images"])
            images.sort(key=lambda n: not single[n])
            inputs = {"batch_num_images": torch.tensor([1 if single[n] else 2 for n in images])}
        self._encoded = images
        rows = [1] * len(batch["pixel_values"]) if grid is None else grid.prod(-1).tolist()
        ends = [0, *accumulate(rows)]
        inputs["pixel_values"] = torch.cat([batch["pixel_values"][ends[n] : ends[n + 1]] for n in images])
        if grid is not None:
            inputs["image_grid_thw"] = grid[images]
        return inputs | {name: batch[name][images] for name in _per_image_inputs(batch)}

    def end(self) -> None:
        """Stop exchanging features, for forwards of rows that ranks do not share (evaluation)."""
        self._current = None

    def _assign(self, batch: Mapping[str, Any]) -> ImageAssignment | None:
        if "pixel_values" not in batch:
            return None
        ids, vision = batch["input_ids"][0], self.vision
        places = (ids == self.family.image_token_id).nonzero().flatten()
        if vision.sized:
            sizes = list(zip(batch["image_sizes"].tolist(), anyres.only_images(batch["batch_num_images"]), strict=True))
            patches = [vision.cells * anyres.count_tiles(self.model.config, *of) for of in sizes]
            tokens = [anyres.count_tokens(self.model.config, *of) for of in sizes]
        else:
            patches = vision.patches(batch)
            tokens = [vision.features(count) + vision.ends for count in patches]
        if sum(tokens) != len(places):
            raise WorldError(f"a row has {len(places)} image placeholders, but its images give {sum(tokens)} features")
        part = self.context.local_slice(len(ids))
        return make_assignment(places, tokens, patches, part.stop - part.start, self.context.size, self.context.rank)

    def _features(self, *args: Any, **kwargs: Any) -> Any:
        """Return the features of this rank's placeholders; replaces `get_image_features`."""
        assert self._stock is not None
        current = self._current
        if current is None:
            return self._stock(*args, **kwargs)
        if current.images:
            output = self._stock(*args, **kwargs)
        else:
            with uncounted():  # GEMMs of a dummy image are not in the plan, which is compared with the counts
                output = self._stock(*args, **kwargs)
        pooled = output.pooler_output
        if current.images and self._encoded != list(current.images):  # undo the sorting of `begin`
            pooled = [pooled[self._encoded.index(n)] for n in current.images]
        deep = [_flatten_features(layer) for layer in getattr(output, "deepstack_features", None) or ()]
        features = torch.cat([_flatten_features(pooled), *deep], -1)
        sent = features if current.images else features[:0]  # the dummy's features go to no rank
        got = self.context.exchange_rows(sent, current.sent, current.got)[current.order.to(features.device)]
        first, *rest = got.chunk(1 + len(deep), -1)
        output.pooler_output = first[None] if isinstance(pooled, Tensor) and pooled.dim() == 3 else (first,)
        if rest:
            output.deepstack_features = [(layer,) for layer in rest]
        return output


def _per_image_inputs(batch: Mapping[str, Any]) -> list[str]:
    """Return the names of other tensors with an entry per image or per tile."""
    return [name for name, per in batch["meta"].inputs.items() if per in ("image", "pixels")]


def _flatten_features(features: Any) -> Tensor:
    """Return features as [rows, width], from a list with a tensor per image or a tensor of equally sized tiles."""
    return features.flatten(0, -2) if isinstance(features, Tensor) else torch.cat(list(features))
