"""Runs in vLLM's worker: does the temperature reach the verification of drafts there, and if not, a repair.

At T > 0 vLLM divides the target's logits by the temperature, repeated for every drafted token
(`expand_batch_to_tokens` of its rejection sampler). In the CPU build 0.32.0 the C++ stand-in for that
kernel converts its output to int64 and never copies it back (`_expand_kernel_impl` in
vllm/utils/cpu_triton_utils.py): the logits are divided by whatever that memory held before. Text drawn
behind a drafter is then not the target's, and how often a draft is accepted says nothing. The same holds
for top_k and top_p. Decoding without a drafter and greedy decoding do not pass there.
"""

import torch
from vllm.v1.sample import rejection_sampler


def repeated(x, counts_so_far, num_tokens, replace_from=0, replace_to=0):
    """[B] -> [num_tokens], each value as often as its request has drafted tokens; vLLM's signature."""
    counts = counts_so_far.diff(prepend=counts_so_far.new_zeros(1))
    return torch.where(x == replace_from, replace_to, x).repeat_interleave(counts)


class Temperature:
    """Becomes a base of vLLM's worker (`worker_extension_cls`); called by `collective_rpc`."""

    def repair_temperature(self) -> bool:
        """Whether vLLM's own function was wrong; if so it is replaced."""
        given = torch.tensor([0.5, 0.0])
        ends = torch.tensor([2, 3], dtype=torch.int32)
        found = rejection_sampler.expand_batch_to_tokens(given, ends, 3, 0, 1)
        is_wrong = found.tolist() != [0.5, 0.5, 1.0]
        if is_wrong:
            rejection_sampler.expand_batch_to_tokens = repeated
        return is_wrong
