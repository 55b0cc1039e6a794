"""RICE-ViT: computes features in the language model's width from the patches of any number of images.

    patches [N, 3 * 14 * 14] -> patch embedding -> [N, C] -> a class token before each frame (segments.py)
    angles of 2-D rotary attention: [row * f, column * f] of a patch, f of D / 4 frequencies; learned for a class token
    norm -> blocks: x + attention(norm(x)), x + MLP(norm(x)) -> class tokens removed -> merger: 2 x 2 patches to a token

The class token and its angles are buffers: weights that are loaded and saved but never trained, as in the code that
trained the published models. They need no gradient, optimizer state or component, and are initialized to zero.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers import initialization as init
from transformers.activations import ACT2FN
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import BaseModelOutputWithPooling
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from octavo.models.custom.onevision.configuration import RiceConfig
from octavo.models.custom.onevision.segments import Segments, patch_positions

THETA = 10000.0


class RicePatchEmbed(nn.Module):
    """[N, channels * p * p] -> [N, C]: a convolution whose stride is its kernel."""

    def __init__(self, config: RiceConfig) -> None:
        super().__init__()
        p = config.patch_size
        self.shape = (config.in_channels, p, p)
        self.proj = nn.Conv2d(config.in_channels, config.hidden_size, p, p, bias=False)

    def forward(self, pixels: Tensor) -> Tensor:
        wanted = self.shape[0] * self.shape[1] * self.shape[2]
        if pixels.dim() != 2 or pixels.shape[1] != wanted:
            raise ValueError(
                f"pixel_values have shape {list(pixels.shape)}, but RICE-ViT takes [patches, {wanted}], patches of "
                "a single frame. Set temporal_patch_size to 1 in the image processor."
            )
        return self.proj(pixels.to(self.proj.weight.dtype).view(-1, *self.shape)).flatten(1)


class RiceRotaryEmbedding(nn.Module):
    """Places [N, 2] -> angles [N, D / 2], fp32: of the row, then of the column."""

    inv_freq: Tensor

    def __init__(self, config: RiceConfig) -> None:
        super().__init__()
        self.dim = config.hidden_size // config.num_heads // 2
        self.register_buffer("inv_freq", self.frequencies(), persistent=False)

    def frequencies(self) -> Tensor:
        return THETA ** -(torch.arange(0, self.dim, 2, dtype=torch.float32) / self.dim)

    def forward(self, at: Tensor) -> Tensor:
        return (at[:, :, None] * self.inv_freq.float()).flatten(1)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x [N, H, D] rotated by angles whose cos and sin are fp32 [N, 1, D]; features i and i + D / 2 form a pair."""
    one, other = x.float().chunk(2, -1)
    turned = x.float() * cos + torch.cat([-other, one], -1) * sin
    return turned.to(x.dtype)


def eager(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: None, scaling: float, **_: object
) -> tuple[Tensor, Tensor]:
    """softmax(q k^T * scaling) v of [1, H, T, D], as [1, T, H, D], and its weights."""
    weights = (query @ key.mT * scaling).softmax(-1, dtype=torch.float32).to(query.dtype)
    return (weights @ value).transpose(1, 2), weights


class RiceAttention(nn.Module):
    """Bidirectional attention within each segment, without a mask."""

    def __init__(self, config: RiceConfig) -> None:
        super().__init__()
        self.config, self.heads = config, config.num_heads
        self.is_causal, self.scaling = False, (config.hidden_size // config.num_heads) ** -0.5
        self.qkv = nn.Linear(config.hidden_size, 3 * config.hidden_size)
        self.proj = nn.Linear(config.hidden_size, config.hidden_size)

    def forward(self, x: Tensor, segments: Segments, rotary: tuple[Tensor, Tensor]) -> Tensor:
        q, k, v = self.qkv(x).view(len(x), 3, self.heads, -1).unbind(1)
        q, k = rotate(q, *rotary), rotate(k, *rotary)
        return self.proj(self._attend(q, k, v, segments).reshape(len(x), -1))

    @torch.compiler.disable  # otherwise the code would be recompiled for each new image size
    def _attend(self, q: Tensor, k: Tensor, v: Tensor, segments: Segments) -> Tensor:
        """Return [N, H, D] of q, k and v [N, H, D], segment by segment."""
        q, k, v = (part.transpose(0, 1)[None] for part in (q, k, v))
        name = self.config._attn_implementation
        attend = ALL_ATTENTION_FUNCTIONS.get_interface(name, eager)
        options = {"scaling": self.scaling, "dropout": 0.0, "is_causal": False}
        if "flash" in name:  # all segments in one call
            edges = {"cu_seq_lens": segments.edges, "max_length": segments.longest}
            ends = {f"{key}_{side}": value for key, value in edges.items() for side in "qk"}
            return attend(self, q, k, v, attention_mask=None, **options, **ends)[0][0]
        parts = zip(*(part.split(segments.rows, 2) for part in (q, k, v)), strict=True)
        return torch.cat([attend(self, *one, attention_mask=None, **options)[0] for one in parts], 1)[0]


class RiceMLP(nn.Module):
    def __init__(self, config: RiceConfig) -> None:
        super().__init__()
        self.fc1 = nn.Linear(config.hidden_size, config.intermediate_size)
        self.act = ACT2FN[config.hidden_act]
        self.fc2 = nn.Linear(config.intermediate_size, config.hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(self.act(self.fc1(x)))


class RiceBlock(GradientCheckpointingLayer):
    def __init__(self, config: RiceConfig) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(config.hidden_size, config.layer_norm_eps)
        self.norm2 = nn.LayerNorm(config.hidden_size, config.layer_norm_eps)
        self.attn = RiceAttention(config)
        self.mlp = RiceMLP(config)

    def forward(self, hidden_states: Tensor, segments: Segments, rotary: tuple[Tensor, Tensor]) -> Tensor:
        hidden_states = hidden_states + self.attn(self.norm1(hidden_states), segments, rotary)
        return hidden_states + self.mlp(self.norm2(hidden_states))


class RiceMerger(nn.Module):
    """[N, C] -> [N / merge^2, text width]: a norm of each patch, blocks of merge x merge joined, two linear layers."""

    def __init__(self, config: RiceConfig) -> None:
        super().__init__()
        self.width = config.hidden_size * config.spatial_merge_size**2
        self.ln_q = nn.LayerNorm(config.hidden_size, config.layer_norm_eps)
        self.mlp = nn.Sequential(
            nn.Linear(self.width, self.width), nn.GELU(), nn.Linear(self.width, config.text_hidden_size)
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.mlp(self.ln_q(x).view(-1, self.width))


class RicePreTrainedModel(PreTrainedModel):
    """Initializes the tower's buffers; all other modules are initialized as in transformers."""

    supports_gradient_checkpointing = True
    _supports_sdpa = True
    _supports_flash_attn = True
    _supports_attention_backend = True

    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        if isinstance(module, RiceRotaryEmbedding):
            init.copy_(module.inv_freq, module.frequencies())
        elif isinstance(module, RiceViT):
            init.zeros_(module.class_embedding)  # not random, because each rank initializes its own buffers
            init.zeros_(module.class_pos_emb)


class RiceViT(RicePreTrainedModel):
    """The vision tower with its projector (`merger`)."""

    config_class = RiceConfig
    config: RiceConfig
    main_input_name = "hidden_states"
    input_modalities = ["image", "video"]
    _no_split_modules = ["RiceBlock"]
    class_embedding: Tensor
    class_pos_emb: Tensor

    def __init__(self, config: RiceConfig) -> None:
        super().__init__(config)
        self.patch_embed = RicePatchEmbed(config)
        self.rotary_pos_emb = RiceRotaryEmbedding(config)
        self.register_buffer("class_embedding", torch.zeros(config.hidden_size))
        self.register_buffer("class_pos_emb", torch.zeros(1, self.rotary_pos_emb.dim))
        self.pre_layernorm = nn.LayerNorm(config.hidden_size, config.layer_norm_eps)
        self.blocks = nn.ModuleList([RiceBlock(config) for _ in range(config.depth)])
        self.merger = RiceMerger(config)
        self.gradient_checkpointing = False
        self.post_init()

    def forward(self, hidden_states: Tensor, grid_thw: Tensor, **_: object) -> BaseModelOutputWithPooling:
        """Return features of images and videos.

        hidden_states  [patches, channels * patch^2]: pixels of all images, concatenated, patches in blocks of 2 x 2
        grid_thw       int64 [images, 3]: frames, rows and columns of patches of each

        Returns `last_hidden_state` [patches, C], without class tokens, and `pooler_output` [patches / merge^2, width
        of the language model]. Raises ValueError if the grids have another number of patches.
        """
        grid, merge = grid_thw.tolist(), self.config.spatial_merge_size
        patches = sum(t * h * w for t, h, w in grid)
        if len(hidden_states) != patches or any(h % merge or w % merge for _, h, w in grid):
            raise ValueError(
                f"{len(hidden_states)} patches were passed with grids of {patches} (frames, rows, columns: "
                f"{grid[:4]}); rows and columns must be multiples of {merge}. Take both from one call of the image "
                "processor."
            )
        x = self.patch_embed(hidden_states)
        segments = Segments.from_grid(grid, x.device)
        x = self.pre_layernorm(segments.with_class(x, self.class_embedding.to(x.dtype)[None]))
        rotary = self._rotary(segments, patch_positions(grid, merge, x.device))
        for block in self.blocks:
            x = block(x, segments=segments, rotary=rotary)
        x = segments.without_class(x)
        return BaseModelOutputWithPooling(last_hidden_state=x, pooler_output=self.merger(x))

    def _rotary(self, segments: Segments, at: Tensor) -> tuple[Tensor, Tensor]:
        """Return cos and sin, fp32 [rows, 1, D], of the angles of all rows."""
        angles = segments.with_class(self.rotary_pos_emb(at), self.class_pos_emb.float())
        angles = angles.repeat(1, 2)[:, None]
        return angles.cos(), angles.sin()
