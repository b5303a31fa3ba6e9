"""BufferCache: rows grow, roll back, move and end on their own."""

import pytest
import torch

from specdec_runtime.cache import BufferCache


def write(cache, rows, values, *, num_new=None):
    """One pass of one layer: row i's new tokens hold `values[i]`; returns what attention sees."""
    new = torch.tensor(values, dtype=torch.float32)[:, None, :, None]  # [b, 1, Q, 1]
    counts = torch.full((len(values),), new.shape[2]) if num_new is None else torch.tensor(num_new)
    cache.begin_pass(rows, counts, new.shape[2])
    keys, _ = cache.update(new, new, 0)
    cache.lengths[slice(None) if rows is None else rows] += counts
    return keys[:, 0, :, 0].tolist()


def held(cache, row):
    return cache.keys_values(0, row)[0][0, :, 0].tolist()


def test_a_smaller_length_rolls_back_and_stale_slots_are_overwritten():
    cache = BufferCache(2, 64)
    write(cache, None, [[1, 2, 3], [4, 5, 6]])
    cache.truncate([1, 5])  # never grows
    assert cache.lengths.tolist() == [1, 3]
    write(cache, None, [[7, 8], [9, 0]], num_new=[2, 1])
    assert held(cache, 0) == [1, 7, 8]
    assert held(cache, 1) == [4, 5, 6, 9]
    cache.truncate([0], [0])
    assert cache.lengths.tolist() == [0, 4]


def test_attention_sees_no_more_than_the_longest_row_needs():
    cache = BufferCache(2, 1000)
    write(cache, None, [[1, 2, 3, 4], [5, 0, 0, 0]], num_new=[4, 1])
    assert len(write(cache, None, [[6], [7]])[0]) == 5
    assert len(write(cache, [1], [[8]])[0]) == 3


def test_rows_that_drop_out_and_come_back_keep_their_tokens():
    cache = BufferCache(4, 64)
    write(cache, None, [[row * 10, row * 10 + 1] for row in range(4)])
    seen = write(cache, [1, 3], [[12], [32]])
    assert [line[:3] for line in seen] == [[10, 11, 12], [30, 31, 32]]
    write(cache, [3], [[33]])
    write(cache, [0, 1, 2, 3], [[2], [13], [22], [34]])
    assert [held(cache, row) for row in range(4)] == [
        [0, 1, 2],
        [10, 11, 12, 13],
        [20, 21, 22],
        [30, 31, 32, 33, 34],
    ]
    cache.clear([1])
    write(cache, [1], [[99]])
    assert held(cache, 1) == [99]


def test_buffers_grow_by_more_than_they_must():
    cache = BufferCache(1, 5000)
    sizes = set()
    for start in range(0, 2000, 10):
        write(cache, None, [list(range(start, start + 10))])
        sizes.add(cache._keys[0].shape[2])
    assert held(cache, 0) == list(range(2000))
    assert len(sizes) <= 6  # copies stay a fraction of the work


def test_a_static_cache_never_changes_its_shape():
    cache = BufferCache(2, 300, static=True)
    shapes = set()
    for length in (5, 1, 100, 3):
        seen = write(cache, None, [[1] * length, [2] * length])
        shapes.add(len(seen[0]))
    assert len(shapes) == 1
    assert held(cache, 1) == [2] * 109


def test_a_path_through_a_tree_becomes_a_plain_sequence():
    cache = BufferCache(2, 64)
    write(cache, None, [[1, 2, 3], [4, 5, 6]])
    write(cache, None, [[10, 11, 12, 13, 14], [20, 21, 22, 23, 24]])
    cache.keep_path(0, 3, [3, 5, 7])
    cache.keep_path(1, 3, [3])
    assert held(cache, 0) == [1, 2, 3, 10, 12, 14]
    assert held(cache, 1) == [4, 5, 6, 20]


def test_more_tokens_than_it_holds_are_an_error_with_both_numbers():
    cache = BufferCache(1, 4)
    write(cache, None, [[1, 2, 3]])
    with pytest.raises(ValueError, match="holds 4 tokens a row, 5 are needed"):
        write(cache, None, [[4, 5]])
