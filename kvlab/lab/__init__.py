"""Measuring instruments: the tables that views draw, and the studies that fill them."""

from __future__ import annotations

from kvlab.lab.results import LadderRow, MissRow, PageSizeRow, PressureRow, RequestRow, Table, TtftRow, table_of

__all__ = ["LadderRow", "MissRow", "PageSizeRow", "PressureRow", "RequestRow", "Table", "TtftRow", "table_of"]
