"""The command that adds an extra works where kvlab lies, for the Python that asked."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from kvlab import shipped
from kvlab.errors import MissingExtraError, install_command, missing_extra


def test_in_a_checkout_the_extra_is_that_of_the_checkout() -> None:
    folder = Path(shipped.__file__).parents[1]
    assert install_command("lab") == f'{sys.executable} -m pip install -e "{folder}[lab]"'


def test_an_installed_wheel_is_asked_for_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shipped, "checkout_dir", lambda: None)
    monkeypatch.setattr(sys, "executable", "/my programs/python")
    assert install_command("lab") == '"/my programs/python" -m pip install "kvlab[lab]"'


def test_an_absent_library_says_why_it_is_needed_and_how_to_get_it() -> None:
    error = missing_extra("plotly", "lab", "to draw figures")
    assert isinstance(error, MissingExtraError)
    assert str(error) == f"plotly is needed to draw figures and is not installed; run: {install_command('lab')}"
