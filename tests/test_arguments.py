"""The flags, the YAML file, and their contradictions."""

import argparse

import pytest

from megatron_resilience.arguments import add_arguments, config_from
from megatron_resilience.deadpool.config import DeadpoolConfig
from megatron_resilience.errors import ConfigurationError


def config(*argv):
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return config_from(parser.parse_args(argv))


def test_off_by_default():
    assert config() is None


def test_a_flag_overrides_the_file(tmp_path):
    path = tmp_path / "deadpool.yaml"
    path.write_text("max_stall: 3\nreplicas: 0\n")
    found = config("--deadpool", "--deadpool-config", str(path), "--deadpool-max-stall", "7")
    assert found == DeadpoolConfig(replicas=0, max_stall_s=7.0)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("replica: 1", "unknown setting replica; known are"),
        ("verify: 3", "verify is 3, expected bool"),
        ("a: [", "config"),
    ],
)
def test_a_bad_file_is_named(tmp_path, text, says):
    path = tmp_path / "deadpool.yaml"
    path.write_text(text)
    with pytest.raises(ConfigurationError, match=says) as error:
        config("--deadpool", "--deadpool-config", str(path))
    assert str(path) in str(error.value)


def test_settings_without_deadpool_are_refused():
    with pytest.raises(ConfigurationError, match="--deadpool-replicas does nothing without --deadpool"):
        config("--deadpool-replicas", "1")


def test_impossible_values():
    with pytest.raises(ConfigurationError, match="--deadpool-replicas is -1"):
        config("--deadpool", "--deadpool-replicas", "-1")
    with pytest.raises(ConfigurationError, match="--deadpool-max-stall"):
        config("--deadpool", "--deadpool-max-stall", "0")
