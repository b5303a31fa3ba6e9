"""Trees: masks and depths, siblings without replacement, growth before sight, the walk."""

import itertools

import pytest
import torch

from specdec_runtime.noise import UniformStreams
from specdec_runtime.tree_growth import ROOT, BestFirstTree, StaticTree
from specdec_runtime.trees import (
    ancestor_mask,
    depths,
    draw_siblings,
    likeliest_siblings,
    pack_trees,
    verify_tree,
)
from specdec_runtime.verification import verify_speculative
from tests.toy_models import chi_squared, chi_squared_limit, random_table
from tests.toy_trees import without_replacement

# Root with children 0 and 1; 0 has 2 and 3; 1 has 4; 3 has 5.
PARENTS = [-1, -1, 0, 0, 1, 3]
TOKENS = [10, 11, 12, 13, 14, 15]


def uniforms(num_rows, count, purpose=1):
    return UniformStreams(range(num_rows), purpose=purpose).take(range(num_rows), count)


def one_hot(token_ids, vocab_size=32):
    return torch.nn.functional.one_hot(torch.tensor(token_ids), vocab_size).double()


def test_every_node_sees_its_ancestors_and_itself():
    tree = pack_trees([TOKENS, TOKENS[:2]], [PARENTS, PARENTS[:2]])
    mask = ancestor_mask(tree)
    for node in range(6):
        ancestors, above = {node}, PARENTS[node]
        while above != ROOT:
            ancestors.add(above)
            above = PARENTS[above]
        seen = torch.nonzero(mask[0, node + 1]).squeeze(1).tolist()
        assert seen == sorted({0} | {ancestor + 1 for ancestor in ancestors})
    assert mask[0, 0].tolist() == [True] + [False] * 6
    assert depths(tree)[0].tolist() == [0, 1, 1, 2, 2, 2, 3]
    assert depths(tree)[1, :3].tolist() == [0, 1, 1]


def test_siblings_are_drawn_without_replacement_with_their_conditional_probabilities():
    probs = torch.tensor([0.5, 0.0, 0.3, 0.2], dtype=torch.float64)
    num_rows = 100_000
    drawn = draw_siblings(probs.expand(num_rows, 4), uniforms(num_rows, 2))
    law = dict(without_replacement(probs.tolist(), 2))
    index = {pair: place for place, pair in enumerate(law)}
    counts = torch.zeros(len(law))
    for pair, count in zip(
        *(part.tolist() for part in torch.unique(drawn.token_ids, dim=0, return_counts=True)),
        strict=True,
    ):
        counts[index[tuple(pair)]] = count
    assert chi_squared(counts, list(law.values())) < chi_squared_limit(len(law))
    first, second = drawn.token_ids.unbind(1)
    assert torch.allclose(drawn.probs[:, 0], probs[first])
    assert torch.allclose(drawn.probs[:, 1], probs[second] / (1.0 - probs[first]))


def test_a_distribution_that_runs_out_of_tokens_gives_fewer_siblings():
    probs = torch.tensor([[0.0, 0.7, 0.0, 0.3], [1.0, 0.0, 0.0, 0.0]])
    drawn = draw_siblings(probs, uniforms(2, 3))
    assert sorted(drawn.token_ids[0, :2].tolist()) == [1, 3]
    assert drawn.token_ids[0, 2].item() == -1
    assert drawn.token_ids[1].tolist() == [0, -1, -1]
    assert drawn.probs[1].tolist() == [1.0, 0.0, 0.0]
    assert likeliest_siblings(probs, 3).token_ids.tolist() == [[1, 3, -1], [0, -1, -1]]


def test_likeliest_siblings_come_in_order_with_their_share_of_what_is_left():
    found = likeliest_siblings(torch.tensor([[0.1, 0.5, 0.4]]).double(), 5)
    assert found.token_ids.tolist() == [[1, 2, 0, -1, -1]]
    assert found.probs[0].tolist() == pytest.approx([0.5, 0.8, 1.0, 0.0, 0.0])


@pytest.mark.parametrize(
    ("branching", "sizes"), [((3,), [3]), ((3, 2, 1), [3, 6, 6]), ((1, 1, 1, 1), [1, 1, 1, 1])]
)
def test_a_static_tree_has_its_shape_every_time(branching, sizes):
    shape = StaticTree(branching)
    tree = _grow(shape, random_table(0, vocab_size=8))
    levels = depths(pack_trees([tree.token_ids], [tree.parents]))[0].tolist()
    assert [levels.count(depth + 1) for depth in range(len(sizes))] == sizes
    assert len(tree.token_ids) == shape.num_nodes == sum(sizes)


@pytest.mark.parametrize("limit", [0, 1, 2])
@pytest.mark.parametrize("shape", [StaticTree((2, 2, 2)), BestFirstTree(8, 3, 5)])
def test_no_tree_grows_past_its_limit(shape, limit):
    tree = _grow(shape, random_table(0, vocab_size=8), limit=limit)
    levels = depths(pack_trees([tree.token_ids], [tree.parents]))
    assert levels.max().item() == limit


def test_best_first_fills_the_places_most_likely_to_be_reached():
    # From every token: 0 with .6, 1 with .3, 2 with .1; nothing is drawn, children come in order.
    table = torch.tensor([[0.6, 0.3, 0.1]] * 3)
    tree = _grow(BestFirstTree(num_nodes=5, num_siblings=3, num_passes=5), table)
    # Places by worth: root 1 -> 0; its child .6 -> 00; root's second .4 -> 1; 000 at .36;
    # then 0's second child at .24 and 1's first child at .4 * .75 = .3.
    paths = _paths(tree)
    assert paths == [(0,), (0, 0), (1,), (0, 0, 0), (1, 0)]


def test_best_first_keeps_to_its_budget_of_nodes_siblings_and_passes():
    for seed in range(5):
        shape = BestFirstTree(num_nodes=12, num_siblings=2, num_passes=3)
        tree = _grow(shape, random_table(seed, vocab_size=8, sharpness=0.5))
        assert len(tree.token_ids) == 12
        assert max(tree.parents.count(parent) for parent in tree.parents) <= 2
        assert depths(pack_trees([tree.token_ids], [tree.parents])).max() <= 3


def test_the_order_of_places_is_settled_before_their_tokens_are_seen():
    # Two drawings that agree on the first child and differ in the second: up to and including
    # the second child's place, growth is the same; only what hangs below it may differ.
    trees = []
    for second in (1, 2):
        tree = BestFirstTree(num_nodes=2, num_siblings=3, num_passes=1).begin(9)
        assert tree.next_parents() == [ROOT]
        tree.offer(ROOT, [0, second, 3 - second], [0.5, 0.9 if second == 1 else 0.01, 1.0])
        assert tree.next_parents() == []
        trees.append(tree)
    assert trees[0].parents == trees[1].parents == [ROOT, ROOT]
    assert [tree.token_ids for tree in trees] == [[0, 1], [0, 2]]


def test_a_greedy_target_follows_the_one_path_that_agrees():
    tree = pack_trees([TOKENS] * 3, [PARENTS] * 3)
    # What follows root, then each node: the greedy text is 10 13 15 20; 11 9; 8.
    after = {ROOT: 10, 0: 13, 3: 15, 5: 20}
    rows = [
        [after.get(node, 31) for node in range(-1, 6)],
        [{ROOT: 11, 1: 9}.get(node, 31) for node in range(-1, 6)],
        [8] * 7,
    ]
    for draft_probs in (None, torch.full((3, 7, 32), 1 / 32).double()):
        verdict = verify_tree(tree, draft_probs, one_hot(rows), uniforms(3, 7))
        assert verdict.num_accepted.tolist() == [3, 1, 0]
        assert verdict.next_token_ids.tolist() == [20, 9, 8]
        assert verdict.path.tolist() == [
            [0, 3, 5, -1, -1, -1],
            [1, -1, -1, -1, -1, -1],
            [-1, -1, -1, -1, -1, -1],
        ]


def test_trees_of_different_sizes_share_a_batch():
    tree = pack_trees([TOKENS, [], [10]], [PARENTS, [], [-1]])
    target = one_hot([[10, 13, 31, 31, 15, 31, 20], [10] * 7, [10, 5] + [31] * 5])
    verdict = verify_tree(tree, None, target, uniforms(3, 7))
    assert verdict.num_accepted.tolist() == [3, 0, 1]
    assert verdict.next_token_ids.tolist() == [20, 10, 5]


def test_a_tree_that_is_a_chain_is_verified_token_by_token():
    num_rows, length, table = 2000, 3, random_table(7, vocab_size=5)
    source = torch.Generator().manual_seed(0)
    draft_ids = torch.randint(5, (num_rows, length), generator=source)
    contexts = torch.cat([draft_ids[:, :1], draft_ids], 1)
    draft_probs, target_probs = random_table(8, vocab_size=5)[contexts], table[contexts]
    noise = uniforms(num_rows, length + 1)
    tree = pack_trees(draft_ids.tolist(), [[-1, 0, 1]] * num_rows)
    walk = verify_tree(tree, draft_probs, target_probs, noise)
    chain = verify_speculative(
        draft_ids, draft_probs[:, :-1], target_probs, torch.full((num_rows,), length), noise
    )
    assert torch.equal(walk.num_accepted, chain.num_accepted)
    assert torch.equal(walk.next_token_ids, chain.next_token_ids)


def test_no_mass_left_gives_a_token_and_no_nan():
    probs = torch.tensor([0.5, 0.5, 0.0]).expand(1, 3, 3)
    tree = pack_trees([[0, 1]], [[-1, -1]])
    almost_one = torch.full((1, 3), 1.0 - 2.0**-53, dtype=torch.float64)
    agreeing = verify_tree(tree, probs, probs, almost_one)
    assert agreeing.num_accepted.item() == 1
    # Certain drafts: 0 is refused, and then 1 is all the target has left.
    certain = verify_tree(tree, None, probs, almost_one)
    assert certain.path.tolist() == [[1, -1]]
    # Both are refused and nothing is left of the target: rounding may lead there, NaN may not.
    exhausted = verify_tree(tree, probs, torch.tensor([[[1e-9, 1.0, 0.0]] * 3]), almost_one)
    assert exhausted.next_token_ids.item() in (0, 1)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: StaticTree(()), "branching is"),
        (lambda: StaticTree((2, 0)), "branching is"),
        (lambda: BestFirstTree(0), "tree num_nodes is 0"),
        (lambda: BestFirstTree(4, num_siblings=0), "tree num_siblings is 0"),
        (lambda: BestFirstTree(4, num_passes=0), "tree num_passes is 0"),
    ],
)
def test_shapes_that_cannot_be_meant_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def _grow(shape, table, limit=9):
    """A tree of the likeliest tokens of a table, by last token; the text before it ends in 0."""
    tree = shape.begin(limit)
    for _ in itertools.count():
        parents = tree.next_parents()
        if not parents:
            return tree
        for parent in parents:
            context = 0 if parent == ROOT else tree.token_ids[parent]
            found = likeliest_siblings(table[context][None], shape.num_siblings)
            tree.offer(parent, found.token_ids[0].tolist(), found.probs[0].tolist())


def _paths(tree):
    paths = []
    for token, parent in zip(tree.token_ids, tree.parents, strict=True):
        paths.append((*(paths[parent] if parent != ROOT else ()), token))
    return paths
