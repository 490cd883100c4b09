"""docs/flags.md is what the code says."""

import importlib.util

from tests.support.template import ROOT


def test_the_reference_is_current():
    spec = importlib.util.spec_from_file_location("flags", ROOT / "scripts" / "flags.py")
    flags = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(flags)
    assert (ROOT / "docs" / "flags.md").read_text() == flags.text(), "run: .venv/bin/python scripts/flags.py"
