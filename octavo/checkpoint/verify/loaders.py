"""Verdicts: what transformers, vLLM and SGLang do with a folder, derived from the findings, with reason and source.

Every kind of finding has a consequence for each loader that it affects; a loader's verdict is the worst of them. "run"
means that the loader was run on such a folder (transformers, on a CPU); "read" that only its code was read.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from octavo.checkpoint.verify.findings import LOADERS, VERDICTS, WARN, Finding, Verdict
from octavo.models.folder.quantization import Quantization

RUN = "run: transformers 5.23 on a CPU"
_HF = "transformers"
READ = {
    _HF: "read from transformers 5.23's code, not run",
    "vLLM": "read from vLLM's code (up to 0.33), not run",
    "SGLang": "read from SGLang's code (up to 0.5.23), not run",
}

WARNS, GARBAGE, REFUSES = VERDICTS[1:]


class Consequence(NamedTuple):
    """A loader's verdict and its reason. `run` is True if the loader was run, False if only its code was read."""

    verdict: str
    reason: str
    run: bool = False


def _all(verdict: str, reason: str, run: bool = False) -> dict[str, Consequence]:
    return {loader: Consequence(verdict, reason, run and loader == "transformers") for loader in LOADERS}


def _servers(verdict: str, reason: str) -> dict[str, Consequence]:
    return {loader: Consequence(verdict, reason) for loader in ("vLLM", "SGLang")}


#: kind of finding -> what each loader does with such a folder; loaders that are not listed accept it
CONSEQUENCES: dict[str, dict[str, Consequence]] = {
    "no-weights": _all(REFUSES, "there are no weights"),
    "pickle": _all(REFUSES, "a pickle is not a safetensors file", True),
    "only-pickles": _all(WARNS, "pickles are read, which Octavo does not do: they can run code"),
    "pickle-beside": {},
    "truncated": _all(REFUSES, "a shard is truncated", True),
    "header": _all(REFUSES, "a shard's header is damaged", True),
    "index": _all(REFUSES, "the index cannot be read", True),
    "missing-shard": _all(REFUSES, "a shard is missing", True),
    "index-entry": _all(WARNS, "whole files are read; a program that reads by the index misses a tensor", True),
    "index-tensor": {
        _HF: Consequence(GARBAGE, "a tensor that is missing in its file gets random numbers, with a warning", True),
        **_servers(REFUSES, "a parameter gets no weights"),
    },
    "extra-shard": _servers(REFUSES, "every *.safetensors is read, including the stray one"),
    "two-layouts": _all(WARNS, "the single file and the index may not agree"),
    "duplicate": _all(WARNS, "the later of two tensors with the same name is used"),
    "config": _all(REFUSES, "config.json cannot be used"),
    "quantization": _all(WARNS, "quantization_config has a form that Octavo does not check"),
    "fp8-tensor": {
        _HF: Consequence(WARNS, "reads one scale per tensor only as weight_scale_inv", True),
        **_servers(REFUSES, "one scale per tensor is read as weight_scale, and transformers writes weight_scale_inv"),
    },
    "autofp8": {_HF: Consequence(GARBAGE, "scales are read as weight_scale_inv: codes are taken for values")},
    "cache-scales": _servers(WARNS, "the KV cache is cast with the scale 1, or kept in 16 bits"),
    "quantization-lost": _all(GARBAGE, "codes are taken for values, without their scales", True),
    "quantization-without-codes": {
        _HF: Consequence(WARNS, "layers are built for codes but get values (on a CPU they are plain)", True),
        **_servers(REFUSES, "scales are expected that do not exist"),
    },
    "config-dtype": _all(WARNS, "values are rounded to another dtype while loading"),
    "own-family": {
        _HF: Consequence(WARNS, "octavo, which defines the model's class, must be imported first", True),
        **_servers(WARNS, "its code was not read for this family"),
    },
    "mpt-fields": {
        _HF: Consequence(
            GARBAGE, "its MPT class silently computes a different model; octavo.models.load reads it", True
        ),
        **_servers(WARNS, "its code for those fields was not read"),
    },
    "architectures": _servers(REFUSES, "the model's class is chosen by architectures"),
    "companion": _all(REFUSES, "a file of the tokenizer, the processor or the chat template cannot be read", True),
    "template": _servers(REFUSES, "chat requests cannot be rendered as a prompt"),
    "token-ids": _all(WARNS, "a token beyond the embeddings makes the forward fail"),
    "adapter-beside": {_HF: Consequence(GARBAGE, "the base model of the adapter is loaded instead of this one")},
    "name": _all(WARNS, "a file's name contains control characters"),
    "special": _all(WARNS, "a pipe, a device or a socket is among the files"),
    "link": _all(WARNS, "a link leads out of the folder, or nowhere"),
    "encrypted": _all(REFUSES, "files are encrypted, and only Octavo opens them", True),
    "sum": _all(GARBAGE, "a file differs from what was exported"),
    "export-note": {},
    "letters": _all(WARNS, "letters without tokens are dropped from prompts"),
    "end-token": _all(WARNS, "generation does not stop at the token that ends answers in the chat template"),
    "end-token-of-tokenizer": {
        _HF: Consequence(WARNS, "generation does not stop at the token that ends answers in the chat template")
    },
    "companions": _servers(WARNS, "prompts cannot be built without tokenizer, template and processor"),
    "missing": {
        _HF: Consequence(GARBAGE, "missing tensors are filled with random numbers, with a warning", True),
        **_servers(REFUSES, "a parameter gets no weights"),
    },
    "extra": {
        _HF: Consequence(WARNS, "an unexpected tensor is left out", True),
        **_servers(REFUSES, "there is no parameter of that name"),
    },
    "shape": _all(REFUSES, "a tensor's shape differs from the model's", True),
    "dtype": _all(WARNS, "a tensor is cast from a dtype that weights do not have", True),
    "e5m2": {
        _HF: Consequence(WARNS, "E5M2 codes are dequantized as they are on a CPU", True),
        **_servers(GARBAGE, "E5M2 codes are cast to E4M3, which ends at 448"),
    },
    "tied": {
        _HF: Consequence(WARNS, "two different tensors that config.json ties are both loaded and stay untied", True),
        **_servers(GARBAGE, "one of two different tensors that config.json ties is dropped"),
    },
    "tied-twice": {},
    "scale-missing": {
        _HF: Consequence(GARBAGE, "codes have no scales: the first forward fails, or answers nonsense", True),
        **_servers(GARBAGE, "scales that are not loaded are uninitialized memory"),
    },
    "scale-name": {
        _HF: Consequence(
            GARBAGE, "scales of another name are left out: the first forward fails, or answers nonsense", True
        ),
        **_servers(REFUSES, "there is no parameter of that name"),
    },
    "scale-both": {
        _HF: Consequence(WARNS, "one of two scales is left out", True),
        **_servers(REFUSES, "one scale has no parameter"),
    },
    "scale-transposed": _all(REFUSES, "the grid of scales does not fit the weight", True),
    "scale-grid": {
        _HF: Consequence(WARNS, "on a CPU the block is taken from the grid; elsewhere the grid does not fit", True),
        **_servers(REFUSES, "the grid of scales does not fit the weight"),
    },
    "scale-dtype": _all(WARNS, "scales are cast from another dtype", True),
    "scale-dangling": {
        _HF: Consequence(WARNS, "a value that has scales is multiplied by them, code or not", True),
        **_servers(GARBAGE, "a value that has scales is cast to FP8 and multiplied by them, code or not"),
    },
    "router": _all(GARBAGE, "the router is read in high precision: its codes are taken for values"),
    "head": _servers(GARBAGE, "the output projection is read in high precision: its codes are taken for values"),
    "fp8-elsewhere": _all(GARBAGE, "codes outside linear layers are taken for values"),
    "of-sound": _servers(REFUSES, "the audio tower is transformers' module, which has no parameter for scales"),
    "stacked": {
        _HF: Consequence(WARNS, "stacked experts in FP8 have no published form"),
        **_servers(REFUSES, "experts are read one by one"),
    },
    "experts-apart": {
        _HF: Consequence(GARBAGE, "this family's experts are only read stacked: they stay random", False)
    },
    "skip-missing": {},
    "skip-covers-fp8": {},
    "skip-nothing": {},
    "fused-mixed": _servers(REFUSES, "some parts of a fused matrix are FP8 and others are not"),
    "block-k": _servers(REFUSES, "block kernels quantize activations in whole groups along K"),
    "block-n": _servers(REFUSES, "blocks of fused shards would not match"),
    "block-ragged": {_HF: Consequence(WARNS, "on a CPU a ragged N is refused or read in blocks of another size", True)},
    "nan-codes": _all(GARBAGE, "NaN codes give NaN results", True),
    "nan-values": _all(GARBAGE, "NaN or infinite values", True),
    "scale-nan": _all(GARBAGE, "a scale is NaN or infinite", True),
    "scale-zero": _all(GARBAGE, "a scale is zero: its block is lost, or NaN once requantized", True),
    "scale-negative": _all(GARBAGE, "a scale is negative: kernels expect positive ones", True),
    "zero-block": {},
    "zero-weight": {},
    "codes-as-values": _all(GARBAGE, "codes are stored as values", True),
    "cast-through-fp8": _all(WARNS, "values were rounded to FP8 without a scale"),
    "unscaled": _all(GARBAGE, "codes without their scales", True),
    "reciprocal": _all(GARBAGE, "reciprocals are used as multipliers", True),
    "double-scaled": _all(GARBAGE, "scales seem to be applied twice", True),
    "magnitude": _all(WARNS, "weights are larger than trained ones"),
    "unfilled": _all(WARNS, "codes and scales may come from different casts"),
    "scale-unshared": _servers(WARNS, "fused layers are quantized again under the largest of their scales"),
    "against-names": {},
    "against-dropped": _servers(WARNS, "layers for multi-token prediction differ from the reference"),
    "against-shape": {},
    "against-values": _all(WARNS, "values are loaded as they are, and differ from the reference"),
    "error": _all(GARBAGE, "values differ from the reference"),
}


#: transformers dequantizes all weights of method fp8 on a CPU, and uses the skip list only on a GPU
_GPU = {"transformers": " (method fp8: on a GPU)", "vLLM": "", "SGLang": ""}

#: warnings that make one loader fail, although the folder is correct for the others or for Octavo
_SURE = ("encrypted", "experts-apart", "of-sound", "autofp8")


def verdicts(findings: Iterable[Finding], q: Quantization | None) -> tuple[Verdict, ...]:
    """Return one verdict per loader: the worst consequence of the findings, or why it accepts the folder."""
    findings = list(findings)
    out = []
    for loader in LOADERS:
        consequences = [_accepted(loader, q)]
        for finding in findings:
            if consequence := _consequence(finding, loader):
                is_warning = finding.status == WARN and finding.kind not in _SURE
                consequences.append(consequence._replace(verdict=WARNS) if is_warning else consequence)
        consequence = max(consequences, key=lambda item: VERDICTS.index(item.verdict))  # the first on ties
        out.append(Verdict(loader, consequence.verdict, consequence.reason, RUN if consequence.run else READ[loader]))
    return tuple(out)


def _consequence(finding: Finding, loader: str) -> Consequence | None:
    if finding.kind in ("skip-missing", "skip-covers-fp8"):
        if loader not in finding.text:  # the sentence names the loaders that the finding affects
            return None
        if finding.kind == "skip-covers-fp8":
            return Consequence(
                GARBAGE, f"an FP8 layer counts as unquantized: its codes are taken for values{_GPU[loader]}"
            )
        if loader == "transformers":
            return Consequence(GARBAGE, f"a layer in high precision is built for codes, without scales{_GPU[loader]}")
        return Consequence(REFUSES, "scales are expected for a layer in high precision")
    return CONSEQUENCES[finding.kind].get(loader)


def _accepted(loader: str, q: Quantization | None) -> Consequence:
    if q is None:
        return Consequence("ok", "names, shapes and dtypes are the stock model's", loader == "transformers")
    if loader == "transformers":
        if q.method == "fp8":
            return Consequence(
                "ok", "dequantized while loading on a CPU, FP8 on GPUs from compute capability 8.9", True
            )
        return Consequence("ok", "with the package compressed-tensors installed; decompressed by default", True)
    if q.method == "fp8" and q.kind == "tensor":
        return Consequence("ok", "AutoFP8's layout, one scale per tensor, from compute capability 8.9")
    if q.method == "fp8":
        return Consequence("ok", "block kernels; on Blackwell scales are turned into powers of two while loading")
    return Consequence("ok", "compressed-tensors W8A8 FP8 from compute capability 8.9")
