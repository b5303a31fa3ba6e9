"""A transformers decoder behind the `CausalModel` protocol.

Runs the model's own code, quantised, spread over devices or not, on our `BufferCache`: explicit
positions, explicit 4D masks, no padding on the left. Hybrids of attention and recurrent layers
decode too (recurrent_pass.py). What cannot be rolled back row by row (purely recurrent,
encoder-decoder and multimodal models) is refused by name.

Shapes: b rows of one pass, Q new tokens, S slots, D hidden size, V vocabulary size.
"""

import inspect
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from specdec_runtime.cache import BufferCache
from specdec_runtime.compiled import CompiledDecoder, compiled_width
from specdec_runtime.decoding_check import check_decoding
from specdec_runtime.layer_access import Masks, PartialDecoder, decoder_layers, plan_pass
from specdec_runtime.layer_kinds import BOTH, RECURRENT, checked_layer_kinds, is_recurrent
from specdec_runtime.masks import additive, attention_mask
from specdec_runtime.model import ModelOutput
from specdec_runtime.positions import num_positions
from specdec_runtime.recurrent_cache import RecurrentCache
from specdec_runtime.recurrent_pass import forward_recurrent
from specdec_runtime.sampling import likeliest_columns


class HFModel:
    """Wraps a loaded transformers causal LM; the module is used as it is and stays trainable.

    Args:
        module: a decoder-only `...ForCausalLM`.
        compiled: run short passes through torch.compile, on cache buffers of fixed size.
        head_rows: [n] int64: compute only these rows of the head; logits then have n columns.
            They are copied: make a new HFModel after the weights have changed.

    Raises:
        ValueError: if the model or one of its layers cannot be decoded with roll-back.
    """

    def __init__(
        self, module: PreTrainedModel, *, compiled: bool = False, head_rows: Tensor | None = None
    ) -> None:
        self.module: Any = module
        self.config = module.config.get_text_config(decoder=True)
        self._layer_kinds = checked_layer_kinds(module, self.config)
        self.is_recurrent = is_recurrent(self._layer_kinds)
        # Layers that read what others keep cannot run without them.
        num_sharing = getattr(self.config, "num_kv_shared_layers", 0) or 0
        self.is_divisible = not self.is_recurrent and not num_sharing
        self._head: Any = module.get_output_embeddings()
        self.num_layers = self.config.num_hidden_layers
        self._num_caching = self.num_layers - num_sharing
        decoder = module.base_model
        if decoder is module:  # Llama 4's text model is not where its class says
            decoder = getattr(module, "model", module)
        self.layers = decoder_layers(decoder, self.num_layers)
        self._decoder = PartialDecoder(decoder, self.num_layers, _cache_argument(decoder))
        self.hidden_size = self.config.hidden_size
        self.max_positions = num_positions(self.config, type(module).__name__)
        self._compiled: CompiledDecoder | None = None
        check_decoding(self, _evaluating(module))
        if compiled:
            self._compiled = self._compile()
        if head_rows is not None:
            self._head = _sliced_head(self._head, head_rows)
        self.vocab_size = _num_rows(self._head)

    @property
    def weights_device(self) -> torch.device:
        """Where the first of the weights are."""
        return self.module.get_input_embeddings().weight.device

    @property
    def device(self) -> torch.device:
        """The weights' own, but the CPU for Apple's GPUs: they have no float64, in which
        probabilities are summed."""
        own = self.weights_device
        return torch.device("cpu") if own.type == "mps" else own

    @property
    def dtype(self) -> torch.dtype:
        return self.module.dtype

    def new_cache(self, batch_size: int, capacity: int) -> BufferCache:
        if self.is_recurrent:
            return RecurrentCache(batch_size, capacity)
        return BufferCache(batch_size, capacity, static=self._compiled is not None)

    @torch.no_grad()
    def forward(
        self,
        token_ids: Tensor,
        cache: BufferCache,
        *,
        num_new: Tensor | None = None,
        rows: Sequence[int] | None = None,
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
        """See `CausalModel.forward`."""
        wanted: dict[str, Any] = {
            "num_new": num_new,
            "rows": rows,
            "last_only": last_only,
            "logits": logits or likeliest_of is not None,
            "hidden_layers": hidden_layers,
        }
        if isinstance(cache, RecurrentCache):
            if visible is not None or layers is not None:
                raise ValueError(
                    "recurrent layers read a text from its start to its end: for this target draft "
                    "chains, with another model or a lookup"
                )
            output = forward_recurrent(self._forward, token_ids, cache, **wanted)
        else:
            output = self._forward(
                token_ids,
                cache,
                positions=positions,
                visible=visible,
                layers=layers,
                hidden_in=hidden_in,
                early_head=early_head,
                **wanted,
            )
        if likeliest_of is None or output.logits is None:
            return output
        likeliest = likeliest_columns(output.logits[..., :likeliest_of])
        return output._replace(logits=output.logits if logits else None, likeliest=likeliest)

    def _forward(
        self,
        token_ids: Tensor,
        cache: BufferCache,
        *,
        num_new: Tensor | None = None,
        rows: Sequence[int] | None = None,
        last_only: bool = False,
        logits: bool = True,
        hidden_layers: Sequence[int] = (),
        positions: Tensor | None = None,
        visible: Tensor | None = None,
        layers: tuple[int, int] | None = None,
        hidden_in: Tensor | None = None,
        early_head: bool = False,
    ) -> ModelOutput:
        """One pass of the decoder and its head."""
        num_rows, width = token_ids.shape
        counts = torch.full((num_rows,), width) if num_new is None else num_new.cpu()
        chosen = slice(None) if rows is None else list(rows)
        starts = cache.lengths[chosen].to(self.weights_device)
        span = layers or (0, self.num_layers)
        decoder, padded = self._runner(cache, span, width)
        place = cache.begin_pass(rows, counts, padded)
        if hidden_in is not None:
            hidden_in = nn.functional.pad(hidden_in, (0, 0, 0, padded - width))
            hidden_in = hidden_in.to(self.weights_device)
        with _evaluating(self.module):
            hidden, residuals = decoder(
                *self._inputs(token_ids, starts, padded, place.end, positions, visible),
                cache,
                plan_pass(self.num_layers, span, hidden_layers),
                hidden_in,
            )
        residuals = {k: residual[:, :width] for k, residual in residuals.items()}
        hidden = hidden[:, :width]  # [b, Q, D]
        cache.lengths[chosen] += counts
        if -1 in hidden_layers:
            residuals[-1] = hidden
        has_head = span[1] == self.num_layers or early_head
        scores = None
        if logits and has_head:
            if last_only and width > 1:
                last = (counts - 1).to(hidden.device)
                hidden = hidden[torch.arange(num_rows, device=hidden.device), last][:, None]
            scores = self.logits_of(hidden)
        return ModelOutput(scores, {k: h.float().to(self.device) for k, h in residuals.items()})

    def _runner(
        self, cache: BufferCache, span: tuple[int, int], width: int
    ) -> tuple[PartialDecoder | CompiledDecoder, int]:
        """What runs a pass, and the width that it is padded to."""
        padded = compiled_width(width, self.weights_device)
        caching = range(span[0], min(span[1], self._num_caching))
        if self._compiled is None or padded is None or not cache.is_allocated(caching):
            return self._decoder, width
        return self._compiled, padded

    @torch.no_grad()
    def logits_of(self, hidden: Tensor) -> Tensor:
        """[..., V] float32 logits of [..., D] post-norm hidden states."""
        weight = self._head.weight
        # A quantised head takes what the decoder gives it.
        if isinstance(weight, Tensor) and weight.dtype.is_floating_point:
            hidden = hidden.to(weight.dtype)
        if weight.device.type == "mps":
            hidden = hidden.to(weight.device)  # callers have it on the CPU, see `device`
        return self._scaled(self._head(hidden)).float().to(self.device)

    def _scaled(self, logits: Tensor) -> Tensor:
        """What some families do to the head's output; in the model's dtype, as they do it."""
        if (cap := getattr(self.config, "final_logit_softcapping", None)) is not None:
            logits = torch.tanh(logits / cap) * cap  # Gemma 2
        if (scale := getattr(self.config, "logit_scale", None)) is not None:
            logits = logits * scale  # Cohere
        if (divisor := getattr(self.config, "logits_scaling", None)) is not None:
            logits = logits / divisor  # Granite
        return logits

    def _inputs(
        self,
        token_ids: Tensor,
        starts: Tensor,
        width: int,
        num_slots: int,
        positions: Tensor | None,
        visible: Tensor | None,
    ) -> tuple[Tensor, Masks, Tensor]:
        """Token ids, masks and positions of a pass, padded to `width` tokens a row."""
        extra = width - token_ids.shape[1]
        padded_ids = nn.functional.pad(token_ids.to(self.weights_device), (0, extra))
        if positions is not None:
            positions = nn.functional.pad(positions.to(self.weights_device), (0, extra))
        if visible is not None:
            visible = nn.functional.pad(visible.to(self.weights_device), (0, extra, 0, extra))
        masks = self._masks(starts, width, num_slots, positions, visible)
        if positions is None:
            positions = starts[:, None] + torch.arange(width, device=self.weights_device)
        # Padding may lie past the last position, where a table of positions has no entry.
        return padded_ids, masks, positions.clamp_max(self.max_positions - 1)

    def _masks(
        self,
        starts: Tensor,
        width: int,
        num_slots: int,
        positions: Tensor | None,
        visible: Tensor | None,
    ) -> Masks:
        """One mask, or one per kind of layer for models that mix kinds."""
        masks: dict[str, Tensor | None] = {}
        for kind in {BOTH.get(kind, kind) for kind in self._layer_kinds} - {*RECURRENT}:
            mask = attention_mask(
                starts,
                width,
                num_slots,
                positions=positions,
                visible=visible,
                window=self.config.sliding_window if kind == "sliding_attention" else None,
                chunk=self.config.attention_chunk_size if kind == "chunked_attention" else None,
            )
            eager = self.config._attn_implementation == "eager"
            masks[kind] = additive(mask, self.dtype) if eager else mask
        if self.is_recurrent:
            masks |= dict.fromkeys(RECURRENT)  # nothing of a pass is padding
        return masks if len(masks) > 1 else next(iter(masks.values()))

    def _compile(self) -> CompiledDecoder:
        if self.is_recurrent:
            raise ValueError(
                f"{type(self.module).__name__} has recurrent layers, which are not compiled: use "
                "engine=eager"
            )
        return CompiledDecoder(self._decoder, self.weights_device)


def _cache_argument(decoder: nn.Module) -> str:
    """What the decoder's forward calls its cache."""
    names = set(inspect.signature(type(decoder).forward).parameters)
    if "position_ids" not in names:
        raise ValueError(
            f"{type(decoder).__name__} takes no position_ids, which rows of different lengths "
            "need: expected a decoder with rotary or learned positions"
        )
    for name in ("cache", "past_key_values"):  # renamed in 5.2x
        if name in names:
            return name
    raise ValueError(
        f"{type(decoder).__name__} takes no cache: decode it with transformers' own generate"
    )


def _sliced_head(head: Any, rows: Tensor) -> nn.Linear:
    with torch.no_grad():
        weight, bias = head.weight, getattr(head, "bias", None)
        rows = rows.to(weight.device)
        sliced = nn.Linear(weight.shape[1], len(rows), bias=bias is not None, device="meta")
        sliced.weight = nn.Parameter(weight[rows].clone(), requires_grad=False)
        if bias is not None:
            sliced.bias = nn.Parameter(bias[rows].clone(), requires_grad=False)
    return sliced


def _num_rows(head: Any) -> int:
    return getattr(head, "out_features", None) or head.weight.shape[0]


def _evaluating(module: nn.Module) -> "_Evaluating | nullcontext":
    return _Evaluating(module) if module.training else nullcontext()


class _Evaluating:
    """Eval mode (no dropout) for the length of a call, on a module that is being trained."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module

    def __enter__(self) -> None:
        self.training = [part for part in self.module.modules() if part.training]
        self.module.eval()

    def __exit__(self, *exception: object) -> None:
        for part in self.training:
            part.training = True
