"""Compares the class in `architectures`, which servers build, with `model_type`, by which transformers builds a model.

Families: a class of transformers belongs to the package that defines it (`transformers.models.llama`), and to every
model_type for which one of transformers' mappings names it. A class that transformers does not have, as of a published
folder with its own code or of a server's registry, is not compared.

vLLM 0.32 (`ModelRegistry.resolve_model_cls`) builds its class of the name, with the fields of config.json whatever the
model_type. SGLang's registry does the same. What the four dense classes have that the others do not:

    Qwen2ForCausalLM  a bias at q, k and v; the other three build biases only for `attention_bias` and the like, and
                      leave out the biases of a file
    Qwen3ForCausalLM  q_norm and k_norm, of which the other three have no parameters
    Llama, Mistral    the same computation: Mistral's class is a subclass of Llama's
"""

from __future__ import annotations

import transformers
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.models.auto import modeling_auto

from octavo.checkpoint.verify.findings import GARBAGE, REFUSES, UNKNOWN
from octavo.checkpoint.verify.servers.contents import LOADED_CLASSES, Contents
from octavo.models.custom.register import is_custom

_SAME_COMPUTATION = ("LlamaForCausalLM", "MistralForCausalLM")
_WITH_NORMS = "Qwen3ForCausalLM"


def find_other_class(contents: Contents) -> str | None:
    """Return the class that servers build if it belongs to another family than `model_type`, or None."""
    named = contents.raw.get("architectures")
    name, config = named[0] if isinstance(named, list) and named else None, type(contents.stock.model.config)
    if not isinstance(name, str) or is_custom(config.model_type):
        return None
    if {name, type(contents.stock.model).__name__} <= set(_SAME_COMPUTATION):
        return None
    return None if _is_of_family(name, config) else name


def judge_other_class(contents: Contents, server: str, name: str, quantized: bool) -> str:
    """Return the verdict of a server about a dense model under the name of a class of another family."""
    pair = {name, type(contents.stock.model).__name__}
    if not contents.dense_text or not pair <= set(LOADED_CLASSES):
        return UNKNOWN
    norms_on_disk = any(tensor.endswith(".q_norm.weight") for tensor in contents.tensors)
    if server != "vLLM" or norms_on_disk == (name == _WITH_NORMS):
        return GARBAGE
    # Norms without a parameter are refused. Parameters without a tensor are refused only without a quantization.
    return GARBAGE if quantized and not norms_on_disk else REFUSES


def _is_of_family(name: str, config: type[PreTrainedConfig]) -> bool:
    """Whether a class is one of a configuration's family, or is unknown to transformers."""
    mappings = [mapping for key, mapping in vars(modeling_auto).items() if key.endswith("_MAPPING_NAMES")]
    classes = [mapping.get(config.model_type) for mapping in mappings]
    if any(name == one or isinstance(one, (tuple, list)) and name in one for one in classes):
        return True
    model_class = getattr(transformers, name, None)
    if not isinstance(model_class, type) or not issubclass(model_class, PreTrainedModel):
        return True
    return model_class.__module__.rpartition(".")[0] == config.__module__.rpartition(".")[0]
