"""Finds one fault of ptxas in Hopper machine code: a product (HGMMA) whose shared-memory descriptor comes from the wrong register.

A descriptor's low word is made of fourteen bits of an address (SGXT, ULOP3, …) and carried to the product by moves and
additions of constants. Walking back from each product over those, in the order of the text, must end at such an operation.
"""
from __future__ import annotations

import re
from typing import NamedTuple

_LINE = re.compile(r"/\*([0-9a-f]{4,5})\*/\s+(?:@!?U?P\d+\s+|@!?PT\s+)?([A-Z][\w.]*)\s+(.*?)\s*;")
_REGISTER = re.compile(r"(UR|R)(\d+)")
_NO_RESULT = ("ST", "HGMMA", "BAR", "BRA", "EXIT", "WARP", "DEPBAR", "LDGSTS", "MEMBAR", "ISETP", "FSETP", "NOP", "RED", "BS", "UISETP", "PLOP3",
              "FENCE", "SYNCS", "LDGDEPBAR")
_ORIGINS = ("SGXT", "USGXT", "LOP3", "ULOP3", "PRMT", "UPRMT", "LDL")       # LDL: spilled, and not followed further


class Instruction(NamedTuple):
    address: int
    op: str
    operands: list[str]


def parse(text: str) -> list[Instruction]:
    """Instructions of `cuobjdump -sass`, in order."""
    found = (_LINE.search(line) for line in text.splitlines())
    return [Instruction(int(m[1], 16), m[2], [x.strip().replace(".reuse", "") for x in m[3].split(",")]) for m in found if m]


def _results(ins: Instruction) -> list[str]:
    """The registers that an instruction writes."""
    m = _REGISTER.match(ins.operands[0])
    if ins.op.startswith(_NO_RESULT) or not m:
        return []
    words = 4 if ".128" in ins.op else 2 if ".64" in ins.op or ins.op.startswith(("CS2R", "IMAD.WIDE")) else 1
    return [f"{m[1]}{int(m[2]) + k}" for k in range(words)]


def _origin(code: list[Instruction], at: int, register: str, depth: int = 0) -> str:
    """The operation from which a descriptor word comes, through moves and additions of constants."""
    for n in range(at - 1, -1, -1):
        ins = code[n]
        written = _results(ins)
        if register not in written:
            continue
        sources = [m for m in map(_REGISTER.fullmatch, ins.operands[1:]) if m]
        word = written.index(register)
        if ins.op.startswith(("UIADD3", "IADD3")) and len(sources) == 2 and depth <= 16:
            return _of_sum(*(_origin(code, n, f"{m[1]}{int(m[2]) + word}", depth + 1) for m in sources)) or ins.op
        carried = ins.op.split(".")[0] in ("R2UR", "UMOV", "MOV", "IADD3", "UIADD3", "VIADD", "IADD") or ins.op.startswith(("IMAD.MOV", "IMAD.U32"))
        if not carried or len(sources) != 1 or depth > 16:
            return ins.op
        return _origin(code, n, f"{sources[0][1]}{int(sources[0][2]) + word}", depth + 1)
    return "nothing"


def _of_sum(one: str, other: str) -> str | None:
    """The origin of an address to which a constant in a register was added; None for any other sum."""
    for address, constant in ((one, other), (other, one)):
        if address.startswith(_ORIGINS) and constant == "UMOV":     # of a number: there was no register to follow
            return address
    return None


def misread_descriptors(text: str) -> list[str]:
    """One line for each product whose descriptor does not come from an address; empty where all is well."""
    code = parse(text)
    out: list[str] = []
    for n, ins in enumerate(code):
        if not ins.op.startswith("HGMMA") or ins.operands[0] == "RZ":        # which waits for others, and computes nothing
            continue
        place = next(k for k, x in enumerate(ins.operands) if x.startswith("gdesc"))
        base = int(re.search(r"UR(\d+)", ins.operands[place])[1])  # type: ignore[index]
        from_registers = place == 2                    # the first operand is in registers: one descriptor only
        for low in [base + 2] if from_registers else [base, base + 2]:
            origin = _origin(code, n, f"UR{low}")
            if not origin.startswith(_ORIGINS):
                out.append(f"{ins.address:#x}: UR{low} comes from {origin}")
    return out
