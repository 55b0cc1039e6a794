"""Whether what runs now is recorded into a CUDA graph: nothing may be kept there that a replay would not make again."""

from __future__ import annotations

import sys

import torch


def capturing(device: torch.device) -> bool:
    """Whether what runs now on this device goes into a CUDA graph, of ours or of Inductor's (``reduce-overhead``, whose
    memory pool may hold nothing that outlives a run)."""
    if device.type != "cuda":
        return False
    if torch.cuda.is_current_stream_capturing():
        return True
    trees = sys.modules.get("torch._inductor.cudagraph_trees")
    return trees is not None and trees.get_manager(device.index, create_if_none_exists=False) is not None
