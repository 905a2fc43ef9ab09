"""Live views that leave something behind: sliders while a kernel runs, one drawing of the defaults where none does."""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from kvlab.errors import InputError, missing_extra
from kvlab.options import is_number, is_whole
from kvlab.progress import is_static
from kvlab.viz.display import bundle_of
from kvlab.viz.marks import cut

RUN_BUTTON_S = 0.3  # a call slower than this waits for a button


def explore(draw: Callable[..., Any], /, **controls: Any) -> StaticView | LiveView:
    """Show ``draw(**values)`` under one control for each keyword; a static build draws the defaults once.

    A control is ``(low, high)`` or ``(low, high, step)`` for a slider, a ``range``, a list of choices, a bool, or a widget.
    Its default is that of the parameter of ``draw``, else the first value. What ``draw`` returns is a panel, a figure, a
    table or anything that shows itself. A call above 0.3 s is made by a button. A second view of the same function on the
    same widget takes the place of the first, so running a cell again leaves one subscription.

    Returns:
        A view: let a cell end in it. ``close()`` unsubscribes.

    Raises:
        InputError: a control of no known kind, without values, or that ``draw`` does not take.
    """
    values = _defaults(draw, controls)
    if is_static():
        return StaticView(draw(**values))
    return LiveView(draw, {name: _widget_of(name, controls[name], value) for name, value in values.items()})


class StaticView:
    """One drawing, shown as it is."""

    def __init__(self, drawing: Any) -> None:
        self.drawing = drawing

    def close(self) -> None:
        """Nothing is subscribed."""

    def __repr__(self) -> str:
        return f"StaticView({cut(repr(self.drawing), 120)})"

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, Any]:
        return bundle_of(self.drawing)


# -- controls ----------------------------------------------------------------------------------------------------------


def _is_widget(control: Any) -> bool:
    return hasattr(control, "observe") and hasattr(control, "value")


def _choices(name: str, control: Any) -> list[Any]:
    """The values a control starts from, the first of them its default."""
    if _is_widget(control):
        return [control.value]
    if isinstance(control, bool):
        return [control, not control]
    if isinstance(control, (list, range)):
        values = list(control)
    elif (
        isinstance(control, tuple)
        and len(control) in (2, 3)
        and all(is_number(v) for v in control)
        and control[0] <= control[1]
    ):
        values = [control[0]]
    else:
        raise InputError(
            f"{name}={control!r} is no control; give (low, high), (low, high, step), a range, a list, a bool or a widget"
        )
    if not values:
        raise InputError(f"{name}={control!r} has no values to choose from")
    return values


def _defaults(draw: Callable[..., Any], controls: Mapping[str, Any]) -> dict[str, Any]:
    if not callable(draw):
        raise InputError(f"explore draws with a function, and {draw!r} is none; give one that returns a panel or a figure")
    first = {name: _choices(name, control)[0] for name, control in controls.items()}
    parameters = inspect.signature(draw).parameters
    try:
        inspect.signature(draw).bind(**first)
    except TypeError as error:
        raise InputError(f"{name_of(draw)} does not fit the controls {', '.join(first) or '(none)'}: {error}") from error
    for name, control in controls.items():
        parameter = parameters.get(name)
        if parameter is not None and parameter.default is not parameter.empty and not _is_widget(control):
            first[name] = _checked_default(name, control, parameter.default)
    return first


def _checked_default(name: str, control: Any, value: Any) -> Any:
    inside = control[0] <= value <= control[1] if isinstance(control, tuple) else value in _choices(name, control)
    if not inside:
        raise InputError(f"{name} defaults to {value!r}, which its control {control!r} does not offer")
    return value


def name_of(draw: Callable[..., Any]) -> str:
    """Return the name by which a view of ``draw`` replaces an earlier one."""
    return f"{getattr(draw, '__module__', '')}.{getattr(draw, '__qualname__', type(draw).__qualname__)}"


def ipywidgets() -> Any:
    """Return the module, or say what to install."""
    try:
        import ipywidgets as widgets
    except ImportError as error:
        raise missing_extra("ipywidgets", "lab", "for live views") from error
    return widgets


def _widget_of(name: str, control: Any, value: Any) -> Any:
    if _is_widget(control):
        return control
    widgets = ipywidgets()
    said: dict[str, Any] = {"description": name.replace("_", " "), "style": {"description_width": "initial"}}
    if isinstance(control, bool):
        return widgets.Checkbox(value=value, **said)
    if isinstance(control, tuple):
        whole = all(is_whole(v) for v in (*control, value))
        step = control[2] if len(control) == 3 else (1 if whole else (control[1] - control[0]) / 100 or 0.01)
        slider = widgets.IntSlider if whole else widgets.FloatSlider
        return slider(value=value, min=control[0], max=control[1], step=step, continuous_update=False, **said)
    options = list(control)
    if all(is_number(v) for v in options):
        return widgets.SelectionSlider(options=options, value=value, continuous_update=False, **said)
    return widgets.Dropdown(options=options, value=value, **said)


# -- live views --------------------------------------------------------------------------------------------------------


class LiveView:
    """A drawing that follows its controls. ``widget`` is what is shown, ``num_renders`` counts calls of ``draw``."""

    def __init__(self, draw: Callable[..., Any], controls: Mapping[str, Any]) -> None:
        widgets = ipywidgets()
        self._draw, self._controls, self.name = draw, dict(controls), name_of(draw)
        self.num_renders = 0
        self.drawing: Any = None
        self._screen = widgets.Output()
        self._button = widgets.Button(description="Run", tooltip="Draw with these values")
        self._call()
        self._button.on_click(self._on_click)
        subscribe(self)
        self.widget = widgets.VBox([*self._controls.values(), self._button, self._screen])

    @property
    def controls(self) -> dict[str, Any]:
        """Widgets by parameter name."""
        return dict(self._controls)

    def close(self) -> None:
        """Unsubscribe from every control; what is drawn stays."""
        unsubscribe(self)
        self._button.on_click(self._on_click, remove=True)

    def on_change(self, change: Any) -> None:
        """Draw again, or offer to where drawing is slow."""
        if self._is_slow:
            self._button.description = "Run again"
        else:
            self._on_click(None)

    def _on_click(self, button: Any) -> None:
        try:
            self._call()
        except Exception as error:  # a callback has nobody to raise to: the reader sees it where the drawing would be
            self._show({"text/plain": f"{type(error).__name__}: {error}"})

    def _call(self) -> None:
        began = time.perf_counter()
        self.num_renders += 1
        self.drawing = self._draw(**{name: widget.value for name, widget in self._controls.items()})
        self._is_slow = time.perf_counter() - began > RUN_BUTTON_S
        self._button.layout.display = "" if self._is_slow else "none"
        self._button.description = "Run"
        self._show(bundle_of(self.drawing))

    def _show(self, bundle: dict[str, Any]) -> None:
        """One property change: nothing is cleared first, so nothing flickers."""
        self._screen.outputs = ({"output_type": "display_data", "data": bundle, "metadata": {}},)

    def __repr__(self) -> str:
        return f"LiveView({cut(self.name, 80)} of {cut(', '.join(self._controls), 80)})"

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, Any]:
        return live_bundle(self.drawing, self.widget)


class View(Protocol):
    """What may follow a widget: one view of a name at a time."""

    name: str

    @property
    def controls(self) -> dict[str, Any]: ...

    def on_change(self, change: Any) -> None: ...


def subscribe(view: View) -> None:
    """Follow the controls; an earlier view of the same name on one of them is unsubscribed first."""
    for widget in view.controls.values():
        views = vars(widget).setdefault("_kvlab_views", {})  # on the widget: it lives as long as what it lists
        if view.name in views:
            unsubscribe(views[view.name])
        views[view.name] = view
        widget.observe(view.on_change, names="value")


def unsubscribe(view: View) -> None:
    """Stop following every control; nothing happens the second time."""
    for widget in view.controls.values():
        views = vars(widget).get("_kvlab_views", {})
        if views.get(view.name) is view:
            del views[view.name]
            widget.unobserve(view.on_change, names="value")


def live_bundle(drawing: Any, widget: Any) -> dict[str, Any]:
    """Return the widget for a live page, and what stays when no kernel runs."""
    static = {k: v for k, v in bundle_of(drawing).items() if k in ("image/svg+xml", "text/html", "text/plain")}
    return widget._repr_mimebundle_() | static
