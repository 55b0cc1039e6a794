"""What transformers, vLLM and SGLang do with a folder: a verdict from what was found, with the reason and its source.

Every kind of finding has its consequence for each loader it concerns; a loader's verdict is the worst. "run" means that
the loader was run on such a folder (transformers, on a CPU); "read" that its code was read and nothing was run.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from octavo.checkpoint.verify_findings import LOADERS, VERDICTS, WARN, Finding, Verdict
from octavo.models.quantization import Quantization

RUN = "run: transformers 5.23 on a CPU"
READ = {
    "transformers": "read from transformers 5.23's code, not run",
    "vLLM": "read from vLLM's code (up to 0.33), not run",
    "SGLang": "read from SGLang's code (up to 0.5.23), not run",
}

WARNS, REFUSES, GARBAGE = VERDICTS[1:]


class Does(NamedTuple):
    """What a loader does, and why; run: whether that was seen or read."""

    verdict: str
    reason: str
    run: bool = False


def _all(verdict: str, reason: str, run: bool = False) -> dict[str, Does]:
    return {loader: Does(verdict, reason, run and loader == "transformers") for loader in LOADERS}


def _servers(verdict: str, reason: str) -> dict[str, Does]:
    return {loader: Does(verdict, reason) for loader in ("vLLM", "SGLang")}


_HF = "transformers"

#: kind of finding -> what each loader does with such a folder; loaders that are not named take it
CONSEQUENCES: dict[str, dict[str, Does]] = {
    "no-weights": _all(REFUSES, "there are no weights"),
    "pickle": _all(REFUSES, "a pickle is no safetensors file", True),
    "pickle-beside": {},
    "truncated": _all(REFUSES, "a shard is cut short", True),
    "header": _all(REFUSES, "a shard's header is damaged", True),
    "index": _all(REFUSES, "the index cannot be read", True),
    "missing-shard": _all(REFUSES, "a shard is missing", True),
    "index-entry": {
        _HF: Does(GARBAGE, "tensors that the index does not name may be left out and filled at random"),
        **_servers(REFUSES, "a parameter gets no weights"),
    },
    "extra-shard": _servers(REFUSES, "every *.safetensors is read, the stray one too"),
    "two-layouts": _all(WARNS, "the single file and the index may not agree"),
    "duplicate": _all(WARNS, "the later of two tensors of one name wins"),
    "config": _all(REFUSES, "config.json cannot be used"),
    "quantization": _all(WARNS, "quantization_config is of a form that Octavo does not judge"),
    "fp8-tensor": {
        _HF: Does(WARNS, "reads one scale a tensor as weight_scale_inv alone"),
        **_servers(REFUSES, "one scale a tensor is read as weight_scale, and transformers writes weight_scale_inv"),
    },
    "quantization-lost": _all(GARBAGE, "codes are taken for values: nothing tells of their scales", True),
    "quantization-without-codes": {
        _HF: Does(WARNS, "layers are made for codes and hold values"),
        **_servers(REFUSES, "scales that do not exist are waited for"),
    },
    "config-dtype": _all(WARNS, "values are rounded to another dtype while loading"),
    "architectures": _servers(REFUSES, "the model's class is chosen by architectures"),
    "companions": _servers(WARNS, "prompts cannot be made without tokenizer, template and processor"),
    "missing": {
        _HF: Does(GARBAGE, "missing tensors are filled with random numbers, with a warning", True),
        **_servers(REFUSES, "a parameter gets no weights"),
    },
    "extra": {
        _HF: Does(WARNS, "a tensor nobody asks for is left out", True),
        **_servers(REFUSES, "there is no parameter of that name"),
    },
    "shape": _all(REFUSES, "a tensor has another shape than the model", True),
    "dtype": _all(GARBAGE, "a tensor is cast from a dtype that weights do not have"),
    "tied": _all(GARBAGE, "one of two different tensors that config.json ties is dropped"),
    "tied-twice": {},
    "scale-missing": {
        _HF: Does(GARBAGE, "codes without scales are taken for values", True),
        **_servers(GARBAGE, "scales that are not loaded keep what memory held"),
    },
    "scale-name": {
        _HF: Does(GARBAGE, "scales of another name are left out, and codes are taken for values", True),
        **_servers(REFUSES, "there is no parameter of that name"),
    },
    "scale-both": {
        _HF: Does(WARNS, "one of two scales is left out"),
        **_servers(REFUSES, "one scale has no parameter"),
    },
    "scale-transposed": _all(REFUSES, "the grid of scales does not fit the weight"),
    "scale-grid": {
        _HF: Does(GARBAGE, "on a CPU the block is taken from the grid, not from the config"),
        **_servers(REFUSES, "the grid of scales does not fit the weight"),
    },
    "scale-dtype": _all(GARBAGE, "scales are cast from another dtype"),
    "scale-dangling": {
        _HF: Does(WARNS, "scales without codes are left out"),
        **_servers(REFUSES, "scales without a parameter"),
    },
    "router": _all(GARBAGE, "the router is read in high precision: its codes are taken for values"),
    "head": _servers(GARBAGE, "the output projection is read in high precision: its codes are taken for values"),
    "fp8-elsewhere": _all(GARBAGE, "codes outside linear layers are taken for values"),
    "stacked": {
        _HF: Does(WARNS, "stacked experts in FP8 have no published form"),
        **_servers(REFUSES, "experts are read one by one"),
    },
    "experts-apart": {_HF: Does(GARBAGE, "this family's experts are read stacked alone: they stay random", False)},
    "skip-missing": {},
    "skip-covers-fp8": {},
    "skip-nothing": {},
    "fused-mixed": _servers(REFUSES, "shards of one fused matrix are not of one kind"),
    "block-k": _servers(REFUSES, "block kernels quantize activations in whole groups along K"),
    "block-n": _servers(REFUSES, "blocks of fused shards would not match"),
    "block-ragged": {_HF: Does(WARNS, "on a CPU a ragged N is refused or read in blocks of another size", True)},
    "nan-codes": _all(GARBAGE, "NaN codes make NaN"),
    "nan-values": _all(GARBAGE, "NaN or infinite values"),
    "scale-nan": _all(GARBAGE, "a scale is NaN or infinite"),
    "scale-zero": _all(GARBAGE, "a scale is zero: its block is lost, or NaN once requantized"),
    "scale-negative": _all(GARBAGE, "a scale is negative: kernels expect positive ones"),
    "zero-block": {},
    "zero-weight": {},
    "codes-as-values": _all(GARBAGE, "codes stand where values should"),
    "cast-through-fp8": _all(WARNS, "values were rounded to FP8 without a scale"),
    "unscaled": _all(GARBAGE, "codes without their scales"),
    "reciprocal": _all(GARBAGE, "reciprocals are used as multipliers"),
    "double-scaled": _all(GARBAGE, "scales seem to be applied twice"),
    "magnitude": _all(WARNS, "weights are larger than trained ones"),
    "unfilled": _all(WARNS, "codes and scales may be of different casts"),
    "scale-unshared": _servers(WARNS, "fused layers are quantized again under the largest of their scales"),
    "against-names": {},
    "against-shape": {},
    "error": _all(GARBAGE, "values are not those of the reference"),
}


#: warnings that one loader does not survive, though the folder is right for the others
_SURE = ("experts-apart",)


def verdicts(findings: Iterable[Finding], q: Quantization | None) -> tuple[Verdict, ...]:
    """One verdict a loader: the worst consequence of what was found, else what speaks for it."""
    findings = list(findings)
    out = []
    for loader in LOADERS:
        worst: tuple[int, Does] = (0, _good(loader, q))
        for finding in findings:
            does = _consequence(finding, loader)
            if does is None:
                continue
            verdict = does.verdict
            if finding.status == WARN and finding.kind not in _SURE:
                verdict = WARNS
            rank = VERDICTS.index(verdict)
            if rank > worst[0]:
                worst = (rank, does._replace(verdict=verdict))
        does = worst[1]
        out.append(Verdict(loader, does.verdict, does.reason, RUN if does.run else READ[loader]))
    return tuple(out)


def _consequence(finding: Finding, loader: str) -> Does | None:
    if finding.kind in ("skip-missing", "skip-covers-fp8"):
        if loader not in finding.text:  # the sentence names the loaders whose rule goes wrong
            return None
        if finding.kind == "skip-covers-fp8":
            return Does(GARBAGE, "an FP8 layer counts as unquantized: its codes are taken for values")
        if loader == "transformers":
            return Does(GARBAGE, "a layer in high precision is made for codes, and its scales stay random")
        return Does(REFUSES, "scales of a layer in high precision are waited for")
    return CONSEQUENCES[finding.kind].get(loader)


def _good(loader: str, q: Quantization | None) -> Does:
    if q is None:
        return Does("ok", "names, shapes and dtypes are the stock model's", loader == "transformers")
    if loader == "transformers":
        if q.method == "fp8":
            return Does("ok", "dequantized while loading on a CPU, FP8 on GPUs from compute capability 8.9", True)
        return Does("ok", "with the package compressed-tensors installed; decompressed unless told otherwise", True)
    if q.method == "fp8":
        return Does("ok", "block kernels; on Blackwell scales are turned into powers of two while loading")
    return Does("ok", "compressed-tensors W8A8 FP8 from compute capability 8.9")
