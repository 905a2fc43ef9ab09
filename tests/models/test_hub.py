"""The hub's real client against a server on this machine: one revision and one set of bytes a name, and errors that help."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import golden_bagel
import pytest
import tiny_orpheus
from huggingface_hub import constants
from tiny_checkpoints import write_folder

from kvlab.errors import FetchError, LoadError
from kvlab.models import hub, registry
from kvlab.models.hub import parse_hub_name, record_path
from kvlab.models.loading import load_model, load_text_model
from kvlab.models.orpheus.loading import CODEC

TOKEN = "hf_" + "s3cret" * 5
NAME = "org/tiny"


class Hub(ThreadingHTTPServer):
    """As much of the hub as its client asks for: revisions, a listing, files. ``refusal`` = (status, error code) for all."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.revisions: dict[str, dict[str, bytes]] = {}  # commit -> files
        self.newest = ""
        self.refusal: tuple[int, str] | None = None
        self.downloads: list[str] = []

    def publish(self, commit: str, folder: Path) -> None:
        self.revisions[commit] = {p.name: p.read_bytes() for p in folder.iterdir()}
        self.newest = commit


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Hub

    def log_message(self, *args: object) -> None:
        pass

    def do_HEAD(self) -> None:
        self._answer(with_body=False)

    def do_GET(self) -> None:
        self._answer(with_body=True)

    def _answer(self, with_body: bool) -> None:
        status, headers, body = self._find(with_body)
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        if with_body:
            self.wfile.write(body)

    def _find(self, with_body: bool) -> tuple[int, dict[str, str], bytes]:
        fake = self.server
        if fake.refusal:
            return fake.refusal[0], {"X-Error-Code": fake.refusal[1], "X-Error-Message": f"token {TOKEN} is no good"}, b"{}"
        parts = self.path.partition("?")[0].strip("/").split("/")
        if parts[0] == "api":  # api/models/org/tiny/{revision,tree}/COMMIT
            commit = fake.newest if parts[5] == "main" else parts[5]
            if commit not in fake.revisions:
                return 404, {"X-Error-Code": "RevisionNotFound"}, b"{}"
            files = fake.revisions[commit]
            listed = [
                {"type": "file", "path": n, "rfilename": n, "size": len(b), "oid": hashlib.sha1(b).hexdigest()}
                for n, b in files.items()
            ]
            value = listed if parts[4] == "tree" else {"id": NAME, "sha": commit, "siblings": listed, "private": False}
            return 200, {"Content-Type": "application/json"}, json.dumps(value).encode()
        commit, file = parts[3], parts[4]  # org/tiny/resolve/COMMIT/FILE
        commit = fake.newest if commit == "main" else commit
        body = fake.revisions[commit][file]
        if with_body:
            fake.downloads.append(file)
        return 200, {"X-Repo-Commit": commit, "ETag": f'"{hashlib.sha1(body).hexdigest()}"'}, body


@pytest.fixture
def server(own_cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    fake = Hub()
    Thread(target=fake.serve_forever, args=(0.01,), daemon=True).start()
    monkeypatch.setattr(hub, "server", lambda: f"http://127.0.0.1:{fake.server_port}")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hf"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    yield fake
    fake.shutdown()
    fake.server_close()


@pytest.fixture
def published(server: Hub, tmp_path: Path) -> Path:
    folder = tmp_path / "source"
    write_folder(folder)
    (folder / "README.md").write_text("not wanted", encoding="utf-8")
    server.publish("a" * 40, folder)
    return folder


def test_a_hub_name_is_fetched_recorded_and_loads(server: Hub, published: Path) -> None:
    said: list[str] = []
    model = load_text_model(NAME, device="cpu", say=said.append)
    assert any("fetching org/tiny at revision aaaaaaaaaaaa" in line for line in said)
    assert "README.md" not in server.downloads
    digest = hashlib.sha256((published / "model.safetensors").read_bytes()).hexdigest()
    assert model.identity == f"org/tiny sha256:{digest[:16]}"
    record = hub.read_record(hub.HubSource(NAME, NAME))
    assert record == {"name": NAME, "repo": NAME, "revision": "a" * 40, "files": {"model.safetensors": digest}}


def test_a_bagel_is_fetched_whole_recorded_and_found_again(server: Hub, tmp_path: Path) -> None:
    pytest.importorskip("diffusers")
    published = golden_bagel.write_model(tmp_path / "source")
    (published / "config.json").write_text('{"model_name": "bagel",}', encoding="utf-8")  # as an early release had it
    server.publish("a" * 40, published)
    folder = registry.fetch(NAME, say=lambda line: None)
    assert {path.name for path in folder.iterdir()} == {path.name for path in published.iterdir()}
    record = hub.read_record(hub.HubSource(NAME, NAME))
    assert record is not None
    assert list(record["files"]) == ["ema.safetensors", "ae.safetensors"]
    server.refusal = (500, "")
    assert registry.fetch(NAME, say=lambda line: pytest.fail(line)) == folder


@pytest.mark.usefixtures("published")
@pytest.mark.parametrize("variable", ["KVLAB_CACHE", "HF_HOME"])
def test_a_cache_that_cannot_be_written_is_said_before_the_hub_is_asked(
    variable: str, server: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("", encoding="utf-8")
    if variable == "HF_HOME":
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "file" / "hub"))
    else:
        monkeypatch.setenv("KVLAB_CACHE", str(tmp_path / "file" / "cache"))
    with pytest.raises(LoadError, match=f"cannot write to .*set {variable} to"):
        registry.fetch(NAME, say=lambda line: pytest.fail(line))
    assert server.downloads == []


@pytest.mark.usefixtures("published")
def test_a_second_load_asks_nobody(server: Hub) -> None:
    first = registry.fetch(NAME, say=lambda line: None)
    server.refusal = (500, "")
    assert registry.fetch(NAME, say=lambda line: pytest.fail(line)) == first


def test_a_name_keeps_its_revision_when_the_repository_moves_on(server: Hub, published: Path, tmp_path: Path) -> None:
    first = registry.fetch(NAME, say=lambda line: None)
    write_folder(published, tied=False)
    server.publish("b" * 40, published)
    (Path(constants.HF_HUB_CACHE) / "models--org--tiny").rename(tmp_path / "moved away")
    assert registry.fetch(NAME, say=lambda line: None) == first
    assert first.name == "a" * 40


@pytest.mark.usefixtures("published")
def test_other_bytes_under_a_recorded_name_are_refused(server: Hub) -> None:
    folder = registry.fetch(NAME, say=lambda line: None)
    weights = (folder / "model.safetensors").resolve()
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)
    with pytest.raises(LoadError, match=r"model\.safetensors differ \(SHA-256\)"):
        registry.fetch(NAME, say=lambda line: None)


@pytest.mark.usefixtures("published")
def test_a_revision_can_be_named_and_is_a_name_of_its_own(server: Hub, published: Path) -> None:
    server.publish("b" * 40, published)
    assert registry.fetch(f"{NAME}@{'a' * 40}", say=lambda line: None).name == "a" * 40
    assert registry.fetch(NAME, say=lambda line: None).name == "b" * 40


def test_a_folder_of_kvlab_models_comes_before_the_hub(server: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_folder(tmp_path / "models" / "org" / "tiny")
    monkeypatch.setenv("KVLAB_MODELS", str(tmp_path / "models"))
    server.refusal = (500, "")
    assert registry.fetch(NAME, say=lambda line: pytest.fail(line)) == tmp_path / "models" / "org" / "tiny"


def test_a_half_downloaded_snapshot_is_fetched_and_not_used(server: Hub, published: Path) -> None:
    folder = registry.fetch(NAME, say=lambda line: None)
    (folder / "model.safetensors").unlink()
    assert registry.locate(NAME) is None
    assert (registry.fetch(NAME, say=lambda line: None) / "model.safetensors").is_file()


def test_a_model_that_kvlab_cannot_run_is_refused_before_its_weights_come(server: Hub, published: Path) -> None:
    config = json.loads((published / "config.json").read_text(encoding="utf-8"))
    (published / "config.json").write_text(json.dumps({**config, "architectures": ["MambaForCausalLM"]}), encoding="utf-8")
    server.publish("c" * 40, published)
    with pytest.raises(LoadError, match="MambaForCausalLM"):
        registry.fetch(NAME, say=lambda line: None)
    assert "model.safetensors" not in server.downloads


def test_a_repository_without_safetensors_is_refused(server: Hub, published: Path) -> None:
    (published / "model.safetensors").unlink()
    server.publish("c" * 40, published)
    with pytest.raises(LoadError, match="no config.json with safetensors"):
        registry.fetch(NAME, say=lambda line: None)


# -- refusals ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("status", "code"),
    [(401, ""), (401, "RepoNotFound"), (403, "GatedRepo"), (401, "GatedRepo"), (403, ""), (404, "RepoNotFound"), (404, "")],
)
def test_a_refusal_names_page_licence_token_path_and_every_place(
    status: int, code: str, server: Hub, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    server.refusal = (status, code)
    with caplog.at_level(logging.DEBUG), pytest.raises(FetchError) as refusal:
        registry.fetch(NAME)
    message = str(refusal.value)
    page = f"{hub.server()}/org/tiny"
    for words in (str(status), page, "licence", "HF_TOKEN", "by its path", "weights", "Hugging Face cache"):
        assert words in message
    said = capfd.readouterr()
    logged = "".join(record.getMessage() for record in caplog.records if record.name.startswith("kvlab"))
    assert not any(TOKEN in text for text in (message, logged, said.out, said.err))


@pytest.mark.usefixtures("published")
def test_a_revision_that_is_not_there_is_named(server: Hub) -> None:
    with pytest.raises(FetchError, match="no revision 'v9' of org/tiny"):
        registry.fetch(f"{NAME}@v9", say=lambda line: None)


def test_offline_with_nothing_at_hand_lists_every_place_and_the_reason(
    server: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVLAB_MODELS", str(tmp_path / "mine"))
    monkeypatch.setattr(hub, "server", lambda: "http://127.0.0.1:9")  # nobody listens there
    with pytest.raises(FetchError) as refusal:
        registry.fetch(NAME, say=lambda line: None)
    for words in (str(tmp_path / "mine"), str(tmp_path / "cache"), str(tmp_path / "hf"), "did not answer", "by its path"):
        assert words in str(refusal.value)


def test_offline_mode_of_the_client_is_said(server: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(FetchError, match="(?i)offline"):
        registry.fetch(NAME, say=lambda line: None)


def test_a_damaged_record_says_how_to_begin_anew(server: Hub) -> None:
    path = record_path(hub.HubSource(NAME, NAME))
    path.parent.mkdir(parents=True)
    path.write_text("{}", encoding="utf-8")
    with pytest.raises(LoadError, match="remove it"):
        registry.fetch(NAME, say=lambda line: None)


@pytest.mark.parametrize("text", ["name", "a/b/c", "a/b@", "/a", "a/", "a b/c", "a/b@c d"])
def test_what_is_no_hub_name_is_not_taken_for_one(text: str) -> None:
    assert parse_hub_name(text) is None


# -- the codec of a speech model ---------------------------------------------------------------------------------------


@pytest.fixture
def speech(own_cache: Path, tmp_path: Path) -> Path:
    """A speech checkpoint without a codec of its own."""
    pytest.importorskip("snac")
    return tiny_orpheus.write_folder(tmp_path / "speech", with_codec=False)


def test_a_codec_that_is_not_here_is_fetched_once_and_recorded(server: Hub, speech: Path, tmp_path: Path) -> None:
    tiny_orpheus.write_codec(tmp_path / "codec")
    server.publish("c" * 40, tmp_path / "codec")
    said: list[str] = []
    assert load_model(speech, device="cpu", say=said.append).codec.frame_samples == 2048
    assert said == ["fetching config.json and pytorch_model.bin of hubertsiuzdak/snac_24khz from the Hugging Face hub ..."]
    assert server.downloads == ["config.json", "pytorch_model.bin"]
    server.refusal = (500, "Down")
    assert load_model(speech, device="cpu").codec.frame_samples == 2048
    record = hub.read_record(hub.HubSource(CODEC, CODEC))
    assert record is not None
    assert (record["revision"], list(record["files"])) == ("c" * 40, ["pytorch_model.bin"])


def test_a_codec_with_other_bytes_than_at_its_first_fetch_is_refused(server: Hub, speech: Path, tmp_path: Path) -> None:
    tiny_orpheus.write_codec(tmp_path / "codec")
    server.publish("c" * 40, tmp_path / "codec")
    load_model(speech, device="cpu")
    weights = next((tmp_path / "hf").rglob("pytorch_model.bin")).resolve()
    weights.write_bytes(weights.read_bytes() + b"x")
    with pytest.raises(LoadError, match=r"pytorch_model.bin differ \(SHA-256\)"):
        load_model(speech, device="cpu")


@pytest.mark.parametrize("name", ["canopylabs/orpheus-3b-0.1-ft", "the codec"])
def test_gated_speech_weights_name_the_page_the_licence_and_the_local_path(server: Hub, speech: Path, name: str) -> None:
    server.refusal = (403, "GatedRepo")
    with pytest.raises(FetchError) as raised:
        load_model(speech if name == "the codec" else name, device="cpu")
    said = str(raised.value)
    repo = CODEC if name == "the codec" else name
    assert f"open the model page {hub.server()}/{repo}" in said
    assert "accept its licence" in said
    assert "load it by its path" in said
    assert TOKEN not in said
