"""`octavo verify`: checks a model folder and predicts what transformers, vLLM and SGLang do with it.

    result = checkpoint.verify("model-fp8", against="model")
    result.ok                 True if there are no failures
    result.findings           one sentence each: file, tensor, fix
    result.verdicts           one per loader: ok; loads, wrong answers; refuses
    result.compared           with `against`: the error of every tensor, worst first

The order of the checks: headers (`headers`), names and shapes against the stock model (`names`), the layout of scales
(`scales`), skip lists (`skip_lists`), values (`values`), the reference (`compare_source`), the rules of servers
(`servers`), and the consequences for each loader (`loaders`). PEFT adapters have their own checks (`adapter`). Nothing
is changed or unpickled, and no model is loaded.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from octavo.base import safe_read
from octavo.checkpoint.errors import CheckpointError
from octavo.checkpoint.stock_model import StockModel
from octavo.checkpoint.verify.adapter import (
    adapter_verdicts,
    check_adapter,
    check_factors,
    describe_adapter,
    is_adapter,
)
from octavo.checkpoint.verify.cache_scales import check_cache
from octavo.checkpoint.verify.companions import check_checksums, check_companion_files, check_companions, check_files
from octavo.checkpoint.verify.compare_source import collect_sources, compare, compare_unplaced
from octavo.checkpoint.verify.findings import FAIL, Consequence, Findings, TensorComparison, VerifyResult
from octavo.checkpoint.verify.headers import FileTensor, Headers, read_folder
from octavo.checkpoint.verify.loaders import check_predictions, verdicts
from octavo.checkpoint.verify.names import MODELOPT_FILE, check_config, check_fields, check_names, check_ties, scale_of
from octavo.checkpoint.verify.scales import (
    Pair,
    check_audio_fp8,
    check_blocks,
    check_fp8_places,
    pair_weights_and_scales,
)
from octavo.checkpoint.verify.servers import Contents, predict, read_server_files
from octavo.checkpoint.verify.skip_lists import check_skips
from octavo.checkpoint.verify.values import Progress, scan, scan_inputs, weights_by_name
from octavo.models import ModelError, empty
from octavo.models.folder.folder import check_generation_config, read_json, require_one_folder
from octavo.models.folder.quantization import Quantization, parse, parse_autofp8, quantization_block
from octavo.models.structure.skeleton import stock_config


def verify(
    directory: str | Path, against: str | Path | None = None, quick: bool = False, progress: Progress | None = None
) -> VerifyResult:
    """Check a Hugging Face folder, plain or FP8, or a PEFT adapter folder.

    Args:
        against: the folder that this one was made from, plain or FP8; every tensor is compared with it. For an adapter:
            its base model, in which its layers are looked up.
        quick: read only headers and config.json, no values; excludes `against` for models.
        progress: called with bytes done, total bytes and the name of the tensor.

    Raises CheckpointError if there is nothing to check: no folder, or neither config.json nor weights in it.
    """
    folder = Path(directory)
    reference = None if against is None else Path(against)
    for path in (folder, reference):
        if path is not None and not path.is_dir():
            raise CheckpointError(f"{path} is not a folder; name a Hugging Face folder or a PEFT adapter folder.")
        if path is not None:
            require_one_folder(path, "octavo verify")
    if is_adapter(folder):
        return _verify_adapter(folder, reference, quick, progress)
    if quick and reference is not None:
        raise CheckpointError("quick reads no values, and a comparison with a reference needs them; leave one out.")
    findings = Findings()
    inspected = _inspect(folder, findings, quick=quick)
    if inspected.raw:
        if os.path.lexists(folder / "adapter_config.json"):
            findings.fail("adapter-config", "adapter_config.json")
        check_companions(folder, inspected.raw, inspected.stock, findings)
    if not inspected.headers.files and not inspected.raw and not findings.items:
        raise CheckpointError(f"{folder} contains neither config.json nor safetensors: there is nothing to verify.")
    if not quick:
        # Without a model, tensors are scanned under their names on disk, because their roles are unknown.
        known = weights_by_name(inspected.headers.tensors) if inspected.stock is None else inspected.known
        scan(known, inspected.pairs, inspected.stock, findings, progress)
        scan_inputs(inspected.headers, findings)
    compared = [] if reference is None else _compare_with_reference(inspected, reference, findings, progress)
    if inspected.stock is not None:
        check_ties(inspected.headers, inspected.known, inspected.stock, quick, findings)
    check_checksums(folder, quick, findings)
    unread = check_files(folder, findings)
    predicted = _server_predictions(inspected, quick)
    check_predictions(predicted, findings)
    headers, ordered = inspected.headers, findings.ordered()
    return VerifyResult(
        folder, _describe_form(inspected), len(headers.tensors), headers.size, inspected.fp8, not quick, ordered,
        verdicts(ordered, inspected.q, predicted), tuple(compared), reference, unread,
    )  # fmt: skip


@dataclass
class _Inspection:
    """The contents of the headers and config.json of one folder."""

    raw: Mapping[str, Any]
    headers: Headers
    q: Quantization | None = None
    stock: StockModel | None = None
    known: dict[str, FileTensor] = field(default_factory=dict)
    pairs: list[Pair] = field(default_factory=list)
    cache: str = ""

    @property
    def fp8(self) -> int:
        return sum(tensor.fp8 and scale_of(name) is None for name, tensor in self.headers.tensors.items())


def _inspect(folder: Path, findings: Findings, stock: StockModel | None = None, quick: bool = True) -> _Inspection:
    """Run all checks that need no values. Only the scales of a KV cache are read, unless `quick`.

    Args:
        stock: the model, or None to build it from config.json.
    """
    raw: Mapping[str, Any] = {}
    with findings.collect_errors("config.json"):
        raw = read_json(folder / "config.json")
        if not raw:
            findings.fail("config/empty", "config.json")
    with findings.collect_errors("generation_config.json", _generation_finding(folder)):
        check_generation_config(folder)
    inspected = _Inspection(raw, read_folder(folder, findings))
    headers = inspected.headers
    block = _normalize_method(quantization_block(raw), findings)
    unread = False
    if isinstance(block, Mapping):  # otherwise the block is reported with config.json below
        try:
            inspected.q = parse(block, "config.json")
        except ModelError as error:
            inspected.q = _parse_autofp8(block, headers, findings)
            unread = inspected.q is None
            is_fp8 = block.get("quant_method") == "fp8"
            per_tensor = is_fp8 and not block.get("weight_block_size")
            if unread:
                findings.fail("fp8-tensor" if per_tensor else "quantization", "config.json", text=str(error))
    if stock is None and raw:
        with findings.collect_errors("config.json"):
            stock = StockModel(empty(stock_config(folder)))
    inspected.stock = stock
    if raw:
        check_config(raw, block, headers, stock, findings)
    if stock is not None:
        check_fields(stock.model, findings)
    inspected.cache = check_cache(headers, block if isinstance(block, Mapping) else None, quick, findings)
    files_are_complete = not any(f.kind in _FILE_FINDINGS for f in findings)
    tensor_findings = Findings()
    inspected.pairs = pair_weights_and_scales(headers, None if unread else inspected.q, tensor_findings)
    if stock is not None and headers.tensors:
        inspected.known = check_names(headers, stock, tensor_findings)
    # The contents of a damaged file are not reported as missing as well.
    findings.items += [f for f in tensor_findings if files_are_complete or f.kind not in _FOLLOW_UP_FINDINGS]
    if stock is not None and headers.tensors:
        check_fp8_places(inspected.known, stock, findings)
        check_audio_fp8(inspected.known, stock, findings)
        if inspected.q is not None and inspected.fp8:
            check_skips(inspected.known, stock, inspected.q, _has_skip_list(block), headers.tensors, findings)
        check_blocks(inspected.known, stock, inspected.q, findings)
        _warn_separate_experts(inspected, findings)
    return inspected


def _server_predictions(inspected: _Inspection, quick: bool) -> dict[str, list[Consequence] | None]:
    """Return what each server does with the tensors; {} if the folder describes no model or has no tensors."""
    headers, stock = inspected.headers, inspected.stock
    if stock is None:
        return {}
    names = {tensor.name: name for name, tensor in inspected.known.items()}
    block = quantization_block(inspected.raw)
    if block is None and (headers.folder / MODELOPT_FILE).is_file() and inspected.fp8:
        block = {"quant_method": "modelopt"}
    out: dict[str, list[Consequence] | None] = {}
    for server in ("vLLM", "SGLang"):
        files = read_server_files(server, headers.folder, headers, quick, bool(stock.tied_on_disk))
        if files.tensors or files.problems:
            out[server] = predict(Contents(files, names, stock, inspected.raw, block, quick), server)
    return out


def _generation_finding(folder: Path) -> str:
    """The kind of a finding about generation_config.json: loaders leave the file out if it is not JSON, and fail or
    generate something else if its values are wrong."""
    with suppress(OSError, safe_read.Unreadable):  # a pipe, or missing
        content = safe_read.read_bytes(folder / "generation_config.json")
        try:
            json.loads(content.decode())  # as transformers reads it: a byte order mark is no JSON
        except RecursionError:  # which transformers does not catch
            return "generation-config"
        except ValueError:
            return "generation-config-left-out"
    return "generation-config"


def _normalize_method(block: Mapping[str, Any] | None, findings: Findings) -> Mapping[str, Any] | None:
    """Replace quant_method "compressed_tensors", which vLLM and SGLang read, and report it for transformers."""
    if not isinstance(block, Mapping) or str(block.get("quant_method")).lower() != "compressed_tensors":
        return block
    right = "compressed-tensors"
    findings.fail("quantization-word", "config.json", method=block["quant_method"], right=right)
    return {**block, "quant_method": right}


def _parse_autofp8(block: Mapping[str, Any], headers: Headers, findings: Findings) -> Quantization | None:
    """Return the quantization of AutoFP8's layout, which Octavo can judge but not load; None for other layouts."""
    codes = [name for name, tensor in headers.tensors.items() if tensor.fp8]
    if not any(f"{name}_scale" in headers.tensors for name in codes):
        return None  # transformers writes the same block over scales of another name
    with findings.collect_errors("config.json", "quantization"):
        quantization = parse_autofp8(block, "config.json")
        if quantization is not None:
            findings.warn("autofp8", "config.json", q=quantization)
        return quantization
    return None


def _has_skip_list(block: Mapping[str, Any] | None) -> bool:
    return any((block or {}).get(key) is not None for key in ("modules_to_not_convert", "ignored_layers", "ignore"))


#: findings about files after which missing tensors are not reported
_FILE_FINDINGS = ("truncated", "header", "missing-shard", "pickle", "only-pickles", "no-weights", "index")
_FOLLOW_UP_FINDINGS = ("missing", "scale-missing", "scale-dangling", "scale-name")


def _warn_separate_experts(inspected: _Inspection, findings: Findings) -> None:
    """Warn about experts stored one by one if transformers reads this family's experts only stacked."""
    assert inspected.stock is not None
    for name, singles in inspected.stock.stacked.items():
        first = next((inspected.known[s] for s in singles if s in inspected.known), None)
        if name not in inspected.known and first is not None:
            findings.warn("experts-apart", first, name=name)
            return


def _compare_with_reference(
    inspected: _Inspection, folder: Path, findings: Findings, progress: Progress | None
) -> list[TensorComparison]:
    if inspected.stock is None:
        raise CheckpointError(
            f"{inspected.headers.folder} cannot be compared: its config.json describes no model; leave out --against."
        )
    reference_findings = Findings()
    reference = _inspect(folder, reference_findings, inspected.stock)
    fatal_kinds = (*_FILE_FINDINGS, "config", "quantization", "quantization-file", "quantization-lost")
    fatal = [finding for finding in reference_findings if finding.status == FAIL and finding.kind in fatal_kinds]
    if fatal:
        raise CheckpointError(f"the reference {folder} cannot be used: {fatal[0].text}")
    sources = collect_sources(inspected.known, inspected.pairs, inspected.stock)
    reference_sources = collect_sources(reference.known, reference.pairs, inspected.stock)
    compared = compare(sources, reference_sources, findings, progress)
    extra = compare_unplaced(_unplaced_tensors(inspected), _unplaced_tensors(reference), inspected.stock, findings)
    _check_untied(inspected, reference, findings)
    return [*compared, *extra]


def _unplaced_tensors(inspected: _Inspection) -> dict[str, FileTensor]:
    """Return the tensors that the model has no place for, without scales."""
    placed = {tensor.name for tensor in inspected.known.values()}
    tensors = inspected.headers.tensors.items()
    return {name: tensor for name, tensor in tensors if name not in placed and scale_of(name) is None}


def _check_untied(inspected: _Inspection, reference: _Inspection, findings: Findings) -> None:
    """Report tensors of the reference that this folder leaves out because they are tied, but that differ there."""
    assert inspected.stock is not None
    tie_findings = Findings()
    check_ties(reference.headers, reference.known, inspected.stock, False, tie_findings)
    for finding in tie_findings:
        if finding.kind == "tied" and finding.tensor not in inspected.headers.tensors:
            reference_tensor = reference.headers.tensors[finding.tensor]
            findings.fail("against-names/untied", tensor=finding.tensor, reference=reference_tensor)


def _describe_form(inspected: _Inspection) -> str:
    return _describe_weights(inspected) + (f", {inspected.cache}" if inspected.cache else "")


def _describe_weights(inspected: _Inspection) -> str:
    if inspected.q is not None:
        return f"FP8, {inspected.q}"
    if inspected.fp8:
        known = quantization_block(inspected.raw) is not None
        return "FP8, with a quantization_config of another form" if known else "FP8 without quantization_config"
    sizes: Counter[str] = Counter()
    for tensor in inspected.headers.tensors.values():
        sizes[tensor.dtype] += tensor.size
    return f"plain {sizes.most_common(1)[0][0]}" if sizes else "no weights"


def _verify_adapter(folder: Path, base: Path | None, quick: bool, progress: Progress | None) -> VerifyResult:
    findings = Findings()
    headers, config = check_adapter(folder, base, findings)
    check_companion_files(folder, findings)
    if not quick:
        scan(headers.tensors, [], None, findings, progress)
        zero = {
            name: all(not bool(piece.any()) for _, piece in tensor.rows()) for name, tensor in headers.tensors.items()
        }
        check_factors(headers, zero, findings)
    unread = check_files(folder, findings)
    return VerifyResult(
        folder, describe_adapter(config), len(headers.tensors), headers.size, 0, not quick, findings.ordered(),
        adapter_verdicts(findings, config), (), base, unread,
    )  # fmt: skip
