"""A decoder block in the style of transformers, for tests that need no complete model."""

import torch
from torch import nn


class Norm(nn.Module):
    def __init__(self, k, eps=1e-6):
        super().__init__()
        self.weight, self.variance_epsilon = nn.Parameter(torch.ones(k)), eps

    def forward(self, x):
        wide = x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)
        return self.weight * wide.to(x.dtype)


class Attention(nn.Module):
    def __init__(self, k, head):
        super().__init__()
        for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
            setattr(self, name, nn.Linear(k, k, bias=False))
        self.q_norm, self.k_norm, self.head = Norm(head), Norm(head), head

    def forward(self, x):
        q, k, v = (m(x).view(*x.shape[:-1], -1, self.head) for m in (self.q_proj, self.k_proj, self.v_proj))
        q, k, v = (t.transpose(1, 2) for t in (self.q_norm(q), self.k_norm(k), v))
        y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o_proj(y.transpose(1, 2).reshape(x.shape))


class Mlp(nn.Module):
    def __init__(self, k, n):
        super().__init__()
        self.gate_proj, self.up_proj = nn.Linear(k, n, bias=False), nn.Linear(k, n, bias=False)
        self.down_proj, self.act_fn = nn.Linear(n, k, bias=False), nn.SiLU()

    def forward(self, x):
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))


class Block(nn.Module):
    def __init__(self, k=512, n=1376, head=64):
        super().__init__()
        self.input_layernorm, self.self_attn = Norm(k), Attention(k, head)
        self.post_attention_layernorm, self.mlp = Norm(k), Mlp(k, n)

    def forward(self, x):
        x = x + self.self_attn(self.input_layernorm(x))
        return x + self.mlp(self.post_attention_layernorm(x))
