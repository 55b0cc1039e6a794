"""``python -m octavo`` is ``octavo``; so ``torchrun -m octavo train FILE`` works too."""

import sys

from octavo.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
