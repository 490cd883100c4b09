"""First line of a training script: ``import megatron_resilience.autoload``.

Installs the selected accelerator (see ``megatron_resilience.accelerator``; on a GPU that is nothing) and adds the flags to
Megatron's parser. Nothing else of Megatron is touched before one of the flags is used. Ranks that ``megatron-resilience
launch`` starts have it imported already.
"""

from megatron_resilience.accelerator import install_from_environment

install_from_environment()

from megatron_resilience.megatron_adapter import plugin  # noqa: E402  (Megatron is imported on the accelerator)

plugin.install()
