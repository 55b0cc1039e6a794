"""Rules on combinations of settings, and on what this version does not support. Each finding names the keys it
needs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from octavo.base.hub import is_name
from octavo.base.recipe_specs import SPECS
from octavo.base.wording import nearest
from octavo.config.rules import adaptive, lora, packing, phases
from octavo.config.rules.findings import Finding, finding, glob_problem
from octavo.config.sections.all_sections import Sections
from octavo.config.sections.data import DataSection, Dataset
from octavo.config.sections.foreign_words import component_of
from octavo.config.sections.fp8 import PARTS, Component, Fp8Section, Head, Rule
from octavo.config.sections.names import COMPONENTS, is_unsupported
from octavo.config.sections.rl import BEYOND_SFT
from octavo.config.sections.text_types import is_url, python_name, python_path
from octavo.config.yaml.problems import describe_value

ABSENT = "required, but absent"
FREEZABLE = (*COMPONENTS, "lm_head")
GEMMS = ("fwd", "dgrad", "wgrad")
_NOT_ON_HUB = "has no effect on a local path"
_NOTHING_LEFT = "fwd, dgrad and wgrad are all bf16, so nothing would run in FP8"
#: keys of `data`, and of a data set, that control the encoding of rows; sealed rows are encoded already
_ENCODING_KEYS = (
    *("on_long", "join", "train_on_prompt", "max_pixels", "min_pixels", "max_image_megapixels", "video"),
    *("system", "template_args", "mask_empty_think", "mask_reasoning", "split_turns"),
)
_DATA_FILE_KEYS = ("revision", "split", "subset", "images", "stream", "fetch_gb", "shuffle_buffer", "columns", "format")


def check(config: Sections) -> list[Finding]:
    """Return the findings of all rules that ``config`` breaks. Rules of a feature are checked only if one of its keys
    is set."""
    of_sections = (_model, _attention, _fp8, _data, _phase, _sealed, _train, _memory, _parallel, _run,
                   _corruption_checks)  # fmt: skip
    phase, frozen_codes = config.train.phase, config.model.load_in_fp8.kinds
    changes = [config.fp8.adapt, *(bound for rule in config.fp8.rules for bound in (rule.first, rule.last))]
    of_features = (
        (lora.rules, config.lora is not None or frozen_codes or config.model.fp8_twin is not None),
        (phases.rules, phase in BEYOND_SFT or config.rl is not None or config.preference is not None),
        (packing.rules, config.data.packing),
        (adaptive.rules, any(key is not None for key in changes)),
    )
    parts = (*of_sections, *(rules for rules, is_set in of_features if is_set))
    return [finding for part in parts for finding in part(config)]


def _model(config: Sections) -> Iterator[Finding]:
    yield from _init(config)
    yield from _model_parts(config)
    if config.model.revision is not None and not is_name(config.model.path):
        yield finding("model.revision", _NOT_ON_HUB, "remove it, or name a model of the hub (org/name)", "model.path")
    for index, pattern in enumerate(config.model.freeze):
        key = f"model.freeze.{index}"
        if pattern in FREEZABLE:
            continue
        if why := glob_problem(pattern):
            reason = f"{describe_value(pattern)} is neither a component nor a glob over module names: {why}"
            yield finding(key, reason, f'use {", ".join(FREEZABLE)} or e.g. "**.layers.0.**"')
        elif not set(pattern) & {".", "*"} and (close := component_of(pattern, FREEZABLE)):
            yield finding(key, f"unknown component {describe_value(pattern)}", f"did you mean {close}?")


def _model_parts(config: Sections) -> Iterator[Finding]:
    """A composed model needs both parts with weights, and nothing replaces them."""
    model = config.model
    parts = {"image_encoder": model.image_encoder, "foundation": model.foundation}
    set_parts = [name for name, part in parts.items() if part is not None]
    if not set_parts and model.image_projector is None:
        return
    for name in parts:
        if name not in set_parts:
            reason = "required, but absent: a composed model has an image encoder and a foundation"
            yield finding(f"model.{name}", reason, f"add `{name}: {{path: FOLDER}}`", "model.image_projector")
    fixes = {"fp8_twin": "remove it", "revision": "remove it, or write it under the part that is on the hub"}
    for key, fix in fixes.items():
        if getattr(model, key) is not None:
            yield finding(f"model.{key}", "a composed model is on no hub", fix, "model.foundation")
    for name, part in parts.items():
        if part is not None and part.revision is not None and not is_name(part.path):
            key = f"model.{name}.revision"
            yield finding(key, _NOT_ON_HUB, "remove it, or name a model of the hub (org/name)", f"model.{name}.path")


def _init(config: Sections) -> Iterator[Finding]:
    """Settings that need the weights of a checkpoint."""
    model, phase = config.model, config.train.phase
    if model.init != "random":
        if model.init_std is not None:
            reason = "has no effect on the weights of a checkpoint"
            yield finding("model.init_std", reason, "remove it, or set `init: random`", "model.init")
        return
    conflicts = (
        ("lora", config.lora is not None, "adapters need a trained base, and random weights are not"),
        ("model.load_in_fp8", bool(model.load_in_fp8.kinds), "frozen codes of random weights would never be trained"),
        ("model.freeze", bool(model.freeze), "frozen parts would keep their random weights"),
        ("train.phase", phase in BEYOND_SFT, f"phase {phase} needs a trained model"),
    )
    for key, is_there, reason in conflicts:
        if is_there:
            yield finding("model.init", reason, f"use `init: checkpoint`, or change {key}", key)


def _attention(config: Sections) -> Iterator[Finding]:
    """Kernels that work only for packs, or only in 16 bits."""
    attention, kernel = config.model.attention, config.model.attention.foundation
    if "varlen" in attention.kernels.values() and config.train.precision == "fp32":
        reason = "varlen computes in 16 bits, and train.precision is fp32"
        yield finding("model.attention", reason, "use sdpa, or `precision: auto` or `bf16`", "train.precision")
    if attention.image_encoder == "flex":
        reason, fix = "flex works only for the language model's packs", "use varlen, which takes all images in one call"
        yield finding("model.attention.image_encoder", reason, fix)
    if kernel in ("varlen", "flex") and not config.data.packing:
        reason = f"{kernel} is for rows of several samples, and without packing rows are padded"
        instead = "`{image_encoder: varlen}`" if kernel == "varlen" else "sdpa"
        yield finding("model.attention", reason, f"use {instead}, or set data.packing: true", "data.packing")


def _fp8(config: Sections) -> Iterator[Finding]:
    fp8 = config.fp8
    if is_unsupported(fp8.recipe, fp8.format):
        reason = f"{fp8.recipe} has no {fp8.format} format"
        yield finding("fp8.format", reason, f"use {_default_format(fp8.recipe)}, or remove `format`", "fp8.recipe")
    if fp8.recipe != "off" and _all_bf16(fp8):
        fix = "use `recipe: off`, or set one of them to fp8"
        yield finding("fp8.wgrad", _NOTHING_LEFT, fix, "fp8.fwd", "fp8.dgrad")
    yield from _plan(fp8)
    for name in COMPONENTS:
        part: Component | None = getattr(fp8, name)
        if part is not None:
            yield from _part(f"fp8.{name}", part, fp8)
    if fp8.lm_head is not None:
        yield from _part("fp8.lm_head", fp8.lm_head, fp8)
    for index, rule in enumerate(fp8.rules):
        key = f"fp8.rules.{index}"
        if why := glob_problem(rule.match):
            reason = f"{describe_value(rule.match)} is not a glob over module names: {why}"
            yield finding(f"{key}.match", reason, 'write e.g. "**.layers.0.**"')
        if all(getattr(rule, setting) is None for setting in ("recipe", "format", *GEMMS)):
            yield finding(key, "the rule changes nothing", "give it a recipe, a format, fwd, dgrad or wgrad")
        yield from _part(key, rule, fp8)


def _plan(fp8: Fp8Section) -> Iterator[Finding]:
    """Yield findings on settings that a plan file overrides: ignoring them silently would mislead the user."""
    if fp8.plan is None:
        return
    ignored = "has no effect with fp8.plan, which decides for every layer"
    if fp8.recipe == "off":
        yield finding("fp8.plan", "a plan file is set, and the recipe is off", "remove one of them", "fp8.recipe")
    elif "recipe" in fp8.model_fields_set:
        yield finding("fp8.recipe", ignored, "remove it, or use the recipe without a plan (fp8.plan=null)", "fp8.plan")
    settings = ("activations", "param", "weight_codes", "rules", "backend", "candidates", "fuse")
    values = fp8.model_dump()
    for key in ("format", *GEMMS, *COMPONENTS, "lm_head", *settings):
        if values[key] != Fp8Section.model_fields[key].get_default():
            yield finding(f"fp8.{key}", ignored, "remove it, or edit the plan file", "fp8.plan")


def _part(key: str, part: Component | Head | Rule, fp8: Fp8Section) -> Iterator[Finding]:
    """Rules on a component or a rule: its settings, and those that it inherits from the model."""
    recipe, form = f"{key}.recipe", f"{key}.format"
    if part.recipe == "off":
        for name in ("format", *GEMMS):
            if getattr(part, name) is not None:
                fix = f"remove `{name}` or set a recipe"
                yield finding(f"{key}.{name}", "has no effect where the recipe is off", fix, recipe)
        return
    if is_unsupported(part.recipe, part.format):
        yield finding(form, f"{part.recipe} has no {part.format} format", f"use {_default_format(part.recipe)}", recipe)
    elif part.format is None and is_unsupported(part.recipe, fp8.format):
        reason = f"{part.recipe} has no {fp8.format} format, which is inherited from fp8.format"
        yield finding(recipe, reason, f"add `format: {_default_format(part.recipe)}` here", "fp8.format", form)
    elif part.recipe is None and is_unsupported(fp8.recipe, part.format):
        reason = f"{fp8.recipe}, inherited from fp8.recipe, has no {part.format} format"
        yield finding(form, reason, f"use {_default_format(fp8.recipe)}", "fp8.recipe", recipe)
    if part.recipe is not None and _all_bf16(part):
        yield finding(f"{key}.wgrad", _NOTHING_LEFT, "use `recipe: off`", *(f"{key}.{gemm}" for gemm in GEMMS))


def _default_format(recipe: str | None) -> str:
    return SPECS[recipe].formats[0] if recipe is not None and recipe in SPECS else ""


def _all_bf16(part: Fp8Section | Component | Head | Rule) -> bool:
    return all(getattr(part, gemm) == "bf16" for gemm in GEMMS)


def _data(config: Sections) -> Iterator[Finding]:
    data = config.data
    for of, entries in (("train", data.train), ("eval", data.eval)):
        for number, entry in enumerate(entries):
            # Which settings apply depends on where the rows come from.
            where, local = f"data.{of}.{number}", not is_name(entry.path)
            for key in ("revision", "split", "subset"):
                if local and getattr(entry, key) is not None:
                    yield finding(f"{where}.{key}", _NOT_ON_HUB, "remove it", f"{where}.path")
            if entry.fetch_gb is not None and not is_url(entry.path):
                yield finding(f"{where}.fetch_gb", "applies only to data sets at a URL", "remove it", f"{where}.path")
            if entry.stream and is_url(entry.path):
                reason = "files at a URL are fetched one by one, and read from the fetched copies"
                yield finding(f"{where}.stream", reason, "remove it, and see fetch_gb", f"{where}.path")
            if python_name(entry.path) is not None:
                yield from _python_rows(data, entry, where, f"{of}_data")
            if of == "eval" and entry.shuffle_buffer is not None:
                reason = "held-out rows are read in the order of their file"
                yield finding(f"{where}.shuffle_buffer", reason, "remove it")
    if data.min_pixels and data.max_pixels and data.min_pixels > data.max_pixels:
        reason = f"min_pixels {data.min_pixels} is above max_pixels {data.max_pixels}"
        yield finding("data.min_pixels", reason, "lower it or raise data.max_pixels", "data.max_pixels")
    if data.window != DataSection.model_fields["window"].default and not data.packing:
        fix = "remove it, or set packing: true"
        yield finding("data.window", "has no effect without packing", fix, "data.packing")
    if config.run.eval_every and not data.eval:
        fix = "add a data set to data.eval, or use `eval_every: 0`"
        yield finding("run.eval_every", "there is nothing to evaluate on: data.eval is empty", fix, "data.eval")


def _python_rows(data: DataSection, entry: Dataset, where: str, argument: str) -> Iterator[Finding]:
    """Settings of the rows that a program passes as this argument of `octavo.run`, at the key `where`."""
    path, rows = f"{where}.path", python_path(argument)
    if entry.path != rows:
        yield finding(path, f"there are no rows `{entry.path}`", f"write {rows}, which is {argument} of octavo.run")
    if data.sealed:
        reason = f"sealed rows are a folder, and {argument} of octavo.run has plain rows"
        yield finding(path, reason, "name the folder that `octavo seal data` wrote", "data.sealed")
    if entry.stream:
        yield finding(f"{where}.stream", "has no effect on rows in memory", "remove it", path)


def _phase(config: Sections) -> Iterator[Finding]:
    """Settings of rows that do not apply in the phase."""
    data, phase = config.data, config.train.phase
    if data.mask_reasoning and (data.train_on_prompt or phase == "pretrain"):
        by = "train.phase" if phase == "pretrain" else "data.train_on_prompt"
        yield finding("data.mask_reasoning", "all text has loss, including reasoning", "remove one of them", by)
    if data.split_turns and phase != "sft":
        yield finding("data.split_turns", f"phase {phase} does not split conversations", "remove it", "train.phase")
    elif data.split_turns and data.train_on_prompt:
        reason = "the turns before a question would be learned again in each of its rows"
        yield finding("data.split_turns", reason, "remove one of them", "data.train_on_prompt")
    if not data.join and phase != "pretrain":
        yield finding("data.join", f"phase {phase} does not join rows", "remove it", "train.phase")
    for where in ("train", "eval"):
        for index, dataset in enumerate(getattr(data, where)):
            key = f"data.{where}.{index}.format"
            if dataset.format == "prompt" and phase != "rl":
                reason = f"rows of prompts are for phase rl; phase {phase} needs answers to learn from"
                yield finding(key, reason, "use rows with answers", "train.phase")
            if dataset.format == "text" and phase != "pretrain":
                reason = f"plain text is for phase pretrain; phase {phase} learns from answers"
                yield finding(key, reason, "use `phase: pretrain`, or rows with answers", "train.phase")


def _sealed(config: Sections) -> Iterator[Finding]:
    """Settings that do not apply to sealed rows, which are numbers already."""
    data = config.data
    if not data.sealed:
        return
    if config.train.phase == "rl":
        reason = "phase rl rewards text, and sealed rows have none"
        yield finding("data.sealed", reason, "use another phase", "train.phase")
    if config.preference is not None and config.preference.loss == "kto":
        reason = "only pairs of preferences can be sealed, and kto learns from labelled answers"
        yield finding("data.sealed", reason, "use a loss of pairs", "preference.loss")
    for key in _ENCODING_KEYS:
        if getattr(data, key) != DataSection.model_fields[key].get_default():
            yield finding(f"data.{key}", "has no effect on sealed rows, which are numbers already",
                          f"remove it, and set it for `octavo seal data` (data.{key}=...)", "data.sealed")  # fmt: skip
    for name, sets in (("train", data.train), ("eval", data.eval)):
        for number, dataset in enumerate(sets):
            for key in _DATA_FILE_KEYS:
                if getattr(dataset, key) != Dataset.model_fields[key].get_default():
                    reason = "has no effect on a sealed data set, whose format is fixed"
                    yield finding(f"data.{name}.{number}.{key}", reason, "remove it", "data.sealed")


def _train(config: Sections) -> Iterator[Finding]:
    train = config.train
    if train.phase != "rl" and train.global_batch % train.micro_batch:
        above = -(-train.global_batch // train.micro_batch) * train.micro_batch
        best = next(n for n in range(train.micro_batch, 0, -1) if train.global_batch % n == 0)
        reason = f"global_batch {train.global_batch} is not a multiple of micro_batch {train.micro_batch}"
        fix = f"use e.g. micro_batch {best} or global_batch {above}"
        yield finding("train.global_batch", reason, fix, "train.micro_batch")
    if train.steps is None and train.epochs is None:
        yield finding("train.steps", ABSENT, "add `steps:` or `epochs:` under `train`", "train.epochs")
    if train.steps is not None and train.epochs is not None:
        reason = f"{train.epochs:g} epochs and {train.steps} steps both set the length of the run"
        yield finding("train.epochs", reason, "remove one of them", "train.steps")
    if train.epochs is not None and train.phase == "rl":
        why = "in phase rl a step takes as many prompts as it needs, so an epoch has no fixed number of steps"
        yield finding("train.epochs", why, "set train.steps", "train.phase")
    if train.steps is not None and train.warmup >= train.steps:
        reason = f"warmup {train.warmup} takes all of {train.steps} steps"
        yield finding("train.warmup", reason, f"use at most {train.steps - 1}", "train.steps")
    if train.min_lr > train.lr:
        yield finding("train.min_lr", f"min_lr {train.min_lr:g} is above lr {train.lr:g}", "lower it", "train.lr")
    if train.schedule == "constant" and train.min_lr:
        fix = "remove it, or use cosine or linear"
        yield finding("train.min_lr", "has no effect on a constant schedule", fix, "train.schedule")


def _memory(config: Sections) -> Iterator[Finding]:
    """Settings that save memory, and what they need."""
    train, optimizer, fp8 = config.train, config.optimizer, config.fp8
    not_bf16 = train.precision in ("fp16", "fp32")
    if optimizer.master != "fp32" and not_bf16:
        reason = f"master {optimizer.master} makes a BF16 model, which does not compute in {train.precision}"
        fix = "use `precision: auto` or `bf16`, or `master: fp32`"
        yield finding("train.precision", reason, fix, "optimizer.master")
    if train.gather == "bf16" and not_bf16:
        reason = f"weights that are gathered in BF16 cannot compute in {train.precision}"
        yield finding("train.gather", reason, "use `gather: stored`, or `precision: auto` or `bf16`", "train.precision")
    yield from _fp16(config)
    if train.gather == "bf16" and config.lora is not None:
        reason = "adapters are gathered as stored, and the base is BF16 or FP8 codes"
        yield finding("train.gather", reason, "remove it, and see lora.dtype", "lora")
    elif train.gather == "bf16" and optimizer.master != "fp32":
        reason = f"has no effect: with master {optimizer.master} weights are BF16, and are gathered in BF16"
        yield finding("train.gather", reason, "remove it, or use `master: fp32`", "optimizer.master")
    if train.offload_activations and train.recompute.foundation == train.recompute.image_encoder == "full":
        reason = "has almost nothing to move where every block is recomputed in full"
        fix = "remove it, or use `recompute: selective` or `none`"
        yield finding("train.offload_activations", reason, fix, "train.recompute")
    yield from _weight_codes(fp8)

    # A component can set activations itself, so all components are checked, not only the whole model.
    fp8_kept = ["fp8.activations"] if fp8.activations == "fp8" else []
    parts = ((name, getattr(fp8, name)) for name in COMPONENTS)
    fp8_kept += [f"fp8.{name}.activations" for name, part in parts if part and part.activations == "fp8"]
    if train.compile and fp8_kept:
        fix = "use `activations: bf16`, or `train.compile: false`"
        yield finding(fp8_kept[0], "in compiled blocks the compiler decides what is kept", fix, "train.compile")
    if train.cuda_graphs:
        yield from _graphs(config)


def _fp16(config: Sections) -> Iterator[Finding]:
    """Settings that do not work with FP16, and the loss scale, which only FP16 uses."""
    train, scale = config.train, config.train.loss_scale
    if scale is not None and train.precision != "fp16":
        reason = "only FP16, whose range is 6e-8 to 65504, needs a loss scale; BF16 has the range of fp32"
        yield finding("train.loss_scale", reason, "remove it, or use `precision: fp16`", "train.precision")
    if isinstance(scale, int) and scale & (scale - 1):
        reason, below = f"{scale} is not a power of two, and would round every gradient", 1 << (scale.bit_length() - 1)
        yield finding("train.loss_scale", reason, f"use {below} or {2 * below}, or dynamic")
    if train.precision != "fp16":
        return
    if config.lora is not None:
        reason = "the base of LoRA is BF16, and adapters compute in its dtype"
        yield finding("train.precision", reason, "use `precision: auto`, `bf16` or `fp32`, or remove lora", "lora")
    if config.optimizer.update == "backward" and not train.clip:
        reason = "an FP16 overflow would be detected after other weights of the step were updated"
        yield finding("optimizer.update", reason, "set train.clip, or use `update: step`", "train.precision")


def _graphs(config: Sections) -> Iterator[Finding]:
    """Settings that do not work in a CUDA graph. A run also refuses what its machine, plan and model do not support."""
    train = config.train
    conflicts = (
        ("train.compile", train.compile, "compiled blocks are not captured yet", "false"),
        ("train.recompute", any(how != "none" for _, how in train.recompute),
         "recomputation reads the state of random generators", "none"),
        ("train.offload_activations", train.offload_activations, "activations go to the host", "false"),
        ("train.synchronize_per_layer", train.synchronize_per_layer, "it would wait after every block", "false"),
        ("optimizer.update", config.optimizer.update != "step", "weights would be updated within the graph", "step"),
    )  # fmt: skip
    for key, is_on, reason, instead in conflicts:
        if is_on:
            fix = f"use `{key}: {instead}`, or `train.cuda_graphs: false`"
            yield finding("train.cuda_graphs", reason, fix, key)


def _weight_codes(fp8: Fp8Section) -> Iterator[Finding]:
    """Settings of weight codes that no FP8 layer uses, and settings that contradict each other."""
    if fp8.plan is not None:  # `_plan` refuses other settings already
        return
    has_fp8_rule = any(rule.recipe not in (None, "off") for rule in fp8.rules)
    parts = {name: part for name in COMPONENTS if (part := getattr(fp8, name)) is not None}
    on = [name for name in COMPONENTS if has_fp8_rule or fp8.recipe_of(name) != "off"]
    for name, part in parts.items():
        if part.param and name not in on:
            reason = "has no effect where the recipe is off"
            needs = (f"fp8.{name}.recipe", "fp8.recipe", "fp8.rules")
            yield finding(f"fp8.{name}.param", reason, "remove it, or set a recipe", *needs)
    head = fp8.lm_head is not None and fp8.lm_head.recipe != "off"
    settings = {"param": fp8.param, "weight_codes": fp8.weight_codes != "keep" and not head}
    for key in (key for key, is_on in settings.items() if is_on and not on):
        reason = "has no effect where nothing runs in FP8"
        yield finding(f"fp8.{key}", reason, "remove it, or set fp8.recipe", "fp8.recipe", "fp8.rules", *PARTS)
    param_components = [
        name
        for name in on
        if (fp8.param if (component := parts.get(name)) is None or component.param is None else component.param)
    ]
    if fp8.weight_codes != "keep" and on and param_components == on and not head:
        effect = "keeps no codes between uses" if fp8.weight_codes == "recast" else "keeps codes in addition to weights"
        reason = f"{fp8.weight_codes} {effect}, and param keeps weights as codes between steps"
        yield finding("fp8.weight_codes", reason, "use one of them", "fp8.param", *PARTS)


def _parallel(config: Sections) -> Iterator[Finding]:
    """Settings that do not work with the axes of a mesh."""
    axes, train = config.parallel, config.train
    if axes.context > 1 and train.phase in BEYOND_SFT:
        reason = f"ranks cannot share the rows of phase {train.phase} (context is {axes.context})"
        yield finding("parallel.context", reason, "use context: 1", "train.phase")
    elif axes.context > 1 and not config.data.packing:
        reason = f"{axes.context} ranks would share the tokens of packed rows, and rows are not packed"
        yield finding("parallel.context", reason, "set data.packing: true and train.micro_batch: 1", "data.packing")
    if axes.ulysses != "auto" and axes.context % axes.ulysses:
        reason = f"ulysses {axes.ulysses} does not divide context {axes.context}"
        yield finding("parallel.ulysses", reason, "use a divisor of it, or auto", "parallel.context")
    if axes.expert > 1 and config.train.phase in BEYOND_SFT:
        reason = (
            f"expert parallelism is not supported in phase {config.train.phase}: its other forwards are not tested "
            f"with it"
        )
        yield finding("parallel.expert", reason, "use `expert: 1`; FSDP2 still shards experts", "train.phase")
    if axes.expert > 1 and config.lora is not None:
        reason = "expert parallelism is not supported with adapters, whose base is gathered in FP8 and has no gradients"
        yield finding("parallel.expert", reason, "use `expert: 1`; FSDP2 still shards experts", "lora")


def _run(config: Sections) -> Iterator[Finding]:
    yield from _starting_point(config)
    duplicates = [name for name, count in Counter(config.run.trackers).items() if count > 1]
    if duplicates:
        yield finding("run.trackers", f"{duplicates[0]} is named more than once", "name each tracker once")
    resume = config.run.resume
    if resume in ("never", "auto"):
        return
    if not resume.strip():
        yield finding("run.resume", "is empty", "use never, auto or the path of a checkpoint")
    elif "/" not in resume and "\\" not in resume and not resume.startswith((".", "~")):
        close = nearest(resume, ("never", "auto"))
        fix = (f"did you mean {close}? " if close else "") + f"a path has a slash: ./{resume}"
        yield finding("run.resume", f"{describe_value(resume)} is neither never, auto nor a path", fix)


def _starting_point(config: Sections) -> Iterator[Finding]:
    """Yield findings on starting points that exclude each other."""
    run, adapter = config.run, config.lora is not None and config.lora.adapter is not None
    conflicts = (
        ("run.resume", run.resume not in ("never", "auto"), "which continues a run with its full state"),
        ("run.fork", run.fork is not None, "which also continues optimizer and position in the data"),
        ("lora.adapter", adapter, "and adapters can start from only one of them"),
    )
    for key, is_there, why in conflicts:
        if run.start_from is not None and is_there:
            yield finding("run.start_from", f"is set together with {key}, {why}", f"remove one of them ({key})", key)


def _corruption_checks(config: Sections) -> Iterator[Finding]:
    """Settings that do not work with checks for silent corruption (`run.check_every`)."""
    key = "run.check_every"
    interval, train = config.run.check_every, config.train
    if not interval:
        return
    conflicts = (
        ("train.compile", train.compile, "the operands of GEMMs in a compiled graph cannot be read"),
        ("train.cuda_graphs", train.cuda_graphs, "the operands of GEMMs in a CUDA graph cannot be read"),
    )
    for other, is_on, reason in conflicts:
        if is_on:
            yield finding(other, reason, f"use false, or remove {key}", key)
    if train.steps is not None and interval > train.steps:
        yield finding(key, f"none of {train.steps} steps is a check", f"use at most {train.steps}", "train.steps")
    fp8 = config.fp8
    head = fp8.lm_head is not None and fp8.lm_head.recipe != "off"
    if fp8.plan is None and not head and not fp8.in_use:
        yield finding(key, "checks FP8 GEMMs, and nothing runs in FP8", "remove it, or set fp8.recipe", "fp8.recipe")
