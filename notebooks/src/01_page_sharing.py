# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3 (ipykernel)
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Who owns which page, step by step?
#
# **A page of the KV cache belongs to every request that lists it and, once it is full, also to the index that keeps it
# for later.** Requests whose prompts begin with the same tokens list the same pages, up to the last whole page that
# they have in common; from there on each has pages of its own. A page becomes free when its last owner lets go of it,
# and the index lets go only when room is needed. So pages outlive the request that computed them, and the next turn of
# a chat finds the conversation before it, up to its last full page.
#
# Below, a real language model answers three questions about one handbook. We stop it between steps and look at every
# page.
#
# **The words.** For each token of its context a transformer keeps two vectors in every layer, the *key* and the *value*
# (KV). Attention reads them at every later token, so they are stored instead of computed again. A *paged* cache stores
# them in *pages* of a fixed number of tokens; a request has a list of page numbers, just as a process has a page table.
# Whether two requests share memory is then a question about two lists of small whole numbers, and that is all we look
# at here.

# %% [markdown]
# The next cell holds everything one may want to change. A name such as `"org/name"` or the path of a checkpoint folder
# takes another model, and a GPU is used where there is one; papermill can set the cell from outside. The sentences
# below quote the numbers of the default model; the last cell checks the rules for any.

# %% tags=["parameters"]
MODEL = "smollm2-135m"  # a name, a checkpoint folder, or a GGUF file
DEVICE = None  # None = a GPU if there is one, else the CPU
NUM_PAGES = 48  # page 0 is set aside as the sink, so 47 can be used
PAGE_SIZE = 16  # tokens a page
MAX_TOKENS = 16  # length of a reply
SEED = 0

# %% tags=["check"]
import kvlab
from kvlab import viz
from kvlab.events import IndexRaceLost, RequestFinished
from kvlab.shipped import prompt

engine = kvlab.load(MODEL, device=DEVICE, num_pages=NUM_PAGES, page_size=PAGE_SIZE, seed=SEED)
engine

# %% [markdown]
# ## Three requests with one system prompt
#
# The system prompt is taken from the handbook of an invented harbour. All three requests start with it, word for word,
# and then ask something of their own. To the cache that means: their token ids are equal for a while, and then they are
# not.

# %% tags=["check"]
handbook = prompt("harbour")["system"].split("\n\n")
SYSTEM = "\n\n".join([handbook[0], handbook[3]])  # how to answer, and the people of the harbour
QUESTIONS = {
    "master": "Who is the harbour master?",
    "school": "Who runs the diving school?",
    "light": "Who keeps the lighthouse?",
}
print(SYSTEM)


# %% [markdown]
# `submit` queues a request without running anything; `step` advances everything in flight once. The first step of a
# request is its *prefill*: the whole prompt is computed in one forward pass. Each further step is a *decode*: one more
# token.


# %%
def ask(who):
    question = kvlab.chat(QUESTIONS[who], system=SYSTEM)
    return engine.submit(question, max_tokens=MAX_TOKENS, ignore_eos=True, name=who)


def steps(number):
    for _ in range(number):
        engine.step()


# %% [markdown]
# ### Step 1: A is alone
#
# We send the first question and let it take one step. **Look at the letters.** Every page that carries an `A` is in A's
# list. Pages with a `c` behind the letter are full and have been filed in the *index*: the index owns them, too, under
# a key made from their tokens and all tokens before them. They are pink: in use, and there for whoever comes. The last
# page is blue and has no `c`. It is only partly filled, A is still writing into it, and nobody else may have it. (Page
# 0 is the *sink*, where writes without a home go. It is never anybody's.)

# %% tags=["check"]
a = ask("master")
steps(1)
viz.page_map(engine.events)

# %% [markdown]
# ### B joins at step 5, C at step 9
#
# A goes on talking while the others arrive. Before B's prompt is run, the engine asks the index: which pages do I have
# for a prompt that begins like this? B gets those pages into its own list and computes only the rest.
#
# **Look at the first pages.** They carry three letters now, `ABCc`: three requests and the index own each of them, and
# the memory is there once. Behind them, each request has pages of its own, because the questions differ.

# %% tags=["check"]
steps(3)
b = ask("school")
steps(4)
c = ask("light")
steps(1)
viz.page_map(engine.events)

# %% [markdown]
# The same without colours: the lists themselves. Where two lists begin with the same numbers, the two requests read the
# same memory. *Listed* counts the entries of all lists, *held* counts different pages. The difference is what sharing
# saves.

# %% tags=["check"]
lists = {handle: list(engine.kv.stream(handle.rid).page_indices) for handle in (a, b, c)}
for who, pages in zip("ABC", lists.values(), strict=True):
    print(who, *pages)
listed = sum(map(len, lists.values()))
held = len({page for pages in lists.values() for page in pages})
print(f"{listed} pages listed, {held} held")

# %% [markdown]
# And as a table of owners: neighbouring pages with the same owners make one row.

# %% tags=["check"]
viz.page_table(engine.events)

# %% [markdown]
# ### They leave
#
# Now we let all three finish. Each result says how many tokens of its prompt came from the cache: none for A, who was
# first, and the common pages for B and C.

# %%
results = [handle.result() for handle in (a, b, c)]
for who, result in zip("ABC", results, strict=True):
    print(f"{who}: {result.cached_tokens} of {result.prompt_tokens} prompt tokens cached")
    print(f"   {result.text}")

# %% [markdown]
# ## Time travel
#
# The engine wrote down everything that happened to a page, and the log can be played to any step. In a live notebook
# the figure below has a slider with *Previous* and *Next*; read without a kernel, it shows one step: A has just left.
#
# **Look at what A leaves behind.** Its own full pages, question and reply, have lost the letter and kept the `c`. They
# are green now, *cached*: no request needs them, the index keeps them. Its unfinished last page is free again: half a
# page is filed under no key, so nobody could ever find it.

# %% tags=["check"]
a_left = next(entry.step for entry in engine.events.filter(RequestFinished, rid=a.rid))
viz.step_player(engine.events, step=a_left)

# %% [markdown]
# The whole run at a glance. Each step is a column, stacked by state. **Follow the green area:** it is what requests
# left behind. Nothing is thrown away when a request ends, and at the end no request is there and all full pages still
# are.

# %% tags=["check"]
viz.page_timeline(engine.events)

# %% [markdown]
# ## The prefix tree
#
# Pages are filed behind one another: the key of a page covers its own tokens *and the key of the page before it*. So
# equal keys mean that everything up to here is equal, and the index is a tree. **Read the figure from left to right
# along the prompt.** The trunk was computed by A and used by all three; then come three branches, one a question. The
# box of a branch holds the pages of the question and of the reply: tokens that the model has generated are filed
# exactly like tokens of a prompt.

# %% tags=["check"]
viz.prefix_tree(engine.events)

# %% [markdown]
# ## Pages survive their request
#
# All requests have ended. The table has no letters any more and the pages are still there, *cached*. If the pool runs
# full, the index gives up the pages that were not used for longest, the ends of branches first: a page without the
# pages before it would be of no use.

# %% tags=["check"]
survivors = engine.events.replay().counts()
print(survivors)
viz.page_table(engine.events)

# %% [markdown]
# ## A follow-up extends the chain
#
# The second turn of a chat begins with the first: system prompt, question, reply, and then the new question.
# `follow_up` builds it from the very ids that were computed, so it matches token for token. It is served A's prompt
# *and A's reply*, up to the last whole page. What runs is the partly filled page (it was never filed, see above) and
# the new question.

# %% tags=["check"]
next_turn = results[0].follow_up("And who is the deputy?")
second = engine.generate(next_turn, max_tokens=MAX_TOKENS, ignore_eos=True, name="turn 2")
first_turn = results[0].prompt_tokens + len(results[0].ids)
print(f"turn 1 was {first_turn} tokens, turn 2 found {second.cached_tokens} of them")
second.misses

# %% [markdown]
# ## What is never shared: the last page
#
# The smallest thing that can be shared is a whole page. We send A's question again, twice, one step apart. The prompts
# are equal to the last token, and yet the two lists end differently: each request must have a last page of its own,
# because each will write its reply there. If they shared it, one would overwrite what the other reads. And at least one
# token must be computed anyway: the scores of the next word come out of the last token, and the cache holds keys and
# values, not scores.

# %% tags=["check"]
twins = [ask("master")]
steps(1)
twins.append(ask("master"))
steps(1)
twin_lists = [list(engine.kv.stream(twin.rid).page_indices) for twin in twins]
for pages in twin_lists:
    print(*pages)
twin_results = [twin.result() for twin in twins]
print([twin.cached_tokens for twin in twin_results], "of", results[0].prompt_tokens, "cached")

# %% [markdown]
# ## The first writer wins
#
# What if two requests with the same new prompt start *in the same step*? Neither finds anything, as nothing has been
# computed yet, and both compute the same pages. A key can name only one page, so the index takes the pages of whoever
# files first. The second request keeps its own copies for as long as it runs and is never moved over: pages that are
# being read stay where they are.
#
# **Look at the column "in the index".** Two requests, pages with equal content, and only one set is filed.

# %% tags=["check"]
same = kvlab.chat("Which town is this, and how large is it? " + handbook[2])
race = [engine.submit(same, max_tokens=2, name=name) for name in ("first", "second")]
steps(1)
viz.page_table(engine.events)

# %% [markdown]
# The log calls it a lost race: the page that was offered, and the page that was there already. When both have ended,
# the copies are freed and the filed pages stay. Whoever comes third finds them.

# %% tags=["check"]
race = [handle.result() for handle in race]
losses = engine.events.filter(IndexRaceLost, rid=race[1].rid)
third = engine.generate(same, max_tokens=2, name="third")
print([result.cached_tokens for result in (*race, third)], "tokens cached")
pairs = [(entry.event.page, entry.event.winner) for entry in losses]
kvlab.lab.Table(("offered page", "page that was first"), pairs, "Lost races")

# %% [markdown]
# ## A salt keeps requests apart
#
# Sharing has a side effect: from the time to the first token one can tell that somebody else has sent the same prompt
# before. A *salt* is mixed into the root of the tree, so requests share pages only with requests of the same salt. The
# same question as A's, with a salt, finds nothing and says why.

# %% tags=["check"]
question = kvlab.chat(QUESTIONS["master"], system=SYSTEM)
salted = engine.generate(question, max_tokens=1, salt="another team", name="salted")
print(f"{salted.cached_tokens} of {salted.prompt_tokens} prompt tokens cached")
salted.misses

# %% [markdown]
# **Look at the tree again.** Turn two is `D` and has made A's branch longer. The twins are `E` and `F`: they reused the
# question's page, and whatever they generated was there already. Of the race one chain is left, filed by `G` and reused
# by the third request, `I`; the pages of the loser, `H`, are nowhere. And the salted request, `J`, stands under a root
# of its own, although its tokens are those of A.

# %% tags=["check"]
viz.prefix_tree(engine.events)

# %% [markdown]
# ## The pieces by hand
#
# There is no magic in the engine's bookkeeping. A `PageArena` counts owners, a `PrefixIndex` maps keys to pages and is
# one more owner. Neither knows a tensor. Here a request fills three pages of four tokens, files them, and leaves;
# another prompt that shares the first eight tokens then finds two of the three.

# %% tags=["check"]
from kvlab.cache import PageArena, PrefixIndex, chain_ids

arena = PageArena(num_pages=8)
index = PrefixIndex(arena)
pages = arena.acquire(3)
index.insert_run(b"root", chain_ids(range(12), 4), pages, parent=None)
print("owners while the request runs:", [arena.owners(page) for page in pages])
arena.release(pages)
print("owners when it has left:      ", [arena.owners(page) for page in pages])
alike = chain_ids([*range(8), 80, 90, 100, 110], 4)
print("found by the next prompt:     ", index.lookup(b"root", alike))
print("given up, last page first:    ", index.evict(1), "page; left:", list(index.pages()))

# %% [markdown]
# `KVResource` puts the two together. It needs to know the shape of a page, how many there are, and which forward pass
# (*walk*) writes the text whose keys it gets. There are no tensors behind these pages: the bookkeeping needs none.

# %%
from kvlab import spec
from kvlab.cache import KVResource

shape = spec.KVLayout(num_layers=1, num_kv_heads=1, head_dim=1, page_size=4)
kv = KVResource(shape, num_pages=16)
kv.enable_prefix_cache(b"a root", {"main": spec.PrefixStream("tokens", walk="prefill")})

# %% [markdown]
# Then it moves the page lists of requests through the life that the engine gives them: *ingest* (here I am, these are
# my keys), *resolve* (what do you have for me?), *apply* (agreed, I take that), *admit* (pages for the rest, please),
# *commit* (it is written: file it). Two prompts that share eight tokens, by hand:

# %% tags=["check"]
for rid, ids in {"one": [*range(12), 50], "two": [*range(8), 60, 61, 62]}.items():
    inputs, context = spec.WalkInputs({"main": ids}), spec.StepContext(frozenset({rid}))
    keyed = spec.KeyedPrompt(ids, chain_ids(ids, 4), ids[len(ids) // 4 * 4 :], len(ids))
    kv.ingest_request(rid, spec.RequestConfig({"main": keyed}))
    found = kv.resolve_cached_prefix(rid, "LLM", "prefill", inputs)
    kv.apply_cached_prefix(rid, "LLM", "prefill", inputs, found)
    rest = spec.Segment(rid, "main", len(ids) - found["main"].slots)
    step = spec.Step(0, "LLM", "prefill", (rest,))
    kv.admit(step, context)
    kv.commit(step, context)
    print(f"{rid}: {found['main'].slots} of {len(ids)} found, pages", kv.stream(rid).page_indices)

# %% [markdown]
# ## Try it
#
# How much is saved depends on how many requests there are and how long their common beginning is. The sliders run the
# very same lifecycle without a model, so they answer at once. Things to try: move *shared* (tokens that all prompts
# begin with) from 95 to 96 and see one more page shared; set *own* (tokens of each prompt's own) to 0 and find that
# everybody still has a last page of his own.

# %% tags=["check"]
from kvlab.lab.sharing import share_pages


def shared_by(requests=5, shared=96, own=20):
    run = share_pages(requests, shared_tokens=shared, own_tokens=own, num_pages=32)
    return viz.page_map(run)


viz.explore(shared_by, requests=(1, 6), shared=(0, 160), own=(0, 40))

# %% [markdown]
# ## The answer, checked
#
# Every sentence of the first paragraph as a line of code. `engine.check()` goes through the whole pool and raises if
# any page has an owner too many or too few.

# %%
common = results[1].cached_tokens // PAGE_SIZE
own_pages = [page for pages in lists.values() for page in pages[common:]]
assert all(pages[:common] == lists[a][:common] for pages in lists.values()), "equal beginnings"
assert len(set(own_pages)) == len(own_pages), "from there on each has its own"
assert held == listed - 2 * common, "a page that three requests list is held once"
assert survivors["live"] + survivors["shared"] == 0 < survivors["cached"], "pages that outlive"
assert second.pages_matched == (first_turn - 1) // PAGE_SIZE, "turn two finds turn one"
assert [x == y for x, y in zip(*twin_lists, strict=True)][-2:] == [True, False], "the last page"
assert race[1].cached_tokens == 0 < len(pairs), "two at once find nothing"
assert third.pages_matched == (third.prompt_tokens - 1) // PAGE_SIZE, "the first writer won"
assert salted.cached_tokens == 0, "a salt keeps requests apart"
engine.check()
