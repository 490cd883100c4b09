"""What documents say of flags and exit statuses is what the code says."""

import importlib.util

import pytest

from tests.support.template import ROOT

REMEDY = "run: .venv/bin/python scripts/flags.py"


@pytest.fixture(scope="module")
def flags():
    spec = importlib.util.spec_from_file_location("flags", ROOT / "scripts" / "flags.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_reference_is_current(flags):
    assert (ROOT / "docs" / "flags.md").read_text() == flags.text(), REMEDY


def test_the_table_of_exit_statuses_is_current(flags):
    guide = (ROOT / "docs" / "guide.md").read_text()
    assert guide == flags.with_exit_statuses(guide), REMEDY
    assert "| 75 | a job that was asked to end" in guide


def test_there_is_one_table_of_exit_statuses():
    documents = [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]
    assert [path.name for path in documents if "| status | meaning |" in path.read_text()] == ["guide.md"]
