"""The images of a row that several ranks share: each rank encodes some, whole, and features go where their tokens are.

Images are dealt by what they cost, whatever tokens they stand for; a run of placeholders may lie on two ranks. Inside
the model's own forward, where it asks for the features of its images, each rank runs the tower on its own and one
exchange brings to each the features of the placeholders that it has, in their order. A rank without an image of its own
runs the tower on a dummy, so that it takes part in what shards of the tower send each other.
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

LINEAR = 4096  # patches of attention that a patch's other work weighs as much as


@dataclass(frozen=True)
class Deal:
    """Who encodes which images of a row, as one rank sees it. ``own``: numbers of its images; ``sent``, ``got``: rows
    of features to and from each rank; ``order``: the places of what it gets, in the order of its placeholders."""

    own: tuple[int, ...]
    sent: tuple[int, ...]
    got: tuple[int, ...]
    order: Tensor


def deal(patches: Sequence[int], ranks: int) -> tuple[int, ...]:
    """The rank of each image: the dearest first, to the rank with the least to do; of equal ones the first."""
    loads, found = [0] * ranks, [0] * len(patches)
    costs = [n * n + LINEAR * n for n in patches]
    for image in sorted(range(len(costs)), key=lambda n: (-costs[n], n)):
        rank = min(range(ranks), key=lambda n: (loads[n], n))
        loads[rank] += costs[image]
        found[image] = rank
    return tuple(found)


def dealt(places: Tensor, tokens: Sequence[int], patches: Sequence[int], each: int, ranks: int, rank: int) -> Deal:
    """The deal of a row that has images of so many `tokens` and `patches`, as this rank sees it.

    places int64: where the placeholders of all images stand, rising; `each`: tokens of the row that a rank has.
    """
    of = deal(patches, ranks)
    source = torch.repeat_interleave(torch.tensor(of), torch.tensor(tokens))
    home = places // each
    sent = [int(((source == rank) & (home == to)).sum()) for to in range(ranks)]
    mine = source[home == rank]  # who encodes each of this rank's placeholders
    got = [int((mine == by).sum()) for by in range(ranks)]
    order = mine.argsort(stable=True).argsort()  # what comes lies by rank, and of one rank in order
    return Deal(tuple(n for n, by in enumerate(of) if by == rank), tuple(sent), tuple(got), order)


class Images:
    """Deals the images of shared rows and brings their features to their tokens, in a model whose `get_image_features`
    is exchanged on the instance.

    Raises WorldError for a family that does not make features there.
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
        self._given: list[int] = []
        owner.get_image_features = self._features  # type: ignore[assignment]

    def sees(self, batch: Mapping[str, Any]) -> bool:
        """Whether an image of a row is this rank's."""
        found = self._deal(batch)
        return found is not None and bool(found.own)

    def begin(self, batch: Mapping[str, Any]) -> dict[str, Tensor]:
        """What of a row's images goes into the next forward of the model on this rank, whose features are exchanged;
        nothing where the row has none."""
        self._now = self._deal(batch)
        if self._now is None:
            return {}
        if not self._now.own:
            return {name: x.cpu() for name, x in dummy_image_inputs(self.model, self.family).items()}
        grid, own, more = batch.get("image_grid_thw"), list(self._now.own), {}
        if self.vision.sized:  # told by counts which images are alone in their row: those first
            alone = anyres.alone(batch["batch_num_images"])
            own.sort(key=lambda n: not alone[n])
            more = {"batch_num_images": torch.tensor([1 if alone[n] else 2 for n in own])}
        self._given = own
        of = [1] * len(batch["pixel_values"]) if grid is None else grid.prod(-1).tolist()
        ends = [0, *accumulate(of)]
        more["pixel_values"] = torch.cat([batch["pixel_values"][ends[n] : ends[n + 1]] for n in own])
        if grid is not None:
            more["image_grid_thw"] = grid[own]
        return more | {name: batch[name][own] for name in _of_images(batch)}

    def end(self) -> None:
        """The forward is over: images of others (held-out rows) are the model's own business."""
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
        """The model's own features, of the placeholders that this rank has."""
        assert self._stock is not None
        now = self._now
        if now is None:
            return self._stock(*args, **kwargs)
        if now.own:
            output = self._stock(*args, **kwargs)
        else:
            with uncounted():
                output = self._stock(*args, **kwargs)
        whole = output.pooler_output
        if now.own and self._given != list(now.own):  # back in their order
            whole = [whole[self._given.index(n)] for n in now.own]
        deep = [_joined(layer) for layer in getattr(output, "deepstack_features", None) or ()]
        made = torch.cat([_joined(whole), *deep], -1)
        got = self.context.swap(made if now.own else made[:0], now.sent, now.got)[now.order.to(made.device)]
        first, *rest = got.chunk(1 + len(deep), -1)
        output.pooler_output = first[None] if isinstance(whole, Tensor) and whole.dim() == 3 else (first,)
        if rest:
            output.deepstack_features = [(layer,) for layer in rest]
        return output


def _of_images(batch: Mapping[str, Any]) -> list[str]:
    """Further tensors of a row's images, or of their tiles, of which each is an image here."""
    return [name for name, per in batch["meta"].inputs.items() if per in ("image", "pixels")]


def _joined(features: Any) -> Tensor:
    """[rows, width] of the features of images, apart or of tiles of one size."""
    return features.flatten(0, -2) if isinstance(features, Tensor) else torch.cat(list(features))
