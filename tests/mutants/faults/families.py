"""Faults of what a model is described as."""

from faults.fault import area

area(
    "families",
    (
        "families-width-in-the-tower", "models/structure.py",
        "into not in widths and _puts_out(child) == into", "_puts_out(child) == into",
        "of a tower as wide as its decoder, any child is taken for the projector",
        "models/test_families.py",
    ),
    (
        "families-single-parameters", "models/structure.py",
        "own = (root,) if root and", "own = () if root and",
        "single parameters of a module in parts belong to nothing",
        "models/test_families.py",
    ),
    (
        "families-second-tower", "models/structure.py",
        "if word in last)", "if word == last)",
        "a second tower passes for a projector",
        "models/test_families.py",
    ),
    (
        "families-sound-in-the-projector", "models/structure.py",
        'if not sees or _of_sound(glob) == (of == "audio")]', 'if not sees or of == "image"]',
        "what leads from an audio tower is the projector's too",
        "models/test_families.py",
    ),
    (
        "sounds-of-one-token", "models/hearing.py",
        "LEAST = 2", "LEAST = 1",
        "a sound of one token goes to the model, which takes it for a placeholder of the old form",
        "data/test_sounds.py",
    ),
    (
        "sounds-beyond-the-window", "data/sounds.py",
        "<= file.frames <= limits.longest", "<= file.frames",
        "a sound that is too long is cut by the stock processor, without a word",
        "data/test_sounds.py",
    ),
    (
        "plan-padding-of-one-side", "fp8/policy/padding.py",
        'contracted = int(name == "fwd")', 'contracted = int(name == "dgrad")',
        "forward and dgrad are said to contract each other's side",
        "fp8/policy/test_padding.py",
    ),
    (
        "images-idle-experts", "models/dummy.py",
        "if self.called:", "if self.called or True:",
        "experts that images alone reach have no gradient where there is no image",
        "models/test_dummy.py",
    ),
    (
        "images-of-one-feature", "models/single.py",
        "if len(features) == 1 else None", "if len(features) == 0 else None",
        "an image of one feature, alone in its batch, ends Mistral 3's forward",
        "data/test_inputs.py",
    ),
    (
        "images-alone-come-first", "parallel/images.py",
        "own.sort(key=lambda n: not alone[n])", "own.sort()",
        "a tower that is told how many images a row has cuts others than those that are alone",
        "parallel/test_context_models.py",
    ),
    (
        "plan-kinds-of-tokens", "train/memory_plan/micro_batch.py",
        '_KINDS = ("mm_token_type_ids", "token_type_ids", "moe_mm_token_type_ids")', '_KINDS = ("mm_token_type_ids",)',
        "a forward without values attends without Gemma's mask and runs no experts for images",
        "train/memory_plan/test_predicted.py",
    ),
)  # fmt: skip
