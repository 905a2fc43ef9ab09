"""Live views and time travel: one subscription, one message a step, and a drawing where nothing is live."""

from __future__ import annotations

import subprocess
import sys
import time

import pytest

from kvlab.errors import InputError, MissingExtraError
from kvlab.lab.results import Table
from kvlab.viz import explore, page_map_panel, prefix_tree_panel, step_player
from kvlab.viz.display import PLOTLY_MIME
from kvlab.viz.explore import StaticView
from tests.synthetic_log import three_sharers, under_pressure

widgets = pytest.importorskip("ipywidgets")


@pytest.fixture(autouse=True)
def live(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KVLAB_STATIC", raising=False)


@pytest.fixture
def static(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVLAB_STATIC", "1")


def a_cell(calls: list[int]):
    """What running a cell again makes: the same function, a new object."""

    def draw(step: int):
        calls.append(step)
        return Table(("step",), [(step,)])

    return draw


def test_k20_1_building_a_view_three_times_leaves_one_subscription() -> None:
    slider, calls = widgets.IntSlider(min=0, max=9), []
    views = [explore(a_cell(calls), step=slider) for _ in range(3)]
    calls.clear()
    slider.value = 4
    assert calls == [4]
    assert [view.num_renders for view in views] == [1, 1, 2]


def test_k20_1_close_unsubscribes() -> None:
    slider, calls = widgets.IntSlider(min=0, max=9), []
    view = explore(a_cell(calls), step=slider)
    view.close()
    view.close()
    slider.value = 4
    assert calls == [0]


def test_two_different_views_may_follow_one_slider() -> None:
    slider, calls = widgets.IntSlider(min=0, max=9), []
    one = explore(a_cell(calls), step=slider)
    other = explore(lambda step: step, step=slider)
    slider.value = 4
    assert (one.num_renders, other.num_renders) == (2, 2)


def test_a_change_is_one_change_of_what_is_shown() -> None:
    slider, shown = widgets.IntSlider(min=0, max=9), []
    view = explore(a_cell([]), step=slider)
    view._screen.observe(lambda change: shown.append(change["new"]), names="outputs")
    slider.value = 4
    assert len(shown) == 1
    assert '<td style="text-align:right">4</td>' in shown[0][0]["data"]["text/html"]


def test_controls_become_widgets_that_wait_for_the_pointer_to_rest() -> None:
    view = explore(
        lambda a, b, c, d, e: (a, b, c, d, e), a=(0, 10), b=(0.0, 1.0), c=[16, 32], d=["lru", "fifo"], e=True
    )  # fmt: skip
    kinds = {name: type(widget).__name__ for name, widget in view.controls.items()}
    assert kinds == {"a": "IntSlider", "b": "FloatSlider", "c": "SelectionSlider", "d": "Dropdown", "e": "Checkbox"}
    assert not any(view.controls[name].continuous_update for name in "abc")
    assert view.drawing == (0, 0.0, 16, "lru", True)


def test_numpys_numbers_make_the_same_sliders_as_pythons_own() -> None:
    np = pytest.importorskip("numpy")
    view = explore(lambda whole, part: (whole, part), whole=(np.int64(1), np.int64(5)), part=(np.float32(0), 1.0))
    kinds = [type(view.controls[name]).__name__ for name in ("whole", "part")]
    view.close()
    assert kinds == ["IntSlider", "FloatSlider"]


def test_the_name_of_a_control_is_not_cut_off() -> None:
    view = explore(lambda shared_tokens, policy: 0, shared_tokens=(0, 10), policy=["lru"])
    said = {name: (w.description, w.style.description_width) for name, w in view.controls.items()}
    assert said == {"shared_tokens": ("shared tokens", "initial"), "policy": ("policy", "initial")}


def test_the_default_of_the_function_is_where_a_control_starts() -> None:
    view = explore(lambda page_size=32: page_size, page_size=[16, 32, 64])
    assert (view.drawing, view.controls["page_size"].value) == (32, 32)


def test_a_slow_drawing_waits_for_its_button() -> None:
    calls = []

    def draw(x: int) -> int:
        calls.append(x)
        time.sleep(0.31)
        return x

    view = explore(draw, x=(0, 5))
    view.controls["x"].value = 3
    assert calls == [0]
    assert (view._button.layout.display, view._button.description) == ("", "Run again")
    view._button.click()
    assert calls == [0, 3]


def test_a_fast_drawing_hides_the_button() -> None:
    assert explore(lambda x: x, x=(0, 5))._button.layout.display == "none"


def test_an_error_in_a_callback_is_shown_in_place_of_the_drawing() -> None:
    view = explore(
        lambda x: 1 // x,
        x=(1, 5),
    )
    view.controls["x"].min = 0
    view.controls["x"].value = 0
    assert view._screen.outputs[0]["data"]["text/plain"].startswith("ZeroDivisionError")
    view.controls["x"].value = 1
    assert view._screen.outputs[0]["data"]["text/plain"] == "1"


@pytest.mark.parametrize("control", [3, "text", None, (1,), (5, 1), ("a", "b"), {}], ids=repr)
def test_a_control_of_no_known_kind_is_refused(control) -> None:
    with pytest.raises(InputError, match="is no control"):
        explore(lambda x: x, x=control)


def test_controls_that_do_not_fit_are_refused() -> None:
    with pytest.raises(InputError, match="does not fit the controls y"):
        explore(lambda x: x, y=(0, 1))
    with pytest.raises(InputError, match="no values to choose from"):
        explore(lambda x: x, x=[])
    with pytest.raises(InputError, match="defaults to 7"):
        explore(lambda x=7: x, x=(0, 5))


def test_k20_3_a_live_view_leaves_a_static_figure_beside_the_widget() -> None:
    bundle = explore(lambda step: page_map_panel(three_sharers(), step=step), step=(0, 14))._repr_mimebundle_()
    assert set(bundle) == {"application/vnd.jupyter.widget-view+json", "image/svg+xml", "text/plain"}
    assert "All 63 pages are free" in bundle["image/svg+xml"]


def test_k20_3_a_static_build_draws_the_default_once(static: None) -> None:
    calls: list[int] = []
    view = explore(a_cell(calls), step=(0, 9))
    assert isinstance(view, StaticView)
    assert calls == [0]
    assert "<td" in view._repr_mimebundle_()["text/html"]


def test_k20_3_a_static_player_shows_plotly_svg_and_text(static: None) -> None:
    assert set(step_player(three_sharers())._repr_mimebundle_()) == {PLOTLY_MIME, "image/svg+xml", "text/plain"}


def test_a_static_build_imports_no_ipywidgets_and_no_plotly() -> None:
    code = (
        "import sys; from tests.synthetic_log import three_sharers; from kvlab.viz import explore, step_player\n"
        "repr(explore(lambda x: x, x=(0, 3))); step_player(three_sharers())._repr_mimebundle_()\n"
        "print({'ipywidgets', 'plotly', 'torch', 'pandas', 'IPython'} & set(sys.modules))"
    )
    environment = {**__import__("os").environ, "KVLAB_STATIC": "1"}
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=True)
    assert run.stdout.strip() == "set()"


def test_without_ipywidgets_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ipywidgets", None)
    with pytest.raises(MissingExtraError, match=r"pip install .*\[lab\]"):
        explore(lambda x: x, x=(0, 5))


# -- time travel -------------------------------------------------------------------------------------------------------


@pytest.fixture
def big_run():
    pytest.importorskip("anywidget")
    return three_sharers(256)


def messages_of(figure, act) -> list[str]:
    """Names of the properties that carry something to the browser while ``act`` runs."""
    sent: list[str] = []
    plumbing = ("_last_layout_edit_id", "_last_trace_edit_id")
    figure.observe(lambda c: sent.append(c["name"]) if c["new"] is not None and c["name"] not in plumbing else None)
    act()
    return sent


def test_k20_5_one_step_is_one_batched_update_of_a_256_page_grid(big_run) -> None:
    player = step_player(big_run)
    figure, traces = player.figure, player.figure.data
    assert messages_of(figure, lambda: player.move(-1)) == ["_py2js_update"]
    assert player.figure is figure
    assert player.figure.data == traces


def test_k20_5_every_step_of_an_eviction_run_is_one_update() -> None:
    pytest.importorskip("anywidget")
    player = step_player(under_pressure(), step=0)
    for _ in range(11):
        assert messages_of(player.figure, lambda: player.move(1))[:1] == ["_py2js_update"]


def test_the_player_shows_the_same_as_a_fresh_figure(big_run) -> None:
    player = step_player(big_run)
    for step in (9, 1, 14):
        player.controls["step"].value = step
        fresh = page_map_panel(big_run, step=step)
        assert list(player.figure.data[0].text) == [r.text for r in fresh.marks[0].rects]
        assert list(player.figure.data[0].marker.color) == [r.style.fill for r in fresh.marks[0].rects]
        assert fresh.title in player.figure.layout.title.text


def test_previous_and_next_stop_at_the_ends(big_run) -> None:
    player = step_player(big_run)
    previous, following = player._buttons
    following.click()
    assert player.controls["step"].value == 14
    previous.click()
    assert player.controls["step"].value == 13
    player.move(-99)
    assert player.controls["step"].value == 0


def test_k20_1_a_second_player_on_a_slider_replaces_the_first(big_run) -> None:
    slider, drawn = widgets.IntSlider(min=0, max=14, value=14), []

    def draw(events, *, step):
        drawn.append(step)
        return page_map_panel(events, step=step)

    players = [step_player(big_run, draw, slider=slider) for _ in range(3)]
    drawn.clear()
    slider.value = 3
    assert drawn == [3]
    players[-1].close()
    slider.value = 4
    assert drawn == [3]


def test_a_player_of_trees_follows_a_changing_number_of_branches(big_run) -> None:
    player = step_player(big_run, prefix_tree_panel)
    for step in range(15):
        player.controls["step"].value = step
        assert prefix_tree_panel(big_run, step=step).title in player.figure.layout.title.text


def test_a_log_without_events_cannot_be_played() -> None:
    with pytest.raises(InputError, match="no events"):
        step_player([])


def test_reprs_are_one_bounded_line(big_run) -> None:
    for view in (step_player(big_run), explore(lambda x: "y" * 9000, x=(0, 1)), StaticView("y\n" * 9000)):
        assert "\n" not in repr(view)
        assert len(repr(view)) < 200
