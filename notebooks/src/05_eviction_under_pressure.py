# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3 (ipykernel)
#     language: python
#     name: python3
# ---

# %% [markdown]
# # What happens when the pool is too small?
#
# **Cached pages are given up first, and that costs only time; but pages of running requests cannot be given up, and if
# all requests wait for one more page, everything stands still.** Sharing a prefix makes this easier to run into: a
# request that finds its prompt cached starts with one page of its own, so very many start, and then each wants a
# second one. A limit on how many run at once cures it, and so do sending the newest back, moving some to host memory,
# or a gate that lets a request in only when the pages of its whole life can be had. Turning the cache off does not: the
# same pool stalls all the same, only later.
#
# Below, 32 requests share a prefix of 59 pages on a pool of 96. We watch them stall, and then try every cure.
#
# **The words.** A page is *live* while one request uses it, *shared* if several do or the index has it as well,
# *cached* if only the index has it, and *free*. Only cached pages can be *evicted*. A request that lacks a page is
# *held*: it leaves the step and tries again. A *stall* is when all are held and nobody can free a page.

# %% [markdown]
# No weights are needed to see any of this. The *tracer* is a model without numerics, whose keys and values are digests
# of all tokens before them, kept in real pages and run by the real engine. So it is fast, and a page that is reused
# wrongly changes the reply. Another name in the next cell takes a language model instead; the sentences below quote the
# numbers of the values that stand here, and the last cell checks the rules.

# %% tags=["parameters"]
MODEL = "tracer"  # or a name, a checkpoint folder, or a GGUF file
DEVICE = None  # None = a GPU if there is one, else the CPU; the tracer needs neither
NUM_PAGES = 97  # page 0 is set aside as the sink, so 96 can be used
PAGE_SIZE = 16  # tokens a page
PREFIX_PAGES = 59  # pages of the prefix that all requests share
REQUESTS = 32
TAIL = 8  # tokens of each request's own after the prefix
MAX_TOKENS = 24  # length of a reply
SEED = 0

# %%
import logging
from functools import partial

import kvlab
from kvlab import events, viz
from kvlab.lab import pressure
from kvlab.run import tracer_engine

logging.getLogger("kvlab").setLevel(logging.ERROR)  # who waits is what we draw; no need to be warned
make_engine = tracer_engine if MODEL == "tracer" else partial(kvlab.load, MODEL, device=DEVICE)
POOL = {"pool_pages": NUM_PAGES - 1, "page_size": PAGE_SIZE, "seed": SEED}
LOAD = {"requests": REQUESTS, "prefix_pages": PREFIX_PAGES, "tail": TAIL, "max_tokens": MAX_TOKENS}

# %% [markdown]
# ## The arithmetic
#
# What a request keeps in pages is its prompt and its reply, except for the last token, which nobody reads. The prefix
# is there once for all. **Compare the first line with the pool.** At the start each request has one page of its own,
# and everything fits. At the end each has two, and it does not.

# %% tags=["check"]
at_start = -(-TAIL // PAGE_SIZE)
at_end = -(-(TAIL + MAX_TOKENS - 1) // PAGE_SIZE)
for when, each in (("start", at_start), ("end", at_end)):
    together = PREFIX_PAGES + REQUESTS * each
    print(f"{when}: {PREFIX_PAGES} + {REQUESTS} x {each} = {together} of {NUM_PAGES - 1} pages")

# %% [markdown]
# ## The stall
#
# `admission="none"` is how engines were first built: whoever comes is let in. All 32 requests come at once.
#
# **Follow the colours.** One request computes the prefix, and another has begun its own before that is done; in the next
# step all others find the prefix and each takes one page for its tail (blue). Now the pool is full of pages that
# somebody uses: there is no green, so there is nothing to evict. The requests generate until their page is full and is
# filed, too (pink). Then each needs another page, and all wait, for each other.

# %% tags=["check"]
stalled = pressure.stall_sandbox(make_engine, admission="none", name="no gate", **POOL, **LOAD)
viz.occupancy(stalled.events)

# %% [markdown]
# An engine that notices nothing would try again until its clients lose patience. kvlab notices: the event names who is
# held and which settings led there, all requests end with a `StallError`, and the engine is usable again. That is why
# the last column of the figure is green: the requests are gone, their whole pages are cached.

# %% tags=["check"]
(entry,) = stalled.events.filter(events.Stalled)
print(f"{len(entry.event.held)} requests held, {entry.event.live_pages} pages in use")
print(entry.event.settings)
print(stalled)

# %% [markdown]
# ## Without the cache, later
#
# Is it the cache's fault? With the cache off every request needs all 60 pages of its prompt to begin with. That is more
# than a third of the pool, so the prompts themselves keep the number of running requests low, by accident. Some even
# complete. Then a long prompt is computed in pieces while others wait with the pieces they have, and it stands still
# as well. **Look how much further to the right the stall is.** The failure is the same; only the threshold has moved.

# %% tags=["check"]
OFF = {"name": "cache off", "admission": "none", "prefix_cache": False}
uncached = pressure.stall_sandbox(make_engine, **OFF, **POOL, **LOAD)
viz.occupancy(uncached.events)

# %% tags=["check"]
viz.pressure_table([stalled.row, uncached.row])

# %% [markdown]
# ## Five cures
#
# - **A limit.** At most so many requests in flight that all of them fit at their final length: 59 + 16 x 2 = 91 pages.
# - **Preemption.** When nothing can be freed, the newest request gives its pages back and goes to the queue again. What
#   it has generated becomes part of its prompt, and the prefix is still cached, so it loses little.
# - **Host pages.** A request's pages are copied to ordinary memory and come back when there is room.
# - **The gate, `reserve`.** A request starts when the pages of its whole life can be had, pages lent by the cache
#   subtracted. Nobody who has started ever waits.
# - **The gate, `peak`.** As before, but it adds up what the requests hold at their common worst moment.
#
# **Look at the numbers of steps.** All five let everybody complete. With a gate it takes the fewest, because the others
# are let in once the prefix is there, so that it is computed and kept only once; without one the second request
# computes a copy. `reserve` is what kvlab does if you say nothing.

# %% tags=["check"]
CURES = {
    "no gate": {"admission": "none"},
    "limit": {"admission": "none", "max_concurrent_requests": 16},
    "preemption": {"admission": "none", "preemption": True},
    "host pages": {"admission": "none", "cpu_offload_pages": 256},
    "reserve": {"admission": "reserve"},
    "peak": {"admission": "peak"},
}
rows = pressure.stall_cures(make_engine, CURES, **POOL, **LOAD)
viz.cures(rows)

# %% [markdown]
# The same as a table. Requests that are let in late find the prefix cached, so waiting at the gate saves work, too:
# compare the cached tokens, and how many pages had to be evicted.

# %% tags=["check"]
viz.pressure_table(rows)

# %% [markdown]
# ### What the gate does
#
# **Look at the steps between the waves.** A first group is let in, up to the room that is left when their replies have
# been counted in. When they end, the next group comes. The pool is nearly full all the time, and nobody is held.

# %% tags=["check"]
gated = pressure.stall_sandbox(make_engine, admission="reserve", **POOL, **LOAD)
viz.occupancy(gated.events)

# %% [markdown]
# The gate writes down what it decides. Each line is a request that was let in: the pages of its whole life, how many
# of them the cache lends, and what all that are in may still take from the free list. The first found nothing cached
# and had to reserve the prefix as well.

# %% tags=["check"]
kept = gated.events.filter(events.RequestReserved)
lines = [(e.step, e.event.claim_pages, e.event.hit_pages, e.event.outstanding_pages) for e in kept]
columns = ("step", "pages of its life", "lent by the cache", "still owed to all")
kvlab.lab.Table(columns, [*lines[:6], *lines[-2:]], "Let in: the first six and the last two")

# %% [markdown]
# ### What host pages do
#
# **Follow the dashed line**, the pages on the host. Requests that were let in too early are moved there, prefix and
# all, and come back one after another as the others end.

# %% tags=["check"]
on_host = pressure.stall_sandbox(make_engine, **CURES["host pages"], **POOL, **LOAD)
viz.occupancy(on_host.events)

# %% [markdown]
# ## Nothing is wrong
#
# A cure would be worth nothing if replies changed. Here are the replies of all runs against those on a pool so large
# that there is no pressure at all. (A language model in bfloat16 may differ in a token, because sums are rounded in
# another order; the tracer does not round.)


# %% tags=["check"]
def replies(run):
    said = {}
    for entry in run.events.filter(events.TokenSampled):
        said.setdefault(entry.event.rid, []).append(entry.event.token)
    return said


roomy = pressure.stall_sandbox(make_engine, name="no pressure", **{**POOL, "pool_pages": 400}, **LOAD)
preempted = pressure.stall_sandbox(make_engine, **CURES["preemption"], **POOL, **LOAD)
same = [replies(run) == replies(roomy) for run in (gated, on_host, preempted)]
print(same, roomy)

# %% [markdown]
# ## How large must a pool be?
#
# Pages for the final context of every request that may run, replies included, the shared prefix counted once. `kvlab
# size` says it for a model. Here we try pools of many sizes without any gate, with 16 requests in pages of four tokens,
# so that it goes quickly. The first request comes a step before the others, so all of them find the prefix.
#
# **Look where the triangles end.** With the cache on (solid) there is one threshold: the rule, 59 + 16 x 5 = 139 pages,
# is always enough. With the cache off (dashed) there is none within the figure: whether a pool stalls depends on how
# the pieces of the prompts happen to fall. A pool of 64 pages takes one request at a time and survives, a larger one
# stalls.

# %% tags=["check"]
SMALL = {"page_size": 4, "tail": 2, "max_tokens": 16, "requests": 16, "prefix_pages": 59}
curve = pressure.stall_threshold(make_engine, range(64, 177, 16), first_alone=True, **SMALL)
viz.stall_curve(curve)

# %% tags=["check"]
from kvlab import spec
from kvlab.lab.sizing import size_pool

layout = spec.KVLayout(num_layers=1, num_kv_heads=1, head_dim=1, page_size=4)
load = {"concurrency": 16, "context_tokens": 59 * 4 + 2 + 16, "shared_tokens": 59 * 4 + 1}
enough = size_pool(layout, bytes_per_value=8, **load)
print(enough.settings())

# %% [markdown]
# ## Who has to go?
#
# So much for pages in use. The cached ones are given up by a *policy*. An entry of the index may go only if no other
# hangs on it (a page without those before it is worthless), and among those the policy chooses. `lru`, the default,
# gives up what was not used for longest.
#
# The next workload is made to be unkind to it: every other request is one of five regulars, which come again and again,
# and between them come passers-by who never return. What was used last is then not what will be used next. **Compare
# lru with the four on top**: these remember that a page was used *twice*, and keep the regulars.

# %% tags=["check"]
visits = pressure.regulars_and_passers(seed=SEED)
served = pressure.policy_study(make_engine, visits, num_pages=31)
viz.policies(served)

# %% tags=["check"]
viz.pressure_table(served)

# %% [markdown]
# Which policy is best depends on the load, so try yours: `kvlab run --workload FILE --policy NAME`. If you know better
# than any policy, say so: `engine.pin(prompt, name=...)` keeps a prefix, and a request may ask that ranges of its pages
# stay for some seconds.
#
# The log also knows for whom a page had to go, and who had filed it. In the run with preemption it is the early
# requests that take cached pages from those who were sent back.

# %% tags=["check"]
viz.evictions(preempted.events)

# %% [markdown]
# ## Try it
#
# The sandbox with everything to turn; where a run takes long, a button starts it. Things to try: lower *at once* until
# the stall is gone, and see how much more that is than the rule allows; add host pages step by step; turn the cache
# off and the gate on; combine preemption with the cache off and count the diamonds.


# %% tags=["check"]
def sandbox(cache=True, admission="none", at_once=32, preemption=False, host_pages=0):
    limits = {"max_concurrent_requests": at_once, "cpu_offload_pages": host_pages}
    how = {"prefix_cache": cache, "admission": admission, "preemption": preemption, **limits}
    return viz.occupancy(pressure.stall_sandbox(make_engine, **how, **POOL, **LOAD).events)


gates = ["none", "reserve", "peak"]
counts = {"at_once": (1, 32), "host_pages": (0, 512, 64)}
viz.explore(sandbox, cache=True, admission=gates, preemption=False, **counts)

# %% [markdown]
# ## The answer, checked
#
# Every claim of the first paragraph as a line of code.

# %%
no_gate, *cured = rows
later = uncached.row
assert no_gate.is_stalled, "without a gate everything stands still"
assert all(row.completed == REQUESTS and not row.is_stalled for row in cured), "five cures"
assert later.is_stalled, "so it does with the cache off"
assert later.stalled_step > no_gate.stalled_step, "only later"
assert same == [True] * 3, "and no reply changes"
by_rule = [row for row in curve if row.prefix_cache and row.pool_pages >= enough.num_pages - 1]
assert not any(row.is_stalled for row in by_rule), "the rule is enough"
assert sum(r.is_stalled for r in curve if not r.prefix_cache) > 1, "turning it off is no cure"
assert all(row.completed == row.requests and row.evicted_pages for row in served), "only time"
