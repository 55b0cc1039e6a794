"""The images of a row that several ranks share: each rank encodes some whole images, and sends features to the tokens.

Images are distributed by cost, wherever their tokens are; the placeholders of one image may be on two ranks. When the
model's forward asks for image features, each rank runs the tower on its images, and one exchange sends every rank the
features of its placeholders, in order. A rank without images runs the tower on a dummy image, so that it takes part in
the collectives of the sharded tower.
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

LINEAR = 4096  # a patch costs n (attention over n patches) + LINEAR (its linear layers)


@dataclass(frozen=True)
class Deal:
    """The distribution of a row's images, as one rank sees it.

    images     indices of the images that this rank encodes
    sent, got  rows of features to and from each rank
    order      index of each placeholder's feature among the received rows
    """

    images: tuple[int, ...]
    sent: tuple[int, ...]
    got: tuple[int, ...]
    order: Tensor


def deal(patches: Sequence[int], ranks: int) -> tuple[int, ...]:
    """The rank of each image: the most expensive image first, to the rank with the least load; ties by index."""
    loads, owners = [0] * ranks, [0] * len(patches)
    costs = [n * n + LINEAR * n for n in patches]
    for image in sorted(range(len(costs)), key=lambda n: (-costs[n], n)):
        rank = min(range(ranks), key=lambda n: (loads[n], n))
        loads[rank] += costs[image]
        owners[image] = rank
    return tuple(owners)


def dealt(places: Tensor, tokens: Sequence[int], patches: Sequence[int], each: int, ranks: int, rank: int) -> Deal:
    """The distribution of a row's images, as this rank sees it.

    places           int64, ascending: positions of the placeholders of all images
    tokens, patches  of each image
    each             tokens of the row on one rank
    """
    owners = deal(patches, ranks)
    source = torch.repeat_interleave(torch.tensor(owners), torch.tensor(tokens))
    home = places // each
    sent = [int(((source == rank) & (home == to)).sum()) for to in range(ranks)]
    mine = source[home == rank]  # the rank that encodes each of this rank's placeholders
    got = [int((mine == by).sum()) for by in range(ranks)]
    order = mine.argsort(stable=True).argsort()  # received rows are grouped by rank, and in order within each
    return Deal(tuple(n for n, by in enumerate(owners) if by == rank), tuple(sent), tuple(got), order)


class Images:
    """Distributes the images of shared rows and sends their features to their tokens, by replacing the model's
    `get_image_features` on the instance.

    Raises WorldError for a family without that method.
    """

    def __init__(self, model: PreTrainedModel, family: models.Family, context: Context) -> None:
        owner = model.get_submodule(family.tower.rpartition(".")[0])
        self._stock = getattr(owner, "get_image_features", None)
        if self._stock is None or family.image_token_id is None:
            raise WorldError(
                f"the images of {family.name} cannot be dealt to the ranks of a context: its model has no "
                "get_image_features. Set parallel.context: 1"
            )
        self.model, self.family, self.context = model, family, context
        self.vision = models.vision_of(model.config)
        self._now: Deal | None = None
        self._encoded: list[int] = []  # images in the order in which the tower gets them
        owner.get_image_features = self._features  # type: ignore[assignment]

    def sees(self, batch: Mapping[str, Any]) -> bool:
        """Whether this rank encodes an image of the row."""
        mine = self._deal(batch)
        return mine is not None and bool(mine.images)

    def begin(self, batch: Mapping[str, Any]) -> dict[str, Tensor]:
        """The image tensors for this rank's next forward, whose features are exchanged; {} for a row without images."""
        self._now = self._deal(batch)
        if self._now is None:
            return {}
        if not self._now.images:
            return {name: x.cpu() for name, x in dummy_image_inputs(self.model, self.family).items()}
        grid, images = batch.get("image_grid_thw"), list(self._now.images)
        inputs: dict[str, Tensor] = {}
        if self.vision.sized:  # it cuts an image by whether its row has others, which it tells from counts per row
            single = anyres.alone(batch["batch_num_images"])
            images.sort(key=lambda n: not single[n])
            inputs = {"batch_num_images": torch.tensor([1 if single[n] else 2 for n in images])}
        self._encoded = images
        rows = [1] * len(batch["pixel_values"]) if grid is None else grid.prod(-1).tolist()
        ends = [0, *accumulate(rows)]
        inputs["pixel_values"] = torch.cat([batch["pixel_values"][ends[n] : ends[n + 1]] for n in images])
        if grid is not None:
            inputs["image_grid_thw"] = grid[images]
        return inputs | {name: batch[name][images] for name in _image_inputs(batch)}

    def end(self) -> None:
        """Stop exchanging features: forwards of other rows (evaluation) are the model's own."""
        self._now = None

    def _deal(self, batch: Mapping[str, Any]) -> Deal | None:
        if "pixel_values" not in batch:
            return None
        ids, vision = batch["input_ids"][0], self.vision
        places = (ids == self.family.image_token_id).nonzero().flatten()
        if vision.sized:
            sizes = list(zip(batch["image_sizes"].tolist(), anyres.alone(batch["batch_num_images"]), strict=True))
            patches = [vision.cells * anyres.tiles(self.model.config, *of) for of in sizes]
            tokens = [anyres.tokens(self.model.config, *of) for of in sizes]
        else:
            patches = vision.patches(batch)
            tokens = [vision.features(count) + vision.ends for count in patches]
        if sum(tokens) != len(places):
            raise WorldError(f"a row has {len(places)} placeholders of images whose features are {sum(tokens)}")
        part = self.context.part(len(ids))
        return dealt(places, tokens, patches, part.stop - part.start, self.context.size, self.context.rank)

    def _features(self, *args: Any, **kwargs: Any) -> Any:
        """The model's features of this rank's placeholders, in place of `get_image_features`."""
        assert self._stock is not None
        now = self._now
        if now is None:
            return self._stock(*args, **kwargs)
        if now.images:
            output = self._stock(*args, **kwargs)
        else:
            with uncounted():  # the plan's proof counts no GEMMs of a dummy image
                output = self._stock(*args, **kwargs)
        whole = output.pooler_output
        if now.images and self._encoded != list(now.images):  # undo the sorting of `begin`
            whole = [whole[self._encoded.index(n)] for n in now.images]
        deep = [_joined(layer) for layer in getattr(output, "deepstack_features", None) or ()]
        features = torch.cat([_joined(whole), *deep], -1)
        sent = features if now.images else features[:0]  # the dummy's features go to no rank
        got = self.context.swap(sent, now.sent, now.got)[now.order.to(features.device)]
        first, *rest = got.chunk(1 + len(deep), -1)
        output.pooler_output = first[None] if isinstance(whole, Tensor) and whole.dim() == 3 else (first,)
        if rest:
            output.deepstack_features = [(layer,) for layer in rest]
        return output


def _image_inputs(batch: Mapping[str, Any]) -> list[str]:
    """Names of further tensors with an entry per image or per tile."""
    return [name for name, per in batch["meta"].inputs.items() if per in ("image", "pixels")]


def _joined(features: Any) -> Tensor:
    """Features as [rows, width], from a list with a tensor per image or from one tensor of tiles of one size."""
    return features.flatten(0, -2) if isinstance(features, Tensor) else torch.cat(list(features))
