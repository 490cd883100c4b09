"""Where people ask the job: every agent listens, the one that leads answers, the others say who that is.

A question is ``{"kind": "ask", "command": ...}`` on a connection that has proved the job's secret (:mod:`peers`):

* ``status`` → ``{"kind": "answer", "done": true, "status": ...}``, see :mod:`status`
* ``swap`` or ``drain`` with ``node`` → ``{"kind": "answer", "done": ..., "text": ..., "epoch": ...}``
* ``reshard`` with ``layout``, ``at``, ``nodes``, ``dry_run`` → the same
* anything, to an agent that does not lead → ``{"kind": "elsewhere", "address": [host, port] or null}``
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from megatron_resilience.control import events as e
from megatron_resilience.control.leader import Leader
from megatron_resilience.control.peers import Peer
from megatron_resilience.control.status import find_node, status
from megatron_resilience.control.switching import Wish
from megatron_resilience.errors import ConfigurationError, ControlError
from megatron_resilience.observe.console import say

CHECK_S = 30.0
"""How long rank 0 has to say whether a layout is possible."""
LOOK_S = 0.4
"""How long the nodes have to say where their ranks stand; what is missing then is left out."""


class Desk:
    """See the module.

    Args:
        leader: the leader, if it is here.
        elsewhere: where it is otherwise, if that is known.
        send: sends a message to the agent of a node (this one's own included).
        decides: whether the leader here has taken over; before, it can only be looked at.
    """

    def __init__(
        self,
        leader: Callable[[], Leader | None],
        elsewhere: Callable[[], tuple[str, int] | None],
        send: Callable[[str, dict[str, Any]], None],
        decides: Callable[[], bool] = lambda: True,
    ) -> None:
        self._leader = leader
        self._elsewhere = elsewhere
        self._send = send
        self._decides = decides
        self._number = 0
        self._answers: dict[int, e.Answer] = {}
        self._checks: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._looks: dict[int, tuple[set[str], dict[str, Any], asyncio.Future[None]]] = {}

    async def serve(self, peer: Peer, question: dict[str, Any] | None) -> None:
        """Answers the first question and those that follow on the same connection."""
        try:
            while question is not None:
                peer.send(await self._answer(question))
                await peer.flush()
                question = await peer.receive()
        except ControlError as error:
            say(f"a question was cut off: {error}")
        finally:
            peer.close()

    def answered(self, answer: e.Answer) -> None:
        """Takes the coordinator's answer to something asked here."""
        self._answers[answer.ticket] = answer

    def seen(self, node: str, message: dict[str, Any]) -> None:
        """Takes a node's word about its ranks."""
        if message["look"] in self._looks:
            missing, found, complete = self._looks[message["look"]]
            found[node] = message["seen"]
            missing.discard(node)
            if not missing and not complete.done():
                complete.set_result(None)

    async def _answer(self, question: dict[str, Any]) -> dict[str, Any]:
        leader = self._leader()
        if leader is None:
            return {"kind": "elsewhere", "address": self._elsewhere()}
        command = question.get("command")
        if command == "status":
            seen = await self._look(leader)
            return {"kind": "answer", "done": True, "status": status(leader.machine, leader.node, seen)}
        if not self._decides():
            return {"kind": "answer", "done": False, "text": "the node that led is gone: ask again in a few seconds"}
        if command == "reshard":
            return await self._reshard(leader, question)
        if command in ("swap", "drain"):
            return self._move(leader, str(question.get("node")), command == "drain")
        return {"kind": "answer", "done": False, "text": f"unknown command {command!r}: agents here are older or newer"}

    def _move(self, leader: Leader, name: str, drain: bool) -> dict[str, Any]:
        try:
            node = find_node(leader.machine.alive, name)
        except ConfigurationError as error:
            return {"kind": "answer", "done": False, "text": str(error)}
        self._number += 1
        return self._decided(leader, e.SwapAsked(node, drain, self._number))

    def _decided(self, leader: Leader, asked: e.SwapAsked | e.SwitchAsked) -> dict[str, Any]:
        """What the coordinator answers, which it does at once."""
        leader.event(asked)
        answer = self._answers.pop(asked.ticket, e.Answer(0, False, "the job has ended"))
        return {"kind": "answer", "done": answer.done, "text": answer.text, "epoch": answer.epoch}

    async def _reshard(self, leader: Leader, question: dict[str, Any]) -> dict[str, Any]:
        """Rank 0 says whether the model can be laid out so; then the coordinator decides."""
        self._number += 1
        number, epoch = self._number, leader.machine.epoch
        if epoch is None:
            return {"kind": "answer", "done": False, "text": "the job has not begun: ask again when it is running"}
        checked: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
        self._checks[number] = checked
        asked: dict[str, Any] = {"layout": str(question.get("layout")), "at": int(question.get("at", 0))}
        try:
            self._send(epoch.node_of(0), {"kind": "check_layout", "ticket": number, **asked})
            verdict = await asyncio.wait_for(checked, CHECK_S)
        except TimeoutError:
            return {"kind": "answer", "done": False, "text": f"rank 0 did not answer within {CHECK_S:.0f} s"}
        finally:
            del self._checks[number]
        if verdict["error"] or question.get("dry_run"):
            return {
                "kind": "answer",
                "done": not verdict["error"],
                "text": verdict["error"] or verdict["text"],
                "epoch": 0,
            }
        nodes = tuple(str(node) for node in question.get("nodes", ()))
        try:
            nodes = tuple(find_node(leader.machine.alive, node) for node in nodes)
        except ConfigurationError as error:
            return {"kind": "answer", "done": False, "text": str(error)}
        wish = Wish(verdict["layout"], verdict["ranks"], nodes, asked["at"], tuple(verdict["order"]))
        return self._decided(leader, e.SwitchAsked(wish, number))

    def checked(self, message: dict[str, Any]) -> None:
        """Takes rank 0's word about a layout."""
        if message["ticket"] in self._checks and not self._checks[message["ticket"]].done():
            self._checks[message["ticket"]].set_result(message)

    async def _look(self, leader: Leader) -> dict[str, Any]:
        self._number += 1
        number, found = self._number, dict[str, Any]()
        complete: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        nodes = leader.machine.alive
        self._looks[number] = (set(nodes), found, complete)
        try:
            for node in nodes:
                self._send(node, {"kind": "look", "look": number})
            await asyncio.wait_for(complete, LOOK_S)
        except TimeoutError:
            pass
        finally:
            del self._looks[number]
        return found
