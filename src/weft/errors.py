"""Errors that a user can act on. Each kind has the exit code that the command line ends with."""

from __future__ import annotations


class WeftError(Exception):
    """A problem that is reported in one line that names the thing and the fix."""

    exit_code = 1


class UsageError(WeftError):
    """A wrong argument, an impossible policy, a command that cannot be run as asked."""

    exit_code = 2


class InputError(WeftError):
    """A file that cannot be read or does not say what it should."""

    exit_code = 2


class OutputError(WeftError):
    """A file that cannot be written."""

    exit_code = 2


class UnavailableError(WeftError):
    """This machine lacks what was asked for: a GPU, a driver, a compiler, the shim."""

    exit_code = 2


class CommandNotFoundError(WeftError):
    """The program to run does not exist; 127 is what a shell answers."""

    exit_code = 127
