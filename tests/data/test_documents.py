"""Plain text, captions and interleaved documents: loss on all text, positions of images, bad rows."""

import copy

import numpy as np
import pytest

from octavo.data import BadSample, DataError, Document, DocumentEncoder, LongSample
from octavo.data.rows.image_refs import load

FAMILIES = ("qwen3_vl", "qwen2_5_vl", "internvl")


def read(folder, *rows, **more):
    return folder.read(list(rows), kind="documents", **more)


def learned(encoder, sample):
    return encoder.tokenizer.decode(sample.input_ids[sample.labels != -100])


def test_all_text_and_the_end_token_are_learned(folder, models):
    for family in ("qwen3", "llama", "qwen3_vl"):
        encoder = DocumentEncoder(models(family), 512)
        words = "Once upon a time\n\n\tthere was <image>,\0 élan and 猫. "
        sample = encoder.encode(read(folder, {"text": words, "id": 7, "url": "x", "meta": {"a": 1}})[0])
        tokenizer = encoder.tokenizer
        begins = [tokenizer.bos_token_id] if family == "llama" and tokenizer("")["input_ids"] else []
        text_ids = tokenizer(words, add_special_tokens=False)["input_ids"]
        assert sample.input_ids.tolist() == [*begins, *text_ids, tokenizer.eos_token_id]
        assert sample.labels.tolist() == [-100, *sample.input_ids[1:].tolist()]
        assert (sample.answers, sample.images, sample.id, sample.row) == ((), 0, "7", 0)
        assert tokenizer.decode(text_ids) == words


def test_special_tokens_of_tokenizer_are_kept(folder, models):
    from tokenizers.processors import TemplateProcessing

    processor = copy.deepcopy(models("llama"))
    tokenizer = processor.tokenizer
    ids = tokenizer.convert_tokens_to_ids(["<s>", "</s>"])
    for frame in ("<s> $A", "<s> $A </s>"):
        tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
            single=frame, special_tokens=[("<s>", ids[0]), ("</s>", ids[1])]
        )
        found = DocumentEncoder(processor, 64).encode(read(folder, {"text": "abc"})[0]).input_ids.tolist()
        assert found[0] == ids[0] and found[-1] == ids[1] and found.count(ids[1]) == found.count(ids[0]) == 1


@pytest.mark.parametrize("family", FAMILIES)
def test_images_are_placed_without_loss(folder, models, family):
    wide, tall = folder.image("wide.png", (32, 16)), folder.image("tall.png", (8, 24), (0, 9, 255))
    source = read(
        folder,
        {"image": wide, "text": "A caption."},
        {"text": "<image>A caption.", "images": [wide]},
        {"text": "See <image> and <image>.", "images": [tall, wide]},
        {"texts": ["See ", None, " and ", None, "."], "images": [None, tall, None, wide, None]},
        {"text": "No picture.", "image": None},
    )
    encoder = DocumentEncoder(models(family), 512)
    processor, end = encoder.processor, encoder.tokenizer.eos_token
    samples = [encoder.encode(source[row]) for row in range(5)]
    assert all(isinstance(source[row], Document) for row in range(5)) and source[2].text == "See  and ."
    # an image is written as the family's own chat template writes it
    turn = [{"role": "user", "content": [{"type": "image"}]}]
    assert encoder.image_placeholder in processor.apply_chat_template(turn, tokenize=False)
    for one, two, text, paths in (
        (samples[0], samples[1], f"{encoder.image_placeholder}A caption.", [wide]),
        (samples[2], samples[3], f"See {encoder.image_placeholder} and {encoder.image_placeholder}.", [tall, wide]),
    ):
        direct = processor(text=[text], images=[load(folder.path / path) for path in paths], return_tensors="np")
        assert one.input_ids.tolist() == [*direct["input_ids"][0].tolist(), encoder.end_id]
        for name in ("pixel_values", "image_grid_thw"):
            if direct.get(name) is not None:
                np.testing.assert_array_equal(getattr(one, name), direct[name])
        for name in ("input_ids", "labels", "pixel_values", "image_grid_thw", "mm_token_type_ids"):
            np.testing.assert_array_equal(getattr(one, name), getattr(two, name))
        if one.mm_token_type_ids is not None:
            assert len(one.mm_token_type_ids) == len(one.input_ids) and one.mm_token_type_ids[-1] == 0
    assert learned(encoder, samples[0]) == f"A caption.{end}"
    assert learned(encoder, samples[2]).endswith(f" and .{end}") and samples[2].images == 2
    assert learned(encoder, samples[4]).endswith(f"picture.{end}") and samples[4].pixel_values is None


def test_long_documents_follow_on_long(folder, models):
    image = folder.image("a.png", (32, 32))
    mixed = {"texts": ["ab", None, "cd" * 40], "images": [None, image, None]}
    source = read(folder, {"text": "abc " * 40}, {"text": "abc " * 900_000}, mixed)
    processor = models("qwen3_vl")
    whole = DocumentEncoder(processor, 512).encode(source[0]).input_ids
    cut = DocumentEncoder(processor, 20, on_long="cut")
    short = cut.encode(source[0])
    assert short.input_ids.tolist() == whole[:20].tolist() and short.notes == [
        ("cut", f"{len(whole)} tokens cut to 20")
    ]
    assert len(cut.encode(source[1]).input_ids) == 20
    assert cut.encode(source[2]).images == 1 and len(cut.encode(source[2]).input_ids) == 20
    for row, found in ((0, rf"is {len(whole)} tokens long"), (1, "3600000 characters"), (2, "tokens long")):
        with pytest.raises(LongSample, match=found):
            DocumentEncoder(processor, 20).encode(source[row])
        with pytest.raises(DataError, match=rf"row {row}: .*raise train.seq_length"):
            DocumentEncoder(processor, 20, on_long="error").encode(source[row])
    # one token too many, the end token: the row is too long, and this is not an internal error
    assert len(DocumentEncoder(processor, len(whole) - 1, on_long="cut").encode(source[0]).input_ids) == len(whole) - 1


BAD = (
    ({"id": "a"}, r"has the keys \['id'\]; a row of plain text has 'text'"),
    ("words", "is 'words'; expected an object"),
    ({"text": ""}, "a text without characters"),
    ({"text": " \n\t"}, "a text without characters"),
    ({"text": 7}, "'text' is 7; expected a text"),
    ({"text": None}, r"has the keys \[\]; a row of plain text has 'text'"),
    ({"text": ["a"]}, r"'text' is \['a'\]; expected a text"),
    ({"text": "a", "texts": ["a"]}, r"has the keys \['text', 'texts'\]"),
    ({"text": "a", "images": ["a.png", "a.png"]}, r"has 0 <image> placeholders? in its text and 2 image"),
    ({"text": "a <image>", "images": ["a.png", "a.png"]}, r"has 1 <image> placeholders? in its text and 2 image"),
    ({"text": "a <image> <image>", "image": "a.png"}, r"has 2 <image> placeholders? in its text and 1 image"),
    ({"text": "a <image>", "images": []}, r"has 1 <image> placeholders? in its text and 0 image"),
    ({"text": "a", "image": "a.png", "images": ["a.png"]}, "both 'image' and 'images'"),
    ({"text": "a", "image": 3}, "'image' is 3; expected a file name"),
    ({"text": "a", "image": "../a.png"}, "a.png"),
    ({"text": "a", "image": "none.png"}, "none.png"),
    ({"text": "a", "video": "a.mp4"}, "is a text with a video"),
    ({"texts": ["a"]}, "'texts' has 1 places, 'images' is None; they must be lists of one length"),
    ({"texts": ["a", None], "images": [None]}, "'texts' has 2 places, 'images' has 1 places"),
    ({"texts": "a", "images": ["a.png"]}, "'texts' is 'a', 'images' has 1 places"),
    ({"texts": ["a", None], "images": [None, None]}, "place 2 has the text None and the image None"),
    ({"texts": ["a"], "images": ["a.png"]}, "place 1 has the text 'a' and the image 'a.png'"),
    ({"texts": ["a", 3], "images": [None, None]}, "place 2 has the text 3"),
    ({"texts": [None], "images": ["a.png"]}, "a text without characters"),
    ({"texts": [], "images": []}, "a text without characters"),
)


@pytest.mark.parametrize(("row", "found"), BAD, ids=[str(n) for n in range(len(BAD))])
def test_bad_document_rows_are_named(folder, row, found):
    folder.image("a.png")
    source = read(folder, {"text": "good"}, row, {"text": "half: \ud83d"}, format="text")
    assert source[0].text == "good"
    with pytest.raises(BadSample, match=rf"rows.json, row 1.*{found}"):
        source[1]
    with pytest.raises(BadSample, match=r"rows.json, row 2.*half"):
        source[2]


def test_unencodable_documents_are_rejected(folder, models):
    image = folder.image("a.png")
    source = read(
        folder, {"text": "see <image>", "image": image}, {"text": "a <|image_pad|> b"}, {"text": "a <|im_end|> b"}
    )
    with pytest.raises(BadSample, match="row 0: has an image, but the model is text-only"):
        DocumentEncoder(models("qwen3"), 64).encode(source[0])
    encoder = DocumentEncoder(models("qwen3_vl"), 64)
    with pytest.raises(BadSample, match=r"row 1: its text contains the model's placeholder '<\|image_pad\|>'"):
        encoder.encode(source[1])
    assert encoder.encode(source[2]).control == ("<|im_end|>",)
    processor = copy.deepcopy(models("qwen3"))
    processor.tokenizer.eos_token = None
    with pytest.raises(DataError, match="has no end token"):
        DocumentEncoder(processor, 64)


def test_document_formats_are_detected(folder, models):
    talk, text = folder.llava("Hi", "Ho"), {"text": "words"}
    assert read(folder, text).format == "text" and read(folder, talk).format == "llava"
    assert read(folder, {**talk, "text": "the same, rendered"}).format == "llava"
    assert read(folder, talk, text, format="text", max_samples=2).format == "text"
    for rows in ((talk, text), (text, {"messages": [{"role": "user", "content": "a"}]})):
        with pytest.raises(DataError, match=r"ambiguous \(row . reads as .*text.*set `format`"):
            read(folder, *rows)
    with pytest.raises(DataError, match="no row looks like a conversation.*plain text is for `train.phase: pretrain`"):
        folder.read([text])
    with pytest.raises(DataError, match=r"or plain text \('text', or 'texts' with 'images'\)"):
        read(folder, {"body": "words"})
    # conversations are encoded as before; only they need a chat template
    processor = copy.deepcopy(models("qwen3"))
    both = DocumentEncoder(processor, 64, train_on_prompt=True)
    assert both.encode(read(folder, talk)[0]).answers
    processor.chat_template = processor.tokenizer.chat_template = None
    assert DocumentEncoder(processor, 64).encode(read(folder, text)[0]).length
    with pytest.raises(DataError, match="no chat template"):
        DocumentEncoder(processor, 64).encode(read(folder, talk)[0])
