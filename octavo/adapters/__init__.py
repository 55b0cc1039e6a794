"""Low-rank adapters for a frozen base, in FP8 or high precision: attached by PEFT, stored in PEFT's files.

peft is imported only when an adapter is attached or read.
"""

from octavo.adapters.attach import attach, attach_second, check
from octavo.adapters.base_error import BaseErrors, base_errors
from octavo.adapters.errors import AdapterError
from octavo.adapters.files import adapter_state, load, load_adapter_state, save
from octavo.adapters.inject import (
    DTYPES,
    adapted_layers,
    adapter_parameters,
    disable_adapters,
    is_adapter_parameter,
    is_second_parameter,
    use_second_adapter,
)
from octavo.adapters.merge import merged_weights

__all__ = [
    "DTYPES",
    "AdapterError",
    "BaseErrors",
    "adapter_parameters",
    "adapter_state",
    "attach",
    "attach_second",
    "adapted_layers",
    "check",
    "disable_adapters",
    "base_errors",
    "is_adapter_parameter",
    "is_second_parameter",
    "load",
    "load_adapter_state",
    "merged_weights",
    "save",
    "use_second_adapter",
]
