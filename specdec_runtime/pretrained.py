"""Reading models and tokenizers through transformers, with errors that say what is wrong."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from transformers import AutoModelForCausalLM, AutoTokenizer, PretrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

SPREAD = "spread"  # in place of a device: over all that there are


def load_module(
    name: str | Path,
    *,
    dtype: torch.dtype | str = "auto",
    device: torch.device | str = "auto",
    revision: str | None = None,
    model_arguments: Mapping[str, Any] | None = None,
) -> PreTrainedModel:
    """A causal LM in eval mode; weights that are missing are an error.

    Args:
        name: hub id, folder, or GGUF file.
        dtype: "auto" = as stored; on CUDA bfloat16 where float32 is stored.
        device: "auto" = CUDA if present, else CPU; "spread" = over all devices that there are, layer
            by layer (device_map="auto"); a device_map in `model_arguments` rules.
        revision: of the hub repository.
        model_arguments: further arguments of `from_pretrained`.

    Raises:
        ValueError: if there is no such model or device, or the model is not complete.
    """
    arguments = dict(model_arguments or {})
    path = Path(name)
    if path.is_absolute() and not path.exists():
        raise ValueError(f"{name}: no such folder; expected a model folder, GGUF file or hub id")
    if path.suffix == ".gguf":
        arguments["gguf_file"] = path.name
        name = path.parent
    else:
        arguments["use_safetensors"] = True  # what else there is are pickles: loading one runs code
        arguments["ignore_mismatched_sizes"] = True  # reported, and an error below that names them
        _refuse_other_kinds(name, revision)
    if device == SPREAD:
        arguments.setdefault("device_map", "auto")
    chosen = _chosen_device(device)
    is_named = isinstance(dtype, str) and dtype != "auto"
    if is_named and not isinstance(getattr(torch, str(dtype), None), torch.dtype):
        raise ValueError(f"dtype is {dtype!r}, expected auto, float32, bfloat16 or the like")
    try:
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            name, dtype=dtype, revision=revision or "main", output_loading_info=True, **arguments
        )
    except SafetensorError as error:
        raise ValueError(f"the weights of {name} are damaged ({error}): copy them again") from None
    except (OSError, ValueError, TypeError, ImportError) as error:
        reason = str(error).strip().splitlines()[0]
        raise ValueError(f"no model can be loaded from {str(name)!r}: {reason}") from error
    module, report = loaded
    if report["missing_keys"]:  # transformers would go on with random numbers in their place
        missing = sorted(report["missing_keys"])
        raise ValueError(
            f"{name}: {len(missing)} weights are missing, {missing[0]} first: expected a complete "
            "model folder"
        )
    if report["mismatched_keys"]:
        key, stored, expected = min(report["mismatched_keys"])
        raise ValueError(
            f"{name}: weight {key} has shape {list(stored)}, its configuration says "
            f"{list(expected)}: expected a complete model folder"
        )
    if "device_map" not in arguments and not getattr(module, "is_quantized", False):
        module.to(device=chosen)
    is_cuda = module.device.type == "cuda"
    if dtype == "auto" and is_cuda and module.dtype == torch.float32:
        module.to(dtype=torch.bfloat16)
    return module.eval()


def _refuse_other_kinds(name: str | Path, revision: str | None) -> None:
    """Of an encoder-decoder transformers would take half, and of the rest it names only a class."""
    try:
        config, _ = PretrainedConfig.get_config_dict(name, revision=revision or "main")
    except OSError:
        return  # nothing there: loading says so
    kind = config.get("model_type")
    if config.get("is_encoder_decoder"):
        raise ValueError(f"{name} is an encoder-decoder model ({kind}): expected a decoder-only LM")
    has_other_input = "vision_config" in config or "audio_config" in config
    if has_other_input and kind not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        raise ValueError(f"{name} is a multimodal model ({kind}): load its text model alone")


def load_tokenizer(name: str | Path, *, revision: str | None = None) -> Any:
    """The tokenizer beside a model.

    Raises:
        ValueError: if there is none.
    """
    path = Path(name)
    extra = {"gguf_file": path.name} if path.suffix == ".gguf" else {}
    folder = path.parent if extra else name
    try:
        return AutoTokenizer.from_pretrained(folder, revision=revision or "main", **extra)
    except (OSError, ValueError) as error:
        reason = str(error).strip().splitlines()[0]
        raise ValueError(f"no tokenizer can be loaded from {str(name)!r}: {reason}") from error


def _chosen_device(device: torch.device | str) -> torch.device:
    if device in ("auto", SPREAD):
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        chosen = torch.device(device)
    except RuntimeError:
        raise ValueError(
            f"device is {device}, expected auto, cpu, cuda, cuda:1 or the like, or {SPREAD}"
        ) from None
    if chosen.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(
            f"device is {device}, but torch finds no CUDA device here: use cpu or auto"
        )
    return chosen
