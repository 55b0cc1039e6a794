"""Wrong configurations: all problems are reported at once, each with its line, the value found and the fix."""

import pytest

from octavo.base import recipe_specs
from octavo.base.wording import nearest
from octavo.config import ConfigError, error_texts, load_config, load_config_text
from octavo.config.rules.phases import BUILT_IN
from octavo.config.sections import foreign_words

BASE = """model: {path: ./m}
data: {train: [{path: a.json}]}
train: {steps: 10, global_batch: 8}
"""


def problems(text: str, overrides=()) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        load_config_text(text, overrides, source="x.yaml")
    return [str(problem) for problem in caught.value.problems]


def only_problem(text: str, overrides=()) -> str:
    listed = problems(text, overrides)
    assert len(listed) == 1, listed
    return listed[0]


@pytest.mark.parametrize(
    "more, message",
    [
        ("fp8: {recpie: off}", "x.yaml:4: fp8.recpie: unknown key; did you mean `recipe`?"),
        ("fp8: {Image-Encoder: {}}", "x.yaml:4: fp8.Image-Encoder: unknown key; did you mean `image_encoder`?"),
        ("modle: {}", "x.yaml:4: modle: unknown key; did you mean `model`?"),
        ("fp8: {lr: 1}", "x.yaml:4: fp8.lr: unknown key; did you mean `train.lr`?"),
        ("learning_rate: 1", "x.yaml:4: learning_rate: unknown key; did you mean `train.lr`?"),
        (
            "zzz: 1",
            "valid here: preset, model, fp8, lora, data, train, rl, preference, optimizer, parallel, run, extends",
        ),
        ("fp8: {recipe: blokwise}", "x.yaml:4: fp8.recipe: found 'blokwise'; did you mean blockwise? one of off, tens"),
        ("fp8: {recipe: false}", "x.yaml:4: fp8.recipe: found false (a boolean); write `off`"),
        ("fp8: {recipe: }", "fp8.recipe: found nothing (null); one of off, tensorwise"),
        ("fp8:", "x.yaml:4: fp8: expected a mapping, found nothing (null); remove the line for the defaults"),
        ("fp8: {foundation: rowwise}", "fp8.foundation: expected a mapping, found 'rowwise'; write {recipe: rowwise}"),
        ("fp8: {image_projector: false}", "found false (a boolean); write {recipe: off}"),
        ("fp8: {param: 'yes'}", "fp8.param: expected true or false, found 'yes'; write true"),
        ("fp8: {backend: 3}", 'fp8.backend: expected text, found 3; put it in quotes: "3"'),
        (
            "fp8:\n  rules:\n    - match: a\n      recipe: of",
            "x.yaml:7: fp8.rules.0.recipe: found 'of'; did you mean off?",
        ),
        ("fp8: {rules: {match: a, recipe: off}}", "fp8.rules: expected a list, found a mapping; write `- ` before it"),
        (
            "fp8: {rules: [a]}",
            "x.yaml:4: fp8.rules.0: expected a mapping, found 'a'; write {match: \"a\", recipe: off}",
        ),
        ("fp8: {rules: [{recipe: off}]}", "fp8.rules.0.match: required, but absent; add `match:` under `fp8.rules.0`"),
        ("optimizer: {betas: [0.9]}", "optimizer.betas: expected 2 values, found a list of 1"),
        ("optimizer: {betas: [0.9, 0.9, 1]}", "optimizer.betas: expected 2 values, found a list of 3"),
        ("optimizer: {betas: [0.9, 1.0]}", "optimizer.betas.1: must be below 1, found 1.0"),
        ("optimizer: {betas: 0.9}", "optimizer.betas: expected a list, found 0.9; write [0.9, 0.95]"),
        ("optimizer: {eps: '1e-8'}", "optimizer.eps: expected a number, found '1e-8'; write 1e-8 without quotes"),
        ("optimizer: {eps: 0}", "optimizer.eps: must be above 0, found 0"),
        ("optimizer: {eps: .inf}", "optimizer.eps: expected a finite number, found inf"),
        ("run: {keep: 2.0}", "run.keep: expected a whole number, found 2.0; write 2"),
        ("run: {keep: 2.5}", "run.keep: expected a whole number, found 2.5"),
        ("run: {keep: true}", "run.keep: expected a whole number, found true (a boolean)"),
        ("run: {keep: }", "run.keep: expected a whole number, found nothing (null); remove the line for the default"),
        ("run: {seed: -1}", "run.seed: must be at least 0, found -1"),
        ("run: {dir: ''}", "run.dir: must not be empty"),
        ("run: [1]", "run: expected a mapping, found a list of 1"),
        ("run: {seed: 99999999999999999999}", "run.seed: must be at most 9223372036854775807"),
    ],
)
def test_wrong_value_is_reported(more, message):
    assert message in only_problem(BASE + more + "\n")


def test_missing_sections_and_keys_are_reported():
    found = problems("fp8: {recipe: off}\n")
    assert found[0] == "x.yaml: model: required, but absent; add `model:` with at least path under it"
    assert len(found) == 3
    found = problems("model: {}\ndata: {train: []}\ntrain:\n  lr: 1\n")
    assert "x.yaml:1: model.path: required, but absent; add `path:` under `model` (Folder of a Hugging Face" in found[0]
    assert "x.yaml:2: data.train: must not be empty; set train (Data sets to train on)" in found[1]
    assert "x.yaml:3: train.steps: required, but absent; add `steps:` or `epochs:` under `train`" in found[2]
    assert (
        problems("model:\n")[2] == "x.yaml:1: model: expected a mapping, found nothing (null); indent its keys under it"
    )


@pytest.mark.parametrize(
    "text, message",
    [
        ("", "x.yaml: the file is empty; write at least `model`, `data` and `train`"),
        ("# only a comment\n", "the file is empty"),
        ("- a\n- b\n", "x.yaml:1: the top level of the file is a list; write a mapping"),
        ("just text\n", "the top level of the file is a single value"),
        ("model:\n\tpath: x\n", "x.yaml:2: a tab is used for indentation; indent with spaces"),
        ("model: {path: x\n", "x.yaml:"),
        ("a: 1\n b: 2\n", "x.yaml:2: a `:` where no key is allowed"),
        ("a: 1\nb\n", "x.yaml:2: a line without `:`; write `key: value`"),
        ("a: **.layers\n", "(an unquoted * begins an alias); put a glob in quotes"),
        ("a: 1\n---\nb: 2\n", "x.yaml:2: a second document begins (---); keep one document per file"),
        ("a: \x01\n", "x.yaml:1: the character '\\x01' is not allowed in YAML"),
        ("[" * 1000, "cannot be read as YAML"),
    ],
)  # fmt: skip
def test_text_that_is_not_a_mapping_is_rejected(text, message):
    assert message in only_problem(text)


def test_duplicate_keys_and_tags_are_reported_with_other_problems():
    found = problems(
        BASE + "train:\n  lr: 1\nrun: {seed: 1, seed: 2}\n"
        "fp8: {backend: !!python/name:os.system x, rules: !!set {a}}\n1: 2\n? [a]\n: 3\nstes: 4\n"
    )
    text = "\n".join(found)
    assert "x.yaml:4: train: the key appears twice (first on line 3); keep one" in text
    assert "x.yaml:6: run.seed: the key appears twice (first on line 6); keep one" in text
    assert "x.yaml:7: fp8.backend: the tag !!python/name:os.system is not used here" in text
    assert "fp8.rules: the tag !!set is not used here" in text
    assert "x.yaml:8: 1: a key must be a word" in text
    assert "stes: unknown key" in text


def test_looping_and_exploding_aliases_are_rejected():
    assert "an alias refers to a value that contains it" in "\n".join(problems(BASE + "fp8: {rules: &r [*r]}\n"))
    bomb = "a0: &a0 [x,x,x,x,x,x,x,x,x,x]\n" + "".join(
        f"a{i}: &a{i} [{','.join([f'*a{i - 1}'] * 10)}]\n" for i in range(1, 9)
    )
    assert "more than 10,000 values" in only_problem(bomb)
    assert "`<<` merges mappings only" in "\n".join(problems(BASE + "fp8: {<<: 3}\n"))


@pytest.mark.parametrize(
    "override, message",
    [
        ("train.stpes=3", "override `train.stpes=3`: train.stpes: unknown key; did you mean `steps`?"),
        ("trian.steps=3", "override `trian.steps=3`: trian: unknown key; did you mean `train`?"),
        ("train.steps=ten", "override `train.steps=ten`: train.steps: expected a whole number, found 'ten'"),
        ("train.steps.x=1", "`train.steps` is 10 and has no keys; set `train.steps` itself"),
        ("data.train.3.path=x", "data.train: has one entry, 0; found `3`; name one of them, or set the whole list"),
        ("data.train.first.path=x", "data.train: has one entry, 0; found `first`"),
        ("data.eval.0.path=x", "data.eval: there is no list here, so no entry 0; set the whole list: data.eval=[...]"),
        ("train.0=x", "there is no list at `train`"),
        ("foo", "override `foo`: not of the form key=value; write key=value"),
        ("other.yaml", "name one FILE.yaml; use `extends:` in the file to merge another one"),
        ("=3", "not of the form key=value"),
        ("a..b=3", "not of the form key=value"),
        ("extends=b.yaml", "extends: an override cannot extend files; write it in the file"),
        ("model.freeze=[a", "model.freeze: the value is not YAML: expected ',' or ']'"),
        ("model.freeze=[**.a]", "put a glob in quotes"),
        ("run.resume=atuo", "'atuo' is neither never, auto nor a path; did you mean auto? a path has a slash: ./atuo"),
        ("run.resume=", "run.resume: expected text, found nothing (null)"),
        (
            "fp8={param: true, weight_codes: recast}",
            "fp8.weight_codes: recast keeps no codes between uses, and param keeps weights as codes between steps",
        ),
        (
            "fp8={weight_codes: recast, foundation: {param: true}, image_encoder: {param: true}}",
            "fp8.weight_codes: recast keeps no codes between uses, and param keeps weights as codes between steps",
        ),
        (
            "train={cuda_graphs: true, compile: true}",
            "train.cuda_graphs: compiled blocks are not captured yet; use `train",
        ),
        ("train={cuda_graphs: true, recompute: full}", "train.cuda_graphs: recomputation reads the state of"),
        ("train={cuda_graphs: true, offload_activations: true}", "train.cuda_graphs: activations go to the host; use"),
        ("train={cuda_graphs: true, synchronize_per_layer: true}", "it would wait after every block; use `train.sync"),
        ("fp8={recipe: off, param: true}", "fp8.param: has no effect where nothing runs in FP8; remove it, or set"),
        (
            "fp8={param: true, weight_codes: both}",
            "fp8.weight_codes: both keeps codes in addition to weights, and param keeps weights as codes between steps",
        ),
        ("fp8={recipe: off, weight_codes: recast}", "fp8.weight_codes: has no effect where nothing runs in FP8"),
        ("fp8={recipe: off, weight_codes: both}", "fp8.weight_codes: has no effect where nothing runs in FP8"),
        (
            "fp8={recipe: off, image_projector: {param: true}}",
            "fp8.image_projector.param: has no effect where the recipe is off; remove it, or",
        ),
        ("fp8.foundation=fp8", "fp8.foundation: expected a mapping, found 'fp8'; write {recipe: blockwise}"),
        ("train.recompute=ful", "expected a word or a mapping, found 'ful'; did you mean full? use none, selective or"),
        (
            "fp8={recipe: mxfp8, format: hybrid}",
            "override `fp8={recipe: mxfp8, format: hybrid}`: fp8.format: mxfp8 has no",
        ),
    ],
)
def test_wrong_override_is_named(override, message):
    assert message in only_problem(BASE, [override])


@pytest.mark.parametrize(
    "fp8",
    [
        "{recipe: off, param: true, rules: [{match: '**.layers.0.**', recipe: rowwise}]}",
        "{recipe: off, param: true, image_projector: {recipe: blockwise}}",
        "{image_projector: {param: true, recipe: blockwise}}",
        "{recipe: blockwise, weight_codes: recast, foundation: {param: true}}",
        "{weight_codes: recast, param: true, foundation: {param: false}}",
    ],
)
def test_components_may_differ_in_param(fp8):
    load_config_text(BASE + f"fp8: {fp8}\n", source="x.yaml")


@pytest.mark.parametrize(
    "more, message",
    [
        ("fp8: {param: 1}", "x.yaml:4: fp8.param: expected true or false, found 1"),
        (
            "fp8: {foundation: {param: true, recipe: off}}",
            "fp8.foundation.param: has no effect where",
        ),
        ("fp8: {weight_codes: kep}", "x.yaml:4: fp8.weight_codes: found 'kep'; did you mean keep? one of keep, recast"),
        ("fp8: {plan: p.json, activations: fp8}", "fp8.activations: has no effect with fp8.plan"),
        (
            "fp8: {plan: p.json, recipe: off}",
            "fp8.plan: a plan file is set, and the recipe is off; remove one of them",
        ),
        ("fp8: {plan: p.json, rules: [{match: a, recipe: off}]}", "fp8.rules: has no effect with fp8.plan"),
        ("fp8: {plan: p.json, recipe: rowwise}", "x.yaml:4: fp8.recipe: has no effect with fp8.plan"),
        ("fp8: {plan: p.json, recipe: blockwise}", "x.yaml:4: fp8.recipe: has no effect with fp8.plan"),
        (
            "fp8: {recipe: aut}",
            f"fp8.recipe: found 'aut'; did you mean auto? one of off, {', '.join(recipe_specs.NAMES)}, auto",
        ),
        ("fp8: {plan: p.json, fuse: on}", "fp8.fuse: has no effect with fp8.plan"),
        ("fp8: {fuse: maybe}", "x.yaml:4: fp8.fuse: found 'maybe'; one of off, on, auto"),
        ("fp8: {plan: p.json, foundation: {recipe: auto}}", "fp8.foundation: has no effect with fp8.plan"),
        ("fp8: {recipe: auto, candidates: [off]}", "fp8.candidates.0: found 'off'; one of tensorwise"),
        ("fp8: {recipe: auto, candidates: []}", "fp8.candidates: "),
        ("fp8: {activations: fp9}", "fp8.activations: found 'fp9'; did you mean fp8? one of bf16, fp8"),
        (
            "optimizer: {states: fp16}",
            "optimizer.states: found 'fp16'; did you mean bf16 (16 bits are BF16 here)? one of fp32, bf16, fp8, coat",
        ),
        ("optimizer: {master: bf16}", "optimizer.master: found 'bf16'; "),
        ("fp8: {recipe: mxfp8, format: hybrid}", "fp8.format: mxfp8 has no hybrid format"),
        (
            "fp8: {format: hybrid, foundation: {recipe: mxfp8}}",
            "fp8.foundation.recipe: mxfp8 has no hybrid format, whi",
        ),
        (
            "fp8: {recipe: mxfp8, rules: [{match: a, format: hybrid}]}",
            "fp8.rules.0.format: mxfp8, inherited from fp8.rec",
        ),
        ("fp8: {foundation: {recipe: mxfp8, format: hybrid}}", "fp8.foundation.format: mxfp8 has no hybrid format"),
        ("fp8: {fwd: bf16, dgrad: bf16, wgrad: bf16}", "fp8.wgrad: fwd, dgrad and wgrad are all bf16"),
        ("fp8: {foundation: {recipe: rowwise, fwd: bf16, dgrad: bf16, wgrad: bf16}}", "fp8.foundation.wgrad: fwd, dgr"),
        (
            "fp8: {foundation: {recipe: off, format: e4m3}}",
            "fp8.foundation.format: has no effect where the recipe is off",
        ),
        ("fp8: {rules: [{match: a}]}", "fp8.rules.0: the rule changes nothing"),
        (
            "fp8: {rules: [{match: a..b, recipe: off}]}",
            "fp8.rules.0.match: 'a..b' is not a glob over module names: it ha",
        ),
        ("fp8: {rules: [{match: '**a.b', recipe: off}]}", "** must be a whole segment, not part of `**a`"),
        ("fp8: {rules: [{match: 'a/b', recipe: off}]}", "joined by dots, not slashes"),
        ("fp8: {rules: [{match: '.*q_proj$', recipe: off}]}", "it is not a regular expression"),
        ("fp8: {rules: [{match: 'a b', recipe: off}]}", "module names have no spaces"),
        ("run: {eval_every: 5}", "run.eval_every: there is nothing to evaluate on: data.eval is empty"),
        ("run: {resume: ''}", "run.resume: is empty; use never, auto or the path of a checkpoint"),
        (
            "parallel: {expert: 2}\nlora: {rank: 4}",
            "parallel.expert: expert parallelism is not supported with adapters",
        ),
    ],
)
def test_conflicting_settings_are_rejected(more, message):
    assert any(message in found for found in problems(BASE + more + "\n")), problems(BASE + more + "\n")


@pytest.mark.parametrize(
    ("data", "train", "message"),
    [
        ("mask_reasoning: true, train_on_prompt: true", "", "data.mask_reasoning: all text has loss"),
        ("mask_reasoning: true", ", phase: pretrain", "data.mask_reasoning: all text has loss, including reasoning"),
        ("split_turns: true", ", phase: pretrain", "data.split_turns: phase pretrain does not split conversations"),
        ("split_turns: true, train_on_prompt: true", "", "data.split_turns: the turns before a question would be"),
        ("template_args: [enable_thinking]", "", "data.template_args: expected a mapping, found a list of 1"),
        ("template_args: {2: true}", "", "data.template_args"),
    ],
)  # fmt: skip
def test_conflicting_reasoning_settings_are_rejected(data, train, message):
    found = problems(f"model: {{path: m}}\ndata: {{train: [{{path: a}}], {data}}}\ntrain: {{steps: 1{train}}}\n")
    assert any(message in only_problem for only_problem in found), found


def test_conflicting_pixel_limits_are_rejected():
    wrong = BASE.replace("a.json}]", "a.json}], min_pixels: 9, max_pixels: 8")
    assert (
        only_problem(wrong)
        == "x.yaml:2: data.min_pixels: min_pixels 9 is above max_pixels 8; lower it or raise data.max_pixels"
    )


@pytest.mark.parametrize(
    "train, message",
    [
        ("{steps: 10, global_batch: 7, micro_batch: 2}", "a multiple of micro_batch 2; use e.g. micro_batch 1 or"),
        ("{steps: 10}\nfp8: {lm_head: {recipe: mxfp8, format: hybrid}}", "fp8.lm_head.format: mxfp8 has no hybrid"),
        ("{steps: 10}\nfp8: {lm_head: {wgrad: bf16}}", "fp8.lm_head.wgrad: has no effect where the recipe is off"),
        ("{steps: 10}\nfp8: {plan: p.json, lm_head: {recipe: rowwise}}", "fp8.lm_head: has no effect with fp8.plan"),
        ("{steps: 10, compile: true}\nfp8: {activations: fp8}", "fp8.activations: in compiled blocks the"),
        (
            "{steps: 10, compile: true}\nfp8: {foundation: {activations: fp8}}",
            "fp8.foundation.activations: in compiled blocks",
        ),
        ("{steps: 10, precision: fp32}\noptimizer: {master: bf16+sr}", "train.precision: master bf16+sr makes a BF16"),
        (
            "{steps: 10, recompute: full, offload_activations: true}",
            "train.offload_activations: has almost nothing to move where every block is recomputed in full",
        ),
        ("{steps: 10, precision: fp16}\noptimizer: {master: bf16+16}", "BF16 model, which does not compute in fp16"),
        ("{steps: 10, precision: fp16}\nlora: {}", "train.precision: the base of LoRA is BF16, and adapters compute"),
        ("{steps: 10, precision: fp16, gather: bf16}", "weights that are gathered in BF16 cannot compute in fp16"),
        (
            "{steps: 10, precision: fp16, clip: 0}\noptimizer: {update: backward}",
            "optimizer.update: an FP16 overflow would be detected after other weights of the step were updated",
        ),
        (
            "{steps: 10, loss_scale: 1024}",
            "train.loss_scale: only FP16, whose range is 6e-8 to 65504, needs a loss scale; BF16 has the range of fp32",
        ),
        ("{steps: 10, precision: bf16, loss_scale: dynamic}", "train.loss_scale: only FP16, whose range is"),
        (
            "{steps: 10, precision: fp16, loss_scale: 1000}",
            "train.loss_scale: 1000 is not a power of two, and would round every gradient; use 512 or 1024, or dynamic",
        ),
        ("{steps: 10, precision: fp16, loss_scale: 0}", "train.loss_scale: must be at least 1, found 0"),
        ("{steps: 10, precision: fp16, loss_scale: up}", "loss_scale: expected dynamic or a whole number, found 'up'"),
        ("{steps: 10}\nparallel: {shard: all}", "parallel.shard: expected auto or a whole number, found 'all'"),
        ("{steps: 10, gather: bf16, precision: fp32}", "train.gather: weights that are gathered in BF16 cannot"),
        ("{steps: 10, gather: bf16}\noptimizer: {master: bf16+16}", "train.gather: has no effect: with master bf16+16"),
        ("{steps: 10, gather: bf16}\nlora: {}", "train.gather: adapters are gathered as stored"),
        ("{steps: 10, warmup: 10}", "train.warmup: warmup 10 takes all of 10 steps; use at most 9"),
        ("{steps: 10, lr: 1e-5, min_lr: 1e-4}", "train.min_lr: min_lr 0.0001 is above lr 1e-05"),
        ("{steps: 10, schedule: constant, min_lr: 1e-6}", "train.min_lr: has no effect on a constant schedule"),
        ("{steps: 0}", "train.steps: must be at least 1, found 0"),
        ("{lr: 1}", "train.steps: required, but absent; add `steps:` or `epochs:` under `train`"),
        ("{epochs: 0}", "train.epochs: must be above 0, found 0"),
        ("{steps: 10, epochs: 2}", "train.epochs: 2 epochs and 10 steps both set the length of the run"),
    ],
)  # fmt: skip
def test_conflicting_step_settings_are_rejected(train, message):
    assert message in only_problem(f"model: {{path: m}}\ndata: {{train: [{{path: a}}]}}\ntrain: {train}\n")


@pytest.mark.parametrize(
    "train, more, message",
    [
        (
            "micro_batch: 2",
            "",
            "train.micro_batch: a micro-batch is one pack, and micro_batch is 2 (data.packing: true); use 1",
        ),
        ("compile: true", "", "train.compile: the boundaries of samples differ in every pack, which"),
        (
            "cuda_graphs: true",
            "",
            "train.cuda_graphs: the boundaries of samples differ in every pack, and a graph",
        ),
        (
            "phase: preference",
            "",
            "data.packing: phase preference does not pack rows: the two answers of a pair are rows of",
        ),
        (
            "phase: rl",
            "rl: {rewards: [exact_match]}",
            "data.packing: phase rl does not pack rows: completions are rows of one",
        ),
        (
            "",
            "model: {path: ./m, attention: eager}",
            "model.attention: it separates samples only by a mask of T x T",
        ),
        (
            "",
            "model: {path: ./m, attention: auto}",
            "model.attention: kernels are timed on rows of one sample (data.pa",
        ),
    ],
)
def test_settings_that_conflict_with_packing_are_rejected(train, more, message):
    model = more if more.startswith("model") else "model: {path: ./m}"
    more = more if more != model else ""
    text = f"{model}\ndata: {{train: [{{path: a.json}}], packing: true}}\ntrain: {{steps: 10, {train}}}\n{more}\n"
    assert message in only_problem(text)


def test_packing_rejects_epochs_of_streams_and_window_requires_packing():
    data = "model: {path: ./m}\ndata: {train: [{path: a.json}], packing: true, window: 64}\n"
    streamed = data.replace("a.json", "a.jsonl, stream: true") + "train: {epochs: 1}\n"
    assert "train.epochs: packs are counted before the first step, and data.train.0 is streamed" in only_problem(
        streamed
    )
    assert load_config_text(data + "train: {epochs: 1}\n").train.epochs == 1
    found = only_problem(data.replace("packing: true, ", "") + "train: {steps: 10}\n")
    assert "data.window: has no effect without packing; remove it, or set packing: true" in found


@pytest.mark.parametrize(
    "attention, train, message",
    [
        ("flsh", "", "model.attention: expected a word or a mapping, found 'flsh'; did you mean flash?"),
        ("{foundation: mth}", "", "model.attention.foundation: found 'mth'; did you mean math? one of auto, sdpa"),
        ("{vision: math}", "", "model.attention.vision: unknown key"),
        ("varlen", "", "model.attention: varlen is for rows of several samples, and without packing rows are padded"),
        ("flex", "", "model.attention: flex is for rows of several samples, and without packing rows are padded"),
        ("{image_encoder: flex}", "", "model.attention.image_encoder: flex works only for the language model's packs"),
        (
            "{image_encoder: varlen}",
            "precision: fp32",
            "model.attention: varlen computes in 16 bits, and train.precision",
        ),
    ],
)
def test_attention_accepts_a_word_or_a_mapping(attention, train, message):
    base = BASE.replace("./m", f"./m, attention: {attention}")
    assert message in only_problem(base.replace("steps: 10", f"steps: 10, {train}" if train else "steps: 10"))


@pytest.mark.parametrize(
    "freeze, message",
    [
        ("[image_encodr]", "model.freeze.0: unknown component 'image_encodr'; did you mean image_encoder?"),
        ("['a.[bc']", "model.freeze.0: 'a.[bc' is neither a component nor a glob"),
        ("image_encoder", "model.freeze: expected a list, found 'image_encoder'; write [image_encoder]"),
        ("['']", "it is empty"),
    ],
)
def test_freeze(freeze, message):
    assert message in only_problem(BASE.replace("./m", f"./m, freeze: {freeze}"))


def test_all_problems_are_reported_in_file_order(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "base.yaml").write_text("model: {path: m, frezee: []}\n\ntrain: {steps: 5, warmup: 9}\n")
    (tmp_path / "run.yaml").write_text(
        "extends: base.yaml\ndata:\n  train: []\nfp8: {recipe: of}\nrun: {seed: 1, seed: 2}\n"
    )
    with pytest.raises(ConfigError) as caught:
        load_config("run.yaml", ["run.kep=1", "train.clip=-1"])
    lines = str(caught.value).splitlines()
    assert lines[0] == "7 problems in the configuration:"
    assert [line.split(": ")[:2] for line in lines[1:]] == [
        ["  base.yaml:1", "model.frezee"],
        ["  base.yaml:3", "train.warmup"],
        ["  run.yaml:3", "data.train"],
        ["  run.yaml:4", "fp8.recipe"],
        ["  run.yaml:5", "run.seed"],
        ["  override `run.kep=1`", "run.kep"],
        ["  override `train.clip=-1`", "train.clip"],
    ]


def test_rules_are_checked_despite_wrong_keys():
    found = problems(
        BASE + "fp8:\n  rules:\n    - {match: '**x', recipe: of}\n    - {match: a}\nrun: {eval_every: 1, x: 1}\n"
    )
    assert [f.split(": ")[1] for f in found] == [
        "fp8.rules.0.match",
        "fp8.rules.0.recipe",
        "fp8.rules.1",
        "run.eval_every",
        "run.x",
    ]


def test_unreadable_files_are_reported(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "sft.yaml").write_text(BASE)
    (tmp_path / "latin.yaml").write_bytes("# é".encode("latin-1"))
    (tmp_path / "bom.yaml").write_bytes(b"\xef\xbb\xbf" + BASE.encode())
    load_config("bom.yaml")
    for name, message in {
        "stf.yaml": "stf.yaml: there is no file stf.yaml; did you mean sft.yaml?",
        "12345.yml": "the folder has bom.yaml, latin.yaml, sft.yaml",
        "no/x.yaml": "there is no folder no either",
        ".": ". is a folder, not a file",
        "latin.yaml": "latin.yaml is not UTF-8 text",
    }.items():
        with pytest.raises(ConfigError) as caught:
            load_config(name)
        assert message in str(caught.value)


def test_file_without_permission_is_reported(tmp_path, monkeypatch):
    def refused(*arguments):  # root could read it
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("os.open", refused)
    with pytest.raises(ConfigError, match="x.yaml cannot be read: Permission denied"):
        load_config(tmp_path / "x.yaml")


def test_invalid_extends_are_reported(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.yaml").write_text("x: 1\nextends: b.yaml\n")
    (tmp_path / "b.yaml").write_text("extends: [c.yaml]\n")
    (tmp_path / "c.yaml").write_text("extends: a.yaml\n")
    (tmp_path / "self.yaml").write_text("extends: self.yaml\n")
    (tmp_path / "lost.yaml").write_text("\nextends: bb.yaml\n")
    (tmp_path / "number.yaml").write_text("extends: 3\n" + BASE)
    (tmp_path / "empty.yaml").write_text("extends: []\n" + BASE)
    for name, message in {
        "a.yaml": "c.yaml:1: extends: the files extend each other (a.yaml -> b.yaml -> c.yaml -> a.yaml); remove one",
        "self.yaml": "self.yaml:1: extends: the files extend each other (self.yaml -> self.yaml)",
        "lost.yaml": "lost.yaml:2: extends: there is no file bb.yaml; did you mean b.yaml?",
        "number.yaml": "number.yaml:1: extends: expected a file name or a list of them, found 3; write `ext",
        "empty.yaml": "found an empty list",
    }.items():
        with pytest.raises(ConfigError) as caught:
            load_config(name)
        assert message in str(caught.value)


def test_consequential_errors_are_not_reported(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "list.yaml").write_text(
        "model: {path: m}\ndata: {train: [{path: x, weight: .nan}]}\ntrain: {steps: 1}\n"
    )
    with pytest.raises(ConfigError, match=r"data\.train\.0\.weight") as caught:
        load_config("list.yaml")
    assert len(caught.value.problems) == 1
    (tmp_path / "half.yaml").write_text("extends: [list.yaml, 3]\nrun: {seed: 1}\n")
    with pytest.raises(ConfigError, match="half.yaml:1: extends: expected a file name") as caught:
        load_config("half.yaml")
    assert len(caught.value.problems) == 1


def test_diamond_of_extends_is_not_a_cycle(tmp_path):
    (tmp_path / "root.yaml").write_text(BASE)
    (tmp_path / "left.yaml").write_text("extends: root.yaml\nrun: {seed: 1}\n")
    (tmp_path / "right.yaml").write_text("extends: root.yaml\nrun: {keep: 7}\n")
    (tmp_path / "top.yaml").write_text("extends: [left.yaml, right.yaml]\n")
    cfg = load_config(tmp_path / "top.yaml")
    assert (cfg.run.seed, cfg.run.keep) == (1, 7)


def test_nearest_suggests_similar_names():
    assert nearest("blokwise", ["blockwise", "rowwise"]) == "blockwise"
    assert nearest("BLOCK-WISE", ["blockwise"]) == "blockwise"
    assert nearest("zzz", ["blockwise"]) is None


# --- words of other trainers ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (
            "preference: {loss: dpo}",
            "preference.loss: found 'dpo'; did you mean sigmoid (DPO's own loss)? one of sigmoid",
        ),
        ("preference: {loss: kto_pair}", "did you mean kto (pairs become"),
        ("preference: {loss: sigmoyd}", "did you mean sigmoid? one of"),
        ("rl: {algorithm: ppo2}", "did you mean ppo (with a critic)?"),
        ("rl: {num_generations: 8}", "rl.num_generations: unknown key; did you mean `rl.group` (completions for one"),
        ("rl: {max_completion_length: 8}", "did you mean `rl.max_new_tokens`?"),
        ("fp8: {vision_tower: {recipe: off}}", "did you mean `image_encoder` (components have one name each)?"),
        ("fp8: {image_encoder: {recipe: per_token}}", "did you mean rowwise (one scale a row)?"),
        ("rl: {epsilon_high: 0.3}", "did you mean `rl.clip_high`?"),
        ("rl: {beta: 0.1}", "did you mean `rl.kl` (the weight of the KL term)?"),
        ("rl: {algorithm: reinforce++}", "did you mean grpo (with rl.advantage: batch)?"),
        ("optimizer: {epsilon: 1e-8}", "did you mean `optimizer.eps`?"),
        ("parallel: {stage: 3}", "did you mean `parallel.shard` (sharding"),
        ("lora: {targets: [language_model]}", "did you mean foundation?"),
        ("fp8: {recipe: per_token}", "did you mean rowwise (one scale a row)?"),
        ("num_train_epochs: 3", "did you mean `train.epochs`?"),
        ("per_device_train_batch_size: 3", "did you mean `train.micro_batch` (samples of one GPU at a time)?"),
        ("optimizer: {states: adamw_8bit}", "did you mean fp8 (8 bits with scales of groups)?"),
    ],
)
def test_words_of_other_trainers_are_translated_with_the_reason(lines: str, message: str) -> None:
    assert any(message in problem for problem in problems(f"{BASE}{lines}\n"))


def test_objectives_are_not_guessed_by_spelling() -> None:
    """A near word would train something else."""
    for phase, meant in (("dpo", "preference"), ("grpo", "rl"), ("cpt", "pretrain")):
        text = BASE.replace("train: {steps", f"train: {{phase: {phase}, steps")
        assert f"did you mean {meant} (" in only_problem(text)
    for lines in ("preference: {loss: epo}", "preference: {loss: cpo}", "rl: {algorithm: gppo}"):
        (unknown,) = (problem for problem in problems(f"{BASE}{lines}\n") if "one of" in problem)
        assert "did you mean" not in unknown


def test_components_have_their_usual_names_in_freeze_with_other_problems() -> None:
    text = BASE.replace("{path: ./m}", "{path: ./m, freeze: [vision_tower, llm]}") + "fp8: {recipee: off}\n"
    with pytest.raises(ConfigError) as caught:
        load_config_text(text)
    message = str(caught.value)
    assert "did you mean image_encoder?" in message and "did you mean foundation?" in message and "recipee" in message


def test_translations_name_keys_and_values_that_exist() -> None:
    for word, (key, _) in foreign_words.KEYS.items():
        section, _, name = key.partition(":")[0].rpartition(".")
        assert name in error_texts._fields(tuple(section.split("."))), (word, key)
    for (section, word), (key, _) in foreign_words.IN_SECTION.items():
        assert key.split(".")[1] in error_texts._fields((key.split(".")[0],)) and word not in error_texts._fields(
            (section,)
        )
    for path, words in foreign_words.VALUES.items():
        options = set(error_texts._options(path))
        if path == ("rl", "rewards"):  # built-in names, and the key of a penalty that others list as a reward
            options = {*BUILT_IN, *(f"rl.{name}" for name in error_texts._fields(("rl",)))}
        if path in foreign_words.OBJECTIVES:  # an objective of another phase has another key
            options |= {"preference.loss", "rl.algorithm"}
        if path == ("fp8", "recipe"):
            options |= {"fp8.format"}
        assert {value for value, _ in words.values()} <= options
        assert not words.keys() & options, "a word that is valid needs no translation"
    assert {("train", "loss"), *foreign_words.VALUES} >= foreign_words.OBJECTIVES
