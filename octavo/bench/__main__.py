"""``python -m octavo.bench report DIR``: same as `octavo bench report DIR`, without the command line's dependencies."""

import sys

from octavo import bench

if __name__ == "__main__":
    words = sys.argv[1:]
    sys.exit(bench.report(words[1:] if words[:1] == ["report"] else []))
