"""OrpheusModel: a text model whose ids are speech, with the codec that plays them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvlab.errors import LoadError
from kvlab.models.orpheus.codec import Codec
from kvlab.models.orpheus.noise import NoiseSource
from kvlab.models.orpheus.prompts import OrpheusProcessor
from kvlab.models.orpheus.speech import decode_frames, to_int16
from kvlab.models.orpheus.tokens import Frame, OrpheusIds
from kvlab.models.text import TextModel
from kvlab.models.textlm import TextLM

#: How the released model is sampled unless a request says otherwise.
SAMPLING: Mapping[str, Any] = MappingProxyType({"temperature": 0.6, "top_p": 0.8, "repetition_penalty": 1.3})
MAX_TOKENS = 1200
#: Released checkpoints are told by their vocabulary: Llama 3's, 28,672 audio ids, and what stands between and behind them.
RELEASED_VOCAB_SIZE = 156940


class OrpheusModel(TextModel):
    """A spec.ModelSpec: the walks and the stream of a text model, so prompts, voices and generated sound are shared alike.

    Args:
        net: The network, filled.
        processor: Makes prompts of texts and voices.
        codec: Makes sound of audio ids.
        name, identity, checkpoint_path, pinned_sha256, max_seq_len: As TextModel.

    Raises:
        LoadError: the codec's code book is not the one the model writes in, or the vocabulary has no room for its ids.
    """

    def __init__(
        self,
        net: TextLM,
        processor: OrpheusProcessor,
        codec: Codec,
        *,
        name: str,
        identity: str,
        checkpoint_path: str | None = None,
        pinned_sha256: str | None = None,
        max_seq_len: int | None = None,
    ) -> None:
        super().__init__(
            net,
            processor,
            name=name,
            identity=identity,
            checkpoint_path=checkpoint_path,
            pinned_sha256=pinned_sha256,
            max_seq_len=max_seq_len,
        )
        self.ids: OrpheusIds = processor.ids
        self.voices = processor.voices
        self.codec = codec
        self.default_options = MappingProxyType({"max_tokens": min(MAX_TOKENS, self.max_seq_len // 2), **SAMPLING})
        _check_books(self.name, self.ids, codec, self.vocab_size)

    def __repr__(self) -> str:
        return f"OrpheusModel({self.name}, {len(self.voices)} voices, {self.net.dtype}, {self.net.device}, {self.codec!r})"

    def sound(self, frames: Sequence[Frame], *, noise: NoiseSource | None = None) -> NDArray[np.int16]:
        """Return the samples of whole frames as 16-bit PCM, just as they are streamed; seed 0's noise when None."""
        samples: NDArray[np.int16] = to_int16(decode_frames(self.codec, frames, noise=noise)).numpy()
        return samples

    def preprocess_fingerprint(self) -> str:
        return f"{type(self).__name__} {self.ids} {self.voices}"


def _check_books(name: str, ids: OrpheusIds, codec: Codec, vocab_size: int) -> None:
    if codec.codebook_size != ids.codebook_size:
        raise LoadError(
            f"{name} writes codes of a book of {ids.codebook_size} and the codec has a book of {codec.codebook_size}; "
            "load the codec this model was trained with"
        )
    if ids.audio.stop > vocab_size:
        raise LoadError(f"{name} has {vocab_size} ids and audio up to id {ids.audio.stop - 1}; config and weights differ")
