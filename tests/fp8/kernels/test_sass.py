"""Counting of machine instructions along the path that a thread executes."""

from __future__ import annotations

import pytest

from tests.fp8.kernels import sass

LOOP = """
        /*0000*/                   LDG.E.128 R4, desc[UR4][R2.64] ;
        /*0010*/               @P1 BRA `(.L_x_1) ;
        /*0020*/                   SEL R4, R4, RZ, P2 ;
.L_x_1:
        /*0030*/                   FCHK P0, R4, R5 ;
        /*0040*/               @P0 CALL.REL.NOINC `(.L_x_6) ;
.L_x_2:
        /*0050*/                   SYNCS.PHASECHK.TRANS64.TRYWAIT P0, [UR7], R3 ;
        /*0060*/              @!P0 BRA `(.L_x_5) ;
.L_x_3:
        /*0070*/                   WARPGROUP.ARRIVE ;
        /*0080*/                   QGMMA.64x128x32.F32.E4M3.E4M3 R24, gdesc[UR4], R24 ;
        /*0090*/                   FENCE ;
        /*00a0*/                   QGMMA.64x128x32.F32.E4M3.E4M3 R24, gdesc[UR8], R24, gsb0 ;
        /*00b0*/                   WARPGROUP.DEPBAR.LE gsb0, 0x0 ;
        /*00c0*/               @P3 BRA `(.L_x_2) ;
        /*00d0*/               @P4 EXIT ;
        /*00e0*/                   STG.E.128 desc[UR4][R2.64], R24 ;
        /*00f0*/                   EXIT ;
.L_x_5:
        /*0100*/                   SYNCS.PHASECHK.TRANS64.TRYWAIT P0, [UR7], R3 ;
        /*0110*/              @!P0 BRA `(.L_x_5) ;
        /*0120*/                   BRA `(.L_x_3) ;
.L_x_6:
        /*0130*/                   RET.REL.NODEC R2 `(kernel) ;
.L_x_4:
        /*0140*/                   BRA `(.L_x_4);
        /*0150*/                   NOP;
"""


def test_path_with_most_work_is_counted() -> None:
    results = sass.parsed(LOOP)
    way = [i.opcode for i in results.path()]
    assert "SEL" not in way and way[-2:] == ["STG.E.128", "EXIT"], "a store is no slow path, a select for tails is"
    assert results.executed() == 15 and len(results.instructions) == 22
    (step,) = results.steps()
    assert step[0].opcode.startswith("SYNCS") and step[-1].opcode == "BRA" and len(step) == 8


def test_dependent_products_are_serialized() -> None:
    assert not sass.parsed(LOOP).serialised()
    assert sass.parsed(LOOP.replace("                   FENCE ", "        WARPGROUP.ARRIVE ")).serialised()


def test_invalid_listing_is_rejected() -> None:
    with pytest.raises(ValueError, match="no instruction in this text: 'nothing'"):
        sass.parsed("nothing")
    with pytest.raises(ValueError, match=r"BRA goes to \.L_x_3, which is not in the text"):
        sass.parsed(LOOP.replace(".L_x_3:", ""))
    with pytest.raises(ValueError, match="BRX R4 goes where a register says"):
        sass.parsed(LOOP.replace("FCHK P0, R4, R5", "BRX R4"))
    assert sass.parsed(LOOP.replace("@P1 BRA `", "    BRA.U !UP0, `")).executed() == 15, "it may go on"
    by_register = LOOP.replace("FCHK P0, R4, R5", 'BRX R4 -0x10 (*"BRANCH_TARGETS .L_x_2,.L_x_4"*)')
    assert sass.parsed(by_register).executed() == 14
    with pytest.raises(ValueError, match="No way leads"):
        sass.parsed("/*0000*/ NOP;").path()
