"""How good the reconstructions of `sfumato reconstruct` are, and what differential privacy allows.

All of this compares guesses with the images that were to stay secret: it is the judge's part, not
the attacker's, and everything it writes goes to `private/`.
"""

import math
from typing import Any

import numpy as np

from sfumato.attacks.heads import HeadRecipe, accuracy_of_heads
from sfumato.attacks.weight_decoder_training import nearest_images, reconstruct
from sfumato.commands.reconstruct.context import (
    LEARNT,
    Context,
    own_features,
    shadow_heads_of,
    statistics_of,
)
from sfumato.commands.reconstruct.decoder import task_of, trained_decoder
from sfumato.metrics.reconstruction_trials import (
    Trials,
    pick_examples,
    reconstruction_scores,
    shuffle_partners,
    usual_errors,
)
from sfumato.privacy.accounting import price
from sfumato.privacy.audit.lower import many_run_bound
from sfumato.privacy.audit.tradeoff import largest_tpr
from sfumato.privacy.releases import LEAST_NOISE
from sfumato.reporting.figures import save_gallery, save_roc
from sfumato.reporting.scores import keep_scores
from sfumato.reporting.words import round_up
from sfumato.runs import Run

DELTA = 1e-5
"""Of all that is guaranteed and proved here."""
REFERENCES = 256
"""Heads of the attacker's own whose guesses say what error an image has with those who lack it."""


def evaluate(context: Context, stage: Run) -> None:
    """Attack heads that were trained on images the attacker never had; count, bound and draw."""
    trials = attack_heads(context)
    scores, curves = reconstruction_scores(
        trials, context.targets, context.own, level=context.config.level
    )
    kappa = scores["blind_guess"]["best_picture"]
    scores["privacy"] = epsilon_bounds(context.recipe, trials, context.config.level, kappa)
    keep_scores(context.run, "reconstruct", scores)
    recipe, folder = context.recipe, context.run.private
    title = f"heads of {recipe.images} images, {describe_recipe(recipe)}"
    # What privacy bounds is a test about one image, against real heads with another in its place.
    spoken = {"relative error", "error"} if context.config.conditional else set()
    bound = bound_curve(recipe) if spoken else None
    unspoken = "" if bound is None else " (not what the bound is about)"
    named = {
        f"{name}: AUC {curve.auc:.3f}{'' if name in spoken else unspoken}": (curve.fpr, curve.tpr)
        for name, curve in curves.items()
    }
    save_roc(
        folder / "roc.png",
        named,
        others="images of other heads taken for this one's",
        title=title,
        bound=bound and ("no attack can exceed (replace one)", bound),
    )
    blocks = pick_examples(trials)
    shown = len(blocks[0][1])
    titles = context.own.classes[:shown] if context.config.conditional else [""] * shown
    save_gallery(folder / "gallery.png", blocks, titles)
    context.run.say(headline(scores))
    # The summary may be shared: settings, and nothing that was measured on secret images.
    settings = {
        name: getattr(recipe, name) for name in ("images", "noise_multiplier", "steps", "rate")
    }
    about = {"data": context.targets.name, "base": context.config.base}
    stage.finish({"text": tell(context, scores), **about, **settings})


def attack_heads(context: Context) -> Trials:
    """Train heads on the target images, and let the attacker's network look at their weights."""
    config, shadow_heads, statistics = (
        context.config,
        shadow_heads_of(context, private=True),
        statistics_of(context),
    )
    decoder, task = trained_decoder(context, shadow_heads), task_of(context, context.targets)
    partner = shuffle_partners(config.trials, shadow_heads.per_permutation)
    heads = shadow_heads.heads(0, config.trials)
    guesses = reconstruct(decoder, statistics.standardise(heads), task).cpu()
    own = shadow_heads_of(context).heads(0, REFERENCES)
    references = reconstruct(decoder, statistics.standardise(own), task).cpu()
    fake = None
    if statistics.correlation is not None:
        noise = statistics.fake(config.trials, seed=config.seed).to(context.device)
        fake = reconstruct(decoder, noise, task).cpu()
    simple = {}
    if config.conditional and not context.recipe.hidden:
        own_images = task_of(context, context.own)
        found = nearest_images(heads, context.recipe, own_features(context), own_images)
        simple["nearest_by_weights"] = found.cpu()
    accuracy = accuracy_of_heads(
        heads.weights[:256], context.recipe, shadow_heads.features, shadow_heads.labels
    ).mean()
    size = context.recipe.class_size if config.conditional else heads.members.shape[1]
    return Trials(
        guesses,
        task.truths(heads.members).cpu(),
        heads.members[:, ::size].cpu(),
        partner,
        usual_errors(context.targets, references),
        float(accuracy),
        fake,
        simple,
    )


def epsilon_bounds(
    recipe: HeadRecipe, trials: Trials, level: float, kappa: float
) -> dict[str, Any]:
    """Epsilon as accounted, and the epsilon that the attack proves, for one image replaced.

    `kappa` is how often a blind guess comes as close as the threshold: the bound there is the one
    on reconstruction (ReRo).
    """
    # One trial a head, and no head in both lists: trials of one head are not independent.
    half = len(trials.guesses) // 2
    pair = -trials.records()[:half].numpy(), -trials.records(null=True)[half:].numpy()

    def proved(delta: float) -> float:
        return many_run_bound(*pair, delta=delta, confidence=level, relation="replace").epsilon

    found: dict[str, Any] = {"relation": "replace", "delta": DELTA, "confidence": level}
    # Such a delta as is published for heads: above 1/n, it forgives whole images. What is published
    # with it is the epsilon of one image added or removed, the smaller of the two.
    published = {"delta": recipe.images**-1.1}
    for some in (found, published):
        some["epsilon_proved"] = proved(some["delta"])
        if recipe.noise_multiplier >= LEAST_NOISE:
            events = recipe.mechanisms()
            some["epsilon"] = price(events, some["delta"], "replace")
            some["epsilon_add_or_remove"] = price(events, some["delta"], "add-or-remove")
    found["at_published_delta"] = published
    if recipe.noise_multiplier >= LEAST_NOISE:
        found["tpr_bound_at_1_percent_fpr"] = float(bound_at(recipe, 0.01))
        found["reconstruction_bound_if_best_picture_is_kappa"] = float(bound_at(recipe, kappa))
    return found


def bound_at(recipe: HeadRecipe, fpr: Any) -> np.ndarray:
    """What no attack can exceed, when one image was replaced by another."""
    return largest_tpr(
        fpr,
        rate=recipe.rate,
        noise_multiplier=recipe.noise_multiplier,
        steps=recipe.steps,
        relation="replace",
    )


def bound_curve(recipe: HeadRecipe) -> tuple[np.ndarray, np.ndarray] | None:
    """The bound as a curve, or None where nothing is guaranteed."""
    if not recipe.noise_multiplier:
        return None
    fpr = np.concatenate([[0.0], np.geomspace(1e-4, 1, 200)])
    return fpr, bound_at(recipe, fpr)


def describe_recipe(recipe: HeadRecipe) -> str:
    """The recipe's guarantee in a few words."""
    if not recipe.noise_multiplier:
        return "no noise" if recipe.max_norm is None else "clipped, no noise"
    return f"noise multiplier {recipe.noise_multiplier:.3g}, rate {recipe.rate:g}"


def headline(scores: dict[str, Any]) -> str:
    """One line for the screen; nothing else may keep it."""
    low, high = scores["tpr_at_1_percent_fpr_interval"]
    return (
        f"the attack (private): AUC {scores['auc']:.3f}, TPR "
        f"{scores['tpr_at_1_percent_fpr']:.3f} ({low:.3f} to {high:.3f}) at 1 % FPR"
    )


def tell(context: Context, scores: dict[str, Any]) -> str:
    """For people: what was attacked, and where to look."""
    recipe, folder = context.recipe, context.run.private
    privacy = scores["privacy"]
    lines = [
        f"Heads of {recipe.images} images of {context.targets.name} on {context.config.base}, "
        f"{describe_recipe(recipe)}:",
        f"  pictures  {folder}/gallery.png: truth above, what the attacker got below",
        f"  ROC       {folder}/roc.png",
        f"  scores    {folder}/scores.json: do not share",
        f"  the rest  {context.run.path}: {LEARNT}",
    ]
    guaranteed = "none: epsilon is infinite"
    if "epsilon" in privacy:
        published = privacy["at_published_delta"]
        replaced, added = (
            round_up(published["epsilon"]),
            round_up(published["epsilon_add_or_remove"]),
        )
        guaranteed = (
            f"epsilon {round_up(privacy['epsilon'])} at delta {privacy['delta']:.2g}, one image "
            f"replaced (at the published delta, {published['delta']:.2g}: {replaced}; one image "
            f"added or removed, as published: {added}); at 1 % FPR no attack has a TPR above "
            f"{at_most(privacy['tpr_bound_at_1_percent_fpr'])}"
        )
    lines.insert(1, f"  guarantee {guaranteed}")
    return "\n".join(lines)


def at_most(tpr: float) -> str:
    """A bound, rounded up: to three decimals, or as many as tell it from 1, which is none."""
    for digits in range(3, 10):
        rounded = math.ceil(round(tpr * 10**digits, 3)) / 10**digits
        if rounded < 1:
            return f"{rounded:.{digits}f}"
    return "1"
