"""Audio tokens: which ids are sound, how seven of them make a frame, and how a stream of them is read without losing its place.

Seven tokens are one frame. Token ``slot`` of a frame has its own range of ids, ``first_audio + slot * codebook_size + code``,
so an id says where in a frame it belongs. The codec has three levels, of 1, 2 and 4 codes a frame.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, TypeAlias

from kvlab.errors import InputError, LoadError

SLOTS = 7
NUM_MARKS = 10  # ids between custom_token_base and the first code
#: Slots of each codec level, coarse to fine, in order of time.
LEVELS = ((0,), (1, 4), (2, 3, 5, 6))

Frame: TypeAlias = tuple[int, ...]  # seven codes, in order of slots


@dataclass(frozen=True)
class OrpheusIds:
    """The ids with a meaning; the defaults are those of the released checkpoints.

    ``<custom_token_N>`` has the id ``custom_token_base + N``. The first ten are marks, the others are codes.

    >>> ids = OrpheusIds()
    >>> ids.end_of_speech, ids.audio_id(slot=6, code=4095), ids.split(156937), ids.split(128258)
    (128258, 156937, (6, 4095), None)
    """

    custom_token_base: int = 128256
    eot_id: int = 128009
    codebook_size: int = 4096

    def __post_init__(self) -> None:
        for name in (f.name for f in fields(self)):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < (name == "codebook_size"):
                raise LoadError(f"the config's {name} is {value!r}; a whole number is needed")

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> OrpheusIds:
        """Read the ids in a config's "orpheus" entry; what it does not name is as released."""
        known = {f.name for f in fields(cls)}
        return cls(**{name: value for name, value in config.items() if name in known})

    @property
    def start_of_speech(self) -> int:
        return self.custom_token_base + 1

    @property
    def end_of_speech(self) -> int:
        return self.custom_token_base + 2

    @property
    def start_of_human(self) -> int:
        return self.custom_token_base + 3

    @property
    def end_of_human(self) -> int:
        return self.custom_token_base + 4

    @property
    def start_of_ai(self) -> int:
        return self.custom_token_base + 5

    @property
    def end_of_ai(self) -> int:
        return self.custom_token_base + 6

    @property
    def first_audio(self) -> int:
        return self.custom_token_base + NUM_MARKS

    def is_text(self, token: int) -> bool:
        """True for an id that stands for written text or begins it."""
        return token not in range(self.custom_token_base, self.audio.stop) and token != self.eot_id

    @property
    def audio(self) -> range:
        """Every id that stands for a code."""
        return range(self.first_audio, self.first_audio + SLOTS * self.codebook_size)

    def slot_ids(self, slot: int) -> range:
        """The ids that may stand at ``slot`` of a frame."""
        first = self.first_audio + slot * self.codebook_size
        return range(first, first + self.codebook_size)

    def audio_id(self, slot: int, code: int) -> int:
        """The id of a code; checks neither."""
        return self.first_audio + slot * self.codebook_size + code

    def split(self, token: int) -> tuple[int, int] | None:
        """Return (slot, code) of an audio id, None for any other id."""
        return divmod(token - self.first_audio, self.codebook_size) if token in self.audio else None


# -- frames, ids and codec levels --------------------------------------------------------------------------------------


def check_frames(frames: Iterable[Sequence[int]], codebook_size: int) -> list[Frame]:
    """Return frames as tuples of ints.

    Raises:
        InputError: a frame has not seven codes, or a code is no int of the code book; the message says which.

    >>> check_frames([(0, 1, 2, 3, 4, 5, 6.0)], 512)
    Traceback (most recent call last):
    kvlab.errors.InputError: frame 0, slot 6: the code is 6.0; codes are ints from 0 to 511
    """
    checked = []
    for index, frame in enumerate(frames):
        codes = frame.tolist() if hasattr(frame, "tolist") else list(frame)
        if len(codes) != SLOTS:
            raise InputError(f"frame {index} has {len(codes)} codes; a frame has {SLOTS}")
        checked.append(tuple(_check_code(index, slot, code, codebook_size) for slot, code in enumerate(codes)))
    return checked


def _check_code(index: int, slot: int, code: Any, codebook_size: int) -> int:
    try:
        value = -1 if isinstance(code, bool) else operator.index(code)
    except TypeError:
        value = -1
    if not 0 <= value < codebook_size:
        raise InputError(f"frame {index}, slot {slot}: the code is {code!r}; codes are ints from 0 to {codebook_size - 1}")
    return value


def ids_of(frames: Iterable[Sequence[int]], ids: OrpheusIds) -> list[int]:
    """Return the token ids of frames; ``frames_of`` is the inverse.

    >>> ids_of([(0, 1, 2, 3, 4, 5, 6)], OrpheusIds())[:3]
    [128266, 132363, 136460]
    """
    return [ids.audio_id(slot, code) for frame in check_frames(frames, ids.codebook_size) for slot, code in enumerate(frame)]


def frames_of(tokens: Sequence[int], ids: OrpheusIds) -> list[Frame]:
    """Return the frames of token ids that are whole frames and nothing else.

    Raises:
        InputError: a token is out of place, or the last frame is not whole. ``FrameReader`` reads streams that may be damaged.
    """
    frames: list[Frame] = []
    for start in range(0, len(tokens), SLOTS):
        parts = [ids.split(token) for token in tokens[start : start + SLOTS]]
        if [part and part[0] for part in parts] != list(range(SLOTS)):
            raise InputError(f"tokens {start} to {start + len(parts) - 1} are not the {SLOTS} slots of a frame")
        frames.append(tuple(part[1] for part in parts if part))
    return frames


def to_levels(frames: Sequence[Sequence[int]]) -> tuple[list[int], ...]:
    """Return the codec's three code lists.

    >>> to_levels([range(0, 7), range(7, 14)])
    ([0, 7], [1, 4, 8, 11], [2, 3, 5, 6, 9, 10, 12, 13])
    """
    return tuple([frame[slot] for frame in frames for slot in level] for level in LEVELS)


def from_levels(levels: Sequence[Sequence[int]]) -> list[Frame]:
    """Return the frames of three code lists.

    Raises:
        InputError: the lists are not of 1, 2 and 4 codes a frame.

    >>> from_levels(([0, 7], [1, 4, 8, 11], [2, 3, 5, 6, 9, 10, 12, 13])) == [tuple(range(7)), tuple(range(7, 14))]
    True
    """
    lengths = [len(level) for level in levels]
    num_frames = lengths[0] if lengths else 0
    if lengths != [num_frames * len(level) for level in LEVELS]:
        raise InputError(f"the levels have {lengths} codes; a frame has 1, 2 and 4")
    codes = [[0] * SLOTS for _ in range(num_frames)]
    for level, slots in zip(levels, LEVELS, strict=True):
        for i, code in enumerate(level):
            codes[i // len(slots)][slots[i % len(slots)]] = code
    return [tuple(frame) for frame in codes]


# -- reading a stream --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class BadFrame:
    """Frame ``index`` of a stream (bad ones counted) could not be read; ``reason`` is one sentence."""

    index: int
    reason: str


@dataclass
class FrameReader:
    """Finds frames in a stream of token ids, token by token, and keeps its place whatever comes between.

    Every audio id says which slot it belongs to. One that does not continue the frame makes that frame bad, and reading goes
    on at the next slot 0, so that nothing after it is shifted. Ids that are no audio are counted and otherwise ignored.

    Args:
        repeat_bad: put the frame before in the place of a bad one, so that time is kept; else bad frames are left out.

    >>> ids = OrpheusIds()
    >>> reader = FrameReader(ids)
    >>> damaged = ids_of([range(7), range(7), range(10, 17)], ids)
    >>> damaged[9] = 128257
    >>> [frame for token in damaged for frame in reader.push(token)]
    [(0, 1, 2, 3, 4, 5, 6), (10, 11, 12, 13, 14, 15, 16)]
    >>> reader.bad, reader.num_ignored
    ([BadFrame(index=1, reason='slot 3 came where slot 2 belongs')], 1)
    """

    ids: OrpheusIds
    repeat_bad: bool = False
    num_frames: int = 0  # started, bad ones included
    num_ignored: int = 0
    bad: list[BadFrame] = field(default_factory=list)
    _codes: list[int] = field(default_factory=list)
    _is_lost: bool = False  # inside a bad frame, waiting for a slot 0
    _is_doubtful: bool = False  # a slot 0 came out of time: a new frame if slot 1 follows, else one more damaged token
    _num_lost: int = 0  # audio tokens of the bad frame so far
    _last: Frame | None = None

    def push(self, token: int) -> list[Frame]:
        """Take one token; returns the frames that became certain with it: none, or one."""
        part = self.ids.split(token)
        if part is None:
            self.num_ignored += token != self.ids.end_of_speech
            return []
        slot, code = part
        self._num_lost += self._is_lost or self._is_doubtful
        if slot == 0 and (self._codes or self._is_lost):
            return self._begin_early(code)
        return [] if self._is_lost else self._take(slot, code)

    @property
    def num_left_over(self) -> int:
        """Tokens of a frame that is not whole yet."""
        return len(self._codes)

    def _take(self, slot: int, code: int) -> list[Frame]:
        if slot != len(self._codes):
            return self._damage(slot)
        self.num_frames += slot == 0
        self._is_doubtful = False
        self._codes.append(code)
        if len(self._codes) < SLOTS:
            return []
        self._last, self._codes = tuple(self._codes), []
        return [self._last]

    def _damage(self, slot: int) -> list[Frame]:
        if self._is_doubtful:  # the slot 0 out of time was one more damaged token of the bad frame before
            self.num_frames -= 1
            self._codes, self._is_lost, self._is_doubtful = [], True, False
            return []
        self.num_frames += not self._codes  # a frame that lacks its very first token
        return self._give_up(slot)

    def _give_up(self, slot: int) -> list[Frame]:
        self.bad.append(BadFrame(self.num_frames - 1, f"slot {slot} came where slot {len(self._codes)} belongs"))
        self._num_lost = len(self._codes) + 1
        self._codes, self._is_lost = [], True
        return [self._last] if self.repeat_bad and self._last is not None else []

    def _begin_early(self, code: int) -> list[Frame]:
        """A slot 0 before the frame was whole, or after a bad frame: another frame may begin."""
        repeated = [] if self._is_lost or self._is_doubtful else self._give_up(0)
        self.num_frames += not self._is_doubtful  # a doubtful one before was none
        self._is_doubtful = self._num_lost != SLOTS + 1  # in time when just the bad frame's seven tokens went before
        self._is_lost, self._codes = False, [code]
        return repeated


def due_slot(tokens: Sequence[int], ids: OrpheusIds) -> int:
    """Return the slot that follows the last audio id of a stream, 0 where there is none; other ids take up no slot.

    >>> ids = OrpheusIds()
    >>> due_slot([ids.audio_id(0, 5), ids.audio_id(1, 5), ids.start_of_speech], ids), due_slot([], ids)
    (2, 0)
    """
    parts = (ids.split(token) for token in reversed(tokens))
    return next(((part[0] + 1) % SLOTS for part in parts if part), 0)


# -- only legal tokens -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class OnlySpeech:
    """Which ids may come next when only well-formed speech may: the slot that is due, and the end between frames.

    Args:
        slot: the slot due first; a continuation may begin inside a frame.

    >>> only = OnlySpeech(OrpheusIds())
    >>> only([]), only([128266])
    ((range(128266, 132362), range(128258, 128259)), (range(132362, 136458),))
    """

    ids: OrpheusIds
    slot: int = 0

    def __call__(self, generated: Sequence[int]) -> tuple[range, ...]:
        last = self.ids.split(generated[-1]) if generated else None
        slot = (last[0] + 1) % SLOTS if last else 0 if generated else self.slot
        end = self.ids.end_of_speech
        return (self.ids.slot_ids(slot), range(end, end + 1)) if slot == 0 else (self.ids.slot_ids(slot),)
