"""Reaching into a transformers decoder from outside: its layers, residuals and partial passes.

transformers exposes hidden states only as a whole tuple, with the last one already normed, and
has no way to run a part of the layers. Both are done here with plain forward hooks, so that the
model's own code runs for every architecture and no model is modified for longer than a call.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import Tensor, nn


def decoder_layers(decoder: nn.Module, num_layers: int) -> nn.ModuleList:
    """The list of the decoder's layers.

    Raises:
        ValueError: if no child of `decoder` is a list of `num_layers` modules.
    """
    for module in decoder.modules():
        if isinstance(module, nn.ModuleList) and len(module) == num_layers:
            return module
    raise ValueError(
        f"{type(decoder).__name__} has no list of {num_layers} layers: expected a decoder-only "
        "model from transformers"
    )


@contextmanager
def captured_residuals(
    layers: nn.ModuleList, wanted: Sequence[int], into: dict[int, Tensor]
) -> Iterator[None]:
    """While active, a forward pass stores the residual after k layers in `into[k]`, k in wanted."""
    with ExitStack() as stack:
        for k in wanted:
            if k == 0:
                handle = layers[0].register_forward_pre_hook(_keep_input(into), with_kwargs=True)
            else:
                handle = layers[k - 1].register_forward_hook(_keep_output(into, k))
            stack.callback(handle.remove)
        yield


@contextmanager
def only_layers(
    layers: nn.ModuleList, span: tuple[int, int], hidden_in: Tensor | None
) -> Iterator[None]:
    """While active, a forward pass runs layers [a, b) only, entered by `hidden_in` if given."""
    first, last = span
    with ExitStack() as stack:
        for index, layer in enumerate(layers):
            if not first <= index < last:
                # An instance attribute hides the class's forward; accelerate has put one there too
                # where a model is spread over devices.
                stack.callback(_put_back, layer, layer.__dict__.get("forward"))
                layer.forward = _pass_through
        if hidden_in is not None:
            handle = layers[first].register_forward_pre_hook(
                _replace_input(hidden_in), with_kwargs=True
            )
            stack.callback(handle.remove)
        yield


def _put_back(layer: nn.Module, forward: Callable | None) -> None:
    if forward is None:
        del layer.forward
    else:
        layer.forward = forward


def _pass_through(hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    return hidden_states


def _keep_input(into: dict[int, Tensor]) -> Callable:
    def hook(module: nn.Module, args: tuple, kwargs: dict) -> None:
        into[0] = args[0] if args else kwargs["hidden_states"]

    return hook


def _keep_output(into: dict[int, Tensor], k: int) -> Callable:
    def hook(module: nn.Module, args: tuple, output: Any) -> None:
        into[k] = output[0] if isinstance(output, tuple) else output

    return hook


def _replace_input(hidden_in: Tensor) -> Callable:
    def hook(module: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
        if args:
            return (hidden_in.to(args[0]), *args[1:]), kwargs
        return args, {**kwargs, "hidden_states": hidden_in.to(kwargs["hidden_states"])}

    return hook
