"""Rows with videos: positions, selected frames, rejected files, and encoded tensors."""

from __future__ import annotations

import builtins
import json
import os
import shutil
from fractions import Fraction
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import Image

from octavo import models
from octavo.config import Dataset
from octavo.data import BadSample, DataError, LongSample, parse, read
from octavo.data.batching.collate import collate, collate_pack
from octavo.data.builtin.digits import Digits
from octavo.data.encoding import video as video_files
from octavo.data.encoding.encode import Encoder
from octavo.data.encoding.processor_calls import run_together
from octavo.data.encoding.video import FileLimits
from octavo.data.errors import Mismatch
from octavo.data.loaders.token_counts import count_tokens
from octavo.data.rows import video_refs
from octavo.data.rows.video_refs import FrameFolder, InlineVideo, VideoRef
from octavo.data.tasks.pairs import PairEncoder, parse_labelled, parse_pair
from octavo.data.tasks.prompts import PromptEncoder, parse_prompt
from octavo.models.processors.video import VideoProcessor
from octavo.models.tiny import tiny
from octavo.parallel import World
from octavo.train.forward.forward import Forward

av = pytest.importorskip("av", reason="rows with videos need the extra `video`")
KINDS = ("qwen3_vl", "qwen2_5_vl", "internvl")
RATE = 8
GREYS = [7 * n for n in range(30)]  # the grey that frame n has


def write_video(path: Path, count: int = 24, codec: str = "libx264", times=None, size=(16, 16), options=None) -> Path:
    """Write a video of frames of one grey value each, with a key frame every six frames. `times`: uneven time stamps in
    milliseconds."""
    with av.open(str(path), "w") as container:
        stream = container.add_stream(codec, rate=RATE)
        stream.height, stream.width = size
        stream.pix_fmt = "yuv444p" if codec == "libx264" else "yuv420p"
        stream.options = (
            {"qp": "0", "g": "6", "bf": "2", "sc_threshold": "0"} if codec == "libx264" else {"lossless": "1", "g": "6"}
        )
        stream.options = options or stream.options
        if times:
            stream.codec_context.time_base = Fraction(1, 1000)
            stream.options = {**stream.options, "bf": "0"}
        for number in range(count):
            image = np.full((*size, 3), GREYS[number % 30], np.uint8)
            frame = av.VideoFrame.from_ndarray(image, format="rgb24")
            if times:
                frame.pts, frame.time_base = times[number], Fraction(1, 1000)
            container.mux(stream.encode(frame))
        container.mux(stream.encode())
    return path


class Every:
    """A sampler that selects the given frames without resizing."""

    def __init__(self, *numbers: int) -> None:
        self.numbers = numbers

    def indices(self, total: int, fps: float) -> list[int]:
        return list(self.numbers) or list(range(total))

    def size(self, frames: int, height: int, width: int) -> tuple[int, int]:
        return height, width

    def tokens(self, frames: int, height: int, width: int) -> int:
        return frames


def greys(path, *numbers: int, **limits) -> list[int]:
    found = video_files.select_frames(path, Every(*numbers), FileLimits(**limits))
    shot = video_files.load(found, FileLimits(**limits))
    return [round(float(frame.mean())) for frame in shot.frames]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("videos")
    write_video(directory / "a.mp4")
    write_video(directory / "b.webm", codec="libvpx-vp9")
    whole = (directory / "a.mp4").read_bytes()
    (directory / "cut.mp4").write_bytes(whole[: len(whole) // 2])
    webm = (directory / "b.webm").read_bytes()
    (directory / "cut.webm").write_bytes(webm[: len(webm) // 3])
    (directory / "noise.mp4").write_bytes(whole[:40] + np.random.RandomState(0).bytes(4000))
    (directory / "empty.mp4").write_bytes(b"")
    (directory / "text.mp4").write_text("#EXTM3U\nfile:///etc/passwd\n")
    (directory / "frames").mkdir()
    for number in range(12):  # 10 and 11 come after 9
        Image.new("RGB", (16, 16), (GREYS[number],) * 3).save(directory / "frames" / f"f{number}.png")
    (directory / "nothing").mkdir()
    Image.new("RGB", (16, 24), (9, 99, 9)).save(directory / "i.png")
    with av.open(str(directory / "sound.mp4"), "w") as container:
        stream = container.add_stream("aac", rate=16000)
        stream.layout = "mono"
        sound = av.AudioFrame.from_ndarray(np.zeros((1, 1024), np.float32), format="fltp", layout="mono")
        sound.rate = 16000
        container.mux(stream.encode(sound))
        container.mux(stream.encode())
    for kind in KINDS:
        tiny.write(kind, directory / kind, size="mini")
    return directory


@pytest.fixture(scope="module")
def processors(folder):
    return {kind: models.load_processor(folder / kind) for kind in KINDS}


def row(folder: Path, *names, text="<video>what?", form="sharegpt", answer="a digit", **more):
    message = [("human", text), ("gpt", answer)] if isinstance(text, str) else text
    turns = [{"from": who, "value": words} for who, words in message]
    listed = {"video": names[0] if len(names) == 1 else list(names)} if names else {}
    return parse({"conversations": turns, **listed, **more}, form, file="rows", row=3, images=folder)


def test_videos_are_read_from_every_layout(folder):
    plain = row(folder, "a.mp4")
    assert plain.turns[0].parts[0] == VideoRef("a.mp4") and [path.name for path in plain.videos] == ["a.mp4"]
    parts = [{"type": "video", "video": "a.mp4"}, {"type": "text", "text": "what?"}]
    answer = {"role": "assistant", "content": "a digit"}
    for content, more in ((parts, {}), ([{"type": "video"}, parts[1]], {"videos": ["a.mp4"]})):
        raw = {"messages": [{"role": "user", "content": content}, answer], **more}
        assert parse(raw, "messages", file="rows", row=3, images=folder) == plain
    alpaca = {"instruction": "<video>what?", "output": "a digit", "video": "a.mp4"}
    assert parse(alpaca, "alpaca", file="rows", row=3, images=folder).turns == plain.turns
    assert row(folder, "a.mp4", form="llava") == plain
    conversation = row(folder, {"bytes": (folder / "a.mp4").read_bytes(), "path": "x.mp4"})
    assert isinstance(conversation.videos[0], InlineVideo) and greys(conversation.videos[0], 3) == [GREYS[3]]
    for fps in (4, "4.0"):  # a text, as CSV has it
        assert row(folder, "frames", fps=fps).videos == (FrameFolder(folder / "frames", 4.0),)


@pytest.mark.parametrize(
    ("names", "more", "message"),
    [
        (("a.mp4", "b.webm"), {}, r"1 <video> placeholder in its text and 2 videos"),
        (("none.mp4",), {}, "video 'none.mp4' is missing"),
        (("../x.mp4",), {}, "is outside the image folder"),
        (("https://x/y.mp4",), {}, "is not a local file"),
        ((3,), {}, "'video' is 3; expected a file of video or a folder of frames"),
        *(
            (("frames",), {"fps": fps}, "has the fps .*; expected frames per second, a number above 0 and at most 1000")
            for fps in (0, -1, True, "fast", float("nan"), 1001, [4])
        ),
        (("a.mp4",), {"fps": 2}, "has the fps 2, and no folder of frames, .* set data.video.fps"),
    ],
)
def test_invalid_media_rows_are_rejected(folder, names, more, message):
    with pytest.raises(BadSample, match=message):
        row(folder, *names, **more)


@pytest.mark.parametrize("name", ["a.mp4", "b.webm"])
def test_frames_are_selected_by_time_with_seeks(folder, name, monkeypatch):
    write_video = video_files.select_frames(folder / name, Every())
    assert (write_video.total, write_video.fps) == (24, RATE)  # webm has no number of frames in its header
    assert len(write_video.keys) == 4 or name != "a.mp4"
    assert np.abs(np.array(greys(folder / name)) - GREYS[:24]).max() <= (1 if name == "a.mp4" else 2)
    decoded = []
    original = video_files._frames_from

    def counted(*args):
        for frame in original(*args):
            decoded.append(frame.pts)
            yield frame

    monkeypatch.setattr(video_files, "_frames_from", counted)
    assert np.abs(np.array(greys(folder / name, 1, 21)) - [GREYS[1], GREYS[21]]).max() <= 2
    assert name != "a.mp4" or len(decoded) <= 1 + 2 + 4  # the first, 0 and 1, 18 to 21


def test_variable_frame_rate_keeps_timing(tmp_path):
    times = [0, 100, 200, 300, 400, 1400, 2400, 2700]  # a still frame for two seconds
    path = write_video(tmp_path / "v.mp4", len(times), times=times)
    found = video_files.select_frames(path, Every())
    assert found.total == 8 and found.fps == pytest.approx(7 / 2.7)
    wanted = [max(n for n, at in enumerate(times) if at <= 1000 * (i + 0.25) / found.fps) for i in range(8)]
    assert greys(path) == pytest.approx([GREYS[n] for n in wanted], abs=1)
    assert wanted != list(range(8))


def test_late_first_frame_is_not_a_truncation(tmp_path):
    path = write_video(tmp_path / "late.mkv", 6, times=[90_000 + 125 * n for n in range(6)])
    found = video_files.select_frames(path, Every(), FileLimits(seconds=2.0))
    assert (found.total, found.fps) == (6, RATE) and greys(path) == pytest.approx(GREYS[:6], abs=1)


def test_undecodable_key_frames_fall_back_to_the_first(tmp_path):
    """Intra refresh renews a picture column by column, so there is no picture directly after a seek."""
    path = write_video(tmp_path / "r.mp4", 24, options={"x264-params": "intra-refresh=1:keyint=8:bframes=0", "qp": "0"})
    assert len(video_files.select_frames(path, Every()).keys) > 1
    assert greys(path, 0, 9, 10, 20) == pytest.approx([GREYS[n] for n in (0, 9, 10, 20)], abs=1)


def test_pipe_is_rejected_without_reading(tmp_path):
    os.mkfifo(tmp_path / "endless.mp4")
    with pytest.raises(Mismatch, match="is not a file"):
        video_files.select_frames(tmp_path / "endless.mp4", Every())


def test_frame_folder_is_ordered_by_numbers(folder):
    assert greys(FrameFolder(folder / "frames", 4.0)) == GREYS[:12]
    assert greys(FrameFolder(folder / "frames"), 0, 11, folder_fps=2.0) == [GREYS[0], GREYS[11]]


def test_invalid_frame_names_are_rejected(tmp_path):
    for name in ("1.png", "\N{SUPERSCRIPT TWO}5.png", "10.png", "x.png"):
        Image.new("RGB", (8, 8)).save(tmp_path / name)
    names = [path.name for path in video_files._list_frames(FrameFolder(tmp_path, 2.0), FileLimits())]
    assert sorted(names) == sorted(path.name for path in tmp_path.iterdir()) and names.index("1.png") == 0
    (tmp_path / "2.png").symlink_to("gone.png")  # a missing frame must not give a shorter video
    with pytest.raises(Mismatch, match="2.png is not a file; restore or remove it"):
        video_files._list_frames(FrameFolder(tmp_path, 2.0), FileLimits())
    (tmp_path / "2.png").unlink()
    (tmp_path / "2.png").symlink_to("2.png")
    with pytest.raises(Mismatch, match="2.png is not a file|cannot be read"):
        video_files._list_frames(FrameFolder(tmp_path, 2.0), FileLimits())
    (tmp_path / "2.png").unlink()
    Image.new("RGB", (8, 8)).save(tmp_path / "10.jpg")
    with pytest.raises(Mismatch, match="two frames with one name, .*; remove one"):
        video_files._list_frames(FrameFolder(tmp_path, 2.0), FileLimits())


def test_cover_image_is_not_a_video(tmp_path):
    with av.open(str(tmp_path / "song.mp4"), "w") as container:
        cover, song = container.add_stream("mjpeg", rate=1), container.add_stream("aac", rate=16000)
        cover.width, cover.height, cover.pix_fmt, song.layout = 16, 16, "yuvj420p", "mono"
        cover.disposition = av.stream.Disposition.attached_pic
        container.mux(cover.encode(av.VideoFrame.from_ndarray(np.zeros((16, 16, 3), np.uint8), format="rgb24")))
        container.mux(cover.encode())
        sound = av.AudioFrame.from_ndarray(np.zeros((1, 1024), np.float32), format="fltp", layout="mono")
        sound.rate = 16000
        container.mux(song.encode(sound))
        container.mux(song.encode())
    with pytest.raises(Mismatch, match="has only audio"):
        video_files.select_frames(tmp_path / "song.mp4", Every())


@pytest.mark.filterwarnings("error")
def test_folder_frames_are_resized_without_warning(folder):
    takes = SimpleNamespace(indices=lambda *_: [0, 1], size=lambda *_: (32, 32), tokens=lambda *_: 1)
    assert video_files.load(video_files.select_frames(FrameFolder(folder / "frames", 8.0), takes)).frames.shape == (
        2,
        32,
        32,
        3,
    )


def _write_rotated(path: Path, matrix: tuple[float, float, float, float]) -> np.ndarray:
    """Write a video of one frame whose track has the display matrix (a b; c d), and return the frame."""
    image = np.zeros((16, 32, 3), np.uint8)
    image[:8, :8], image[:4, 16:] = 255, 90
    with av.open(str(path), "w") as container:
        stream = container.add_stream("libx264", rate=RATE)
        stream.width, stream.height, stream.pix_fmt, stream.options = 32, 16, "yuv444p", {"qp": "0"}
        container.mux(stream.encode(av.VideoFrame.from_ndarray(image, format="rgb24")))
        container.mux(stream.encode())
    data = bytearray(path.read_bytes())
    at = data.find(b"tkhd") + 4 + 40
    a, b, c, d = (round(65536 * value) for value in matrix)
    data[at : at + 36] = np.array([a, b, 0, c, d, 0, 0, 0, 0x40000000], ">i4").tobytes()
    path.write_bytes(data)
    return image


@pytest.mark.parametrize(
    ("matrix", "shown"),
    [
        ((1, 0, 0, 1), lambda image: image),
        ((0, 1, -1, 0), lambda image: np.rot90(image, -1)),
        ((0, -1, 1, 0), lambda image: np.rot90(image)),
        ((-1, 0, 0, -1), lambda image: np.rot90(image, 2)),
        ((-1, 0, 0, 1), lambda image: image[:, ::-1]),
        ((1, 0, 0, -1), lambda image: image[::-1]),
        ((0, 1, 1, 0), lambda image: image.transpose(1, 0, 2)),
        ((0, -1, -1, 0), lambda image: np.rot90(image.transpose(1, 0, 2), 2)),
        ((0, 0, 0, 0), lambda image: image),  # defines no orientation
        ((0.5, 0.004, -0.004, 0.5), lambda image: image),  # half a degree, and half as large
    ],
)
def test_display_matrix_is_applied(tmp_path, matrix, shown):
    """Phones write their orientation into the matrix of the track, and front cameras a mirror."""
    image = shown(_write_rotated(tmp_path / "t.mp4", matrix))
    found = video_files.select_frames(tmp_path / "t.mp4", Every())
    [frame] = video_files.load(found).frames
    assert found.size == image.shape[:2] and np.abs(frame.astype(int) - image).max() <= 2


@pytest.mark.parametrize("matrix", ((0.7, 0.7, -0.7, 0.7), (1, 0.5, 0, 1), (1, 0, 1, 0), (1, 0, 0, 0)))
def test_oblique_display_matrix_is_rejected(tmp_path, matrix):
    _write_rotated(tmp_path / "t.mp4", matrix)
    with pytest.raises(
        Mismatch, match=r"t\.mp4 has the display matrix \(.*\), which is not a multiple of a quarter turn"
    ):
        video_files.select_frames(tmp_path / "t.mp4", Every())


def test_frames_of_two_sizes_are_rejected(processors, tmp_path):
    """In a folder, also if EXIF rotates a frame, and in a file whose size changes."""
    sizes = {"wide": (32, 16), "turned": (16, 16), "high": (16, 24)}
    for name, size in sizes.items():
        (tmp_path / name).mkdir()
        for number in range(4):
            image = Image.new("RGB", size if number == 2 else (16, 16), (9, 9, 9))
            image.save(tmp_path / name / f"{number}.png")
    exif = Image.Exif()
    exif[0x0112] = 6
    for number in range(4):
        Image.new("RGB", (32, 16)).save(tmp_path / "turned" / f"{number}.png", exif=exif if number == 3 else b"")
    for name, message in (("wide", "16 x 16 pixels, and 2.png 32 x 16"), ("high", "16 x 16 pixels, and 2.png 16 x 24"),
                       ("turned", "32 x 16 pixels, and 3.png 16 x 32")):  # fmt: skip
        with pytest.raises(
            Mismatch, match=rf"{name} has frames of two sizes: the first has {message}; write all in one"
        ):
            video_files.load(video_files.select_frames(FrameFolder(tmp_path / name, 8.0), Every()))
    row = {"messages": [{"role": "user", "content": "<video>?"}, {"role": "assistant", "content": "a"}], "fps": 2}
    (tmp_path / "rows.jsonl").write_text(json.dumps(row | {"videos": ["wide"]}))
    source = read(Dataset(path=str(tmp_path / "rows.jsonl")))
    with pytest.raises(BadSample, match="row 0: video .* has frames of two sizes"):
        Encoder(processors["qwen3_vl"], 512).encode(source[0])
    grown = InlineVideo(_write_sizes(tmp_path, (16, 16), (32, 16)), "grown.mkv")
    with pytest.raises(Mismatch, match=r"grown\.mkv .* the first has 16 x 16 pixels, and frame 3 32 x 16"):
        video_files.load(video_files.select_frames(grown, Every()))


def _write_sizes(folder: Path, *sizes: tuple[int, int]) -> bytes:
    """Write a VP9 stream with three frames of each size."""
    packets = []
    for width, height in sizes:
        stream = av.CodecContext.create("libvpx-vp9", "w")
        stream.width, stream.height, stream.pix_fmt = width, height, "yuv420p"
        stream.time_base, stream.framerate, stream.options = Fraction(1, RATE), RATE, {"lossless": "1"}
        for number in range(3):
            frame = av.VideoFrame.from_ndarray(np.full((height, width, 3), 40 * number, np.uint8), format="rgb24")
            frame.pts = number
            packets += stream.encode(frame)
        packets += stream.encode()
    with av.open(str(folder / "joined.mkv"), "w") as container:
        out = container.add_stream("libvpx-vp9", rate=RATE)
        out.width, out.height, out.pix_fmt = *sizes[0], "yuv420p"
        for number, packet in enumerate(packets):
            packet.stream, packet.pts, packet.dts, packet.time_base = out, number, number, Fraction(1, RATE)
            container.mux(packet)
    return (folder / "joined.mkv").read_bytes()


def test_resized_pixels_match_stock_classes(tmp_path):
    frames = np.random.RandomState(0).randint(0, 256, (3, 40, 24, 3), np.uint8)
    whole = torch.from_numpy(frames).permute(0, 3, 1, 2)
    wanted = F.interpolate(whole, (16, 32), mode="bicubic", antialias=True).permute(0, 2, 3, 1).numpy()
    assert np.array_equal(np.stack([video_files._resize(frame, (16, 32)) for frame in frames]), wanted)


@pytest.mark.parametrize(
    ("name", "limits", "message"),
    [
        ("cut.mp4", {}, "cannot be decoded|is truncated"),
        ("cut.webm", {}, "cannot be decoded|is truncated"),
        ("noise.mp4", {}, "cannot be decoded|has no"),
        ("empty.mp4", {}, "is empty"),
        ("text.mp4", {}, "not mp4, mov, webm or mkv"),
        ("sound.mp4", {}, "has only audio"),
        ("nothing", {}, "a folder without a frame"),
        ("frames", {}, "is a folder of frames without a rate; give the row `fps`, or set data.video.folder_fps"),
        ("a.mp4", {"seconds": 2.0}, "is 3 s long, over the limit of 2 s .data.video.max_seconds"),
        ("frames", {"seconds": 2.0, "folder_fps": 1.0}, "is 12 s long, over the limit of 2 s"),
        ("a.mp4", {"megabytes": 1e-4}, "KB, over the limit of 0.0001 MB .data.video.max_megabytes"),
        ("a.mp4", {"megapixels": 1e-4}, "frames of 16 x 16 pixels, over the limit of 0.0001 megapixels"),
    ],
)
def test_bad_videos_are_bad_samples(folder, processors, name, limits, message):
    encoder = Encoder(processors["qwen3_vl"], 512, file_limits=FileLimits(**limits))
    with pytest.raises(BadSample, match=message) as caught:
        encoder.encode(row(folder, name))
    assert caught.value.row == 3 and name in caught.value.reason


def test_false_length_in_header_is_rejected_early(folder, tmp_path):
    data = bytearray((folder / "b.webm").read_bytes())
    at = data.find(b"\x44\x89\x88") + 3  # Duration, a float of 8 bytes
    assert at > 3
    for claimed, message in ((8.64e7, "is 86400 s long"), (1e6, "is truncated: 24 frames of 3.00 s")):
        data[at : at + 8] = np.array([claimed], ">f8").tobytes()
        (tmp_path / "lie.webm").write_bytes(data)
        with pytest.raises(Mismatch, match=message):
            video_files.select_frames(tmp_path / "lie.webm", Every())


def test_missing_pyav_is_named(folder, processors, monkeypatch):
    real = builtins.__import__

    def without(name, *args, **kwargs):
        if name == "av":
            raise ImportError("No module named 'av'")
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(DataError, match=r"pip install 'octavo\[video\]'"):
        Encoder(processors["qwen3_vl"], 512).encode(row(folder, "a.mp4"))


def test_models_without_video_support_reject_videos(folder, processors, models):
    for kind, message in (
        ("gemma3", "videos are not supported for this model"),
        ("qwen3", "videos are not supported for this model"),
    ):
        with pytest.raises(BadSample, match=message):
            Encoder(models(kind), 512).encode(row(folder, "a.mp4"))
    with pytest.raises(BadSample, match="writes <video> in its text, but names no video"):
        Encoder(processors["qwen3_vl"], 512).encode(row(folder))
    sentence = "which the generation engine does not support: videos of qwen2_5_vl have positions in seconds"
    with pytest.raises(BadSample, match=sentence):
        PromptEncoder(processors["qwen2_5_vl"], 512).encode(prompt(folder))


def prompt(folder: Path):
    raw = {"prompt": "<image>a<video>what?", "answer": "a", "video": "a.mp4", "image": "i.png"}
    return parse_prompt(raw, "prompt", file="rows", row=3, images=folder)


@pytest.mark.parametrize("kind", ["qwen3_vl", "internvl"])
def test_prompt_converts_videos_to_images(folder, processors, kind):
    """The model's output equals that of the same row with a video."""
    prompt_row = prompt(folder)
    sample = PromptEncoder(processors[kind], 512).encode(prompt_row)
    assert sample.columns["videos"] == [str(folder / "a.mp4")] and sample.columns["messages"][0]["content"].count(
        "<video>"
    )
    stock = Encoder(processors[kind], 512)
    [whole] = run_together([stock.encoding(prompt_row.conversation, None)], stock.calls)
    assert sample.images == 1 + 3 and not sample.extra and whole.videos == 1
    model = models.load(folder / kind, dtype=torch.float32)
    forward = Forward(model, World(), None)
    with torch.no_grad():
        assert torch.allclose(forward(collate([sample], 0)), forward(collate([whole], 0)), atol=1e-5)


def test_pair_answers_share_the_video(folder, processors):
    raw = {"chosen": "b", "rejected": "c", "video": "a.mp4"}
    pair = parse_pair({"prompt": "<video>a", **raw}, "pairs", file="rows", row=3, images=folder)
    assert pair.videos == (folder / "a.mp4",) and pair.context_answers == 0
    for kind in KINDS:
        encoded_pair, alone = PairEncoder(processors[kind], 512).encode(pair), Encoder(processors[kind], 512)
        for side, sample in (("chosen", encoded_pair.chosen), ("rejected", encoded_pair.rejected)):
            of = alone.encode(getattr(pair, side))
            assert np.array_equal(sample.input_ids, of.input_ids) and sample.videos == 1
            for name, one in of.extra.items():
                assert np.array_equal(sample.extra[name].values, one.values)
    labelled = {"prompt": "a", "completion": [{"role": "assistant", "content": "<video>b"}], "label": True}
    with pytest.raises(BadSample, match="a video in the answer that is labelled, but answers are text"):
        parse_labelled({**labelled, "video": "a.mp4"}, "labelled", file="rows", row=3, images=folder)


def mixed(folder: Path) -> list:
    return [
        row(folder, "a.mp4"),
        row(folder, "b.webm", text="<image>x<video>y<image>what?", images=["i.png", "i.png"]),
        row(folder, text="only words?"),
        row(folder, text="<image>what?", images=["i.png"]),
        row(folder, "a.mp4", "frames", text="<video>and<video>?", fps=4),
    ]


@pytest.mark.parametrize("kind", KINDS)
def test_batch_of_videos_images_and_text_matches_stock_model(folder, processors, kind):
    torch.manual_seed(0)
    model = models.load(folder / kind, dtype=torch.float32)
    encoder = Encoder(processors[kind], 512)
    rows = mixed(folder)
    samples = encoder.encode_all(rows)
    assert not any(isinstance(made, Exception) for made in samples), samples
    assert [len(made.input_ids) for made in samples] == count_tokens(encoder, rows)  # counted without decoding
    assert [made.videos for made in samples] == [1, 1, 0, 0, 2]
    for made, alone in zip(samples, map(encoder.encode, rows), strict=True):
        assert np.array_equal(made.input_ids, alone.input_ids)
        assert processors[kind].tokenizer.decode(made.input_ids[made.labels != -100]).startswith("a digit")
        for name, one in made.extra.items():
            assert np.array_equal(one.values, alone.extra[name].values)
    batch = collate(samples, 0)
    forward, given = Forward(model, World(), None), {k: v for k, v in batch.items() if k not in ("meta", "labels")}
    mask = batch["attention_mask"].bool()
    ours, stock = forward(dict(batch)), model(**given, use_cache=False).logits
    assert torch.allclose(ours[mask], stock[mask], atol=1e-5)
    assert forward.images and forward.has_images_here(batch)
    grads = []
    for logits in (ours, stock):
        model.zero_grad()
        logits[mask].square().sum().backward()
        grads.append({n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None})
    assert all(torch.allclose(grads[0][n], grads[1][n], atol=1e-3, rtol=1e-3) for n in grads[1])
    packed = Forward(model, World(), None, packed=models.Packed(model, models.describe(model)))
    with torch.no_grad():
        pack, at = packed(collate_pack(samples, 0, 1024)), 0
    for number, made in enumerate(samples):
        length = len(made.input_ids)
        assert torch.allclose(pack[0, at : at + length], ours[number, :length], atol=1e-4)
        at += length


@pytest.mark.parametrize("kind", KINDS)
def test_rows_are_cut_before_a_video_never_inside(folder, processors, kind):
    encoder, cutting = Encoder(processors[kind], 512), None
    turns = [("human", "<video>what?"), ("gpt", "one"), ("human", "<video><image>and?"), ("gpt", "two")]
    conversation = row(folder, "a.mp4", "b.webm", text=turns, images=["i.png"])
    whole = encoder.encode(conversation)
    first = whole.films[0] if whole.films else whole.places[0]
    seen = set()
    for length in range(first[1] + 8, len(whole.input_ids)):
        cutting = Encoder(processors[kind], length, on_long="cut")
        try:
            sample = cutting.encode(conversation)
        except LongSample:
            continue
        seen.add(len(sample.input_ids))
        assert len(sample.input_ids) <= length and np.array_equal(
            sample.input_ids, whole.input_ids[: len(sample.input_ids)]
        )
        spans = (*sample.films, *sample.places)
        assert all(end <= len(sample.input_ids) for _, end in spans)
        batch = collate([sample], 0)
        if kind == "internvl":
            assert len(batch["pixel_values"]) * 4 == int((sample.input_ids == processors[kind].image_token_id).sum())
        else:
            pads = int((sample.input_ids == processors[kind].video_token_id).sum())
            assert int(batch["video_grid_thw"].prod(-1).sum()) == 4 * pads == len(batch["pixel_values_videos"])
            assert len(batch["video_grid_thw"]) == sample.videos
    assert len(seen) > 3
    with pytest.raises(LongSample, match="has a video of 12 tokens .* lower data.video.fps"):
        Encoder(processors[kind], 8, on_long="cut").encode(conversation)
    with pytest.raises(DataError, match="has a video of 12 tokens"):
        Encoder(processors[kind], 8, on_long="error").encode(conversation)
    with pytest.raises(LongSample):
        Encoder(processors[kind], len(whole.input_ids) - 1).encode(conversation)
    with pytest.raises(LongSample, match="falls into a video, which is removed whole, and nothing to learn is left"):
        Encoder(processors[kind], first[1] - 1, on_long="cut").encode(conversation)


def test_tar_rows_contain_their_videos(folder, tmp_path):
    import json
    import tarfile

    turns = [{"from": "human", "value": "<video>what?"}, {"from": "gpt", "value": "a digit"}]
    for name, content in (("1.json", json.dumps({"conversations": turns}).encode()), ("1.mp4", b"")):
        (tmp_path / name).write_bytes(content or (folder / "a.mp4").read_bytes())
    with tarfile.open(tmp_path / "a.tar", "w") as archive:
        for name in ("1.json", "1.mp4"):
            archive.add(tmp_path / name, name)
    [video] = read(Dataset(path=str(tmp_path / "a.tar")))[0].videos
    assert isinstance(video, InlineVideo) and video.name == "1.mp4" and greys(video, 5) == [GREYS[5]]


def test_frame_folder_rejects_outside_links(folder, tmp_path):
    shutil.copytree(folder / "frames", tmp_path / "f")
    (tmp_path / "f" / "f99.png").symlink_to(folder / "i.png")
    with pytest.raises(Mismatch, match="whose f99.png is a link to a file outside it; copy the file there"):
        video_files.select_frames(FrameFolder(tmp_path / "f", 4.0), Every())


def test_digit_clips_are_reproducible(tmp_path):
    from octavo.data.builtin import digit_clips

    sets = [digit_clips.write(tmp_path / name, 3, 2, digits=2, hold=3) for name in ("a", "b")]
    assert isinstance(sets[0], Digits)
    files = [{p.relative_to(m.directory): p.read_bytes() for p in m.directory.rglob("*.*")} for m in sets]
    assert files[0] == files[1] and len([name for name in files[0] if name.suffix == ".mp4"]) == 5
    conversation = read(Dataset(path=str(sets[0].test)))[0]
    assert conversation.turns[0].text == digit_clips.QUESTION and len(conversation.turns[1].text.split()) == 2
    assert video_files.select_frames(conversation.videos[0], Every()).total == 6
    assert digit_clips.write(tmp_path / "a", 3, 2, digits=2, hold=3) == sets[0]
    with pytest.raises(DataError, match="different settings .digits: 2 there, 4 asked"):
        digit_clips.write(tmp_path / "a", 3, 2, digits=4, hold=3)
    next((tmp_path / "a" / "videos" / "train").glob("*.mp4")).unlink()
    with pytest.raises(DataError, match="is not complete .2 of 3 train videos"):
        digit_clips.write(tmp_path / "a", 3, 2, digits=2, hold=3)


def test_sampler_protocol_matches_the_families():
    assert (
        all(hasattr(VideoProcessor, name) for name in ("indices", "size", "tokens"))
        and video_refs.PLACEHOLDER == "<video>"
    )
