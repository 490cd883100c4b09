"""One look at a job: as an object for machines, as a few lines for people. Pure."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

from megatron_resilience.control.coordinator import Coordinator
from megatron_resilience.errors import ConfigurationError


def find_node(nodes: Sequence[str], name: str) -> str:
    """The node that people mean: its id, or the beginning of it up to a dash (a host's name).

    Raises:
        ConfigurationError: none or several go by that name.
    """
    found = [n for n in nodes if n == name] or [n for n in nodes if n.startswith(f"{name}-")]
    if len(found) == 1:
        return found[0]
    if found:
        raise ConfigurationError(f"{name} is the beginning of {', '.join(found)}: give one of them in full")
    raise ConfigurationError(f"no node {name} is in the job; there are {', '.join(nodes)}")


def status(machine: Coordinator, leader: str, seen: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """The state of a job as a JSON object.

    Args:
        leader: id of the node that leads.
        seen: by node, what its agent says of its ranks: ``ranks`` as ``[rank, generation, in a step, protected]``, and
            ``waiting``, the ranks of a spare that are started. Nodes that did not answer in time are missing.

    Returns:
        ``phase``; ``epoch``, ``cause``; ``generation``: the newest that a rank has reached; ``protected``: the newest that
        outlives its nodes, None when there is none; ``lag``: the difference; ``slots``, ``spares``, ``drained``, ``gone``;
        ``restarts`` of ``max_restarts``; ``recovery``: the last, or None; ``leaving``: why it ends soon, or "";
        ``layout``: None while it is the command line's; ``switch``: the layout that is being prepared, or None;
        ``smaller``: the layout after the loss of one node without a spare, None where that ends the job.
    """
    epoch = machine.epoch
    slots = epoch.slots if epoch else ()
    ranks = [rank for node in slots for rank in seen.get(node, {}).get("ranks", ())]
    generation = max((r[1] for r in ranks), default=-1)
    known = [r[3] for r in ranks if r[3] is not None]
    # What one rank knows to be complete everywhere is so; but a job counts as protected only if no rank says otherwise.
    protected = max(known) if known and len(known) == len(ranks) else None
    return {
        "phase": machine.phase.value,
        "leader": leader,
        "epoch": epoch.number if epoch else 0,
        "cause": epoch.cause if epoch else "waiting for nodes",
        "generation": generation if generation >= 0 else None,
        "protected": protected,
        "lag": generation - protected if protected is not None and generation >= 0 else None,
        "slots": [
            _slot(index, node, seen.get(node)) | {"ailing": machine.ailing.get(node, "")}
            for index, node in enumerate(slots)
        ],
        "spares": [
            {
                "node": node,
                "waiting": seen.get(node, {}).get("waiting"),
                "suspect": node in machine.suspects,
                "ailing": machine.ailing.get(node, ""),
            }
            for node in machine.waiting_spares
        ],
        "drained": [node for node in machine.drained if node not in slots and node in machine.alive],
        "gone": {node: evidence.value for node, evidence in machine.gone.items()},
        "restarts": machine.restarts,
        "max_restarts": machine.settings.max_restarts,
        "recovery": machine.recovery,
        "leaving": machine.leaving,
        "layout": (epoch.layout if epoch else "") or None,
        "smaller": machine.smaller_by_one,
        "switch": machine.switch.target.layout if machine.switch else None,
    }


def _slot(index: int, node: str, seen: Mapping[str, Any] | None) -> dict[str, Any]:
    ranks = [
        {
            "rank": rank,
            "generation": generation if generation >= 0 else None,
            "in_step": in_step,
            "protected": protected,
        }
        for rank, generation, in_step, protected in (seen["ranks"] if seen else ())
    ]
    return {"slot": index, "node": node, "answered": seen is not None, "ranks": ranks}


def text(now: Mapping[str, Any]) -> str:
    """A status object for people, one fact a line."""
    lines = [f"{now['phase']}: epoch {now['epoch']} ({now['cause']}), node {now['leader']} leads", _protection(now), ""]
    lines.append("slot  node                      ranks     generation")
    for slot in now["slots"]:
        numbers = [rank["rank"] for rank in slot["ranks"]]
        at = sorted({rank["generation"] for rank in slot["ranks"] if rank["generation"] is not None})
        where = "-".join(map(str, dict.fromkeys((at[0], at[-1])))) if at else "not training"
        span = f"{min(numbers)}-{max(numbers)}" if numbers else "none"
        ails = f"  AILING: {slot['ailing']}" if slot["ailing"] else ""
        here = where if slot["answered"] else "no answer yet"
        lines.append(f"{slot['slot']:>4}  {slot['node']:<24}  {span:<8}  {here}{ails}")
    lines.append("")
    spares = [_spare(spare) for spare in now["spares"]]
    then = f"makes the layout {now['smaller']}" if now["smaller"] else "ends the job"
    lines.append(f"spares: {', '.join(spares) if spares else f'none, the next loss of a node {then}'}")
    if now["drained"]:
        lines.append(f"drained: {', '.join(now['drained'])}")
    if now["gone"]:
        lines.append(f"gone: {', '.join(f'{node} ({evidence})' for node, evidence in now['gone'].items())}")
    lines.append(f"repaired: {now['restarts']} of at most {now['max_restarts']} faults")
    last = now["recovery"]
    if last is None:
        lines.append("last recovery: none")
    else:
        when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(last["at"]))
        lines.append(
            f"last recovery: {when}, epoch {last['epoch']}: {last['cause']}; from generation {last['generation']}, "
            f"{last['steps_again']} done again, {sum(last['seconds'].values()):.2f} s"
        )
    if now["layout"]:
        lines.append(f"layout: {now['layout']}")
    if now["switch"]:
        lines.append(f"being prepared: layout {now['switch']}")
    if now["leaving"]:
        lines.append(f"ending: {now['leaving']}")
    return "\n".join(lines)


def _protection(now: Mapping[str, Any]) -> str:
    if now["protected"] is None:
        return "UNPROTECTED" + ("" if now["generation"] is None else f" at generation {now['generation']}")
    lag = now["lag"]
    return f"generation {now['protected']} is protected" + (f", {lag} behind training" if lag else "")


def _spare(spare: Mapping[str, Any]) -> str:
    waiting = spare["waiting"]
    ready = "no answer yet" if waiting is None else f"{waiting} ranks prepared"
    why = f", ailing: {spare['ailing']}" if spare["ailing"] else ", left for its faults" if spare["suspect"] else ""
    return f"{spare['node']} ({ready}{why})"
