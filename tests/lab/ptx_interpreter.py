"""Runs the PTX of the paced kernel on the CPU, one thread after the other, on a clock that the test sets."""

from __future__ import annotations

import re
import struct
from collections.abc import Callable

import numpy as np

MASKS = {"8": 0xFF, "16": 0xFFFF, "32": 0xFFFFFFFF, "64": 0xFFFFFFFFFFFFFFFF}


class Memory:
    """Named arrays of bytes at made-up addresses."""

    def __init__(self) -> None:
        self._next, self._parts = 1 << 20, list[tuple[int, np.ndarray]]()

    def add(self, data: np.ndarray, misaligned: int = 0) -> int:
        address = self._next + misaligned
        self._parts.append((address, data.view(np.uint8).reshape(-1)))
        self._next = (address + data.nbytes + 4095) // 4096 * 4096
        return address

    def at(self, address: int, size: int) -> np.ndarray:
        for start, data in self._parts:
            if start <= address and address + size <= start + len(data):
                return data[address - start : address - start + size]
        raise AssertionError(f"access to {size} bytes at {address:#x} is outside of all buffers")


def run_kernel(
    text: str, work: bytes, memory: Memory, ctas: int, threads: int, clock: Callable[[int, int], int]
) -> None:
    """Run all threads. `clock(cta, reading)` is %globaltimer in ns at each of the CTA's readings."""
    body = re.sub(r"//.*", "", text[text.index("{\n") + 2 : text.rindex("}")])
    program, labels = [], dict[str, int]()
    for line in (part.strip() for part in body.replace(";", ";\n").splitlines()):
        if line.endswith(":"):
            labels[line[:-1]] = len(program)
        elif line and not line.startswith(".reg"):
            program.append(_parsed(line.rstrip(";")))
    for cta in range(ctas):
        for thread in range(threads):
            _run_thread(program, labels, work, memory, cta, ctas, thread, threads, clock)


def _parsed(line: str) -> tuple[str, list[str], list[str]]:
    guard = ""
    if line.startswith("@"):
        guard, line = line.split(None, 1)
    name, _, rest = line.partition(" ")
    arguments = re.findall(r"\{[^}]*\}|\[[^\]]*\]|[^,\s]+", rest)
    return guard, name.split("."), arguments


def _run_thread(program, labels, work, memory, cta, ctas, thread, threads, clock):
    special = {"%tid.x": thread, "%ntid.x": threads, "%ctaid.x": cta, "%nctaid.x": ctas}
    registers: dict[str, int] = {}
    readings = at = steps = 0

    def value(text: str) -> int:
        if text in special:
            return special[text]
        return registers[text] if text.startswith("%") else 0 if text == "work" else int(text, 0)

    def address(text: str) -> int:
        base, _, offset = text[1:-1].partition("+")
        return value(base) + int(offset or 0)

    while at < len(program):
        steps += 1
        assert steps < 200_000, "the kernel does not end"
        guard, name, given = program[at]
        at += 1
        if guard and bool(registers[guard.lstrip("@!")]) == ("!" in guard):
            continue
        width = next((part[1:] for part in name[1:] if part[0] in "ubs" and part[1:] in MASKS), "64")
        if name[0] == "ret":
            return
        if name[0] == "bra":
            at = labels[given[0]]
        elif name[0] in ("bar", "membar", "nanosleep"):
            continue
        elif name[0] == "mov" and given[1] in ("%globaltimer", "%clock64"):
            registers[given[0]] = clock(cta, readings)
            readings += given[1] == "%globaltimer"
        elif name[0] == "mov" and given[1].startswith("{"):
            low, high = (registers[part] for part in given[1][1:-1].split(", "))
            registers[given[0]] = low | high << 32
        elif name[0] == "mov" and given[0].startswith("{"):
            for place, part in enumerate(given[0][1:-1].split(", ")):
                registers[part] = registers[given[1]] >> 32 * place & MASKS["32"]
        elif name[0] in ("ld", "st") and name[1] == "volatile":
            size = int(width) // 8
            place, words = (given[1], given[0]) if name[0] == "ld" else (given[0], given[1])
            names = words[1:-1].split(", ") if words.startswith("{") else [words]
            for number, register in enumerate(names):
                cells = memory.at(address(place) + number * size, size)
                if name[0] == "ld":
                    registers[register] = int.from_bytes(cells.tobytes(), "little")
                else:
                    cells[:] = np.frombuffer(registers[register].to_bytes(size, "little"), np.uint8)
        elif name[0] == "ld":
            start = address(given[1])
            registers[given[0]] = int.from_bytes(work[start : start + int(width) // 8], "little")
        elif name[0] == "setp":
            a, b = value(given[1]), value(given[2])
            tests = {"ge": a >= b, "lt": a < b, "eq": a == b, "ne": a != b}
            registers[given[0]] = int(tests[name[1]])
        else:
            registers[given[0]] = _computed(name, [value(text) for text in given[1:]], width)


def _computed(name: list[str], given: list[int], width: str) -> int:
    operation, kind = name[0], name[-1]
    if kind in ("f32", "f64", "f16x2", "bf16x2", "f16", "bf16"):
        return _float(kind, given[0], given[1])  # mul, or fma with -0
    if operation == "cvt":
        return given[0] & MASKS[name[1][1:]]
    a, b = (*given, 0)[:2]
    wide = name[1] == "wide"
    result = {
        "mov": lambda: a,
        "add": lambda: a + b,
        "sub": lambda: a - b,
        "mul": lambda: a * b,
        "mad": lambda: a * b + given[2],
        "div": lambda: a // b,
        "rem": lambda: a % b,
        "and": lambda: a & b,
        "or": lambda: a | b,
        "shl": lambda: a << b,
        "shr": lambda: a >> b,
        "min": lambda: min(a, b),
        "max": lambda: max(a, b),
    }[operation]()
    return result & MASKS["64" if wide else width]


def _float(kind: str, a: int, b: int) -> int:
    if kind == "f64":
        x, y = (struct.unpack("<d", v.to_bytes(8, "little"))[0] for v in (a, b))
        return int.from_bytes(struct.pack("<d", x * y), "little")
    if kind == "f32":
        x, y = (struct.unpack("<f", v.to_bytes(4, "little"))[0] for v in (a, b))
        return int.from_bytes(np.float32(x * y).tobytes(), "little")
    if kind.endswith("x2"):
        halves = [_float(kind[:-2], a >> shift & 0xFFFF, b >> shift & 0xFFFF) for shift in (0, 16)]
        return halves[0] | halves[1] << 16
    if kind == "f16":
        x, y = (np.frombuffer(v.to_bytes(2, "little"), np.float16)[0] for v in (a, b))
        return int.from_bytes(np.float16(x * y).tobytes(), "little")
    return _float("f32", a << 16, b << 16) >> 16  # exact values only
