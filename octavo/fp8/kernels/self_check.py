"""Check kernels against the reference if torch or Triton is newer than the tested versions.

:data:`TESTED` lists the tested versions. If a newer version is installed, the kernels of a plan or an optimizer run on
small matrices on their device before they are used: casts must match bit for bit, products within rounding. The result
depends only on what the kernels compute, not on version numbers. If a kernel differs or does not run, the start fails
with a :class:`SelfCheckError` that has the kernel, the coordinate, both values and the fix.

Each kernel is checked once per device, driver, torch, Triton and digest of the kernel sources. ``self_check.json`` in
the cache folder (``OCTAVO_CACHE``, by default ``octavo`` in the user's cache folder) records the checks that passed. No
further check begins after :data:`LIMIT_S`; the remaining checks run first at the next start. Checks never run during a
capture or a compilation, and only on the first rank of a node.

Sizes are not multiples of any tile, and the magnitudes of rows and columns differ, so that misplaced scales are
detected.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import json
import os
import re
import time
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from octavo.base import accelerator, atomic_write
from octavo.fp8.arithmetic.adamw import Hyper, Piece
from octavo.fp8.arithmetic.cast import CastSpec, Quantized, quantize
from octavo.fp8.arithmetic.moments import GROUP, LAYOUT
from octavo.fp8.arithmetic.recipe import Recipe
from octavo.fp8.kernels.capture import is_capturing
from octavo.fp8.kernels.groups import Groups, group_rows
from octavo.fp8.kernels.layout import CONTRACTED
from octavo.fp8.kernels.registry import Backend, BackendError, get

TESTED: dict[str, tuple[int, int]] = {"torch": (2, 13), "triton": (3, 7)}
"""The newest versions, major and minor, that the project's tests completed with."""
LIMIT_S = 5.0
BOUND = 2.0**-7  # times the sum of |a| |b|: the largest error of sums with 14 bits, rounded to bf16
DELAYED_SCALE = 2.0**-4  # the scale of casts with a given scale
FILE, _FORMAT = "self_check.json", 1


class SelfCheckError(BackendError):
    """With an untested version, the results of a kernel differ from the reference."""


class Mismatch(NamedTuple):
    """The largest difference between a kernel and the reference: the compared tensor, the coordinate, both values and
    the allowed difference, which is 0 if the bits must be equal."""

    what: str
    at: tuple[int, ...]
    value: float
    expected: float
    allowed: float

    def __str__(self) -> str:
        near = "the same bits" if not self.allowed else f"within {self.allowed:.3g}"
        return f"{self.what} at {list(self.at)} is {self.value:.6g}, the reference has {self.expected:.6g} ({near})"


Check = Callable[[], "Mismatch | None"]


# --- untested versions, and the record of checks ----------------------------------------------------------------------


@lru_cache(maxsize=1)
def installed_versions() -> dict[str, str]:
    """Return the installed versions of the packages in :data:`TESTED`."""
    versions = {"torch": str(torch.__version__)}
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):  # without the package, no Triton kernel can run
        versions["triton"] = importlib.metadata.version("triton")
    return versions


def find_untested() -> tuple[str, ...]:
    """Return packages that are newer than tested, such as ``torch 2.15.0 (tested up to 2.13)``."""
    untested = []
    for package, version in installed_versions().items():
        numbers = re.match(r"(\d+)\.(\d+)", version)
        tested = TESTED[package]
        if numbers is None or (int(numbers[1]), int(numbers[2])) > tested:
            untested.append(f"{package} {version} (tested up to {tested[0]}.{tested[1]})")
    return tuple(untested)


@dataclass(frozen=True)
class Machine:
    """The environment that a check is valid for."""

    device: str
    driver: str
    versions: str
    kernels: str

    @classmethod
    def here(cls, device: torch.device) -> Machine:
        properties = accelerator.properties(device) if accelerator.has_own_memory(device) else {"name": device.type}
        name = " ".join(str(properties[key]) for key in ("name", "capability") if properties.get(key))
        driver = Path("/proc/driver/nvidia/version")
        driver_text = driver.read_text(errors="replace").splitlines()[0] if driver.exists() else ""
        versions = ", ".join(f"{package} {version}" for package, version in installed_versions().items())
        return cls(name, driver_text, versions, _digest())


@lru_cache(maxsize=1)
def _digest() -> str:
    """Return a digest of the sources that define what kernels compute."""
    digest, folder = hashlib.sha256(), Path(__file__).parents[1]
    for package in ("arithmetic", "dense", "kernels"):
        for file in sorted((folder / package).rglob("*.py")):
            digest.update(str(file.relative_to(folder)).encode() + b"\0" + file.read_bytes())
    return digest.hexdigest()[:16]


def record_file() -> Path:
    """Return the path of the file that records which checks passed."""
    if folder := os.environ.get("OCTAVO_CACHE"):
        return Path(folder) / FILE
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "octavo" / FILE


def load_passed(machine: Machine) -> set[str]:
    """Return the names of the checks that passed on this machine."""
    return {name for entry in _entries() if entry.get("machine") == vars(machine) for name in entry.get("passed", ())}


def _entries() -> list[dict[str, Any]]:
    """Return the entries of the record; none if it is unreadable: then all checks run again and replace it."""
    try:
        record = json.loads(record_file().read_text(encoding="utf-8"))
        entries = record["machines"] if record["octavo_self_check"] == _FORMAT else []
        return [entry for entry in entries if isinstance(entry, dict) and isinstance(entry.get("passed"), list)]
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return []


def _record(machine: Machine, names: Iterable[str]) -> None:
    """Add checks that passed to the file, which is read again first because another process may have written to it."""
    entries = [entry for entry in _entries() if entry.get("machine") != vars(machine)]
    entry = {"machine": vars(machine), "passed": sorted(load_passed(machine) | set(names))}
    text = json.dumps({"octavo_self_check": _FORMAT, "machines": [*entries, entry]}, indent=1)
    try:
        record_file().parent.mkdir(parents=True, exist_ok=True)
        atomic_write.write_text(record_file(), text + "\n", shared=True)
    except OSError as error:
        warnings.warn(
            f"the result of the kernel self-check cannot be saved ({error}); it will run at each start", stacklevel=3
        )


_passed_here: set[tuple[torch.device, str]] = set()  # the checks that passed in this process


def run_checks(
    checks: dict[str, Check], device: torch.device, limit: float = LIMIT_S, clock: Callable[[], float] = time.monotonic
) -> tuple[str, ...]:
    """Run the checks that have not passed on this machine yet, if a version newer than tested is installed.

    Args:
        checks: by name; each returns a :class:`Mismatch` or None.
        device: the device of the checks.
        limit: no further check begins after this many seconds.
        clock: the time in seconds.

    Returns the names of the checks that completed. Raises SelfCheckError if a check finds a mismatch or fails to run.
    """
    remaining = [name for name in checks if (device, name) not in _passed_here]
    if not remaining or not (untested := find_untested()) or not _may_run(device):
        return ()
    machine = Machine.here(device)
    already_passed, start = load_passed(machine), clock()
    completed: list[str] = []
    for name in remaining:
        if name not in already_passed:
            # At least one check runs at each start, so that slow checks are completed, too.
            if completed and clock() - start > limit:
                break
            _run_check(name, checks[name], untested)
            completed.append(name)
        _passed_here.add((device, name))
    if completed:
        _record(machine, completed)
    if unchecked := [name for name in remaining if (device, name) not in _passed_here]:
        warnings.warn(
            f"{' and '.join(untested)}: {len(unchecked)} of {len(checks)} kernels are not checked yet ({limit:g} s "
            f"are over; first {unchecked[0]}) and are used. `octavo doctor` checks all; the next start goes on.",
            stacklevel=3,
        )
    return tuple(completed)


def _may_run(device: torch.device) -> bool:
    """Return True on the first rank of a node, outside of captures and compilations, for a device of this machine."""
    if device.type == "meta" or os.environ.get("LOCAL_RANK", "0") != "0" or torch.compiler.is_compiling():
        return False
    if device.type != "cpu" and not accelerator.has_own_memory(accelerator.default_device()):
        return False
    return not is_capturing(device)


def _run_check(name: str, check: Check, untested: tuple[str, ...]) -> None:
    what = f"{' and '.join(untested)}: {name}"
    versions = ", ".join(f"{package} {'.'.join(map(str, tested))}" for package, tested in TESTED.items())
    fix = f"Use fp8.backend: reference (backend='reference' in a Policy), or a version that was tested: {versions}."
    try:
        # The caller may be in a fake or inference mode, but the check needs the real device.
        with _disable_current_modes(), torch.inference_mode(False), torch.no_grad():
            mismatch = check()
    except Exception as error:  # an error of a compiler or a launch is a result to report
        lines = str(error).strip().splitlines() or [""]
        raise SelfCheckError(f"{what} does not run here ({type(error).__name__}: {lines[-1][:300]}). {fix}") from error
    if mismatch is not None:
        raise SelfCheckError(f"{what} computes wrong results: {mismatch}. {fix}")


# --- checks -----------------------------------------------------------------------------------------------------------


def kernel_checks(
    recipe: Recipe, gemm: str, backend: str, device: torch.device, grouped: bool = False
) -> dict[str, Check]:
    """Return the check of one GEMM of a recipe and its casts on a backend; empty for the reference."""
    if backend == "reference":
        return {}
    run, op = (_check_grouped, f"grouped_{gemm}") if grouped else (_check_gemm, gemm)
    return {f"{op} of {recipe.summary()} on {backend}": lambda: run(get(backend), recipe, gemm, device)}


def fused_checks(recipe: Recipe, op: str, backend: str, device: torch.device) -> dict[str, Check]:
    """Return the check of rmsnorm, swiglu or swiglu_backward with the casts of a recipe; empty for the reference."""
    if backend == "reference":
        return {}
    return {f"{op} of {recipe.summary()} on {backend}": lambda: _check_fused(get(backend), recipe, op, device)}


def adamw_checks(backend: str, device: torch.device) -> dict[str, Check]:
    """Return the check of the optimizer step with states in FP8 and in fp32; empty for the reference."""
    if backend == "reference":
        return {}
    return {f"adamw on {backend}": lambda: _check_adamw(get(backend), device)}


def sizes(
    device: torch.device, backend: Backend | None = None, op: str = "", recipe: Recipe | None = None
) -> tuple[int, int, int]:
    """Return (tokens, outputs, inputs) for a check, with partial tiles in every dimension if the backend supports them.

    The sizes are small on a CPU, where an interpreter may run the kernels. Raises ValueError if the backend supports
    none of them.
    """
    shapes = ((20, 24, 136),) if device.type == "cpu" else ((600, 320, 456), (512, 256, 384), (1024, 512, 1024))
    if backend is None or recipe is None:
        return shapes[0]
    reasons = {shape: backend.supports(op, recipe, device, shape) for shape in shapes}
    fitting = next((shape for shape, why_not in reasons.items() if why_not is None), None)
    if fitting is None:
        raise ValueError(f"no shape of the self-check is supported: {reasons[shapes[0]]}")
    return fitting


def _check_gemm(backend: Backend, recipe: Recipe, gemm: str, device: torch.device) -> Mismatch | None:
    casts, (a_dim, b_dim) = recipe.gemm(gemm), CONTRACTED[gemm]
    assert casts is not None
    tokens, outputs, inputs = sizes(device, backend, gemm, recipe)
    x, w, dy = random_matrix(1, tokens, inputs), random_matrix(2, outputs, inputs), random_matrix(3, tokens, outputs)
    a, b = {"fwd": (x, w), "dgrad": (dy, w), "wgrad": (dy, x)}[gemm]
    # Delayed scaling casts activations with a scale from earlier steps.
    is_delayed = recipe.delayed is not None
    operands, expected_operands = [], []
    for name, values, spec, dim, has_scale in (
        (f"cast of {'x' if gemm == 'fwd' else 'dy'}", a, casts.a, a_dim, is_delayed),
        (f"cast of {'x' if gemm == 'wgrad' else 'w'}", b, casts.b, b_dim, is_delayed and gemm == "wgrad"),
    ):
        scale = torch.full((1,), DELAYED_SCALE)
        if has_scale:
            actual = backend.quantize_with_scale(values.to(device), scale.to(device), spec, None, dim)
            expected = get("reference").quantize_with_scale(values, scale, spec)
        else:
            # dgrad reads the forward's codes of w if both have the same cast.
            shared = gemm == "dgrad" and values is w and _spec(recipe, "fwd", "b") == spec
            actual, expected = backend.quantize(values.to(device), spec, 1 if shared else dim), quantize(values, spec)
            actual = backend.reorder_scales(actual, dim) if shared else actual
        if (mismatch := compare_codes(name, actual, expected)) is not None:
            return mismatch
        operands.append(actual)
        expected_operands.append(expected)
    casts_twice = gemm == "wgrad" and not is_delayed
    if casts_twice and (mismatch := _check_double_cast(backend, recipe, x, dy, device)) is not None:
        return mismatch
    reference = getattr(get("reference"), f"gemm_{gemm}")
    multiply = getattr(backend, f"gemm_{gemm}")
    expected = reference(*expected_operands, torch.float32)
    magnitude = reference(*map(absolute_codes, expected_operands), torch.float32)
    actual = multiply(*operands, torch.bfloat16)
    if (mismatch := find_largest_error("result in bf16", actual, expected, magnitude * BOUND)) is not None:
        return mismatch
    if gemm != "fwd":
        return find_largest_error("result in fp32", multiply(*operands, torch.float32), expected, magnitude * BOUND)
    bias = random_matrix(4, outputs, 1).flatten()
    actual = multiply(*operands, torch.bfloat16, bias.to(device))
    allowed = (magnitude + bias.abs()) * BOUND
    if (mismatch := find_largest_error("result with a bias", actual, expected + bias, allowed)) is not None:
        return mismatch
    return _check_decode(backend, recipe, x[:3], operands[1], expected_operands[1], device)


def _check_decode(
    backend: Backend, recipe: Recipe, x: Tensor, w_q: Quantized, w_want: Quantized, device: torch.device
) -> Mismatch | None:
    """Check the product of a few rows, for which a backend may have a separate kernel."""
    spec, reference = _spec(recipe, "fwd", "a"), get("reference")
    assert spec is not None
    x_want = quantize(x, spec)
    actual = backend.gemm_decode(backend.quantize(x.to(device), spec, 1), w_q, torch.bfloat16)
    magnitude = reference.gemm_fwd(absolute_codes(x_want), absolute_codes(w_want), torch.float32)
    expected = reference.gemm_fwd(x_want, w_want, torch.float32)
    return find_largest_error("result of three rows", actual, expected, magnitude * BOUND)


def _check_double_cast(
    backend: Backend, recipe: Recipe, x: Tensor, dy: Tensor, device: torch.device
) -> Mismatch | None:
    """Check the casts of a tensor for two GEMMs in one call, as layers use them."""
    x_specs = _spec(recipe, "fwd", "a"), _spec(recipe, "wgrad", "b")
    dy_specs = _spec(recipe, "dgrad", "a"), _spec(recipe, "wgrad", "a")
    for name, values, (first, second) in (("x", x, x_specs), ("dy", dy, dy_specs)):
        if first is None or second is None:
            continue
        for spec, q in zip((first, second), backend.quantize_both(values.to(device), first, second), strict=True):
            if (mismatch := compare_codes(f"cast of {name} for two GEMMs", q, quantize(values, spec))) is not None:
                return mismatch
    return None


def _check_grouped(backend: Backend, recipe: Recipe, gemm: str, device: torch.device) -> Mismatch | None:
    casts, b_dim = recipe.gemm(gemm), CONTRACTED[gemm][1]
    assert casts is not None
    tokens, outputs, inputs = sizes(device, backend, f"grouped_{gemm}", recipe)
    experts = 3
    groups = group_rows(torch.arange(tokens) % (experts * 2) // 2, experts + 1).groups  # the last expert has no rows
    on_device = Groups(groups.sizes.to(device), groups.starts.to(device), groups.tiles.to(device), groups.rows)
    reference = get("reference")
    a = random_matrix(1, groups.rows, inputs if gemm == "fwd" else outputs)
    a_want = reference.quantize_rows(a, casts.a, groups)
    a_got = backend.quantize_rows(a.to(device), casts.a, on_device, CONTRACTED[gemm][0])
    if (mismatch := compare_codes("cast of rows", a_got, a_want)) is not None:
        return mismatch
    if gemm == "wgrad":
        b = random_matrix(2, groups.rows, inputs)
        b_want = reference.quantize_rows(b, casts.b, groups)
        b_got = backend.quantize_rows(b.to(device), casts.b, on_device, 0)
    else:
        b = random_matrix(2, (experts + 1) * outputs, inputs).view(experts + 1, outputs, inputs)
        b_want, b_got = reference.quantize_experts(b, casts.b), backend.quantize_experts(b.to(device), casts.b, b_dim)
    if (mismatch := compare_codes("cast of the other operand", b_got, b_want)) is not None:
        return mismatch
    multiply = getattr(reference, f"grouped_{gemm}")
    expected = multiply(a_want, b_want, groups, torch.float32)
    magnitude = multiply(absolute_codes(a_want), absolute_codes(b_want), groups, torch.float32)
    actual = getattr(backend, f"grouped_{gemm}")(a_got, b_got, on_device, torch.bfloat16)
    if gemm != "wgrad":  # padding rows have any finite values
        real = real_rows(groups)
        actual, expected, magnitude = actual.cpu()[real], expected[real], magnitude[real]
    return find_largest_error("result", actual, expected, magnitude * BOUND)


def real_rows(groups: Groups) -> Tensor:
    """Return the indices of the rows without padding."""
    ranges = zip(groups.starts.tolist(), groups.sizes.tolist(), strict=False)
    return torch.cat([torch.arange(start, start + size) for start, size in ranges])


def _check_fused(backend: Backend, recipe: Recipe, op: str, device: torch.device) -> Mismatch | None:
    row, col = _spec(recipe, "fwd", "a"), _spec(recipe, "wgrad", "b")
    tokens, _, inputs = sizes(device)
    first, second, third = (random_matrix(seed, tokens, inputs).bfloat16() for seed in (1, 2, 3))
    reference = get("reference")
    if op == "swiglu_backward":
        gates = backend.swiglu_backward_quantize(first.to(device), second.to(device), third.to(device), row, col)
        gates_want = reference.swiglu_backward_quantize(first, second, third, row, col)
        names = ("dgate", "dgate turned", "dup", "dup turned")
        for name, actual, expected in zip(names, gates, gates_want, strict=True):
            if actual is None or expected is None:
                continue
            exact = reference.dequantize(expected)
            # Codes may differ by one step if the two implementations round a value differently.
            allowed = exact.abs() / 7 + exact.abs().amax() * 2.0**-14
            if (mismatch := find_largest_error(name, backend.dequantize(actual), exact, allowed)) is not None:
                return mismatch
        return None
    if op == "rmsnorm":
        weight = second[0]
        y, _, *codes = backend.rmsnorm_quantize(first.to(device), weight.to(device), 1e-6, row, col)
        values = reference.rmsnorm_quantize(first, weight, 1e-6, None, None)[0].float()
    else:
        y, *codes = backend.swiglu_quantize(first.to(device), second.to(device), row, col)
        values = reference.swiglu_quantize(first, second, None, None)[0].float()
    if (mismatch := find_largest_error("result", y, values, values.abs() * BOUND)) is not None:
        return mismatch
    for name, q in zip(("cast", "cast turned"), codes, strict=True):
        mismatch = None if q is None else compare_codes(f"{name} of the result", q, quantize(y.cpu(), q.spec))
        if mismatch is not None:
            return mismatch
    return None


def _spec(recipe: Recipe, gemm: str, operand: str) -> CastSpec | None:
    casts = recipe.gemm(gemm)
    return None if casts is None else casts.a if operand == "a" else casts.b


def _check_adamw(backend: Backend, device: torch.device) -> Mismatch | None:
    count = 2 * GROUP + 50
    for states in ("fp8", "fp32"):
        empty = {k.name: torch.zeros((count,) if k.row is None else (3, *k.row), dtype=k.dtype) for k in LAYOUT[states]}
        piece = Piece(random_matrix(1, count, 1).flatten(), random_matrix(2, count, 1).flatten() * 1e-3, empty, 0, 0, 1)
        device_piece = piece._replace(
            weight=piece.weight.to(device, copy=True), grad=piece.grad.to(device),
            state={name: t.to(device, copy=True) for name, t in empty.items()},
        )  # fmt: skip
        hyper = Hyper(1e-3, weight_decay=0.1, states=states)
        backend.adamw([device_piece], hyper, None, None)
        get("reference").adamw([piece], hyper, None, None)
        for name, actual, expected in (
            ("weight", device_piece.weight, piece.weight),
            *((name, device_piece.state[name], value) for name, value in piece.state.items()),
        ):
            if (mismatch := _compare_bits(f"{name} with states in {states}", actual, expected)) is not None:
                return mismatch
    return None


# --- comparison -------------------------------------------------------------------------------------------------------


def random_matrix(seed: int, rows: int, cols: int) -> Tensor:
    """Return random fp32 values [rows, cols] on the CPU whose magnitudes differ by row and column."""
    g = torch.Generator().manual_seed(seed)
    down, across = (torch.randint(-4, 5, shape, generator=g, device="cpu").float() for shape in ((rows, 1), (1, cols)))
    return torch.randn(rows, cols, generator=g, device="cpu") * torch.exp2(down + across)


def absolute_codes(q: Quantized) -> Quantized:
    """Return the absolute values of q."""
    return q._replace(data=q.data.float().abs().to(q.data.dtype))


def compare_codes(what: str, actual: Quantized, expected: Quantized) -> Mismatch | None:
    """Return the first code, or else the first scale, that differs from the reference; None if all are equal."""
    mismatch = _compare_bits(what, actual.data, expected.data)
    return mismatch or _compare_bits(f"scale in the {what}", actual.scale, expected.scale)


def _compare_bits(what: str, actual: Tensor, expected: Tensor) -> Mismatch | None:
    actual = actual.cpu()
    if actual.shape != expected.shape or actual.dtype is not expected.dtype:
        raise TypeError(
            f"{what} has {list(actual.shape)} of {actual.dtype}, the reference {list(expected.shape)} of "
            f"{expected.dtype}"
        )
    copies = (torch.empty(t.shape, dtype=t.dtype, device="cpu").copy_(t) for t in (actual, expected))
    actual_bytes, expected_bytes = (t.view(torch.uint8).view(*t.shape, -1) for t in copies)
    differences = (actual_bytes != expected_bytes).any(-1).nonzero()
    if not len(differences):
        return None
    at = tuple(differences[0].tolist())
    return Mismatch(what, at, float(actual[at].float()), float(expected[at].float()), 0.0)


def find_largest_error(what: str, actual: Tensor, expected: Tensor, allowed: Tensor) -> Mismatch | None:
    """Return the element with the largest error relative to ``allowed``; None if no error exceeds it."""
    if tuple(actual.shape) != tuple(expected.shape):
        raise TypeError(f"{what} has shape {list(actual.shape)}, the reference {list(expected.shape)}")
    actual = actual.cpu().float()
    ratio = relative_error(actual, expected, allowed)
    if not ratio.numel() or ratio.max() <= 1:
        return None
    at = tuple(int(i) for i in torch.unravel_index(ratio.argmax(), ratio.shape))
    return Mismatch(what, at, float(actual[at]), float(expected[at]), float(allowed[at]))


def relative_error(actual: Tensor, expected: Tensor, allowed: Tensor) -> Tensor:
    """Return the difference divided by the allowed difference for each element; infinite for NaN."""
    ratio = (actual.cpu().float() - expected).abs() / allowed.clamp(min=torch.finfo(torch.float32).tiny)
    return ratio.nan_to_num(float("inf"))
