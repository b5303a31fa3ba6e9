"""Random numbers of the runtime: one stream per row and purpose, and draws by inversion.

A stream is a seed and a counter, so a row's numbers depend on its seed and on how many it has
used: not on the device, nor on which other rows share the batch. Drafting and verification own
separate streams; a draft and the residual that share noise do not follow the target.
The generator is SplitMix64 (Steele et al. 2014, doi:10.1145/2660193.2660195): 64-bit integers
only, hence the same bits on every device and no Python loop over rows.

Shapes: N rows, V vocabulary.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

_GOLDEN = 0x9E3779B97F4A7C15
_MIX_1 = 0xBF58476D1CE4E5B9
_MIX_2 = 0x94D049BB133111EB


class UniformStreams:
    """Uniform numbers in [0, 1), one independent sequence per row.

    Args:
        seeds: one integer per row; rows with equal seeds get equal numbers.
        purpose: streams of different purposes are independent even for equal seeds.
    """

    def __init__(self, seeds: Sequence[int], *, purpose: int, device: torch.device | str = "cpu"):
        # The purpose is hashed before it meets the seed: seed + 1 of one purpose must not be
        # another purpose's seed.
        hashed_purpose = _mix(torch.tensor([_signed(purpose * _GOLDEN)]))
        keys = torch.tensor([_signed(seed) for seed in seeds], dtype=torch.int64)
        self._keys = _mix(_mix(keys) ^ hashed_purpose).to(device)  # [batch]
        self._used = torch.zeros_like(self._keys)  # [batch], numbers taken so far

    def take(self, rows: Sequence[int], count: int) -> Tensor:
        """The next `count` numbers of each row: [N, count] float64. The rows are distinct."""
        assert len(set(rows)) == len(rows), f"a row may take its noise once per call: {rows}"
        index = torch.tensor(list(rows), dtype=torch.int64, device=self._keys.device)
        ordinal = self._used[index, None] + torch.arange(1, count + 1, device=index.device)
        self._used[index] += count
        bits = _mix(self._keys[index, None] + ordinal * _signed(_GOLDEN))
        return _logical_shift(bits, 11).double() * 2.0**-53


def draw_by_inversion(probs: Tensor, uniforms: Tensor) -> Tensor:
    """Indices distributed as `probs`: the first whose cumulated mass exceeds u * total.

    The sum runs in float64: float32 would lose the tail of a large vocabulary. An index of
    probability zero is never returned.

    Args:
        probs: [N, V], non-negative; need not sum to one.
        uniforms: [N] or, for several draws of each row, [N, m]; float64 in [0, 1).

    Returns:
        int64, in the shape of `uniforms`.
    """
    cumulated = probs.double().cumsum(-1)
    total = cumulated[:, -1:]
    # u * total may round up to the total itself, which no cumulated mass exceeds.
    last = total.nextafter(torch.zeros_like(total))
    levels = torch.minimum((uniforms if uniforms.dim() > 1 else uniforms[:, None]) * total, last)
    return torch.searchsorted(cumulated, levels, right=True).reshape(uniforms.shape)


def _mix(state: Tensor) -> Tensor:
    """SplitMix64's output function; int64 products wrap around, as its 64-bit words do."""
    state = (state ^ _logical_shift(state, 30)) * _signed(_MIX_1)
    state = (state ^ _logical_shift(state, 27)) * _signed(_MIX_2)
    return state ^ _logical_shift(state, 31)


def _logical_shift(word: Tensor, bits: int) -> Tensor:
    """Right shift that brings in zeros; torch's own repeats the sign bit."""
    return (word >> bits) & ((1 << (64 - bits)) - 1)


def _signed(value: int) -> int:
    """The low 64 bits of `value` as the signed integer torch stores."""
    value &= (1 << 64) - 1
    return value - (1 << 64) if value >> 63 else value
