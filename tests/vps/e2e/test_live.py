"""The predicted flat layout equals Megatron's live one: offsets, buckets, owned ranges, and values by label."""

from pathlib import Path

import pytest

from tests.support.configurations import CONFIGURATIONS
from tests.support.template import Template

pytestmark = pytest.mark.e2e


@pytest.mark.parametrize(
    "family",
    ["gpt", "mtp", *(pytest.param(name, marks=pytest.mark.full) for name in ("gpt-fp32", "llama", "moe"))],
)
def test_prediction_equals_megatron(template: Template, family: str) -> None:
    child = template.fork(str(Path(__file__).with_name("live.py")), [family])
    assert child.wait(180) == 0, child.output[-3000:]
    compared = [line for line in child.output.splitlines() if line.endswith(" by label")]
    assert len(compared) >= 5


# One of each kind in every run; the others differ from these in what the layout does not depend on, or in sizes.
OFTEN = ("tp2_dp2_fp32", "pp2_vpp2_dp2_bf16", "moe_tp2_ep2_sp", "no_distributed_optimizer")


@pytest.mark.parametrize(
    "name", [name if name in OFTEN else pytest.param(name, marks=pytest.mark.full) for name in CONFIGURATIONS]
)
def test_every_configuration_of_the_matrix(template: Template, name: str) -> None:
    configuration = CONFIGURATIONS[name]
    results = template.run_ranks(
        configuration.world_size, configuration.argv, target="tests.vps.e2e.matrix:main", timeout=180
    )
    for result in results:
        assert result.returncode == 0, f"rank {result.rank}\n{result.output[-3000:]}"
        assert "compared by value" in result.output
