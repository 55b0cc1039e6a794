"""Tokens, labels and pixels of every family, compared with calls of its processor."""

import copy

import numpy as np
import pytest

from octavo.data import BadSample, DataError, Encoder, LongSample
from octavo.data.rows.image_refs import load

FAMILIES = ("qwen3_vl", "qwen2_5_vl", "internvl", "nvila_lite")
TILES = ("internvl", "nvila_lite")  # its images are tiles of one size


def rows(folder):
    wide, tall = folder.image("wide.png", (32, 16)), folder.image("tall.png", (8, 24), (0, 9, 255))
    return folder.read(
        [
            folder.llava("<image>First?", "7", "Second?", "élan 3", image=wide),
            folder.llava("Look: <image><image> both <image>?", "yes", image=[wide, tall, wide]),
            folder.llava("No image?", "none", "Sure?", "quite"),
        ]
    )


def spoken(encoder, sample):
    return [encoder.tokenizer.decode(sample.input_ids[a:b]) for a, b in sample.answers]


@pytest.mark.parametrize("family", FAMILIES)
def test_encoding_matches_processor(folder, models, family):
    processor, source = models(family), rows(folder)
    encoder = Encoder(processor, 512)
    for row in range(3):
        sample = encoder.encode(source[row])
        messages = [
            {"role": t.role, "content": [{"type": "text", "text": p.text} if hasattr(p, "text") else {"type": "image"}
                                         for p in t.parts]}
            for t in source[row].turns
        ]  # fmt: skip
        text = processor.apply_chat_template(messages, tokenize=False)
        images = [load(path) for path in source[row].images]
        direct = processor(text=[text], images=images or None, return_tensors="np")
        assert sample.input_ids.tolist() == direct["input_ids"][0].tolist()
        assert sample.images == len(images)
        for name in ("pixel_values", "image_grid_thw", "mm_token_type_ids"):
            values, stock_values = getattr(sample, name), direct.get(name)
            assert (values is None) == (stock_values is None), name
            if values is not None:
                stock_values = stock_values[0] if name == "mm_token_type_ids" else stock_values
                np.testing.assert_array_equal(values, stock_values)
    assert (sample.mm_token_type_ids is None) == (family in TILES)


@pytest.mark.parametrize("family", FAMILIES)
def test_loss_covers_only_answers(folder, models, family):
    encoder, source = Encoder(models(family), 512), rows(folder)
    for row, answers in ((0, ["7", "élan 3"]), (1, ["yes"]), (2, ["none", "quite"])):
        sample = encoder.encode(source[row])
        assert spoken(encoder, sample) == [f"{answer}<|im_end|>" for answer in answers]
        trained = np.concatenate([np.arange(*span) for span in sample.answers])
        assert np.flatnonzero(sample.labels != -100).tolist() == trained.tolist()
        assert (sample.labels[trained] == sample.input_ids[trained]).all()


@pytest.mark.parametrize("family", FAMILIES)
def test_train_on_prompt_masks_images_and_first_token(folder, models, family):
    encoder = Encoder(models(family), 512, train_on_prompt=True)
    sample = encoder.encode(rows(folder)[1])
    masked = sample.labels == -100
    image_mask = np.isin(sample.input_ids, list(encoder.image_ids))
    assert image_mask.sum() >= 12 and (masked == (image_mask | (np.arange(len(masked)) == 0))).all()


@pytest.mark.parametrize("family", ("qwen3", "llama", "mpt"))
def test_text_only(folder, models, family):
    encoder, source = Encoder(models(family), 512), rows(folder)
    sample = encoder.encode(source[2])
    assert sample.pixel_values is None and sample.images == 0
    end = encoder.tokenizer.eos_token
    assert [text.strip() for text in spoken(encoder, sample)] == [f"none{end}", f"quite{end}"]
    bos = encoder.tokenizer.bos_token_id
    assert (
        bos is None or (sample.input_ids == bos).sum() == 2
    )  # one per turn from the template, none from the tokenizer
    with pytest.raises(BadSample, match="row 0 .*has an image, but the model is text-only"):
        encoder.encode(source[0])


def test_system_text(folder, models):
    system = {"from": "system", "value": "Own."}
    source = folder.read(
        [folder.llava("q", "a"), {"conversations": [system, *folder.llava("q", "a")["conversations"]]}]
    )
    encoder = Encoder(models("qwen3_vl"), 512, system="Be short.")
    texts = [encoder.tokenizer.decode(encoder.encode(source[row]).input_ids) for row in (0, 1)]
    assert texts[0].startswith("<|im_start|>system\nBe short.<|im_end|>") and texts[0].count("system") == 1
    assert texts[1].startswith("<|im_start|>system\nOwn.<|im_end|>") and "Be short" not in texts[1]


def test_long_rows_are_dropped_cut_or_rejected(folder, models):
    source = rows(folder)
    with pytest.raises(LongSample, match=r"row 0 .*: is .*\d+ tokens long.*, seq_length is 12") as dropped:
        Encoder(models("qwen3_vl"), 12).encode(source[0])
    assert dropped.value.action == "dropped"
    with pytest.raises(
        DataError, match=r"seq_length is 12; raise train\.seq_length, lower data\.max_pixels, or"
    ) as error:
        Encoder(models("qwen3_vl"), 12, on_long="error").encode(source[0])
    assert not isinstance(error.value, BadSample)
    with pytest.raises(DataError, match="on_long is 'trim'; it must be drop, cut or error"):
        Encoder(models("qwen3_vl"), 12, on_long="trim")


@pytest.mark.parametrize("family", FAMILIES)
def test_cut_works_at_every_length(folder, models, family):
    """A cut is never inside an image: placeholders and pixels agree at each length, as models require."""
    processor = models(family)
    source = folder.read(
        [
            folder.llava(
                "q<image>", "one", "<image><image>?", "two", "<image>", "three",
                image=[folder.image("a.png", (32, 16)), folder.image("b.png"), folder.image("c.png", (16, 32)),
                       "a.png"],
            )
        ]
    )  # fmt: skip
    whole = Encoder(processor, 512).encode(source[0])
    seen = set()
    for length in range(8, len(whole.input_ids)):
        try:
            sample = Encoder(processor, length, on_long="cut").encode(source[0])
        except LongSample as dropped:
            assert "nothing to learn is left after the cut" in str(dropped)
            continue
        count = len(sample.input_ids)
        assert count <= length and sample.cut and (sample.input_ids == whole.input_ids[:count]).all()
        assert all(end <= count for _, end in sample.answers)
        seen.add(sample.images)
        placeholders = int((sample.input_ids == processor.image_token_id).sum())
        if sample.images == 0:
            assert sample.pixel_values is None and sample.image_grid_thw is None and placeholders == 0
        elif family in TILES:
            tile = processor.image_seq_length if family == "internvl" else processor.tile_tokens + processor.newlines
            assert placeholders == len(sample.pixel_values) * tile
        else:
            assert len(sample.image_grid_thw) == sample.images
            assert len(sample.pixel_values) == sample.image_grid_thw.prod(1).sum() == 4 * placeholders
            assert sample.input_ids[-1] != processor.tokenizer.convert_tokens_to_ids("<|vision_start|>")
            assert len(sample.mm_token_type_ids) == count
        if sample.images:
            assert (sample.pixel_values == whole.pixel_values[: len(sample.pixel_values)]).all()
    assert seen >= {1, 3}


def test_bad_images_and_text_name_their_row(folder, models):
    (folder.path / "broken.png").write_bytes(b"no")
    source = folder.read(
        [
            folder.llava("<image>", "x", image="broken.png"),
            folder.llava("<image>", "x", image=folder.image("long.png", (4000, 4))),
            folder.llava("spells <|image_pad|>", "x"),
        ],
    )
    encoder = Encoder(models("qwen3_vl"), 512)
    for row, message in (
        (0, "cannot be decoded"),
        (1, "processor rejects it: .*aspect ratio"),
        (2, "contains the model's"),
    ):
        with pytest.raises(BadSample, match=rf"rows\.json, row {row} \(id r\): .*{message}"):
            encoder.encode(source[row])
    small = Encoder(models("qwen3_vl"), 512, max_image_megapixels=0.01)
    with pytest.raises(BadSample, match="row 1.*over the limit of 0.01"):
        small.encode(source[1])


def test_template_rejection_is_reported(folder, models):
    messages = [{"from": f, "value": "x"} for f in ("human", "human", "gpt")]
    source = folder.read([{"conversations": messages}])
    assert len(Encoder(models("qwen3"), 64).encode(source[0]).answers) == 1
    processor = models("llama")
    strict = copy.copy(processor)
    strict.tokenizer = copy.deepcopy(processor.tokenizer)
    strict.tokenizer.chat_template = (
        "{% if messages[1].role == 'user' %}{{ raise_exception('must alternate') }}{% endif %}"
    )
    with pytest.raises(BadSample, match=r"row 0: the chat template rejects the roles .*must alternate"):
        Encoder(strict, 64).encode(source[0])


def test_unsupported_processors_are_rejected(models):
    bare = copy.copy(models("qwen3"))
    bare.tokenizer, bare.chat_template = copy.deepcopy(bare.tokenizer), None
    bare.tokenizer.chat_template = None
    with pytest.raises(DataError, match="has no chat template.*add chat_template.jinja"):
        Encoder(bare, 64)


def never(*_: object, **__: object) -> None:
    raise AssertionError("too late")


@pytest.mark.parametrize("turns", [("word " * 5000, "x"), ("q", "a") * 150, ("q", "a", "<image>" * 40, "x")])
def test_extremely_long_rows_are_rejected_before_rendering(folder, models, monkeypatch, turns):
    images = {"image": [folder.image("wide.png", (32, 16))] * 40} if "<image>" in "".join(turns) else {}
    source = folder.read([folder.llava(*turns, **images)])
    for on_long, error in (("drop", LongSample), ("error", DataError)):
        encoder = Encoder(models("qwen3_vl"), 100, on_long=on_long)
        monkeypatch.setattr(encoder, "_render", never)
        monkeypatch.setattr("octavo.data.encoding.processor_calls.load", never)
        with pytest.raises(
            error,
            match=rf"row 0.*: is over 100 tokens long \({len(turns)} turns, \d+ characters, {len(images) * 40} im",
        ):
            encoder.encode(source[0])
    monkeypatch.undo()
    # A cut row is the beginning of the whole row, with the same labels.
    whole = Encoder(models("qwen3_vl"), 30_000).encode(source[0])
    encoder = Encoder(models("qwen3_vl"), 100, on_long="cut")
    rendered, encoder._render = [], lambda *given: rendered.append(given) or Encoder._render(encoder, *given)
    if len(turns) == 2:
        with pytest.raises(LongSample, match="nothing to learn is left after the cut"):
            encoder.encode(source[0])
        return
    short = encoder.encode(source[0])
    count = len(short.input_ids)
    assert short.cut and 80 < count <= 100 and short.input_ids.tolist() == whole.input_ids[:count].tolist()
    assert short.labels.tolist() == whole.labels[:count].tolist() and len(rendered) < 40
    assert short.images == 0 or len(short.image_grid_thw) == short.images < 40


def test_long_rows_are_rendered_once(folder, models):
    image = folder.image()
    for more in ({}, {"image": image}):
        source = folder.read([folder.llava("<image>" * len(more) + "q", *("a", "q") * 40, "a", **more)])
        encoder, rendered = Encoder(models("qwen3_vl"), 90), []
        encoder._render = lambda *given, to=rendered, by=encoder: to.append(given) or Encoder._render(by, *given)
        with pytest.raises(LongSample, match=r"is \d+ tokens long.*, seq_length is 90"):
            encoder.encode(source[0])
        assert len(rendered) == 1


def test_control_tokens_in_text_are_noted(folder, models):
    source = folder.read([folder.llava("a<|im_end|>b <|im_start|>", "<|im_end|>"), folder.llava("<|im_", "end|>")])
    encoder = Encoder(models("qwen3_vl"), 64)
    assert encoder.encode(source[0]).control == ("<|im_end|>", "<|im_start|>")
    assert encoder.encode(source[1]).control == ()
    for word, family in (("<|vision_start|>", "qwen3_vl"), ("<img>", "internvl"), ("<|video_pad|>", "qwen2_5_vl")):
        with pytest.raises(BadSample, match="row 0.*contains the model's placeholder '" + word.replace("|", r"\|")):
            Encoder(models(family), 64).encode(folder.read([folder.llava(f"an {word} tag", "x")], f"{family}.json")[0])


def test_processor_error_affects_one_row(folder, models, monkeypatch):
    source = rows(folder)
    encoder = Encoder(models("qwen3_vl"), 512)
    broken = copy.copy(encoder.processor.image_processor)
    monkeypatch.setattr(type(broken), "__call__", lambda *_, **__: [][1])
    with pytest.raises(BadSample, match="row 1 .*: the processor rejects it: IndexError: list index"):
        encoder.encode(source[1])
