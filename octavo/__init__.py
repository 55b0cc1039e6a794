"""Octavo: FP8 training of vision-language and language models that proves itself.

``from octavo import fp8`` is the core and needs torch alone. ``octavo.load`` gives a Hugging Face model, if asked with
its linear layers in FP8 and with a PEFT adapter; the rest is behind ``octavo`` on the command line.
"""

from octavo.loading import load

__version__ = "0.5.0.dev0"

__all__ = ["__version__", "load"]
