"""Agents talk only to those who hold the job's secret."""

import asyncio

import pytest

from megatron_resilience.control.membership import Evidence, may_go_on, next_leader
from megatron_resilience.control.peers import accept, connect
from megatron_resilience.errors import ControlError


def talk(ours: bytes, theirs: bytes):
    """What the listener receives of a dialler's message, and the answer that comes back."""

    async def run():
        received = asyncio.get_running_loop().create_future()

        async def serve(reader, writer):
            try:
                peer = await accept(reader, writer, theirs)
                received.set_result(await peer.receive())
                peer.send({"answer": 1})
                await peer.flush()
            except ControlError as error:
                received.set_result(error)
                writer.close()

        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        peer = await connect("127.0.0.1", server.sockets[0].getsockname()[1], ours)
        peer.send({"hello": "there", "n": [1, 2]})
        got = await asyncio.wait_for(received, 10)
        answer = await asyncio.wait_for(peer.receive(), 10)
        peer.close()
        server.close()
        return got, answer

    return asyncio.run(run())


def test_the_same_secret():
    assert talk(b"s", b"s") == ({"hello": "there", "n": [1, 2]}, {"answer": 1})


def test_another_secret_is_refused():
    got, answer = talk(b"s", b"t")
    assert isinstance(got, ControlError)
    assert answer is None


def test_something_else_listens_there():
    async def run():
        async def serve(reader, writer):
            writer.write(b"220 mail.example.org ESMTP ready, and a long greeting to follow at your leisure\r\n")
            await writer.drain()

        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        with pytest.raises(ControlError, match="no agent"):
            await connect("127.0.0.1", server.sockets[0].getsockname()[1], b"s")
        server.close()

    asyncio.run(run())


def test_the_first_to_join_that_is_left_leads():
    assert next_leader({"a": 0, "b": 1, "c": 2}, {"a"}) == "b"
    assert next_leader({"a": 0}, {"a"}) is None


def test_two_halves_of_a_cut_network_do_not_both_go_on():
    assert not may_go_on(4, {"c": Evidence.SILENT, "d": Evidence.SILENT})
    assert may_go_on(3, {"c": Evidence.SILENT})
    assert may_go_on(2, {"a": Evidence.CLOSED}), "a dead process trains nowhere"
