"""Rows with audio: positions, rejected files and rows, and encoded features."""

from __future__ import annotations

import inspect
from pathlib import Path

import datasets
import numpy as np
import pytest
from transformers import Qwen2AudioProcessor

from octavo import models
from octavo.data import AudioRef, BadSample, DataError, LongSample, parse
from octavo.data.batching.collate import collate
from octavo.data.encoding import audio as audio_files
from octavo.data.encoding.encode import Encoder
from octavo.data.storage.open_rows import open_rows
from octavo.data.tasks.documents import parse_document
from octavo.data.tasks.pairs import parse_pair
from octavo.data.tasks.prompts import parse_answered
from octavo.data.tasks.sources import drop_nulls
from octavo.models.tiny import tiny

soundfile = pytest.importorskip("soundfile", reason="rows with sound need the extra `audio`")
RATE = 16000


def pitch(rate: int, hertz: float) -> np.ndarray:
    """Return half a second of a tone."""
    return 0.5 * np.sin(2 * np.pi * hertz * np.arange(rate // 2) / rate)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write valid and invalid audio files, and in `tiny/` a model that takes up to one second."""
    directory = tmp_path_factory.mktemp("sounds")
    tiny.write("qwen2_audio", directory / "tiny", size="mini")
    wave = 0.4 * np.sin(np.arange(RATE) / 3)

    def write(name: str, samples: np.ndarray, rate: int = RATE, **options: str) -> None:
        soundfile.write(directory / name, samples, rate, **options)

    write("half.wav", wave[: RATE // 2])
    write("half.flac", wave[: RATE // 2])
    write("whole.wav", wave)
    write("both.wav", np.stack([wave[:8000], np.zeros(8000)], axis=1), subtype="FLOAT")
    write("long.wav", np.concatenate([wave, wave[:1]]))
    write("one_token.wav", wave[:960])
    write("two_tokens.wav", wave[:961])
    write("empty.wav", wave[:0])
    write("slow.wav", wave[:4000], 8000)
    write("cd.wav", np.stack([pitch(44100, 1000), pitch(44100, 14000)], axis=1), 44100, subtype="FLOAT")
    write("studio.flac", pitch(48000, 1000), 48000)
    write("slowest.wav", wave[:30], 100)
    write("almost.wav", np.zeros(44102), 44100)
    write("nan.wav", np.full(4000, np.nan), subtype="FLOAT")
    write("odd.aiff", wave[:8000])
    whole = (directory / "half.flac").read_bytes()
    (directory / "cut.flac").write_bytes(whole[: len(whole) // 2])
    (directory / "noise.wav").write_bytes(b"RIFF and no more")
    whole = (directory / "half.wav").read_bytes()
    (directory / "cut.wav").write_bytes(whole[: len(whole) // 2])
    piped, size = whole.find(b"data") + 4, b"\xff" * 4
    (directory / "piped.wav").write_bytes(whole[:piped] + size + whole[piped + 4 :])
    whole = bytearray((directory / "half.flac").read_bytes())
    whole[21:26] = bytes([whole[21] & 0xF0, 0, 0, 0, 0])  # samples in all: unknown
    (directory / "piped.flac").write_bytes(whole)
    return directory


@pytest.fixture(scope="module")
def processor(folder: Path):
    return models.load_processor(folder / "tiny")


def row(folder: Path, *names: str, text: str = "<audio>what?", **more):
    turns = [{"role": "user", "content": text}, {"role": "assistant", "content": "a tone"}]
    listed = {"audio": names[0] if len(names) == 1 else list(names)} if names else {}
    return parse({"messages": turns, **listed, **more}, "messages", file="rows", row=3, images=folder)


def test_sound_positions_are_read_from_three_layouts(folder):
    listed = row(folder, "half.wav", "half.flac", text="a<audio>b<audio>c")
    parts = [{"type": "text", "text": "a"}, {"type": "audio", "audio": "half.wav"}, {"type": "text", "text": "b"},
             {"type": "audio", "path": "half.flac"}, {"type": "text", "text": "c"}]  # fmt: skip
    named = row(folder, text=parts)
    openly = row(folder, text=[{"type": "audio"} if "type" in p and p["type"] == "audio" else p for p in parts],
                 audios=["half.wav", "half.flac"])  # fmt: skip
    assert listed == named == openly
    assert [part.name for part in listed.turns[0].parts if isinstance(part, AudioRef)] == ["half.wav", "half.flac"]
    assert [sound.name for sound in listed.sounds] == ["half.wav", "half.flac"]
    llava = {"conversations": [{"from": "human", "value": "<audio>what?"}, {"from": "gpt", "value": "a tone"}]}
    alpaca = {"instruction": "<audio>what?", "output": "a tone"}
    for form, raw in (("llava", llava), ("sharegpt", llava), ("alpaca", alpaca)):
        found = parse({**raw, "audio": "half.wav"}, form, file="rows", row=3, images=folder)
        assert found.turns == row(folder, "half.wav").turns and len(found.sounds) == 1
    assert row(folder, text="the tag <audio> of HTML").sounds == ()


@pytest.mark.parametrize(
    ("names", "text", "message"),
    [
        (("half.wav",), "what?", "0 <audio> placeholders in its text and 1 sound"),
        (("half.wav",), "<audio><audio>", "2 <audio> placeholders in its text and 1 sound"),
        ((), [{"type": "audio"}], "1 <audio> placeholder in its text and 0 sounds"),
        (("half.wav",), [{"type": "audio", "audio": "half.wav"}], "keep one way"),
        ((), [{"type": "audio", "audio": {"bytes": "x"}}], "expected one path in audio, path"),
        (({"array": [0.0], "sampling_rate": 16000},), "<audio>", "decoded samples are not taken: .*decode=False"),
        (("none.wav",), "<audio>", "sound 'none.wav' is missing"),
        (("../x.wav",), "<audio>", "is outside the image folder"),
        ((3,), "<audio>", "expected a wav or flac file, by its name or as bytes"),
    ],
)
def test_invalid_media_rows_are_rejected(folder, names, text, message):
    with pytest.raises(BadSample, match=message):
        row(folder, *names, text=text)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("long.wav", r"is too long: 1.00 s; the model takes 0.06 to 1 s"),  # stock code truncates it silently
        ("one_token.wav", "is too short"),  # the model would read it as an unexpanded placeholder
        ("empty.wav", "is empty"),
        ("slowest.wav", "has 100 samples per second, outside the range of 4000 to 384000"),
        ("almost.wav", "is too long: 1.00 s"),  # one sample more than the model takes
        ("nan.wav", "not finite"),
        ("odd.aiff", "is AIFF; convert it to wav or flac"),
        ("cut.flac", "is truncated|cannot be decoded"),
        ("cut.wav", "is truncated: it has 80.. bytes fewer than its header"),  # libsndfile reads the existing half
        ("piped.flac", "has no length in its header"),
        ("noise.wav", "cannot be decoded"),
    ],
)
def test_invalid_audio_files_are_rejected(folder, processor, name, message):
    with pytest.raises(BadSample, match=message):
        Encoder(processor, 128).encode(row(folder, name))


def test_sound_expands_at_its_placeholder(folder, processor):
    """The number of tokens equals the model's, only answers are learned, and other rows of the call change nothing."""
    encoder = Encoder(processor, 128)
    rows = [row(folder, "half.wav"), row(folder, text="no sound"), row(folder, "two_tokens.wav", "whole.wav",
            text="<audio><audio>?")]  # fmt: skip
    alone, together = [encoder.encode(one) for one in rows], encoder.encode_all(rows)
    place = processor.audio_token_id
    assert [int((sample.input_ids == place).sum()) for sample in alone] == [12, 0, 2 + 25]
    for one, same in zip(alone, together, strict=True):
        assert np.array_equal(one.input_ids, same.input_ids) and np.array_equal(one.labels, same.labels)
        assert one.extra.keys() == same.extra.keys() and one.sounds == same.sounds
        assert all(np.array_equal(one.extra[name].values, same.extra[name].values) for name in one.extra)
        learned_text = processor.tokenizer.decode(one.labels[one.labels != -100])
        assert learned_text == "a tone<|im_end|>"
    batch = collate(together, 0)
    assert batch["input_features"].shape == (3, 32, 100) and batch["meta"].sounds == (1, 0, 2)
    assert batch["feature_attention_mask"].sum(-1).tolist() == [50, 7, 100]
    assert "pixel_values" not in batch and batch["meta"].has_audio and not batch["meta"].has_image
    assert not collate([alone[1]], 0)["meta"].has_audio


def test_features_match_stock_processor(processor):
    """Compares tokens and features for sounds of every length in tokens."""
    stock = Qwen2AudioProcessor(processor.feature_extractor, processor.tokenizer, audio_token=processor.audio_token)
    rng = np.random.default_rng(0)
    sounds = [rng.normal(size=size).astype(np.float32) for size in (961, 1600, 1601, 4321, 15999, RATE)]
    text = ["a".join([processor.audio_token] * len(sounds))]
    features, stock_features = (
        one(text=text, audio=sounds, return_tensors="np", sampling_rate=RATE) for one in (processor, stock)
    )
    for name in ("input_ids", "input_features", "feature_attention_mask"):
        assert np.array_equal(features[name], stock_features[name]), name


def test_flac_equals_wav_and_channels_are_averaged(folder):
    limits = audio_files.Limits(RATE, 961, RATE)
    names = ("half.wav", "half.flac", "both.wav", "piped.wav")
    wav, flac, both, piped = (audio_files.load(folder / name, limits) for name in names)
    assert np.array_equal(wav, piped)
    assert np.allclose(wav, flac, atol=1e-4) and wav.dtype == np.float32 and wav.shape == (8000,)
    assert np.allclose(2 * both, wav, atol=1e-3)


def test_sounds_are_resampled_to_model_rate(folder, processor):
    """Tones keep their pitch, frequencies above the model's rate are removed without aliasing, as in the stock
    loader."""
    pytest.importorskip("soxr", reason="the extra `audio`")
    limits, inner, true = audio_files.Limits(RATE, 961, RATE), slice(500, -500), pitch(RATE, 1000)
    for name, factor in (("cd.wav", 0.5), ("studio.flac", 1)):
        samples = audio_files.load(folder / name, limits)
        assert samples.shape == (8000,) and samples.dtype == np.float32
        assert np.abs(samples - factor * true)[inner].max() < 2e-4
    assert audio_files.load(folder / "slow.wav", limits).shape == (8000,)
    assert Encoder(processor, 128).encode(row(folder, "cd.wav")).sounds == 1
    audio = pytest.importorskip("transformers.audio_utils")
    if "backend" in inspect.signature(audio.load_audio).parameters:
        stock = audio.load_audio(str(folder / "cd.wav"), RATE, backend="soundfile")
        assert np.array_equal(audio_files.load(folder / "cd.wav", limits), stock)


def test_sounds_are_read_from_bytes_in_rows(folder, processor):
    """Sounds as `datasets` writes them equal those of the files; one with neither bytes nor path is missing."""
    turns = row(folder, "half.wav").turns
    sound = {"bytes": (folder / "half.wav").read_bytes(), "path": "half.wav"}
    dataset = datasets.Dataset.from_list([{"audio": sound}, {"audio": None}]).cast_column("audio", datasets.Audio())
    dataset.save_to_disk(folder / "saved")
    audio = [one.get("audio") for one in open_rows(folder / "saved")]
    inside, named = row(folder, audio[0]), row(folder, {"bytes": None, "path": "half.wav"})
    part = row(folder, text=[{"type": "audio", "audio": audio[0]}, {"type": "text", "text": "what?"}])
    assert audio[0] == sound and inside.turns == part.turns and named.turns == turns
    encoder = Encoder(processor, 128)
    samples = [encoder.encode(one) for one in (row(folder, "half.wav"), inside, named, part)]
    for one in samples[1:]:
        assert all(np.array_equal(one.extra[k].values, samples[0].extra[k].values) for k in samples[0].extra)
    broken = row(folder, {"bytes": b"no", "path": "x.wav"})
    with pytest.raises(BadSample, match=r"sound x\.wav \(\w{12}\) cannot be decoded"):
        encoder.encode(broken)
    assert (
        drop_nulls({"a": 1, "audio": audio[1]})
        == drop_nulls({"a": 1, "audio": {"bytes": None, "path": None}})
        == {"a": 1}
    )


def test_sounds_are_never_dropped_silently(folder, processor):
    """In every row layout a sound is encoded or rejected, and its placeholder is never learned as text."""
    position = {"file": "rows", "row": 3, "images": folder}
    prompt_row = {"prompt": "<audio>what?", "audio": "half.wav"}
    assert parse_answered({**prompt_row, "answer": "a tone"}, "prompt", **position) == row(folder, "half.wav")
    with pytest.raises(BadSample, match="a text with a sound"):
        parse_document({"text": "<audio>birds", "audio": "half.wav"}, "text", **position)
    pair = parse_pair({**prompt_row, "chosen": "a tone", "rejected": "no"}, "messages", **position)
    encoder = Encoder(processor, 128)
    with pytest.raises(BadSample, match="not supported in this phase"):
        encoder.encode(pair.chosen)
    with pytest.raises(BadSample, match="writes <audio> in its text, but names no sound"):
        encoder.encode(row(folder, wav="half.wav"))
    with pytest.raises(BadSample, match="the model takes no images"):
        encoder.encode(row(folder, text="<image>what?", image="half.wav"))


def test_rows_with_sound_are_not_cut(folder, processor):
    with pytest.raises(LongSample, match="a row with sound is not cut"):
        Encoder(processor, 16, on_long="cut").encode(row(folder, "half.wav"))
    with pytest.raises(DataError, match="raise train.seq_length"):
        Encoder(processor, 16, on_long="error").encode(row(folder, "half.wav"))


def test_text_only_models_and_audio_placeholders_in_text_are_rejected(folder, processor, tmp_path):
    tiny.write("qwen3", tmp_path / "text", size="mini")
    with pytest.raises(BadSample, match="has a sound, but the model takes no audio"):
        Encoder(models.load_processor(tmp_path / "text"), 128).encode(row(folder, "half.wav"))
    with pytest.raises(BadSample, match="contains the model's placeholder"):
        Encoder(processor, 128).encode(row(folder, text="<|AUDIO|>what?"))
    with pytest.raises(models.ModelError, match="has 0 placeholders .* for 1 sound"):
        processor(text=["none"], audio=[np.zeros(4000, np.float32)])
    with pytest.raises(models.ModelError, match="a model without images. Remove the limit"):
        models.load_processor(folder / "tiny", max_pixels=4096)


def test_missing_audio_packages_are_named(folder, processor, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "soxr", None)
    with pytest.raises(DataError, match="to 16000 samples per second, .*octavo.audio") as other:
        audio_files.load(folder / "slow.wav", audio_files.Limits(RATE, 961, RATE))
    monkeypatch.setitem(__import__("sys").modules, "soundfile", None)
    with pytest.raises(DataError, match=r"pip install 'octavo\[audio\]'") as caught:
        Encoder(processor, 128).encode(row(folder, "half.wav"))
    assert not isinstance(caught.value, BadSample) and not isinstance(other.value, BadSample)
