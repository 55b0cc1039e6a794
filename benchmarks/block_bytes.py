"""Bytes that a compiled decoder block moves outside of its GEMMs and its attention, by Inductor's own account.

    python -m benchmarks.block_bytes [--out benchmarks/results/block_bytes.json]

A Qwen3 decoder block with the proportions of the 8B model is traced with its backward, and lowered by Inductor without
generating code: no GPU is needed, and nothing is timed. The unit is u = tokens x hidden x 2 bytes, one activation in
16 bits. Two columns add up to the sum:

    generated   what the elementwise kernels read and write that Inductor fuses for a GPU (gpu_fusion.py)
    operators   what Octavo's casts and fused operators must read and write

GEMMs and attention are left out: both columns hold what FP8 adds to them or saves. The last column is the sum with
Inductor's fusions for a CPU, where the backward of a norm takes two kernels. Of a candidate's generated kernels the
result file has the bytes by the modules whose code they compute, forward and backward.
"""

from __future__ import annotations

import argparse
import copy
import re
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch._inductor.scheduler import BaseSchedulerNode

from benchmarks import gpu_fusion
from octavo import fp8
from octavo.bench import record

TOKENS, HIDDEN, KV, WIDTH, HEAD = 1024, 512, 128, 1536, 128  # 8B: 4096, 1024, 12288, 128
UNIT = TOKENS * HIDDEN * 2
CANDIDATES: dict[str, dict[str, str] | None] = {
    "bf16": None,
    "blockwise": {"recipe": "blockwise"},
    "blockwise fused": {"recipe": "blockwise", "fuse": "on"},
    "tensorwise": {"recipe": "tensorwise"},
    "tensorwise fused": {"recipe": "tensorwise", "fuse": "on"},
    "rowwise": {"recipe": "rowwise"},
    "rowwise fused": {"recipe": "rowwise", "fuse": "on"},
}


def decoder_block() -> tuple[nn.Module, Callable[[Callable[..., Tensor]], Callable[[Tensor], Tensor]]]:
    """Return the block, and a function that binds a forward of it to its other inputs."""
    from transformers import Qwen3Config
    from transformers.models.qwen3.modeling_qwen3 import Qwen3DecoderLayer, Qwen3RotaryEmbedding

    sizes = {"hidden_size": HIDDEN, "intermediate_size": WIDTH, "head_dim": HEAD, "vocab_size": 8}
    heads = {"num_attention_heads": HIDDEN // HEAD, "num_key_value_heads": KV // HEAD}
    config = Qwen3Config(**sizes, **heads, num_hidden_layers=1)
    config._attn_implementation = "sdpa"
    torch.manual_seed(0)
    block, positions = Qwen3DecoderLayer(config, 0).bfloat16(), torch.arange(TOKENS)[None]
    rotary = Qwen3RotaryEmbedding(config)(torch.zeros(1, TOKENS, HIDDEN, dtype=torch.bfloat16), positions)

    def bind(forward: Callable[..., Tensor]) -> Callable[[Tensor], Tensor]:
        return lambda x: forward(x, position_embeddings=rotary, position_ids=positions, use_cache=False)

    return block, bind


def count(policy: dict[str, str] | None) -> dict[str, Any]:
    """Return the bytes of a block, forward and backward, in u: ``generated``, ``operators``, their ``sum``, and
    ``sum_on_cpu``; how often each operator runs (``calls``), the bytes of those that move some (``moved``), and the
    bytes of the generated kernels by the modules that they compute (``kernels``), largest first.

    Raises:
        RuntimeError: the block is more than one graph each way.
    """
    from torch._dynamo.backends.common import aot_autograd
    from torch._functorch.aot_autograd import make_boxed_func
    from torch._functorch.partitioners import min_cut_rematerialization_partition
    from torch._inductor.decomposition import select_decomp_table

    block, bind = decoder_block()
    if policy is not None:
        options = dict(policy)
        fp8.apply(block, fp8.plan(block, fp8.Policy(options.pop("recipe"), **options)))
    graphs: list[Counter[str]] = []
    on_cpu = 0
    calls, moved = Counter[str](), Counter[str]()

    def look(module: torch.fx.GraphModule, inputs: Sequence[object]) -> Callable[..., object]:
        nonlocal on_cpu
        graphs.append(_kernel_bytes(module, inputs, gpu=True))
        on_cpu += _kernel_bytes(module, inputs, gpu=False).total()
        _add_operators(module, calls, moved)
        return make_boxed_func(module.forward)

    torch._dynamo.reset()
    # As Inductor compiles: its decompositions and its division into a forward and a backward.
    stages = {"fw_compiler": look, "bw_compiler": look, "decompositions": select_decomp_table}
    backend = aot_autograd(**stages, partition_fn=min_cut_rematerialization_partition)
    compiled = torch.compile(bind(block), backend=backend, fullgraph=True, dynamic=False)
    compiled(torch.randn(1, TOKENS, HIDDEN, dtype=torch.bfloat16, requires_grad=True)).sum().backward()
    torch._dynamo.reset()
    if len(graphs) != 2:
        raise RuntimeError(f"The block has {len(graphs)} graphs, forward and backward; 2 were expected.")
    kernels = {
        f"{way}: {name}": size
        for way, sizes in zip(("forward", "backward"), graphs, strict=True)
        for name, size in sizes.most_common()
    }
    figures = {"generated": sum(kernels.values()) / UNIT, "operators": sum(moved.values()) / UNIT}
    figures["sum"] = sum(figures.values())
    figures["sum_on_cpu"] = (on_cpu + sum(moved.values())) / UNIT
    return {
        **{name: round(value, 2) for name, value in figures.items()},
        "calls": dict(sorted(calls.items())),
        "moved": {name: round(size / UNIT, 2) for name, size in sorted(moved.items())},
        "kernels": {name: round(size / UNIT, 2) for name, size in kernels.items()},
    }


def _kernel_bytes(module: torch.fx.GraphModule, inputs: Sequence[object], gpu: bool) -> Counter[str]:
    """Return the bytes that Inductor's own kernels of a graph read and write, after it has fused them for a GPU or for
    this CPU, by the modules that they compute."""
    from torch._inductor.compile_fx import _recursive_post_grad_passes, fake_tensor_prop
    from torch._inductor.debug import DebugContext
    from torch._inductor.graph import GraphLowering
    from torch._inductor.scheduler import ExternKernelSchedulerNode
    from torch._inductor.virtualized import V

    module = copy.deepcopy(module)
    mode = fake_tensor_prop(module, list(inputs))
    with V.set_fake_mode(mode):
        _recursive_post_grad_passes(module, False)
        with gpu_fusion.h200() if gpu else nullcontext():
            inputs = gpu_fusion.move_to_gpu(module, inputs, mode) if gpu else inputs
            graph = GraphLowering(module, shape_env=mode.shape_env)
            with V.set_graph_handler(graph), V.set_debug_handler(DebugContext()):
                graph.run(*inputs)
                graph._update_scheduler()
                sizes = Counter[str]()
                for node in graph.scheduler.nodes:
                    if not isinstance(node, ExternKernelSchedulerNode):
                        sizes[_modules(node)] += node.get_read_write_buffers_sizes()
                return sizes


def _modules(kernel: BaseSchedulerNode) -> str:
    """Return the names in the block of the modules that a kernel of Inductor computes."""
    names = set()
    for node in kernel.get_nodes():
        for origin in node.node.origins if node.node is not None else ():
            stack = origin.meta.get("nn_module_stack") or origin.meta.get("fwd_nn_module_stack") or {}
            path, _ = next(reversed(stack.values()), ("", None))
            names.add(re.sub(r"^L\['\w+'\]\.?", "", path) or "block")
    return " + ".join(sorted(names)) or "block"


def _add_operators(module: torch.fx.GraphModule, calls: Counter[str], moved: Counter[str]) -> None:
    """Add Octavo's operators of a graph to ``calls``, and the bytes they must move, without GEMMs, to ``moved``."""
    for node in module.graph.nodes:
        library, _, name = str(node.target).removesuffix(".default").partition(".")
        if node.op != "call_function" or library != "octavo":
            continue
        calls[name] += 1
        read, written = [_bytes(argument) for argument in node.args], _bytes(node)
        if name in ("cast", "rmsnorm"):
            moved[name] += read[0] + written
        elif name == "swiglu_backward":
            moved[name] += sum(read[:3]) + written
        elif name == "gated_mlp":
            # Its SwiGLU reads gate and up, and writes the codes of h for fwd, which the operator keeps, and for wgrad.
            _, gate, up, *codes = node.meta["val"]
            moved[name] += _bytes((gate, up, *codes)) + gate.numel() + gate.numel() // 128 * 4


def _bytes(value: object) -> int:
    """Return the bytes in memory of the tensors of a node or a value."""
    if isinstance(value, torch.fx.Node):
        value = value.meta.get("val")
    if isinstance(value, Tensor):  # an expanded one has fewer than its shape says
        return min(value.numel() * value.element_size(), value.untyped_storage().nbytes())
    return sum(map(_bytes, value)) if isinstance(value, list | tuple) else 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    rows = []
    print(f"{'u = tokens x hidden x 2 bytes':24} generated  operators    sum  on a CPU")
    for name, policy in CANDIDATES.items():
        rows.append({"candidate": name, **count(policy)})
        columns = zip(("generated", "operators", "sum", "sum_on_cpu"), (9, 10, 6, 9), strict=True)
        print(f"{name:24} " + " ".join(f"{rows[-1][column]:{width}.2f}" for column, width in columns), flush=True)
    if args.out:
        shape = {"tokens": TOKENS, "hidden": HIDDEN, "kv": KV, "intermediate": WIDTH, "head": HEAD}
        result = {"command": "python -m benchmarks.block_bytes", "shape": shape, "rows": rows}
        record.save({**result, "machine": record.describe_machine()}, args.out)


if __name__ == "__main__":
    main()
