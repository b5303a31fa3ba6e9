"""The block drafter's network: one decoder layer that drafts a whole block in one pass.

    g_j = fc [low_j; middle_j; high_j]     the target's residuals at position j, fused
    h_k = norm(Layer(block))_k             the block: the pending token's embedding, then masks
    logits_k = head h_k + W2 W1[x_k]       scores of the token behind place k of the block

The layer's attention reads keys and values of all g_j in front of the block (the states injected, as
DFlash has it; in front of the projections they are normed as the block is) and of the block up to
its own row. Entry i has position i, states and block alike. What the row at place k cannot know, the
tokens drafted at the places before, comes in through the last of them: W1 (a row for every target
token) and W2 are a low-rank table of how likely a token follows another. `confidence` tells from
[h_k; W1[x_k]] the chance that the token drafted at place k is kept: it knows the tokens before, not
the drafted one, so a draft length may depend on it.

Names, shapes and meanings are those of the DSpark folders that vLLM reads, except for two weights
that an export folds: `mask_embedding` and `feature_scale` (parallel_files.py).

Sources: DFlash, arXiv:2602.06036; DSpark, arXiv:2607.05147. There the rows of a block see each other
in both directions; masks say nothing, so that with one layer nothing is lost by looking back only,
and a row does not depend on how many rows follow.

Shapes: A layers of the target, D hidden size, n draft vocabulary, V vocabulary, R rank.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig, Qwen3Config
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.models.qwen3.modeling_qwen3 import (
    Qwen3DecoderLayer,
    Qwen3Model,
    Qwen3PreTrainedModel,
)

from specdec_runtime.drafter_files import LAYER_IDS, read
from specdec_runtime.network_folder import (
    fill_network,
    one_layer,
    require_layers,
    save_network,
)
from specdec_runtime.parallel_files import ARCHITECTURE, COMPUTED

# Our name -> the folder's, as prefixes.
FOLDER_NAMES = {
    "model.": "",
    "markov_w1.": "markov_head.markov_w1.",
    "markov_w2.": "markov_head.markov_w2.",
    "confidence.": "confidence_head.proj.",
}


def parallel_config(
    target: PretrainedConfig,
    *,
    layer_ids: Sequence[int],
    draft_vocab_size: int,
    num_heads: int,
    head_dim: int,
    intermediate_size: int,
    markov_rank: int,
    block_size: int,
) -> Qwen3Config:
    """The configuration of a network for this target, as its folder holds it.

    Raises:
        ValueError: for layers that the target does not have.
    """
    require_layers(target, layer_ids, first=1)
    own: dict[str, Any] = {
        "draft_vocab_size": draft_vocab_size,
        LAYER_IDS: list(layer_ids),
        "target_layer_ids": [k - 1 for k in layer_ids],  # vLLM names the layer whose output it is
        "block_size": block_size,
        "markov_rank": markov_rank,
        "enable_confidence_head": True,
        **{key: value for key, value in COMPUTED.items() if key != "num_hidden_layers"},
    }
    layer = one_layer(
        target, num_heads=num_heads, head_dim=head_dim, intermediate_size=intermediate_size
    )
    return Qwen3Config(architectures=[ARCHITECTURE], **layer, **own)


class ParallelNetwork(Qwen3PreTrainedModel):
    """The layer with what surrounds it; `model` and `lm_head` run like any decoder of transformers.

    What enters the layer, fused states and the block, is up to the caller, who replaces its input:
    see `HFModel.forward` with `layers` and `hidden_in`.
    """

    def __init__(self, config: Qwen3Config) -> None:
        super().__init__(config)
        size, rank = config.hidden_size, config.markov_rank
        width = len(config.eagle_aux_hidden_state_layer_ids) * config.target_hidden_size
        self.model = Qwen3Model(config)
        self.lm_head = nn.Linear(size, config.draft_vocab_size, bias=False)
        self.fc = nn.Linear(width, size, bias=False)
        # Some dimensions of the states are hundreds of times larger than others, which neither a
        # learning rate nor rounded weights suit. Not trained; powers of two.
        self.feature_scale = nn.Parameter(torch.ones(width), requires_grad=False)
        self.mask_embedding = nn.Parameter(torch.zeros(size))
        self.markov_w1 = nn.Embedding(config.vocab_size, rank)
        self.markov_w2 = nn.Linear(rank, config.draft_vocab_size, bias=False)
        self.confidence = nn.Linear(size + rank, 1)
        self.post_init()

    @property
    def layer(self) -> Qwen3DecoderLayer:
        layer = self.model.layers[0]
        assert isinstance(layer, Qwen3DecoderLayer)
        return layer

    def fuse(self, features: Tensor) -> Tensor:
        """[..., A * D] residuals of the target, side by side -> [..., D]."""
        return self.fc(features * self.feature_scale)

    def forward(self, input_ids: Tensor, use_cache: bool | None = None) -> CausalLMOutputWithPast:
        hidden = self.model(input_ids, use_cache=use_cache).last_hidden_state
        return CausalLMOutputWithPast(logits=self.lm_head(hidden))

    def save_pretrained(self, folder: str | Path, **unused: Any) -> None:  # type: ignore[override]
        """config.json and model.safetensors; see the module's docstring."""
        save_network(self, folder, FOLDER_NAMES)


def load_parallel(folder: str | Path, *, device: torch.device | str = "cpu") -> ParallelNetwork:
    """The network of a folder of ours or of vLLM, in its stored dtype and eval mode.

    Raises:
        ValueError: if the folder holds another architecture, or weights are missing, unknown or of
            another shape than the configuration says.
    """
    files = read(folder)
    if files.kind != "parallel":
        raise ValueError(
            f"{folder} holds {files.config.get('architectures')}, expected a parallel drafter "
            f"([{ARCHITECTURE!r}])"
        )
    config: Qwen3Config = Qwen3Config.from_dict(files.config)
    network = ParallelNetwork(config)
    assert isinstance(config.dtype, torch.dtype), config.dtype  # transformers parses the string
    nn.Module.to(network, dtype=config.dtype)
    try:
        fill_network(network, files.tensors, FOLDER_NAMES, folder)
    except RuntimeError as error:
        reason = " ".join(str(error).split())
        raise ValueError(f"{folder} does not fit its configuration: {reason}") from None
    return nn.Module.to(network, device=device).eval()
