"""From texts and pictures to the passes of a BAGEL request, its ids, and the layout that keys its pages.

Every text is a block of its own, begin token, ids, end token: no roles, no newlines, and no system text but the one that asks
for thoughts. Ids that were generated are kept as they are.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeAlias

from kvlab.errors import InputError
from kvlab.models.bagel.config import BagelConfig
from kvlab.models.bagel.noise import START, PictureNoise, read_noise, read_seed
from kvlab.models.bagel.pictures import is_picture
from kvlab.models.bagel.plan import Pass, PicturePass, Plan, TextPass
from kvlab.models.bagel.settings import check_names, read_drawing
from kvlab.models.bagel.showing import read_encoding, show
from kvlab.models.prompting import TextProcessor, check_chat, first_fork
from kvlab.spec import Chat, Continued, HistoryFork, Kept, Mixed, PromptRecord

Shown: TypeAlias = Sequence[Sequence[PicturePass]]  # the passes of each picture

OUTPUTS = ("text", "picture")
THINK_THEN_ANSWER = (
    "You should first think about the reasoning process in the mind and then provide the user with the answer. \n"
    "The reasoning process is enclosed within <think> </think> tags, i.e. <think> reasoning process here </think> answer here"
)
THINK_THEN_DRAW = (
    "You should first think about the planning process in the mind and then generate the image. \n"
    "The planning process is enclosed within <think> </think> tags, i.e. <think> planning process here </think> image here"
)


class BagelProcessor(TextProcessor):
    """Turns prompts into plans; picklable, holds no weights. The request's seed comes as field ``seed``, None without one.

    Args:
        tokenizer: A transformers tokenizer, or None for prompts of ids only.
        config: Special ids and the sizes of pictures.
        max_seq_len: Rope ids that a prompt and its answer may take; the config's when None.
    """

    def __init__(self, tokenizer: Any, config: BagelConfig, *, max_seq_len: int | None = None) -> None:
        super().__init__(tokenizer, vocab_size=config.text.vocab_size, stop_ids=[config.special.eos])
        self.config = config
        self.max_seq_len = config.text.max_seq_len if max_seq_len is None else max_seq_len

    def fingerprint(self) -> str:
        """Identity of how prompts are built."""
        config = self.config
        grids = f"{config.latent_stride} {config.max_latent_side} {config.vision}"
        return f"{type(self).__name__} 1 {config.special} {config.vae_rule} {config.vit_rule} {grids}"

    def process_prompt(self, prompt: Any, fields: Mapping[str, Any]) -> PromptRecord:
        """Plan a prompt.

        Args:
            prompt: Mixed (of ``ask`` and ``draw``), Chat, Continued, str, or a sequence of ids that is taken as it is.
            fields: ``seed`` and nothing else.

        Returns:
            The ids of each label; ``metadata["plan"]`` is the Plan.

        Raises:
            InputError: a prompt that cannot be served as it is; the message names the value and what to do.
            MissingExtraError: there are pictures and Pillow is not installed.
        """
        unknown = sorted(set(fields) - {"seed"})
        if unknown:
            raise InputError(
                f"a BAGEL model knows no field {', '.join(map(repr, unknown))}; how a picture is drawn are arguments of "
                "kvlab.draw"
            )
        if isinstance(prompt, Mixed):
            return self._mixed(prompt, read_seed(fields.get("seed")))
        if isinstance(prompt, Chat):
            return self._chat_blocks(prompt)
        if isinstance(prompt, Continued):
            return self._continued_blocks(prompt)
        if isinstance(prompt, str):
            return self._text_record(self.text_ids(prompt), prompt)
        return self._text_record(self.check_ids(prompt, "prompt"), None)

    def text_ids(self, text: str) -> list[int]:
        """Return the ids of one text between its begin and end tokens."""
        return self._block(self._encode_part(text))

    def _block(self, ids: Iterable[int]) -> list[int]:
        return [self.config.special.bos, *ids, self.config.special.eos]

    # -- words only ----------------------------------------------------------------------------------------------------

    def _chat_blocks(self, chat: Chat) -> PromptRecord:
        check_chat(chat)
        contents = [content for _, content in chat.messages]
        old, text = contents[: chat.kept_messages], "\n".join(contents)
        rest = [i for content in contents[len(old) :] for i in self.text_ids(content)]
        if not old:
            return self._text_record(rest, text)
        kept = self._closed(self.check_ids(chat.kept_ids, "kept"))
        again = [i for content in old for i in (self.text_ids(content) if content else self._block([]))]
        return self._text_record(kept + rest, text, first_fork(kept, again))

    def _continued_blocks(self, prompt: Continued) -> PromptRecord:
        kept = self._closed(self.check_ids(prompt.kept_ids, "kept"))
        if not isinstance(prompt.text, str):
            raise InputError(f"the text of a continuation is {prompt.text!r}; give a str")
        return self._text_record(kept + self.text_ids(prompt.text), prompt.text)

    def _closed(self, kept: list[int]) -> list[int]:
        """Return a history whose last reply has its end token; the one that ended it was never written."""
        eos = self.config.special.eos
        return kept if kept[-1] == eos else [*kept, eos]

    def _text_record(self, ids: list[int], text: str | None, fork: HistoryFork | None = None) -> PromptRecord:
        return self._record_of(Plan((TextPass(tuple(self.check_ids(ids, "prompt"))),)), text, fork)

    def _record_of(self, plan: Plan, text: str | None, fork: HistoryFork | None) -> PromptRecord:
        self._check_context(plan)
        return PromptRecord(plan.tensors(), plan.layouts(), {"plan": plan}, text, fork)

    def _check_context(self, plan: Plan) -> None:
        needed, context = plan.positions() + 1, self.max_seq_len
        if needed > context:
            pictures = sum(isinstance(p, PicturePass) for p in plan.passes)
            raise InputError(
                f"the prompt takes {plan.positions()} positions ({plan.positions() - pictures} text tokens and one for each of "
                f"{pictures} encoded pictures), its answer at least one, and the context has {context}; shorten the texts or "
                "give fewer pictures"
            )

    # -- texts and pictures --------------------------------------------------------------------------------------------

    def _mixed(self, prompt: Mixed, seed: int) -> PromptRecord:
        _check_mixed(prompt)
        draws = prompt.output == "picture"
        sources = [part for part in prompt.parts if is_picture(part)]
        pictures = self._show(sources, prompt.settings, seed, draws=draws)
        texts = [self._block(self._part_ids(part)) for part in prompt.parts if not is_picture(part)]
        passes = _in_order(prompt.parts, texts, pictures)
        if prompt.think:
            passes = [TextPass(tuple(self.text_ids(THINK_THEN_DRAW if draws else THINK_THEN_ANSWER))), *passes]
        plan = Plan(tuple(passes), prompt.think)
        if draws:
            plan = self._drawn(plan, prompt.settings, seed, pictures, has_text=bool(texts))
        text = "\n".join(part for part in prompt.parts if isinstance(part, str))
        return self._record_of(plan, text or None, self._fork(prompt.parts))

    def _drawn(self, plan: Plan, settings: Mapping[str, Any], seed: int, pictures: Shown, *, has_text: bool) -> Plan:
        size = pictures[0][0].pixels.shape[:2] if pictures else None
        drawing = read_drawing(settings, self.config, picture_size=size, has_text=has_text)
        rows, columns = self.config.latent_grid(drawing.height, drawing.width)
        given = settings.get("noise")
        noise = None if given is None else read_noise("noise", given, (rows * columns, self.config.latent_width))
        return replace(plan, drawing=drawing, start=PictureNoise(seed, START, len(pictures), noise))

    def _part_ids(self, part: Any) -> list[int]:
        if isinstance(part, Kept):
            return self.check_ids(part.ids, "kept") if part.ids else []
        if isinstance(part, str):
            return self._encode_part(part)
        raise InputError(
            f"a part of the prompt is a {type(part).__name__}; give texts (str), pictures (PIL images, pathlib.Path, arrays) "
            "or replies that were kept"
        )

    def _fork(self, parts: Sequence[Any]) -> HistoryFork | None:
        """Return where the texts, tokenised again, would part from the ids that were kept."""
        if self.tokenizer is None or not any(isinstance(part, Kept) for part in parts):
            return None
        texts = [part for part in parts if not is_picture(part)]
        used = [i for part in texts for i in self._block(self._part_ids(part))]
        written = (self._encode_again(part.ids) if isinstance(part, Kept) else self._encode_part(part) for part in texts)
        return first_fork(used, [i for ids in written for i in self._block(ids)])

    def _encode_again(self, ids: Sequence[int]) -> list[int]:
        text = self.tokenizer.decode(list(ids), clean_up_tokenization_spaces=False)
        return list(self.tokenizer.encode(text, add_special_tokens=False))

    def _show(self, sources: Sequence[Any], settings: Mapping[str, Any], seed: int, *, draws: bool) -> Shown:
        encoding = read_encoding(settings, seed, len(sources)) if draws else None
        return [show(self.config, self.fingerprint(), n, source, encoding) for n, source in enumerate(sources)]


def _check_mixed(prompt: Mixed) -> None:
    if prompt.output not in OUTPUTS:
        raise InputError(f"output is {prompt.output!r}; it must be one of {', '.join(OUTPUTS)}")
    if not isinstance(prompt.think, bool):
        raise InputError(f"think is {prompt.think!r}; it must be True or False")
    if not prompt.parts:
        raise InputError("the prompt has no parts; give at least one text or picture")
    check_names(prompt.settings)
    if prompt.settings and prompt.output == "text":
        raise InputError(f"settings {', '.join(sorted(prompt.settings))} are those of a picture, and the answer is words")


def _in_order(parts: Sequence[Any], texts: Iterable[Sequence[int]], pictures: Iterable[Sequence[PicturePass]]) -> list[Pass]:
    """Return the passes of all parts in the order written."""
    remaining_texts, remaining_pictures = iter(texts), iter(pictures)
    passes: list[Pass] = []
    for part in parts:
        passes += next(remaining_pictures) if is_picture(part) else (TextPass(tuple(next(remaining_texts))),)
    return passes
