"""`weft store`: list, export, import or delete stored verdicts."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from weft.cli.output import check_output, versioned

if TYPE_CHECKING:
    from weft.tuning.store import Entry, Store

ACTIONS = ("list", "export", "import", "forget")
_MAX_FILE_BYTES = 64 << 20
"""Size limit of a file to import."""


def store(
    action: str = typer.Argument("list", metavar="list|export|import|forget", help="What to do."),
    file: Path | None = typer.Argument(None, metavar="[FILE]", help="JSON file to export to or import from."),  # noqa: B008
    workload: str = typer.Option("", metavar="TEXT", help="Forget verdicts whose workload contains TEXT."),
    everything: bool = typer.Option(False, "--all", help="Forget all verdicts."),
    path: Path | None = typer.Option(  # noqa: B008
        None,
        "--store",
        metavar="PATH",
        help="Path of the store; default: $WEFT_STORE, or a file in your data folder.",
    ),
    as_json: bool = typer.Option(False, "--json", help="Print one JSON object and nothing else."),
) -> None:
    """List, export, import or forget verdicts of this machine."""
    from weft.checks import check_choice
    from weft.errors import UsageError
    from weft.tuning.store import Store

    check_choice("store", action, ACTIONS)
    if (file is not None) != (action in ("export", "import")):
        hint = "needs a FILE, such as verdicts.json" if file is None else "takes no FILE; leave it out"
        raise UsageError(f"store {action} {hint}")
    opened = Store(path)
    document = _act(opened, action, file or Path(), workload, everything)
    if as_json:
        print(json.dumps(versioned({"store": str(opened.path), **document})))
    elif action == "list":
        _show(opened)
    else:
        (verb, count), *_ = document.items()
        print(f"{verb}: {count} {'verdict' if count == 1 else 'verdicts'}")


def _act(opened: Store, action: str, file: Path, workload: str, everything: bool) -> dict[str, Any]:
    if action == "export":
        return _export(opened, file)
    if action == "import":
        return _import(opened, file)
    if action == "forget":
        return _forget(opened, workload, everything)
    return {"entries": [{**entry.to_dict(), "stale": entry.stale} for entry in opened.entries()]}


def _export(opened: Store, file: Path) -> dict[str, Any]:
    from weft.errors import UsageError
    from weft.files import write_whole

    check_output("store export", file)
    if file.exists() and opened.path.exists() and file.samefile(opened.path):
        raise UsageError(f"store export {file}: this is the store itself; name another file")
    document = opened.export()
    write_whole(file, json.dumps(document, indent=1) + "\n")
    return {"exported": len(document["entries"])}


def _import(opened: Store, file: Path) -> dict[str, Any]:
    from weft.errors import InputError, UsageError

    try:
        with file.open(encoding="utf-8") as source:  # anything but a regular file may never end
            text = source.read(_MAX_FILE_BYTES + 1)
        if len(text) > _MAX_FILE_BYTES:
            raise InputError(f"{file}: over {_MAX_FILE_BYTES >> 20} MiB; give a file of `weft store export`")
        document = json.loads(text)
    except OSError as error:
        raise InputError(f"cannot read {file}: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise InputError(f"{file} is not JSON: {error}") from None
    try:
        return {"imported": opened.import_(document)}
    except UsageError as error:
        raise InputError(f"{file}: {error}") from None


def _forget(opened: Store, workload: str, everything: bool) -> dict[str, Any]:
    from weft.errors import UsageError

    if everything == bool(workload):
        raise UsageError("store forget: give either --workload TEXT or --all")
    if everything:
        return {"forgot": opened.clear()}
    found = [entry.key for entry in opened.entries() if workload in entry.key.workload]
    return {"forgot": sum(opened.remove(key) for key in found)}


def _show(opened: Store) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table

    entries = opened.entries()
    if not entries:
        print(f"{opened.path}: no verdicts yet; `weft tune` on a GPU stores them")
        return
    table = Table(title=str(opened.path), box=box.SIMPLE_HEAD)
    for heading in ("GPU", "driver", "NCCL", "torch", "workload", "policy", "gain", "made"):
        table.add_column(heading, overflow="fold")
    for entry in entries:
        key, made = entry.key, time.strftime("%Y-%m-%d", time.localtime(entry.made))
        what = (key.gpu, key.driver, key.nccl, key.torch, _short(key.workload), str(entry.policy))
        table.add_row(*what, _gain(entry), made + (", stale" if entry.stale else ""))
    Console().print(table)


def _short(workload: str) -> str:
    return workload if len(workload) <= 60 else f"{workload[:57]}…"


def _gain(entry: Entry) -> str:
    verdict = entry.verdict.get("verdict", entry.verdict)
    gain = verdict.get("gain_pct") if isinstance(verdict, dict) else None
    return f"{gain:.1f}%" if isinstance(gain, (int, float)) else "-"
