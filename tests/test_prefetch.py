"""Prefetching: the same batches, made by one thread, ahead of time."""

import threading

import pytest
import torch

from tests.toy_training import ToyBatch, micro_batch
from train.prefetch import Prefetching

CPU = torch.device("cpu")


def test_the_batches_are_those_of_the_stream_in_any_order_of_asking():
    batches = Prefetching(micro_batch, stride=2, device=CPU)
    for number in (0, 2, 4, 1, 3, 3, 8):
        assert torch.equal(batches(number).token_ids, micro_batch(number).token_ids)


def test_the_next_one_is_made_by_another_thread_before_it_is_asked_for():
    made, ready = [], threading.Event()

    def stream(number: int) -> ToyBatch:
        made.append((number, threading.current_thread()))
        if number == 13:
            ready.set()
        return micro_batch(number)

    batches = Prefetching(stream, stride=3, device=CPU)
    batches(10)
    assert ready.wait(120)
    assert [number for number, _ in made] == [10, 13]
    assert len({thread for _, thread in made} - {threading.current_thread()}) == 1


def test_an_error_of_the_stream_reaches_whoever_asks_for_that_batch():
    def stream(number: int) -> ToyBatch:
        if number == 1:
            raise ValueError("batch 1 is damaged")
        return micro_batch(number)

    batches = Prefetching(stream, stride=1, device=CPU)
    batches(0)
    with pytest.raises(ValueError, match="batch 1 is damaged"):
        batches(1)
