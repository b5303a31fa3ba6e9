"""The compile switch: the same text from compiled passes, or one warning and the same text."""

import warnings
from functools import partial

import pytest
import torch

from specdec_runtime import compiled, engines
from specdec_runtime.compiled import compile_obstacle, compiled_width
from specdec_runtime.decode import SpeculativeDecoder
from specdec_runtime.drafters.eagle3 import Eagle3Drafter
from specdec_runtime.drafters.early_exit import EarlyExitDrafter
from specdec_runtime.drafters.parallel import ParallelDrafter
from specdec_runtime.engines import make_model
from specdec_runtime.hf_model import HFModel
from specdec_runtime.target import Target
from specdec_runtime.tree_growth import StaticTree
from tests import test_eagle3, test_parallel
from tests.conftest import tiny_llama
from tests.table_model import ScriptedDrafter

PROMPT = [5, 6, 7]


class Reader(ScriptedDrafter):
    """Knows the text, and keeps what it is shown of the target's hidden states."""

    hidden_layers = (0, 1, -1)  # the second is the residual after the last layer

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


def test_parts_of_a_model_are_traced_as_they_run(monkeypatch):
    """As test_compiled_passes..., without the compiler behind the trace, which takes seconds."""
    monkeypatch.setattr(compiled.torch, "compile", partial(torch.compile, backend="eager"))
    module = tiny_llama(0, num_layers=2)
    found = []
    for model in (HFModel(module), HFModel(module, compiled=True)):
        cache = model.new_cache(2, 32)
        model.forward(torch.tensor([[5, 6], [7, 8]]), cache)
        drafted = torch.tensor([[9, 10, 11], [12, 13, 14]])
        # However many variants there are in a process, none goes without its compilation.
        limit = {"recompile_limit": 1, "fail_on_recompile_limit_hit": True}
        with torch._dynamo.config.patch(limit):
            low = model.forward(
                drafted, cache, layers=(0, 1), hidden_layers=(0, 1), early_head=True
            )
            cache.truncate([2, 2])
            num_new = torch.tensor([3, 2])
            rest = {"layers": (1, 2), "hidden_in": low.hidden[1], "hidden_layers": (1, 2, -1)}
            high = model.forward(drafted, cache, num_new=num_new, **rest)
        found.append((low, high))
    for eager, traced in zip(*found, strict=True):
        torch.testing.assert_close(traced, eager, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", ["early_exit", "early_exit_trees", "eagle3", "parallel"])
def test_drafting_and_verifying_passes_behind_the_prompt_are_compiled(kind, monkeypatch):
    eager, through, calls = [], [], []

    def counted(run, **how):
        def call(*arguments):
            through.append(arguments)
            return run(*arguments)

        return call

    monkeypatch.setattr(compiled.torch, "compile", counted)
    real_forward = HFModel._forward

    def forward(model, token_ids, cache, **arguments):
        (calls if model._compiled else eager).append(token_ids.shape)
        return real_forward(model, token_ids, cache, **arguments)

    texts = []
    for engine in ("eager", "compiled"):
        target, drafter = target_and_drafter(kind, engine)
        shape = StaticTree((2, 1)) if "trees" in kind else 3
        decoder = SpeculativeDecoder(target, drafter, num_draft_tokens=shape)
        with monkeypatch.context() as patched:  # what making a model runs does not count
            patched.setattr(HFModel, "_forward", forward)
            generation = decoder.generate(test_eagle3.PROMPTS, max_new_tokens=12)
        texts.append((generation.token_ids, generation.stats.num_accepted))
    assert texts[0] == texts[1]
    prompts = 1 if drafter.model is target.model else 2  # each model's own
    assert len(calls) == len(eager) == len(through) + prompts


def target_and_drafter(kind, engine):
    """The module and head of the kind's own tests."""
    model = make_model(test_eagle3.TARGET, engine=engine)
    target = Target(model=model, eos_token_ids=(2,))
    if kind == "eagle3":
        head = test_eagle3.network()
        return target, Eagle3Drafter(head, draft_vocab=test_eagle3.KEPT, engine=engine)
    if kind == "parallel":
        head = test_parallel.network()
        return target, ParallelDrafter(head, draft_vocab=test_parallel.KEPT, engine=engine)
    return target, EarlyExitDrafter(model, exit_layer=2)


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


def test_passes_are_padded_where_every_width_is_a_graph():
    widths = (1, 3, 5, 16, 17)
    cuda, cpu = torch.device("cuda"), torch.device("cpu")
    assert [compiled_width(width, cuda) for width in widths] == [1, 4, 8, 16, None]
    assert [compiled_width(width, cpu) for width in widths] == [1, 3, 5, 16, None]
