"""From what a client sends to token ids: raw text, ids, a chat, or a continuation of ids that were used before.

Two rules keep prefixes equal token for token. A prompt begins with exactly one begin token where the tokenizer adds one,
whoever wrote it. Ids that were prefilled or generated are kept as they are: of a follow-up only what comes after the last
reply is rendered and tokenised.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from kvlab.errors import InputError, LoadError
from kvlab.spec import Chat, Continued, HistoryFork, Mixed, PromptRecord

TENSOR = "tokens"


class TextProcessor:
    """Turns prompts of a text model into ids; picklable, holds no weights.

    Args:
        tokenizer: A transformers tokenizer, or None for a checkpoint without one (prompts are ids then).
        vocab_size: Ids below this can be embedded; the tokenizer's own size when None.
        stop_ids: Ids that end a reply; the tokenizer's end token when None.
    """

    def __init__(self, tokenizer: Any, *, vocab_size: int | None = None, stop_ids: Iterable[int] | None = None) -> None:
        if tokenizer is None and vocab_size is None:
            raise InputError("a processor without a tokenizer needs vocab_size=")
        self.tokenizer = tokenizer
        self.vocab_size: int = len(tokenizer) if vocab_size is None else vocab_size
        end = getattr(tokenizer, "eos_token_id", None)
        given = ([] if end is None else [end]) if stop_ids is None else stop_ids
        self.stop_ids: tuple[int, ...] = tuple(sorted(set(given)))
        self._begin = _begin_id(tokenizer)

    def process_prompt(self, prompt: Any, fields: Mapping[str, Any]) -> PromptRecord:
        """Tokenise a prompt.

        Args:
            prompt: str, a sequence of ids, Chat or Continued.
            fields: Text models know none.

        Returns:
            The ids as tensor "tokens"; ``fork`` where kept ids are not what their text would be tokenised to.

        Raises:
            InputError: a prompt that cannot be served as it is; the message names the value and what to do.
        """
        refuse_mixed(prompt)
        if fields:
            raise InputError(f"a text model knows no field {', '.join(map(repr, sorted(fields)))}; send the prompt alone")
        if isinstance(prompt, str):
            return self._record(self._encode(prompt), prompt)
        if isinstance(prompt, Chat):
            return self._chat(prompt)
        if isinstance(prompt, Continued):
            return self._continued(prompt)
        return self._record(self.check_ids(prompt, "prompt"), None)

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of ids, special tokens left out; "" where there is no tokenizer."""
        if self.tokenizer is None:
            return ""
        text: str = self.tokenizer.decode(list(ids), skip_special_tokens=True, clean_up_tokenization_spaces=False)
        return text

    def check_ids(self, ids: Any, what: str) -> list[int]:
        """Return ``ids`` as a list of ints of the vocabulary.

        Raises:
            InputError: no sequence of ids, an empty one, or an id that is no int or out of range, with its position.
        """
        values = ids.tolist() if hasattr(ids, "tolist") else ids
        if isinstance(values, bytes | str | Mapping) or not isinstance(values, Sequence):
            talk = "; a conversation is kvlab.Chat([(role, content), ...])" if isinstance(values, Mapping) else ""
            raise InputError(
                f"a {what} is a str, a sequence of token ids, a Chat or a Continued; got {type(ids).__name__}{talk}"
            )
        if not values:
            raise InputError(f"the {what} is empty; give at least one token")
        if all(type(value) is int for value in values) and min(values) >= 0 and max(values) < self.vocab_size:
            return list(values)
        return [self._check_id(i, value, what) for i, value in enumerate(values)]

    def _check_id(self, index: int, value: Any, what: str) -> int:
        try:
            number = operator.index(value)
        except TypeError:
            number = -1
        if number < 0 or isinstance(value, bool) or number >= self.vocab_size:
            raise InputError(f"{what} id {index} is {value!r}; ids are ints from 0 to {self.vocab_size - 1}")
        return number

    # -- text ----------------------------------------------------------------------------------------------------------

    def _encode(self, text: str) -> list[int]:
        """Tokenise a whole prompt: special tokens in it are read as such, and it gets exactly one begin token."""
        ids = self._encode_part(text)
        if self._begin is not None:
            while ids and ids[0] == self._begin:
                del ids[0]
            ids.insert(0, self._begin)
        return ids

    def _encode_part(self, text: str) -> list[int]:
        if self.tokenizer is None:
            raise InputError("this checkpoint has no tokenizer; give the prompt as a sequence of token ids")
        if not text:
            raise InputError("the prompt text is empty; give at least one character")
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as e:
            bad = f"{text[e.start]!r} at character {e.start}"
            raise InputError(f"the prompt is no valid UTF-8: a lone surrogate {bad}; remove it") from e
        return list(self.tokenizer.encode(text, add_special_tokens=False))

    def _record(self, ids: list[int], text: str | None, fork: HistoryFork | None = None) -> PromptRecord:
        return PromptRecord({TENSOR: self.check_ids(ids, "prompt")}, text=text, fork=fork)

    def _continued(self, prompt: Continued) -> PromptRecord:
        kept = self.check_ids(prompt.kept_ids, "kept")
        if not isinstance(prompt.text, str):
            raise InputError(f"the text of a continuation is {prompt.text!r}; give a str")
        again = self._encode(self.tokenizer.decode(kept, clean_up_tokenization_spaces=False)) if self.tokenizer else kept
        return self._record(kept + self._encode_part(prompt.text), prompt.text, first_fork(kept, again))

    # -- chat ----------------------------------------------------------------------------------------------------------

    def _chat(self, chat: Chat) -> PromptRecord:
        check_chat(chat)
        text = self._render(chat.messages)
        plain = self._encode(text)
        if not chat.kept_messages:
            return self._record(plain, text)
        kept = self.check_ids(chat.kept_ids, "kept")
        rest = self._encode_part(self._after_kept(chat))
        if kept[-1] in self.stop_ids and rest[0] == kept[-1]:
            del rest[0]  # the reply ended with the very token that the template writes after it
        return self._record(kept + rest, text, first_fork(kept, plain))

    def _after_kept(self, chat: Chat) -> str:
        """Return what the template writes after the last kept reply: render with a mark in its place, cut behind the mark."""
        contents = "".join(content for _, content in chat.messages)
        mark = next(m for m in (f"kvlab{n}mark" for n in itertools.count()) if m not in contents)
        last = chat.kept_messages - 1
        marked = (*chat.messages[:last], (chat.messages[last][0], mark), *chat.messages[last + 1 :])
        parts = self._render(marked).split(mark)
        if len(parts) != 2:
            raise InputError(
                f"the chat template writes message {last} {len(parts) - 1} times, so its ids cannot be kept; send the "
                "messages without kept_ids"
            )
        return parts[1]

    def _render(self, messages: Sequence[tuple[str, str]]) -> str:
        if self.tokenizer is None or not getattr(self.tokenizer, "chat_template", None):
            lacks = "tokenizer" if self.tokenizer is None else "chat template"
            raise InputError(
                f"this checkpoint has no {lacks}; send ids or raw text instead of a chat, or load an instruct model"
            )
        turns = [{"role": role, "content": content} for role, content in messages]
        try:
            text: str = self.tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
        except Exception as e:  # a template raises what its author chose
            raise InputError(f"the checkpoint's chat template refuses these messages: {e}") from e
        return text


def refuse_mixed(prompt: Any) -> None:
    """Raise InputError for texts and pictures, which a model of text cannot read or draw."""
    if isinstance(prompt, Mixed):
        raise InputError("this model reads and writes text alone, and the prompt is of texts and pictures; load a BAGEL model")


def check_chat(chat: Chat) -> None:
    """Raise InputError for a chat that is no list of (role, content), ends with no user turn, or keeps what cannot be."""
    for i, message in enumerate(chat.messages):
        if not (isinstance(message, tuple | list) and len(message) == 2 and all(isinstance(part, str) for part in message)):
            raise InputError(f"message {i} of the chat is {message!r}; each is a pair (role, content) of str")
    roles = [role for role, _ in chat.messages]
    if not roles:
        raise InputError("the chat has no message; give at least a user turn")
    if roles[-1] != "user":
        raise InputError(f"the chat ends with a {roles[-1]!r} turn; end it with a user turn")
    kept = chat.kept_messages
    if bool(kept) != bool(chat.kept_ids) or not 0 <= kept < len(roles):
        raise InputError(f"the chat keeps {kept} of {len(roles)} messages and {len(chat.kept_ids)} ids; keep both or neither")
    if kept and roles[kept - 1] != "assistant":
        raise InputError(f"the last kept message is a {roles[kept - 1]!r} turn; kept ids end with an assistant reply")


def first_fork(kept: Sequence[int], again: Sequence[int]) -> HistoryFork | None:
    """Return where ``again`` parts from the ids that were really used, None when it begins with all of them.

    >>> first_fork([1, 2, 3], [1, 7, 3, 4])
    HistoryFork(index=1, kept_id=2, retokenised_id=7)
    >>> first_fork([1, 2], [1])
    HistoryFork(index=1, kept_id=2, retokenised_id=-1)
    >>> first_fork([1, 2], [1, 2, 3])
    """
    for index, (one, other) in enumerate(itertools.zip_longest(kept, again[: len(kept)], fillvalue=-1)):
        if one != other:
            return HistoryFork(index, one, other)
    return None


def _begin_id(tokenizer: Any) -> int | None:
    """Return the begin token if the tokenizer puts one in front of plain text."""
    begin = getattr(tokenizer, "bos_token_id", None)
    if begin is None:
        return None
    return begin if list(tokenizer.encode("a", add_special_tokens=True))[:1] == [begin] else None


def load_tokenizer(folder: Path, *, reads_config: bool = True) -> Any:
    """Return the tokenizer of a checkpoint folder, None where the folder has none.

    Args:
        reads_config: False where config.json is of a kind that transformers does not know and would warn of.

    Raises:
        LoadError: the tokenizer files are damaged.
    """
    if not any((folder / name).is_file() for name in ("tokenizer.json", "tokenizer.model", "vocab.json")):
        return None
    from transformers import AutoTokenizer, PreTrainedConfig

    try:
        return AutoTokenizer.from_pretrained(folder, local_files_only=True, config=None if reads_config else PreTrainedConfig())
    except Exception as e:
        raise LoadError(
            f"the tokenizer in {folder}, or the config.json read with it, cannot be read ({type(e).__name__}: {e}); get both "
            "again"
        ) from e
