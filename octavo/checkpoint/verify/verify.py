"""`octavo verify`: is a folder what it says it is, and what will transformers, vLLM and SGLang do with it?

    verified = checkpoint.verify("model-fp8", against="model")
    verified.ok                 nothing is wrong
    verified.findings           one sentence each: file, tensor, fix
    verified.verdicts           one a loader: ok, warns, refuses, loads garbage
    verified.compared           with `against`: the error of every tensor, worst first

Headers first (`headers`), then names and shapes against the stock model (`names`), the layout of scales (`scales`),
skip lists (`skip_lists`), the values (`values`), the reference (`compare_source`), and what follows for each loader
(`loaders`). PEFT adapters go their own way (`adapter`). Nothing is changed, nothing is unpickled, no model is loaded.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from octavo.checkpoint.errors import CheckpointError
from octavo.checkpoint.stock_model import Stock
from octavo.checkpoint.verify.adapter import adapter_verdicts, check_adapter, check_factors, described, is_adapter
from octavo.checkpoint.verify.cache_scales import check_cache
from octavo.checkpoint.verify.companions import check_companions, check_files, check_sums, read_all
from octavo.checkpoint.verify.compare_source import compare, compare_unplaced, sources
from octavo.checkpoint.verify.findings import FAIL, Compared, Findings, Verified
from octavo.checkpoint.verify.headers import Headers, Held, read_folder
from octavo.checkpoint.verify.loaders import verdicts
from octavo.checkpoint.verify.names import check_config, check_fields, check_names, check_ties, scale_of
from octavo.checkpoint.verify.scales import Pair, check_blocks, check_places, check_sound, pair_up
from octavo.checkpoint.verify.skip_lists import check_skips
from octavo.checkpoint.verify.values import Progress, scan, scan_inputs, unnamed
from octavo.models import ModelError, empty
from octavo.models.folder.folder import check_generation_config, one_folder, read_json
from octavo.models.folder.quantization import Quantization, parse, parse_autofp8, quantization_block
from octavo.models.structure.skeleton import stock_config


def verify(
    directory: str | Path, against: str | Path | None = None, quick: bool = False, progress: Progress | None = None
) -> Verified:
    """Examine a Hugging Face folder, plain or FP8, or a PEFT adapter folder.

    Args:
        against: the folder that this one was made from, plain or FP8: every tensor is compared with it. For an adapter
            its base, whose layers are looked up.
        quick: headers and config.json alone, no values; excludes `against` for models.
        progress: called as (bytes done, bytes in all, tensor).

    Raises CheckpointError where there is nothing to examine: no folder, or neither config.json nor weights in it.
    """
    folder = Path(directory)
    other = None if against is None else Path(against)
    for place in (folder, other):
        if place is not None and not place.is_dir():
            raise CheckpointError(f"{place} is not a folder; name a Hugging Face folder or a PEFT adapter folder.")
        if place is not None:
            one_folder(place, "octavo verify")
    if is_adapter(folder):
        return _adapter(folder, other, quick, progress)
    if quick and other is not None:
        raise CheckpointError("quick reads no values, and a reference is compared by values; leave one of them out.")
    found = Findings()
    looked = _look(folder, found, quick=quick)
    if looked.raw:
        if os.path.lexists(folder / "adapter_config.json"):
            found.fail("adapter-beside", "adapter_config.json")
        check_companions(folder, looked.raw, looked.stock, found)
    if not looked.headers.files and not looked.raw and not found.items:
        raise CheckpointError(f"{folder} holds neither config.json nor safetensors: there is nothing to verify.")
    if not quick:
        known = unnamed(looked.headers.tensors) if looked.stock is None else looked.known
        scan(known, looked.pairs, looked.stock, found, progress)
        scan_inputs(looked.headers, found)
    compared = [] if other is None else _against(looked, other, found, progress)
    if looked.stock is not None:
        check_ties(looked.headers, looked.known, looked.stock, quick, found)
    check_sums(folder, quick, found)
    unread = check_files(folder, found)
    headers, ordered = looked.headers, found.ordered()
    return Verified(
        folder, _form(looked), len(headers.tensors), headers.size, looked.fp8, not quick, ordered,
        verdicts(ordered, looked.q), tuple(compared), other, unread,
    )  # fmt: skip


@dataclass
class _Looked:
    """What the headers and config.json of one folder say."""

    raw: Mapping[str, Any]
    headers: Headers
    q: Quantization | None = None
    stock: Stock | None = None
    known: dict[str, Held] = field(default_factory=dict)
    pairs: list[Pair] = field(default_factory=list)
    cache: str = ""

    @property
    def fp8(self) -> int:
        return sum(held.fp8 and scale_of(name) is None for name, held in self.headers.tensors.items())


def _look(folder: Path, found: Findings, stock: Stock | None = None, quick: bool = True) -> _Looked:
    """Everything that needs no values but those of a KV cache's scales, unless `quick`. `stock`: the model, where it is
    known already."""
    raw: Mapping[str, Any] = {}
    with found.failing("config.json"):
        raw = read_json(folder / "config.json")
        if not raw:
            found.fail("config/empty", "config.json")
    with found.failing("generation_config.json"):
        check_generation_config(folder)
    looked = _Looked(raw, read_folder(folder, found))
    headers = looked.headers
    block = quantization_block(raw)
    unread = False
    if block is not None:
        try:
            looked.q = parse(block, "config.json")
        except ModelError as error:
            looked.q = _autofp8(block, headers, found)
            unread = looked.q is None
            bare = (
                isinstance(block, Mapping) and block.get("quant_method") == "fp8" and not block.get("weight_block_size")
            )
            if unread:
                found.fail("fp8-tensor" if bare else "quantization", "config.json", text=str(error))
    if stock is None and raw:
        with found.failing("config.json"):
            stock = Stock(empty(stock_config(folder)))
    looked.stock = stock
    if raw:
        check_config(raw, block, headers, found)
    if stock is not None:
        check_fields(stock.model, found)
    looked.cache = check_cache(headers, block if isinstance(block, Mapping) else None, quick, found)
    whole = not any(f.kind in _CUT for f in found)
    seen = Findings()
    looked.pairs = pair_up(headers, None if unread else looked.q, seen)
    if stock is not None and headers.tensors:
        looked.known = check_names(headers, stock, seen)
    found.items += [f for f in seen if whole or f.kind not in _LOST]  # what a damaged file held is not also missing
    if stock is not None and headers.tensors:
        check_places(looked.known, stock, found)
        check_sound(looked.known, stock, found)
        if looked.q is not None and looked.fp8:
            check_skips(looked.known, stock, looked.q, _listed(block), found)
        check_blocks(looked.known, stock, looked.q, found)
        _separate_experts(looked, found)
    return looked


def _autofp8(block: Mapping[str, Any], headers: Headers, found: Findings) -> Quantization | None:
    """AutoFP8's layout, which Octavo judges and does not load; None where block and tensors are not its."""
    codes = [name for name, held in headers.tensors.items() if held.fp8]
    if not any(f"{name}_scale" in headers.tensors for name in codes):
        return None  # transformers writes the same block over scales of another name
    with found.failing("config.json", "quantization"):
        quantization = parse_autofp8(block, "config.json")
        if quantization is not None:
            found.warn("autofp8", "config.json", q=quantization)
        return quantization
    return None


def _listed(block: Mapping[str, Any] | None) -> bool:
    return any((block or {}).get(key) is not None for key in ("modules_to_not_convert", "ignored_layers", "ignore"))


#: findings of files after which nothing can be said of tensors that are not there
_CUT = ("truncated", "header", "missing-shard", "pickle", "only-pickles", "no-weights", "index")
_LOST = ("missing", "scale-missing", "scale-dangling", "scale-name")


def _separate_experts(looked: _Looked, found: Findings) -> None:
    """Experts one by one where transformers reads this family's stacked alone."""
    assert looked.stock is not None
    for name, singles in looked.stock.stacked.items():
        first = next((looked.known[s] for s in singles if s in looked.known), None)
        if name not in looked.known and first is not None:
            found.warn("experts-apart", first, name=name)
            return


def _against(looked: _Looked, other: Path, found: Findings, progress: Progress | None) -> list[Compared]:
    if looked.stock is None:
        raise CheckpointError(
            f"{looked.headers.folder} cannot be compared: its config.json describes no model; leave out --against."
        )
    aside = Findings()
    reference = _look(other, aside, looked.stock)
    broken = [f for f in aside if f.status == FAIL and f.kind in (*_CUT, "config", "quantization", "quantization-lost")]
    if broken:
        raise CheckpointError(f"the reference {other} cannot be used: {broken[0].text}")
    here, there = (sources(one.known, one.pairs, looked.stock) for one in (looked, reference))
    compared = compare(here, there, found, progress)
    extra = compare_unplaced(_unplaced(looked), _unplaced(reference), looked.stock, found)
    _untied(looked, reference, found)
    return [*compared, *extra]


def _unplaced(looked: _Looked) -> dict[str, Held]:
    """Tensors that the model has no place for; scales are left out."""
    placed = {held.name for held in looked.known.values()}
    tensors = looked.headers.tensors.items()
    return {name: held for name, held in tensors if name not in placed and scale_of(name) is None}


def _untied(looked: _Looked, reference: _Looked, found: Findings) -> None:
    """A second tensor of the reference that this folder ties to another and does not hold: it must be the same."""
    assert looked.stock is not None
    aside = Findings()
    check_ties(reference.headers, reference.known, looked.stock, False, aside)
    for finding in aside:
        if finding.kind == "tied" and finding.tensor not in looked.headers.tensors:
            there = reference.headers.tensors[finding.tensor]
            found.fail("against-names/untied", tensor=finding.tensor, there=there)


def _form(looked: _Looked) -> str:
    return _of_weights(looked) + (f", {looked.cache}" if looked.cache else "")


def _of_weights(looked: _Looked) -> str:
    if looked.q is not None:
        return f"FP8, {looked.q}"
    if looked.fp8:
        return "FP8 without quantization_config"
    sizes: Counter[str] = Counter()
    for held in looked.headers.tensors.values():
        sizes[held.dtype] += held.size
    return f"plain {sizes.most_common(1)[0][0]}" if sizes else "no weights"


def _adapter(folder: Path, base: Path | None, quick: bool, progress: Progress | None) -> Verified:
    found = Findings()
    headers, config = check_adapter(folder, base, found)
    read_all(folder, found)
    if not quick:
        scan(headers.tensors, [], None, found, progress)
        zero = {name: all(not bool(piece.any()) for _, piece in held.rows()) for name, held in headers.tensors.items()}
        check_factors(headers, zero, found)
    unread = check_files(folder, found)
    return Verified(
        folder, described(config), len(headers.tensors), headers.size, 0, not quick, found.ordered(),
        adapter_verdicts(found, config), (), base, unread,
    )  # fmt: skip
