"""Pictures of any kind become the same pixels, and what becomes other pixels gets another digest."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
import pytest
import torch

from kvlab.errors import InputError
from kvlab.models.bagel.pictures import is_picture, picture_digest, read_picture

Image = pytest.importorskip("PIL.Image")

RGB = np.random.default_rng(0).integers(0, 256, (6, 4, 3), dtype=np.uint8)
PLAIN = Image.fromarray(RGB)


def digest(source, params=(), noise=None, modality="patches"):
    return picture_digest(modality, "as it is", read_picture(source), params, noise)


def saved(image, tmp_path: Path, name: str, **options) -> Path:
    image.save(tmp_path / name, **options)
    return tmp_path / name


# -- what is read ------------------------------------------------------------------------------------------------------


def test_a_file_an_image_an_array_and_a_tensor_of_one_picture_are_one(tmp_path):
    sources = [PLAIN, RGB, torch.from_numpy(RGB), saved(PLAIN, tmp_path, "ein Bild ä.png"), PLAIN.convert("RGBA")]
    assert all(np.array_equal(read_picture(source), RGB) for source in sources)
    assert len({digest(source) for source in sources}) == 1


@pytest.mark.parametrize("orientation", range(1, 9))
def test_a_file_is_turned_as_its_exif_says(tmp_path, orientation):
    exif = Image.Exif()
    exif[0x0112] = orientation
    turned = read_picture(saved(PLAIN, tmp_path, "a.png", exif=exif))
    upright = {
        1: RGB, 2: RGB[:, ::-1], 3: RGB[::-1, ::-1], 4: RGB[::-1], 5: RGB.transpose(1, 0, 2),
        6: np.rot90(RGB, -1), 7: RGB[::-1, ::-1].transpose(1, 0, 2), 8: np.rot90(RGB),
    }  # fmt: skip
    assert np.array_equal(turned, upright[orientation])


def test_transparency_is_pasted_on_white():
    rgba = np.zeros((2, 2, 4), dtype=np.uint8)
    rgba[0, 0] = (10, 20, 30, 255)
    shown = np.full((2, 2, 3), 255, dtype=np.uint8)
    shown[0, 0] = (10, 20, 30)
    assert np.array_equal(read_picture(Image.fromarray(rgba)), shown)
    assert np.array_equal(read_picture(rgba), shown)


@pytest.mark.parametrize("mode", ["LA", "La", "RGBa"])
def test_every_mode_with_transparency_is_pasted_on_white(mode):
    clear = Image.new("RGBA", (3, 2), (0, 0, 0, 0))
    image = clear.convert("LA").convert("La") if mode == "La" else clear.convert(mode)
    assert (read_picture(image) == 255).all()


def test_a_palette_with_a_transparent_entry_is_pasted_on_white(tmp_path):
    image = Image.new("P", (2, 1))
    image.putpalette([255, 0, 0, 0, 0, 255])
    image.putdata([0, 1])
    read = read_picture(saved(image, tmp_path, "a.png", transparency=1))
    assert read.tolist() == [[[255, 0, 0], [255, 255, 255]]]


@pytest.mark.parametrize("mode", ["1", "L", "CMYK", "YCbCr", "HSV"])
def test_other_modes_become_rgb(mode):
    assert read_picture(PLAIN.convert(mode)).shape == (6, 4, 3)


def test_grey_is_three_equal_channels():
    grey = RGB[:, :, 0]
    for source in (grey, grey[:, :, None], Image.fromarray(grey)):
        assert np.array_equal(read_picture(source), np.repeat(grey[:, :, None], 3, axis=2))


def test_16_bits_and_floats_show_what_8_bits_show(tmp_path):
    grey = RGB[:, :, 0]
    deep = Image.fromarray(grey.astype(np.uint16) * 257)
    for source in (deep, saved(deep, tmp_path, "deep.png"), grey.astype(np.uint16) * 257, grey / 255, grey.astype("f4") / 255):
        assert np.array_equal(read_picture(source)[:, :, 0], grey)
    assert read_picture(np.array([[True, False]])).tolist() == [[[255] * 3, [0] * 3]]


def test_a_bfloat16_tensor_is_read_as_the_float32_it_is():
    half = torch.from_numpy(RGB / 255).bfloat16()
    assert np.array_equal(read_picture(half), read_picture(half.float()))


def test_what_is_a_picture():
    assert is_picture(Path("a.png"))
    assert is_picture(PLAIN)
    assert is_picture(RGB)
    assert is_picture(torch.zeros(2, 2))
    assert not any(is_picture(part) for part in ("a.png", [1, 2], 3, None))


def test_the_pixels_are_a_copy():
    source = RGB.copy()
    pixels = read_picture(source)
    source[:] = 0
    assert np.array_equal(pixels, RGB)


# -- what is refused ---------------------------------------------------------------------------------------------------


def test_a_truncated_file_is_named(tmp_path):
    whole = saved(Image.fromarray(np.random.default_rng(0).integers(0, 256, (64, 64, 3), dtype=np.uint8)), tmp_path, "a.png")
    (tmp_path / "cut.png").write_bytes(whole.read_bytes()[:2000])
    with pytest.raises(InputError, match=r"cut\.png: .*damaged or cut off"):
        read_picture(tmp_path / "cut.png")


def test_a_truncated_image_that_was_opened_elsewhere_is_refused():
    buffer = io.BytesIO()
    Image.fromarray(np.random.default_rng(0).integers(0, 256, (64, 64, 3), dtype=np.uint8)).save(buffer, "JPEG")
    with pytest.raises(InputError, match="cannot be read to its end"):
        read_picture(Image.open(io.BytesIO(buffer.getvalue()[:1500])))


@pytest.mark.parametrize("content", [None, b"", b"no picture at all"])
def test_a_file_that_is_no_picture_is_named(tmp_path, content):
    if content is not None:
        (tmp_path / "a.png").write_bytes(content)
    with pytest.raises(InputError, match=r"the picture .*a\.png cannot be read"):
        read_picture(tmp_path / "a.png")


@pytest.mark.parametrize("source", [np.zeros((0, 4, 3), dtype=np.uint8), np.zeros((4, 0), dtype=np.uint8)])
def test_a_picture_without_pixels_is_refused(source):
    with pytest.raises(InputError, match="pixels; it has none"):
        read_picture(source)


def test_an_image_without_pixels_is_refused():
    with pytest.raises(InputError, match="0 x 5 pixels"):
        read_picture(Image.new("RGB", (0, 5)))


@pytest.mark.parametrize("shape", [(3, 8, 8), (4,), (2, 3, 4, 3), (4, 4, 2), (4, 4, 5)])
def test_an_array_of_another_shape_is_refused_with_its_shape(shape):
    with pytest.raises(InputError, match=rf"shape \({shape[0]},.*height, width"):
        read_picture(np.zeros(shape, dtype=np.uint8))


@pytest.mark.parametrize("dtype", [np.int32, np.int64, np.complex64])
def test_an_array_of_another_type_is_refused(dtype):
    with pytest.raises(InputError, match=f"an array of {np.dtype(dtype)}"):
        read_picture(np.zeros((2, 2, 3), dtype=dtype))


@pytest.mark.parametrize("value", [-0.1, 255.0, float("nan"), float("inf")])
def test_floats_out_of_range_are_refused(value):
    with pytest.raises(InputError, match="must lie from"):
        read_picture(np.full((2, 2, 3), value))


def test_text_is_no_picture():
    with pytest.raises(InputError, match=r"pathlib\.Path or an array; got str"):
        read_picture("a.png")


# -- identity ----------------------------------------------------------------------------------------------------------


def test_k1_6_another_background_is_another_picture():
    clear = Image.new("RGBA", (4, 4), (0, 0, 0, 0))
    on_black = Image.alpha_composite(Image.new("RGBA", (4, 4), (0, 0, 0, 255)), clear)
    assert digest(clear) != digest(on_black)


def test_k1_6_another_palette_is_another_picture():
    red, blue = Image.new("P", (4, 4)), Image.new("P", (4, 4))
    red.putpalette([255, 0, 0])
    blue.putpalette([0, 0, 255])
    assert red.tobytes() == blue.tobytes()
    assert digest(red) != digest(blue)


def test_k1_6_another_shape_of_the_same_bytes_is_another_picture():
    assert digest(RGB) != digest(RGB.reshape(4, 6, 3))


def test_k1_6_floats_of_equal_values_are_the_same_picture():
    assert digest(RGB / 255) == digest(RGB)


def test_k1_6_opaque_rgba_is_the_same_picture_as_rgb():
    assert digest(PLAIN.convert("RGBA")) == digest(PLAIN)


def test_every_setting_and_its_type_is_in_the_digest():
    params = [(), (True,), ("True",), (1,), (1, 2), ((1, 2),)]
    assert len({digest(RGB, p) for p in params}) == len(params)
    assert digest(RGB, modality="patches") != digest(RGB, modality="latents")
    assert len({digest(RGB, noise=n) for n in (None, "mean", (1, 0), (1, 1), b"given")}) == 5


def test_every_pixel_is_in_the_digest():
    large = np.zeros((300, 300, 3), dtype=np.uint8)
    other = large.copy()
    other[299, 299, 2] = 1
    assert digest(large) != digest(other)
    assert len(digest(large)) == 32
