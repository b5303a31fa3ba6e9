"""Splits that can not leak, and mixtures by share."""

import hashlib
import random
from collections.abc import Collection, Sequence

from distill.prompt import Prompt, normalised

_HELD_OUT_BUCKETS = 1000


def split(prompts: Sequence[Prompt], held_out_fraction: float) -> dict[bool, list[Prompt]]:
    """{False: for training, True: held out}, by a hash of what each prompt is about.

    Both sides get something where that is possible: with few prompts none may hash to the smaller
    side, and then the prompts about the thing with the smallest hash are held out.
    """
    limit = round(held_out_fraction * _HELD_OUT_BUCKETS)
    buckets = {prompt.id: _bucket(prompt) for prompt in prompts}
    if buckets and min(buckets.values()) >= limit:
        limit = min(buckets.values()) + 1
    sides: dict[bool, list[Prompt]] = {False: [], True: []}
    for prompt in prompts:
        sides[buckets[prompt.id] < limit].append(prompt)
    return sides


def mixture(
    prompts: dict[str, list[Prompt]],
    shares: dict[str, float],
    size: int,
    *,
    seed: int,
    without: Collection[str] = (),
) -> list[Prompt]:
    """At most `size` prompts by share, shuffled; every beginning of the list has about the mix.

    A source that runs out leaves its places to the others.

    Args:
        without: ids that are left out; what is left keeps its order.
    """
    queues = {
        name: [prompt for prompt in _shuffled(items, seed) if prompt.id not in without]
        for name, items in sorted(prompts.items())
    }
    taken = dict.fromkeys(queues, 0)
    mixed: list[Prompt] = []
    while len(mixed) < size:
        open_sources = [name for name, queue in queues.items() if taken[name] < len(queue)]
        if not open_sources:
            break
        # The source that lags most behind its share is next.
        name = min(open_sources, key=lambda source: (taken[source] + 1) / shares[source])
        mixed.append(queues[name][taken[name]])
        taken[name] += 1
    return mixed


def distinct(prompts: Sequence[Prompt]) -> list[Prompt]:
    """The prompts without repetitions, compared as `normalised`; the first of each stays.

    Two places of one conversation are not the same prompt, even if no user spoke in between.
    """
    first: dict[tuple[str, int], Prompt] = {}
    for prompt in prompts:
        first.setdefault((normalised(prompt), len(prompt.messages)), prompt)
    return list(first.values())


def _bucket(prompt: Prompt) -> int:
    about = prompt.about or normalised(prompt)
    digest = hashlib.sha256(about.encode("utf-8", "surrogatepass")).digest()
    return int.from_bytes(digest[:8], "big") % _HELD_OUT_BUCKETS


def _shuffled(prompts: Sequence[Prompt], seed: int) -> list[Prompt]:
    return random.Random(seed).sample(list(prompts), len(prompts))
