"""The order of the packages and of what is in them, and how large they may be: the tables of project_rules.py."""

from __future__ import annotations

# Who may import whom, package by package, the highest level first: a module imports from lower levels of its package
# only, never upward or sideways. A package's own __init__ is above all in it. A name is that of a subpackage, or of a
# file next to them; "*" are all such files without a level of their own, which may import each other, in no circle.
LEVELS: dict[str, list[set[str]]] = {
    "octavo": [
        {"cli"},
        {"bisect", "translate"},
        {"report", "doctor", "bench"},
        {"rl"},
        {"train"},
        {"generation", "sealing"},
        {"parallel", "checkpoint", "adapters"},
        {"models", "data"},
        {"fp8"},
        {"config", "environment", "atomic", "arithmetic", "sealed"},
        {"hub", "switches", "targets"},
        {"accelerator"},
        {"reading"},
        {"vault"},
    ],
    "octavo.fp8": [
        {"proof", "adapting"},
        {"planning"},
        {"measuring"},
        {"policy"},
        {"moe"},
        {"blocks", "memory", "optim"},
        {"dense"},
        {"weights"},
        {"kernels", "observe"},
        {"invariance"},
        {"arithmetic"},
    ],
    "octavo.base": [{"*"}, {"encryption"}],
    "octavo.config": [{"*"}, {"rules"}, {"sections"}, {"yaml"}],
    "octavo.data": [
        {"loaders"},
        {"tasks"},
        {"batching"},
        {"storage"},
        {"formats"},
        {"encoding"},
        {"rows", "builtin"},
        {"*"},
    ],
    "octavo.models": [
        {"forward"},
        {"processors", "tiny", "weights"},
        {"structure"},
        {"custom"},
        {"attention", "folder"},
        {"*"},
    ],
    "octavo.checkpoint": [{"live"}, {"export", "convert", "verify"}, {"model", "run_state"}, {"*"}],
    "octavo.train": [
        {"loop", "artifacts"},
        {"callbacks"},
        {"estimate"},
        {"setup"},
        {"run_dir"},
        {"step"},
        {"forward"},
        {"*"},
    ],
    "octavo.rl": [{"*"}, {"phases"}, {"rollout"}, {"objectives", "rewards"}],
    "octavo.report": [{"trial"}, {"run"}, {"evidence", "*"}],
    "octavo.importers": [{"*"}, {"frameworks"}, {"common"}, {"source"}, {"shell"}, {"errors"}],
}
# Packages of LEVELS whose files are not sorted into subpackages yet; no other may come here.
FLAT = {f"octavo.{name}" for name in ("config", "data", "models", "checkpoint", "train", "rl", "report")}
# How many files a package has at most, its __init__ counted, and how many lines an __init__; cli has a file a command.
FILES, FP8_FILES, INIT_LINES = 14, 12, 40
UNCOUNTED = {"octavo.cli", "octavo.fp8.kernels.triton_kernels"}
UNMEASURED = {"octavo.fp8"}  # the list of its public names
# Those that have more today, and how many. A figure only falls; one that is kept is taken out.
MORE_FILES = {
    "octavo.bench": 15,
    "octavo.checkpoint": 19,
    "octavo.config": 27,
    "octavo.data": 59,
    "octavo.generation": 15,
    "octavo.models": 57,
    "octavo.report": 29,
    "octavo.rl": 30,
    "octavo.sealing": 17,
    "octavo.train": 50,
    "octavo.importers": 37,
}
MORE_LINES = {
    "octavo": 75,
    "octavo.adapters": 43,
    "octavo.bench": 80,
    "octavo.checkpoint.convert": 272,
    "octavo.checkpoint.export": 452,
    "octavo.checkpoint.verify": 251,
    "octavo.config": 42,
    "octavo.data": 390,
    "octavo.models": 111,
    "octavo.base.encryption": 82,
}
