"""Runs ``octavo`` for ``python -m octavo``, and so for ``torchrun -m octavo train FILE``."""

import sys

from octavo.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
