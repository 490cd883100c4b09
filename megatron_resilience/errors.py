"""The errors that a user meets. Each message says what was found, where, and what to do."""


class ResilienceError(Exception):
    """Base of everything this package raises on purpose; its text is meant for the user."""


class ConfigurationError(ResilienceError):
    """Flags, files or the environment ask for something that cannot work; nothing was touched."""


class UnsupportedError(ConfigurationError):
    """A Megatron or torch release, or an option, that nobody has shown to work here."""


class StateError(ResilienceError):
    """Training state is missing, incomplete, or does not match its checksum or layout."""


class ControlError(ResilienceError):
    """The agents, the coordinator or the store cannot be reached, or refused us."""


class SetAside(ResilienceError):
    """The job goes on in another layout, and this process is kept for the return of its own.

    Not a failure: whoever catches it gives up what belongs to the world that was left, and waits at the door.
    """


class Interrupted(ResilienceError):
    """A newer epoch was published while this rank was doing something for an older one.

    Not a failure: whoever catches it goes back to the door and joins the newer epoch.
    """
