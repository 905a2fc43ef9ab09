# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3 (ipykernel)
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Does it sound different when the cache had the prompt?
#
# **No: with the same seed, a sentence spoken after a hit has the same tokens as the cold one, and so the same samples,
# to the last bit.** The scores behind the tokens do differ, in about the sixth digit, but in float32 that is too little
# to tip a choice. What does change the sound is less precise arithmetic, which makes another rendering of the same
# sentence, and a sampler that is not told which tokens the cache stands in for.
#
# Below, a small model speaks sentences cold and after a hit. We compare tokens first, then samples, and beside each
# difference we put the *noise floor*: how far apart two renderings of the very same tokens are.
#
# **The words.** A *speech model* of this kind is a language model that reads a line such as `tara: six white stars`
# and goes on in *codes* instead of words. Seven codes make a *frame*, about a twelfth of a second, and a second
# network, the *codec*, makes sound of frames. Its decoder adds noise of its own, as breath and hiss are cheaper drawn
# than described. In kvlab that noise depends on a seed and on the place in the utterance alone, so equal codes give
# equal samples.

# %% [markdown]
# The next cell holds everything one may want to change. `"canopylabs/orpheus-3b-0.1-ft"`, or the path of a checkpoint
# folder, takes the released model, which wants a GPU and longer sentences. The sentences below quote the numbers of the
# default model; the last cell checks the rules for any.

# %% tags=["parameters"]
MODEL = "orpheus-tiny"  # a name, or a checkpoint folder
DEVICE = None  # None = a GPU if there is one, else the CPU
DTYPE = "float32"
PAGE_SIZE = 4  # tokens a page: prompts of speech are short
NUM_PAGES = 512  # of the pool
TEXT = "six white stars"
SENTENCES = ("one red star", "one red circle", "the red star is left of the blue circle")
MAX_TOKENS = 280  # 40 frames
PLAYER_RATE = 8_000  # samples a second of the players below, to keep this page small
SEED = 0

# %% tags=["check-cpu"]
import kvlab
from kvlab import viz
from kvlab.assemble import build_engine
from kvlab.lab import audio, speech_studies, studies
from kvlab.lab.speech_studies import drift_row
from kvlab.models.orpheus import say
from kvlab.models.orpheus.noise import SeededNoise

settings = {"device": DEVICE, "num_pages": NUM_PAGES, "page_size": PAGE_SIZE, "seed": SEED}
engine = kvlab.load(MODEL, dtype=DTYPE, **settings)
model = engine.model
engine

# %% [markdown]
# ## One sentence, twice
#
# `say` runs a request to its end and returns what was said: samples, frames, and the engine's result. We forget the
# cache, say the sentence, and say it again. `only_speech` lets only well-formed frames be chosen; the rest of the
# sampling is the model's own: temperature 0.6, top-p 0.8, and a penalty of 1.3 on whatever was said before.

# %% tags=["check-cpu"]
how = {"max_tokens": MAX_TOKENS, "only_speech": True, "seed": SEED, "logprobs": 1}
cold, hit = speech_studies.cold_and_hit(engine, say, TEXT, **how)
rows, found = studies.request_rows([cold.generation, hit.generation]), hit.generation
viz.misses(rows, f"A hit: {found.cached_tokens} of {found.prompt_tokens} prompt tokens are served")

# %% [markdown]
# The prompt is short: who speaks, what to say, and a few marks around it. So a page of 16 tokens would leave most of it
# out, and we use pages of 4. **Look at the second bar:** everything is served but the page with the last token, which
# must run because its output chooses the first code.
#
# Now the comparison. The noise floor needs the same frames decoded with two noises:


# %% tags=["check-cpu"]
def two_noises(speech):
    return [model.sound(speech.frames, noise=SeededNoise(seed)) for seed in (0, 1)]


drift = audio.compare_speech(cold, hit, noise_pair=two_noises(hit))
drift

# %% [markdown]
# **Read it from left to right.** Tokens are compared first, because they decide: from the first token that differs on,
# the model hears itself say something else, and comparing samples says no more than that. Where all tokens are equal,
# samples are worth comparing, and here all of them are equal as well.
#
# The last number is the floor. Two renderings of *the same tokens* with different noise differ by that much, and nobody
# would call one of them wrong. A drift in samples that stays below it would mean nothing.
#
# ### The codes
#
# Each column is a frame, each row one of its seven codes: one coarse, two middle, four fine. A code is a number of a
# code book. **Look for a cell that is not grey.** Were there one, the title would name the frame.

# %% tags=["check-cpu"]
viz.token_grid(cold.frames, hit.frames, columns=6)

# %% [markdown]
# ### Waveforms
#
# The two recordings, then one minus the other, then the noise floor: one noise minus another over the same codes. The
# differences are drawn twenty times larger. **Compare the last two lanes.** The third is silence, the fourth is not.

# %% tags=["check-cpu"]
rate = cold.sample_rate
lanes = [audio.envelope(cold.samples, rate, "cold"), audio.envelope(hit.samples, rate, "hit")]
apart = {"hit − cold": (cold.samples, hit.samples), "noise alone": two_noises(hit)}
for name, pair in apart.items():
    lanes.append(audio.envelope(audio.difference(*pair), rate, name, drawn_gain=20))
viz.waveforms(lanes)

# %% [markdown]
# ### Spectrograms
#
# The same by pitch: time runs to the right, high sounds are up, bright is loud. The stripes of the vowels and the hiss
# of the *s* at the end are in the same places in all three. **Look for a difference in the lowest picture,** made with
# another noise. There is one, but it is as small as the title says: the noise of this codec follows the sound, so it is
# loud only where the sound is.

# %% tags=["check-cpu"]
sounds = {"cold": cold.samples, "hit": hit.samples, "other noise": two_noises(hit)[1]}
viz.spectrograms([audio.spectrogram(x, rate, name) for name, x in sounds.items()])

# %% [markdown]
# ### Listen
#
# Numbers first, ears second: the captions say what to expect. This model is tiny: it says 27 words in short phrases, and
# about two words of ten come out as others (its README has the measured share). Comparing two recordings needs no more.

# %% tags=["check-cpu"]
from IPython.display import display

for name, speech in {"cold": cold, "after a hit": hit}.items():
    found = speech.generation
    cached = f"{found.cached_tokens} of {found.prompt_tokens} prompt tokens cached"
    caption = f"{name}, {speech.voice}: “{TEXT}”, {len(speech.frames)} frames, {cached}"
    display(viz.audio_player(speech, f"{caption}; {drift.verdict}", sample_rate=PLAYER_RATE))

# %% [markdown]
# ## Other voices, other seeds
#
# One sentence is one example. Here each voice says it cold and after a hit. The green part of a bar is how many frames
# are equal before the first that differs. To its right stands how far the samples are apart, and in brackets the noise
# floor of that voice.
#
# Another seed draws other codes: the sentence comes out a little faster, or with another melody. But cold and hit draw
# the *same* other codes. In a live notebook, **try a few seeds**; each one says the sentence twice in every voice.


# %% tags=["check-cpu"]
def cold_against_hit(name, engine, **more):
    first, second = speech_studies.cold_and_hit(engine, say, TEXT, **how | more)
    return drift_row(name, first, second, two_noises(second))


def by_seed(seed=SEED):
    voices[seed] = [cold_against_hit(v, engine, voice=v, seed=seed) for v in model.voices]
    return viz.speech_drift(voices[seed])


voices = {}
viz.explore(by_seed, seed=(0, 50))

# %% [markdown]
# ## Who shares what: voices and sentences
#
# The name of the voice stands *first* in the prompt. A key of the cache is made of a page's tokens and all tokens
# before it, so that one word decides everything after it. **Look down the first column:** each voice begins from
# nothing, though the words have all been seen. **Look along a row:** within a voice, sentences share the words they
# begin with, in whole pages.
#
# Would a prompt that names the voice last share more? Yes, but it is not what the model was trained on. A prompt format
# is part of a model, and its cache has to live with it. What is left to choose is the page size. **Try 1, then 16:**
# with pages of one token even two voices share the two marks before the name, and with pages of 16 next to nothing is
# shared.


# %% tags=["check-cpu"]
def who_shares_what(page_size=PAGE_SIZE):
    with build_engine(model, num_pages=NUM_PAGES, page_size=page_size) as other:
        return speech_studies.sharing_map(other, model.voices, SENTENCES)


def draw_map(page_size=PAGE_SIZE):
    return viz.sharing_map(who_shares_what(page_size))


viz.explore(draw_map, page_size=[1, 2, 4, 8, 16])

# %% [markdown]
# ## Does the page size change what is heard?
#
# It changes how much is served, and with it how many tokens run at once. With one or two of them sums are taken in
# another order than cold, and the last bits of the scores move. **Look at the table's column of log-probabilities:**
# that is all that moves. Pages of 8 leave six tokens to run, enough for the order of the cold run, and pages of 32
# serve nothing at all: there the drift is exactly zero.

# %% tags=["check-cpu"]
sizes = []
for page_size in (1, 4, 8, 32):
    with build_engine(model, num_pages=NUM_PAGES, page_size=page_size) as other:
        sizes.append(cold_against_hit(f"pages of {page_size}", other))
viz.speech_drift_table(sizes)

# %% [markdown]
# ## Does the number format change it?
#
# bfloat16 keeps three digits instead of seven. We run the whole model in it, and then keep float32 for the arithmetic
# and store only the *pages* in bfloat16, which halves the memory of the cache. For each of them: is a hit still equal
# to its own cold run, and how far is the cold run from the one in float32? A short sentence often comes out the same in
# every format, since few choices are close enough to tip. So this is the longest of the sentences above.

# %% tags=["check-cpu"]
long_cold, long_hit = speech_studies.cold_and_hit(engine, say, SENTENCES[-1], **how)


def in_format(name, **formats):
    with kvlab.load(MODEL, **settings, **formats) as other:
        first, second = speech_studies.cold_and_hit(other, say, SENTENCES[-1], **how)
    pairs = {f"{name}: hit and cold": (first, second), f"{name} and {DTYPE}": (long_cold, first)}
    return first, [drift_row(n, *pair, two_noises(long_cold)) for n, pair in pairs.items()]


# %% tags=["check-cpu"]
coarse, coarse_rows = in_format("bfloat16", dtype="bfloat16")
_, stored_rows = in_format("bfloat16 pages", dtype=DTYPE, kv_dtype="bfloat16")
formats = [drift_row(f"{DTYPE}: hit and cold", long_cold, long_hit, two_noises(long_hit))]
formats += coarse_rows + stored_rows
viz.speech_drift(formats)

# %% [markdown]
# **Two different questions, two different answers.** Within a format, a hit says what the cold run said. With the whole
# model in bfloat16 the codes part from those of float32 in the last third of the sentence: rounding moves the scores by
# some hundredths, somewhere a choice tips, and from there on the model continues from another code. Beside that the
# noise floor is small: this drift can be heard. It is not a mistake, though, but another rendering of the same
# sentence, as another seed would be. Pages alone in bfloat16 move the scores by less than one hundredth, and here no
# choice tips.
#
# The same as a table, with every number and its floor side by side:

# %% tags=["check-cpu"]
viz.speech_drift_table(formats)

# %% [markdown]
# And the place where they part, code by code:

# %% tags=["check-cpu"]
viz.token_grid(long_cold.frames, coarse.frames, (DTYPE, "bfloat16"), columns=6)

# %% [markdown]
# ## What goes wrong when the sampler is not told
#
# The penalty of 1.3 is on every token seen so far, the prompt's included. But a hit *skips* tokens: they never run, so
# a sampler that takes note of what runs never sees them. In kvlab the skipped ids are handed to the sampler with the
# hit. Here we cut that line.
#
# It matters most where a prompt holds sound. We let the model begin a longer sentence, stop it after eight frames, and
# let it *go on*: the new prompt is the old one and the 56 codes so far, and nearly all of it is served from pages that
# were filled by generating. How many ids are under the penalty?

# %% tags=["check-cpu"]
begun = say(engine, SENTENCES[-1], **how | {"max_tokens": 8 * 7})
prompt = begun.continued()
off = build_engine(model, num_pages=NUM_PAGES, page_size=PAGE_SIZE, prefix_cache=False)
covered = {"cold": len(speech_studies.penalised_ids(off, prompt, seed=SEED))}
covered["hit"] = len(speech_studies.penalised_ids(engine, prompt, seed=SEED))
with speech_studies.untold_sampler(engine):
    covered["hit, sampler not told"] = len(speech_studies.penalised_ids(engine, prompt, seed=SEED))
covered

# %% [markdown]
# Told, it covers what the cold run covers. Not told, it covers the last page and the token just chosen. The other codes
# cost nothing to say again, so the rest of the sentence is drawn from other odds:

# %% tags=["check-cpu"]
rest, rest_hit = say(off, prompt, **how), say(engine, prompt, **how)
with speech_studies.untold_sampler(engine):
    rest_untold = say(engine, prompt, **how)
floor = two_noises(rest)
told = drift_row("sampler told", rest, rest_hit, floor)
untold = drift_row("sampler not told", rest, rest_untold, floor)
viz.speech_drift([told, untold])

# %% [markdown]
# **Nothing crashes and nothing is logged.** The lower bar is speech all the same, and not the speech that was asked
# for. Only a comparison with a cold run shows it.
#
# ## The answer, checked
#
# Equal tokens and samples after a hit for every voice and page size, a floor above zero, voices that share nothing, and
# a penalty that covers the same ids cold and after a hit, but not when the sampler is left out.

# %%
served = (hit.generation.prompt_tokens - 1) // PAGE_SIZE * PAGE_SIZE
assert [one.generation.cached_tokens for one in (cold, hit)] == [0, served], "whole pages"
assert drift.first_difference is None, "equal tokens"
assert drift.samples.is_equal, "equal samples, to the bit"
pairs = [*voices[SEED], *sizes, told]
assert all(row.first_frame is None for row in pairs), "for every voice and page size"
assert all(row.floor_rms > 0 for row in [*pairs, *formats]), "noise is not nothing"
firsts = who_shares_what()[:: len(SENTENCES)]
assert not any(row.cached_tokens for row in firsts), "a new voice finds nothing"
assert covered["hit"] == covered["cold"] > covered["hit, sampler not told"], "the penalty"
engine.check()
off.check()
