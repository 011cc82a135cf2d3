"""The `weft` command: registers the subcommands and turns every error into one line and an exit code."""

from __future__ import annotations

import errno
import importlib
import io
import os
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import weft
from weft import logs
from weft.errors import OutputError, WeftError

if TYPE_CHECKING:
    import typer

# A subcommand is a module `weft.cli.NAME` with a function `NAME`; heavy imports belong inside the function.
COMMANDS = (
    "doctor",
    "run",
    "tune",
    "store",
    "bench",
    "analyze",
    "report",
    "calibrate",
    "plan",
    "explore",
    "reproduce",
    "top",
    "schema",
    "node",
)

INTERRUPTED = 130
WITHOUT_OUTPUT = ("run", "top")
"""Commands that work even if standard output is closed: their results go elsewhere."""
_UNWRITABLE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EBADF)

_LEAST_COLUMNS = 3
"""Terminals without a size set COLUMNS to 0; rich takes that as it is, and fails."""

PASS_THROUGH: dict[str, Any] = {"allow_interspersed_args": False}
"""Settings for commands whose arguments belong to another program."""


def _show_version(value: bool) -> None:
    if value:
        import typer

        print(f"weft {weft.__version__}")
        raise typer.Exit


def build_app(commands: Sequence[str] | None = None) -> typer.Typer:
    """The application with these subcommands; None: all of them."""
    import typer

    app = typer.Typer(
        name="weft",
        help="Hide multi-GPU communication behind computation, on unmodified programs.",
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
        rich_markup_mode=None,
    )

    @app.callback()
    def _root(
        version: bool = typer.Option(
            False, "--version", callback=_show_version, is_eager=True, help="Print the version and exit."
        ),
        verbose: bool = typer.Option(
            False,
            "--verbose",
            "-v",
            help="Print diagnostics on stderr; for all processes of a job, set WEFT_LOG=debug.",
        ),
    ) -> None:
        logs.show("debug" if verbose else None)

    for name in commands or COMMANDS:
        command = getattr(importlib.import_module(f"weft.cli.{name}"), name)
        app.command(name, context_settings=PASS_THROUGH if name == "run" else {})(command)
    return app


def main(argv: list[str] | None = None) -> None:
    """Entry point of the console script."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # prints "?" for characters that the code page lacks
            stream.reconfigure(errors="replace")
    try:
        code = _run(sys.argv[1:] if argv is None else argv)
        if sys.stdout is not None:
            sys.stdout.flush()  # what cannot be written must fail here, not while the interpreter exits
    except WeftError as error:
        _fail(str(error), error.exit_code)
    except BrokenPipeError:  # `weft … | head`: the reader has closed the pipe
        _drop_output()
        sys.exit(1)
    except KeyboardInterrupt:
        _fail("interrupted", INTERRUPTED)
    except Exception as error:
        if isinstance(error, OSError) and error.errno in _UNWRITABLE:
            _drop_output()
            _fail(f"cannot write to {error.filename or 'standard output'}: {error.strerror}", 2)
        # Newer releases of typer include a copy of click, so recognise its errors by name and interface.
        if type(error).__name__ == "Abort":
            _fail("interrupted", INTERRUPTED)
        if not hasattr(error, "format_message"):
            raise
        if type(error).__name__ == "NoArgsIsHelpError":  # `weft` alone: its message is the help text
            print(error.format_message(), file=sys.stderr)
            sys.exit(2)
        hint = getattr(getattr(error, "ctx", None), "command_path", "weft")
        _fail(f"{error.format_message().rstrip('.')}; see `{hint} --help`", 2)
    if code == INTERRUPTED:  # newer releases of typer silently turn Ctrl-C into this
        _fail("interrupted", INTERRUPTED)
    sys.exit(code if isinstance(code, int) else 0)


def _run(argv: list[str]) -> Any:
    columns = os.environ.get("COLUMNS", "")
    if columns.isdigit() and int(columns) < _LEAST_COLUMNS and "run" not in argv:
        del os.environ["COLUMNS"]  # a program of `weft run` keeps it
    command = next((word for word in argv if not word.startswith("-")), "")
    if sys.stdout is None and command not in WITHOUT_OUTPUT:  # Python would print nothing, without an error
        raise OutputError("standard output is closed; redirect it to a file or /dev/null")
    from weft.cli.quick import plain_arguments

    arguments = plain_arguments(argv)
    if arguments is not None:
        from weft.cli.analysis import run_analysis

        logs.show()
        return run_analysis(**arguments)
    # Help and errors of the root command need every subcommand; otherwise load only the one that runs.
    one = argv[:1] if argv and argv[0] in COMMANDS else None
    return build_app(one)(args=argv, prog_name="weft", standalone_mode=False)


def _drop_output() -> None:
    """Drop what is left to write, so that the interpreter does not try again when it exits."""
    if sys.stdout is not None:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _fail(message: str, code: int) -> None:
    print("weft: " + " ".join(message.split()), file=sys.stderr)
    sys.exit(code)
