"""The settings of ``--deadpool``, validated together. Pure; ``arguments`` makes them from the command line."""

from __future__ import annotations

from dataclasses import dataclass, fields

from megatron_resilience.errors import ConfigurationError


@dataclass(frozen=True)
class DeadpoolConfig:
    """How a job is protected.

    Attributes:
        replicas: copies of each rank's state in other failure domains (0: own node only, survives rank deaths);
            as many nodes may die at once.
        max_stall_s: seconds a step may wait for the protection of the step before; after that the
            generation is skipped and the log says since when the job is unprotected. Waits that go on are limited
            to 1 % of the time.
        unblock_timeout_s: seconds after which a rank that does not leave a dead world is killed
            and started again in place.
        hang_timeout_s: seconds without a sign of life, or in one step, after which a rank is looked into, and ended if the
            others wait for it; at most half of ``--distributed-timeout-minutes`` is used; 0 switches it off.
        on_no_spare: ``stop``, or ``shrink``: with ``--hotswap-parallelism``, go on with the nodes that are left in a smaller
            layout, and go back when there are enough again.
        verify: compare parameters across replicas by hash before training goes on after a recovery.
    """

    replicas: int = 1
    max_stall_s: float = 10.0
    unblock_timeout_s: float = 20.0
    hang_timeout_s: float = 300.0
    verify: bool = True
    on_no_spare: str = "stop"

    def __post_init__(self) -> None:
        if self.replicas < 0:
            raise ConfigurationError(
                f"--deadpool-replicas is {self.replicas}: it takes the number of copies on other nodes, "
                "0 to survive the deaths of ranks only"
            )
        if self.on_no_spare not in ("stop", "shrink"):
            raise ConfigurationError(f"--deadpool-on-no-spare is {self.on_no_spare!r}: it takes stop or shrink")
        if self.on_no_spare == "shrink" and self.replicas == 0:
            raise ConfigurationError(
                "--deadpool-on-no-spare shrink goes on from the copies on other nodes: use --deadpool-replicas 1 or more"
            )
        for name in ("max_stall_s", "unblock_timeout_s"):
            value = getattr(self, name)
            if not value > 0:
                raise ConfigurationError(f"{flag_of(name)} is {value}: it takes a positive number of seconds")
        if not self.hang_timeout_s >= 0:
            raise ConfigurationError(
                f"--deadpool-hang-timeout is {self.hang_timeout_s}: it takes a number of seconds, 0 switches it off"
            )

    @classmethod
    def names(cls) -> tuple[str, ...]:
        """The settings' names; each is a flag (:func:`flag_of`) and a key of ``--deadpool-config``."""
        return tuple(f.name for f in fields(cls))


def flag_of(name: str) -> str:
    """The command-line flag of a setting: ``max_stall_s`` is ``--deadpool-max-stall``."""
    return "--deadpool-" + name.removesuffix("_s").replace("_", "-")
