"""What ``octavo.fp8`` promises: few names, one base of its errors, and old names that work with a warning."""

from __future__ import annotations

import re
import subprocess
import sys
import warnings
from pathlib import Path

import pytest

from octavo import fp8
from octavo.fp8.old_names import OLD_NAMES
from octavo.fp8.optim import PartialUpdate

ROOT = Path(__file__).resolve().parents[2]
MOST = 58
LIST_OF_0_4_0 = """
AdamW BackendError Cache CastError CastSpec ChunkedHead ComponentPolicy Experts FROZEN Fusion Gemm GemmCounts HIGH
Health InvarianceError Linear Machine MeasureError Measurements Plan PlanError PlanRow Policy Prediction Proof
ProofError Quantized RECIPES Recipe RecipeError Row Rule Schedule Selection SelfCheckError Span apply backends
calc_diff changed_weights chunked_head code_bytes codes_of_frozen compiled copy_state cosine count_gemms dequantize
fingerprint fp32_weight fp8_state_dict freeze_weight frozen frozen_bytes frozen_rows frozen_weights fuse
grouped_attention health high_precision invalidate invariant invariant_attention is_frozen is_whole linear
linear_cross_entropy load_fp8_state_dict load_plan load_scaling_state log_probs measure move_scaling not_finite
not_invariant offload_activations plan predict quantize quantize_with_scale recipe recompute reduce_scaling_state
reference_note saturation save_plan scale_from_amax scale_gradient_histories scaling_state schedule select set_low
shared_scales sqnr stale_codes stale_sentence synchronize_per_layer thaw to_torch token_log_probs topology turn
uncounted underflow unfuse weight_sums
"""
NAMES_OF_0_4_0 = set(LIST_OF_0_4_0.split())


def test_public_names_exist_and_are_few() -> None:
    assert len(set(fp8.__all__)) == len(fp8.__all__) <= MOST
    assert all(name in vars(fp8) for name in fp8.__all__)


def test_names_of_0_4_0_are_public_or_old() -> None:
    assert len(NAMES_OF_0_4_0) == 106
    assert not NAMES_OF_0_4_0 - set(fp8.__all__) - OLD_NAMES.keys()
    assert not OLD_NAMES.keys() & set(fp8.__all__), "an old name is a public one again"
    assert not OLD_NAMES.keys() - NAMES_OF_0_4_0, "a name that was never released needs no warning"


@pytest.mark.parametrize("name", OLD_NAMES)
def test_old_name_returns_new_object_and_warns_once(name: str) -> None:
    place, value = OLD_NAMES[name]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert getattr(fp8, name) is value
    (warning,) = caught
    assert warning.category is DeprecationWarning and warning.filename == __file__
    assert str(warning.message) == f"fp8.{name} is now {place}. The old name works through 0.6 and is removed in 0.7."
    at: object = sys.modules["octavo"]
    for part in place.split("."):
        at = getattr(at, part)
    assert at is value, f"the warning says {place}, which is something else"


def test_import_of_old_name_warns_once_at_its_line(tmp_path: Path) -> None:
    script = tmp_path / "user.py"
    script.write_text("import torch\n\nfrom octavo.fp8 import turn\n")
    done = subprocess.run([sys.executable, "-W", "always", script], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0 and done.stderr.count("fp8.turn is now fp8.switch_plan") == 1, done.stderr
    assert "user.py:3: DeprecationWarning" in done.stderr


def test_unknown_names_raise_attribute_error() -> None:
    with pytest.raises(AttributeError, match=r"module 'octavo.fp8' has no attribute 'long_gone'"):
        fp8.long_gone  # noqa: B018
    assert not hasattr(fp8, "__wrapped__")


def test_old_names_are_loaded_only_when_used() -> None:
    code = "import sys; from octavo import fp8; fp8.switch_plan; print('octavo.fp8.old_names' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True)
    assert done.stdout == "False\n"


def test_errors_have_one_base_and_keep_their_builtin_one() -> None:
    errors = [getattr(fp8, name) for name in fp8.__all__ if name.endswith("Error")] + [PartialUpdate]
    assert all(issubclass(error, fp8.Fp8Error) for error in errors)
    for error, builtin in {
        fp8.CastError: ValueError,
        fp8.RecipeError: ValueError,
        fp8.PlanError: ValueError,
        fp8.BackendError: RuntimeError,
        fp8.SelfCheckError: fp8.BackendError,
        fp8.MeasureError: RuntimeError,
        fp8.InvarianceError: RuntimeError,
        fp8.ProofError: RuntimeError,
        PartialUpdate: RuntimeError,
    }.items():
        assert issubclass(error, builtin)


def uses_of_old_names(text: str) -> list[str]:
    """Old names that a text uses as attributes of ``fp8`` or imports from ``octavo.fp8``."""
    used = re.findall(r"\bfp8\.(\w+)", text)
    for names in re.findall(r"from octavo\.fp8 import (\([^)]*\)|[^\n]*)", text):
        used += re.findall(r"\w+", re.sub(r" as \w+", "", names))
    return [name for name in used if name in OLD_NAMES]


def test_repository_uses_no_old_names() -> None:
    """In code, text and pages; not in the changelog and the diary, which tell of earlier versions."""
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True)
    if listed.returncode:
        pytest.skip("not a git checkout")
    history = (
        "CHANGELOG.md",
        "docs/lab",
        "tests/made_by_",
        "octavo/fp8/old_names.py",
        "tests/fp8/test_public_names.py",
    )
    uses = [
        f"{name}: {old}"
        for name in listed.stdout.split("\n")
        if name.endswith((".py", ".md", ".yaml", ".ipynb")) and not name.startswith(history)
        for old in uses_of_old_names((ROOT / name).read_text(encoding="utf-8"))
    ]
    assert not uses, "\n".join(uses)


@pytest.mark.parametrize(
    "text",
    ["fp8.turn(model, a, b)", "from octavo.fp8 import (\n    plan,\n    thaw,\n)", "from octavo.fp8 import sqnr as s"],
)
def test_use_of_old_name_is_detected(text: str) -> None:
    assert uses_of_old_names(text)
    assert not uses_of_old_names("from octavo.fp8.weights import frozen_weights; fp8.weights.frozen_bytes(model)")
