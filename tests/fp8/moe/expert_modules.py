"""Modules of experts of several families, small; and tokens routed to them."""

import torch
from torch import nn
from transformers import GptOssConfig, MixtralConfig, Qwen3MoeConfig
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts
from transformers.models.mixtral.modeling_mixtral import MixtralExperts
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts
from transformers.models.qwen3_vl_moe.configuration_qwen3_vl_moe import Qwen3VLMoeTextConfig
from transformers.models.qwen3_vl_moe.modeling_qwen3_vl_moe import Qwen3VLMoeTextExperts

E, H, I = 6, 32, 24  # noqa: E741
SMALL = {"hidden_size": H, "num_experts": E, "num_experts_per_tok": 2}


def made(cls, config):
    torch.manual_seed(0)
    config._experts_implementation = "eager"
    module = cls(config)
    for p in module.parameters():
        nn.init.normal_(p, std=0.3)
    return module


FAMILIES = {
    "qwen3_moe": lambda n=E: made(
        Qwen3MoeExperts, Qwen3MoeConfig(moe_intermediate_size=I, **SMALL | {"num_experts": n})
    ),
    "qwen3_vl_moe": lambda n=E: made(
        Qwen3VLMoeTextExperts, Qwen3VLMoeTextConfig(moe_intermediate_size=I, **SMALL | {"num_experts": n})
    ),
    "mixtral": lambda n=E: made(
        MixtralExperts, MixtralConfig(hidden_size=H, intermediate_size=I, num_local_experts=n, num_experts_per_tok=2)
    ),
    # transposed, with biases, an interleaved gate of its own
    "gpt_oss": lambda n=E: made(
        GptOssExperts, GptOssConfig(hidden_size=H, intermediate_size=I, num_local_experts=n, num_experts_per_tok=2)
    ),
}


def routed(tokens=10, top_k=2, dtype=torch.float32, used=E):
    g = torch.Generator().manual_seed(1)
    x = torch.randn(tokens, H, generator=g, dtype=dtype)
    index = torch.rand(tokens, used, generator=g).argsort(1)[:, :top_k]
    return x.requires_grad_(), index, torch.rand(tokens, top_k, generator=g, dtype=dtype).requires_grad_()
