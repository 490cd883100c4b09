"""The settings of ``--deadpool``, validated together. Pure; ``arguments`` makes them from the command line."""

from __future__ import annotations

from dataclasses import dataclass, fields

from megatron_resilience.errors import ConfigurationError


@dataclass(frozen=True)
class DeadpoolConfig:
    """How a job is protected.

    Attributes:
        replicas: copies of each rank's state on other nodes (0: own node only, survives rank deaths).
        max_stall_s: seconds a step may wait for the protection of the step before; after that the
            generation is skipped and the log says since when the job is unprotected.
        unblock_timeout_s: seconds after which a rank that does not leave a dead world is killed
            and started again in place.
        verify: compare parameters across replicas by hash before training goes on after a recovery.
    """

    replicas: int = 1
    max_stall_s: float = 10.0
    unblock_timeout_s: float = 20.0
    verify: bool = True

    def __post_init__(self) -> None:
        if self.replicas not in (0, 1):
            raise ConfigurationError(
                f"--deadpool-replicas is {self.replicas}: 0 (copies on the own node only) and 1 are supported"
            )
        for name in ("max_stall_s", "unblock_timeout_s"):
            value = getattr(self, name)
            if not value > 0:
                raise ConfigurationError(f"{flag_of(name)} is {value}: it takes a positive number of seconds")

    @classmethod
    def names(cls) -> tuple[str, ...]:
        """The settings' names; each is a flag (:func:`flag_of`) and a key of ``--deadpool-config``."""
        return tuple(f.name for f in fields(cls))


def flag_of(name: str) -> str:
    """The command-line flag of a setting: ``max_stall_s`` is ``--deadpool-max-stall``."""
    return "--deadpool-" + name.removesuffix("_s").replace("_", "-")
