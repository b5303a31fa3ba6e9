"""Reaching into a transformers decoder from outside: its layers, residuals and partial passes.

transformers exposes hidden states only as a whole tuple, with the last one already normed, and
has no way to run a part of the layers. Both are done here on a copy of the modules around the
layers, in which a stand-in calls each layer or leaves it out. So the model's own code runs for every
architecture, as it is or compiled, and the model itself is never modified.

Shapes: b rows, Q new tokens, D hidden size.
"""

import copy
from collections import OrderedDict
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

from torch import Tensor, nn
from transformers import Cache

Masks = Tensor | dict[str, Tensor | None] | None  # one, or by kind of layer; None: no padding


class Plan(NamedTuple):
    """What a pass does at the layers; truth values, as torch.compile makes variables of numbers."""

    runs: tuple[bool, ...]  # of each layer, in order
    keeps: tuple[bool, ...]  # k -> whether to return the residual after k layers


class DecoderOutput(NamedTuple):
    """What a pass under the head returns, in the model's dtype."""

    last: Tensor  # [b, Q, D] what the head reads
    residuals: dict[int, Tensor]  # layer k -> [b, Q, D] after k layers


def plan_pass(num_layers: int, span: tuple[int, int], wanted: Sequence[int]) -> Plan:
    """Layers [a, b) of `span` run, the residuals `wanted` are returned."""
    return Plan(
        tuple(span[0] <= k < span[1] for k in range(num_layers)),
        tuple(k in wanted for k in range(num_layers + 1)),
    )


def decoder_layers(decoder: nn.Module, num_layers: int) -> nn.ModuleList:
    """The list of the decoder's layers.

    Raises:
        ValueError: if no child of `decoder` is a list of `num_layers` modules.
    """
    layers = decoder.get_submodule(_path_to_layers(decoder, num_layers))
    assert isinstance(layers, nn.ModuleList)
    return layers


class PartialDecoder:
    """A decoder whose passes may begin and end between its layers, and tell the residuals there.

    Args:
        decoder: the module under the head; its weights are shared.
        num_layers: of the decoder.
        cache_argument: what its forward calls the cache.
    """

    def __init__(self, decoder: nn.Module, num_layers: int, cache_argument: str) -> None:
        path = _path_to_layers(decoder, num_layers)
        self._pass = _Pass(num_layers)
        stand_ins = [
            _stand_in(layer, partial(self._pass.through, k, layer))
            for k, layer in enumerate(decoder_layers(decoder, num_layers))
        ]
        self._decoder = _with_descendant(decoder, path.split("."), nn.ModuleList(stand_ins))
        self._cache_argument = cache_argument

    def __call__(
        self,
        token_ids: Tensor,
        masks: Masks,
        positions: Tensor,
        cache: Cache,
        plan: Plan,
        hidden_in: Tensor | None,
    ) -> DecoderOutput:
        """One pass.

        Args:
            hidden_in: [b, Q, D] residual that enters the first layer that runs; None = the tokens'
                embedding.
        """
        self._pass.begin(plan, hidden_in)
        last = self._decoder(
            input_ids=token_ids,
            attention_mask=masks,
            position_ids=positions,
            use_cache=True,
            **{self._cache_argument: cache},
        ).last_hidden_state
        return DecoderOutput(last, self._pass.end())


class _Pass:
    """What the stand-ins do in the pass under way. They know it, it knows no module: no cycle keeps
    the weights of a model that is no longer used."""

    def __init__(self, num_layers: int) -> None:
        self._layers_give_tuples = False  # those of some families; found out by running one
        self.begin(plan_pass(num_layers, (0, num_layers), ()), None)

    def begin(self, plan: Plan, hidden_in: Tensor | None) -> None:
        self._runs, self._keeps = plan
        self._hidden_in = hidden_in
        self._residuals: dict[int, Tensor] = {}

    def end(self) -> dict[int, Tensor]:
        residuals, self._residuals = self._residuals, {}
        return residuals

    def through(
        self, index: int, layer: nn.Module, hidden_states: Tensor, *args: Any, **kwargs: Any
    ) -> Tensor | tuple[Tensor, ...]:
        """Where the decoder calls layer `index`."""
        if self._runs[index] and self._hidden_in is not None:
            hidden_states = self._hidden_in.to(hidden_states)
            self._hidden_in = None
        if self._keeps[index]:
            self._residuals[index] = hidden_states
        output: Any = (hidden_states,) if self._layers_give_tuples else hidden_states
        if self._runs[index]:
            output = layer(hidden_states, *args, **kwargs)
            if isinstance(output, tuple) and not self._layers_give_tuples:
                self._layers_give_tuples = True
        num_layers = len(self._runs)
        if index + 1 == num_layers and self._keeps[num_layers]:
            self._residuals[num_layers] = output[0] if self._layers_give_tuples else output
        return output


def _stand_in(layer: nn.Module, forward: Callable[..., Any]) -> nn.Module:
    """A copy, as decoders read attributes of their layers; hooks are the layer's own matter."""
    stand_in = _copied(layer)
    stand_in._forward_hooks = OrderedDict()
    stand_in._forward_pre_hooks = OrderedDict()
    stand_in.forward = forward
    return stand_in


def _path_to_layers(decoder: nn.Module, num_layers: int) -> str:
    for name, module in decoder.named_modules():
        if isinstance(module, nn.ModuleList) and len(module) == num_layers:
            return name
    raise ValueError(
        f"{type(decoder).__name__} has no list of {num_layers} layers: expected a decoder-only "
        "model from transformers"
    )


def _with_descendant(module: nn.Module, path: Sequence[str], descendant: nn.Module) -> nn.Module:
    """A copy of `module` in which the module at `path` is another; all else is shared."""
    if not path:
        return descendant
    name, *rest = path
    copied = _copied(module)
    child = _with_descendant(module.get_submodule(name), rest, descendant)
    copied._modules = {**module._modules, name: child}
    return copied


def _copied(module: nn.Module) -> nn.Module:
    """A module with the same parts, which decodes: no dropout, no checkpointing."""
    copied = copy.copy(module)
    copied.training = False
    # accelerate puts a forward there that is bound to the original and moves inputs to its device;
    # the parts have theirs.
    copied.__dict__.pop("forward", None)
    return copied
