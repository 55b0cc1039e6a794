"""Keys and their permutations: equal on every machine, and never across the blocks of scales."""

from __future__ import annotations

import hashlib
import pickle

import numpy as np
import pytest
import torch

from octavo.base import encryption
from octavo.base.encryption.key import new_secret
from octavo.fp8.arithmetic import dequantize, quantize
from octavo.fp8.arithmetic.cast import CastSpec
from octavo.sealing import Key, SealError, read_key
from octavo.sealing.draw import draw_block_order, draw_head_orders, draw_order, invert
from tests.sealing.conftest import SECRET

USES = {
    "channels": (344, [(1, 0)]),
    "a ragged row of four": (192, [(1, 0), (1, 192), (1, 384), (1, 576)]),
    "gate and up in one": (344, [(1, 0), (1, 344)]),
    "four numbers a channel": (64, [(4, 0)]),
    "heads of 64 in q, k and v": (6, [(64, 0), (64, 384), (64, 768)]),
    "heads of 80": (32, [(80, 0)]),
}


@pytest.mark.parametrize("name", USES)
def test_permutation_keeps_blocks_together(key, name):
    size, uses = USES[name]
    order = draw_block_order(key, name, size, uses)
    assert sorted(order) == list(range(size)) and (order != np.arange(size)).any()
    for unit, offset in uses:
        places = offset + (np.arange(size)[:, None] * unit + np.arange(unit)).reshape(-1)
        moved = offset + (order[:, None] * unit + np.arange(unit)).reshape(-1)
        for block in (128, 32):
            for here in np.unique(places // block):
                assert len(np.unique(moved[places // block == here] // block)) == 1
    assert (invert(order)[order] == np.arange(size)).all()


def test_heads_stay_in_their_group(key):
    groups, every = draw_head_orders(key, "attention", 8, 4, [(128, 0)], [(128, 0)])
    assert (every.reshape(8, 4) // 4 == groups[:, None]).all() and len(set(every)) == 32
    assert (groups != np.arange(8)).any()
    alone, fixed = draw_head_orders(key, "attention", 2, 7, [(64, 0)], [(64, 0)])  # of 448 places: no whole blocks
    assert alone.tolist() == [0, 1] and fixed[6] == 6 and fixed[7] == 7


def test_draw_is_the_same_on_every_machine(key):
    drawn = (
        draw_order(key, "vocab", 1000).astype("<i8").tobytes()
        + draw_block_order(key, "res", 300, [(1, 0)]).astype("<i8").tobytes()
    )
    assert hashlib.sha256(drawn).hexdigest() == "50b16fe936e1251ce58cc390ff819effab7588030ae9e209a4f2da8a99193b06"
    assert (draw_order(Key(SECRET[::-1]), "vocab", 1000) != draw_order(key, "vocab", 1000)).any()
    assert (draw_order(key, "patch", 1000) != draw_order(key, "vocab", 1000)).any()


SPECS = [
    CastSpec("e4m3", block=(1, 128), scale="pow2"),
    CastSpec("e4m3", block=(128, 128), scale="pow2"),
    CastSpec("e4m3", block=(128, 1), scale="pow2"),
    CastSpec("e4m3", block=(1, 32), scale="pow2"),
    CastSpec("e4m3", block=(1, -1)),
    CastSpec("e4m3", block=(-1, -1)),
]


@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_fp8_scales_move_with_their_blocks(key, spec):
    """The codes of a sealed matrix are the sealed codes, bit for bit, and its scales those of the plain one."""
    values = torch.randn(344, 320, generator=torch.Generator().manual_seed(0)) * torch.logspace(-3, 2, 320)
    rows, columns = (
        torch.from_numpy(draw_block_order(key, n, s, [(1, 0)])) for n, s in (("rows", 344), ("columns", 320))
    )
    plain, sealed = quantize(values, spec), quantize(values[rows][:, columns], spec)
    assert torch.equal(sealed.scale.flatten().sort()[0], plain.scale.flatten().sort()[0])
    assert torch.equal(dequantize(sealed), dequantize(plain)[rows][:, columns])


def test_key_is_not_shown(tmp_path, key_file, key):
    """Key files are the vault's; tests/encryption/test_key.py has what else is refused."""
    new_secret(tmp_path / "new.key")
    assert read_key(tmp_path / "new.key").fingerprint != read_key(key_file).fingerprint == key.fingerprint
    with pytest.raises(encryption.NoKey, match="existing keys are never replaced"):
        new_secret(key_file)
    with pytest.raises(SealError, match="a key cannot be pickled"):
        pickle.dumps(key)
    assert SECRET.hex() not in repr(key) + str(vars(Key))
