"""From a name or a path to a text model: find the weights, make the decoder, pour them in one tensor at a time."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from kvlab.errors import InputError, LoadError
from kvlab.models import registry
from kvlab.models.dense import dense_folder
from kvlab.models.folders import is_bagel, read_config, read_json, weight_files, weights_digest
from kvlab.models.memory import check_memory
from kvlab.models.places import Say, announce, sha256_file
from kvlab.models.prompting import TextProcessor, load_tokenizer
from kvlab.models.text import TextModel
from kvlab.models.textlm import TextConfig, TextLM

if TYPE_CHECKING:
    from kvlab.models.bagel.spec import BagelModel
from kvlab.options import is_whole, whole

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float64": torch.float64}
MAPPED_BYTES = 64 << 20  # a weight file is mapped anew after this much, or all of it would count as resident while it is read


@dataclass(frozen=True)
class Checkpoint:
    """Weights on this machine that kvlab can run.

    ``path`` is what the name or path meant, a folder or a GGUF file; ``folder`` holds the dense weights, config and tokenizer.
    ``sha256`` is that of the GGUF file, or of all weight files of a folder. ``num_values`` counts the values of all tensors.
    """

    name: str
    path: Path
    folder: Path
    config: Mapping[str, Any]
    files: tuple[Path, ...]
    num_values: int
    sha256: str

    @property
    def identity(self) -> str:
        """One line that names the bytes, for results and event logs."""
        return f"{self.name} sha256:{self.sha256[:16]}"

    def weights_bytes(self, dtype: str) -> int:
        """Bytes of the weights once loaded as ``dtype``."""
        return self.num_values * torch_dtype(dtype).itemsize


def open_checkpoint(name_or_path: str | Path, *, say: Say = announce) -> Checkpoint:
    """Return the checkpoint of a name or a path, fetching and converting it first where that is still to do.

    Args:
        name_or_path: A name the registry knows, ``org/name`` of the hub, a checkpoint folder, or a GGUF file.
        say: Told one line before anything is fetched or converted.

    Raises:
        InputError: nobody knows the name.
        FetchError: the weights are not here and could not be had.
        LoadError: what is there is damaged, incomplete, other than the name means, or no model that kvlab runs.
    """
    return _open(*find_model(name_or_path, say), say)


def find_model(name_or_path: str | Path, say: Say = announce) -> tuple[str, Path]:
    """Return the name, and the folder or GGUF file, of a name or a path, fetched if need be; errors as ``open_checkpoint``."""
    path = _as_path(name_or_path)
    if path is None:
        return str(name_or_path), registry.obtain(str(name_or_path), say=say)
    place = path.resolve()
    return place.stem if path.suffix == ".gguf" else place.name, _existing(path)


def _open(name: str, found: Path, say: Say) -> Checkpoint:
    sha256 = sha256_file(found) if found.is_file() else None
    folder = dense_folder(found, sha256, say) if sha256 else found
    config = read_config(folder)
    files = weight_files(folder)
    num_values = sum(_num_values(file) for file in files)
    return Checkpoint(name, found, folder, config, tuple(files), num_values, sha256 or weights_digest(files))


def load_model(
    name_or_path: str | Path,
    *,
    dtype: str | None = None,
    device: str | None = None,
    max_seq_len: int | None = None,
    say: Say = announce,
) -> TextModel | BagelModel:
    """Return the model of a name or a path, of the kind that its config says; arguments and errors as ``load_text_model``."""
    from kvlab.models.bagel.loading import load_bagel_model
    from kvlab.models.orpheus.loading import is_orpheus, load_orpheus

    torch_dtype(dtype or default_dtype(torch_device(device)))  # before anything is fetched
    if max_seq_len is not None:
        whole("max_seq_len", max_seq_len, 1)
    name, found = find_model(name_or_path, say)
    if is_bagel(found):
        return load_bagel_model(found, name, dtype=dtype, device=device, max_seq_len=max_seq_len)
    checkpoint = _open(name, found, say)
    load = load_orpheus if is_orpheus(checkpoint.config) else load_text_model
    return load(checkpoint, dtype=dtype, device=device, max_seq_len=max_seq_len, say=say)


def load_text_model(
    source: str | Path | Checkpoint,
    *,
    dtype: str | None = None,
    device: str | None = None,
    max_seq_len: int | None = None,
    say: Say = announce,
) -> TextModel:
    """Return a text model with its weights on ``device``, ready for an engine.

    Args:
        source: A name, a path, or a checkpoint already opened.
        dtype: float32, bfloat16 or float64; float32 on a CPU and bfloat16 on CUDA when None.
        device: Where to compute; CUDA where there is one when None.
        max_seq_len: Longest context in tokens; the model's own when None.
        say: Told one line before anything is fetched or converted.

    Raises:
        InputError: an unknown dtype, device or name, or a context longer than the model's.
        FetchError: the weights are not here and could not be had.
        LoadError: damaged or incomplete weights, or too little memory for them.
    """
    place = torch_device(device)
    dtype = dtype or default_dtype(place)
    torch_dtype(dtype)
    checkpoint = source if isinstance(source, Checkpoint) else open_checkpoint(source, say=say)
    check_memory({"weights": checkpoint.weights_bytes(dtype)}, place)
    named_ends(checkpoint.folder)  # before transformers reads the same fields and blames the tokenizer
    net = load_network(checkpoint, torch_dtype(dtype), place)
    tokenizer = load_tokenizer(checkpoint.folder)
    ends = stop_ids(checkpoint.folder, tokenizer)
    processor = TextProcessor(tokenizer, vocab_size=net.config.vocab_size, stop_ids=ends)
    return TextModel(
        net,
        processor,
        name=checkpoint.name,
        identity=checkpoint.identity,
        checkpoint_path=str(checkpoint.path),
        max_seq_len=max_seq_len,
        pinned_sha256=checkpoint.sha256,
    )


def load_network(checkpoint: Checkpoint, dtype: torch.dtype, device: torch.device) -> TextLM:
    """Return a checkpoint's decoder with its weights.

    Raises:
        LoadError: config and weights do not fit together, or a file is damaged; the message names the folder.
    """
    try:
        net = TextLM.allocate(TextConfig.from_hf(checkpoint.config), dtype=dtype, device=device)
        net.load_weights(read_tensors(checkpoint.files))
    except LoadError as e:
        raise LoadError(f"{checkpoint.folder}: {e}") from e
    return net


# -- options -----------------------------------------------------------------------------------------------------------


def torch_dtype(name: str) -> torch.dtype:
    """Return the torch dtype of a name.

    >>> torch_dtype("float16")
    Traceback (most recent call last):
    kvlab.errors.InputError: dtype is 'float16'; known are float32, bfloat16, float64
    """
    if name not in DTYPES:
        raise InputError(f"dtype is {name!r}; known are {', '.join(DTYPES)}")
    return DTYPES[name]


def torch_device(name: str | None) -> torch.device:
    """Return the device of a name; CUDA where there is one when None.

    Raises:
        InputError: no such device here.
    """
    if name is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError, TypeError, NotImplementedError) as e:
        raise InputError(f"device is {name!r}, which this torch cannot use ({str(e).splitlines()[0]}); try 'cpu'") from e
    return device


def cpu_has_bfloat16() -> bool:
    """True where this CPU multiplies in bfloat16. Where it does not, emulating it is about ten times slower than float32."""
    found: Mapping[str, Any] = getattr(torch.cpu, "get_capabilities", dict)()  # an older torch does not say
    return any(found.get(name, False) for name in ("avx512_bf16", "amx_bf16", "bf16"))


def default_dtype(device: torch.device) -> str:
    """Return the compute dtype used when none is asked for."""
    return "bfloat16" if device.type == "cuda" else "float32"


# -- paths -------------------------------------------------------------------------------------------------------------


def _as_path(name_or_path: str | Path) -> Path | None:
    """Return a path if that is what was given: a Path, text that looks like one, or an existing place that is no known name."""
    if isinstance(name_or_path, Path):
        return name_or_path.expanduser()
    if not isinstance(name_or_path, str) or not name_or_path:
        raise InputError(f"a model is {name_or_path!r}; give a name or the path of a checkpoint folder or GGUF file")
    path = Path(name_or_path).expanduser()
    looks = name_or_path.startswith((".", "/", "~")) or "\\" in name_or_path or path.is_absolute() or path.suffix == ".gguf"
    return path if looks or (name_or_path not in registry.KNOWN and path.exists()) else None


def _existing(path: Path) -> Path:
    if path.is_dir() or (path.is_file() and path.suffix == ".gguf"):
        return path
    what = "is neither a folder nor a .gguf file" if path.exists() else "does not exist"
    raise LoadError(f"{path} {what}; give a checkpoint folder with config.json and safetensors, or a GGUF file")


# -- weights -----------------------------------------------------------------------------------------------------------


def read_tensors(files: tuple[Path, ...]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (name, tensor) of every tensor in ``files``, mapped and valid only until the next one is asked for.

    Raises:
        LoadError: a file is damaged.
    """
    for file in files:
        with _opened(file) as f:
            names = list(f.keys())
        while names:
            read_bytes = 0
            with _opened(file) as f:
                while names and read_bytes < MAPPED_BYTES:
                    name = names.pop(0)
                    tensor = f.get_tensor(name)
                    read_bytes += tensor.nbytes
                    yield name, tensor
                    del tensor


def _num_values(file: Path) -> int:
    with _opened(file) as f:
        shapes = [f.get_slice(name).get_shape() for name in f.keys()]  # noqa: SIM118  (the file is no mapping)
    return sum(int(torch.Size(shape).numel()) for shape in shapes)


def _opened(file: Path) -> Any:
    from safetensors import SafetensorError, safe_open

    try:
        return safe_open(file, framework="pt")
    except (SafetensorError, OSError) as e:
        size = file.stat().st_size if file.is_file() else 0
        raise LoadError(f"{file} ({size:,} bytes) is not a whole safetensors file: {e}; get it again") from e


def named_ends(folder: Path) -> set[int]:
    """Return every id that a folder's generation config or config calls an end.

    Raises:
        LoadError: one of them is no id.
    """
    found: set[int] = set()
    for file in ("generation_config.json", "config.json"):
        value = read_json(folder / file).get("eos_token_id") if (folder / file).is_file() else None
        ids = [] if value is None else value if isinstance(value, list) else [value]
        if not all(is_whole(one) and one >= 0 for one in ids):
            raise LoadError(f"{folder / file}: field eos_token_id is {value!r}; a token id, or a list of them, is needed")
        found.update(ids)
    return found


def stop_ids(folder: Path, tokenizer: Any) -> list[int]:
    """Return every id that a folder's generation config, config or tokenizer calls an end."""
    end = getattr(tokenizer, "eos_token_id", None)
    return sorted(named_ends(folder) | ({end} if end is not None else set()))
