"""Sockets and addresses of the configured interface."""

from __future__ import annotations

import socket

from megatron_resilience.errors import ControlError


def bind(address: str, port: int) -> socket.socket:
    """A listening socket.

    Raises:
        ControlError: the port is taken, or the address is not this machine's.
    """
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((address, port))
        listener.listen(1024)
    except OSError as error:
        listener.close()
        raise ControlError(
            f"cannot listen on {address}:{port} ({error.strerror}): "
            "choose another port in --rdzv-endpoint, or another --node-addr"
        ) from error
    return listener


def address_towards(host: str, port: int) -> str:
    """The address of the interface that reaches ``host``.

    Raises:
        ControlError: the name does not resolve; nothing is ever assumed in its place.
    """
    try:
        resolved = socket.gethostbyname(host)
    except OSError as error:
        raise ControlError(f"--rdzv-endpoint: the host {host} does not resolve ({error.strerror or error})") from error
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((resolved, port))
        return probe.getsockname()[0]
