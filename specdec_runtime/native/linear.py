"""A single matrix on the C++ kernels: the same bits for a row whatever rows are beside it."""

from collections.abc import Sequence
from ctypes import byref, c_void_p

import torch
from torch import Tensor, nn
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from specdec_runtime.native import abi
from specdec_runtime.native.weights import pack_matrix, padded_vector


class NativeLinear:
    """[..., inputs] float32 -> [..., outputs] float32 of an nn.Linear without bias, copied.

    Args:
        norms: an input is as many parts side by side, each normed by its own in front of the
            product.
    """

    def __init__(self, linear: nn.Linear, norms: Sequence[LlamaRMSNorm] = ()) -> None:
        epsilons = {norm.variance_epsilon for norm in norms}
        assert len(epsilons) <= 1, epsilons
        self._packed = pack_matrix(linear, *epsilons)
        self._outputs, self._inputs = linear.weight.shape
        self._norm_weights = [padded_vector(norm.weight) for norm in norms]
        self._norms = (c_void_p * len(norms))(*map(abi.pointer, self._norm_weights))

    def __call__(self, x: Tensor) -> Tensor:
        rows = x.to(torch.float32).reshape(-1, self._inputs).contiguous()
        product = torch.empty(len(rows), self._outputs)
        model, sizes = byref(self._packed.model), (len(rows), torch.get_num_threads())
        pointers = abi.pointer(rows), *sizes, abi.pointer(product)
        if self._norm_weights:
            abi.decoder().draftloop_normed_logits(model, self._norms, len(self._norms), *pointers)
        else:
            abi.decoder().draftloop_logits(model, *pointers)
        return product.view(*x.shape[:-1], self._outputs)
