"""Columns of names: hashes by the xxhash package, and what users give."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from featstore._core.names import copy_names, fill_slots, hash_names, number_keys
from featstore.idmaps.keys import IntKeys, TextKeys, joined, keys_of, mixed, ranges

# Every branch of the hash: 0, 1 to 3, 4 to 8, 9 to 16, 17 to 128, 129 to 240 bytes, and longer ones.
LENGTHS = [*range(260), 511, 512, 1023, 1024, 1025, 5000]


def test_hashes_are_those_of_the_package() -> None:
    rng = np.random.default_rng(1)
    names = [rng.bytes(n) for n in LENGTHS for _ in range(3)]
    offsets = np.concatenate(([0], np.cumsum([len(name) for name in names])))
    keys = TextKeys(offsets, np.frombuffer(b"".join(names), np.uint8))
    found = keys.hashes()
    assert found[:, 0].tolist() == [xxhash.xxh3_64_intdigest(name) for name in names]
    prime = 2**61 - 1
    for point in (0, 1, 123456789012345678, prime - 1):
        hash_names(offsets, keys.data, point, found)
        wanted = []
        for name in names:
            h = len(name) + 1
            for first in range(0, len(name), 7):
                h = (h * point + int.from_bytes(name[first : first + 7], "little")) % prime
            wanted.append(h)
        assert found[:, 1].tolist() == wanted


def test_names_that_were_made_to_collide_are_told_apart() -> None:
    # Products of xxh3's long form that are 0 for any seed below 2**32, so that the words there can change places.
    at, words = (480, 672), (b"aaa\xc3\xa9\xde\xac\xd8\x80aaa", b"aaaa\xcd\xb4Y1aaaa")
    one, other = bytearray(b"a" * 1280), bytearray(b"a" * 1280)
    for first, word in zip(at, words, strict=True):
        one[first : first + 12] = other[first : first + 12] = word
    one[at[1]] += 1
    other[at[0]] += 1
    for seed in (0, 1):
        assert xxhash.xxh3_64_intdigest(one, seed) == xxhash.xxh3_64_intdigest(other, seed)
    hashes = TextKeys.of([one.decode(), other.decode()]).hashes()
    assert hashes[0, 0] == hashes[1, 0]
    assert hashes[0, 1] != hashes[1, 1]


@given(st.lists(st.text()))
def test_text_comes_back(names: list[str]) -> None:
    keys = TextKeys.of(names)
    assert keys.texts() == names
    at = np.arange(len(names))[::-1]
    assert keys.take(at).texts() == names[::-1]
    assert (keys.take(at).hashes() == keys.hashes()[::-1]).all()
    half = len(names) // 2
    assert joined(keys.take(at[:half]), keys.take(at[half:])).texts() == names[::-1]  # type: ignore[union-attr]


@given(st.lists(st.integers(-(2**63), 2**63 - 1), unique=True))
def test_hashes_of_integers_are_distinct(values: list[int]) -> None:
    hashes = IntKeys(np.array(values, np.int64)).hashes()
    assert len(set(hashes[:, 0].tolist())) == len(values)
    assert (hashes[:, 0] == mixed(np.array(values, np.int64))).all()


@given(st.lists(st.tuples(st.integers(0, 50), st.integers(0, 5))))
def test_ranges_follow_one_another(pairs: list[tuple[int, int]]) -> None:
    begins, lengths = np.array(pairs, np.int64).reshape(-1, 2).T
    assert ranges(begins, lengths).tolist() == [i for begin, n in pairs for i in range(begin, begin + n)]


def test_names_of_users() -> None:
    assert keys_of(np.array(["a", "bc"]), "text").texts() == ["a", "bc"]  # type: ignore[union-attr]
    assert len(keys_of([], "text")) == len(keys_of([], "int64")) == 0
    for integers in ([3, -1], np.array([3, -1], np.int8), torch.tensor([3, -1], dtype=torch.int32), (3, -1)):
        assert keys_of(integers, "int64").values.tolist() == [3, -1]  # type: ignore[union-attr]
    for wrong, kind, message in (
        ("abc", "text", "must be a sequence"),
        (7, "int64", "must be a sequence"),
        (["a", 1], "text", "are text, not int: 1"),
        (["a"], "int64", "are integers"),
        ([1.5], "int64", "are integers, not float64"),
        (np.array([2**63], np.uint64), "int64", "beyond"),
    ):
        with pytest.raises(TypeError, match=message):
            keys_of(wrong, kind)


def test_wrong_arrays_are_refused() -> None:
    out = np.empty((1, 2), np.uint64)
    for offsets in ([0, 4], [2, 1], [-1, 1]):
        with pytest.raises(ValueError, match="name 0 does not lie within the 3 bytes"):
            hash_names(np.array(offsets, np.int64), np.zeros(3, np.uint8), 1, out)
    with pytest.raises(ValueError, match="one offset more"):
        hash_names(np.zeros(3, np.int64), np.zeros(3, np.uint8), 1, out)
    with pytest.raises(ValueError, match="the point must be below"):
        hash_names(np.array([0, 1]), np.zeros(3, np.uint8), 2**61 - 1, out)
    data = np.zeros(3, np.uint8)
    for begin, length, message in (
        (2, 2, "name 0 does not lie"),
        (-1, 1, "name 0 does not lie"),
        (0, 3, "no room"),
        (0, 1, "have 1 bytes"),
    ):
        with pytest.raises(ValueError, match=message):
            copy_names(np.array([begin]), np.array([length]), data, np.empty(2, np.uint8))
    with pytest.raises(ValueError, match="a begin and a length"):
        copy_names(np.zeros(2, np.int64), np.zeros(1, np.int64), data, np.empty(0, np.uint8))
    ids, firsts = np.empty(1, np.int64), np.empty(1, np.int64)
    with pytest.raises(ValueError, match="a power of two"):
        number_keys(np.zeros(6, np.uint32), out, 0, out, ids, firsts, True)
    with pytest.raises(ValueError, match="too few slots"):
        number_keys(np.zeros(4, np.uint32), np.zeros((9, 2), np.uint64), 8, out, ids, firsts, True)
    with pytest.raises(ValueError, match="keys are pairs"):
        number_keys(np.zeros(4, np.uint32), out, 2, out, ids, firsts, True)
    with pytest.raises(ValueError, match="a half more than the keys"):
        fill_slots(np.zeros(4, np.uint32), np.zeros((3, 2), np.uint64))
