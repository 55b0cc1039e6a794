"""The section ``lora``: low-rank adapters on a frozen base."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from octavo.config.sections.names import FROM_LIST, Section
from octavo.config.sections.text_types import FilePath, Letters


class LoraSection(Section):
    """Low-rank adapters on a frozen base (Hu et al. 2021), by PEFT: y = base(x) + alpha / rank * B(A(x))."""

    rank: int = Field(default=16, ge=1, le=65536, description="Inner dimension of the adapters.")
    alpha: float = Field(
        default=32.0, gt=0, le=1e6, description="Adapters are scaled by alpha / rank (rsLoRA: / sqrt(rank))."
    )
    dropout: float = Field(default=0.0, ge=0, lt=1, description="Share of the inputs of A that training zeroes.")
    rslora: bool = Field(default=False, description="Scale by alpha / sqrt(rank) (Kalajdzievski 2023).")
    dora: bool = Field(
        default=False,
        description="Also train the magnitudes of the weight's rows (DoRA, Liu et al. 2024); not for experts.",
    )
    targets: Annotated[tuple[Letters, ...], FROM_LIST] = Field(
        default=("foundation",),
        min_length=1,
        description="Layers with adapters: foundation, image_encoder, image_projector, audio_encoder, audio_projector "
        '(all their linear layers and experts), or globs over module names ("**.q_proj"). Each must match something.',
    )
    exclude: Annotated[tuple[Letters, ...], FROM_LIST] = Field(
        default=(), description="Components or globs over module names without adapters, although targets match them."
    )
    dtype: Literal["fp32", "bf16"] = Field(
        default="fp32", description="Dtype of A and B; optimizer.master decides how BF16 ones are updated."
    )
    adapter: FilePath | None = Field(
        default=None,
        min_length=1,
        description="Folder of a PEFT adapter to continue from, relative to the configuration file; its rank, alpha "
        "and targets must equal those of this section.",
    )
