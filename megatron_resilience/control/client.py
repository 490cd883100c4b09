"""A person's end of the desk: finds the agent that leads, asks, and waits out a change of leader."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from typing import Any

from megatron_resilience.control.peers import Peer, connect
from megatron_resilience.errors import ControlError

_DIAL_S = 0.4
_ANSWER_S = 5.0
_RETRY_S = 0.05
_AT_ONCE = 16

Address = tuple[str, int]


class Client:
    """Asks a running job.

    Args:
        agents: where its agents listen, likeliest to lead first; read anew for every attempt.
        secret: the job's.
        patience_s: how long to look for an agent that leads.
    """

    def __init__(self, agents: Callable[[], Sequence[Address]], secret: bytes, patience_s: float = 10.0) -> None:
        self._agents = agents
        self._secret = secret
        self._patience_s = patience_s

    def ask(self, command: str, **fields: Any) -> dict[str, Any]:
        """The answer of the agent that leads: an object with ``done`` and what :mod:`desk` lists.

        A question is asked again only if its connection broke before an answer, so it must be one that can be.

        Raises:
            ControlError: no agent answers, or those that do are not of this job.
        """
        return asyncio.run(self._ask({"kind": "ask", "command": command, **fields}))

    async def _ask(self, question: dict[str, Any]) -> dict[str, Any]:
        deadline = time.monotonic() + self._patience_s
        why = "no address of an agent is known"
        hint: list[Address] = []
        while True:
            addresses = [*hint, *(a for a in self._agents() if a not in hint)]
            hint = []
            # The likeliest alone, then many at once: hosts that are down do not even refuse.
            rest = [addresses[at : at + _AT_ONCE] for at in range(1, len(addresses), _AT_ONCE)]
            for batch in [addresses[:1], *rest]:
                peer, refused = await self._dial(batch)
                why = refused or why
                if peer is None:
                    continue
                try:
                    answer = await self._put(peer, question)
                finally:
                    peer.close()
                if answer is None:
                    why = "it closed the connection: the job's secret is another, or it is just ending"
                    continue
                if answer["kind"] == "answer":
                    return answer
                why = "no agent leads at the moment"
                if answer.get("address"):
                    host, port = answer["address"]
                    hint = [(str(host), int(port))]
                break
            if time.monotonic() > deadline:
                asked = ", ".join(f"{host}:{port}" for host, port in addresses[:4]) or "nowhere"
                raise ControlError(f"the job does not answer (asked at {asked}): {why}")
            await asyncio.sleep(_RETRY_S)

    async def _dial(self, addresses: Sequence[Address]) -> tuple[Peer | None, str]:
        """The first of some agents that takes the connection, in order of preference; else why the last did not."""

        async def dial(address: Address) -> Peer:
            return await asyncio.wait_for(connect(*address, self._secret), _DIAL_S)

        results = await asyncio.gather(*(dial(address) for address in addresses), return_exceptions=True)
        peers = [result for result in results if isinstance(result, Peer)]
        for other in peers[1:]:
            other.close()
        errors = [f"{e.__class__.__name__ if not str(e) else e}" for e in results if isinstance(e, BaseException)]
        return (peers[0], "") if peers else (None, errors[-1] if errors else "")

    @staticmethod
    async def _put(peer: Peer, question: dict[str, Any]) -> dict[str, Any] | None:
        peer.send(question)
        try:
            return await asyncio.wait_for(peer.receive(), _ANSWER_S)
        except (ControlError, TimeoutError):
            return None
