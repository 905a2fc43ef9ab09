"""The lifecycle of a KV resource, one property a test."""

from __future__ import annotations

from kv_driver import TEXT, Driver

from kvlab.cache.kv import KVResource
from kvlab.spec import KVLayout

ROOT = b"r" * 32


def make(page_size: int = 4, num_pages: int = 24, **options) -> Driver:
    kv = KVResource(KVLayout(1, 1, 8, page_size), num_pages, **options)
    kv.enable_prefix_cache(ROOT, TEXT)
    return Driver(kv, page_size)


def test_second_request_hits_all_but_the_last_page():
    d = make()
    assert d.serve(1, range(10)) == 0
    assert d.serve(2, range(10)) == 8
