"""Octavo: FP8 training of vision-language and language models, verified by measurement.

``from octavo import fp8`` is the core and needs only torch. ``octavo.load`` loads a Hugging Face model, optionally with
its linear layers in FP8 and a PEFT adapter; ``octavo.run`` trains on a configuration and rows of a program. Everything
else is in the ``octavo`` command.
"""

from octavo.loading import load
from octavo.training import run
from octavo.version import __version__

__all__ = ["__version__", "load", "run"]
