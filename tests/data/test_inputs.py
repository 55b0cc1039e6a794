"""Additional tensors of images: made for several rows at once, cut, padded and packed as their models expect."""

from __future__ import annotations

import copy
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from octavo import models as library
from octavo.base.model_families import trained_families
from octavo.data import Encoder, LongSample, collate, collate_pack
from octavo.data.encoding.processor_calls import ProcessorCalls, ProcessorRequest, split_outputs
from octavo.data.encoding.sample import Input, check_lengths, concatenate, cut_inputs
from octavo.data.errors import DataError
from octavo.data.loaders.token_counts import count_tokens
from octavo.models.tiny import tiny
from tests.data.test_processor_calls import results_equal

FAMILIES = ("mistral3", "llava", "llava_onevision", "smolvlm", "gemma3", "glm4v", "ernie4_5_vl_moe")
TOLERANCE = 2e-6  # of logits: sums in a different order


@pytest.fixture(scope="module")
def loaded(tmp_path_factory):
    """Return a function from a family to its mini model and processor."""
    cache = {}

    def get(family):
        if family not in cache:
            path = tiny.write(family, tmp_path_factory.mktemp("inputs") / family, size="mini")
            cache[family] = library.load(path).eval(), library.load_processor(path)
        return cache[family]

    return get


@pytest.fixture
def source(folder):
    """Rows with one image, three images of three sizes in two turns, no image, and a wide image after text."""
    names = [folder.image(f"{n}.png", size) for n, size in enumerate([(16, 16), (40, 24), (9, 33), (70, 20)])]
    return folder.read(
        [
            folder.llava("<image>First?", "3", image=names[0]),
            folder.llava("<image><image>a", "3", "and\n<image>\nso?", "a b", image=names[1:]),
            folder.llava("Hello", "you"),
            folder.llava("x <image> y", "3", image=names[3]),
        ]
    )


def logits(model, batch):
    meta = batch.pop("meta")
    batch = {name: value for name, value in batch.items() if name != "labels"}
    with torch.no_grad():
        return model(**batch, use_cache=False).logits, meta


@pytest.mark.parametrize("family", FAMILIES)
def test_rows_encoded_together_equal_rows_encoded_alone(loaded, source, family):
    _, processor = loaded(family)
    encoder = Encoder(processor, 512)
    alone = [encoder.encode(source[row]) for row in range(4)]
    assert all(map(results_equal, encoder.encode_all([source[row] for row in range(4)]), alone))
    assert count_tokens(encoder, [source[row] for row in range(4)]) == [len(sample.input_ids) for sample in alone]
    answers = [processor.tokenizer.decode(alone[1].input_ids[a:b]) for a, b in alone[1].answers]
    assert [text.removesuffix(processor.tokenizer.eos_token).strip() for text in answers] == ["3", "a b"]
    for sample in alone:
        assert len(sample.places) == sample.images
        marked = np.zeros(len(sample.input_ids), bool)
        for start, stop in sample.places:
            marked[start:stop] = True
        inside = encoder._image_mask(sample.input_ids)
        assert (marked >= inside).all() and (sample.labels[marked] == -100).all()


@pytest.mark.parametrize("family", FAMILIES)
def test_padded_rows_have_the_logits_of_single_rows(loaded, source, family):
    model, processor = loaded(family)
    samples = Encoder(processor, 512).encode_all([source[row] for row in range(4)])
    together, meta = logits(model, collate(samples, 0))
    assert meta.has_image and set(meta.inputs) == set(getattr(processor, "inputs", {}))
    for row, sample in enumerate(samples):
        expected, _ = logits(model, collate([sample], 0))
        count = len(sample.input_ids)
        assert float((together[row, :count] - expected[0]).abs().max()) <= TOLERANCE, row


def gradients(model, batches):
    """Return the summed loss and the gradients by parameter, over batches in sequence."""
    model.zero_grad(set_to_none=True)
    total = 0.0
    for batch in batches:
        inputs = {name: value for name, value in batch.items() if name not in ("labels", "meta")}
        wide = next(model.parameters()).dtype
        inputs = {name: value.to(wide) if value.is_floating_point() else value for name, value in inputs.items()}
        found = model(**inputs, use_cache=False).logits[:, :-1].flatten(0, 1)
        loss = F.cross_entropy(found, batch["labels"][:, 1:].flatten(), reduction="sum")
        loss.backward()
        total += float(loss.detach())
    return total, {name: p.grad for name, p in model.named_parameters()}


@pytest.mark.parametrize("family", trained_families("images"))
def test_batch_gradients_equal_sum_of_row_gradients(loaded, source, family):
    """Uses float64, because differences between fp32 sums in different orders depend on the CPU."""
    model, processor = loaded(family)
    model = copy.deepcopy(model).double()
    model.set_experts_implementation("eager")  # grouped products do not support float64
    samples = Encoder(processor, 512).encode_all([source[row] for row in range(4)])
    loss, row_gradients = gradients(model, [collate([sample], 0) for sample in samples])
    together, found = gradients(model, [collate(samples, 0)])
    assert together == pytest.approx(loss, rel=1e-6)
    for name, grad in found.items():
        if grad is None or row_gradients[name] is None:
            assert grad is row_gradients[name], name
        else:
            assert float((grad - row_gradients[name]).abs().max()) <= 5e-5 * max(1e-3, float(grad.abs().max())), name


def test_single_feature_image_is_independent_of_the_batch(loaded, folder):
    """Mistral 3's stock model confuses the width with the number of features."""
    model, processor = loaded("mistral3")
    names = [folder.image("dot.png", (3, 3)), folder.image("more.png", (40, 24))]
    rows = folder.read([folder.llava("<image>what?", "3", image=name) for name in names])
    dot, more = Encoder(processor, 512).encode_all([rows[0], rows[1]])
    expected, _ = logits(model, collate([dot], 0))
    together, _ = logits(model, collate([dot, more], 0))
    assert (dot.input_ids == processor.image_token_id).sum() == 1
    assert float((together[0, : len(dot.input_ids)] - expected[0]).abs().max()) <= TOLERANCE


def test_gemma_images_attend_bidirectionally(loaded, source):
    """Without token types its stock model silently attends only backward."""
    model, processor = loaded("gemma3")
    sample = Encoder(processor, 512).encode(source[0])
    batch = collate([sample], 0)
    assert torch.equal(batch["token_type_ids"], (batch["input_ids"] == processor.feature_id).long())
    assert batch["token_type_ids"].sum() == 4
    both, _ = logits(model, dict(batch))
    batch.pop("token_type_ids")
    back, _ = logits(model, batch)
    assert float((both - back).abs().max()) > 1e-3


def test_smolvlm_tower_receives_tile_masks(loaded, source):
    """Its processor makes square tiles with full masks; here the mask hides the right half of each tile."""
    model, processor = loaded("smolvlm")
    plain, other = Encoder(processor, 512).encode_all([source[0], source[3]])
    mask = plain.extra["pixel_attention_mask"].values.copy()
    assert mask.all()
    mask[..., mask.shape[-1] // 2 :] = 0
    hidden = replace(plain, extra={"pixel_attention_mask": Input("pixels", mask)})
    count = len(plain.input_ids)
    expected, _ = logits(model, collate([hidden], 0))
    together, _ = logits(model, collate([other, hidden], 0))
    assert float((together[1, :count] - expected[0]).abs().max()) <= TOLERANCE
    assert float((logits(model, collate([plain], 0))[0] - expected).abs().max()) > 1e-4


@pytest.mark.parametrize("family", FAMILIES)
def test_model_accepts_rows_cut_at_any_length(loaded, source, family):
    model, processor = loaded(family)
    whole = Encoder(processor, 512).encode(source[1])
    seen = set()
    for length in range(8, len(whole.input_ids)):
        try:
            sample = Encoder(processor, length, on_long="cut", train_on_prompt=True).encode(source[1])
        except LongSample as dropped:
            assert "nothing to learn is left" in str(dropped) or "images would be left" in str(dropped)
            continue
        count = len(sample.input_ids)
        assert count <= length and (sample.input_ids == whole.input_ids[:count]).all()
        assert all(stop <= count for _, stop in sample.places) and len(sample.places) == sample.images
        assert all(len(one.values) == count for one in sample.extra.values() if one.per == "token")
        marks = [mark for mark in ("<|begin_of_image|>", "<|IMAGE_START|>") if mark in processor.tokenizer.get_vocab()]
        assert sample.input_ids[-1] not in processor.tokenizer.convert_tokens_to_ids(marks)
        if sample.images not in seen:
            logits(model, collate([sample], 0))  # it compares the numbers of placeholders and features
            seen.add(sample.images)
    assert seen >= ({0, 2} if family == "llava_onevision" else {0, 1, 2})


def test_cut_to_one_of_several_images_drops_the_row(loaded, source):
    processor = loaded("llava_onevision")[1]
    sample = Encoder(processor, 512).encode(source[1])
    room = sample.places[1][0] + 3
    with pytest.raises(LongSample, match=r"one of its \d images would be left, and this family"):
        Encoder(processor, room, on_long="cut", train_on_prompt=True).encode(source[1])


def test_token_types_cover_rows_without_images_in_a_pack(loaded, source):
    samples = Encoder(loaded("ernie4_5_vl_moe")[1], 512).encode_all([source[row] for row in (2, 0)])
    batch = collate_pack(samples, 0, 128)
    assert batch["moe_mm_token_type_ids"].shape == batch["input_ids"].shape
    first = len(samples[0].input_ids)
    assert not batch["moe_mm_token_type_ids"][0, :first].any()
    assert batch["moe_mm_token_type_ids"].sum() == 6 and batch["mm_token_type_ids"].sum() == 4  # marks and image


def test_unknown_processor_outputs_are_rejected(loaded, source):
    processor = loaded("mistral3")[1]

    def call(outputs):
        processor.inputs = {"image_sizes": "image"}
        processed = {
            "input_ids": [[1, 2]],
            "offset_mapping": [[(0, 1), (1, 2)]],
            "pixel_values": np.zeros((2, 3, 8, 8)),
        }
        calls = ProcessorCalls(
            SimpleNamespace(
                tokenizer=processor.tokenizer, image_processor=1, image_token="[IMG]", inputs=processor.inputs
            ),
            100.0,
        )
        calls._call = lambda rows: processed | outputs
        row = source[1]
        found = calls([ProcessorRequest("[IMG][IMG][IMG]", row.images)])[0]
        assert isinstance(found, DataError)
        return str(found)

    assert "returns target_sizes, which Octavo does not pass to the model" in call({"target_sizes": [1]})
    assert "returns image_sizes of length 2 for 3 (image), so rows would get each other's" in call(
        {"image_sizes": np.zeros((2, 2))}
    )
    check_lengths({"image_sizes": [1, 2]}, {"image_sizes": "image"}, {"image": 2})


def test_pixel_rows_are_split_by_images():
    outputs = {
        "input_ids": [[5, 5, 5], [5]],
        "pixel_values": np.arange(2.0).reshape(2, 1),
        "image_sizes": np.array([[1, 3], [1, 1]]),
    }
    first, second = split_outputs(outputs, [1, 1], 5, {"image_sizes": "image"})
    assert first["pixel_values"].tolist() == [[0.0]] and second["image_sizes"].tolist() == [[1, 1]]


def test_concatenate_pads_smaller_arrays_with_zeros():
    found = concatenate([np.ones((1, 2, 3)), np.full((2, 3, 1), 2.0)])
    assert found.shape == (3, 3, 3) and found[0].tolist() == [[1, 1, 1], [1, 1, 1], [0, 0, 0]]
    assert found[2].tolist() == [[2, 0, 0]] * 3
    assert concatenate([np.ones((1, 2)), np.zeros((1, 2))]).tolist() == [[1, 1], [0, 0]]


def test_cut_keeps_remaining_tensors():
    inputs = {
        "kinds": Input("token", np.arange(9)),
        "image_sizes": Input("image", np.arange(6).reshape(3, 2)),
        "mask": Input("pixels", np.arange(5)),
        "many": Input("row", np.array([3])),
    }
    found = cut_inputs(inputs, 4, 2, 3)
    assert [len(found[name].values) for name in inputs] == [4, 2, 3, 1]
    assert set(cut_inputs(inputs, 4, 0, 0)) == {"kinds"}
