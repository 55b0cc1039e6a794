"""The checks of kernels against the reference: casts bit for bit, products within rounding.

:mod:`octavo.fp8.self_check.untested` runs them, with versions that were not tested. The magnitudes of rows and columns
differ, so that misplaced scales are detected. Products have sizes that are not multiples of any tile. Kernels that cast
have one form for matrices in whole tiles and another for all others, and each runs here: compilers have written wrong
codes in one form only (issue 11111 of Triton, in transposed stores of single bytes after ``max.NaN``).
"""

from __future__ import annotations

import torch
from torch import Tensor

from octavo.fp8.arithmetic.adamw import Hyper, Piece
from octavo.fp8.arithmetic.cast import CastSpec, Quantized, dequantize, quantize
from octavo.fp8.arithmetic.moments import GROUP, LAYOUT
from octavo.fp8.arithmetic.recipe import Recipe
from octavo.fp8.kernels.groups import Groups, group_rows
from octavo.fp8.kernels.layout import CONTRACTED
from octavo.fp8.kernels.registry import Backend, get
from octavo.fp8.self_check.untested import Check, Mismatch

BOUND = 2.0**-7  # times the sum of |a| |b|: the largest error of sums with 14 bits, rounded to bf16
DELAYED_SCALE = 2.0**-4  # the scale of casts with a given scale
WHOLE_TILES = (128, 256)  # rows and columns that all kernels take without masks


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
    shapes = ((tokens, inputs), (outputs, inputs), (tokens, outputs))
    x, w, dy = (random_matrix(seed, *shape).bfloat16() for seed, shape in enumerate(shapes, 1))
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
    """Check the casts of a tensor for two GEMMs in one call, as layers use them; in whole tiles also each cast."""
    x_specs = _spec(recipe, "fwd", "a"), _spec(recipe, "wgrad", "b")
    dy_specs = _spec(recipe, "dgrad", "a"), _spec(recipe, "wgrad", "a")
    whole = random_matrix(5, *WHOLE_TILES).bfloat16()
    for name, values, (first, second) in (("x", x, x_specs), ("dy", dy, dy_specs)):
        if first is None or second is None:
            continue
        pairs = [(values, q) for q in backend.quantize_both(values.to(device), first, second)]
        pairs += [(whole, q) for q in backend.quantize_both(whole.to(device), first, second)]
        pairs += [(whole, backend.quantize(whole.to(device), spec, dim)) for spec, dim in ((first, 1), (second, 0))]
        for matrix, q in pairs:
            tiles = " in whole tiles" if matrix is whole else ""
            expected = quantize(matrix, q.spec)
            if (mismatch := compare_codes(f"cast of {name} for two GEMMs{tiles}", q, expected)) is not None:
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
    tokens, _, inputs = sizes(device)
    for rows, cols in ((tokens, inputs), WHOLE_TILES):
        values = tuple(random_matrix(seed, rows, cols).bfloat16() for seed in (1, 2, 3))
        check = _check_swiglu_backward if op == "swiglu_backward" else _check_norm_or_swiglu
        if (mismatch := check(backend, recipe, op, values, device)) is not None:
            return mismatch
    return None


def _check_swiglu_backward(
    backend: Backend, recipe: Recipe, op: str, values: tuple[Tensor, ...], device: torch.device
) -> Mismatch | None:
    row, col = _spec(recipe, "fwd", "a"), _spec(recipe, "wgrad", "b")
    dh, gate, up = values
    gates = backend.swiglu_backward_quantize(dh.to(device), gate.to(device), up.to(device), row, col)
    gates_want = get("reference").swiglu_backward_quantize(dh, gate, up, row, col)
    names = ("dgate", "dgate turned", "dup", "dup turned")
    for name, actual, expected in zip(names, gates, gates_want, strict=True):
        if actual is None or expected is None:
            continue
        if (mismatch := _compare_values(name, backend, actual, get("reference").dequantize(expected))) is not None:
            return mismatch
    return None


def _check_norm_or_swiglu(
    backend: Backend, recipe: Recipe, op: str, values: tuple[Tensor, ...], device: torch.device
) -> Mismatch | None:
    """Check the result and its codes, and the kernel that writes only codes."""
    row, col = _spec(recipe, "fwd", "a"), _spec(recipe, "wgrad", "b")
    first, second, reference = values[0], values[1], get("reference")
    a, b = first.to(device), second.to(device)
    if op == "rmsnorm":
        y, _, *codes = backend.rmsnorm_quantize(a, b[0], 1e-6, row, col)
        only = backend.rmsnorm_codes(a, b[0], 1e-6, row, col)[1:]
        exact, rstd, *_ = reference.rmsnorm_quantize(first, second[0], 1e-6, None, None)
        mismatch = _check_norm_backward(backend, second, first, second[0], rstd, device)
        if mismatch is not None:
            return mismatch
        exact = exact.float()
    else:
        y, *codes = backend.swiglu_quantize(a, b, row, col)
        only = backend.swiglu_codes(a, b, row, col)
        exact = reference.swiglu_quantize(first, second, None, None)[0].float()
    if (mismatch := find_largest_error("result", y, exact, exact.abs() * BOUND)) is not None:
        return mismatch
    # The result may differ from the reference in its last bit, and its codes with it: they are compared with its cast.
    for name, q, alone in zip(("cast", "cast turned"), codes, only, strict=True):
        if q is None or alone is None:
            continue
        expected = quantize(y.cpu(), q.spec)
        mismatch = compare_codes(f"{name} of the result", q, expected)
        mismatch = mismatch or _compare_values(f"{name} without the result", backend, alone, dequantize(expected))
        if mismatch is not None:
            return mismatch
    return None


def _check_norm_backward(
    backend: Backend, dy: Tensor, x: Tensor, weight: Tensor, rstd: Tensor, device: torch.device
) -> Mismatch | None:
    """Check dx and dw."""
    on_device = (dy.to(device), x.to(device), weight.to(device), rstd.to(device))
    gradients = backend.rmsnorm_backward(*on_device, True, True)
    exact = get("reference").rmsnorm_backward(dy, x, weight, rstd, True, True)
    for name, actual, expected in zip(("dx", "dw"), gradients, exact, strict=True):
        assert actual is not None and expected is not None
        wide = expected.float()
        # Sums in another order: an element near zero is off by the rounding of its largest terms.
        allowed = wide.abs() * BOUND + wide.abs().amax() * 2.0**-14
        if (mismatch := find_largest_error(name, actual, wide, allowed)) is not None:
            return mismatch
    return None


def _compare_values(what: str, backend: Backend, actual: Quantized, exact: Tensor) -> Mismatch | None:
    """Compare codes of values that two implementations may round differently: they may differ by one step."""
    allowed = exact.abs() / 7 + exact.abs().amax() * 2.0**-14
    return find_largest_error(what, backend.dequantize(actual), exact, allowed)


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
