"""The files around the package agree with each other, and the wheel carries what it must."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path
from typing import Any

import pytest

import kvlab
from kvlab import shipped
from kvlab.doctor import EXTRAS, read_requirement
from kvlab.errors import InputError, LoadError

ROOT = Path(__file__).parents[1]


def read(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


PROJECT: dict[str, Any] = tomllib.loads(read("pyproject.toml"))["project"]
GROUPS = {"": PROJECT["dependencies"], **PROJECT["optional-dependencies"]}


def needs(*groups: str) -> set[str]:
    return {read_requirement(line)[0] for group in groups for line in GROUPS[group]}


def pins(lines: list[str]) -> dict[str, str]:
    return dict(line.strip().split("==") for line in lines if "==" in line)


CONSTRAINTS = pins(read("constraints.txt").splitlines())
HELD_BACK = {"importlib_metadata"}  # diffusers needs it; newer ones bring a package along that is weeks old


def test_everything_needed_is_pinned_but_what_depends_on_the_cuda_at_hand() -> None:
    assert needs(*GROUPS) - {"kvlab"} - set(CONSTRAINTS) == needs("cuda")


def test_nothing_is_pinned_that_nobody_needs() -> None:
    assert set(CONSTRAINTS) - HELD_BACK <= needs(*GROUPS)


def test_every_pin_lies_in_its_range() -> None:
    requirements = pytest.importorskip("packaging.requirements", reason="comes with pytest")
    for line in (line for group in GROUPS.values() for line in group):
        requirement = requirements.Requirement(line)
        if requirement.name in CONSTRAINTS:
            assert CONSTRAINTS[requirement.name] in requirement.specifier, line


def test_conda_users_get_the_same_names_and_pins() -> None:
    yaml = pytest.importorskip("yaml", reason="needs the extra test")
    environment = yaml.safe_load(read("environment.yml"))
    lines = environment["dependencies"][-1]["pip"]
    assert lines[-1] == "-e ."
    assert set(pins(lines)) == needs("", "lab", "test")
    assert pins(lines) == {name: CONSTRAINTS[name] for name in pins(lines)}


def test_extras_are_those_promised() -> None:
    assert set(PROJECT["optional-dependencies"]) == {*EXTRAS, "all"}
    assert set(re.findall(r"\w+", GROUPS["all"][0])) == {"kvlab", *EXTRAS} - {"cuda"}


def test_the_version_is_the_same_everywhere() -> None:
    yaml = pytest.importorskip("yaml", reason="needs the extra test")
    assert yaml.safe_load(read("CITATION.cff"))["version"] == kvlab.__version__
    newest = re.search(r"^## (\S+)", read("CHANGELOG.md"), re.MULTILINE)
    assert newest is not None
    assert newest.group(1) == kvlab.__version__


def test_files_and_folders_that_documents_name_exist() -> None:
    for document in ("README.md", "CONTRIBUTING.md", "data/README.md", "tests/README.md"):
        folder = (ROOT / document).parent
        for link in re.findall(r"\]\(([^)#:\s]+)\)", read(document)):
            assert (folder / link).exists(), f"{document} links to {link}"


def test_commands_that_documents_name_exist(capsys: pytest.CaptureFixture[str]) -> None:
    from kvlab.cli import main

    main(["--help"])
    known = set(re.findall(r"^  (\w+)  ", capsys.readouterr().out, re.MULTILINE))
    for document in ("README.md", "CONTRIBUTING.md", "data/README.md", "tests/README.md"):
        text = read(document)
        named = re.findall(r"`kvlab (\w+)", text) + re.findall(r"bin/kvlab (\w+)", text)
        assert set(named) <= known, document


def test_licence_is_apache_2() -> None:
    assert PROJECT["license"] == "Apache-2.0"
    assert "Apache License\n                           Version 2.0, January 2004" in read("LICENSE")


def test_every_shipped_input_is_described() -> None:
    described = read("data/README.md")
    files = [path.relative_to(ROOT / "data").as_posix() for path in (ROOT / "data").rglob("*") if path.is_file()]
    assert [name for name in files if name != "README.md" and f"`{name}`" not in described] == []


def test_an_unknown_prompt_names_those_there_are() -> None:
    with pytest.raises(InputError, match=r"no shipped prompt 'nix'; there are: chat, harbour"):
        shipped.prompt("nix")


def test_missing_files_say_where_they_were_looked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shipped, "_PACKAGE", tmp_path / "kvlab")
    with pytest.raises(LoadError, match=r"data are missing; looked for .*_data and .*data; install kvlab again"):
        shipped.data_dir()


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, built by the backend itself so that nothing is downloaded."""
    pytest.importorskip("hatchling", reason="needs the extra test")
    folder = tmp_path_factory.mktemp("wheel")
    build = f"import hatchling.build; print(hatchling.build.build_wheel({str(folder)!r}))"
    subprocess.run([sys.executable, "-c", build], cwd=ROOT, check=True, capture_output=True)
    return next(folder.glob("*.whl"))


def test_the_wheel_carries_code_data_and_notebooks(wheel: Path) -> None:
    carried = set(zipfile.ZipFile(wheel).namelist())
    tracked = subprocess.run(
        ["git", "ls-files", "kvlab", "data", "notebooks"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        encoding="utf-8",
        check=False,
    )
    if tracked.returncode:
        pytest.skip("not a git checkout")
    moved = {"data": "kvlab/_data", "notebooks": "kvlab/_notebooks", "kvlab": "kvlab"}
    wanted = {moved[top] + "/" + rest for top, _, rest in (line.partition("/") for line in tracked.stdout.splitlines())}
    assert wanted <= carried
    assert {name.split("/")[0] for name in carried} == {"kvlab", f"kvlab-{kvlab.__version__}.dist-info"}


def test_an_unpacked_wheel_finds_its_data_outside_the_checkout(wheel: Path, tmp_path: Path) -> None:
    zipfile.ZipFile(wheel).extractall(tmp_path / "site")
    code = "from kvlab import shipped; import json; print(json.dumps([str(shipped.data_dir()), shipped.is_checkout()]))"
    run = subprocess.run(
        [sys.executable, "-S", "-c", f"import sys; sys.path.insert(0, {str(tmp_path / 'site')!r}); {code}"],
        cwd=tmp_path, capture_output=True, text=True, encoding="utf-8", check=True,
    )  # fmt: skip
    assert json.loads(run.stdout) == [str((tmp_path / "site" / "kvlab" / "_data").resolve()), False]


def test_an_installed_kvlab_refuses_to_build_notebooks(monkeypatch: pytest.MonkeyPatch) -> None:
    from kvlab import notebooks

    monkeypatch.setattr("kvlab.shipped.is_checkout", lambda: False)
    with pytest.raises(InputError, match="built in a checkout"):
        notebooks.build()
