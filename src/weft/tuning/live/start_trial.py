"""Settings that only take effect when a job starts, compared between starts of the same command.

Runs of one command scatter by several percent, for unpredictable reasons (clocks, neighbors, time of day).
So a setting is tried in pairs of starts, one with it and one without, in an order drawn at random for each
pair. A setting without effect wins a pair with a probability of at most one half, whatever the scatter. It is
used only after PAIRS wins in a row, and dropped for good after the first pair that it does not win. At most
MOST_SETTINGS are ever tried for a command, so the probability of a false claim is at most MOST_SETTINGS /
2**PAIRS, which is 1.2%.

A setting in use is compared again, in another pair: after every USES starts, and as soon as a start with it
is slower than expected. It is dropped once it has lost two such pairs in a row.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from weft.policy import MAX_CTAS

_log = logging.getLogger("weft.live")

PAIRS = 8
LEAST_GAIN = 0.01
"""Share of the step time by which each pair must be won."""
MOST_SETTINGS = 3
USES = 10
"""Starts with a confirmed setting after which another pair compares it."""
LATER_SLOWER = 0.05
"""Share of the step time by which a start with a confirmed setting may be slower than in the last pair."""
LOST_LATER = 2
"""Pairs lost in a row after which a confirmed setting is dropped."""
GIVEN_VARIABLE = "WEFT_START_SETTINGS"
"""Environment variable: the settings that weft chose for this start, separated by spaces."""
CTA_VARIABLE = "NCCL_MAX_CTAS"
RANGES = {
    CTA_VARIABLE: (1, MAX_CTAS),
    "CUDA_DEVICE_MAX_CONNECTIONS": (1, 32),
    "NCCL_BUFFSIZE": (1 << 16, 1 << 26),
}
MORE_QUEUES = "CUDA_DEVICE_MAX_CONNECTIONS=32"
"""More than the default of 8. Fewer are never tried: a program whose streams wait for each other may hang
with one queue."""
LARGER_BUFFERS = f"NCCL_BUFFSIZE={8 << 20}"
"""Twice NCCL's default."""
BUFFER_FREE_BYTES = 4 << 30
"""GPU memory that must be free for larger buffers."""
LEAST_EXPOSED_SHARE = 0.02
"""Least share of a step that must be exposed communication, because that bounds the gain."""


@dataclass(frozen=True)
class StartTrial:
    """One setting, `NAME=VALUE`, and the pairs of starts that compared it: step ms without and with it."""

    setting: str
    pairs: tuple[tuple[float, float], ...] = ()
    with_first: bool | None = None
    """Whether the first start of the current pair has the setting; None if not drawn yet."""
    half_ms: float | None = None
    """Ms per step of the current pair's first start; None until it has ended."""
    running: str = ""
    """The launcher (`weft.tuning.live.launcher`) of an unfinished start, of the current pair or with a
    confirmed setting; empty if there is none."""
    over: str = ""
    """Why the setting was dropped; empty if it was not."""
    overlapped: bool = False
    """Whether another start of the command began meanwhile, so that each slowed the other down."""
    uses: int = 0
    """Starts with the setting since the last pair."""
    due: bool = False
    """Whether a confirmed setting is to be compared again."""
    lost: int = 0
    """Pairs lost in a row since the setting was confirmed."""

    @property
    def variable(self) -> str:
        return self.setting.split("=")[0]

    @property
    def confirmed(self) -> bool:
        return not self.over and len(self.pairs) >= PAIRS

    @property
    def active(self) -> bool:
        """Whether starts currently compare the setting."""
        return not self.over and (self.due or not self.confirmed)

    def begun(self, coin: bool, launcher: str) -> StartTrial:
        """This trial with `launcher` running, and the current pair's order drawn by `coin` if it was not."""
        first = coin if self.with_first is None else self.with_first
        return dataclasses.replace(self, with_first=first, running=launcher)

    @property
    def next_has_it(self) -> bool:
        """Whether the start that is beginning, or has begun, runs with the setting."""
        return not self.active or bool(self.with_first) == (self.half_ms is None)

    def dropped(self, why: str) -> StartTrial:
        return StartTrial(self.setting, self.pairs, over=why)

    def from_scratch(self) -> StartTrial:
        """A confirmed setting's trial after a start that did not end well: it must be proven again."""
        return StartTrial(self.setting)

    def pair_again(self) -> StartTrial:
        """This trial without the current, incomplete pair."""
        return dataclasses.replace(self, with_first=None, half_ms=None, running="", overlapped=False)

    def ended(self, ms: float) -> StartTrial:
        """This trial with the step time, in ms, of the start that has just ended."""
        return self._compared(ms) if self.active else self._used(ms)

    def _used(self, ms: float) -> StartTrial:
        """This trial after a start with a confirmed setting."""
        slow = ms > (1 + LATER_SLOWER) * self.pairs[-1][1]
        due = slow or self.uses + 1 >= USES
        return dataclasses.replace(self.pair_again(), uses=0 if due else self.uses + 1, due=due)

    def _compared(self, ms: float) -> StartTrial:
        """This trial after one start of a pair."""
        if self.half_ms is None:
            return dataclasses.replace(self, half_ms=ms, running="")
        without_ms, with_ms = (ms, self.half_ms) if self.with_first else (self.half_ms, ms)
        done = dataclasses.replace(self.pair_again(), pairs=(*self.pairs, (without_ms, with_ms)))
        change = 100 * (with_ms / without_ms - 1)
        if not self.confirmed:
            won = with_ms <= (1 - LEAST_GAIN) * without_ms
            why = f"{change:+.1f}% time per step in pair {len(done.pairs)} of starts"
            return done if won else done.dropped(why)
        lost = self.lost + 1 if with_ms >= without_ms else 0
        if lost >= LOST_LATER:
            return done.dropped(f"{change:+.1f}% time per step in the last of {lost} pairs that it lost")
        return dataclasses.replace(done, lost=lost, due=lost > 0)

    @property
    def gain_pct(self) -> tuple[float, float, float]:
        """Median gain of the pairs, and their range: a 99% interval at PAIRS, for any distribution."""
        gains = [100 * (1 - with_ms / without_ms) for without_ms, with_ms in self.pairs]
        return (median(gains), min(gains), max(gains)) if gains else (0.0, 0.0, 0.0)

    @property
    def text(self) -> str:
        if self.over:
            return f"{self.setting} is not tried again: {self.over}"
        if not self.confirmed:
            return (
                f"{self.setting} is being compared between starts: pair {len(self.pairs) + 1} of {PAIRS}, "
                "until it loses one"
            )
        gain, low, high = self.gain_pct
        later = "the next two starts compare it again" if self.due else "later starts use it"
        return (
            f"{self.setting} took {gain:.1f}% less time per step between starts ({low:.1f} to {high:.1f}%, "
            f"{len(self.pairs)} pairs): {later}"
        )


def offered(
    environ: Mapping[str, str],
    *,
    free_bytes: int,
    one_node: bool,
    exposed_ms: float | None,
    step_ms: float | None,
) -> tuple[str, ...]:
    """Settings that a later start of this job could try, except those that the program or user has set."""
    if not one_node:
        return ()  # each node's launcher decides alone, but all ranks need the same settings
    if exposed_ms is not None and step_ms and exposed_ms < LEAST_EXPOSED_SHARE * step_ms:
        return ()
    given = environ.get(GIVEN_VARIABLE, "").split()
    buffers = LARGER_BUFFERS in given or free_bytes >= BUFFER_FREE_BYTES
    found = (MORE_QUEUES, LARGER_BUFFERS) if buffers else (MORE_QUEUES,)
    return tuple(setting for setting in found if _free_to_set(setting, environ, given))


def _free_to_set(setting: str, environ: Mapping[str, str], given: Iterable[str]) -> bool:
    name, value = setting.split("=")
    return environ.get(name) == value if setting in given else name not in environ


def configured(environ: Mapping[str, str], system: Path = Path("/etc/nccl.conf")) -> set[str]:
    """Variables that the user sets in NCCL's configuration files; the environment would override these."""
    own = environ.get("NCCL_CONF_FILE") or f"{environ.get('HOME', '')}/.nccl.conf"
    found = set()
    for path in (Path(own), system):
        try:
            if not path.is_file():
                continue  # reading a pipe would consume what the program needs
            lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
        except OSError:
            _log.debug("no configuration of NCCL in %s", path)
            continue
        found |= {line.split("=")[0].strip() for line in lines if "=" in line and not line.startswith("#")}
    return found


def known_setting(setting: object) -> bool:
    """Whether this is one of weft's settings. It comes from a file and goes into a program's environment."""
    if not isinstance(setting, str) or not setting.isascii():
        return False
    name, _, value = setting.partition("=")
    if name not in RANGES or not value.isdecimal() or len(value) > 12:
        return False
    least, most = RANGES[name]
    return least <= int(value) <= most


def trial_of(document: Mapping[str, object]) -> StartTrial:
    """A trial from untrusted JSON. Raises ValueError, TypeError or KeyError."""
    setting, pairs = document["setting"], document["pairs"]
    if not isinstance(setting, str) or not known_setting(setting) or not isinstance(pairs, list):
        raise ValueError("not a trial")
    times = tuple((float(a), float(b)) for a, b in pairs)
    half, first, running = document["half_ms"], document["with_first"], document["running"]
    half_ms = None if half is None else float(half)  # type: ignore[arg-type]
    if any(not 0 < ms < float("inf") for pair in (*times, (half_ms or 1.0,)) for ms in pair):
        raise ValueError("no step time")
    return StartTrial(
        setting,
        times,
        None if first is None else bool(first),
        half_ms,
        str(running)[:200] if running else "",
        str(document["over"])[:200],
        bool(document.get("overlapped")),
        _count(document.get("uses")),
        bool(document.get("due")),
        _count(document.get("lost")),
    )


def _count(value: object) -> int:
    return value if isinstance(value, int) and 0 <= value <= 1000 else 0
