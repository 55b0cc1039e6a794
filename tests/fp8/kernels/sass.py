"""Count the instructions of a compiled kernel in its machine code (SASS), by the disassembler of Triton.

PTX does not tell: ``ptxas`` moves, merges and spills, and may set a wait after each matrix product (C7515). Here::

    listing = disassembled(compiled.asm["cubin"])
    listing.executed()      instructions that a thread issues from entry to exit, each loop counted once
    listing.loops()         one list for each innermost loop: a step of it
    listing.steps()         the same for loops that multiply on the tensor cores
    listing.serialised()    whether such a step waits after every product of Hopper (wgmma)

Of several ways through the code the one with most accesses to global memory and matrix products is taken, and of those
the shortest. So a skipped store does not count as speed, and what only slow paths do (a division of a subnormal, a
ragged tile, a barrier that is waited for) is left out.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

_LINE = re.compile(r"^\s*/\*[0-9a-f]{4,}\*/\s+(?:@(!?U?P\w+)\s+)?([A-Z][\w.]*)\s*([^;]*);")
_LABEL = re.compile(r"^\s*(\.L_x_\w+):")
_TARGET = re.compile(r"`\((\.L_x_\w+)\)")
_SEVERAL = re.compile(r"(?<!`\()\.L_x_\w+")
_TENSOR = re.compile(r"^(?:[HIQO]MMA|[HIQO]GMMA|UTC\w*MMA)\b")
_GLOBAL = re.compile(r"^(?:LDG|STG|RED|ATOM|UTMALDG|UTMASTG)")
_ENDS = ("EXIT", "RET")


class Instruction(NamedTuple):
    """``target``: where a branch goes, as an index into the listing; None for what is no branch. ``targets``: where one
    by a register may go."""

    predicate: str | None
    opcode: str
    operands: str
    target: int | None
    targets: tuple[int, ...] = ()

    @property
    def tensor(self) -> bool:
        """Whether it is a product on the tensor cores."""
        return _TENSOR.match(self.opcode) is not None

    @property
    def work(self) -> bool:
        """Whether it is what the kernel is for: an access to global memory, or a product."""
        return self.tensor or _GLOBAL.match(self.opcode) is not None


class Listing:
    """The instructions of one kernel, in their order."""

    def __init__(self, instructions: list[Instruction]) -> None:
        self.instructions = instructions

    def executed(self) -> int:
        """Instructions from entry to exit: the way with most work, the shortest of those; a loop's body once."""
        return len(self.path())

    def path(self) -> list[Instruction]:
        """That way. Raises ValueError if none leads to an exit."""
        way = self._way(0, None)
        if not way:
            raise ValueError("No way leads from the first instruction to an exit.")
        return way

    def steps(self) -> list[list[Instruction]]:
        """One step of each innermost loop with matrix products."""
        return self.loops(lambda way: any(i.tensor for i in way))

    def loops(self, counts: Callable[[list[Instruction]], bool] = bool) -> list[list[Instruction]]:
        """One step of each innermost loop for which ``counts``, as the way through it that does most work."""
        ways: dict[tuple[int, int], list[Instruction]] = {}
        for last, found in enumerate(self.instructions):
            if found.target is not None and found.target <= last and not found.opcode.startswith("CALL"):
                way = self._way(found.target, last)  # none: a wait, out of line, that goes back into the line
                if counts(way):
                    ways[found.target, last] = way
        return [way for loop, way in sorted(ways.items()) if not any(_within(other, loop) for other in ways)]

    def serialised(self) -> bool:
        """Whether in some step each of several wgmma stands between a fence and a wait of its own."""
        for step in self.steps():
            products = sum("GMMA" in i.opcode for i in step)
            fences = sum(i.opcode.startswith("WARPGROUP.ARRIVE") for i in step)
            if products > 1 and fences >= products:
                return True
        return False

    def _way(self, first: int, last: int | None) -> list[Instruction]:
        """From ``first`` to an exit, or to the branch at ``last`` that goes back to it; empty if there is none."""
        best: dict[int, tuple[int, int, int | None]] = {}  # work, minus instructions, the next one
        end = len(self.instructions) if last is None else last + 1
        for at in reversed(range(first, end)):
            found = self.instructions[at]
            ways: list[tuple[int, int, int | None]] = []
            if at == last or (last is None and found.opcode.split(".")[0] in _ENDS):
                ways.append((0, 0, None))
            following = [] if found.predicate is None and _leaves(found) else [at + 1]
            if found.target is not None and found.target > at and not found.opcode.startswith("CALL"):
                following.append(found.target)
            following += [target for target in found.targets if target > at]
            ways += [(*best[i][:2], i) for i in following if i in best]
            if ways:
                work, short, then = max(ways, key=lambda way: way[:2])
                best[at] = work + found.work, short - 1, then
        way: list[Instruction] = []
        at: int | None = first if first in best else None
        while at is not None:
            way.append(self.instructions[at])
            at = best[at][2]
        return way


def _within(inner: tuple[int, int], outer: tuple[int, int]) -> bool:
    return inner != outer and outer[0] <= inner[0] and inner[1] <= outer[1]


def _leaves(found: Instruction) -> bool:
    """Whether what follows is not reached unless by a branch."""
    kind = found.opcode.split(".")[0]
    return kind in (*_ENDS, "BRX") or (kind == "BRA" and found.operands.startswith("`"))  # BRA.U !UP0, ... may not


def parsed(text: str) -> Listing:
    """The listing of the one kernel in ``nvdisasm``'s text.

    Raises:
        ValueError: no instruction, or a branch whose target is not in the text.
    """
    results: list[tuple[str | None, str, str]] = []
    labels: dict[str, int] = {}
    for line in text.splitlines():
        label, instruction = _LABEL.match(line), _LINE.match(line)
        if label is not None:
            labels[label.group(1)] = len(results)
        elif instruction is not None:
            predicate, opcode, operands = instruction.groups()
            results.append((predicate, opcode, operands.strip()))
    if not results:
        raise ValueError(f"There is no instruction in this text: {text.strip()[:200]!r}")
    full = []
    for predicate, opcode, operands in results:
        several = tuple(labels[label] for label in _SEVERAL.findall(operands)) if opcode.startswith("BRX") else ()
        if opcode.startswith("BRX") and not several:
            raise ValueError(f"{opcode} {operands} goes where a register says; ways through it are not known.")
        named = _TARGET.search(operands) if opcode.startswith(("BRA", "CALL")) else None
        if named is not None and named.group(1) not in labels:
            raise ValueError(f"{opcode} goes to {named.group(1)}, which is not in the text.")
        full.append(
            Instruction(predicate, opcode, operands, None if named is None else labels[named.group(1)], several)
        )
    return Listing(full)


def disassembled(cubin: bytes) -> Listing:
    """The listing of the one kernel in a cubin.

    Raises:
        RuntimeError: the disassembler does not take it.
        ValueError: see :func:`parsed`.
    """
    import triton

    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "nvdisasm"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        done = subprocess.run([tool, "-c", file.name], capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{tool.name} -c failed: {done.stderr.strip()[-200:]!r}")
    return parsed(done.stdout)
