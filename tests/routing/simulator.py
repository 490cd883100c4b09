"""Endpoints that run programs of sends and receives over channels with room for a few messages, in any interleaving."""

from collections import deque


class Deadlock(AssertionError):
    """Nobody can go on; the message says who waits for what."""


def blocking(program, endpoint):
    """Send and receive one after the other, the lower-numbered endpoint sending first."""
    steps = []
    for exchange in program:
        out = [("send", exchange.peer)] * (exchange.outgoing is not None)
        back = [("receive", exchange.peer)] * (exchange.incoming is not None)
        steps += [[step] for step in (out + back if endpoint < exchange.peer else back + out)]
    return steps


def posted(program, endpoint):
    """Both halves of an exchange are posted, then waited for."""
    del endpoint
    return [
        [("send", e.peer)] * (e.outgoing is not None) + [("receive", e.peer)] * (e.incoming is not None)
        for e in program
    ]


def run(steps, room, choose):
    """Run all endpoints to their ends.

    Args:
        steps: by endpoint, a list of steps; each is a list of actions that may complete in any order.
        room: messages that a channel (one per ordered pair) holds; 0 is rendezvous: a send completes when received.
        choose: picks one of a list of possible actions; any choice must end well.

    Returns:
        Number of messages.

    Raises:
        Deadlock: no action is possible and somebody is not done.
    """
    at = dict.fromkeys(steps, 0)
    pending = {e: deque(program[0]) if program else deque() for e, program in steps.items()}
    channel = {}
    messages = 0

    def advance(endpoint):
        while not pending[endpoint] and at[endpoint] + 1 < len(steps[endpoint]):
            at[endpoint] += 1
            pending[endpoint] = deque(steps[endpoint][at[endpoint]])

    while True:
        possible = []
        for endpoint, actions in pending.items():
            for action in set(actions):
                kind, peer = action
                if kind == "send":
                    meets = room == 0 and ("receive", endpoint) in pending[peer]
                    if meets or channel.get((endpoint, peer), 0) < room:
                        possible.append((endpoint, action))
                elif channel.get((peer, endpoint), 0):
                    possible.append((endpoint, action))
        if not possible:
            waiting = {e: list(actions) for e, actions in pending.items() if actions}
            if waiting:
                raise Deadlock(f"endpoints wait for each other: {waiting}")
            assert not any(channel.values()), "messages that nobody received"
            return messages
        endpoint, (kind, peer) = choose(possible)
        pending[endpoint].remove((kind, peer))
        if kind == "receive":
            channel[peer, endpoint] -= 1
        else:
            messages += 1
            if room == 0:
                pending[peer].remove(("receive", endpoint))
                advance(peer)
            else:
                channel[endpoint, peer] = channel.get((endpoint, peer), 0) + 1
        advance(endpoint)
