"""The compile switch: the same text from compiled passes, or one warning and the same text."""

import warnings

import pytest
import torch

from specdec_runtime import compiled, engines
from specdec_runtime.compiled import compile_obstacle, compiled_width
from specdec_runtime.decode import SpeculativeDecoder
from specdec_runtime.engines import make_model
from specdec_runtime.hf_model import HFModel
from specdec_runtime.target import Target
from tests.conftest import tiny_llama
from tests.table_model import ScriptedDrafter

PROMPT = [5, 6, 7]


class Reader(ScriptedDrafter):
    """Knows the text, and keeps what it is shown of the target's hidden states."""

    hidden_layers = (0, -1)

    def propose(self, rows, committed, lengths, features=None):
        self.seen.append(features)
        return super().propose(rows, committed, lengths, features)


@pytest.fixture
def quick_compiler(monkeypatch):
    """One process, and code for any CPU: finding out what this one's vector instructions are means
    compiling a program and starting another process."""
    monkeypatch.setattr("torch._inductor.cpu_vec_isa.valid_vec_isa_list", lambda: [])
    with torch._inductor.config.patch(compile_threads=1):
        yield


@pytest.mark.slow
@pytest.mark.usefixtures("quick_compiler")
def test_compiled_passes_give_the_same_text_and_the_same_states():
    if reason := compile_obstacle(torch.device("cpu")):
        pytest.skip(reason)
    module = tiny_llama(0, num_layers=1)
    text = SpeculativeDecoder(module).generate([PROMPT], max_new_tokens=11).token_ids[0]
    seen = []
    for model in (HFModel(module), HFModel(module, compiled=True)):
        drafter = Reader.knowing([PROMPT + text], kind="perfect", wrong=63)
        drafter.seen = []
        decoder = SpeculativeDecoder(Target(model=model), drafter, num_draft_tokens=1)
        generation = decoder.generate([PROMPT], max_new_tokens=11)
        assert generation.token_ids == [text]
        assert generation.stats.acceptance_rate == 1.0
        seen.append(drafter.seen)
    with torch._dynamo.config.patch(error_on_recompile=True):  # other buffers, the same code
        assert decoder.generate([PROMPT], max_new_tokens=11).token_ids == [text]
    for eager, compiled_ in zip(*seen, strict=False):
        for layer, states in eager.items():
            torch.testing.assert_close(compiled_[layer], states, rtol=1e-4, atol=1e-4)


def test_without_a_compiler_there_is_one_warning_and_the_same_text(monkeypatch):
    monkeypatch.setattr(compiled.shutil, "which", lambda name: None)
    engines._warn_once.cache_clear()
    module = tiny_llama(0, num_layers=1)
    with pytest.warns(UserWarning, match=r"without compilation: no C\+\+ compiler"):
        model = make_model(module, engine="compiled")
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # it is said once
        make_model(module, engine="compiled")
    text = SpeculativeDecoder(Target(model=model)).generate([PROMPT], max_new_tokens=5)
    assert (
        text.token_ids
        == SpeculativeDecoder(module)
        .generate([PROMPT], max_new_tokens=5, eos_token_id=[])
        .token_ids
    )


def test_passes_are_padded_to_few_widths():
    assert [compiled_width(width) for width in (1, 3, 5, 16, 17)] == [1, 4, 8, 16, None]
