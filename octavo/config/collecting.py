"""`train.gc`: when Python looks for objects that refer to each other in circles."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field
from pydantic_core import PydanticCustomError

_Threshold = Annotated[int, Field(ge=1, le=10**9)]
_Thresholds = tuple[_Threshold, _Threshold, _Threshold]


def _from_text(value: Any) -> Any:
    """``700,10,1000`` and ``[700, 10, 1000]`` are thresholds."""
    if isinstance(value, str) and re.fullmatch(r"\s*\d{1,10}(\s*,\s*\d{1,10})+\s*", value):
        value = [int(part) for part in value.split(",")]
    if isinstance(value, list) and not (len(value) == 3 and all(type(n) is int and 0 < n <= 10**9 for n in value)):
        why = "expected three thresholds from 1 on (700,10,1000), freeze or a number of steps, found {found}"
        raise PydanticCustomError("no_thresholds", why, {"found": f"{value!r:.80}"})
    return tuple(value) if isinstance(value, list) else value


Gc = Annotated[
    Literal["freeze"] | _Threshold | _Thresholds | None,
    BeforeValidator(_from_text, json_schema_input_type=Literal["freeze"] | _Threshold | _Thresholds | str | None),
]
