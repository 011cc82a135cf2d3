"""Errors that a user can act on, each with the exit code of the command line."""

from __future__ import annotations


class WeftError(Exception):
    """Base class. The message is one line that names the problem and the fix."""

    exit_code = 1


class UsageError(WeftError):
    """An invalid argument, an impossible policy, or a command that cannot run as requested."""

    exit_code = 2


class InputError(WeftError):
    """A file that cannot be read or has invalid contents."""

    exit_code = 2


class OutputError(WeftError):
    """A file that cannot be written."""

    exit_code = 2


class UnavailableError(WeftError):
    """Something required is missing on this machine: a GPU, a driver, a compiler, the shim."""

    exit_code = 2


class CommandNotFoundError(WeftError):
    """The program to run does not exist; 127 is the exit code that shells use."""

    exit_code = 127
