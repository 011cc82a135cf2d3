"""Applies policies. Controls reach a program only through this module, at its start and while it runs.

start_environment   adds the variables that must be set when a program starts; `weft run` uses it
apply               sets the policy of this process; live tuning calls it on all ranks between the same steps
overlap             sets the policy for a block of Python code, after all ranks agree
shape_launches      sets only the controls of single launches; for the lab, which has its own communicators
follow_rules        applies the rules of that policy to the lab's collectives
not_applied         lists the controls of a policy that none of these can apply, each with the reason
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

PREPARE_S = 20.0  # timeout for making new communicators
AMD_DRIVER = Path("/dev/kfd")
STATIC_PLUGIN = "STATIC_PLUGIN"  # makes NCCL look for a plugin in the process itself: it finds the shim's
USER_TUNER = "WEFT_NCCL_TUNER_PLUGIN"
_WITH_SENDS = (None, "send_recv", "all_to_all")
"""Rules for these collectives limit the channels of sends and receives if they cover every size. NCCL fixes
these channels when a communicator is created."""

_NO_SCHEDULE = "schedule is not applied: it is for fused operations (weft.ops)"
_NO_ENGINE = "comm.engine dma is not applied: it is for programs under `weft run --policy` and for weft.ops"
_NO_FRAMEWORK = "framework controls are not applied: they are for DDP and FSDP2 models of a program"

_framework: Callable[[Policy], None] | None = None
"""Applies the framework controls of a policy; None if nothing does."""
_current: ContextVar[Policy | None] = ContextVar("weft_policy", default=None)
_routed: int | None = None
"""The CTAs that all ranks agreed on in `overlap`; None if the program's own communicators are in use."""


def handle_framework(handler: Callable[[Policy], None] | None) -> None:
    """Make `apply` call `handler` for the framework controls of every policy; None removes the handler."""
    global _framework
    _framework = handler


def not_applied(policy: Policy, *, framework: bool = False) -> list[str]:
    """One line for each control of the policy that cannot be applied to a program's launches.

    `framework`: weft can reach the DDP or FSDP2 models of this program.
    """
    lines = [_NO_SCHEDULE] if policy.schedule is not None else []
    if framework:
        return lines
    lines += [_NO_ENGINE] if policy.engine == "dma" else []
    return [*lines, _NO_FRAMEWORK] if policy.changes_framework else lines


def start_environment(policy: Policy, base: Mapping[str, str]) -> dict[str, str]:
    """`base` plus the controls that must be in force when a program starts."""
    env = dict(base)
    if policy.max_ctas is not None:
        env["NCCL_MAX_CTAS"] = str(policy.max_ctas)
        least = env.get("NCCL_MIN_CTAS", "")
        if least.isdecimal() and int(least) > policy.max_ctas:
            env["NCCL_MIN_CTAS"] = str(policy.max_ctas)  # NCCL refuses a minimum above the maximum
    if policy.comm_rules:
        env = _rules_environment(policy, env)
    if policy.priority == "high" and AMD_DRIVER.exists():
        # HIP has no launch attribute for priority; torch can run its collectives on a high-priority stream.
        env.setdefault("TORCH_NCCL_HIGH_PRIORITY", "1")
    return env


def tuner_environment(base: Mapping[str, str]) -> dict[str, str]:
    """`base` plus the variables that make NCCL ask weft's tuner plugin, and weft ask the user's own."""
    env = dict(base)
    given = env.get("NCCL_TUNER_PLUGIN")
    if given not in (None, STATIC_PLUGIN) or USER_TUNER not in env:  # otherwise it is weft's own value
        env[USER_TUNER] = given or ""
    env["NCCL_TUNER_PLUGIN"] = STATIC_PLUGIN
    return env


def _rules_environment(policy: Policy, base: Mapping[str, str]) -> dict[str, str]:
    """`base` plus the variables that rules need.

    A call can only lower a communicator's number of channels, so the communicator starts with the largest
    number that any rule asks for.
    """
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
    """Set priority, head start and residency of this process's launches; None restores the job's policy.

    `track` counts the launches that overlap with collectives and changes no launch.
    """
    binding.set_policy(policy, track)


def follow_rules() -> None:
    """Make collectives follow the rules of the policy that `shape_launches` has set, if it has any.

    All ranks call it together, after the first communicator was created. It raises UnavailableError on all
    ranks or on none.
    """
    problems = _rule_problems()
    if problems:
        raise UnavailableError(f"comm.rules cannot be applied: {problems[0]}")


def apply(policy: Policy, default: Policy) -> None:
    """Run this process under `policy` from the next launch on. `default` is the policy the job started with.

    A change of the collectives' CTAs affects all ranks: every rank must call this between the same two
    collectives, after `communicators.prepare` succeeded on all of them. Raises UnavailableError if a control
    cannot be applied here.
    """
    if _framework is not None:  # called first: it may raise, and nothing has changed yet
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

    The policy applies to the whole process from the next launch on, and the previous policy is restored at
    the end. Blocks can be nested. With `max_ctas` or `comm_rules`, all ranks must enter and leave the block
    together, after the first collective. Put the block around the training loop, not inside it: entering and
    leaving with `max_ctas` waits for the GPU, and may move the collectives to other communicators. If these
    controls cannot be applied on every rank, a warning says why, and the rest of the policy applies.
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
    """Restore the policy of the innermost `overlap`, or the job's policy if there is none."""
    shape_launches(_current.get())
    _follow_policy()
    if _routed is not None:
        communicators.route(_routed)


def synchronize() -> None:
    """Wait until the GPU has finished everything that this process launched."""
    torch: Any = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        torch.cuda.synchronize()


def _use_ctas(ctas: int | None) -> None:
    """Limit collectives to `ctas` CTAs on all ranks or on none; None: the program's own communicators."""
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
    """Apply the rules of the policy in force from the next collective on. Returns "" or why not."""
    if not communicators.available():
        return nccl_binding.NO_COMMUNICATOR
    try:
        communicators.follow_policy()
    except UnavailableError as error:
        _log.debug("%s", error)
        return str(error)
    return ""


def _rule_problems() -> list[str]:
    """Follow the rules of the policy in force on all ranks. Returns why that failed; empty if it worked."""
    problems = [text for text in Ranks().gather(communicators.why_no_rules()) if text]
    return problems or [text for text in Ranks().gather(_follow_policy()) if text]


def _use_rules(policy: Policy, outer: Policy | None) -> None:
    """Follow the policy's rules on all ranks or on none."""
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
