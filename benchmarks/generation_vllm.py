"""Compares the generation engine with vLLM on SmolLM2-135M in BF16 on a CPU: prefill and decode of several batch sizes.

    make real server
    python -m benchmarks.generation_vllm [--sequences 1 8 64] [--prompt 256] [--new 64] [--rounds 3] [--out FILE]

Both have the same prompts (tokens of Python's documentation), which differ in every call, the same number of threads,
and no end token. They take turns: `prefill` is a call with one new token, `decode` the rest of a call with `--new`
tokens. vLLM runs in build/server, without its prefix cache, as it is by default and with `enforce_eager`. Figures are
tokens per second of the fastest round; ratios are Octavo's over vLLM's, and above 1 Octavo is faster.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path

import numpy as np
import torch

from octavo import generation, models
from octavo.bench import record

ROOT = Path(__file__).resolve().parents[1]
DATA = ROOT / "build/smollm2-data/text.train.jsonl"
MODEL, SERVER = ROOT / "build/smollm2", ROOT / "build/server/bin/python"
DRIVER = r"""
import json, os, sys, time
answers = os.fdopen(int(sys.argv[1]), "w", buffering=1)
settings = json.loads(sys.argv[2])
from vllm import LLM, SamplingParams
engine = LLM(**settings)
answers.write(json.dumps("ready") + "\n")
for line in sys.stdin:
    prompts, new = json.loads(line)
    sampling = SamplingParams(temperature=1.0, max_tokens=new, min_tokens=new, ignore_eos=True, logprobs=0)
    began = time.perf_counter()
    results = engine.generate([{"prompt_token_ids": row} for row in prompts], sampling, use_tqdm=False)
    seconds = time.perf_counter() - began
    assert all(len(result.outputs[0].token_ids) == new for result in results)
    answers.write(json.dumps(seconds) + "\n")
"""
Generate = Callable[[list[list[int]], int], float]
"""(prompts, new tokens) -> seconds."""


class Vllm:
    """An engine of vLLM in a process of build/server. `eager`: without compilation."""

    def __init__(self, threads: int, sequences: int, length: int, eager: bool) -> None:
        settings = {
            "model": str(MODEL),
            "dtype": "bfloat16",
            "max_model_len": length,
            "max_num_seqs": sequences,
            "seed": 0,
            "enable_prefix_caching": False,
            "enforce_eager": eager,
            "gpu_memory_utilization": 0.5,
        }
        environment = {
            **{name: value for name, value in os.environ.items() if name != "PYTHONPATH"},
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "VLLM_CPU_KVCACHE_SPACE": "4",
            "VLLM_NO_USAGE_STATS": "1",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "OMP_NUM_THREADS": str(threads),
            "HF_HUB_OFFLINE": "1",
            "VLLM_HOST_IP": "127.0.0.1",
            "GLOO_SOCKET_IFNAME": "lo",
            "TOKENIZERS_PARALLELISM": "false",
        }
        read, write = os.pipe()
        self.process = subprocess.Popen(
            [str(SERVER), "-c", DRIVER, str(write), json.dumps(settings)],
            stdin=subprocess.PIPE,
            env=environment,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            pass_fds=(write,),
            text=True,
        )
        os.close(write)
        self.answers = os.fdopen(read)
        if not self.answers.readline():
            raise SystemExit(f"vLLM did not start: {SERVER} -c ... {json.dumps(settings)}")

    def generate(self, prompts: list[list[int]], new: int) -> float:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps([prompts, new]) + "\n")
        self.process.stdin.flush()
        return float(json.loads(self.answers.readline()))

    def close(self) -> None:
        self.process.kill()
        self.process.wait()


def octavo_engine(threads: int, sequences: int) -> Generate:
    """Return the engine of this process."""
    torch.set_num_threads(threads)
    model, tokenizer = models.load(MODEL, dtype=torch.bfloat16), models.load_tokenizer(MODEL)
    # Completions must not end: vLLM ignores the end token, and the engine also ends with the one of the chat template.
    model.generation_config.eos_token_id = model.config.vocab_size
    ends = {tokenizer.eos_token_id, tokenizer.convert_tokens_to_ids("<|im_end|>")}
    engine = generation.Engine(model, tokenizer, slots=sequences)

    def generate(prompts: list[list[int]], new: int) -> float:
        rows = [generation.Prompt(np.array(row), number) for number, row in enumerate(prompts)]
        began = time.perf_counter()
        completions = engine.generate(rows, generation.Sampling(new, excluded=tuple(ends)))
        seconds = time.perf_counter() - began
        assert all(len(completion.tokens) == new for completion in completions)
        return seconds

    return generate


@cache
def tokens() -> list[int]:
    """Return the tokens of the documentation."""
    text = "".join(json.loads(line)["text"] for line in DATA.read_text(encoding="utf-8").splitlines())
    return list(models.load_tokenizer(MODEL)(text)["input_ids"])


def prompts_of(count: int, length: int, number: int) -> list[list[int]]:
    """Return prompts of tokens of the documentation, other ones for each `number`."""
    draw = np.random.default_rng(number)
    return [tokens()[at : at + length] for at in draw.integers(0, len(tokens()) - length, count)]


def rates(ways: dict[str, Generate], count: int, prompt: int, new: int, rounds: int) -> dict[str, dict[str, float]]:
    """Return tokens per second of prefill and decode of each way: the fastest of `rounds`, after one that warms up."""
    best: dict[str, dict[str, float]] = {name: {"prefill": 0.0, "decode": 0.0} for name in ways}
    for number in range(rounds + 1):
        for name, generate in ways.items():
            first = generate(prompts_of(count, prompt, 2 * number), 1)
            whole = generate(prompts_of(count, prompt, 2 * number + 1), new)
            if number:
                best[name]["prefill"] = max(best[name]["prefill"], count * prompt / first)
                best[name]["decode"] = max(best[name]["decode"], count * (new - 1) / max(whole - first, 1e-9))
    return best


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--sequences", type=int, nargs="+", default=[1, 8, 64])
    parser.add_argument("--prompt", type=int, default=256)
    parser.add_argument("--new", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args(words)
    for needed, target in ((MODEL, "real"), (SERVER, "server")):
        if not needed.exists():
            raise SystemExit(f"{needed} is missing: make {target}")
    most, length = max(args.sequences), args.prompt + args.new
    servers = {
        name: Vllm(args.threads, most, length, eager) for name, eager in (("vllm", False), ("vllm, eager", True))
    }
    ways = {"octavo": octavo_engine(args.threads, most), **{name: server.generate for name, server in servers.items()}}
    rows = []
    try:
        for count in args.sequences:
            best = rates(ways, count, args.prompt, args.new, args.rounds)
            for name, figures in best.items():
                ratios = {f"{key}_ratio": best["octavo"][key] / figures[key] for key in figures}
                rows.append({"sequences": count, "way": name, **figures, **ratios})
                print(
                    f"{count:3} sequences, {name:12} prefill {figures['prefill']:8.0f} tokens/s "
                    f"({ratios['prefill_ratio']:.2f})   decode {figures['decode']:8.1f} tokens/s "
                    f"({ratios['decode_ratio']:.2f})",
                    flush=True,
                )
    finally:
        for server in servers.values():
            server.close()
    if args.out:
        record.save({"machine": record.describe_machine(), **vars(args), "out": str(args.out), "rows": rows}, args.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
