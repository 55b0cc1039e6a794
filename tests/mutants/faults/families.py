"""Faults of what a model is described as."""

from faults.fault import area

area(
    "families",
    (
        "families-width-in-the-tower", "models/structure/structure.py",
        "decoder_width not in widths and _output_width(child) ==", "_output_width(child) ==",
        "of a tower as wide as its decoder, any child is taken for the projector",
        "models/test_describe.py",
    ),
    (
        "families-single-parameters", "models/structure/structure.py",
        "itself = (root,) if root and", "itself = () if root and",
        "single parameters of a module in parts belong to nothing",
        "models/test_describe.py",
    ),
    (
        "families-second-tower", "models/structure/structure.py",
        "if word in last)", "if word == last)",
        "a second tower passes for a projector",
        "models/test_describe.py",
    ),
    (
        "families-sound-in-the-projector", "models/structure/structure.py",
        'if not takes_images or _is_audio(glob) == (kind == "audio")]', 'if not takes_images or kind == "image"]',
        "what leads from an audio tower is the projector's too",
        "models/test_describe.py",
    ),
    (
        "sounds-positions-trained", "models/weights/loading.py",
        "if not parameter.requires_grad]", "if parameter.grad is not None]",
        "one rank trains a tower's table of sinusoids, and several do not",
        "models/test_loading.py",
    ),
    (
        "sounds-of-one-token", "models/structure/audio_shapes.py",
        "MIN_TOKENS = 2", "MIN_TOKENS = 1",
        "a sound of one token goes to the model, which takes it for a placeholder of the old form",
        "data/test_audio.py",
    ),
    (
        "sounds-beyond-the-window", "data/encoding/audio.py",
        "<= length <= limits.longest", "<= length",
        "a sound that is too long is cut by the stock processor, without a word",
        "data/test_audio.py",
    ),
    (
        "sounds-cut-short", "data/encoding/audio.py",
        "return max(0, start + size - file.seek(0, SEEK_END)) if size < UNKNOWN else 0", "return 0",
        "of a WAV that was not copied whole the part that is there is learned",
        "data/test_audio.py",
    ),
    (
        "sounds-dropped-in-prompts", "data/formats/media_kinds.py",
        "*SOUND.keys, *VIDEO.keys)", "*VIDEO.keys)",
        "a sound of a row with prompt and answer is dropped, and the word for its place is learned",
        "data/test_audio.py",
    ),
    (
        "sounds-unnamed", "data/encoding/encode.py",
        "if self.calls.sound_limits is not None and any(SOUND in text", "if any(SOUND in text[:0]",
        "a model that hears learns the word for the place of a sound that nobody named",
        "data/test_audio.py",
    ),
    (
        "sounds-by-every-third-sample", "data/encoding/audio.py",
        'resampled = soxr.resample(samples, rate, new_rate, quality="HQ")',
        "resampled = np.interp(np.arange(_resampled_length(len(samples), rate, new_rate)) * rate / new_rate, "
        "np.arange(len(samples)), samples)",
        "what the model's rate cannot hold comes back as false tones",
        "data/test_audio.py",
    ),
    (
        "sounds-places-of-a-row", "train/setup/token_counts.py",
        "sound = models.audio_of(models.read_config(cfg.model.path)).positions",
        'sound = counts["audio_encoder"] // rows',
        "several sounds of a row attend to each other, in figures of a plan",
        "train/test_hearing.py",
    ),
    (
        "families-token-by-index", "models/structure/structure.py",
        'return getattr(config, "image_token_index", None) if token is None else token', "return token",
        "older configurations have no token for an image",
        "models/test_describe.py",
    ),
    (
        "families-any-list-is-blocks", "models/structure/structure.py",
        "len(module) and all(any(entry.children()) for entry in module)", "len(module)",
        "a list of linear layers is sharded and recomputed as blocks are",
        "models/test_describe.py",
    ),
    (
        "plan-projectors-embed-patches", "fp8/policy/decisions.py",
        'CONVOLUTION if row.kind == "patch_embed" and row.component.endswith("_projector") else STAYS[row.kind]',
        "STAYS[row.kind]",
        "a convolution of the projector is called a patch embedding",
        "fp8/policy/test_topology.py",
    ),
    (
        "plan-padding-copies-nothing", "fp8/planning/table.py",
        "if width % ALIGN)", "if width % 4)",
        "results of 3420 columns are said to be written as they are",
        "fp8/policy/test_padding.py",
    ),
    (
        "plan-padding-of-one-side", "fp8/planning/table.py",
        'contracted = int(name == "fwd")', 'contracted = int(name == "dgrad")',
        "forward and dgrad are said to contract each other's side",
        "fp8/policy/test_padding.py",
    ),
    (
        "images-idle-experts", "models/forward/unused_towers.py",
        "if self.called:", "if self.called or True:",
        "experts that images alone reach have no gradient where there is no image",
        "models/test_unused_towers.py",
    ),
    (
        "images-of-one-feature", "models/weights/assembly.py",
        "if len(features) == 1 else None", "if len(features) == 0 else None",
        "an image of one feature, alone in its batch, ends Mistral 3's forward",
        "data/test_inputs.py",
    ),
    (
        "images-alone-come-first", "parallel/images.py",
        "images.sort(key=lambda n: not single[n])", "images.sort()",
        "a tower that is told how many images a row has cuts others than those that are alone",
        "parallel/test_context_models.py",
    ),
    (
        "plan-kinds-of-tokens", "train/estimate/memory/micro_batch.py",
        '_TOKEN_TYPE_INPUTS = ("mm_token_type_ids", "token_type_ids", "moe_mm_token_type_ids")',
        '_TOKEN_TYPE_INPUTS = ("mm_token_type_ids",)',
        "a forward without values attends without Gemma's mask and runs no experts for images",
        "train/memory/test_predicted.py",
    ),
)  # fmt: skip
