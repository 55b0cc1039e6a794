"""`train.gc`: when Python looks for objects that refer to each other in circles."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

_Threshold = Annotated[int, Field(ge=1, le=10**9)]
_Thresholds = tuple[_Threshold, _Threshold, _Threshold]


def _from_text(value: Any) -> Any:
    """``700,10,1000`` and ``[700, 10, 1000]`` are thresholds."""
    if isinstance(value, str) and re.fullmatch(r"\s*\d{1,10}(\s*,\s*\d{1,10}){2}\s*", value):
        value = [int(part) for part in value.split(",")]
    return tuple(value) if isinstance(value, list) else value


Gc = Annotated[
    Literal["freeze"] | _Threshold | _Thresholds | None,
    BeforeValidator(_from_text, json_schema_input_type=Literal["freeze"] | _Threshold | _Thresholds | str | None),
]
