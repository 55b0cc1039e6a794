"""Composing headers of safetensors files. Reading is tested in tests/checkpoint/test_convert.py."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import save

from octavo.models.folder import headers


@pytest.mark.parametrize("name", ["n" * length for length in range(1, 9)] + ["\u00e9"])
def test_a_header_is_that_of_safetensors(name: str) -> None:
    """Equal bytes, padded so that tensors begin at multiples of 8."""
    written = save({name: torch.zeros(3), "norm": torch.zeros(2, 5).bfloat16()}, {"format": "pt"})
    head = headers.compose("model.safetensors", [(name, "F32", (3,)), ("norm", "BF16", (2, 5))]).head
    assert written.startswith(head) and len(head) % 8 == 0 and len(written) == len(head) + 12 + 20
