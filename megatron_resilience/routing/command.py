"""The subcommand ``plan``: what a change of layout would move and cost, offline, before anything is touched."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import replace

from megatron_resilience import exits
from megatron_resilience.routing.cost import Cluster, load_cluster
from megatron_resilience.routing.placement import WORTHWHILE_UP_TO, keep_in_place
from megatron_resilience.routing.problem import relayout
from megatron_resilience.routing.staging import fit_budget
from megatron_resilience.routing.summary import draw_traffic, render, summarise
from megatron_resilience.vps.families import load_model
from megatron_resilience.vps.layout import parse_layout
from megatron_resilience.vps.nearest import space_of
from megatron_resilience.vps.state import complete_state
from megatron_resilience.vps.tensors import nearest_divisors


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of ``plan`` on ``parser``."""
    parser.description = __doc__
    parser.add_argument("--from", dest="source", required=True, metavar="LAYOUT", help="such as TP8·PP8·DP8")
    parser.add_argument("--to", dest="target", required=True, metavar="LAYOUT")
    parser.add_argument("--model", required=True, metavar="NAME|FILE", help="a family or a catalogue file")
    parser.add_argument("--lost", default="", metavar="RANKS", help="dead ranks, such as 8-15,40")
    parser.add_argument("--memory", type=float, default=80.0, metavar="GiB", help="per rank, for the state")
    parser.add_argument("--cluster", metavar="FILE", help="links: YAML with the fields of routing.cost.Cluster")
    parser.add_argument("--global-batch", type=int, metavar="N", help="refuse a DP that does not divide it")
    parser.add_argument("--micro-batch", type=int, default=1, metavar="N")
    parser.add_argument("--overlap-grad-reduce", action="store_true", help="bucketed buffers, as with Megatron's")
    parser.add_argument("--json", action="store_true", help="print figures as JSON")
    parser.add_argument("--picture", metavar="PNG", help="draw the traffic matrix there")


def run(args: argparse.Namespace) -> int:
    """Print the plan; returns an exit status, ``IMPOSSIBLE`` when the change is refused (the reason is printed)."""
    try:
        model = load_model(args.model)
        cluster = load_cluster(args.cluster) if args.cluster else Cluster()
        layouts = [
            replace(parse_layout(text), overlap_grad_reduce=args.overlap_grad_reduce)
            for text in (args.source, args.target)
        ]
        batch = None
        if args.global_batch:
            if args.global_batch % args.micro_batch:
                raise ValueError(
                    f"--micro-batch {args.micro_batch} does not divide --global-batch {args.global_batch}; "
                    f"nearest that do: {nearest_divisors(args.global_batch, args.micro_batch)}"
                )
            batch = args.global_batch // args.micro_batch
        lost = parse_ranks(args.lost)
        model = complete_state(model, layouts)
        source, target = space_of(model, layouts[0]), space_of(model, layouts[1], batch=batch)
        problem = relayout(source, target, lost, cluster)
        if target.layout.world <= WORTHWHILE_UP_TO:
            problem = keep_in_place(problem)
        summary = summarise(problem, fit_budget(problem, int(args.memory * 2**30)), cluster)
    except (ValueError, OSError) as error:
        if args.json:
            print(json.dumps({"refused": str(error)}))
        else:
            print(f"refused: {error}", file=sys.stderr)
        return exits.IMPOSSIBLE
    title = f"{model.name}  {source.layout} → {target.layout}"
    if args.json:
        print(json.dumps({"model": model.name, "from": args.source, "to": args.target} | summary.to_json()))
    else:
        print(f"{title}" + (f"  without ranks {args.lost}" if lost else ""))
        print(f"state              {model.state_bytes / 2**30:10.2f} GiB, each element once")
        print(render(summary))
    if args.picture:
        draw_traffic(summary, args.picture, title)
    return exits.DONE


def parse_ranks(text: str) -> tuple[int, ...]:
    """Read ``8-15,40``.

    Raises:
        ValueError: a part that is neither a rank nor a range.
    """
    ranks: set[int] = set()
    for part in filter(None, text.split(",")):
        try:
            low, _, high = part.partition("-")
            ranks.update(range(int(low), int(high or low) + 1))
        except ValueError:
            raise ValueError(f"{part!r} in {text!r}: write ranks as 8-15,40") from None
    return tuple(sorted(ranks))


def main(arguments: list[str] | None = None) -> int:
    """Run the subcommand on its own: ``python -m megatron_resilience.routing.command``."""
    parser = argparse.ArgumentParser(prog="megatron-resilience plan")
    add_arguments(parser)
    return run(parser.parse_args(arguments))


if __name__ == "__main__":
    sys.exit(main())
