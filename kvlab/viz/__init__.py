"""Figures from events and results: every ``*_panel`` needs no library, the others return plotly figures.

A panel turns into an SVG by ``as_svg``, a plotly figure by ``as_figure``, and a sentence by ``.sentence``; its ``.table`` has
the same numbers.
"""

from __future__ import annotations

from kvlab.viz.audio import audio_player, spectrograms, spectrograms_panel, waveforms, waveforms_panel
from kvlab.viz.display import as_figure, mimebundle
from kvlab.viz.explore import explore
from kvlab.viz.hits import (
    hit_ladder,
    hit_ladder_panel,
    ladder_table,
    miss_table,
    misses,
    misses_panel,
    page_size_panel,
    page_size_study,
    page_size_table,
    request_table,
    ttft_panel,
    ttft_table,
    ttft_vs_cached,
)
from kvlab.viz.pages import page_map, page_map_panel, page_table, page_timeline, page_timeline_panel
from kvlab.viz.pictures import drift_table, moved_pixels, moved_pixels_panel, pictures, pictures_panel
from kvlab.viz.pixels import (
    drift_by_match,
    drift_by_match_panel,
    guided_sweep,
    guided_sweep_panel,
    noise_curve,
    noise_curve_panel,
    noise_table,
    pixel_shares,
    pixel_shares_panel,
    pixel_table,
    sweep_table,
)
from kvlab.viz.player import step_player
from kvlab.viz.pressure import (
    cures,
    cures_panel,
    eviction_table,
    evictions,
    evictions_panel,
    occupancy,
    occupancy_panel,
    policies,
    policies_panel,
    pressure_table,
    stall_curve,
    stall_curve_panel,
)
from kvlab.viz.speech import (
    sharing_map,
    sharing_map_panel,
    speech_drift,
    speech_drift_panel,
    speech_drift_table,
    token_grid,
    token_grid_panel,
)
from kvlab.viz.static import as_svg
from kvlab.viz.tree import prefix_tree, prefix_tree_panel

__all__ = [
    "page_map",
    "page_timeline",
    "prefix_tree",
    "hit_ladder",
    "ttft_vs_cached",
    "page_size_study",
    "misses",
    "waveforms",
    "spectrograms",
    "token_grid",
    "speech_drift",
    "sharing_map",
    "pictures",
    "moved_pixels",
    "pixel_shares",
    "noise_curve",
    "drift_by_match",
    "guided_sweep",
    "occupancy",
    "evictions",
    "cures",
    "policies",
    "stall_curve",
    "page_map_panel",
    "page_timeline_panel",
    "prefix_tree_panel",
    "hit_ladder_panel",
    "ttft_panel",
    "page_size_panel",
    "misses_panel",
    "waveforms_panel",
    "spectrograms_panel",
    "token_grid_panel",
    "speech_drift_panel",
    "sharing_map_panel",
    "pictures_panel",
    "moved_pixels_panel",
    "pixel_shares_panel",
    "noise_curve_panel",
    "drift_by_match_panel",
    "guided_sweep_panel",
    "occupancy_panel",
    "evictions_panel",
    "cures_panel",
    "policies_panel",
    "stall_curve_panel",
    "page_table",
    "ladder_table",
    "ttft_table",
    "page_size_table",
    "miss_table",
    "request_table",
    "speech_drift_table",
    "drift_table",
    "pixel_table",
    "noise_table",
    "sweep_table",
    "eviction_table",
    "pressure_table",
    "as_figure",
    "as_svg",
    "mimebundle",
    "explore",
    "audio_player",
    "step_player",
]
