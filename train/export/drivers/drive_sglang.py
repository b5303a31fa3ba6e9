"""Runs in vLLM's environment: what SGLang's own EAGLE-3 model file drafts with a folder.

SGLang asks for CUDA packages before it imports. Its two model files (models/llama.py and
models/llama_eagle3.py) run here as they are: how they read the configuration and its defaults, the names
of weights, offsets and layer ids, and in what order they norm, fuse and add. Only what they import is
replaced by the plain mathematics of the same layers, in float32 on a CPU. A reader of the format, then;
its server, its kernels and its verification are not run.
"""

import contextlib
import importlib.abc
import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import torch
from safetensors.torch import load_file
from torch import nn
from transformers import AutoConfig

OWN_FILES = ("sglang.srt.models.llama", "sglang.srt.models.llama_eagle3")


class RMSNorm(nn.Module):
    """Adds the residual, if there is one, and hands the sum on."""

    def __init__(self, size, eps):
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.full((size,), torch.nan)), eps

    def forward(self, x, residual=None):
        x = x if residual is None else x + residual
        normed = nn.functional.rms_norm(x, x.shape[-1:], self.weight, self.eps)
        return normed if residual is None else (normed, x)


class Stacked(nn.Module):
    """Linear layers side by side, each filled by its shard's name."""

    def __init__(self, size, sizes, bias):
        super().__init__()
        assert not bias, "no bias is exported for SGLang"
        self.weight = nn.Parameter(torch.full((sum(sizes.values()), size), torch.nan))
        # SGLang asks the parameter itself how it is filled.
        setattr(self.weight, "weight_loader", lambda _, *part: self._fill(sizes, *part))  # noqa: B010

    def _fill(self, sizes, loaded, shard):
        first = sum(list(sizes.values())[: list(sizes).index(shard)])
        with torch.no_grad():
            copy(self.weight[first : first + sizes[shard]], loaded)

    def forward(self, x):
        return x @ self.weight.T, None


def qkv(size, head_dim, heads, groups, bias=False, **_):
    return Stacked(
        size, {"q": heads * head_dim, "k": groups * head_dim, "v": groups * head_dim}, bias
    )


def merged(size, sizes, bias=False, **_):
    return Stacked(size, dict(enumerate(sizes)), bias)


class Row(nn.Module):
    def __init__(self, size, out, bias=False, **_):
        super().__init__()
        assert not bias, "no bias is exported for SGLang"
        self.weight = nn.Parameter(torch.full((out, size), torch.nan))

    def forward(self, x):
        return x @ self.weight.T, None


class Head(nn.Module):
    def __init__(self, rows, size, **_):
        super().__init__()
        self.weight = nn.Parameter(torch.full((rows, size), torch.nan))

    def forward(self, ids):
        return nn.functional.embedding(ids, self.weight)


class SiluAndMul(nn.Module):
    def forward(self, x):
        gate, up = x.chunk(2, dim=-1)
        return nn.functional.silu(gate) * up


class Rope:
    def __init__(self, head_dim, *, rotary_dim, base, rope_scaling, is_neox_style, max_position):
        kind = (rope_scaling or {}).get("rope_type", "default")
        assert kind == "default", f"rope_type {kind} is not in this test"
        assert is_neox_style
        assert rotary_dim == head_dim
        self.size, self.angles = head_dim, base ** -(torch.arange(0, head_dim, 2) / head_dim)

    def __call__(self, positions, q, k):
        angles = positions[:, None].float() * self.angles
        return self._turn(q, angles), self._turn(k, angles)

    def _turn(self, x, angles):
        first, second = x.view(len(x), -1, self.size).chunk(2, dim=-1)
        cos, sin = angles.cos()[:, None], angles.sin()[:, None]
        return torch.cat([first * cos - second * sin, second * cos + first * sin], -1).flatten(1)


class Attention(nn.Module):
    """Causal attention; `kept` of a call says how many earlier entries it sees."""

    def __init__(self, heads, head_dim, scaling, *, num_kv_heads, **_):
        super().__init__()
        self.heads, self.groups, self.size, self.scaling = heads, num_kv_heads, head_dim, scaling
        self.past = [torch.zeros(num_kv_heads, 0, head_dim)] * 2

    def forward(self, q, k, v, call):
        new = [x.view(len(x), self.groups, self.size).transpose(0, 1) for x in (k, v)]
        self.past = [
            torch.cat([old[:, : call.kept], x], 1) for old, x in zip(self.past, new, strict=True)
        ]
        k, v = (x.repeat_interleave(self.heads // self.groups, 0) for x in self.past)
        q = q.view(len(q), self.heads, self.size).transpose(0, 1)
        mask = torch.ones(q.shape[1], k.shape[1], dtype=torch.bool).tril(call.kept)
        found = nn.functional.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, scale=self.scaling
        )
        return found.transpose(0, 1).flatten(1)


def copy(parameter, loaded):
    assert parameter.shape == loaded.shape, f"{list(loaded.shape)} for {list(parameter.shape)}"
    with torch.no_grad():
        parameter.copy_(loaded)


class Inert:
    """What the files name and a draft does not use."""

    def __init__(self, *_, **__):
        pass


PARTS = {
    "RMSNorm": RMSNorm,
    "QKVParallelLinear": qkv,
    "MergedColumnParallelLinear": merged,
    "RowParallelLinear": Row,
    "VocabParallelEmbedding": Head,
    "ParallelLMHead": Head,
    "SiluAndMul": SiluAndMul,
    "RadixAttention": Attention,
    "get_rope": Rope,
    "default_weight_loader": copy,
    "DualGemm": lambda *_: SimpleNamespace(can_run=lambda *_: False),
    "layer_stack": contextlib.nullcontext,
    "add_prefix": lambda name, prefix: f"{prefix}.{name}",
    "get_parallel": lambda: SimpleNamespace(tp_size=1, pp_group=SimpleNamespace(is_last_rank=True)),
    "get_spec": lambda: SimpleNamespace(speculative_draft_window_size=None),
    "is_npu": lambda: False,
    "is_xpu": lambda: False,
    "DraftTPExecution": SimpleNamespace(SINGLE_GROUP=None),
}


class StandIn(ModuleType):
    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return PARTS.get(name, Inert)


class Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def __init__(self, root: Path) -> None:
        self.root = root

    def find_spec(self, name, path=None, target=None):
        if name in OWN_FILES:
            file = self.root.joinpath(*name.split(".")[1:]).with_suffix(".py")
            return importlib.util.spec_from_file_location(name, file)
        if name.split(".")[0] == "sglang":
            return importlib.util.spec_from_loader(name, self, is_package=True)
        return None

    def create_module(self, spec):
        module = StandIn(spec.name)
        module.__path__ = []  # a package, whose modules are found here too
        return module

    def exec_module(self, module):
        pass


def drafts(model, embeddings, ids, states, num_draft_tokens) -> list[list[int]]:
    """[S - 1][K] drafted behind each token but the first, given the state before it."""

    def run(tokens, hidden, kept):
        call = SimpleNamespace(
            mm_input_embeds=None,
            kept=kept,
            spec_info=SimpleNamespace(hidden_states=hidden),
            forward_mode=SimpleNamespace(is_extend=lambda: False, is_decode=lambda: False),
        )
        positions = torch.arange(kept, kept + len(tokens))
        normed, (handed_on,) = model.model(
            tokens, positions, call, input_embeds=nn.functional.embedding(tokens, embeddings)
        )
        return model.hot_token_id[(normed @ model.lm_head.weight.T).argmax(-1)], handed_on

    first, handed_on = run(ids[1:], states[:-1], 0)
    found: list[list[int]] = [[]] * len(first)
    for place in reversed(range(len(first))):
        token, hidden, drafted = first[place : place + 1], handed_on[place : place + 1], []
        for step in range(num_draft_tokens):
            drafted.append(int(token))
            if step + 1 < num_draft_tokens:
                token, hidden = run(token, hidden, place + 1 + step)
        found[place] = drafted
    return found


def main() -> None:
    request = json.load(sys.stdin)
    package = importlib.util.find_spec("sglang")
    assert package is not None
    assert package.origin is not None
    sys.meta_path.insert(0, Finder(Path(package.origin).parent))
    from sglang.srt.models.llama_eagle3 import LlamaForCausalLMEagle3

    config = AutoConfig.from_pretrained(request["folder"])
    model = LlamaForCausalLMEagle3(config).float()
    model.load_weights(load_file(Path(request["folder"]) / "model.safetensors").items())
    target = AutoConfig.from_pretrained(request["target"])
    model.config = target  # of the target, which has the same class to capture its states
    nested = getattr(config, "eagle_config", None) or {}
    model.set_eagle3_layers_to_capture(nested.get("eagle_aux_hidden_state_layer_ids"))
    layers = model.model.layers_to_capture  # states in front of layer k: residuals after k layers
    embeddings = load_file(request["embeddings"])["embeddings"].float()  # SGLang takes the target's
    texts = load_file(request["texts"])
    with torch.inference_mode():
        found = [
            drafts(
                model,
                embeddings,
                texts[f"{i}.ids"],
                texts[f"{i}.states"],
                request["num_draft_tokens"],
            )
            for i in range(len(texts) // 2)
        ]
    print("RESULT " + json.dumps([layers, found]), flush=True)


if __name__ == "__main__":
    main()
