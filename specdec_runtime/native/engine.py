"""NativeModel: the C++ decoder behind the interface of `specdec_runtime.model`.

Each pass is one call into decoder.cpp. Threads: as many as `torch.get_num_threads()` says at the
time of the call; the results do not depend on it.

Shapes: b rows of one call, Q new tokens a row, D hidden size, V logit columns.
"""

from collections.abc import Callable, Sequence
from ctypes import byref, c_float

import torch
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedModel

from specdec_runtime.model import ModelOutput
from specdec_runtime.native import abi
from specdec_runtime.native.abi import Indices
from specdec_runtime.native.cache import NativeCache
from specdec_runtime.native.call import Call
from specdec_runtime.native.weights import PackedWeights, pack_weights, unsupported_reason


class NativeModel:
    """A decoder-only model that runs in C++ on the CPU. See `specdec_runtime.model.CausalModel`.

    Every result for a token is the same to the bit for any batch, number of new tokens, choice of
    rows, tree or chain, and number of threads.
    """

    device = torch.device("cpu")

    def __init__(self, config: PretrainedConfig, packed: PackedWeights):
        self.config = config
        self.vocab_size = packed.model.num_logits
        self.hidden_size = config.hidden_size
        self.num_layers = config.num_hidden_layers
        self.max_positions = config.max_position_embeddings
        self.dtype = packed.dtype
        self.matrix_dtype = packed.matrix_dtype
        self._packed = packed

    @staticmethod
    def supports(config: PretrainedConfig) -> str | None:
        """None if a model with this configuration can run here, else what stands against it."""
        return unsupported_reason(config)

    @classmethod
    def from_hf(
        cls,
        model: PreTrainedModel,
        *,
        weight_dtype: torch.dtype | None = None,
        head_rows: Tensor | None = None,
        head_token_ids: Tensor | None = None,
    ) -> "NativeModel":
        """Copies the weights of a transformers model.

        Args:
            weight_dtype: torch.bfloat16 or torch.float32. None = the shortest that changes no
                weight (fewer bytes, the same numbers): int8 with a power of two for each output
                (int8_grid.py), bfloat16, float32.
            head_rows: [n] int64: keep only these rows of the head; logits then have n columns.
            head_token_ids: [n] int64: the tokens that the columns stand for, where they are not
                the numbers of the rows.

        Raises:
            ValueError: if the model is not supported; the message names what is not.
            BuildError: if the decoder cannot be compiled here.
        """
        if reason := cls.supports(model.config):
            raise ValueError(f"the C++ decoder does not support {reason}; use HFModel")
        packed = pack_weights(
            model, weight_dtype=weight_dtype, head_rows=head_rows, head_token_ids=head_token_ids
        )
        return cls(model.config, packed)

    def new_cache(self, batch_size: int, capacity: int) -> NativeCache:
        """An empty cache for `batch_size` rows of up to `capacity` tokens each."""
        return NativeCache(self._packed, batch_size, capacity)

    def forward(
        self,
        token_ids: Tensor,
        cache: NativeCache,
        *,
        num_new: Tensor | None = None,
        rows: Indices | None = None,
        last_only: bool = False,
        logits: bool = True,
        likeliest_of: int | None = None,
        hidden_layers: Sequence[int] = (),
        positions: Tensor | None = None,
        visible: Tensor | None = None,
        layers: tuple[int, int] | None = None,
        hidden_in: Tensor | None = None,
        early_head: bool = False,
    ) -> ModelOutput:
        """Append `token_ids` to the cache and score what follows each of them.

        Args: as in `CausalModel.forward`, and
            early_head: apply the final norm and the head although `layers` ends earlier.

        Raises:
            ValueError: for token ids, rows, lengths, layers or a tree that do not fit.
        """
        call = Call(self._packed, token_ids, cache, num_new=num_new, rows=rows, layers=layers)
        call.set_tree(positions, visible)
        call.set_hidden_in(hidden_in)
        has_head = early_head or call.request.end_layer == self.num_layers
        hidden = call.want_hidden(hidden_layers, has_head)
        scores = call.want_logits(last_only) if logits and has_head else None
        likeliest = None
        if likeliest_of is not None and has_head:
            likeliest = call.want_likeliest(likeliest_of, last_only)
        call.check()
        abi.decoder().draftloop_forward(
            byref(self._packed.model), byref(cache.structure), byref(call.request)
        )
        return ModelOutput(logits=scores, hidden=hidden, likeliest=likeliest)

    def greedy_chain(
        self,
        token_ids: Tensor,
        cache: NativeCache,
        *,
        num_new: Tensor | None = None,
        rows: Indices | None = None,
        steps: int,
        layers: tuple[int, int] | None = None,
        hidden_in: Tensor | None = None,
        hands_on: int | None = None,
        proceed: Callable[[list[float]], bool] | None = None,
    ) -> Tensor:
        """Feeds the given tokens, then drafts by argmax without leaving the engine.

        The lowest id wins a tie, as in `torch.argmax`. The last drafted token is not fed: each row
        of the cache grows by num_new + steps - 1. `layers=(0, n)` drafts with the first n layers
        and the model's own norm and head.

        Args: as in `forward`, and
            hands_on: the layer whose hidden state of a row's last token enters the next step as
                its `hidden_in`; None = the next step starts from its token's embedding.
            proceed: called after every step with the probabilities of the b tokens drafted; the
                chain ends where it returns False.

        Returns: [b, steps taken] int64 token ids; with `head_rows`, ids of the full vocabulary.
        """
        if steps < 1:
            raise ValueError(f"steps={steps}: expected at least 1")
        call = Call(self._packed, token_ids, cache, num_new=num_new, rows=rows, layers=layers)
        call.set_hidden_in(hidden_in)
        if hands_on is not None:
            call.want_hidden([hands_on], has_head=True)
        call.want_logits(last_only=True)
        call.check(extra=steps - 1)
        drafted = torch.empty(len(token_ids), steps, dtype=torch.int64)
        confidences = (c_float * len(token_ids))()
        failed: list[BaseException] = []

        def ask() -> bool:
            assert proceed is not None
            try:
                return proceed(list(confidences))
            except BaseException as error:  # ctypes would print it and go on
                failed.append(error)
                return False

        taken = abi.decoder().draftloop_greedy_chain(
            byref(self._packed.model),
            byref(cache.structure),
            byref(call.request),
            steps,
            abi.pointer(drafted),
            confidences,
            abi.Proceed(ask) if proceed is not None else abi.Proceed(),
        )
        if failed:
            raise failed[0]
        return drafted[:, :taken]

    def logits_of(self, hidden: Tensor) -> Tensor:
        """[..., V] float32 logits of [..., D] post-norm hidden states (layer -1)."""
        rows = hidden.detach().to(torch.float32).reshape(-1, self.hidden_size).contiguous()
        logits = torch.empty(len(rows), self.vocab_size)
        abi.decoder().draftloop_logits(
            byref(self._packed.model),
            abi.pointer(rows),
            len(rows),
            torch.get_num_threads(),
            abi.pointer(logits),
        )
        return logits.view(*hidden.shape[:-1], self.vocab_size)
