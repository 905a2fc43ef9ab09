# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3 (ipykernel)
#     language: python
#     name: python3
# ---

# %% [markdown]
# # How much of a prompt is served from the cache, what does that save, and why was the rest computed?
#
# **The whole pages at its front that were seen before, but never the page of its last token: with pages of P tokens, a
# prompt of n tokens that is sent again is served P · floor((n − 1) / P) of them.** The time to the first token shrinks
# almost in proportion to what is left to compute. And every token that was computed has exactly one cause from a short
# list, so a low hit rate is never a riddle: the prompt is new, or parts from what is cached, or its pages had to make
# room, or it is simply the last page, which is always computed.
#
# Below, a real language model is sent prompts of chosen lengths. First we count, then we measure time, then we ask for
# causes.
#
# **The words.** The keys and values of a prompt's tokens are kept in *pages* of P tokens. A page that is full gets a
# name, a hash of its tokens and of all tokens before it. A later prompt is cut into pages and hashed in the same way;
# the pages whose names are known are *served*, the rest of the prompt is *computed*. The run over the prompt before the
# first word of the reply is called the *prefill*, and the time it takes is most of the *time to the first token*.

# %% [markdown]
# The next cell holds everything one may want to change. A name such as `"org/name"` or the path of a checkpoint folder
# takes another model, and a GPU is used where there is one; give it longer prompts then, since a GPU computes a few
# hundred tokens as fast as one. The sentences below quote the numbers of the default model; the last cell checks the
# rules for any.

# %% tags=["parameters"]
MODEL = "smollm2-135m"  # a name, a checkpoint folder, or a GGUF file
DEVICE = None  # None = a GPU if there is one, else the CPU
PAGE_SIZE = 16  # tokens a page
NUM_PAGES = 128  # of the pool
LADDER = (15, 16, 17, 32, 33, 48)  # prompt lengths of the hit ladder, in tokens
TIMED_TOKENS = 384  # prompt length where time is measured
ROUNDS = 3  # each time is the median of so many
MAX_TOKENS = 16  # length of a reply
SEED = 0

# %% tags=["check"]
from dataclasses import replace
from functools import partial

import kvlab
from kvlab import viz
from kvlab.assemble import build_engine
from kvlab.lab import studies
from kvlab.lab.results import PageSizeRow

engine = kvlab.load(MODEL, device=DEVICE, num_pages=NUM_PAGES, page_size=PAGE_SIZE, seed=SEED)
make_engine = partial(build_engine, engine.model, seed=SEED)  # more engines on the same weights
engine

# %% [markdown]
# ## How much: the hit ladder
#
# The simplest experiment: send a prompt, send the same prompt again, and once more. Everything is in the cache then, so
# one might expect that everything is served. We do it with prompts of 15 to 48 tokens. They are random token ids: the
# cache sees ids and asks no more of them than to be equal.

# %% tags=["check"]
ladder = studies.hit_ladder(engine, LADDER, sends=3, seed=SEED)
viz.hit_ladder(ladder)

# %% [markdown]
# **Look at the bars of 16 and 17 tokens.** The first sending is computed from end to end. When 16 tokens come again,
# *nothing* is served, although a full page of exactly these tokens is in the cache. One token more and the page is
# served, with one token to compute. The same happens at 32 and 33.
#
# The reason is that at least one token must run. The cache holds keys and values, but the first word of the reply is
# chosen by the model's *output* at the last prompt token, and that is not stored. As pages are taken whole or not at
# all, the page with the last token is computed again (orange). A third sending changes nothing.
#
# The same numbers as a table:

# %% tags=["check"]
viz.ladder_table([row for row in ladder if row.send < 3])


# %% [markdown]
# ### The rule, and the model beside it
#
# The rule fits in a line: take the whole pages before the last token. Here the model is asked for a length of your
# choice. In a live notebook the slider sends a fresh prompt of that length twice; where that takes the model a moment,
# it waits for the button. **Try 64, then 65.**


# %% tags=["check"]
def send_twice(prompt_tokens=50):
    return viz.hit_ladder(studies.hit_ladder(engine, [prompt_tokens], sends=2, seed=SEED + 1))


viz.explore(send_twice, prompt_tokens=(1, 100))

# %% [markdown]
# ## What it saves: time to the first token
#
# Now we measure. A prompt of a few hundred tokens is sent cold. Then come prompts of the same length that begin as it
# did for a quarter, a half, three quarters, nine tenths, and go on differently. The part that is served costs nothing
# but the look-up; the part that is new must be computed.
#
# The dashed line is the *ideal*: the time of the cold run in proportion to the tokens that are left, plus one decode
# step. **Look at how close the dots come to it.** What lies above the line is the price of the cache: hashing, finding,
# and attending from a short tail to a long prefix. Your numbers will differ from those below, and differ from run to
# run: these cells, and only these, show wall-clock times.

# %% tags=["timing"]
timed = {"prompt_tokens": TIMED_TOKENS, "rounds": ROUNDS, "seed": SEED}
times = studies.ttft_against_cached(engine, **timed)
viz.ttft_vs_cached(times)

# %% tags=["timing"]
viz.ttft_table(times)

# %% [markdown]
# A caution for those who measure: the shortest tails gain less than their share, since a forward pass has a cost of its
# own, however few tokens it is for. On a GPU that cost can be all there is: below some hundred tokens the whole prompt
# takes as long as one, and a hit saves memory and energy rather than time.

# %% [markdown]
# ## The page size
#
# The page is the smallest thing that can be reused. Two prompts share their first 200 tokens and then part. How many of
# the 200 does the second find? **Look at the hatched ends.** With small pages the cut is fine; with pages of 128 a
# whole page is there and the next one, more than half of it equal, is lost.

# %% tags=["check"]
SHARED_TOKENS = 200
sizes = studies.page_size_study(make_engine, shared_tokens=SHARED_TOKENS, pool_tokens=1024)
viz.page_size_study(sizes)

# %% [markdown]
# So why not pages of one token? Each page costs a hash, a look-up, and an entry in every list that the attention reads;
# the smaller the pages, the more of them. The loss is half a page on average, so it matters only for short prefixes.
# The slider moves the length of the shared prefix. No model is needed for this one: it is the rule alone. **Try 127 and
# 128,** and see why a system prompt just short of a page is unlucky.


# %% tags=["check"]
def by_page_size(shared_tokens=127):
    sizes = (1, 8, 16, 32, 64, 128)
    rows = [PageSizeRow(size, shared_tokens, shared_tokens // size * size) for size in sizes]
    return viz.page_size_study(rows)


viz.explore(by_page_size, shared_tokens=(1, 512))

# %% [markdown]
# ## Why was the rest computed?
#
# A hit rate alone does not tell what to do about it. So the cache remembers enough to explain itself: which pages it
# gave up, under which roots it filed, and what the nearest chain looks like. After a request, each range of computed
# prompt tokens carries one cause and one sentence of evidence.
#
# One example of each follows. All of them send the same prompt of three and a half pages, or one that begins like it,
# to a small pool.

# %% tags=["check"]
small = make_engine(num_pages=24, page_size=PAGE_SIZE)
examples = studies.miss_examples(small, seed=SEED)
viz.misses(examples, "Every computed token has one cause: here is an example of each")

# %% [markdown]
# **Read it from top to bottom.** Green was served; everything else is named after its cause:
#
# * **never seen**: the first time. No cached chain begins like this.
# * **last page**: the same again. All is served but the page of the last token.
# * **shares less than a page**: equal for half a page, then different. Half a page cannot be reused.
# * **diverged**: a whole page is equal and served, then the prompts part. The evidence names the token and both ids:
#   this is what one looks for when a time stamp or a user name in a system prompt spoils all that follows.
# * **other root**: equal tokens under another salt. They are kept apart on purpose; another dtype or another checkpoint
#   would show here, too.
# * **opted out**: the request asked for no reuse, or for the log-probabilities of its prompt, which need every row.
# * **evicted**: another request took all pages of the pool in between. The evidence names it.
#
# A few more causes exist for models with pictures or with several passes over a prompt; this one has no use for them.
#
# The evidence in full, one row for each range:

# %% tags=["check"]
viz.miss_table(examples)

# %% [markdown]
# The same two questions can be put to any single request. Its result has the numbers, and `misses` has one row for each
# range.

# %% tags=["check"]
vocabulary = engine.model.vocab_size
known = studies.random_ids(4 * PAGE_SIZE, vocabulary, SEED + 2)
engine.generate(known, max_tokens=0)
other = studies.parted_at(known, 2 * PAGE_SIZE + 5, vocabulary, SEED + 3)
parted = engine.generate(other, max_tokens=0)
print(f"{parted.cached_tokens} of {parted.prompt_tokens} prompt tokens served")
parted.misses

# %% [markdown]
# Two requests that arrive in the same step with the same new prompt both compute it, as neither could know of the
# other. No policy could have helped: it is a race, and the cause is *never seen* for both. One step later the pages
# would have been there.

# %% tags=["check"]
new = studies.random_ids(40, vocabulary, SEED + 4)
twins = engine.generate([new, new], max_tokens=1)
[(twin.cached_tokens, twin.misses[0].cause) for twin in twins]

# %% [markdown]
# ## A chat of two turns, with the cache and without
#
# Random ids are good for counting. The reason to have a cache is a conversation: each turn sends everything so far
# again. Here is one of two turns, a question about a kettle and a follow-up, first with the cache and then the same
# prompts on an engine that has none.

# %%
from kvlab.shipped import prompt

talk = prompt("chat")
cached = make_engine(num_pages=NUM_PAGES, page_size=PAGE_SIZE)
turns = studies.two_turn_chat(cached, talk["system"], talk["turns"], max_tokens=MAX_TOKENS)
plain = make_engine(num_pages=NUM_PAGES, page_size=PAGE_SIZE, prefix_cache=False)
without = studies.replay(plain, turns)
print(turns[1].text)

# %% [markdown]
# **Look at turn 2.** With the cache it is served the system prompt, the first question *and the reply*: the pages of
# generated tokens are filed like those of a prompt. What is computed is the end of the last page and the new question.
# Without the cache, all of it is computed again.

# %% tags=["check"]
chat_rows = studies.request_rows([*turns, *without])
labels = ("turn 1, cache on", "turn 2, cache on", "turn 1, cache off", "turn 2, cache off")
chat_rows = [replace(row, name=name) for row, name in zip(chat_rows, labels, strict=True)]
found, needed = turns[1].cached_tokens, turns[1].prompt_tokens
viz.misses(chat_rows, f"Turn 2 finds {found} of its {needed} tokens in the cache")

# %% tags=["timing"]
viz.request_table(chat_rows)

# %% [markdown]
# Is it the same answer? It should be: served pages hold the keys and values that a cold run would compute. But they
# were computed in another batch shape, sums were taken in another order, and the last bits may differ; when two words
# are almost equally likely, that can tip the choice. So kvlab says where two replies part instead of promising that
# they never do. Here, in float32:

# %% tags=["check"]
[studies.first_difference(hit.ids, cold.ids) for hit, cold in zip(turns, without, strict=True)]

# %% [markdown]
# `None` means that no token differs.
#
# ## The answer, checked
#
# The rule for every step of the ladder, the saving, and that each computed token has exactly one cause.

# %%
assert all(row.cached_tokens == row.expected_tokens for row in ladder), "whole pages"
assert times[-1].ttft_ms < times[0].ttft_ms, "the first token comes sooner"
assert all(SHARED_TOKENS - row.cached_tokens == SHARED_TOKENS % row.page_size for row in sizes)
everything = [*examples, *chat_rows, *studies.request_rows([parted, *twins])]
for row in everything:
    computed = [token for miss in row.misses for token in range(miss.start, miss.stop)]
    assert computed == list(range(row.cached_tokens, row.prompt_tokens)), "one cause a token"
first_turn = turns[0].prompt_tokens + len(turns[0].ids)
assert turns[1].pages_matched == (first_turn - 1) // PAGE_SIZE, "turn two finds turn one"
assert without[1].cached_tokens == 0, "and nothing with the cache off"
for one in (engine, small, cached, plain):
    one.check()
