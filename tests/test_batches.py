"""Batches: an order that is a function of the number, and loss exactly on the answer's tokens."""

import pytest
import torch

from distill.batches import BatchStream, Example, collate
from distill.signals import TargetRows

EOS = 2


def _example(name: str, length: int, prompt_length: int) -> Example:
    count = max(length - prompt_length, 0)
    rows = TargetRows(torch.full((count, 4), float(length)), torch.zeros(count), torch.zeros(count))
    return Example(name, torch.arange(length), prompt_length, rows)


def _stream(seed: int = 0, max_tokens: int = 100) -> BatchStream:
    examples = [_example(str(i), 6 + i % 17, 3) for i in range(50)]
    return BatchStream(examples, max_tokens=max_tokens, seed=seed)


def test_loss_falls_on_the_answer_and_its_end_and_nowhere_else() -> None:
    rows = TargetRows(torch.zeros(3, 4), torch.zeros(3), torch.zeros(3))
    batch = collate([Example("a", torch.tensor([1, 5, 3, 4, 5, EOS]), 3, rows)])
    assert batch.positions.tolist() == [2, 3, 4]
    assert batch.labels.tolist() == [4, 5, EOS]


def test_padding_that_equals_eos_hides_no_eos() -> None:
    rows = TargetRows(torch.zeros(1, 4), torch.zeros(1), torch.zeros(1))
    short = Example("short", torch.tensor([7, 8, EOS]), 2, rows)
    batch = collate([short, _example("long", 6, 2)])
    width = batch.token_ids.shape[1]
    in_first_row = [p for p in batch.positions.tolist() if p < width]
    assert in_first_row == [1]
    assert batch.labels.tolist()[:1] == [EOS]


def test_signal_rows_stay_with_their_tokens() -> None:
    batch = _stream()(0)
    width = batch.token_ids.shape[1]
    for position, row in zip(batch.positions.tolist(), batch.rows.hidden, strict=True):
        tokens = batch.token_ids[position // width]
        length = int((tokens > 0).sum()) + 1  # ids are 0, 1, 2, ... and padding is 0
        assert row[0] == length


def test_an_epoch_holds_every_example_once() -> None:
    stream = _stream()
    seen: dict[int, list[str]] = {0: [], 1: []}
    number = 0
    while (epoch := stream.epoch_of(number)) < 2:
        seen[epoch] += stream(number).ids
        number += 1
    assert sorted(seen[0]) == sorted(seen[1]) == sorted(str(i) for i in range(50))
    assert seen[0] != seen[1]


def test_a_batch_is_a_function_of_seed_and_number() -> None:
    forward = [_stream()(number).ids for number in range(30)]
    stream = _stream()
    backward = [stream(number).ids for number in reversed(range(30))]
    assert forward == backward[::-1]
    assert forward != [_stream(seed=1)(number).ids for number in range(30)]


def test_a_batch_stays_within_its_tokens() -> None:
    stream = _stream(max_tokens=60)
    for number in range(40):
        assert stream(number).token_ids.numel() <= 60


def test_an_example_longer_than_a_batch_is_a_batch() -> None:
    stream = BatchStream([_example("long", 90, 3)], max_tokens=10, seed=0)
    assert stream(0).ids == ["long"]


def test_rows_without_a_loss_position_are_dropped_and_counted() -> None:
    stream = BatchStream([_example("a", 5, 5), _example("b", 6, 5)], max_tokens=10, seed=0)
    assert stream.num_dropped == 1
    assert stream(0).ids == ["b"]


def test_nothing_to_learn_from_is_an_error() -> None:
    with pytest.raises(ValueError, match="none of 2 answers has a token to learn from"):
        BatchStream([_example("a", 5, 5), _example("b", 4, 4)], max_tokens=10, seed=0)
