"""Philox: the published words, and random bits that depend only on the element."""

import pytest
import torch

from octavo.fp8.arithmetic import philox


def unsigned(x):
    return [value & 0xFFFFFFFF for value in x.tolist()]


def test_zero_key_and_counter_match_published_words():
    words = unsigned(philox.words(0, 0, 4, step=0, parameter=0))
    assert words == [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]


def test_words_match_plain_implementation():
    def plainly(counter, key):
        c, k, mask = list(counter), list(key), 0xFFFFFFFF
        for _ in range(10):
            p0, p1 = 0xD2511F53 * c[0], 0xCD9E8D57 * c[2]
            c = [(p1 >> 32) ^ c[1] ^ k[0], p1 & mask, (p0 >> 32) ^ c[3] ^ k[1], p0 & mask]
            k = [(k[0] + 0x9E3779B9) & mask, (k[1] + 0xBB67AE85) & mask]
        return c

    # the transcription itself, against the generator's published vector for pi's digits
    pi = plainly((0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344), (0xA4093822, 0x299F31D0))
    assert pi == [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1]
    seed = (0xFEDCBA98 << 32) | 0x76543210
    words = unsigned(philox.words(seed, (1 << 34) - 8, 8, step=0xFFFFFFFF, parameter=77))
    key = (0x76543210, 0xFEDCBA98)
    assert words[:4] == plainly((0xFFFFFFFE, 0xFFFFFFFF, 77, 0), key)
    assert words[4:] == plainly((0xFFFFFFFF, 0xFFFFFFFF, 77, 0), key)


@pytest.mark.parametrize(("start", "count"), [(0, 7), (1, 1), (3, 6), (127, 130), (5, 0)])
def test_an_element_has_the_same_word_in_every_range(start, count):
    full = philox.words(9, 0, 300, step=4, parameter=2)
    assert torch.equal(philox.words(9, start, count, step=4, parameter=2), full[start : start + count])


def test_step_parameter_and_seed_change_the_words():
    base = philox.words(1, 0, 64, step=1, parameter=0)
    for other in ((2, 1, 0), (1, 2, 0), (1, 1, 1), (1 + (1 << 40), 1, 0)):
        assert not torch.equal(philox.words(other[0], 0, 64, step=other[1], parameter=other[2]), base)


def test_elements_beyond_counter_are_rejected():
    with pytest.raises(ValueError, match="split it in two"):
        philox.words(0, philox.LIMIT - 1, 2, step=0, parameter=0)
