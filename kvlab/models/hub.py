"""Weights from the Hugging Face hub: one revision and one set of bytes per name, recorded at the first fetch.

The hub's own client does the talking and keeps the files in its cache; kvlab keeps a small record beside its own weights.
No token is read, kept or printed here: the client finds it, and messages that quote the client are cleared of it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvlab.errors import FetchError, LoadError
from kvlab.models.folders import BAGEL_CONFIG, is_complete, read_json, require_runnable, weight_files
from kvlab.models.places import Say, cache_folder, require_writable, sha256_file, size_text, whole_file, without_secrets

WANTED = ["*.json", "model*.safetensors", "ema*.safetensors", "ae*.safetensors", "*.jinja", "tokenizer.model", "merges.txt"]
UNWANTED = ["*/*"]  # other formats live in sub-folders
HUB_NAME = re.compile(r"(?P<repo>[\w.-]+/[\w.-]+)(@(?P<revision>[\w./-]+))?")


@dataclass(frozen=True)
class HubSource:
    """A name whose bytes are one revision of a repository; without a revision, the newest at the first fetch."""

    name: str
    repo: str
    revision: str | None = None
    num_bytes: int | None = None
    licence: str = "see the model page"

    @property
    def how(self) -> str:
        """Where the bytes come from, in one line."""
        return f"safetensors of {self.repo} from the Hugging Face hub"


def parse_hub_name(name: str) -> HubSource | None:
    """Read ``org/name`` or ``org/name@revision``; None for anything else.

    >>> parse_hub_name("ada/engine@v2")
    HubSource(name='ada/engine@v2', repo='ada/engine', revision='v2', num_bytes=None, licence='see the model page')
    >>> parse_hub_name("engine")
    """
    found = HUB_NAME.fullmatch(name)
    return HubSource(name, found["repo"], found["revision"]) if found else None


# -- the record --------------------------------------------------------------------------------------------------------


def record_path(source: HubSource) -> Path:
    """Return where the record of a name lies."""
    return cache_folder() / "hub" / f"{source.name.replace('/', '--')}.json"


def read_record(source: HubSource) -> dict[str, Any] | None:
    """Return what was recorded of a name: its revision and the SHA-256 of each weight file; None before the first fetch.

    Raises:
        LoadError: the record is damaged.
    """
    path = record_path(source)
    if not path.is_file():
        return None
    record = read_json(path)
    if not isinstance(record.get("files"), dict):
        raise LoadError(f"{path} is no record of {source.name!r}; remove it to record the name anew")
    return record


def check_or_record(source: HubSource, folder: Path, files: Sequence[Path] | None = None) -> None:
    """Refuse a folder whose weights are not those recorded under the name; record them the first time.

    Args:
        files: The weight files; those of a text model when None.

    Raises:
        LoadError: a weight file has other bytes than at the first fetch, or other files are there.
    """
    found = {path.name: sha256_file(path) for path in files or weight_files(folder)}
    record = read_record(source)
    if record is None:
        revision = folder.name if folder.parent.name == "snapshots" else None  # a snapshot's folder is named after its commit
        entry = {"name": source.name, "repo": source.repo, "revision": revision, "files": found}
        with whole_file(record_path(source)) as partial:
            partial.write_text(json.dumps(entry, indent=1), encoding="utf-8")
        return
    if found != record["files"]:
        changed = sorted(f for f in found.keys() | record["files"].keys() if found.get(f) != record["files"].get(f))
        raise LoadError(
            f"{folder} does not hold the bytes that {source.name!r} meant at its first fetch: {', '.join(changed)} "
            "differ (SHA-256); "
            f"load the folder by its path, or remove {record_path(source)} to record the name anew"
        )


# -- the hub's cache and the hub ---------------------------------------------------------------------------------------


def server() -> str:
    """Return the address of the hub: that of ``HF_ENDPOINT``, or the public one."""
    from huggingface_hub import constants

    return constants.ENDPOINT


def hub_cache_folder(source: HubSource) -> Path:
    """Return where the hub's client keeps a repository."""
    from huggingface_hub import constants

    return Path(constants.HF_HUB_CACHE) / f"models--{source.repo.replace('/', '--')}"


def cached_folder(source: HubSource, is_complete: Callable[[Path], bool] = is_complete) -> Path | None:
    """Return the complete snapshot in the hub's cache, None where there is none. Asks no network."""
    wanted = _wanted_revision(source) or "main"
    base = hub_cache_folder(source)
    reference = base / "refs" / wanted
    revision = reference.read_text(encoding="utf-8").strip() if reference.is_file() else wanted
    folder = base / "snapshots" / revision
    return folder if is_complete(folder) else None


def _wanted_revision(source: HubSource) -> str | None:
    record = read_record(source)
    return (record and record["revision"]) or source.revision


def fetch_hub(source: HubSource, say: Say) -> Path:
    """Download a name's revision into the hub's cache; returns the snapshot's folder.

    Raises:
        FetchError: the hub refused or did not answer.
        LoadError: the repository holds no model that kvlab runs, or the caches cannot be written.
    """
    from huggingface_hub import hf_hub_download, snapshot_download

    chosen: dict[str, Any] = {"allow_patterns": WANTED, "ignore_patterns": UNWANTED, "endpoint": server()}
    wanted = _wanted_revision(source)
    _require_places(source)
    say(f"looking up {source.repo} on the Hugging Face hub ...")
    try:
        files = snapshot_download(source.repo, revision=wanted, **chosen, dry_run=True, tqdm_class=_silent_bar())
        names = [f.filename for f in files]
        if "config.json" not in names or not any(n.endswith(".safetensors") for n in names):
            raise LoadError(f"{source.repo} holds no config.json with safetensors beside it; kvlab needs both")
        commit = files[0].commit_hash
        if BAGEL_CONFIG not in names:  # whose config.json says nothing that is needed
            config = read_json(Path(hf_hub_download(source.repo, "config.json", revision=commit, endpoint=server())))
            require_runnable(config, source.repo)  # before gigabytes come
        size = size_text(sum(f.file_size or 0 for f in files if f.will_download))
        say(f"fetching {source.repo} at revision {commit[:12]} ({size}) from the Hugging Face hub ...")
        folder = snapshot_download(source.repo, revision=commit, **chosen)
    except LoadError:
        raise
    except Exception as e:  # the client lets errors of its HTTP library through as they are
        raise FetchError(_why(e, source)) from None  # the cause's text may quote request headers
    return Path(folder)


def _require_places(source: HubSource) -> None:
    """Check both folders that a fetch writes to: that of the hub's client, and that of the record."""
    require_writable(hub_cache_folder(source).parent, "HF_HOME")
    require_writable(record_path(source).parent)


def fetch_files(source: HubSource, files: Sequence[str], say: Say) -> Path:
    """Download some files of a name's revision into the hub's cache; returns the snapshot's folder.

    Raises:
        FetchError: the hub refused or did not answer, or has no such file.
    """
    from huggingface_hub import hf_hub_download

    _require_places(source)
    say(f"fetching {' and '.join(files)} of {source.repo} from the Hugging Face hub ...")
    try:
        first, *others = files
        folder = Path(hf_hub_download(source.repo, first, revision=_wanted_revision(source), endpoint=server())).parent
        for file in others:  # of the same revision, even if a newer one appears meanwhile
            hf_hub_download(source.repo, file, revision=folder.name, endpoint=server())
    except Exception as e:  # the client lets errors of its HTTP library through as they are
        raise FetchError(_why(e, source)) from None  # the cause's text may quote request headers
    return folder


def _silent_bar() -> Any:
    from tqdm import tqdm

    class Silent(tqdm):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **{**kwargs, "disable": True})

    return Silent


def _why(error: Exception, source: HubSource) -> str:
    """Say why the hub gave nothing, and what to do."""
    from huggingface_hub import errors, get_token

    page = f"{server()}/{source.repo}"
    answered = next((e for e in _causes(error) if getattr(e, "response", None) is not None), error)
    status = getattr(getattr(answered, "response", None), "status_code", None)
    if isinstance(answered, errors.RevisionNotFoundError):
        return f"the hub has no revision {source.revision!r} of {source.repo} (404); {_by_hand(page)}"
    if isinstance(answered, errors.GatedRepoError) or status == 403:
        return f"the hub wants its licence accepted for {source.repo} ({status}); {_by_hand(page)}"
    if isinstance(answered, errors.RepositoryNotFoundError) or status in (401, 404):
        return f"the hub shows no {source.repo} ({status}): misspelt, private or a wrong token; {_by_hand(page)}"
    *_, root = _causes(error)
    said = without_secrets(" ".join(f"{type(root).__name__}: {root}".split()), get_token())[:300]
    return f"the Hugging Face hub did not answer for {source.repo} ({said}); with a copy of the folder, load it by its path"


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    """Yield an error and what it came of: the client wraps the hub's answer in an error about its own cache."""
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def _by_hand(page: str) -> str:
    return (
        f"open the model page {page}, log in, accept its licence if it asks for that, then put a token of that account "
        "into the environment variable HF_TOKEN and try again; or get the folder by other means and load it by its path"
    )
