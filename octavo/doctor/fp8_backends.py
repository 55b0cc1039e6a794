"""Lists every FP8 backend with its version and capabilities, and runs it wherever it would be chosen automatically.

Each test is a linear layer, forward and backward, in every recipe. The layer is set up as in a training run (plan,
apply, autograd), its GEMMs are counted, and y, dx and dw are compared with high precision. Sizes are deliberately
uneven: 33 tokens, 144 inputs and 80 outputs fill no block of 128. A backend that is used on a device only when
requested by name (e.g. Triton's interpreter on the CPU) is listed with that reason and not run.
"""

from __future__ import annotations

from octavo.base.safe_read import first_line
from octavo.doctor.report import ABSENT, FAIL, OK, Check

TOKENS, INPUTS, OUTPUTS = 33, 144, 80
GEMMS, FUSED_OPS = ("fwd", "dgrad", "wgrad"), ("rmsnorm", "swiglu", "swiglu_backward")
EXTRA_OPS = (*(f"grouped_{gemm}" for gemm in GEMMS), *FUSED_OPS)


def backends(devices: tuple[str, ...] | None = None) -> list[Check]:
    """Return, for each device and backend, one check that describes it and one for each recipe that it can run."""

    from octavo.base import accelerator
    from octavo.fp8 import kernels

    if devices is None:
        here = accelerator.default_device()
        devices = ("cpu", f"{here.type}:0") if accelerator.has_own_memory(here) else ("cpu",)
    return [check for d in devices for name in kernels.names() for check in _backend(name, d)]


def versions_tested(device: str | None = None) -> Check:
    """Check the versions of torch and Triton.

    If they are newer than tested, or on a GPU, all kernels that are chosen on a device (None: where training runs) are
    compared with the reference (:mod:`octavo.fp8.self_check`), unless a cached result exists.
    """
    import torch

    from octavo.base import accelerator
    from octavo.fp8 import self_check

    device = device or str(accelerator.default_device())
    here = ", ".join(f"{package} {version}" for package, version in self_check.installed_versions().items())
    most = ", ".join(f"{package} {major}.{minor}" for package, (major, minor) in self_check.TESTED.items())
    untested = self_check.find_untested()
    if not untested and torch.device(device).type == "cpu":
        return Check("fp8", "versions", OK, f"{here}: tested versions (up to {most}), no kernel needs checking")
    try:
        count = _check_kernels(device)
    except Exception as error:  # kernels may raise anything; the error becomes the result
        means = "training in FP8 with these kernels stops with an error"
        fix = f"fp8.backend: reference (slow), or tested versions: {most}"
        return Check("fp8", "versions", FAIL, first_line(error), means, fix)
    result = f"{count} checks of kernels and a compiled layer agree with the reference on {device}"
    if not count:
        result = f"the reference is chosen for all GEMMs on {device}, no kernel needs checking"
    versions = " and ".join(untested) or f"{here}: tested versions (up to {most})"
    return Check("fp8", "versions", OK, f"{versions}: {result}")


def _check_kernels(device: str) -> int:
    """Run the checks of every recipe on its chosen backends, unless results are cached; returns their number."""
    import torch

    from octavo import fp8
    from octavo.fp8 import planning, self_check
    from octavo.fp8.kernels import select

    on = torch.device(device)
    layers = torch.nn.ModuleList([torch.nn.Linear(INPUTS, INPUTS, device=on)])
    checks = planning.collect_kernel_checks([fp8.plan(layers, recipe_name) for recipe_name in fp8.RECIPES], on)
    for recipe in map(fp8.recipe, fp8.RECIPES):
        for op in FUSED_OPS:
            checks |= self_check.fused_checks(recipe, op, select(op, recipe_or_spec=recipe, device=on).backend.name, on)
        for gemm in GEMMS if recipe.delayed is None else ():
            chosen = select(f"grouped_{gemm}", recipe_or_spec=recipe, device=on).backend.name
            checks |= self_check.kernel_checks(recipe, gemm, chosen, on, grouped=True)
    chosen = select("adamw", recipe_or_spec=fp8.CastSpec(), device=on).backend.name
    checks |= self_check.adamw_checks(chosen, on)
    self_check.run_checks(checks, on, limit=float("inf"), always=True)
    return len(checks)


def _backend(name: str, device: str) -> list[Check]:
    import torch

    from octavo.fp8 import RECIPES, kernels

    backend, on = kernels.get(name), torch.device(device)
    reasons = {recipe_name: _why_not(name, recipe_name, device) for recipe_name in RECIPES}
    all_reasons = "; ".join(dict.fromkeys(filter(None, reasons.values())))
    why = all_reasons if all(reasons.values()) else backend.why_not_auto(on)
    if why is not None:
        means = "another backend is chosen on this device"
        reason = why if "not installed" in why else f"not run: {why} ({backend.version()})"
        return [Check("fp8", f"{name} on {device}", ABSENT, reason, means, "none needed")]
    checks = [Check("fp8", f"{name} on {device}", OK, f"{backend.version()}{_extra_operations(name, device)}")]
    for recipe_name, why_not in reasons.items():
        if why_not is None:
            checks.append(_try(name, recipe_name, device))
        else:
            means = "another backend is chosen for this recipe"
            checks.append(Check("fp8", f"{name} {recipe_name} on {device}", ABSENT, why_not, means, "none needed"))
    return checks


def _why_not(backend: str, recipe_name: str, device: str) -> str | None:
    """Return why the backend cannot run all three GEMMs of this recipe here, or None if it can."""
    import torch

    from octavo.fp8 import kernels, recipe

    built_recipe, on = recipe(recipe_name), torch.device(device)
    reasons = [
        kernels.get(backend).supports(op, built_recipe, on, (TOKENS, OUTPUTS, INPUTS))
        for op in ("fwd", "dgrad", "wgrad")
    ]
    return "; ".join(dict.fromkeys(filter(None, reasons))) or None


def _extra_operations(backend: str, device: str) -> str:
    """List its operations in the default recipe in addition to casts and the GEMMs of a linear layer."""
    import torch

    from octavo.fp8 import kernels, recipe

    supports, built_recipe, on = kernels.get(backend).supports, recipe("blockwise"), torch.device(device)
    supported = [op for op in EXTRA_OPS if supports(op, built_recipe, on, None) is None]
    return f"; also {', '.join(supported)}" if supported else ""


def _try(backend: str, recipe_name: str, device: str) -> Check:
    from octavo.fp8.metrics import SOUND_DIFF

    name = f"{backend} {recipe_name} on {device}"
    means = f"fp8.recipe: {recipe_name} cannot be trusted here"
    fix = "use another recipe or fp8.backend, and report this with `octavo doctor --json`"
    try:
        worst = _run(backend, recipe_name, device)
    except Exception as error:  # kernels may raise anything; the error becomes the result
        return Check("fp8", name, FAIL, first_line(error), means, fix)
    bad = [f"{what} {diff:.2g}" for what, diff in worst.items() if not diff < SOUND_DIFF]
    if bad:
        return Check("fp8", name, FAIL, f"far from high precision: calc_diff of {', '.join(bad)}", means, fix)
    return Check("fp8", name, OK, "calc_diff " + ", ".join(f"{what} {diff:.1e}" for what, diff in worst.items()))


def _run(backend: str, recipe_name: str, device: str) -> dict[str, float]:
    """Return calc_diff of y, dx and dw from high precision. Raises if a GEMM did not run in FP8 on this backend."""
    import torch

    from octavo import fp8
    from octavo.base import accelerator
    from octavo.fp8.metrics import calc_diff

    dtype = accelerator.autocast_dtype(torch.device(device)) or torch.float32
    generator = torch.Generator().manual_seed(0)
    x, dy = (torch.randn(TOKENS, n, generator=generator).to(device, dtype) for n in (INPUTS, OUTPUTS))
    model = torch.nn.Sequential(torch.nn.Linear(INPUTS, OUTPUTS)).to(device, dtype)
    plain = _forward_backward(model, x, dy)
    fp8.apply(model, fp8.plan(model, fp8.Policy(recipe=recipe_name, backend=backend)))
    with fp8.count_gemms() as counts:
        converted = _forward_backward(model, x, dy)
    ran = {gemm for (_, gemm, used), calls in dict(counts).items() if used == backend and calls}
    missing = {"fwd", "dgrad", "wgrad"} - ran
    if missing:
        raise RuntimeError(f"{', '.join(sorted(missing))} did not run in FP8")
    return {what: calc_diff(a, b) for what, a, b in zip(("y", "dx", "dw"), converted, plain, strict=True)}


def _forward_backward(model, x, dy):  # type: ignore[no-untyped-def]
    x = x.detach().requires_grad_()
    model.zero_grad()
    y = model(x)
    y.backward(dy)
    return y.detach(), x.grad, model[0].weight.grad.clone()
