"""The order of the packages and of what is in them, and how large they may be: the tables of project_rules.py."""

from __future__ import annotations

# Who may import whom, package by package, the highest level first: a module imports from lower levels of its package
# only, never upward or sideways. A package's own __init__ is above all in it. A name is that of a subpackage, or of a
# file next to them; "*" are all such files without a level of their own, which may import each other, in no circle.
LEVELS: dict[str, list[set[str]]] = {
    "octavo": [
        {"training"},
        {"cli"},
        {"bisect", "importers"},
        {"report", "doctor", "bench"},
        {"rl"},
        {"train"},
        {"generation", "sealing", "loading"},
        {"parallel", "checkpoint", "adapters"},
        {"models", "data"},
        {"fp8"},
        {"config", "arithmetic"},
        {"base"},
        {"version"},
    ],
    "octavo.fp8": [
        {"old_names"},
        {"proof", "adapting"},
        {"planning"},
        {"measuring"},
        {"policy"},
        {"moe"},
        {"blocks", "memory", "optim"},
        {"delayed"},
        {"dense"},
        {"weights"},
        {"self_check"},
        {"kernels", "observe"},
        {"invariance", "metrics"},
        {"arithmetic"},
    ],
    "octavo.base": [{"*"}, {"encryption"}],
    "octavo.config": [{"*"}, {"rules"}, {"sections"}, {"yaml"}],
    "octavo.data": [
        {"loaders"},
        {"builtin"},
        {"tasks"},
        {"batching"},
        {"encoding"},
        {"rows"},
        {"storage"},
        {"formats"},
        {"*"},
    ],
    "octavo.models": [
        {"forward", "tiny", "compose"},
        {"weights", "processors"},
        {"structure"},
        {"custom"},
        {"attention"},
        {"folder"},
        {"*"},
    ],
    "octavo.checkpoint": [{"trainer"}, {"hf_folder", "convert"}, {"run_state", "export", "verify"}, {"*"}],
    "octavo.checkpoint.verify": [{"verify"}, {"loaders"}, {"servers"}, {"*"}],
    "octavo.train": [
        {"loop"},
        {"callbacks"},
        {"artifacts"},
        {"estimate"},
        {"setup"},
        {"step"},
        {"forward"},
        {"run_dir"},
        {"*"},
    ],
    "octavo.train.estimate": [{"step_time"}, {"memory"}],
    "octavo.generation": [{"engines"}, {"*"}],
    "octavo.rl": [{"*"}, {"phases"}, {"fleet"}, {"rollout"}, {"objectives", "rewards"}],
    "octavo.report": [{"demo"}, {"trial"}, {"run"}, {"evidence", "*"}],
    "octavo.importers": [{"*"}, {"frameworks"}, {"common"}, {"source"}, {"shell"}, {"errors"}],
}
# How many files a package has at most, its __init__ counted, and how many lines an __init__; cli has a file a command.
FILES, FP8_FILES, INIT_LINES = 14, 12, 40
UNCOUNTED = {"octavo.cli", "octavo.fp8.kernels.triton_kernels"}
UNMEASURED = {"octavo.fp8"}  # the list of its public names
