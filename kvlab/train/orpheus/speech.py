"""The speech model: a small Llama that reads a prompt and writes the codec's codes, seven a frame, as ids of its vocabulary."""

from __future__ import annotations

import logging
import random
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

from kvlab.train.loop import mixed_precision
from kvlab.train.orpheus.vocabulary import (
    BEGIN_OF_TEXT_ID,
    CODEBOOK_SIZE,
    END_OF_SPEECH,
    FIRST_AUDIO,
    PAD,
    SLOTS,
    VOCAB_SIZE,
    audio_ids,
    custom,
    settings,
)

log = logging.getLogger("kvlab.train")

SHAPE: dict[str, Any] = {
    "hidden_size": 192,
    "intermediate_size": 512,
    "num_hidden_layers": 6,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 32,
}
DROPOUT = 0.1
BATCH = 12
PEAK_LR = 2e-3
#: Sampling divides the likelihood of what was said before, mostly by 1.3; a model that met this keeps its words under it.
PENALTIES = (1.0, 1.3, 1.3, 1.3)
UNSEEN_EVERY_STEPS = 250
#: Which ids can stand in a slot is learnt at once, and the likelihoods of all others take a third of a step: they are weighed
#: in every so many steps only.
ALL_IDS_EVERY_STEPS = 4
_IGNORED = -100


def build(shape: Mapping[str, Any] = SHAPE) -> LlamaForCausalLM:
    """Return the network with random weights, its config in Orpheus' terms."""
    config = LlamaConfig(
        **shape,
        vocab_size=VOCAB_SIZE,
        max_position_embeddings=131_072,
        rms_norm_eps=1e-5,
        rope_theta=500_000.0,
        rope_scaling={
            "rope_type": "llama3",
            "factor": 32.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
        tie_word_embeddings=True,
        initializer_range=shape["hidden_size"] ** -0.5,
        bos_token_id=BEGIN_OF_TEXT_ID,
        eos_token_id=custom(END_OF_SPEECH),
        pad_token_id=custom(PAD),
        orpheus=settings(),
    )
    net = LlamaForCausalLM(config)
    with torch.no_grad():
        for layer in net.model.layers:
            for output in (layer.self_attn.o_proj, layer.mlp.down_proj):
                output.weight.div_((2 * config.num_hidden_layers) ** 0.5)
    return net


class Line:
    """A prompt and its answer, and where the answer begins."""

    def __init__(self, asked: Sequence[int], frames: Tensor) -> None:
        self.ids = torch.tensor([*asked, *audio_ids(frames), custom(END_OF_SPEECH)])
        self.answer_start = len(asked)
        self.frames = frames


# -- training ----------------------------------------------------------------------------------------------------------


class SpeechTask:
    """Trains a speech model on lines; see ``kvlab.train.loop.Task``."""

    name = "speech"
    peak_lr = PEAK_LR

    def __init__(
        self,
        lines: Sequence[Line],
        unseen: Sequence[Line],
        *,
        shape: Mapping[str, Any] = SHAPE,
        batch: int = BATCH,
        seed: int = 0,
    ) -> None:
        torch.manual_seed(seed)
        self.net: Any = build(shape)
        _add_dropout(self.net)
        matrices = [p for p in self.net.parameters() if p.dim() > 1]
        gains = [p for p in self.net.parameters() if p.dim() == 1]
        groups = [{"params": matrices, "weight_decay": 0.05}, {"params": gains, "weight_decay": 0.0}]
        self.optimizer: torch.optim.Optimizer = torch.optim.AdamW(groups, lr=PEAK_LR, betas=(0.9, 0.98))
        self.lines = sorted(lines, key=lambda line: len(line.ids))
        self.unseen = list(unseen)
        self.batch = batch

    def losses(self, step_index: int) -> dict[str, Tensor]:
        """Lines of about one length, under a penalty drawn for each."""
        start = int(torch.randint(max(1, len(self.lines) - self.batch + 1), ()))
        picked = self.lines[start : start + self.batch]
        draw = random.Random(int(torch.randint(2**31, ())))
        nats = self._nats if step_index % ALL_IDS_EVERY_STEPS == 0 else self._nats_in_slots
        return {"nats": nats(picked, [draw.choice(PENALTIES) for _ in picked])}

    def after(self, step_index: int) -> None:
        """Say now and then how it does on lines kept apart."""
        if (step_index + 1) % UNSEEN_EVERY_STEPS == 0:
            log.info("speech %d: %.3f nats on unseen lines", step_index + 1, self.unseen_nats())

    def state(self) -> dict[str, Any]:
        return {}

    def restore(self, state: Mapping[str, Any]) -> None:
        """There is nothing beside weights and optimizer."""

    @torch.no_grad()
    def unseen_nats(self) -> float:
        """Return the loss on the lines kept apart, without dropout and penalty."""
        self.net.eval()
        nats = float(self._nats(self.unseen, [1.0] * len(self.unseen)))
        self.net.train()
        return nats

    def _nats(self, lines: Sequence[Line], penalties: Sequence[float]) -> Tensor:
        ids, targets = _pad(lines)
        with mixed_precision():
            hidden = self.net.model(input_ids=ids, use_cache=False).last_hidden_state
            is_answer = targets != _IGNORED
            logits = self.net.lm_head(hidden[is_answer]).float()  # [answers, vocab]
        return F.cross_entropy(penalised(logits, ids, is_answer, torch.tensor(penalties)), targets[is_answer])

    def _nats_in_slots(self, lines: Sequence[Line], penalties: Sequence[float]) -> Tensor:
        """As ``_nats``, with each code against those of its slot and the end of speech against a frame's first codes."""
        ids, _ = _pad(lines)
        codes, places = _frames(lines)  # [rows, frames, slots]
        with mixed_precision():
            hidden = self.net.model(input_ids=ids, use_cache=False).last_hidden_state
            rows = torch.arange(len(lines))[:, None, None]
            at = hidden[rows, places.clamp(max=hidden.shape[1] - 1)]  # [rows, frames, slots, hidden]
            first, end = custom(FIRST_AUDIO), custom(END_OF_SPEECH)
            books = self.net.lm_head.weight[first : first + SLOTS * CODEBOOK_SIZE].view(SLOTS, CODEBOOK_SIZE, -1)
            logits = torch.einsum("rfsh,sch->rfsc", at, books).float()
            ending = (at[:, :, 0] @ self.net.lm_head.weight[end]).float()
        logits = _penalised_in_slots(logits, codes, torch.tensor(penalties))
        never = torch.full((*logits.shape[:-1], 1), -torch.inf)
        never[:, :, 0, 0] = ending
        return F.cross_entropy(torch.cat([logits, never], -1).flatten(0, 2), codes.flatten(), ignore_index=_IGNORED)


def _frames(lines: Sequence[Line]) -> tuple[Tensor, Tensor]:
    """Return codes [lines, frames, slots], the end of speech as one code more, and the place before each; others ignored."""
    most = max(len(line.frames) for line in lines) + 1
    codes = torch.full((len(lines), most, SLOTS), _IGNORED)
    for row, line in enumerate(lines):
        codes[row, : len(line.frames)] = line.frames
        codes[row, len(line.frames), 0] = CODEBOOK_SIZE
    starts = torch.tensor([line.answer_start for line in lines])
    return codes, starts[:, None, None] - 1 + torch.arange(most * SLOTS).view(1, most, SLOTS)


def _penalised_in_slots(logits: Tensor, codes: Tensor, penalties: Tensor) -> Tensor:
    """Return logits [rows, frames, slots, codes] under each row's repetition penalty for the codes of earlier frames."""
    said = torch.zeros_like(logits).scatter_(-1, codes.clamp(0, CODEBOOK_SIZE - 1)[..., None], 1.0)
    is_said = (said.cumsum(1) - said) > 0
    by = penalties[:, None, None, None]
    return torch.where(is_said, torch.where(logits > 0, logits / by, logits * by), logits)


def _pad(lines: Sequence[Line]) -> tuple[Tensor, Tensor]:
    """Return inputs and next ids, [lines, longest - 1]; what is not answer is ignored, and padding stands behind it."""
    longest = max(len(line.ids) for line in lines)
    ids = torch.full((len(lines), longest), custom(PAD))
    targets = torch.full((len(lines), longest), _IGNORED)
    for row, line in enumerate(lines):
        ids[row, : len(line.ids)] = line.ids
        targets[row, line.answer_start : len(line.ids)] = line.ids[line.answer_start :]
    return ids[:, :-1], targets[:, 1:]


def penalised(logits: Tensor, ids: Tensor, is_answer: Tensor, penalties: Tensor) -> Tensor:
    """Return the logits under each row's repetition penalty for the ids up to each answer, as sampling has them.

    Shapes:
        logits: [answers, vocab], in the order of the True places of ``is_answer``.
        ids, is_answer: [rows, length].
        penalties: [rows].
    """
    length = ids.shape[1]
    earlier = torch.ones(length, length, dtype=torch.bool).tril()
    repeated = ((ids[:, :, None] == ids[:, None, :]) & earlier.tril(-1)).any(-1)  # [rows, length]
    row, place = is_answer.nonzero(as_tuple=True)
    seen = ids[row]  # [answers, length]
    counts = earlier[place] & ~repeated[row]  # each id once, however often it was said
    before = logits.gather(1, seen)
    by = penalties[row][:, None]
    after = torch.where(before > 0, before / by, before * by)
    return logits.scatter_add(1, seen, (after - before) * counts)


def _add_dropout(net: nn.Module) -> None:
    def drop(module: nn.Module, _: Any, out: Tensor) -> Tensor:
        return F.dropout(out, DROPOUT, module.training)

    for name, module in net.named_modules():
        if name.endswith(("o_proj", "down_proj", "embed_tokens")):
            module.register_forward_hook(drop)
