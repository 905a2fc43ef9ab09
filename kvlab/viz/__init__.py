"""Figures from events and results: every ``*_panel`` needs no library, the others return plotly figures."""

from __future__ import annotations

from kvlab.viz.display import as_figure, mimebundle
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
from kvlab.viz.static import as_svg
from kvlab.viz.tree import prefix_tree, prefix_tree_panel
