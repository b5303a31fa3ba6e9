"""Whether sampled tokens follow the target here: adversarial toys, a chi-squared test, a control.

The verification rules that decode are run on this machine and device with 16-token distributions
that are hard on them: nearly disjoint ones, a draft surer than the target, a flat draft of a peaked
target, distributions with zeros. Two tokens are written per draw, the second as the loop would: by
the same round where it kept the first, by the target otherwise. Their joint law is p(x1) p(x2),
tested in 16 bins of both tokens together, so that a dependence between them shows as well.

The control takes a wrong residual (a refused token is replaced by a draw from p, a real bug of real
programs); the test has to reject it, or it proves nothing.
"""

import torch
from torch import Tensor

from eval.results import SamplingCheck
from specdec_runtime.noise import draw_by_inversion
from specdec_runtime.verification import Verification, verify_block, verify_speculative

NUM_DRAWS = 200_000
CONTROL_TOY = "a draft surer than the target"  # where the wrong residual is far from the right one
NUM_TOKENS = 16
SMALLEST_P_VALUE = 1e-6  # per test; a right rule falls below it once in a million machines
RULES = {"token by token": verify_speculative, "block": verify_block}


def sampling_checks(
    device: torch.device | str = "cpu", *, num_draws: int = NUM_DRAWS, seed: int = 0
) -> list[SamplingCheck]:
    """One check for each rule: the smallest p-value over the toys, and the control's."""
    return [_check(name, device, num_draws, seed) for name in RULES]


def toys(device: torch.device | str = "cpu") -> dict[str, tuple[Tensor, Tensor]]:
    """{name: (target, draft)}, each [16] float32."""
    ids = torch.arange(NUM_TOKENS, dtype=torch.float32)
    peaked, flat = (-0.8 * ids).softmax(0), torch.full((NUM_TOKENS,), 1.0 / NUM_TOKENS)
    sharper = (-2.0 * ids).softmax(0)
    even = torch.where(ids % 2 == 0, 1.0, 0.0)
    low = torch.where(ids < 10, 1.0, 0.0)
    pairs = {
        "nearly disjoint": (peaked, peaked.flip(0)),
        CONTROL_TOY: (peaked, sharper),
        "a flat draft of a peaked target": (sharper, flat),
        "zeros in both": (even / even.sum(), low / low.sum()),
    }
    return {name: (p.to(device), q.to(device)) for name, (p, q) in pairs.items()}


def p_value(tokens: Tensor, target: Tensor) -> float:
    """Of the chi-squared test that pairs [N, 2] of tokens are independent draws from [16] target."""
    first = torch.arange(NUM_TOKENS)
    bins = (5 * first[:, None] + 3 * first) % NUM_TOKENS  # [16, 16], both tokens matter
    joint = (target[:, None] * target).double().cpu()
    law = torch.zeros(NUM_TOKENS, dtype=torch.float64).index_add_(0, bins.ravel(), joint.ravel())
    pairs = tokens.cpu()
    found = torch.bincount(bins[pairs[:, 0], pairs[:, 1]], minlength=NUM_TOKENS).double()
    expected = law / law.sum() * len(pairs)
    possible = expected > 0
    if bool(found[~possible].any()):
        return 0.0
    statistic = ((found - expected)[possible] ** 2 / expected[possible]).sum()
    freedom = torch.tensor((int(possible.sum()) - 1) / 2, dtype=torch.float64)
    return float(torch.special.gammaincc(freedom, statistic / 2))


def draws(
    rule: str,
    target: Tensor,
    draft: Tensor,
    *,
    num_draws: int,
    seed: int,
    wrong_residual: bool = False,
) -> Tensor:
    """[num_draws, 2] tokens written by rounds of two drafted tokens."""
    noise = torch.Generator().manual_seed(seed)
    uniforms = torch.rand(num_draws, 6, generator=noise, dtype=torch.float64).to(target.device)
    drafted = draw_by_inversion(draft.expand(num_draws, -1), uniforms[:, :2])
    found: Verification = RULES[rule](
        drafted,
        draft.expand(num_draws, 2, -1),
        target.expand(num_draws, 3, -1),
        torch.full((num_draws,), 2, device=target.device),
        uniforms[:, 2:5],
    )
    fresh = draw_by_inversion(target.expand(num_draws, -1), uniforms[:, 5])
    following = fresh if wrong_residual else found.next_token_ids
    kept = found.num_accepted
    first = torch.where(kept >= 1, drafted[:, 0], following)
    second = torch.where(kept >= 2, drafted[:, 1], torch.where(kept == 1, following, fresh))
    if wrong_residual:  # the second token of a refused first one is right: draw it afresh
        again = draw_by_inversion(target.expand(num_draws, -1), uniforms[:, 4])
        second = torch.where(kept == 0, again, second)
    return torch.stack([first, second], dim=1)


def _check(rule: str, device: torch.device | str, num_draws: int, seed: int) -> SamplingCheck:
    smallest, control = 1.0, 1.0
    for name, (target, draft) in toys(device).items():
        found = draws(rule, target, draft, num_draws=num_draws, seed=seed)
        smallest = min(smallest, p_value(found, target))
        if name == CONTROL_TOY:
            wrong = draws(rule, target, draft, num_draws=num_draws, seed=seed, wrong_residual=True)
            control = p_value(wrong, target)
    return SamplingCheck(
        rule=rule,
        num_draws=num_draws,
        smallest_p_value=smallest,
        control_p_value=control,
        passed=smallest > SMALLEST_P_VALUE and control < SMALLEST_P_VALUE,
    )
