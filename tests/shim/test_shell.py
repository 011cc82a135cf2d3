"""Shell-level cases, each run directly and under `weft run`: exit code, output and what is left behind must be equal.

`@` in a script is replaced by nothing, or by `weft run --quiet --`.
"""

from __future__ import annotations

import os
import pty
import select
import shutil
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest
from building import ROOT, compile_c

WEFT = f"{sys.executable} -m weft run --quiet --"
AS_ROOT = os.geteuid() == 0

CASES = {
    "exit code": "@ sh -c 'exit 3'",
    "exit code 255": "@ sh -c 'exit 255'",
    "success": "@ true",
    "failure": "@ false",
    "command not found": "@ /nowhere/program 2>/dev/null || test $? -ge 2",
    "death by SIGTERM": "@ sh -c 'kill -TERM $$'",
    "death by SIGKILL": "@ sh -c 'kill -KILL $$'",
    "death by SIGSEGV": "ulimit -c 0; @ sh -c 'kill -SEGV $$'",
    "death by SIGABRT": "ulimit -c 0; @ sh -c 'kill -ABRT $$'",
    "death by SIGHUP": "@ sh -c 'kill -HUP $$'",
    "death by SIGPIPE": "@ sh -c 'kill -PIPE $$'",
    "death by a real-time signal": "@ bash -c 'kill -RTMIN $$'",
    "SIGPIPE inside": "@ bash -o pipefail -c 'yes | head -1'",
    "SIGPIPE of the program itself": "set -o pipefail; @ yes | head -2",
    "SIGPIPE ignored by the shell": "trap '' PIPE; @ sh -c 'yes 2>/dev/null | head -1'; echo $?",
    "SIGPIPE disposition": "@ grep SigIgn /proc/self/status",
    "SIGHUP ignored, as by nohup": "trap '' HUP; @ sh -c 'kill -HUP $$; echo alive'",
    "SIGINT ignored in the background": "@ grep SigIgn /proc/self/status & wait $!",
    "SIGCHLD ignored": "trap '' CHLD; @ sh -c 'exit 9'",
    "blocked signals": "@ grep SigBlk /proc/self/status",
    "SIGXFSZ": "ulimit -f 1; @ sh -c 'trap - XFSZ; head -c 100000 /dev/zero > big'; rm -f big",
    "no byte of a file": "ulimit -f 0; @ sh -c 'exit 5'",
    "limit of open files": "ulimit -n 64; @ sh -c 'ulimit -n'",
    "limit of memory": "ulimit -v 4000000; @ sh -c 'ulimit -v'",
    "no core files": "ulimit -c 0; @ sh -c 'ulimit -c'",
    "standard input": "printf 'a\\nb\\n' | @ cat",
    "standard input closed": "@ sh -c 'if test -e /proc/self/fd/0; then echo open; else echo closed; fi' <&-",
    "standard output closed": "@ sh -c 'echo x' >&- 2>/dev/null || test $? -gt 0",
    "standard error closed": "@ sh -c 'echo out' 2>&-",
    "inherited descriptors": "exec 7</dev/null; @ sh -c 'cd /proc/self/fd; echo *' | tr ' ' '\\n' | grep -cx 7",
    "no descriptors of weft": "@ sh -c 'cd /proc/self/fd; echo *'",
    "arguments": "@ printf '<%s>' '' 'two words' '*' --flag '$x' '\\'",
    "environment": "env -i PATH=$PATH PYTHONPATH=$PYTHONPATH A= B='x y' @ env | grep -Ev '^(LD_PRELOAD|WEFT_JOB|ASAN_OPTIONS)='",
    "a script without #!": "printf 'echo \"$0\" \"$@\"; exit 5' > bare; chmod +x bare; @ ./bare -x 'two words'",
    "a script without #! in PATH": "printf 'echo \"$0\"' > work/bare; chmod +x work/bare; PATH=$PWD/work:$PATH; @ bare; rm work/bare",
    "umask and folder": "umask 027; cd /; @ sh -c 'umask; pwd'",
    "the end of a pipe is seen at once": "@ sh -c 'exec >&-; until test -e early; do sleep 0.02; done' | { cat; touch early; }; rm early",
    "a writer sees its reader gone": "{ sleep 0.3; yes; } | @ sh -c 'exec <&-; sleep 0.6'",
    # SIGALRM ends the time of `timeout`; it is sent once the program runs and `timeout` waits for it.
    "timeout": "timeout -s TERM 100 @ sh -c 'touch up; exec sleep 100' & until test -e up && grep -q State:.S /proc/$!/status; do sleep 0.02; done; kill -ALRM $!; wait $!; code=$?; rm up; exit $code",
    "timeout with a trap": "timeout 100 @ sh -c 'trap \"echo got; exit 4\" TERM; touch up; for i in $(seq 600); do sleep 0.1; done' & until test -e up && grep -q State:.S /proc/$!/status; do sleep 0.02; done; kill -ALRM $!; wait $!; code=$?; rm up; exit $code",
    "a group's signal comes once": 'setsid -w sh -c \'@ sh -c "trap \\"echo got\\" USR1; echo ready; touch up; until test -e sent; do :; done; sleep 0.5" & trap "" USR1; until test -e up; do sleep 0.02; done; kill -USR1 0; touch sent; wait; rm up sent\'',
    "a background child outlives": "@ sh -c 'sleep 0.2 > /dev/null 2>&1 & echo $? '",
    "a read-only TMPDIR": "TMPDIR=/proc @ sh -c 'exit 6'",
    "a TMPDIR that is not there": "TMPDIR=/nowhere @ sh -c 'exit 6'",
    "a preloaded library that is missing": "LD_PRELOAD=libnowhere.so @ sh -c 'exit 5' 2>/dev/null",
    "one weft in another": "@ @ sh -c 'exit 8'",
    "an alarm set before": f'{sys.executable} -c \'import os, signal; signal.alarm(2); os.execvp("sh", ["sh", "-c", "exec @ sleep 20"])\'',
    "PYTHONPATH with an empty entry": f"cd work; PYTHONPATH=:$PYTHONPATH @ {sys.executable} -c 'import sys, here; print(sys.path[1] == \"\" or here.__file__)'",
    "a module called weft": f"cd work; @ {sys.executable} -c 'import sys; sys.path.insert(0, \"own\"); import weft; print(weft.MINE)'",
    "stopped and continued": "@ sh -c 'kill -STOP $$; echo on' & until grep -q 'State:.T' /proc/$!/status; do sleep 0.02; done; kill -CONT $!; wait $!",
}


@pytest.fixture
def folder(tmp_path) -> Path:
    (tmp_path / "work" / "own").mkdir(parents=True)
    (tmp_path / "work" / "here.py").write_text("")
    (tmp_path / "work" / "own" / "weft.py").write_text("MINE = 'the program has its own'\n")
    (tmp_path / "tmp").mkdir()
    return tmp_path


def run(script: str, prefix: str, folder: Path, timeout: float = 60) -> tuple[int, str, list[str]]:
    env = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "TMPDIR": str(folder / "tmp"), "LC_ALL": "C"}
    done = subprocess.run(
        ["bash", "-c", script.replace("@ ", f"{prefix} " if prefix else "")],
        cwd=folder,
        env=env,
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
        preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_DFL),
    )
    left = sorted(
        str(path.relative_to(folder)) for path in folder.rglob("*") if "__pycache__" not in str(path)
    )
    return done.returncode, done.stdout, left


@pytest.mark.parametrize("name", CASES)
def test_a_shell_sees_no_difference(folder, name):
    assert run(CASES[name], WEFT, folder) == run(CASES[name], "", folder)


def test_a_preloaded_library_prints_as_often_as_without_weft(folder):
    source = folder / "chatty.c"
    source.write_text(
        "#include <stdio.h>\n#include <stdlib.h>\n#include <string.h>\nextern char *program_invocation_name;\n"
        "__attribute__((constructor)) static void say(void) {\n"
        '    if (strstr(program_invocation_name, "true")) puts("loaded");\n}\n'
    )
    library = compile_c(folder / "chatty.so", "-shared", "-fPIC", str(source))
    script = f"LD_PRELOAD={library} @ env true"
    assert run(script, WEFT, folder) == run(script, "", folder)


# --- full and read-only file systems ------------------------------------------------------------------------


@pytest.mark.skipif(not AS_ROOT or shutil.which("unshare") is None, reason="needs to mount")
@pytest.mark.parametrize(
    "spoil",
    ["cat /dev/zero > $place/full 2>/dev/null", "mount -o remount,ro $place"],
    ids=["full", "read-only"],
)
def test_a_full_or_read_only_tmpdir_costs_the_counters_only(folder, spoil):
    # The checkout may itself be in one of these places: bind it back before they fill up.
    script = f"""
        mount --bind {ROOT} /mnt || exit 99
        for place in /tmp /var/tmp /dev/shm; do mount -t tmpfs -o size=64k tmpfs $place || exit 99; done
        mkdir -p {ROOT} && mount --bind /mnt {ROOT} && cd {ROOT} || exit 99
        for place in /tmp /var/tmp /dev/shm; do {spoil}; done
        TMPDIR=/tmp @ sh -c 'exit 6'
    """
    argument = script.replace("@ ", f"{WEFT.replace('--quiet ', '')} ")
    env = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    done = subprocess.run(
        ["unshare", "-m", "sh", "-c", argument],
        env=env,
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    if done.returncode == 99 or "unshare failed" in done.stderr:
        pytest.skip("cannot mount here")
    assert done.returncode == 6, done.stderr
    assert "nothing is counted; set TMPDIR" in done.stderr


def test_a_signal_that_a_write_of_weft_causes_is_not_passed_on():
    """For example writing to a terminal that is gone while weft holds signals for the program."""
    source = """
import os
from weft.shim import launch
mask = launch.hold_signals()
reader, writer = os.pipe()
os.close(reader)
try:
    os.write(writer, b"a line")
except BrokenPipeError:
    os._exit(os.waitstatus_to_exitcode(launch.run(["sh", "-c", "exit 4"], os.environ, mask)))
"""
    env = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    done = subprocess.run([sys.executable, "-c", source], env=env, check=False, timeout=60)
    assert done.returncode == 4


# --- static and setuid programs -----------------------------------------------------------------------------


def test_static_programs_run(folder):
    source = folder / "plain.c"
    source.write_text("int main(void) { return 11; }")
    program = folder / "plain"
    try:
        compile_c(program, "-static", str(source))
    except subprocess.CalledProcessError:
        pytest.skip("no static libc")
    assert run(f"@ {program}", WEFT, folder)[0] == run(f"@ {program}", "", folder)[0] == 11


@pytest.mark.skipif(not AS_ROOT, reason="only root can make a program run as another user")
def test_setuid_programs_run(folder):
    source = folder / "who.c"
    source.write_text("#include <unistd.h>\nint main(void) { return geteuid() == 65534 ? 12 : 1; }")
    program = compile_c(folder / "who", str(source))
    os.chown(program, 65534, 65534)
    program.chmod(0o4755)
    plain = run(f"@ {program}", "", folder)[0]
    if plain != 12:
        pytest.skip("this file system ignores setuid")
    assert run(f"@ {program}", WEFT, folder)[0] == 12


@pytest.mark.skipif(not AS_ROOT or shutil.which("setpriv") is None, reason="needs setpriv")
def test_a_program_that_becomes_another_user_runs(folder):
    script = "@ setpriv --reuid 65534 --clear-groups sh -c 'id -u; exit 4'"
    assert run(script, WEFT, folder) == run(script, "", folder)


# --- builds that other loaders and runtimes start -----------------------------------------------------------


def test_a_program_with_a_sanitizer_runs(folder):
    source = folder / "clean.c"
    source.write_text("#include <stdlib.h>\nint main(void) { free(malloc(8)); return 13; }")
    try:
        program = compile_c(folder / "clean", "-fsanitize=address", str(source))
    except subprocess.CalledProcessError:
        pytest.skip("this compiler has no such sanitizer")
    assert run(f"@ {program}", WEFT, folder)[0] == 13


@pytest.mark.skipif(shutil.which("musl-gcc") is None, reason="needs musl-gcc")
def test_a_program_of_another_libc_runs(folder):
    source = folder / "other.c"
    source.write_text(
        "#include <dlfcn.h>\n#include <stdio.h>\n"
        'int main(void) { void *f = dlsym(RTLD_DEFAULT, "puts"); puts(f ? "found" : "lost"); return 14; }'
    )
    program = folder / "other"
    subprocess.run(["musl-gcc", "-o", str(program), str(source)], check=True)
    assert run(f"@ {program}", WEFT, folder) == run(f"@ {program}", "", folder)


# --- signals to weft itself, one by one -----------------------------------------------------------------------

CATCHABLE = sorted(set(signal.valid_signals()) - {signal.SIGKILL, signal.SIGSTOP})
# weft treats all real-time signals alike. CI keeps the first, and the last, which weft also uses itself.
ALIKE = range(signal.SIGRTMIN + 1, signal.SIGRTMAX)
ANSWER = """
import os, signal, sys, time
signal.signal(int(sys.argv[1]), lambda *_: os._exit(42))
print("ready", flush=True)
time.sleep(100)
"""


@pytest.mark.parametrize(
    "number",
    [pytest.param(number, marks=pytest.mark.slow if number in ALIKE else ()) for number in CATCHABLE],
)
def test_every_signal_that_can_be_caught_reaches_the_program(folder, number):
    env = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "TMPDIR": str(folder / "tmp")}
    command = [*WEFT.split(), sys.executable, "-c", ANSWER, str(int(number))]
    with subprocess.Popen(
        command, env=env, stdout=subprocess.PIPE, text=True, start_new_session=True
    ) as running:
        assert running.stdout is not None
        assert running.stdout.readline() == "ready\n"
        running.send_signal(number)
        assert running.wait(60) == 42
    assert not list((folder / "tmp").iterdir())


@pytest.mark.parametrize("number", [signal.SIGALRM, signal.SIGUSR1, signal.SIGTERM, signal.SIGPROF])
def test_a_storm_of_signals_is_answered_by_the_program(folder, number):
    script = f"""
import os, signal, time
got = 0
def note(*_):
    global got
    got += 1
signal.signal({int(number)}, note)
print("ready", flush=True)
end = time.monotonic() + 80
while got < 20 and time.monotonic() < end:
    time.sleep(0.01)
os._exit(0 if got >= 20 else 1)
"""
    env = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "TMPDIR": str(folder / "tmp")}
    command = [*WEFT.split(), sys.executable, "-c", script]
    with subprocess.Popen(
        command, env=env, stdout=subprocess.PIPE, text=True, start_new_session=True
    ) as running:
        assert running.stdout is not None
        assert running.stdout.readline() == "ready\n"
        while running.poll() is None:
            send(running, number)
            time.sleep(0.02)
        assert running.returncode == 0


@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGPROF, signal.SIGIO, signal.SIGTERM])
def test_a_signal_after_the_program_has_ended_does_not_change_its_exit_code(folder, number):
    """The report waits for a reader of its pipe, so the signal comes between the program's end and weft's."""
    os.mkfifo(folder / "stats")
    env = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "TMPDIR": str(folder / "tmp")}
    begin, _, rest = WEFT.partition(" run ")
    command = [*begin.split(), "run", "--stats", str(folder / "stats"), *rest.split()]
    command += [sys.executable, "-c", "print('over', flush=True); raise SystemExit(3)"]
    with subprocess.Popen(
        command, env=env, stdout=subprocess.PIPE, text=True, start_new_session=True
    ) as running:
        assert running.stdout is not None
        assert running.stdout.read() == "over\n"  # end of file: weft closed its copy, too
        time.sleep(0.3)
        running.send_signal(number)
        time.sleep(0.3)
        reader = os.open(folder / "stats", os.O_RDONLY | os.O_NONBLOCK)  # weft may end without a report
        end = time.monotonic() + 60
        while running.poll() is None and time.monotonic() < end:
            with suppress(BlockingIOError):
                os.read(reader, 4096)
            time.sleep(0.01)
        os.close(reader)
        assert running.returncode == 3


WITNESS = """
import os, signal, threading
from weft.shim import signals
os.setsid()
signal.pthread_sigmask(signal.SIG_BLOCK, signals.ALL)
witness = signals.Witness()
for send in (lambda: os.killpg(0, signal.SIGUSR1), lambda: os.kill(os.getpid(), signal.SIGUSR1)):
    os.kill(witness.pid, signal.SIGSTOP)
    send()
    info = signal.sigwaitinfo({signal.SIGUSR1})
    threading.Timer(0.3, os.kill, (witness.pid, signal.SIGCONT)).start()
    print(witness.saw(info.si_signo, info.si_pid))
witness.end()
"""


def test_a_groups_signal_is_told_from_one_to_weft_however_late_the_witness_runs():
    env = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    done = subprocess.run(
        [sys.executable, "-c", WITNESS], env=env, capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout == "True\nFalse\n"


COUNTING = """
import os, signal, time
got = 0
def note(*_):
    global got
    got += 1
signal.signal(signal.SIGUSR1, note)
print("ready", flush=True)
end = time.monotonic() + 60
while not got and time.monotonic() < end:
    time.sleep(0.01)
time.sleep(0.5)
os._exit(got)
"""


@pytest.mark.parametrize("selected", ["weft", "the program"])
def test_a_signal_to_all_processes_of_a_command_line_reaches_the_program_once(folder, selected):
    """As `pkill -f` selects them: `weft run` selects weft alone, a part of the program's command line both."""
    env = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "TMPDIR": str(folder / "tmp")}
    command = [*WEFT.split(), sys.executable, "-c", COUNTING]
    pattern = {"weft": b"weft\0run\0", "the program": b"got += 1"}[selected]
    with subprocess.Popen(
        command, env=env, stdout=subprocess.PIPE, text=True, start_new_session=True
    ) as running:
        assert running.stdout is not None
        assert running.stdout.readline() == "ready\n"
        found = [pid for pid in session(running.pid) if pattern in command_line(pid)]
        assert len(found) == {"weft": 1, "the program": 3}[selected]
        for pid in found:
            os.kill(pid, signal.SIGUSR1)
        assert running.wait(60) == 1


def session(leader: int) -> list[int]:
    """The processes of a session."""
    found = []
    for entry in Path("/proc").iterdir():
        with suppress(OSError, ValueError):
            if os.getsid(int(entry.name)) == leader:
                found.append(int(entry.name))
    return sorted(found)


def command_line(pid: int) -> bytes:
    return Path(f"/proc/{pid}/cmdline").read_bytes()


def test_a_signal_during_the_start_reaches_the_program_and_nothing_stays_behind(folder):
    """It arrives while weft checks the loader: the job's folder exists, the program does not."""
    (folder / "true").write_text("#!/bin/sh\ntouch checked; until test -e sent; do sleep 0.02; done\n")
    (folder / "true").chmod(0o755)
    env = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "TMPDIR": str(folder / "tmp")}
    env["PATH"] = f"{folder}:{env['PATH']}"
    for number in (signal.SIGTERM, signal.SIGINT):
        with subprocess.Popen([*WEFT.split(), "sleep", "100"], cwd=folder, env=env) as running:
            while not (folder / "checked").exists():
                assert running.poll() is None
                time.sleep(0.02)
            running.send_signal(number)
            (folder / "sent").touch()
            assert running.wait(60) == -number
        assert not list((folder / "tmp").iterdir())
        (folder / "checked").unlink()
        (folder / "sent").unlink()


def send(running: subprocess.Popen, number: int) -> None:
    with suppress(ProcessLookupError):
        running.send_signal(number)


# --- a terminal ---------------------------------------------------------------------------------------------------


def at_a_terminal(command: list[str], keys: list[tuple[str, bytes]], folder: Path) -> tuple[int, bytes]:
    """Run a command on its own terminal; type each key once its text has appeared."""
    env = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "TMPDIR": str(folder / "tmp"), "PS1": "$ "}
    pid, terminal = pty.fork()
    if pid == 0:
        os.execvpe(command[0], command, env)
    seen, end = b"", time.monotonic() + 50
    try:
        while time.monotonic() < end:
            if keys and keys[0][0].encode() in seen:
                time.sleep(0.3)  # the program may still be on its way into its next call
                os.write(terminal, keys.pop(0)[1])
            if not select.select([terminal], [], [], 0.1)[0]:
                continue
            try:
                data = os.read(terminal, 4096)
            except OSError:
                break
            if not data:
                break
            seen += data
    finally:
        os.close(terminal)
    _, status = os.waitpid(pid, 0)
    return status, seen


TERMINAL = {
    "control-C ends it": (
        ["sh", "-c", "@ sh -c 'echo here; sleep 20'; echo code $?; exit 0"],
        [("here", b"\x03")],
    ),
    "control-C is answered": (
        [
            "sh",
            "-c",
            "trap : INT; @ sh -c 'trap \"echo answered; exit 5\" INT; echo here; sleep 20'; echo code $?",
        ],
        [("here", b"\x03")],
    ),
    "control-backslash": (
        [
            "sh",
            "-c",
            "trap : QUIT; ulimit -c 0; @ sh -c 'trap \"echo quit; exit 6\" QUIT; echo here; sleep 20'; echo code $?",
        ],
        [("here", b"\x1c")],
    ),
    "it is a terminal": (
        ["sh", "-c", "@ sh -c 'test -t 0 && test -t 1 && tty > /dev/null && echo terminal'"],
        [],
    ),
    "typed input": (["sh", "-c", "@ sh -c 'echo here; read x; echo got $x'"], [("here", b"word\n")]),
    "control-Z and fg": (
        ["bash", "--norc", "--noprofile", "-i"],
        [
            ("$ ", b"@ sh -c 'echo he''re; until test -e $TMPDIR/go; do sleep 0.05; done; echo aw''ake'\n"),
            ("here", b"\x1a"),
            ("topped", b"touch $TMPDIR/go; fg\n"),
            ("awake", b"exit 0\n"),
        ],
    ),
}


@pytest.mark.parametrize("name", TERMINAL)
def test_a_terminal_sees_no_difference(folder, name):
    command, keys = TERMINAL[name]

    def outcome(prefix: str) -> tuple[int, list[str]]:
        words = [word.replace("@ ", prefix) for word in command]
        typed = [(when, key.replace(b"@ ", prefix.encode())) for when, key in keys]
        (folder / "tmp" / "go").unlink(missing_ok=True)
        status, seen = at_a_terminal(words, typed, folder)
        lines = [line.strip() for line in seen.decode(errors="replace").splitlines()]
        return status, [
            line
            for line in lines
            if line in ("answered", "quit", "terminal", "awake", "here", "got word")
            or line.startswith("code ")
        ]

    assert outcome(WEFT + " ") == outcome("")
