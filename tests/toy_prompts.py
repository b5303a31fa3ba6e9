"""Prompts without meaning: the embedded sources take seconds to import, or a download."""

import json
import random
from pathlib import Path


def write_prompts(path: Path, count: int = 100) -> Path:
    """Prompts of seven short words, no two of them alike, as `prompts.file` reads them."""
    choose = random.Random(0)
    lines = [
        " ".join("".join(choose.choices("adeilnorst", k=4)) for _ in range(7)) for _ in range(count)
    ]
    path.write_text("".join(json.dumps({"prompt": line}) + "\n" for line in lines))
    return path
