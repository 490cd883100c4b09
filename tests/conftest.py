"""Fixtures of all tests."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

# `tests.support` is imported from the root, whatever directory pytest was started in.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tests.support import full
from tests.support.template import Template

# How long an example takes is up to whatever else the machine does.
settings.register_profile("patient", deadline=None)
settings.load_profile("patient")


def pytest_addoption(parser: pytest.Parser) -> None:
    full.add_options(parser)


def pytest_configure(config: pytest.Config) -> None:
    full.configure(config)


@pytest.fixture(scope="session")
def _session_template() -> Iterator[Template]:
    with Template() as template:
        yield template


@pytest.fixture
def template(_session_template: Template) -> Iterator[Template]:
    """The session's pre-imported process; a test that leaves processes behind fails."""
    yield _session_template
    _session_template.wait_for_orphans(10)
    left = _session_template.kill_orphans()
    assert not left, f"processes {left} survived the test"
