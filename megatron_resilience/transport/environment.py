"""Environment variables of torch and NCCL that decide whether survivors outlive an abort. Pure."""

from __future__ import annotations

from collections.abc import Mapping

ENVIRONMENT = {
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    "TORCH_NCCL_ENABLE_MONITORING": "0",
    "TORCH_NCCL_RETHROW_CUDA_ERRORS": "0",
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
    "NCCL_NVLS_ENABLE": "0",
}
"""What ranks are started with: torch's watchdog would otherwise end the process that is about to recover."""

FORBIDDEN = {"TORCH_NCCL_BLOCKING_WAIT": "0", "NCCL_BLOCKING_WAIT": "0"}
"""A blocked wait cannot be left when the communicator is aborted. By name, the value that is no harm."""

OLD_NAMES = {"NCCL_ASYNC_ERROR_HANDLING": "TORCH_NCCL_ASYNC_ERROR_HANDLING"}
"""Names that torch had before, and still reads."""


def problems(environment: Mapping[str, str]) -> list[str]:
    """What in an environment keeps survivors from living; each with its remedy."""
    found = []
    wanted = ENVIRONMENT | {old: ENVIRONMENT[new] for old, new in OLD_NAMES.items()}
    for name, value in sorted((wanted | FORBIDDEN).items()):
        given = environment.get(name, value)
        if given != value:
            why = (
                "a wait could not be left"
                if name in FORBIDDEN
                else "torch would end the ranks that are about to recover"
            )
            found.append(f"{name}={given} in the environment: {why} when a node dies; unset {name}")
    return found
