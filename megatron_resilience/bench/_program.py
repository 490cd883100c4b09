import megatron_resilience.autoload  # noqa: F401, I001

# What the ranks of a bench run: examples/train_gpt.py with a probe around train_step. Started by torchrun or by
# megatron-resilience launch; its options are train_gpt.py's.

import os
import runpy

import megatron.training

from megatron_resilience.bench import _probe
from megatron_resilience.control.zygote import die_with_parent


def main():
    """Trains; the probe is the outermost wrapper, so it goes on last."""
    # Under torchrun nobody else sees to it.
    die_with_parent(os.getppid())
    pretrain = megatron.training.pretrain

    def probed_pretrain(*args, **kwargs):
        _probe.install()
        return pretrain(*args, **kwargs)

    megatron.training.pretrain = probed_pretrain
    runpy.run_path(os.environ[_probe.SCRIPT], run_name="__main__")


if __name__ == "__main__":
    main()
