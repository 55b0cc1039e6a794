"""Restores a model, an adapter or text from sealed training, for the plain model, with the key that sealed it.

octavo unseal model runs/sealed/hf ./trained --key-file seal.key --model ./Qwen3-VL-8B-Instruct
octavo unseal adapter runs/sealed/adapter ./adapter --key-file seal.key --model ./Qwen3-VL-8B-Instruct
octavo unseal text "t17 t4005" --key-file seal.key --model ./Qwen3-VL-8B-Instruct

--model is the plain model. For a model, its tokenizer and processor are copied (without --model, only weights and
configuration are written); for an adapter, it is the base. Weights are restored bit for bit. Sources may be encrypted
with another key (--files-key). Outputs are not encrypted; encrypt them with octavo encrypt.
"""

from __future__ import annotations

import argparse

from octavo.base.byte_size import format_bytes
from octavo.base.wording import count_noun
from octavo.cli import seal, terminal

WHATS = ("model", "adapter", "text")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("what", metavar="WHAT", choices=WHATS, help=f"one of {', '.join(WHATS)}")
    seal.add_shared(parser)
    parser.add_argument("--model", metavar="FOLDER", help="folder of the plain model")


def run(args: argparse.Namespace) -> int:
    seal.check(args, args.what == "text", args.what != "model" or args.model is not None, key=True)

    # Importing torch takes seconds, so the arguments are checked first.
    from octavo import sealing

    key, encrypted = seal.keys(args)
    document: dict[str, str | int]
    if args.what == "text":
        text = sealing.unseal_text(args.source, args.model, key)
        document, words = {"text": text}, text
    elif args.what == "adapter":
        adapter = sealing.unseal_adapter(args.source, args.target, args.model, key)
        seal.warn_plain(encrypted, adapter)
        document, words = {"directory": str(adapter)}, f"{adapter}: an adapter of {args.model}"
    else:
        with terminal.progress("unseal") as progress:
            model = sealing.unseal_model(args.source, args.target, key, args.model, progress=progress)
        seal.warn_plain(encrypted, model.directory)
        document = {"directory": str(model.directory), "tensors": model.tensors, "bytes": model.bytes}
        missing = "" if args.model else "; copy tokenizer and processor from the plain model"
        words = f"{model.directory}: {count_noun(model.tensors, 'tensor')}, {format_bytes(model.bytes)}{missing}"
    if args.json:
        terminal.show_json(document)
    else:
        terminal.say(words)
    return 0
