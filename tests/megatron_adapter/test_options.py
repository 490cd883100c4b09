"""Every option of the real parser is classified, and what is refused is refused by name."""

from __future__ import annotations

import argparse

import pytest
from megatron.training.arguments import add_megatron_arguments

from megatron_resilience.megatron_adapter import options
from megatron_resilience.megatron_adapter import options_older as older
from megatron_resilience.megatron_adapter.options_neutral import NEUTRAL
from megatron_resilience.megatron_adapter.options_refused import REFUSED
from tests.support.configurations import CONFIGURATIONS
from tests.support.template import NEWEST

PARSER = add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False))
ACTIONS = [action for action in PARSER._actions if action.dest != "help"]
DESTS = {action.dest for action in ACTIONS}
ALL_REFUSED = REFUSED | older.REFUSED


def test_every_option_is_classified():
    unknown = sorted(dest for dest in DESTS if options.classify(dest) is None)
    assert not unknown, f"look at what these options do and classify them in megatron_adapter: {unknown}"


@pytest.mark.skipif(not NEWEST, reason="older releases have fewer")
def test_no_option_is_classified_that_does_not_exist():
    gone = (NEUTRAL | options.KNOWN | set(REFUSED)) - DESTS - options.OPTIONAL
    assert not gone, f"Megatron no longer has these options: {sorted(gone)}"


def test_classes_are_disjoint():
    assert not NEUTRAL & options.KNOWN
    assert not NEUTRAL & set(REFUSED)
    assert not options.KNOWN & set(REFUSED)
    assert not older.NEUTRAL & (NEUTRAL | options.KNOWN | set(ALL_REFUSED))
    assert not set(older.REFUSED) & (NEUTRAL | options.KNOWN | set(REFUSED))


@pytest.mark.skipif(not NEWEST, reason="an older release has what only older ones have")
def test_what_only_older_releases_have_is_not_in_the_newest():
    assert not DESTS & (older.NEUTRAL | set(older.REFUSED))


def test_an_unclassified_option_is_refused_when_it_is_used():
    assert options.classify("an_option_of_tomorrow") is None
    parser = argparse.ArgumentParser()
    parser.add_argument("--an-option-of-tomorrow", type=int, default=1)
    parser.add_argument("--lr", type=float)
    found = [
        options.unclassified(parser.parse_args(argv), parser._actions[1:], "0.19.9")
        for argv in ([], ["--lr", "1"], ["--an-option-of-tomorrow", "2"])
    ]
    assert found[:2] == [[], []]
    assert found[2][0].startswith(
        "--an-option-of-tomorrow: nobody has looked at what this option of megatron-core 0.19.9 does"
    )


def test_known_options_are_those_that_end_to_end_tests_use():
    used = {flag for configuration in CONFIGURATIONS.values() for flag in configuration.argv}
    used |= {"--load", "--tensorboard-dir"}  # tests/e2e/test_load.py, test_seen_once.py
    used |= {"--exit-signal-handler"}  # tests/e2e/test_good_order.py
    known = {action.dest for action in ACTIONS if used & set(action.option_strings)}
    assert (options.KNOWN & DESTS) - known == set()


@pytest.mark.parametrize("dest", sorted(dest for dest in ALL_REFUSED if dest in DESTS or NEWEST))
def test_refusal(dest):
    defaults = {action.dest: action.default for action in ACTIONS}
    refusal = ALL_REFUSED[dest]
    if dest not in options.OPTIONAL and dest not in older.REFUSED:
        flags = next(action.option_strings for action in ACTIONS if action.dest == dest)
        assert refusal.flag in flags
    assert options.refusals(argparse.Namespace(**defaults)) == []
    (message,) = options.refusals(argparse.Namespace(**(defaults | {dest: refusal.when.example})))
    assert message.startswith(refusal.flag)
    assert refusal.reason in message and message.endswith(refusal.remedy)


def test_elements_of_a_list_are_looked_at():
    args = argparse.Namespace(moe_router_load_balancing_type=["aux_loss", "global_aux_loss"])
    (message,) = options.refusals(args)
    assert message.startswith("--moe-router-load-balancing-type ['aux_loss', 'global_aux_loss']: ")


def test_weight_shards_equal_to_tensor_parallelism_are_no_gtp():
    """Megatron's validation sets the number of shards wherever it is not given."""
    args = argparse.Namespace(tensor_model_parallel_size=4, tensor_parallel_num_weight_shards=4)
    assert options.refusals(args) == []
    args.tensor_parallel_num_weight_shards = 8
    assert len(options.refusals(args)) == 1


@pytest.mark.e2e
@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_configurations_are_not_refused_once_validated(template, name):
    """Megatron's validation changes many values that nobody gave."""
    configuration = CONFIGURATIONS[name]
    child = template.start_ranks(
        1,
        configuration.argv,
        env={"WORLD_SIZE": str(configuration.world_size)},
        target="tests.accelerator.programs:print_refusals",
    )[0]
    assert child.wait(30) == 0, child.output
    assert child.output.endswith("refusals: []\n")
