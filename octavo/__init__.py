"""Octavo: FP8 training of vision-language and language models that proves itself.

``from octavo import fp8`` is the core and needs torch alone; the rest is behind ``octavo`` on the command line.
"""

__version__ = "0.3.0"
