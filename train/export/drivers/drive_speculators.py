"""Runs in vLLM's environment: what the speculators library, which trained heads of this form first,
drafts with a folder. An independent reader: it shares no code with vLLM or with us.

Its network drafts as in training: step k at a place reads the text's own tokens up to k places
further, so its k-th token is a draft only where the tokens before it were drafted right.
"""

import json
import sys

import torch
from safetensors.torch import load_file
from speculators import SpeculatorModel, SpeculatorModelConfig


def main() -> None:
    request = json.load(sys.stdin)
    config = SpeculatorModelConfig.from_pretrained(request["folder"])
    config.transformer_layer_config._attn_implementation = "eager"
    model = SpeculatorModel.from_pretrained(request["folder"], config=config).float().eval()
    texts = load_file(request["texts"])
    found = []
    with torch.inference_mode():
        for number in range(len(texts) // 2):
            ids, states = texts[f"{number}.ids"][None], texts[f"{number}.states"][None]
            drafted = model(
                states[:, :-1],
                ids[:, 1:],
                document_ids=torch.zeros_like(ids[:, 1:]),
                ttt_steps=request["num_draft_tokens"],
            )
            tokens = torch.cat(drafted)  # [K, S - 1]
            if model.d2t is not None:
                tokens = tokens + model.d2t[tokens]
            found.append(tokens.T.tolist())
    print("RESULT " + json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
