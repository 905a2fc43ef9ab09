"""From a checkpoint to a speaking model: the decoder as any Llama's, the ids and voices of its config, and its codec.

The codec lies in the checkpoint's sub-folder ``snac``; where there is none it is looked for by its name, as models are.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kvlab.errors import FetchError, LoadError
from kvlab.models import hub
from kvlab.models.loading import Checkpoint, default_dtype, load_network, open_checkpoint, torch_device, torch_dtype
from kvlab.models.memory import check_memory
from kvlab.models.orpheus.codec import WEIGHTS, Codec, codec_weights, load_codec
from kvlab.models.orpheus.prompts import VOICES, OrpheusProcessor
from kvlab.models.orpheus.spec import RELEASED_VOCAB_SIZE, OrpheusModel
from kvlab.models.orpheus.tokens import OrpheusIds
from kvlab.models.places import Say, announce, model_folders, sha256_file
from kvlab.models.prompting import load_tokenizer

CODEC = "hubertsiuzdak/snac_24khz"
CODEC_FOLDER = "snac"


def is_orpheus(config: Mapping[str, Any]) -> bool:
    """True for a config with an "orpheus" entry, and for a released checkpoint, told by its vocabulary.

    >>> is_orpheus({"vocab_size": 156940, "architectures": ["LlamaForCausalLM"]}), is_orpheus({"vocab_size": 128256})
    (True, False)
    """
    return isinstance(config.get("orpheus"), dict) or config.get("vocab_size") == RELEASED_VOCAB_SIZE


def load_orpheus(
    source: str | Path | Checkpoint,
    *,
    dtype: str | None = None,
    device: str | None = None,
    max_seq_len: int | None = None,
    codec: str | Path | None = None,
    say: Say = announce,
) -> OrpheusModel:
    """Return an Orpheus model with its weights and its codec on ``device``.

    Args:
        source: A name, a path, or a checkpoint already opened.
        dtype: Of the text network; the codec computes in float32.
        codec: Folder of the codec; the checkpoint's own, or else the released one, when None.
        device, max_seq_len, say: As ``load_text_model``.

    Raises:
        InputError: an unknown dtype, device or name, or a context longer than the model's.
        FetchError: weights neither here nor to be had.
        LoadError: damaged or incomplete weights, a codec of another code book, or too little memory.
        MissingExtraError: ``snac`` is not installed.
    """
    place = torch_device(device)
    dtype = dtype or default_dtype(place)
    torch_dtype(dtype)
    checkpoint = source if isinstance(source, Checkpoint) else open_checkpoint(source, say=say)
    extra = dict(checkpoint.config.get("orpheus") or {})
    folder = codec_folder(checkpoint.folder / _own_codec(extra), say=say) if codec is None else Path(codec).expanduser()
    check_memory({"weights": checkpoint.weights_bytes(dtype), "codec": codec_weights(folder).stat().st_size}, place)
    sound = load_codec(folder, device=place)
    _check_sound(folder, sound, extra)
    net = load_network(checkpoint, torch_dtype(dtype), place)
    ids, voices = OrpheusIds.from_config(extra), _voices(extra)
    return OrpheusModel(
        net,
        OrpheusProcessor(load_tokenizer(checkpoint.folder), ids=ids, voices=voices, vocab_size=net.config.vocab_size),
        sound,
        name=checkpoint.name,
        identity=f"{checkpoint.identity} codec sha256:{sha256_file(codec_weights(folder))[:16]}",
        checkpoint_path=str(checkpoint.path),
        pinned_sha256=checkpoint.sha256,
        max_seq_len=max_seq_len,
    )


def _voices(extra: Mapping[str, Any]) -> tuple[str, ...]:
    voices = extra.get("voices", VOICES)
    if not isinstance(voices, list | tuple) or not all(isinstance(v, str) and v for v in voices):
        raise LoadError(f"the config's voices are {voices!r}; a list of names is needed")
    return tuple(voices)


def _own_codec(extra: Mapping[str, Any]) -> str:
    name = extra.get("codec", CODEC_FOLDER)
    if not isinstance(name, str) or Path(name).name != name:
        raise LoadError(f"the config's codec is {name!r}; the name of a sub-folder of the checkpoint is needed")
    return name


def _check_sound(folder: Path, codec: Codec, extra: Mapping[str, Any]) -> None:
    for name, found in (("sample_rate", codec.sample_rate), ("samples_per_frame", codec.frame_samples)):
        if extra.get(name, found) != found:
            raise LoadError(
                f"the config says {name} {extra[name]} and the codec in {folder} has {found}; they do not belong together"
            )


# -- the codec's weights -----------------------------------------------------------------------------------------------


def codec_folder(own: Path, *, say: Say = announce) -> Path:
    """Return a checkpoint's ``own`` codec folder if it has one, else that of the released codec, fetched where it is not here.

    Raises:
        FetchError: it is not here and could not be had; the message lists every place looked at.
        LoadError: the bytes are not those that the name meant at its first fetch.
    """
    if own.is_dir():
        return own
    source = hub.HubSource(CODEC, CODEC)
    places = [folder / CODEC for folder in model_folders()]
    here = next((p for p in places if _is_codec(p)), None) or hub.cached_folder(source, is_complete=_is_codec)
    if here is None:
        here = _fetched(source, [own, *places], say)
    hub.check_or_record(source, here, [codec_weights(here)])
    return here


def _fetched(source: hub.HubSource, looked: list[Path], say: Say) -> Path:
    try:
        return hub.fetch_files(source, ["config.json", WEIGHTS[1]], say)
    except FetchError as e:
        places = ", ".join(str(p) for p in [*looked, hub.hub_cache_folder(source)])
        raise FetchError(f"the codec {CODEC!r} is not here (looked at {places}) and could not be fetched: {e}") from e


def _is_codec(folder: Path) -> bool:
    return (folder / "config.json").is_file() and any((folder / name).is_file() for name in WEIGHTS)
