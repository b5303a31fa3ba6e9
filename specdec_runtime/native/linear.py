"""A single matrix on the C++ kernels: the same bits for a row whatever rows are beside it."""

from ctypes import byref

import torch
from torch import Tensor, nn

from specdec_runtime.native import abi
from specdec_runtime.native.weights import pack_matrix


class NativeLinear:
    """[..., inputs] float32 -> [..., outputs] float32 of an nn.Linear without bias, copied."""

    def __init__(self, linear: nn.Linear) -> None:
        self._packed = pack_matrix(linear)
        self._outputs, self._inputs = linear.weight.shape

    @torch.no_grad()
    def __call__(self, x: Tensor) -> Tensor:
        rows = x.to(torch.float32).reshape(-1, self._inputs).contiguous()
        product = torch.empty(len(rows), self._outputs)
        abi.decoder().draftloop_logits(
            byref(self._packed.model),
            abi.pointer(rows),
            len(rows),
            torch.get_num_threads(),
            abi.pointer(product),
        )
        return product.view(*x.shape[:-1], self._outputs)
