"""Locations of image files, and untrusted image files."""

import struct
import zlib

import numpy as np
import pytest
from PIL import Image

from octavo.data.errors import MediaProblem
from octavo.data.rows.image_refs import load
from octavo.data.rows.media import locate


def test_paths_inside_the_folder_are_accepted(folder):
    folder.image("in/a.png")
    root, path = folder.path / "in", folder.path / "in" / "a.png"
    for name in ("a.png", "./a.png", "../in/a.png", str(path), f"file://{path}"):
        assert locate(root, name) == path
    (folder.path / "link").symlink_to(root)
    assert locate(folder.path / "link", "a.png") == path


def test_paths_outside_the_folder_are_rejected(folder):
    folder.image("out/secret.png")
    root = folder.path / "in"
    root.mkdir()
    (root / "link.png").symlink_to(folder.path / "out" / "secret.png")
    (root / "dir").symlink_to(folder.path / "out")
    outside = str(folder.path / "out" / "secret.png")
    for name in ("../out/secret.png", outside, "link.png", "dir/secret.png", "/etc/hostname", "../in-other/x.png"):
        with pytest.raises(MediaProblem, match="is outside the image folder .*name the folder that holds it"):
            locate(root, name)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("none.png", r"'none.png' is missing: no file at .*none\.png; check the row, and `images`"),
        (".", "is missing"),
        ("", "'' is not a file name"),
        ("a\0.png", "is not a file name"),
        ("x" * 5000, "cannot be resolved"),
        ("https://example.org/a.png", "Octavo does not download images; copy it"),
        ("S3://bucket/a.png", "is not a local file"),
    ],
)
def test_unresolvable_names_are_rejected(folder, name, message):
    with pytest.raises(MediaProblem, match=message):
        locate(folder.path, name)


def test_link_loop_is_rejected(folder):
    (folder.path / "a").symlink_to("b")
    (folder.path / "b").symlink_to("a")
    with pytest.raises(MediaProblem, match="cannot be resolved"):
        locate(folder.path, "a")


def test_truncated_and_broken_images_are_rejected(folder):
    noise = np.random.default_rng(0).integers(0, 255, (64, 64, 3), dtype=np.uint8)
    Image.fromarray(noise).save(folder.path / "a.jpg")
    whole = (folder.path / "a.jpg").read_bytes()
    load(folder.path / "a.jpg")
    for content in (whole[: len(whole) // 2], whole[:30], b"", b"not an image", b"\x89PNG\r\n\x1a\n" + b"\0" * 40):
        (folder.path / "b.jpg").write_bytes(content)
        with pytest.raises(MediaProblem, match=r"image .*b\.jpg cannot be decoded \(\w+: ") as problem:
            load(folder.path / "b.jpg")
        assert problem.value.__cause__ is not None


def test_decompression_bomb_is_rejected_by_its_header(folder):
    def chunk(kind, data):
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", 60_000, 60_000, 8, 2, 0, 0, 0)
    png = b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(b"\0")) + chunk(b"IEND", b"")
    (folder.path / "bomb.png").write_bytes(png)
    with pytest.raises(MediaProblem, match=r"60000 x 60000 = 3600 megapixels, over the limit of 100 .*raise data\.max"):
        load(folder.path / "bomb.png")
    # With a higher limit it is decoded and rejected as broken; Pillow's own limit does not interfere.
    before = Image.MAX_IMAGE_PIXELS
    folder.image("ok.png", (100, 30))
    with pytest.raises(MediaProblem, match="over the limit of 0.002"):
        load(folder.path / "ok.png", 0.002)
    assert load(folder.path / "ok.png", 0.003).size == (100, 30) and before == Image.MAX_IMAGE_PIXELS


def test_every_mode_is_converted_to_upright_rgb(folder):
    for mode, name in (("L", "a.png"), ("P", "b.png"), ("RGBA", "c.png"), ("CMYK", "d.jpg"), ("1", "e.png")):
        Image.new(mode, (4, 3)).save(folder.path / name)
        assert load(folder.path / name).mode == "RGB"
    deep = Image.fromarray(np.full((3, 4), 257 * 100, dtype=np.uint16))
    deep.save(folder.path / "f.png")
    assert np.asarray(load(folder.path / "f.png")).tolist() == [[[100] * 3] * 4] * 3
    turned = Image.new("RGB", (4, 3))
    exif = turned.getexif()
    exif[0x0112] = 6
    turned.save(folder.path / "g.jpg", exif=exif)
    assert load(folder.path / "g.jpg").size == (3, 4)
