"""Decoded pixels of every mode of image files; ambiguous files are rejected."""

import os
import struct
import zlib

import numpy as np
import PIL
import pytest
from PIL import Image

from octavo.data.errors import MediaProblem
from octavo.data.rows.image_refs import FORMATS, load

RED, HALF, CLEAR = (255, 0, 0, 255), (0, 0, 255, 128), (9, 9, 9, 0)
OVER_WHITE = [(255, 0, 0), (127, 127, 255), (255, 255, 255)]  # of the three
GREY = np.array([0, 100, 255])


def png(bits: int, colour: int, samples: bytes, width: int, key: bytes = b"") -> bytes:
    """Make a PNG of one row. `colour` is 0 for grey, 2 for RGB; `key` is the transparent color."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", width, 1, bits, colour, 0, 0, 0)
    chunks = chunk(b"IHDR", header) + (chunk(b"tRNS", key) if key else b"")
    return b"\x89PNG\r\n\x1a\n" + chunks + chunk(b"IDAT", zlib.compress(b"\0" + samples)) + chunk(b"IEND", b"")


def tiff(
    order: str, bits: int, samples: bytes, width: int, photometric: int = 1, form: int = 1, extra: int = -1
) -> bytes:
    """Make an uncompressed TIFF of one row. `order` is < or >, `form` 1 unsigned, 2 signed, 3 float; `extra` 1
    premultiplied alpha, 2 alpha, of samples of 8 bits."""
    channels = 1 + (extra >= 0)
    tags = [(256, width), (257, 1), (258, bits), (259, 1), (262, photometric), (273, 8), (277, channels), (278, 1)]
    tags += [(279, len(samples)), *([(338, extra)] if extra >= 0 else []), (339, form)]
    entries = [struct.pack(f"{order}HHI", tag, 3, 1) + struct.pack(f"{order}HH", value, 0) for tag, value in tags]
    if extra >= 0:
        entries[2] = struct.pack(f"{order}HHI", 258, 3, 2) + struct.pack(f"{order}HH", 8, 8)
    head = {"<": b"II", ">": b"MM"}[order] + struct.pack(f"{order}HI", 42, 8 + len(samples))
    return head + samples + struct.pack(f"{order}H", len(tags)) + b"".join(entries) + bytes(4)


def grey(dtype: str, values: object) -> bytes:
    return np.array(values).astype(dtype).tobytes()


def image(mode: str, *pixels: object) -> Image.Image:
    result = Image.new(mode, (len(pixels), 1))
    for x, pixel in enumerate(pixels):
        result.putpixel((x, 0), pixel)
    return result


def palette(*transparency: int) -> Image.Image:
    result = Image.new("P", (3, 1))
    result.putpalette([255, 0, 0, 0, 0, 255, 9, 9, 9])
    result.putdata([0, 1, 2])
    result.info["transparency"] = bytes(transparency)
    return result


TWELVE = bytes([0x00, 0x00, 0x64, 0xFF, 0xF0])  # 0, 100 and 0xFFF, of 12 bits each
BYTES = {
    "16 bits, little": (tiff("<", 16, grey("<u2", GREY * 257), 3), GREY),
    "16 bits, big": (tiff(">", 16, grey(">u2", GREY * 257), 3), GREY),
    "16 bits, white is zero": (tiff("<", 16, grey("<u2", GREY * 257), 3, photometric=0), 255 - GREY),
    "12 bits": (tiff("<", 12, TWELVE, 3), [0, 6, 255]),
    "32 bits": (tiff("<", 32, grey("<u4", GREY * 0x1010101), 3), GREY),
    "floats to 1": (tiff("<", 32, grey("<f4", GREY / 255), 3, form=3), GREY),
    "floats to 1, big": (tiff(">", 32, grey(">f4", GREY / 255), 3, form=3), GREY),
    "floats, white is zero": (tiff("<", 32, grey("<f4", GREY / 255), 3, 0, 3), 255 - GREY),
    "floats of 8 bits": (tiff("<", 32, grey("<f4", GREY), 3, form=3), GREY),
    "16 bits, PNG": (png(16, 0, grey(">u2", GREY * 257), 3), GREY),
    "rounded, not cut": (png(16, 0, grey(">u2", [0, 200, 65000]), 3), [0, 1, 253]),
    "16 bits, transparent": (png(16, 0, grey(">u2", GREY * 257), 3, struct.pack(">H", 25700)), [0, 255, 255]),
    "8 bits, transparent": (png(8, 0, bytes([0, 100, 255]), 3, b"\0\0"), [255, 100, 255]),
    "4 bits, transparent": (png(4, 0, bytes([0x15, 0xF0]), 3, b"\0\5"), [17, 255, 255]),
    "2 bits, transparent": (png(2, 0, bytes([0b01101100]), 3, b"\0\1"), [255, 170, 255]),
    "1 bit, transparent": (png(1, 0, bytes([0b01000000]), 3, b"\0\0"), [255, 255, 255]),
    "RGB, transparent": (png(8, 2, bytes([1, 2, 3] * 2 + [7] * 3), 3, bytes([0, 1, 0, 2, 0, 3])), [255, 255, 7]),
    "16 bits, PGM": (b"P5 3 1 65535\n" + grey(">u2", GREY * 257), GREY),
    "10 bits, PGM": (b"P5 3 1 1023\n" + grey(">u2", [0, 401, 1023]), GREY),
    "premultiplied": (tiff("<", 8, bytes([0, 0, 64, 128, 200, 255]), 3, extra=1), [255, 191, 200]),
    "alpha": (tiff("<", 8, bytes([0, 0, 0, 128, 200, 255]), 3, extra=2), [255, 127, 200]),
}  # fmt: skip
SAVED = {
    "RGBA, PNG": (image("RGBA", RED, HALF, CLEAR), "png", {}),
    "RGBA, WebP": (image("RGBA", RED, HALF, CLEAR), "webp", {"lossless": True, "exact": True}),
    "RGBA, TIFF": (image("RGBA", RED, HALF, CLEAR), "tif", {"compression": "tiff_lzw"}),
    "palette, PNG": (palette(255, 128, 0), "png", {}),
}
REFUSED = {
    "signed 8 bits": (tiff("<", 8, bytes(3), 3, form=2), "is a TIFF of signed integers, which defines no black"),
    "signed 16 bits": (tiff("<", 16, bytes(6), 3, form=2), "is a TIFF of signed integers"),
    "signed 32 bits": (tiff("<", 32, bytes(12), 3, form=2), "is a TIFF of signed integers"),
    "light": (
        tiff("<", 32, grey("<f4", [0, 0.5, 7.5]), 3, form=3),
        "has F values from 0 to 7.5, where 0 would be bl",
    ),
    "whole, over 255": (
        tiff("<", 32, grey("<f4", [0, 1, 300]), 3, form=3),
        "has F values from 0 to 300, where 0 .* and 255 white",
    ),
    "below zero": (tiff("<", 32, grey("<f4", [-1, 0, 1]), 3, form=3), "has F values from -1 to 1"),
    "no number": (tiff("<", 32, grey("<f4", [0, np.nan, 1]), 3, form=3), "has F values from nan to nan"),
    "infinite": (tiff("<", 32, grey("<f4", [0, np.inf, 1]), 3, form=3), "has F values from 0 to inf"),
    "key of 16 bits": (
        png(16, 2, bytes(18), 3, bytes(6)),
        "has a 16-bit transparent color, of which 8 bits are read",
    ),
}


OLD = int(PIL.__version__.split(".")[0]) < 13  # TIFFs of two modes are rejected as undecodable


@pytest.mark.parametrize("case", BYTES)
def test_grey_values_are_scaled(tmp_path, case):
    if OLD and case == "premultiplied":
        pytest.skip(f"Pillow {PIL.__version__} does not read it")
    content, expected = BYTES[case]
    (tmp_path / "a").write_bytes(content)
    assert np.asarray(load(tmp_path / "a")).tolist() == [[[value] * 3 for value in expected]]


@pytest.mark.parametrize("case", SAVED)
def test_transparency_shows_white(tmp_path, case):
    stored, kind, options = SAVED[case]
    stored.save(tmp_path / f"a.{kind}", **options)
    assert [tuple(pixel) for pixel in np.asarray(load(tmp_path / f"a.{kind}"))[0].tolist()] == OVER_WHITE


@pytest.mark.parametrize("case", REFUSED)
def test_ambiguous_pixel_formats_are_rejected(tmp_path, case):
    content, message = REFUSED[case]
    (tmp_path / "a").write_bytes(content)
    with pytest.raises(MediaProblem, match=rf"image .*/a {message}"):
        load(tmp_path / "a")


def test_cmyk_and_lab_are_converted(tmp_path):
    for mode, colour, kind, expected in (
        ("CMYK", (0, 255, 255, 0), "tif", (255, 0, 0)), ("CMYK", (0, 0, 0, 255), "jpg", (0, 0, 0)),
        ("YCbCr", (76, 85, 255), "tif", (254, 0, 0)), ("LAB", (255, 128, 128), "tif", (255, 255, 255)),
        ("1", 1, "tif", (255, 255, 255)), ("RGBX", (9, 8, 7, 0), "tif", (9, 8, 7)),
        ("PA", (0, 255), "tif", (0, 0, 0)), ("I;16B", 25700, "jp2", (100, 100, 100)),
    ):  # fmt: skip
        if OLD and mode == "YCbCr":
            continue
        Image.new(mode, (16, 16), colour).save(tmp_path / f"a.{kind}")
        found = np.asarray(load(tmp_path / f"a.{kind}")).astype(int)
        assert np.abs(found - expected).max() <= 2, (mode, found[0, 0])


def test_orientation_is_applied_and_first_frame_used(tmp_path):
    deep = Image.fromarray(np.array([[0, 65535, 0]], dtype=np.uint16))
    exif = deep.getexif()
    exif[0x0112] = 6
    deep.save(tmp_path / "a.png", exif=exif)
    assert np.asarray(load(tmp_path / "a.png"))[..., 0].tolist() == [[0], [255], [0]]
    frames = [Image.new("L", (3, 1), value) for value in (7, 200)]
    for name in ("a.gif", "a.tif"):
        frames[0].save(tmp_path / name, save_all=True, append_images=frames[1:])
        assert np.asarray(load(tmp_path / name))[..., 0].tolist() == [[7, 7, 7]]


def test_no_decoder_starts_a_program(tmp_path, monkeypatch):
    """Pillow reads PostScript with Ghostscript, and detects it by content under any file name."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "gs").write_text(f"#!/bin/sh\ntouch {tmp_path}/started\n")
    os.chmod(tmp_path / "bin" / "gs", 0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}/bin:/usr/bin:/bin")
    Image.new("RGB", (8, 8)).save(tmp_path / "a.eps")
    (tmp_path / "a.eps").rename(tmp_path / "a.png")
    for others in (tmp_path / "a.png", _saved(tmp_path / "a.ico"), _saved(tmp_path / "a.pcx")):
        with pytest.raises(MediaProblem, match="its header matches none of PNG, JPEG, .*; convert it to one of them"):
            load(others)
    assert not (tmp_path / "started").exists() and "EPS" not in FORMATS


def _saved(path):
    Image.new("RGB", (16, 16)).save(path)
    return path
