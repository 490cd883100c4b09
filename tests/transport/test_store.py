"""An epoch's store: its host may be gone before a rank comes."""

from __future__ import annotations

import socket
import threading
from contextlib import closing

import pytest

from megatron_resilience.errors import Interrupted
from megatron_resilience.transport.store import StoreClient, host_store


def test_a_store_that_is_gone_holds_nobody_up_who_need_not_go_there():
    """torch by itself tries for a minute, and again."""
    with closing(socket.socket()) as nobody:
        nobody.bind(("127.0.0.1", 0))
        superseded = threading.Event()
        threading.Timer(0.2, superseded.set).start()

        def check() -> None:
            if superseded.is_set():
                raise Interrupted

        with pytest.raises(Interrupted):
            StoreClient("127.0.0.1", nobody.getsockname()[1], "token", 600, check)


def test_a_store_that_stays_away_is_an_error():
    with closing(socket.socket()) as nobody:
        nobody.bind(("127.0.0.1", 0))
        with pytest.raises(RuntimeError, match=r"timed out|onnect"):
            StoreClient("127.0.0.1", nobody.getsockname()[1], "token", 0.3)


def test_a_call_in_flight_ends_with_abort():
    store = host_store("127.0.0.1")
    client = StoreClient("127.0.0.1", store.port, "token", 60)
    timer = threading.Timer(0.2, client.abort)
    timer.start()
    with pytest.raises(RuntimeError):
        client.store.get("never set")
    client.close()
