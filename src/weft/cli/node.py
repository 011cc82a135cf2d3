"""`weft node`: node profiles for ghost ranks and simulations; one from a user's own nccl-tests logs."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import typer

from weft.cli.output import check_output, versioned

NODE_ACTIONS = ("list", "show", "import")


def node(
    action: str = typer.Argument("list", metavar="list|show|import", help="What to do."),
    what: list[str] = typer.Argument(  # noqa: B008
        None, metavar="[NAME|FILE|LOG]...", help="A node to show, or the logs of nccl-tests to import."
    ),
    out: Path | None = typer.Option(None, metavar="FILE", help="Import: file to write; default: NAME.json."),  # noqa: B008
    name: str = typer.Option("", metavar="NAME", help="Import: name of the node; default: that of the log."),
    ranks: int = typer.Option(0, metavar="N", help="Import: number of ranks, if the log does not list them."),
    as_json: bool = typer.Option(False, "--json", help="Print one JSON object and nothing else."),
) -> None:
    """List, show or import node profiles.

    A profile is imported from the output of nccl-tests.

    weft node import all_reduce.log all_gather.log --name mynode
    """
    from weft.checks import check_choice
    from weft.errors import UsageError

    check_choice("node", action, NODE_ACTIONS)
    given = what or []
    if action == "list":
        if given:
            raise UsageError("weft node list takes no name; use `weft node show NAME`")
        _list(as_json)
    elif action == "show":
        if len(given) != 1:
            raise UsageError("node show takes one NAME or FILE; `weft node list` has the names")
        _show(given[0], as_json)
    else:
        if not given:
            raise UsageError(
                "weft node import needs the output of nccl-tests: weft node import all_reduce.log"
            )
        _import([Path(path) for path in given], out, name, ranks, as_json)


def _list(as_json: bool) -> None:
    from rich.console import Console

    from weft.comm.node import load_node
    from weft.comm.node_file import shipped_nodes
    from weft.report.node import node_line, node_list_table

    nodes = [load_node(name) for name in shipped_nodes()]
    if as_json:
        print(json.dumps(versioned({"nodes": [node_line(one) for one in nodes]})))
    else:
        Console().print(node_list_table(nodes))


def _show(name: str, as_json: bool) -> None:
    from rich.console import Console

    from weft.comm.node import load_node
    from weft.comm.node_file import node_to_dict
    from weft.report.node import node_page

    found = load_node(name)
    if as_json:
        print(json.dumps(node_to_dict(found)))
    else:
        Console().print(node_page(found))


def _import(logs: list[Path], out: Path | None, name: str, ranks: int, as_json: bool) -> None:
    from rich.console import Console

    from weft.comm.node_file import node_from_dict, node_to_dict
    from weft.comm.node_import import import_logs
    from weft.errors import UsageError
    from weft.files import write_whole
    from weft.report.node import node_page

    if name != Path(name).name:
        raise UsageError(f"--name {name} is a path; give a name, and the file by --out")
    target = out or Path(f"{name or logs[0].stem}.json")
    if any(target.exists() and log.exists() and target.samefile(log) for log in logs):
        raise UsageError(f"--out {target} is the log itself; name another file")
    check_output("--out", target)
    if ranks < 0 or ranks == 1:
        raise UsageError(f"--ranks {ranks}: give 2 or more")
    found = import_logs(
        logs, name, ranks, lambda line: print(f"weft: {' '.join(line.split())}", file=sys.stderr)
    )
    document = node_to_dict(found)
    node_from_dict(document)
    write_whole(target, json.dumps(document, indent=1) + "\n")
    if as_json:
        print(json.dumps(document))
        return
    Console().print(node_page(found))
    print(f"node: {target}; use it with `python -m weft.comm.ghost --node {target} train.py`")
