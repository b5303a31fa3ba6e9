"""Which implementation of `CausalModel` runs a loaded module on the machine at hand."""

import warnings
from enum import Enum
from functools import cache

import torch
from torch import Tensor
from transformers import PreTrainedModel

from specdec_runtime import native
from specdec_runtime.compiled import compile_obstacle
from specdec_runtime.hf_model import HFModel
from specdec_runtime.model import CausalModel


class Engine(Enum):
    """How a model is run; `auto` takes the fastest that supports it."""

    auto = "auto"
    native = "native"  # the C++ decoder, CPU only
    eager = "eager"  # transformers' code as it is
    compiled = "compiled"  # transformers' code through torch.compile, static buffers

    @classmethod
    def _missing_(cls, value: object) -> "Engine":
        names = ", ".join(engine.value for engine in cls)
        raise ValueError(f"engine is {value!r}, expected one of {names}")


def make_model(
    module: PreTrainedModel,
    *,
    engine: Engine | str = Engine.auto,
    head_rows: Tensor | None = None,
    head_token_ids: Tensor | None = None,
) -> CausalModel:
    """A model ready to decode.

    Args:
        module: a loaded decoder-only model; the native engine copies its weights.
        engine: `auto` is the native engine on a CPU where it supports the model, else eager.
        head_rows: [n] int64, the only rows of the head to compute.
        head_token_ids: [n] int64, the tokens that the rows of a reduced head stand for.

    Raises:
        ValueError: the engine named cannot run this model; the message says why.
    """
    engine = Engine(engine)
    if engine is Engine.auto:
        reason = native_obstacle(module)
        if reason is None:
            engine = Engine.native
        else:
            if module.device.type == "cpu":
                _warn_once(f"decoding with transformers' own code, slower on a CPU: {reason}")
            engine = Engine.eager
    if engine is Engine.native:
        if reason := native_obstacle(module):
            raise ValueError(f"engine=native cannot run this model: {reason}; use engine=eager")
        return native.NativeModel.from_hf(
            module, head_rows=head_rows, head_token_ids=head_token_ids
        )
    compiled = engine is Engine.compiled
    if compiled and (reason := compile_obstacle(module.device)):
        _warn_once(f"decoding without compilation: {reason}")
        compiled = False
    return HFModel(module, head_rows=head_rows, compiled=compiled)


def native_obstacle(module: PreTrainedModel) -> str | None:
    """Why the native engine cannot run `module`; None if it can."""
    if module.device.type != "cpu":
        return f"the model is on {module.device}, the C++ decoder runs on CPUs"
    if any(parameter.is_meta for parameter in module.parameters()):
        return "some of its weights wait on disk or elsewhere (device_map)"
    if getattr(module, "is_quantized", False) or not _is_plain_float(module):
        return "its weights are quantised or in a dtype other than float32 and bfloat16"
    if reason := native.NativeModel.supports(module.config):
        return f"the C++ decoder does not support {reason}"
    return native.unavailable_reason()


def _is_plain_float(module: PreTrainedModel) -> bool:
    return all(p.dtype in (torch.float32, torch.bfloat16) for p in module.parameters())


@cache
def _warn_once(message: str) -> None:
    warnings.warn(message, stacklevel=4)
