"""From pictures that were given to the passes that show them to the model, each with the digest that names what it will write.

To answer in words the vision tower reads a picture; to make a picture the autoencoder reads it first, then the vision tower.
Both see it resized by the autoencoder's rule.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass
from typing import Any

from kvlab.errors import InputError
from kvlab.models.bagel.config import BagelConfig
from kvlab.models.bagel.noise import MEAN, VAE, PictureNoise, read_noise
from kvlab.models.bagel.pictures import Pixels, picture_digest, read_picture
from kvlab.models.bagel.plan import MARKERS, SHOW_LATENTS, SHOW_PATCHES, PicturePass
from kvlab.models.bagel.resizing import resize, resized_size

VAE_SAMPLES = ("sample", MEAN)


@dataclass(frozen=True)
class Encoding:
    """How the autoencoder reads pictures: with noise, the seed's or given for each picture, or without."""

    seed: int
    samples: bool = True
    given: tuple[Any, ...] | None = None

    def noise(self, number: int, shape: Sequence[int]) -> PictureNoise | None:
        """Return the noise of picture ``number``, None where there is none."""
        if not self.samples:
            return None
        given = None if self.given is None else read_noise(f"vae_noise {number}", self.given[number], shape)
        return PictureNoise(self.seed, VAE, number, given)


def read_encoding(settings: Mapping[str, Any], seed: int, num_pictures: int) -> Encoding:
    """Return how the pictures of a request that draws are encoded.

    Raises:
        InputError: an unknown ``vae_sample``, or noise for another number of pictures or for none that is sampled.
    """
    how, given = settings.get("vae_sample", "sample"), settings.get("vae_noise")
    if how not in VAE_SAMPLES:
        raise InputError(f"vae_sample is {how!r}; it must be one of {', '.join(VAE_SAMPLES)}")
    if given is None:
        return Encoding(seed, how != MEAN)
    if how == MEAN:
        raise InputError('vae_noise was given and vae_sample is "mean", which uses none; leave one of them out')
    try:
        noises = tuple(given)
    except TypeError:
        raise InputError(f"vae_noise is {given!r:.60}; give a sequence, one tensor a picture") from None
    if len(noises) != num_pictures:
        raise InputError(f"vae_noise has {len(noises)} entries and there are {num_pictures} pictures; give one each")
    return Encoding(seed, True, noises)


def show(
    config: BagelConfig, preprocessing: str, number: int, source: Any, encoding: Encoding | None
) -> tuple[PicturePass, ...]:
    """Return the passes of picture ``number``, in order.

    Args:
        preprocessing: Identity of how prompts are built.
        source: As ``read_picture`` takes it.
        encoding: None where the answer is words.

    Raises:
        InputError: a picture that cannot be read, or noise of another shape.
    """
    picture = read_picture(source)
    pixels = resize(picture, resized_size(config.vae_rule, *picture.shape[:2]))
    seen = _patches(config, preprocessing, number, picture, pixels)
    return (seen,) if encoding is None else (_latents(config, preprocessing, number, picture, pixels, encoding), seen)


def _patches(config: BagelConfig, preprocessing: str, number: int, picture: Pixels, pixels: Pixels) -> PicturePass:
    height, width = resized_size(config.vit_rule, *pixels.shape[:2])
    slots = (height // config.vision.patch_size) * (width // config.vision.patch_size) + MARKERS
    params = (*astuple(config.vae_rule), *astuple(config.vit_rule))
    digest = picture_digest("patches", preprocessing, picture, params, None)
    return PicturePass(SHOW_PATCHES, number, pixels, slots, digest, params)


def _latents(
    config: BagelConfig, preprocessing: str, number: int, picture: Pixels, pixels: Pixels, encoding: Encoding
) -> PicturePass:
    height, width = pixels.shape[:2]
    rows, columns = config.latent_grid(height, width)
    factor = config.autoencoder.downsample
    noise = encoding.noise(number, (config.autoencoder.latent_channels, height // factor, width // factor))
    params = astuple(config.vae_rule)
    digest = picture_digest("latents", preprocessing, picture, params, MEAN if noise is None else noise.identity)
    return PicturePass(SHOW_LATENTS, number, pixels, rows * columns + MARKERS, digest, params, noise)
