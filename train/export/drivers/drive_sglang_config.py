"""Runs in vLLM's environment: what SGLang's own configuration class says of a drafter's folder.

What SGLang imports on the way and is not there (for GPUs, pictures, sound, notebooks, its server) is empty
here; none of it has to do with a drafter's configuration.
"""

import importlib.abc
import importlib.util
import json
import sys
from types import ModuleType, SimpleNamespace
from unittest.mock import MagicMock

from transformers import AutoProcessor  # before the stand-ins: it looks for torchvision too

MISSING = (
    "IPython",
    "flashinfer",
    "orjson",
    "scipy",
    "sgl_kernel",
    "torchaudio",
    "torchcodec",
    "torchvision",
)


class Empty(ModuleType):
    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return MagicMock()


class Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in MISSING:
            return importlib.util.spec_from_loader(name, self, is_package=True)
        return None

    def create_module(self, spec):
        module = Empty(spec.name)
        module.__path__ = []
        return module

    def exec_module(self, module):
        pass


def main() -> None:
    request = json.load(sys.stdin)
    assert AutoProcessor is not None
    sys.meta_path.insert(0, Finder())
    from sglang.srt.configs.model_config import ModelConfig
    from sglang.srt.speculative.eagle_utils import get_draft_input_from_target_hidden_dim

    found = []
    for folder in request["folders"]:
        config = ModelConfig(model_path=folder, is_draft_model=True, dtype="auto")
        algorithm = SimpleNamespace(is_eagle3=lambda: True)
        runner = SimpleNamespace(model_config=config, spec_algorithm=algorithm)
        found.append(
            {
                "architectures": config.hf_config.architectures,
                "vocab_size": config.vocab_size,
                "draft_vocab_size": getattr(config.hf_config, "draft_vocab_size", None),
                "head_dim": config.head_dim,
                "num_hidden_layers": config.num_hidden_layers,
                "states_width": get_draft_input_from_target_hidden_dim(runner),
            }
        )
    print("RESULT " + json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
