"""Time travel over a run: one figure, a step slider with previous and next, one message a step."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from kvlab.errors import InputError, missing_extra
from kvlab.progress import is_static
from kvlab.viz.display import as_figure, plotly_json
from kvlab.viz.explore import StaticView, ipywidgets, live_bundle, name_of, subscribe, unsubscribe
from kvlab.viz.marks import Panel, cut
from kvlab.viz.moments import Events, steps_of
from kvlab.viz.pages import page_map_panel


def step_player(
    events: Events, draw: Callable[..., Panel] = page_map_panel, *, step: int | None = None, slider: Any = None
) -> StaticView | StepPlayer:
    """Travel over a run: a step slider with previous and next, one batched update a step.

    Args:
        draw: called as ``draw(events, step=...)``; returns a panel.
        step: where to begin; None = the last step.
        slider: a widget to follow instead of an own one; the player begins where it stands.

    Raises:
        InputError: the log has no events, or no such step.
    """
    steps = steps_of(events)
    if not steps:
        raise InputError("the log has no events; record a run before playing it")
    if slider is not None:
        step = slider.value
    first = steps[-1] if step is None else step
    panel = draw(events, step=first)
    if is_static():
        return StaticView(panel)
    if slider is None:
        slider = ipywidgets().IntSlider(value=first, min=steps[0], max=steps[-1], description="step", continuous_update=False)
    return StepPlayer(lambda at: draw(events, step=at), slider, panel, name_of(draw))


class StepPlayer:
    """A figure that follows a step slider. ``widget`` is what is shown."""

    def __init__(self, draw: Callable[[int], Panel], slider: Any, panel: Panel, name: str) -> None:
        widgets = ipywidgets()
        self._draw, self._slider, self.name = draw, slider, f"player of {name}"
        self.panel, self._shown = panel, plotly_json(panel)
        self.figure = _figure_widget(panel)
        self._buttons = [widgets.Button(description=text) for text in ("Previous", "Next")]
        for button, by in zip(self._buttons, (-1, 1), strict=True):
            button.on_click(lambda _, by=by: self.move(by))
        subscribe(self)
        self.widget = widgets.VBox([widgets.HBox([*self._buttons, slider]), self.figure])

    @property
    def controls(self) -> dict[str, Any]:
        """The slider, by name."""
        return {"step": self._slider}

    def move(self, by: int) -> None:
        """Go ``by`` steps on (or back), as far as the run reaches."""
        self._slider.value = min(max(self._slider.value + by, self._slider.min), self._slider.max)

    def close(self) -> None:
        """Unsubscribe; what is drawn stays."""
        unsubscribe(self)

    def on_change(self, change: Any) -> None:
        """Draw the step that the slider now shows."""
        self.panel = self._draw(change["new"])
        new = plotly_json(self.panel)
        redraw(self.figure, self._shown, new)
        self._shown = new

    def __repr__(self) -> str:
        return f"StepPlayer(step {self._slider.value}: {cut(self.panel.title, 80)})"

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, Any]:
        return live_bundle(self.panel, self.widget)


def _figure_widget(panel: Panel) -> Any:
    figure = as_figure(panel)
    import plotly.graph_objects as go

    try:
        return go.FigureWidget(figure)
    except ImportError as error:
        raise missing_extra("anywidget", "lab", "for figures that follow a slider") from error


def redraw(figure: Any, old: Mapping[str, Any], new: Mapping[str, Any]) -> None:
    """Bring ``figure`` from ``old`` to ``new`` plotly JSON: one message with what differs."""
    if [t["type"] for t in old["data"]] != [t["type"] for t in new["data"]]:  # other marks: the traces themselves change
        figure.data = []
        figure.add_traces(new["data"])
        figure.update_layout(new["layout"])
        return
    with figure.batch_update():
        for trace, before, after in zip(figure.data, old["data"], new["data"], strict=True):
            for path, value in _changes(before, after).items():
                trace[path] = value
        for path, value in _changes(old["layout"], new["layout"]).items():
            figure.layout[path] = value


def _changes(old: Mapping[str, Any], new: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return the dotted paths whose values differ; what ``new`` lacks becomes None."""
    found: dict[str, Any] = {}
    for name in {**old, **new}:
        before, after = old.get(name), new.get(name)
        if isinstance(before, dict) and isinstance(after, dict):
            found |= _changes(before, after, f"{prefix}{name}.")
        elif before != after:
            found[f"{prefix}{name}"] = after
    return found
