"""The EAGLE-3 network: one decoder layer that reads the target's states beside the next token.

    g_i = fc [low_i; middle_i; high_i]          the target's residuals at position i, fused
    a_i = Layer(g_i, embedding of token i + 1)  attention reads [norm(embedding); norm(g)]
    head(norm(a_i))                             scores of token i + 2, over the draft vocabulary

While drafting, what the layer gave at one position stands for the fused states at the next. Entry i
has position i. Names, shapes and meanings are those of the serving engines' EAGLE-3 folders: residuals
before the norm, the layer ids k = residual after k layers, `d2t` offsets beside it. `norms` is theirs
too: `eagle3`, or `eagle3.1`, which normalises each of the target's states in front of `fc`
(`fc_norm`) and hands on the state after the last norm (`norm_output`).

Sources: Li et al. 2025 (EAGLE-3), arXiv:2503.01840; attention drift: arXiv:2605.09992.

Shapes: B rows, S entries, A layers of the target, D hidden size, n draft vocabulary, V vocabulary.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import LlamaConfig, PretrainedConfig
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast
from transformers.models.llama.modeling_llama import (
    LlamaAttention,
    LlamaMLP,
    LlamaPreTrainedModel,
    LlamaRMSNorm,
    LlamaRotaryEmbedding,
)

from specdec_runtime.drafter_files import read
from specdec_runtime.network_folder import (
    fill_network,
    one_layer,
    require_layers,
    save_network,
)

ARCHITECTURE = "LlamaForCausalLMEagle3"
NORMS = ("eagle3", "eagle3.1")
# Flags of other trainers' heads that this network has no part for.
NOT_COMPUTED = ("norm_before_residual", "norm_before_fc")
# Our name -> the folder's, as prefixes.
_FOLDER_NAMES = {"model.layers.0.": "midlayer.", "model.": "", "lm_head.": "lm_head."}


def eagle3_config(
    target: PretrainedConfig,
    *,
    layer_ids: Sequence[int],
    draft_vocab_size: int,
    num_heads: int,
    head_dim: int,
    intermediate_size: int,
    norms: str,
) -> LlamaConfig:
    """The configuration of a network for this target, as its folder holds it.

    Raises:
        ValueError: for layers that the target does not have, or other norms.
    """
    require_layers(target, layer_ids, first=0)
    if norms not in NORMS:
        raise ValueError(f"norms is {norms!r}, expected one of {', '.join(NORMS)}")
    is_newer = norms == "eagle3.1"
    own: dict[str, Any] = {
        "draft_vocab_size": draft_vocab_size,
        "num_aux_hidden_states": len(layer_ids),
        "eagle_aux_hidden_state_layer_ids": list(layer_ids),
        **dict.fromkeys(NOT_COMPUTED, False),
        "fc_norm": is_newer,
        "norm_output": is_newer,
    }
    layer = one_layer(
        target, num_heads=num_heads, head_dim=head_dim, intermediate_size=intermediate_size
    )
    return LlamaConfig(architectures=[ARCHITECTURE], **layer, **own)


class Eagle3Layer(nn.Module):
    """A Llama layer whose attention reads the embedding of the next token beside the state."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        size = config.hidden_size
        self.self_attn = LlamaAttention(config, layer_idx=0)
        for name in ("q_proj", "k_proj", "v_proj"):
            outputs = getattr(self.self_attn, name).out_features
            setattr(self.self_attn, name, nn.Linear(2 * size, outputs, bias=False))
        self.mlp = LlamaMLP(config)
        self.hidden_norm = LlamaRMSNorm(size, eps=config.rms_norm_eps)
        self.input_layernorm = LlamaRMSNorm(size, eps=config.rms_norm_eps)
        self.post_attention_layernorm = LlamaRMSNorm(size, eps=config.rms_norm_eps)

    def forward(self, hidden: Tensor, embeddings: Tensor, **attention: Any) -> Tensor:
        """[B, S, D] state and embedding -> [B, S, D] residual after the layer."""
        attended, _ = self.self_attn(self.read(hidden, embeddings), **attention)
        return self.finish(hidden + attended)

    def read(self, hidden: Tensor, embeddings: Tensor) -> Tensor:
        """[..., 2 D] what attention reads."""
        return torch.cat([self.input_layernorm(embeddings), self.hidden_norm(hidden)], dim=-1)

    def finish(self, residual: Tensor) -> Tensor:
        """The residual after the MLP."""
        return residual + self.mlp(self.post_attention_layernorm(residual))


class Eagle3Decoder(LlamaPreTrainedModel):
    """The layer with what surrounds it; runs like any one-layer decoder of transformers.

    Which state enters the layer is up to the caller, who replaces its input: see `HFModel.forward`
    with `layers` and `hidden_in`. Alone it starts from the embedding.
    """

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__(config)
        size = config.hidden_size
        self.embed_tokens = nn.Embedding(config.vocab_size, size)
        self.layers = nn.ModuleList([Eagle3Layer(config)])
        self.norm = LlamaRMSNorm(size, eps=config.rms_norm_eps)
        self.rotary_emb = LlamaRotaryEmbedding(config)
        num_states = config.num_aux_hidden_states
        self.fc = nn.Linear(num_states * config.target_hidden_size, size, bias=False)
        self.fc_norm = nn.ModuleList(
            LlamaRMSNorm(config.target_hidden_size, eps=config.rms_norm_eps)
            for _ in range(num_states if config.fc_norm else 0)
        )
        self.post_init()

    @property
    def layer(self) -> Eagle3Layer:
        layer = self.layers[0]
        assert isinstance(layer, Eagle3Layer)
        return layer

    def fuse(self, features: Tensor) -> Tensor:
        """[..., A * D] residuals of the target, side by side -> [..., D]."""
        return self.fc(self.normed_features(features))

    def normed_features(self, features: Tensor) -> Tensor:
        """[..., A * D] what `fc` reads."""
        if not self.fc_norm:
            return features
        parts = features.chunk(len(self.fc_norm), dim=-1)
        return torch.cat(
            [norm(part) for norm, part in zip(self.fc_norm, parts, strict=True)], dim=-1
        )

    def handed_on(self, residual: Tensor) -> Tensor:
        """What stands for the fused states at the next position, from the layer's residual."""
        return self.norm(residual) if self.config.norm_output else residual

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        cache: Any = None,
        use_cache: bool | None = None,
    ) -> BaseModelOutputWithPast:
        """`attention_mask` as the layer takes it: [B, 1, S, slots], or None for causal."""
        embeddings = self.embed_tokens(input_ids)
        if position_ids is None:
            position_ids = torch.arange(input_ids.shape[1], device=input_ids.device)[None]
        hidden = self.layer(
            embeddings,
            embeddings=embeddings,
            position_embeddings=self.rotary_emb(embeddings, position_ids=position_ids),
            attention_mask=attention_mask,
            cache=cache,
        )
        return BaseModelOutputWithPast(last_hidden_state=self.norm(hidden))


class Eagle3Network(LlamaPreTrainedModel):
    """The decoder and its head over the draft vocabulary."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__(config)
        self.model = Eagle3Decoder(config)
        self.lm_head = nn.Linear(config.hidden_size, config.draft_vocab_size, bias=False)
        self.post_init()

    def forward(self, input_ids: Tensor, use_cache: bool | None = None) -> CausalLMOutputWithPast:
        hidden = self.model(input_ids, use_cache=use_cache).last_hidden_state
        return CausalLMOutputWithPast(logits=self.lm_head(hidden))

    def save_pretrained(self, folder: str | Path, **unused: Any) -> None:  # type: ignore[override]
        """config.json and model.safetensors under the serving engines' names."""
        save_network(self, folder, _FOLDER_NAMES)


def load_eagle3(folder: str | Path, *, device: torch.device | str = "cpu") -> Eagle3Network:
    """The network of a folder of ours or of a serving engine, in its stored dtype and eval mode.

    Raises:
        ValueError: if the folder holds another architecture, a head that was trained with what is
            not computed here, or weights are missing or unknown.
    """
    try:
        files = read(folder)
    except ValueError as error:
        raise ValueError(f"{folder} holds no EAGLE-3 drafter: {error}") from None
    if files.kind != "eagle3":
        raise ValueError(
            f"{folder} holds {files.config.get('architectures')}, expected an EAGLE-3 drafter "
            f"([{ARCHITECTURE!r}])"
        )
    if files.layer_ids is None:
        raise ValueError(
            f"{folder} names no layers of its target: python -m train.export drafter={folder} "
            "target=... writes a folder that does"
        )
    if unknown := [flag for flag in NOT_COMPUTED if files.config[flag]]:
        raise ValueError(
            f"{folder} was trained with {', '.join(unknown)}, which is not computed here: serve it "
            "with the engine it was made for"
        )
    config: LlamaConfig = LlamaConfig.from_dict(files.config)
    network = Eagle3Network(config)
    assert isinstance(config.dtype, torch.dtype), config.dtype  # transformers parses the string
    nn.Module.to(network, dtype=config.dtype)
    fill_network(network, files.tensors, _FOLDER_NAMES, folder)
    return nn.Module.to(network, device=device).eval()
