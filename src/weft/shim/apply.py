"""Applying a policy: the only way in which controls reach a program, when it starts and while it runs.

start_environment   what a program needs in its environment; `weft run` sets it
apply               this process from now on; live tuning, on all ranks between the same two steps
overlap             the same for a block of Python code, with the agreement of all ranks
shape_launches      the part of a policy that single launches carry; the lab has communicators of its own
follow_rules        the rules of that policy, for the lab's collectives
not_applied         the controls of a policy that none of these can apply, each with the reason
"""

from __future__ import annotations

import logging
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import replace
from pathlib import Path
from typing import Any

from weft.errors import UnavailableError, WeftError
from weft.policy import Policy
from weft.ranks import Ranks
from weft.shim import binding, communicators, nccl_binding, restart

_log = logging.getLogger(__name__)

PREPARE_S = 20.0  # for new communicators
AMD_DRIVER = Path("/dev/kfd")
STATIC_PLUGIN = "STATIC_PLUGIN"  # NCCL then looks for a plugin in the process itself, where the shim has one
USER_TUNER = "WEFT_NCCL_TUNER_PLUGIN"
_WITH_SENDS = (None, "send_recv", "all_to_all")
"""Rules for these, where they are for every size, limit the channels of sends and receives, which NCCL fixes
when a communicator is made."""

_NO_SCHEDULE = "schedule is not applied: it is for fused operations (weft.ops)"
_NO_ENGINE = "comm.engine dma is not applied: it is for programs under `weft run --policy` and for weft.ops"
_NO_FRAMEWORK = "framework controls are not applied: they are for DDP and FSDP2 models of a program"

_framework: Callable[[Policy], None] | None = None
"""Applies the framework controls of a policy."""
_current: ContextVar[Policy | None] = ContextVar("weft_policy", default=None)
_routed: int | None = None
"""CTAs that all ranks agreed on in `overlap`; None: the program's own communicators."""


def handle_framework(handler: Callable[[Policy], None] | None) -> None:
    """Have `apply` call this for the framework controls of every policy; None: no handler."""
    global _framework
    _framework = handler


def not_applied(policy: Policy, *, framework: bool = False) -> list[str]:
    """One line for each control of the policy that cannot be applied to a program's launches.

    `framework`: the program is one whose DDP or FSDP2 models are reached.
    """
    lines = [_NO_SCHEDULE] if policy.schedule is not None else []
    if framework:
        return lines
    lines += [_NO_ENGINE] if policy.engine == "dma" else []
    return [*lines, _NO_FRAMEWORK] if policy.changes_framework else lines


def start_environment(policy: Policy, base: Mapping[str, str]) -> dict[str, str]:
    """`base` with the controls that must be in force when a program starts."""
    env = dict(base)
    if policy.max_ctas is not None:
        env["NCCL_MAX_CTAS"] = str(policy.max_ctas)
        least = env.get("NCCL_MIN_CTAS", "")
        if least.isdecimal() and int(least) > policy.max_ctas:
            env["NCCL_MIN_CTAS"] = str(policy.max_ctas)  # NCCL refuses a minimum above the maximum
    if policy.comm_rules:
        env = _rules_environment(policy, env)
    if policy.priority == "high" and AMD_DRIVER.exists():
        # HIP has no launch attribute to carry it; torch can put its collectives on a high-priority stream.
        env.setdefault("TORCH_NCCL_HIGH_PRIORITY", "1")
    return env


def tuner_environment(base: Mapping[str, str]) -> dict[str, str]:
    """`base` with what makes NCCL ask weft's tuner plugin, and weft the one that the user had."""
    env = dict(base)
    given = env.get("NCCL_TUNER_PLUGIN")
    if given not in (None, STATIC_PLUGIN) or USER_TUNER not in env:  # else it is weft's own value
        env[USER_TUNER] = given or ""
    env["NCCL_TUNER_PLUGIN"] = STATIC_PLUGIN
    return env


def _rules_environment(policy: Policy, base: Mapping[str, str]) -> dict[str, str]:
    """NCCL only lowers a communicator's channels per call: it starts with the most that a rule asks for."""
    env = tuner_environment(base)
    most = max((rule.ctas or 0 for rule in policy.comm_rules), default=0)
    if policy.max_ctas is not None and most > policy.max_ctas:
        env["NCCL_MAX_CTAS"] = str(most)
    whole = [rule for rule in policy.comm_rules if not rule.min_bytes and rule.max_bytes is None]
    channels = [rule.ctas for rule in whole if rule.ctas and rule.collective in _WITH_SENDS]
    if channels:
        env["NCCL_MAX_P2P_NCHANNELS"] = str(channels[0])
    return env


def shape_launches(policy: Policy | None, *, track: bool = False) -> None:
    """Set priority, head start and residency of this process's launches; None: the job's policy.

    `track` counts the launches that overlap with collectives, and changes nothing by itself.
    """
    binding.set_policy(policy, track)


def follow_rules() -> None:
    """Have collectives follow the rules of the policy that `shape_launches` has set, or none again.

    All ranks call it together, after the first communicator was made. Raises UnavailableError on all or none.
    """
    problems = _rule_problems()
    if problems:
        raise UnavailableError(f"comm.rules cannot be applied: {problems[0]}")


def apply(policy: Policy, default: Policy) -> None:
    """Run this process under `policy` from the next launch on. `default`: what the job was started with.

    The collectives' CTAs concern all ranks: every rank must call this between the same two collectives, after
    `communicators.prepare` succeeded on all of them. Raises UnavailableError where that is not possible here.
    """
    if _framework is not None:  # it raises before anything is changed
        _framework(policy)
    elif policy.changes_framework:
        raise UnavailableError(_NO_FRAMEWORK)
    if communicators.available():
        changed = policy.max_ctas != default.max_ctas
        communicators.route(policy.max_ctas if changed else None)
    elif policy.max_ctas != default.max_ctas:
        raise UnavailableError(nccl_binding.NO_COMMUNICATOR)
    shape_launches(None if policy == default else policy)
    if communicators.available():
        communicators.follow_policy()
    elif policy.comm_rules != default.comm_rules:
        raise UnavailableError(nccl_binding.NO_COMMUNICATOR)
    _log.debug("policy in force: %s", policy)


@contextmanager
def overlap(policy: Policy) -> Iterator[None]:
    """Run launches inside the block under `policy`; raises if `weft run` did not start this process.

    Applies to the whole process, from the next launch on; nests; the previous policy is restored at the end.
    With `max_ctas` or `comm_rules` all ranks enter and leave together, after the first collective, and best
    around the loop, not in it; `max_ctas` may move the collectives to other communicators, between two waits
    for the GPU. Where that is not possible on every rank, a warning says why, and the rest of the policy
    applies.
    """
    restart.require()
    outer = _current.get()
    before = outer.max_ctas if outer else None
    if policy.max_ctas != before:
        _use_ctas(policy.max_ctas)
    shape_launches(policy)
    ruled = any(found.comm_rules or found.engine == "dma" for found in (policy, outer) if found)
    if ruled:
        _use_rules(policy, outer)
    token = _current.set(policy)
    try:
        yield
    finally:
        _current.reset(token)
        shape_launches(outer)
        if ruled:
            _follow_policy()
        if policy.max_ctas != before:
            _use_ctas(before)


def restore() -> None:
    """Set the policy of the innermost `overlap` again, or the job's if there is none."""
    shape_launches(_current.get())
    _follow_policy()
    if _routed is not None:
        communicators.route(_routed)


def synchronize() -> None:
    """Wait until the GPU has done all that this process launched."""
    torch: Any = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        torch.cuda.synchronize()


def _use_ctas(ctas: int | None) -> None:
    """Limit collectives to this number of CTAs on all ranks or none; None: the program's communicators."""
    global _routed
    synchronize()
    if ctas is None:
        _routed = None
        if communicators.available():
            communicators.route(None)
        return
    problem = ""
    try:
        if not communicators.available():
            raise UnavailableError(nccl_binding.NO_COMMUNICATOR)
        able = communicators.preparable()
    except WeftError as error:
        able, problem = [], str(error)
    of_ranks = Ranks().gather((able, problem))
    if not problem:
        keys = communicators.agreed(found for found, _ in of_ranks) if len(of_ranks) > 1 else None
        try:
            communicators.prepare(ctas, PREPARE_S, keys)
        except WeftError as error:
            problem = str(error)
    problems = [text for text in Ranks().gather(problem) if text]
    if problems:
        warnings.warn(
            f"weft: comm.max_ctas {ctas} is not applied ({problems[0]}); "
            "`weft run --policy` sets it when the program starts",
            RuntimeWarning,
            stacklevel=4,
        )
        return
    communicators.route(ctas)
    _routed = ctas


def _follow_policy() -> str:
    """Apply the rules of the policy in force from the next collective on; empty, or why not."""
    if not communicators.available():
        return nccl_binding.NO_COMMUNICATOR
    try:
        communicators.follow_policy()
    except UnavailableError as error:
        _log.debug("%s", error)
        return str(error)
    return ""


def _rule_problems() -> list[str]:
    """Follow the rules of the policy in force on all ranks; else why it is not possible."""
    problems = [text for text in Ranks().gather(communicators.why_no_rules()) if text]
    return problems or [text for text in Ranks().gather(_follow_policy()) if text]


def _use_rules(policy: Policy, outer: Policy | None) -> None:
    """Follow the policy's rules on all ranks or none."""
    problems = _rule_problems()
    if problems:
        kept = outer.comm_rules if outer else ()
        shape_launches(replace(policy, comm_rules=kept, engine=outer.engine if outer else "sm"))
        _follow_policy()
        what = "comm.rules are" if policy.comm_rules else "comm.engine dma is"
        warnings.warn(
            f"weft: {what} not applied ({problems[0]}); `weft run --policy` applies the whole policy when "
            "the program starts",
            RuntimeWarning,
            stacklevel=4,
        )
