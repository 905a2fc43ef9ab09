"""From a text and a voice to the ids Orpheus was trained on, with exactly one begin token whichever way the text comes in."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from kvlab.errors import InputError
from kvlab.models.orpheus.tokens import OrpheusIds
from kvlab.models.prompting import TENSOR, TextProcessor, refuse_mixed
from kvlab.spec import Chat, Continued, PromptRecord

VOICES = ("tara", "leah", "jess", "leo", "dan", "mia", "zac", "zoe")


class OrpheusProcessor(TextProcessor):
    """Makes prompts of speech; the field ``voice`` names who speaks (None: no name is written), the first voice by default.

        start_of_human  [begin token] "voice: text"  eot end_of_human start_of_ai start_of_speech

    Text that is a whole prompt already, as the released class writes it, gets no second frame around it. Ids are taken as they
    are. A continuation with empty text goes on with the same utterance; with text it ends that and asks for the next. Where
    the voice is in the prompt already the field is refused: it would change nothing.

    Args:
        tokenizer: A transformers tokenizer, or None for prompts of ids only.
        ids: The ids with a meaning.
        voices: Names the checkpoint knows.
    """

    def __init__(self, tokenizer: Any, *, ids: OrpheusIds, voices: Sequence[str] = VOICES, vocab_size: int) -> None:
        super().__init__(tokenizer, vocab_size=vocab_size, stop_ids=[ids.end_of_speech])
        self.ids, self.voices = ids, tuple(voices)

    def process_prompt(self, prompt: Any, fields: Mapping[str, Any]) -> PromptRecord:
        refuse_mixed(prompt)
        unknown = sorted(set(fields) - {"voice"})
        if unknown:
            raise InputError(f"an Orpheus model knows no field {', '.join(map(repr, unknown))}; it knows 'voice'")
        if isinstance(prompt, Chat):
            raise InputError("an Orpheus model speaks a text and holds no conversation; send the text alone")
        voice = self._voice(fields)
        has_voice = "voice" in fields
        if isinstance(prompt, str):
            ids = self._framed(prompt, voice, has_voice)
            return PromptRecord({TENSOR: ids}, metadata={"voice": voice}, text=prompt)
        if isinstance(prompt, Continued):
            ids = self._continue(prompt, voice, has_voice)
            return PromptRecord({TENSOR: ids}, metadata={"voice": voice}, text=prompt.text)
        if has_voice:
            raise _voice_within("ids are a whole prompt already")
        return PromptRecord({TENSOR: self.check_ids(prompt, "prompt")})

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text among ids; audio and control ids are none."""
        words = [i for i in ids if self.ids.is_text(i)]
        return super().decode(words) if words else ""

    def is_whole_prompt(self, text: str) -> bool:
        """True for text that brings its own frame, as the released class writes it, and with it its voice."""
        return [i for i in self._encode_part(text) if i != self._begin][:1] == [self.ids.start_of_human]

    def _voice(self, fields: Mapping[str, Any]) -> str | None:
        voice = fields.get("voice", self.voices[0] if self.voices else None)
        if voice is not None and voice not in self.voices and voice != "":
            raise InputError(f"there is no voice {voice!r}; there are: {', '.join(self.voices)}, or None for no name")
        return voice or None

    def _framed(self, text: str, voice: str | None, has_voice: bool) -> list[int]:
        if not text.strip():
            raise InputError("the text to speak is empty; give at least one word")
        ids = [i for i in self._encode_part(text) if i != self._begin]
        if ids[:1] == [self.ids.start_of_human]:
            if has_voice:
                raise _voice_within("the text is a whole prompt already")
            return [ids[0], *self._begun(ids[1:])]
        mark = next((i for i in ids if not self.ids.is_text(i)), None)
        if mark is not None:
            raise InputError(f"the text holds the control token {self.tokenizer.decode([mark])!r}; take it out of the text")
        spoken = self._encode_part(f"{voice}: {text}" if voice else text)
        return [self.ids.start_of_human, *self._begun(spoken), *self._after_text()]

    def _begun(self, ids: Sequence[int]) -> list[int]:
        """Put the begin token in front where the tokenizer uses one, and take away any other."""
        bare = [i for i in ids if i != self._begin]
        return bare if self._begin is None else [self._begin, *bare]

    def _after_text(self) -> list[int]:
        return [self.ids.eot_id, self.ids.end_of_human, self.ids.start_of_ai, self.ids.start_of_speech]

    def _continue(self, prompt: Continued, voice: str | None, has_voice: bool) -> list[int]:
        kept = self.check_ids(prompt.kept_ids, "kept")
        if not isinstance(prompt.text, str):
            raise InputError(f"the text of a continuation is {prompt.text!r}; give a str, '' to go on with the utterance")
        if not prompt.text:
            if has_voice:
                raise _voice_within("the prompt goes on with an utterance")
            return kept
        ended = [self.ids.end_of_speech, self.ids.end_of_ai]
        return [*kept, *ended, *self._framed(prompt.text, voice, has_voice)]


def _voice_within(why: str) -> InputError:
    return InputError(f"{why}, so its voice is in it; leave out the field voice")
