"""How a picture is drawn: the settings of ``kvlab.draw`` checked, and what each is when nobody names it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from types import MappingProxyType
from typing import Any

from kvlab.errors import InputError
from kvlab.models.bagel.config import BagelConfig
from kvlab.models.bagel.flow import Guidance
from kvlab.models.bagel.resizing import default_size, require_size
from kvlab.options import is_number, whole

#: As released, for a picture of texts alone ...
OF_TEXT: Mapping[str, Any] = MappingProxyType(
    {
        "num_timesteps": 50,
        "timestep_shift": 3.0,
        "cfg_text_scale": 4.0,
        "cfg_img_scale": 1.0,
        "cfg_interval": (0.4, 1.0),
        "cfg_renorm": "global",
        "cfg_renorm_min": 0.0,
    }
)
#: ... and for an edit of pictures that were given.
OF_PICTURES: Mapping[str, Any] = MappingProxyType(
    {**OF_TEXT, "cfg_img_scale": 2.0, "cfg_interval": (0.0, 1.0), "cfg_renorm": "text_channel"}
)
#: With no text to follow there is nothing to guide by.
UNGUIDED: Mapping[str, Any] = MappingProxyType({"cfg_text_scale": 1.0, "cfg_img_scale": 1.0})
NAMES = frozenset((*OF_TEXT, "size", "vae_sample", "noise", "vae_noise"))


@dataclass(frozen=True)
class Drawing:
    """Checked settings of one picture."""

    height: int
    width: int
    num_timesteps: int
    timestep_shift: float
    guidance: Guidance

    @property
    def note(self) -> str | None:
        """What a client should know of these settings, None where there is nothing."""
        guidance = self.guidance
        if guidance.img_scale > 1 and not guidance.uses_text:
            return (
                f"cfg_img_scale {guidance.img_scale:g} does nothing while cfg_text_scale is {guidance.text_scale:g}: pictures "
                "guide only what the text guides; set cfg_text_scale above 1"
            )
        return None


def read_drawing(
    settings: Mapping[str, Any], config: BagelConfig, *, picture_size: tuple[int, int] | None, has_text: bool
) -> Drawing:
    """Return how the picture of a request is drawn.

    Args:
        settings: What the client named; the rest is as released.
        picture_size: (height, width) of the first picture given, resized; None for a picture of texts alone.
        has_text: Whether there is a text to follow. Without one there is no guidance, and asking for it is an error.

    Raises:
        InputError: an unknown setting, or a value that cannot be.
    """
    check_names(settings)
    values = {**(OF_TEXT if picture_size is None else OF_PICTURES), **({} if has_text else UNGUIDED)}
    values |= {name: value for name, value in settings.items() if name in OF_TEXT}
    size = settings.get("size")
    height, width = (picture_size or default_size(config)) if size is None else require_size(config, size)
    points = whole("num_timesteps", values["num_timesteps"], 2, "n points are n - 1 evaluations")
    drawing = Drawing(height, width, points, _number(values, "timestep_shift", above=0.0), _guidance(values))
    if drawing.guidance.uses_text and not has_text:
        raise InputError(
            f"cfg_text_scale is {drawing.guidance.text_scale:g} and there is no text to follow; give a text, or leave the "
            "scale out"
        )
    return drawing


def check_names(settings: Mapping[str, Any]) -> None:
    """Refuse settings that nobody knows.

    Raises:
        InputError: names the nearest one known.
    """
    for name in settings:
        if name not in NAMES:
            near = get_close_matches(str(name), NAMES, 1)
            hint = f"did you mean {near[0]}?" if near else f"known are {', '.join(sorted(NAMES))}"
            raise InputError(f"unknown setting {name!r} of a picture; {hint}")


# -- values ------------------------------------------------------------------------------------------------------------


def _guidance(values: Mapping[str, Any]) -> Guidance:
    interval = values["cfg_interval"]
    if not isinstance(interval, tuple | list) or len(interval) != 2 or not all(map(is_number, interval)):
        raise InputError(f"cfg_interval is {interval!r}; give (low, high) with 0 <= low <= high <= 1")
    return Guidance(
        text_scale=_number(values, "cfg_text_scale"),
        img_scale=_number(values, "cfg_img_scale"),
        interval=(float(interval[0]), float(interval[1])),
        renorm=values["cfg_renorm"],
        renorm_min=_number(values, "cfg_renorm_min"),
    )


def _number(values: Mapping[str, Any], name: str, *, above: float | None = None) -> float:
    value = values[name]
    if not is_number(value) or value < 0 or (above is not None and value <= above):
        raise InputError(f"{name} is {value!r}; give a number {'of at least 0' if above is None else f'above {above:g}'}")
    return float(value)
