"""Low-rank adapters for a frozen base, in FP8 or high precision: attached by PEFT, stored in PEFT's files.

peft is imported only when an adapter is attached or read.
"""

from octavo.adapters.attach import attach, attach_second, check
from octavo.adapters.base_error import BaseErrors, base_errors
from octavo.adapters.errors import AdapterError
from octavo.adapters.files import adapter_state, load, load_adapter_state, save
from octavo.adapters.inject import (
    DTYPES,
    adapter_parameters,
    attached,
    disabled,
    is_adapter_parameter,
    is_second_parameter,
    second,
)
from octavo.adapters.merge import merged

__all__ = [
    "DTYPES",
    "AdapterError",
    "BaseErrors",
    "adapter_parameters",
    "adapter_state",
    "attach",
    "attach_second",
    "attached",
    "check",
    "disabled",
    "base_errors",
    "is_adapter_parameter",
    "is_second_parameter",
    "load",
    "load_adapter_state",
    "merged",
    "save",
    "second",
]
