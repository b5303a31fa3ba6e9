"""A drafter with another tokenizer is trained on what the runtime will ask of it."""

import pytest
import torch

from distill.batches import Batch, Example, collate
from distill.causal_lm_modules import stock_model
from distill.draft_contexts import DraftContexts
from distill.draft_vocab import DraftVocab
from distill.live_signals import with_live_states
from distill.losses import LossConfig, LossName
from distill.objectives.cross_tokenizer import CrossTokenizerSettings, make
from distill.recipe import TargetParts
from distill.signals import NoSignal, TargetHead
from specdec_runtime.engines import Engine
from specdec_runtime.formats import write_drafter
from specdec_runtime.loading import load_drafter
from specdec_runtime.retokenized import Retokenized
from specdec_runtime.target import Target
from tests.test_cross_tokenizer import DRAFT_TOKENIZER, TARGET_TOKENIZER, TEXT, tiny
from train.drafter_folder import manifest_for
from train.wiring import check_wiring, decode_texts, teacher_forced

WORDS = ["So the cat", "on the \u00e9", "the hat sat", "a cat on th"]


@pytest.fixture(scope="module")
def target() -> Target:
    model = tiny(TARGET_TOKENIZER, 0)
    with torch.no_grad():
        model.module.lm_head.weight *= 4  # surer of itself, so that there is something to learn
    return Target(
        model=model,
        tokenizer=TARGET_TOKENIZER,
        real_vocab_size=len(TARGET_TOKENIZER),
        eos_token_ids=(TARGET_TOKENIZER.eos_token_id,),
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("draft")
    tiny(DRAFT_TOKENIZER, 1).module.save_pretrained(folder)
    DRAFT_TOKENIZER.save_pretrained(folder)
    return str(folder)


def recipe_of(target: Target, folder: str, **settings):
    chosen = CrossTokenizerSettings(model=folder, **settings)
    vocab = DraftVocab(chosen.fixed_tokens(TARGET_TOKENIZER), target.model.vocab_size)
    module = target.model.module
    head = TargetHead.of(module, vocab, real_vocab_size=target.real_vocab_size)
    return make(chosen, TargetParts(target, module, vocab, head))


def batch_of(target: Target, texts: list[list[int]], prompt_length: int = 3) -> Batch:
    examples = [
        Example(str(i), torch.tensor(ids), prompt_length, NoSignal(len(ids) - prompt_length))
        for i, ids in enumerate(texts)
    ]
    total = sum(example.num_tokens for example in examples)
    return collate(with_live_states(target, examples, max_positions=total))


def target_ids(text: str, *, ended: bool = False) -> list[int]:
    end = [TARGET_TOKENIZER.eos_token_id] if ended else []
    return TARGET_TOKENIZER(text).input_ids + end


def test_every_place_is_read_as_the_runtime_reads_it(target):
    texts = [target_ids(TEXT), target_ids("the \u00e9clair sat on", ended=True)]
    batch = batch_of(target, texts)
    contexts = DraftContexts(DRAFT_TOKENIZER, TARGET_TOKENIZER, max_positions=10_000)
    trained, scored = (contexts(batch, scoring=scoring) for scoring in (False, True))
    assert len(trained.token_ids) == 2
    assert 0 < len(trained.kept) < len(scored.kept) < batch.num_tokens  # none inside a character
    for rows in (trained, scored):
        width = rows.token_ids.shape[1]
        for kept, position in zip(rows.kept.tolist(), rows.positions.tolist(), strict=True):
            row, column = divmod(int(batch.positions[kept]), batch.token_ids.shape[1])
            text = Retokenized(DRAFT_TOKENIZER, TARGET_TOKENIZER)
            text.read(texts[row][: column + 1])
            own, place = divmod(position, width)
            assert rows.token_ids[own, : place + 1].tolist() == text.draft_ids


def test_its_own_tokens_are_those_of_the_answer_with_its_own_end(target):
    ids = target_ids("So the cat sat", ended=True)
    batch = batch_of(target, [ids], prompt_length=len(target_ids("So")))
    rows = DraftContexts(DRAFT_TOKENIZER, TARGET_TOKENIZER, max_positions=99)(batch, scoring=False)
    labels = rows.text_labels.tolist()
    assert labels == [*DRAFT_TOKENIZER(" the cat sat").input_ids, DRAFT_TOKENIZER.eos_token_id]
    assert rows.token_ids.flatten()[rows.text_positions + 1].tolist() == labels


def test_the_loss_is_that_of_the_shared_tokens_and_the_text_by_hand(target, folder):
    batch = batch_of(target, [target_ids(TEXT[:40])])
    recipe = recipe_of(target, folder, text_weight=0.5)
    module = recipe.module.train()
    found = recipe.objective(LossConfig(name=LossName.forward_kl, temperature=1.0))(module, batch)
    contexts = DraftContexts(DRAFT_TOKENIZER, TARGET_TOKENIZER, max_positions=256)
    rows = contexts(batch, scoring=False)
    logits = module(input_ids=rows.token_ids).logits.flatten(0, 1)
    draft_ids, shared = recipe._draft_ids, recipe._head.vocab.token_ids
    q = logits[rows.positions][:, draft_ids].log_softmax(-1)
    real = len(TARGET_TOKENIZER)
    full = target.model.logits_of(batch.rows.hidden[rows.kept])[:, :real].log_softmax(-1)
    log_p = full[:, shared]
    mass = log_p.exp().sum(-1)
    kl = (log_p.exp() * (log_p - q)).sum(-1) - mass * mass.log()
    text = -logits[rows.text_positions].log_softmax(-1)
    text = text.gather(1, rows.text_labels[:, None]).sum()
    expected = (kl.sum() + 0.5 * text).detach()
    assert float(found.loss_sum.detach()) == pytest.approx(float(expected), rel=1e-4)
    overlap = torch.minimum(log_p.exp(), q.detach().exp()).sum()
    assert float(found.counts["overlap"][0]) == pytest.approx(float(overlap), rel=1e-4)
    together, all_places = found.counts["tokens_ending_together"]
    assert int(together) == len(rows.kept) < int(all_places) == batch.num_tokens


def test_training_makes_the_runtime_accept_more_and_both_agree(target, folder, tmp_path):
    prompts = [target_ids(text) for text in WORDS]
    plain = decode_texts(
        target,
        load_drafter(f"cross_tokenizer:{folder}", target, mode="tokens"),
        prompts,
        num_draft_tokens=2,
        max_new_tokens=24,
        temperature=1.0,
        seed=5,
    )
    batch = batch_of(target, [text.token_ids for text in plain])
    recipe = recipe_of(target, folder, train_embeddings=True)
    loss = LossConfig(name=LossName.forward_kl, temperature=1.0)
    objective = recipe.objective(loss)
    device = torch.device("cpu")
    _, untrained = teacher_forced(target, objective, recipe.module, plain, device)
    optimizer = torch.optim.Adam(recipe.module.parameters(), lr=1e-2)
    for _ in range(30):
        optimizer.zero_grad()
        objective(recipe.module.train(), batch).loss_sum.backward()
        optimizer.step()
    assert teacher_forced(target, objective, recipe.module, plain, device)[1] > 2 * untrained
    manifest = manifest_for(
        target,
        kind="cross_tokenizer",
        target_name="tiny",
        training_data_fingerprint="",
        num_draft_tokens=2,
        template_options={},
        kind_config=recipe.kind_config(),
    )
    written = write_drafter(
        tmp_path / "drafter", recipe.written(torch.float32), manifest, tokenizer=recipe.tokenizer
    )
    found = check_wiring(  # raises where they disagree
        target,
        load_drafter(written, target, engine=Engine.eager, **recipe.scored_settings),
        objective,
        recipe.module,
        prompts,
        num_draft_tokens=2,
        max_new_tokens=24,
        device=device,
    )
    assert [one.temperature for one in found] == [0.0, 1.0]
    assert found[0].decoded == pytest.approx(found[0].teacher_forced, abs=1e-9)


def test_another_tokenizer_is_refused_without_the_declaration(target, folder, tmp_path):
    with pytest.raises(ValueError, match=r"differ at id 0: .*draft=cross_tokenizer"):
        stock_model(folder, target)
    target.model.module.save_pretrained(tmp_path)
    TARGET_TOKENIZER.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"has the target's tokenizer: .*draft=causal_lm"):
        recipe_of(target, str(tmp_path))


def test_settings_that_contradict_the_kind_are_refused(target, folder):
    with pytest.raises(ValueError, match=r"needs draft\.model"):
        CrossTokenizerSettings()
    with pytest.raises(ValueError, match="expected null"):
        CrossTokenizerSettings(model=folder, draft_vocab_size=64)
    with pytest.raises(ValueError, match="gaps where the tokenizers end"):
        recipe_of(target, folder).objective(LossConfig(name=LossName.expected_length))
