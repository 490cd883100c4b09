"""Oracles: uninterrupted runs without --deadpool, one per configuration and session."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.configurations import Configuration
from tests.support.template import Template


@pytest.fixture(scope="session")
def oracle(_session_template: Template, tmp_path_factory: pytest.TempPathFactory) -> Callable[[Configuration], Path]:
    """The trace folder of a configuration's oracle, run at its first use."""
    done: dict[Configuration, Path] = {}

    def run(configuration: Configuration) -> Path:
        if configuration not in done:
            folder = tmp_path_factory.mktemp("oracle")
            argv = [*configuration.argv, "--trace-dir", str(folder)]
            for result in _session_template.run_ranks(configuration.world_size, argv):
                assert result.returncode == 0, result.output
            done[configuration] = folder
        return done[configuration]

    return run
