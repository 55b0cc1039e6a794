"""The FP8 linear layer. Read linear.py first."""

from octavo.fp8.dense.gemms import backends_for
from octavo.fp8.dense.inputs import Input, Source, source_of
from octavo.fp8.dense.wire import CODING, Coding

__all__ = ["CODING", "Coding", "Input", "Source", "backends_for", "source_of"]
