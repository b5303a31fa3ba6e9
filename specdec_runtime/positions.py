"""How many positions of a decoder a text may take."""

import warnings
from typing import Any

_NO_LIMIT = 1 << 30  # of a model whose configuration names none


def num_positions(config: Any, name: str) -> int:
    """The most tokens, prompt and answer, of one text.

    Rotary embeddings of the kind "longrope" (Phi-3, Phi-4-mini) have two sets of frequencies, and
    one more token than the first set is for changes the keys of all tokens in front of it. Texts
    on both sides of the switch cannot share a pass, and no draft may cross it: decoding ends there,
    with a warning.

    Args:
        name: of the model, for the warning.
    """
    most = int(getattr(config, "max_position_embeddings", None) or _NO_LIMIT)
    parameters = getattr(config, "rope_parameters", None) or {}
    kinds = [parameters, *(value for value in parameters.values() if isinstance(value, dict))]
    switches = [
        int(kind["original_max_position_embeddings"])
        for kind in kinds
        if kind.get("rope_type") == "longrope"
    ]
    switch = min(switches, default=most)
    if switch < most:
        warnings.warn(
            f"{name} reads texts of more than {switch} tokens with other rotary frequencies "
            f"(longrope), which is not supported: texts end there, not at {most}",
            stacklevel=3,
        )
    return min(switch, most)
