"""Counted bytes of each collective."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch.distributed import _functional_collectives as functional

from octavo import parallel
from octavo.parallel.wire import all_reduce_bytes
from tests import ranks


def _each(world: parallel.World) -> dict[str, dict[str, int]]:
    """Every collective once, of 1,200 bytes a rank where not said; rank 1 sends 3 rows of 8 bytes to rank 0, which
    sends one."""
    x, actual = torch.ones(300), {}

    def count(name: str, work) -> None:
        with parallel.CommCounter() as counted:
            work()
        actual[name] = dict(counted.bytes)

    count("gather", lambda: dist.all_gather_into_tensor(x.new_empty(600), x))
    count("gather of a list", lambda: dist.all_gather([torch.empty(300) for _ in range(2)], x))
    count("reduce", lambda: dist.reduce_scatter_tensor(x.new_empty(300), torch.ones(600)))
    count("sum", lambda: dist.all_reduce(x))
    count("figures", lambda: dist.all_reduce(torch.ones(3)))
    count("counts", lambda: dist.all_reduce(torch.ones(300, dtype=torch.float64)))
    count("exchange", lambda: dist.all_to_all_single(x.new_empty(300), x))
    sent, got = ([1, 1], [1, 3]) if world.rank == 0 else ([3, 1], [1, 1])
    rows = torch.ones(sum(sent), 2)
    count("rows", lambda: dist.all_to_all_single(rows.new_empty(sum(got), 2), rows, got, sent))
    group = dist.group.WORLD
    count("functional gather", lambda: functional.all_gather_tensor(x, 0, group).sum())
    count("functional reduce", lambda: functional.reduce_scatter_tensor(torch.ones(600), "sum", 0, group).sum())
    count("functional rows", lambda: functional.all_to_all_single(rows, got, sent, group).sum())
    return actual


@pytest.mark.filterwarnings("ignore")  # torch 2.13 has new names
def test_received_bytes_are_counted() -> None:
    first, second = ranks.run(_each, 2)
    whole = {"gather": 1200, "gather of a list": 1200, "functional gather": 1200}
    assert {name: first[name]["all_gather"] for name in whole} == whole
    assert first["reduce"] == first["functional reduce"] == {"reduce_scatter": 1200}
    assert first["sum"] == {"all_reduce": 1200}
    assert first["figures"] == {"figures": 12} and first["counts"] == {"figures": 2400}
    assert first["exchange"] == {"all_to_all": 600}
    assert first["rows"] == first["functional rows"] == {"all_to_all": 24}
    assert second["rows"] == second["functional rows"] == {"all_to_all": 8}


def test_all_reduce_bytes_with_uneven_pieces() -> None:
    assert [all_reduce_bytes(10, n) for n in (1, 2, 4)] == [0, 10, 18]
