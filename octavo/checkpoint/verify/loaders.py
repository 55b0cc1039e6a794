"""Verdicts: what transformers, vLLM and SGLang do with a folder, derived from the findings, with reason and source.

Every kind of finding has a consequence for each loader that it affects; a loader's verdict is the worst of them. "run"
means that the loader was run on such a folder (transformers, on a CPU); "read" that only its code was read.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from octavo.checkpoint.verify.findings import (
    FAIL,
    GARBAGE,
    LOADERS,
    OK,
    REFUSES,
    UNKNOWN,
    VERDICTS,
    WARN,
    Consequence,
    Finding,
    Findings,
    Verdict,
)
from octavo.checkpoint.verify.names import scale_of
from octavo.models.folder.quantization import Quantization

_HF = "transformers"
RUN = {_HF: "run: transformers 5.23 on a CPU", "vLLM": "loaded in vLLM 0.32 on a CPU"}
READ = {
    _HF: "read in its source (transformers 5.23)",
    "vLLM": "read in its source (vLLM 0.32)",
    "SGLang": "read in its source (SGLang up to 0.5.23)",
}

WARNS = "warns"  # in the table below: ok, and the reason is a warning


def _does(verdict: str, reason: str, run: bool = False) -> Consequence:
    return Consequence(OK, reason, run, True) if verdict == WARNS else Consequence(verdict, reason, run)


def _all(verdict: str, reason: str, run: bool = False) -> dict[str, Consequence]:
    return {loader: _does(verdict, reason, run and loader == "transformers") for loader in LOADERS}


def _servers(verdict: str, reason: str) -> dict[str, Consequence]:
    return {loader: _does(verdict, reason) for loader in ("vLLM", "SGLang")}


_UNREAD = "the quantization has a form that Octavo does not check"

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
        _HF: _does(GARBAGE, "a tensor that is missing in its file gets random numbers, with a warning", True),
        **_servers(REFUSES, "a parameter gets no weights"),
    },
    "extra-shard": _servers(REFUSES, "every *.safetensors is read, including the stray one"),
    "index-stale": {
        "vLLM": _does(REFUSES, "the index names files that do not exist", True),
        "SGLang": _does(REFUSES, "the index names files that do not exist"),
    },
    "two-layouts": _all(WARNS, "the single file and the index may not agree"),
    "duplicate": _all(WARNS, "the later of two tensors with the same name is used"),
    "config": _all(REFUSES, "config.json cannot be used"),
    "quantization": _all(UNKNOWN, _UNREAD),
    "quantization-file": _servers(GARBAGE, "layers are built as hf_quant_config.json says, and values are cast"),
    "modelopt": {
        _HF: _does(GARBAGE, "the file is not read: codes are taken for values", True),
        **_servers(UNKNOWN, _UNREAD),
    },
    "quantization-word": {_HF: _does(GARBAGE, "the method is skipped: codes are taken for values", True)},
    "fp8-tensor": {
        _HF: _does(WARNS, "reads one scale per tensor only as weight_scale_inv", True),
        **_servers(REFUSES, "one scale per tensor is read as weight_scale, and transformers writes weight_scale_inv"),
    },
    "autofp8": {_HF: _does(GARBAGE, "scales are read as weight_scale_inv: codes are taken for values")},
    "cache-scales": _servers(WARNS, "the KV cache is cast with the scale 1, or kept in 16 bits"),
    "quantization-lost": _all(GARBAGE, "codes are taken for values, without their scales", True),
    "quantization-without-codes": {
        _HF: _does(WARNS, "layers are built for codes but get values (on a CPU they are plain)", True),
        **_servers(REFUSES, "scales are expected that do not exist"),
    },
    "config-dtype": _all(WARNS, "values are rounded to another dtype while loading"),
    "own-family": {
        _HF: _does(WARNS, "octavo, which defines the model's class, must be imported first", True),
        **_servers(WARNS, "its code was not read for this family"),
    },
    "composed": {
        _HF: _does(WARNS, "octavo, which defines the model's class, must be imported first", True),
        **_servers(REFUSES, "it has no class for this model_type"),
    },
    "mpt-fields": {
        _HF: _does(GARBAGE, "its MPT class silently computes a different model; octavo.models.load reads it", True),
        **_servers(WARNS, "its code for those fields was not read"),
    },
    "architectures": _servers(REFUSES, "the model's class is chosen by architectures"),
    "no-architectures": _servers(REFUSES, "the model's class is chosen by architectures"),
    "generation-config": _all(REFUSES, "generation_config.json cannot be used"),
    "generation-config-left-out": {
        loader: _does(WARNS, "generation_config.json is not JSON and is left out: defaults are used", loader == _HF)
        for loader in LOADERS
    },
    "companion": _all(REFUSES, "a file of the tokenizer, the processor or the chat template cannot be read", True),
    "template": {
        "vLLM": _does(WARNS, "it starts and refuses chat requests, which cannot be rendered as a prompt", True),
        "SGLang": _does(REFUSES, "chat requests cannot be rendered as a prompt"),
    },
    "foreign-tokenizer": {
        _HF: _does(GARBAGE, "the first prompt of the chat template raises an IndexError", True),
        "vLLM": _does(GARBAGE, "it starts, and the first prompt of the chat template raises an IndexError", True),
        "SGLang": _does(GARBAGE, "the tokens of the chat template have no row in the embedding"),
    },
    "token-ids": _all(WARNS, "a token beyond the embeddings makes the forward fail"),
    "adapter-config": {_HF: _does(GARBAGE, "the base model of the adapter is loaded instead of this one")},
    "name": _all(WARNS, "a file's name contains control characters"),
    "special": _all(WARNS, "a pipe, a device or a socket is among the files"),
    "link": _all(WARNS, "a link leads out of the folder, or nowhere"),
    "encrypted": _all(REFUSES, "files are encrypted, and only Octavo opens them", True),
    "sum": _all(GARBAGE, "a file differs from what was exported"),
    "export-note": {},
    "letters": _all(WARNS, "letters without tokens are dropped from prompts"),
    "end-token": _all(WARNS, "generation does not stop at the token that ends answers in the chat template"),
    "end-token-of-tokenizer": {
        _HF: _does(WARNS, "generation does not stop at the token that ends answers in the chat template")
    },
    "companions": _servers(WARNS, "prompts cannot be built without template and processor"),
    "no-end-token": _all(WARNS, "generation stops only at the tokens in generation_config.json", True),
    "no-tokenizer": {
        "vLLM": _does(REFUSES, "it loads the tokenizer first, and there is none", True),
        "SGLang": _does(REFUSES, "it loads the tokenizer, and there is none"),
    },
    "missing": {
        _HF: _does(GARBAGE, "missing tensors are filled with random numbers, with a warning", True),
        **_servers(REFUSES, "a parameter gets no weights"),
    },
    "extra": {
        _HF: _does(WARNS, "an unexpected tensor is left out", True),
        **_servers(REFUSES, "there is no parameter of that name"),
    },
    "shape": _all(REFUSES, "a tensor's shape differs from the model's", True),
    "dtype": _all(WARNS, "a tensor is cast from a dtype that weights do not have", True),
    "e5m2": {
        _HF: _does(WARNS, "E5M2 codes are dequantized as they are on a CPU", True),
        **_servers(GARBAGE, "E5M2 codes are cast to E4M3, which ends at 448"),
    },
    "tied": {
        _HF: _does(WARNS, "two different tensors that config.json ties are both loaded and stay untied", True),
        **_servers(GARBAGE, "one of two different tensors that config.json ties is dropped"),
    },
    "tied-twice": {},
    "scale-missing": {
        _HF: _does(GARBAGE, "codes have no scales: the first forward fails, or answers nonsense", True),
        **_servers(GARBAGE, "scales that are not loaded are uninitialized memory"),
    },
    "scale-name": {
        _HF: _does(GARBAGE, "scales of another name are left out: the first forward fails, or answers nonsense", True),
        **_servers(REFUSES, "there is no parameter of that name"),
    },
    "scale-both": {
        _HF: _does(WARNS, "one of two scales is left out", True),
        **_servers(REFUSES, "one scale has no parameter"),
    },
    "scale-transposed": _all(REFUSES, "the grid of scales does not fit the weight", True),
    "scale-grid": {
        _HF: _does(WARNS, "on a CPU the block is taken from the grid; elsewhere the grid does not fit", True),
        **_servers(REFUSES, "the grid of scales does not fit the weight"),
    },
    "scale-dtype": _all(WARNS, "scales are cast from another dtype", True),
    "scale-dangling": {
        _HF: _does(WARNS, "a value that has scales is multiplied by them, code or not", True),
        **_servers(GARBAGE, "a value that has scales is cast to FP8 and multiplied by them, code or not"),
    },
    "router": _all(GARBAGE, "the router is read in high precision: its codes are taken for values"),
    "head": _servers(GARBAGE, "the output projection is read in high precision: its codes are taken for values"),
    "fp8-elsewhere": _all(GARBAGE, "codes outside linear layers are taken for values"),
    "of-sound": _servers(REFUSES, "the audio tower is transformers' module, which has no parameter for scales"),
    "stacked": {
        _HF: _does(WARNS, "stacked experts in FP8 have no published form"),
        **_servers(REFUSES, "experts are read one by one"),
    },
    "experts-apart": {_HF: _does(GARBAGE, "this family's experts are only read stacked: they stay random", False)},
    "skip-missing": {},
    "skip-covers-fp8": {},
    "skip-nothing": {},
    "fused-mixed": _servers(REFUSES, "some parts of a fused matrix are FP8 and others are not"),
    "block-k": _servers(REFUSES, "block kernels quantize activations in whole groups along K"),
    "block-n": _servers(REFUSES, "blocks of fused shards would not match"),
    "block-ragged": {_HF: _does(WARNS, "on a CPU a ragged N is refused or read in blocks of another size", True)},
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
    "server": {},
    "against-names": {},
    "against-dropped": _servers(WARNS, "layers for multi-token prediction differ from the reference"),
    "against-shape": {},
    "against-values": _all(UNKNOWN, "values are loaded as they are; they differ from the reference"),
    "error": _all(GARBAGE, "values differ from the reference"),
}


#: what vLLM 0.32 did with such folders on a CPU, where that is not what the table above says or was read
SEEN: dict[str, Consequence] = {
    "missing-shard": Consequence(REFUSES, "a shard that the index names is missing", True),
    "tied": Consequence(OK, "the lm_head on disk is used, although config.json ties it", True, True),
}

#: transformers dequantizes all weights of method fp8 on a CPU, and uses the skip list only on a GPU
_GPU = {"transformers": " (method fp8: on a GPU)", "vLLM": "", "SGLang": ""}

#: warnings that make one loader fail, although the folder is correct for the others or for Octavo
_SURE = ("encrypted", "composed", "experts-apart", "of-sound", "autofp8", "no-tokenizer")


#: kinds of findings about tensors, whose consequences for servers `servers.predict` derives from their rules
_PREDICTED = (
    "no-weights",
    "index-entry",
    "index-tensor",
    "extra-shard",
    "no-architectures",
    "duplicate",
    "quantization",
    "fp8-tensor",
    "quantization-lost",
    "quantization-without-codes",
    "missing",
    "extra",
    "shape",
    "dtype",
    "e5m2",
    "scale-missing",
    "scale-name",
    "scale-both",
    "scale-transposed",
    "scale-grid",
    "scale-dtype",
    "scale-dangling",
    "head",
    "fp8-elsewhere",
    "skip-missing",
    "skip-covers-fp8",
    "fused-mixed",
    "block-k",
    "block-n",
    "server",
)


def check_predictions(predicted: Mapping[str, list[Consequence] | None], findings: Findings) -> None:
    """Report a folder that no other check fails, but that vLLM refuses or loads with wrong answers.

    Only models count for whose kind vLLM's rules are known: `Consequence.decides`.
    """
    accepted, *events = predicted.get("vLLM") or [Consequence(OK, "")]
    bad = sorted(
        (e for e in events if e.verdict in (GARBAGE, REFUSES)), key=lambda event: -VERDICTS.index(event.verdict)
    )
    if accepted.decides and bad and not any(finding.status == FAIL for finding in findings):
        does = "refuses the folder" if bad[0].verdict == REFUSES else "loads the folder and answers wrong"
        fix = bad[0].fix or "write the folder again, as an export does"
        findings.fail("server", loader="vLLM", does=does, reason=bad[0].reason, fix=fix)


def verdicts(
    findings: Iterable[Finding], q: Quantization | None, predicted: Mapping[str, list[Consequence] | None]
) -> tuple[Verdict, ...]:
    """Return one verdict per loader: the worst consequence of the findings, or why it accepts the folder.

    Args:
        predicted: server -> what it does with the tensors (`servers.predict`); None or no entry if that is not known.
    """
    findings = list(findings)
    # Codes that are stored as values, with scales, are codes again once they are copied into a parameter of codes.
    with_scales = {scale_of(finding.tensor) for finding in findings if finding.kind == "scale-dangling"}
    out = []
    for loader in LOADERS:
        events = predicted.get(loader)
        consequences = events[:1] if events else [_accepted(loader, q)]
        if loader in predicted and events is None:
            consequences = [Consequence(UNKNOWN, _UNREAD)]
        loaded = loader == "transformers" or consequences[0].run  # whether folders of this kind were loaded at all
        for finding in findings:
            known_by_rules = finding.kind in _PREDICTED or (
                finding.kind == "codes-as-values" and finding.tensor in with_scales
            )
            if events is not None and known_by_rules:
                continue
            if consequence := _consequence(finding, loader):
                consequence = consequence._replace(run=consequence.run and loaded)
                is_warning = finding.status == WARN and finding.kind not in _SURE
                consequences.append(consequence._replace(verdict=OK, warns=True) if is_warning else consequence)
        consequences += events[1:] if events else ()
        worst = max(consequences, key=lambda item: (VERDICTS.index(item.verdict), item.warns))  # the first on ties
        out.append(Verdict(loader, worst.verdict, worst.reason, _source(loader, worst, q), worst.warns))
    return tuple(out)


def _source(loader: str, consequence: Consequence, q: Quantization | None) -> str:
    if not consequence.run:
        return READ[loader]
    if loader == "vLLM" and q is not None and (q.kind != "row" or q.activations == "static"):
        return f"{RUN[loader]} (kernel of the test)"  # vLLM for CPUs has none for these layouts
    return RUN[loader]


def _consequence(finding: Finding, loader: str) -> Consequence | None:
    if finding.kind in ("skip-missing", "skip-covers-fp8"):
        if loader not in finding.text:  # the sentence names the loaders that the finding affects
            return None
        if finding.kind == "skip-covers-fp8":
            reason = f"an FP8 layer counts as unquantized: its codes are taken for values{_GPU[loader]}"
        else:
            reason = f"a layer in high precision is built for codes, without scales{_GPU[loader]}"
        return Consequence(GARBAGE, reason)
    if loader == "vLLM" and finding.kind in SEEN:
        return SEEN[finding.kind]
    return CONSEQUENCES[finding.kind].get(loader)


def _accepted(loader: str, q: Quantization | None) -> Consequence:
    if q is None:
        return Consequence(OK, "names, shapes and dtypes are the stock model's", loader == "transformers")
    if loader == "transformers":
        if q.method == "fp8":
            return Consequence(OK, "dequantized while loading on a CPU, FP8 on GPUs from compute capability 8.9", True)
        return Consequence(OK, "with the package compressed-tensors installed; decompressed by default", True)
    return Consequence(OK, "its quantization_config is one that Octavo reads")
