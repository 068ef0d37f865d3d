"""One budget for all that `sfumato release` does with private images.

A teacher, the statistics it saw, and a count for the data card: three kinds of Gaussian releases.
Noise of multiplier s on all of the data costs about 1/s^2 of what the whole budget allows (Dong et
al. 2022), so shares are shares of that; the teacher then gets exactly what is left, by the PLD
accountant.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from scipy.optimize import minimize_scalar

from sfumato.commands.train.train_state import number_of_steps
from sfumato.errors import ConfigError, PrivacyError
from sfumato.privacy.accounting import epsilon
from sfumato.privacy.budget import Budget, Plan, check_delta, make_plan
from sfumato.privacy.ledger import Ledger
from sfumato.privacy.releases import Release
from sfumato.settings.release import ReleaseSettings

CARD_SHARE = 0.002
"""What the count of near copies gets of the budget. Of 60,000 images its error is a thousandth, of
a few hundred a tenth: the card says so."""
USUAL_MOMENTS_NOISE, USUAL_CARD_NOISE = 10.0, 50.0
"""Where the teacher's noise was chosen by hand, and no budget is there to share."""


@dataclass(frozen=True)
class NoiseShares:
    """Noise multipliers: of statistics (None: they are not needed), of the card, of the teacher."""

    moments: float | None
    card: float
    teacher: float | None
    """None: the teacher is there already."""

    @property
    def words(self) -> str:
        """Who gets what."""
        each = {"teacher": self.teacher, "statistics": self.moments, "card": self.card}
        return ", ".join(f"{who} {noise:.3g}" for who, noise in each.items() if noise is not None)


def share_budget(
    config: ReleaseSettings,
    *,
    size: int,
    delta: float,
    length: int,
    classes: int,
    spent: Sequence[Release] | None = None,
) -> NoiseShares:
    """How the budget is shared, for `size` images (or people) and statistics of `length` numbers.

    Guarantee: with --epsilon, all three together cost at most that, `spent` included: the events of
    a teacher that is there already. A budget that cannot be kept is refused here.
    """
    check_delta(delta, size)
    if config.mode == "non-private" or config.epsilon == math.inf:
        return NoiseShares(None if config.k == 0 else 0.0, 0.0, None if spent is not None else 0.0)
    if config.epsilon is None:
        moments = USUAL_MOMENTS_NOISE if config.moments_noise is None else config.moments_noise
        # Priced before anything is spent: noise that has no price is refused here.
        epsilon([one_release(config, size, moments).release("moments", 0)], delta, config.relation)
        return NoiseShares(moments if config.k else None, USUAL_CARD_NOISE, config.noise_multiplier)
    budget = Budget(epsilon=config.epsilon, delta=delta)
    whole = least_noise_of(budget, size, config)
    card = whole / math.sqrt(CARD_SHARE)
    if spent is not None:
        before = [*spent, one_release(config, size, card).release("card", 0)]
        require_budget(config, before, delta, "the teacher")
        left = least_noise_of(budget, size, config, before) if config.k else None
        chosen = config.moments_noise
        if left is not None and chosen is not None and chosen < left:
            raise ConfigError(
                f"--moments-noise {chosen:g} would exceed --epsilon {config.epsilon:g}: after the "
                f"teacher at least {left:.3g} is needed. Leave one of the two out."
            )
        return NoiseShares(left if chosen is None or left is None else chosen, card, None)
    rows = size / (classes if config.per_class else 1)
    moments = moments_noise(config, whole, length, rows) if config.k else None
    plans = [one_release(config, size, noise) for noise in (card, moments) if noise is not None]
    before = [plan.release(f"other {number}", 0) for number, plan in enumerate(plans)]
    require_budget(config, before, delta, "--moments-noise or --moments-share")
    return NoiseShares(moments, card, teacher_noise(config, size, budget, before))


def require_budget(
    config: ReleaseSettings, releases: Sequence[Release], delta: float, what: str
) -> None:
    """Refuse a budget that is spent before all have their share."""
    cost = epsilon(releases, delta, config.relation)
    if config.epsilon is not None and cost >= config.epsilon:
        raise ConfigError(
            f"--epsilon {config.epsilon:g} is for teacher, statistics and card together, and with "
            f"{what} {cost:.3g} is spent before the rest has a share. Raise it, or spend less."
        )


def require_within(config: ReleaseSettings, releases: Sequence[Release], ledger: Ledger) -> None:
    """Refuse to release what would not keep the guarantee."""
    spent = epsilon(releases, ledger.header.delta, ledger.header.relation)
    if config.epsilon is not None and spent > config.epsilon * (1 + 1e-6):
        raise PrivacyError(
            f"the ledger adds up to epsilon {spent:.4g}, above the {config.epsilon:g} that was "
            "guaranteed: nothing is released. A step that was charged twice after a crash can do "
            "that. Start again with another --out."
        )


def one_release(config: ReleaseSettings, size: int, noise: float, max_norm: float = 1.0) -> Plan:
    """The plan of a single release of a sum over all of the data."""
    return make_plan(size=size, noise_multiplier=noise, max_norm=max_norm, relation=config.relation)


def least_noise_of(
    budget: Budget, size: int, config: ReleaseSettings, spent: Sequence[Release] = ()
) -> float:
    """The noise of a single release that spends all that is left."""
    return make_plan(budget, size=size, relation=config.relation, spent=spent).noise_multiplier


def moments_noise(config: ReleaseSettings, whole: float, length: int, rows: float) -> float:
    """The noise of the statistics: by hand, by their share, or by the best share."""
    if config.moments_noise is not None:
        return config.moments_noise
    share = config.moments_share
    if share == "auto":
        share = best_share(config.moments_slack * whole * math.sqrt(length) / rows)
    return whole / math.sqrt(share)


def best_share(error: float) -> float:
    """The share x that makes the sum of two relative errors least.

    The teacher's noise grows by 1 / sqrt(1 - x). The statistics, had they the whole budget, would
    be wrong by `error` (the norm of their noise over their own), and with a share of it by
    error / sqrt(x).
    """

    def loss(log_share: float) -> float:
        share = math.exp(log_share)
        return 1 / math.sqrt(1 - share) + error / math.sqrt(share)

    found = minimize_scalar(loss, bounds=(math.log(1e-4), math.log(0.5)), method="bounded")
    return math.exp(found.x)  # pyright: ignore


def teacher_noise(
    config: ReleaseSettings, size: int, budget: Budget, spent: Sequence[Release]
) -> float:
    """The least noise that training needs when the other releases are paid for."""
    plan = make_plan(
        budget,
        size=size,
        batch_size=config.batch_size,
        steps=number_of_steps(config.train, size),
        max_norm=config.max_grad_norm,
        relation=config.relation,
        spent=spent,
        noise_decay=config.noise_decay,
        clip_decay=config.clip_decay,
    )
    return plan.noise_multiplier


def teacher_settings(config: ReleaseSettings, noise: float | None) -> ReleaseSettings:
    """The settings with the teacher's noise in the place of the whole budget."""
    if config.mode == "non-private":
        return config
    return replace(config, epsilon=None, noise_multiplier=noise)
