"""How good the reconstructions of `sfumato reconstruct` are, and what differential privacy allows.

All of this compares guesses with the images that were to stay secret: it is the judge's part, not
the attacker's, and everything it writes goes to `private/`.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from sfumato.recipes.reconstruct import (
    Scene,
    fleet_of,
    game_of,
    statistics_of,
    trained_decoder,
)
from sfumato.runs import Run

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor

    from sfumato.attack.heads import HeadRecipe
    from sfumato.report.leakage import Roc

SHOWN = 0.01
"""The false-positive rate that results are quoted at."""

REFERENCES = 256
"""Heads of the attacker's own whose guesses say what error an image has with those who lack it."""


@dataclass(frozen=True)
class Trials:
    """Guesses for m heads, a picture for each class (or one), and what they are held against."""

    guesses: "Tensor"
    truths: "Tensor"
    """m, wanted, k, c, h, w: the images that a head was trained on."""
    images: "Tensor"
    """m, wanted: which image of the data the first of them is."""
    partner: "Tensor"
    """m: another head that shares no image with this one."""
    usual: "Tensor"
    """n, 2: mean and deviation of the log error of each image with guesses of other heads."""
    accuracy: float
    """Of the heads, on all target images."""
    fake: "Tensor | None" = None
    """What is seen in weights that are Gaussian noise of the right covariance."""

    def errors(self, guesses: "Tensor", partner: "Tensor | None" = None) -> "Tensor":
        """Errors to the nearest image of the same head, or of its partner: m, wanted."""
        from sfumato.report.leakage import min_errors

        truths = self.truths if partner is None else self.truths[partner]
        found = min_errors(guesses.flatten(0, 1), truths.flatten(0, 1))
        return found.unflatten(0, guesses.shape[:2])

    def relative(self, partner: "Tensor | None" = None) -> "Tensor":
        """How much less than usual the error of one image is: deviations of its logarithm."""
        rows = slice(None) if partner is None else partner
        gaps = (self.guesses - self.truths[rows][:, :, 0]).flatten(2).square().mean(dim=2)
        mean, deviation = self.usual[self.images[rows]].unbind(dim=-1)
        return (gaps.log() - mean) / deviation


def evaluate(scene: Scene, stage: Run) -> None:
    """Attack heads that were trained on images the attacker never had; count, bound and draw."""
    from sfumato.report.figures import save_gallery, save_roc

    trials = attack(scene)
    scores, curves = score(scene, trials)
    scene.run.private.mkdir(exist_ok=True)
    scene.run.write_json("private/scores.json", scores)
    recipe, folder = scene.recipe, scene.run.private
    title = f"heads of {recipe.images} images, {describe(recipe)}"
    save_roc(folder / "roc.png", curves, bound=bound_curve(recipe), title=title)
    save_gallery(folder / "gallery.png", pick(trials))
    stage.finish({"text": tell(scene, scores), **public_numbers(scene)})


def attack(scene: Scene) -> Trials:
    """Train heads on the target images, and let the attacker's network look at their weights."""
    from sfumato.attack.decode import reconstruct
    from sfumato.attack.heads import accuracy_of_heads

    config, fleet, statistics = scene.config, fleet_of(scene, private=True), statistics_of(scene)
    decoder, game = trained_decoder(scene, fleet), game_of(scene, scene.targets)
    heads = fleet.heads(0, config.trials)
    guesses = reconstruct(decoder, statistics.standardise(heads), game).cpu()
    own = fleet_of(scene).heads(0, REFERENCES)
    references = reconstruct(decoder, statistics.standardise(own), game).cpu()
    fake = None
    if statistics.correlation is not None:
        noise = statistics.fake(config.trials, seed=config.seed).to(scene.device)
        fake = reconstruct(decoder, noise, game).cpu()
    accuracy = accuracy_of_heads(
        heads.weights[:256], scene.recipe, fleet.features, fleet.labels
    ).mean()
    size = scene.recipe.class_size if config.conditional else heads.members.shape[1]
    return Trials(
        guesses, game.truths(heads.members).cpu(), heads.members[:, ::size].cpu(),
        partners(config.trials, fleet.per_permutation), usual_errors(scene, references),
        float(accuracy), fake,
    )  # fmt: skip


def usual_errors(scene: Scene, references: "Tensor") -> "Tensor":
    """Mean and deviation of the log error of each target image with guesses of other heads."""
    import torch

    found = torch.empty(len(scene.targets), 2)
    pixels = scene.targets.pixels.flatten(1).float() / 127.5 - 1
    for label in range(references.shape[1]):
        own = scene.targets.labels == label if references.shape[1] > 1 else slice(None)
        images, guesses = pixels[own], references[:, label].flatten(1)
        logs = (torch.cdist(images, guesses).square() / images.shape[1]).clamp(min=1e-9).log()
        found[own] = torch.stack([logs.mean(dim=1), logs.std(dim=1)], dim=1)
    return found


def partners(count: int, per_permutation: int) -> "Tensor":
    """For each head another one of the same permutation: they share no image."""
    import torch

    numbers = torch.arange(count)
    first = numbers // per_permutation * per_permutation
    sizes = (count - first).clamp(max=per_permutation)
    after = first + (numbers - first + 1) % sizes
    # A last permutation of one head has nobody else: it is held against the first head of all.
    return torch.where(sizes == 1, 0, after)


def score(scene: Scene, trials: Trials) -> "tuple[dict[str, Any], dict[str, Roc]]":
    """Errors, curves, intervals, baselines and bounds."""
    from sfumato.report.leakage import nearest_neighbour_threshold, roc

    config, partner = scene.config, trials.partner
    true, null = trials.errors(trials.guesses), trials.errors(trials.guesses, partner)
    better, usual = trials.relative(), trials.relative(partner)
    curves = {"relative error": curve(better, usual), "error": curve(true, null)}
    threshold = nearest_neighbour_threshold(scene.targets, scene.own)
    scores: dict[str, Any] = {
        "trials": true.numel(),
        "test_images": len(trials.images.unique()),
        "accuracy_of_heads": trials.accuracy,
        **numbers(curves["relative error"]),
        **intervals(trials, better, usual, config.level),
        "by_error": numbers(curves["error"]),
        "median_error": float(true.median()),
        "median_error_of_null": float(null.median()),
        "threshold": threshold,
        "at_threshold": at_threshold(true, null, threshold, config.level),
        "blind_guess": blind(scene, threshold),
        "baselines": baselines(scene, trials),
        "privacy": promise(scene.recipe, better, usual, config.level),
    }
    if config.conditional:
        each = zip(scene.own.classes, true.T, null.T, strict=True)
        scores["by_class"] = {
            name: numbers(roc(a.numpy(), b.numpy())) for name, a, b in each
        }
    if trials.fake is not None:
        curves["error, Gaussian heads"] = curve(true, trials.errors(trials.fake))
        scores["gaussian_null"] = numbers(curves["error, Gaussian heads"])
    return scores, curves


def curve(true: "Tensor", null: "Tensor") -> "Roc":
    """The ROC of all classes together."""
    from sfumato.report.leakage import roc

    return roc(true.flatten().numpy(), null.flatten().numpy())


def numbers(found: "Roc") -> dict[str, float]:
    """What a curve is quoted by."""
    return {"auc": found.auc, "tpr_at_1_percent_fpr": found.tpr_at(SHOWN)}


def intervals(trials: Trials, true: "Tensor", null: "Tensor", level: float) -> dict[str, Any]:
    """Intervals of the same numbers that know that trials share images."""
    from sfumato.report.leakage import clustered_interval

    columns = [true, null, trials.images, trials.images[trials.partner]]
    arrays = [column.flatten().numpy() for column in columns]
    return {
        "auc_interval": clustered_interval(lambda c: c.auc, *arrays, level=level),
        "tpr_at_1_percent_fpr_interval": clustered_interval(
            lambda c: c.tpr_at(SHOWN), *arrays, level=level
        ),
    }


def at_threshold(true: "Tensor", null: "Tensor", threshold: float, level: float) -> dict[str, Any]:
    """The rates at the distance of a test image to its nearest neighbour, with exact intervals."""
    from sfumato.report.leakage import binomial_interval

    found: dict[str, Any] = {}
    for name, errors in (("tpr", true), ("fpr", null)):
        hits = int((errors <= threshold).sum())
        found[name] = hits / errors.numel()
        limits = binomial_interval(hits, errors.numel(), level)
        found[f"{name}_interval"] = [float(limit) for limit in limits]
    return found


def blind(scene: Scene, threshold: float) -> dict[str, float]:
    """How often one fixed picture of a class comes as close: what no leak explains."""
    from sfumato.report.leakage import blind_guess_rates

    rates = blind_guess_rates(scene.targets, scene.own, threshold)
    return {
        "best_picture": float(rates.best.mean()), "class_mean": float(rates.class_mean.mean())
    }  # fmt: skip


def baselines(scene: Scene, trials: Trials) -> dict[str, Any]:
    """The attacker's own image nearest to the guess, in its place; and the mean of the class."""
    import torch

    if not scene.config.conditional:
        return {}
    own = scene.own.pixels.float() / 127.5 - 1
    nearest, mean = torch.empty_like(trials.guesses), torch.empty_like(trials.guesses)
    for label in range(len(scene.own.classes)):
        images = own[scene.own.labels == label]
        mean[:, label] = images.mean(dim=0)
        for rows in torch.arange(len(trials.guesses)).split(512):
            guesses = trials.guesses[rows, label].flatten(1)
            nearest[rows, label] = images[torch.cdist(guesses, images.flatten(1)).argmin(dim=1)]
    return {
        name: numbers(curve(trials.errors(guesses), trials.errors(guesses, trials.partner)))
        for name, guesses in (("nearest_own_image", nearest), ("class_mean", mean))
    }


def promise(
    recipe: "HeadRecipe", true: "Tensor", null: "Tensor", level: float
) -> dict[str, Any]:
    """Epsilon as accounted, and the epsilon that the attack proves, for one image replaced."""
    import torch

    from sfumato.privacy.accounting import price
    from sfumato.report.leakage import epsilon_lower_bound

    delta = recipe.images**-1.1
    # One trial a head, for those of one head are not independent.
    rows = torch.arange(len(true))
    pair = [errors[rows, rows % errors.shape[1]].numpy() for errors in (true, null)]
    proved = epsilon_lower_bound(*pair, delta=delta, level=level)
    found: dict[str, Any] = {"relation": "replace", "delta": delta, "epsilon_proved": proved}
    if recipe.noise_multiplier:
        found["epsilon"] = price(recipe.costs(), delta, "replace")
        found["epsilon_add_or_remove"] = price(recipe.costs(), delta, "add-or-remove")
        found["epsilon_at_delta_1e-5"] = price(recipe.costs(), 1e-5, "replace")
        found["tpr_bound_at_1_percent_fpr"] = float(bound_at(recipe, SHOWN))
    return found


def bound_at(recipe: "HeadRecipe", fpr: Any) -> "np.ndarray":
    """What no attack can exceed, when one image was replaced by another."""
    from sfumato.privacy.tradeoff import largest_tpr

    return largest_tpr(
        fpr, rate=recipe.rate, noise_multiplier=recipe.noise_multiplier, steps=recipe.steps,
        relation="replace",
    )  # fmt: skip


def bound_curve(recipe: "HeadRecipe") -> "tuple[np.ndarray, np.ndarray] | None":
    """The bound as a curve, or None where nothing is promised."""
    import numpy as np

    if not recipe.noise_multiplier:
        return None
    fpr = np.concatenate([[0.0], np.geomspace(1e-4, 1, 200)])
    return fpr, bound_at(recipe, fpr)


def pick(trials: Trials, shown: int = 10) -> "list[tuple[str, Tensor, Tensor]]":
    """Pairs of truth and guess to look at: the best, those in the middle, and the worst."""
    gaps = (trials.truths - trials.guesses[:, :, None]).flatten(3).square().mean(dim=3).flatten(0, 1)
    errors, which = gaps.min(dim=1)
    order, middle = errors.argsort(), len(errors) // 2
    places = {
        "best": order[:shown],
        "median": order[middle - shown // 2 : middle + (shown + 1) // 2],
        "worst": order[-shown:],
    }
    truths, guesses = trials.truths.flatten(0, 1), trials.guesses.flatten(0, 1)
    return [
        (name, truths[rows, which[rows]] / 2 + 0.5, guesses[rows] / 2 + 0.5)
        for name, rows in places.items()
    ]


def describe(recipe: "HeadRecipe") -> str:
    """The recipe's promise in a few words."""
    if not recipe.noise_multiplier:
        return "no noise" if recipe.max_norm is None else "clipped, no noise"
    return f"noise multiplier {recipe.noise_multiplier:.3g}, rate {recipe.rate:g}"


def public_numbers(scene: Scene) -> dict[str, Any]:
    """What may stand in the summary: settings, and nothing that was measured on secret images."""
    recipe = scene.recipe
    return {
        "data": scene.targets.name, "base": scene.config.base, "images": recipe.images,
        "noise_multiplier": recipe.noise_multiplier, "steps": recipe.steps, "rate": recipe.rate,
    }  # fmt: skip


def tell(scene: Scene, scores: dict[str, Any]) -> str:
    """For people: what was attacked, and where to look."""
    recipe, folder = scene.recipe, scene.run.private
    privacy = scores["privacy"]
    lines = [
        f"Heads of {recipe.images} images of {scene.targets.name} on {scene.config.base}, "
        f"{describe(recipe)}:",
        f"  pictures  {folder}/gallery.png: truth above, what the attacker got below",
        f"  ROC       {folder}/roc.png",
        f"  scores    {folder}/scores.json: do not share",
    ]
    if "epsilon" in privacy:
        lines.insert(
            1,
            f"  promise   epsilon {privacy['epsilon']:.3g} at delta {privacy['delta']:.2g} (replace "
            f"one image); no attack has a TPR above {privacy['tpr_bound_at_1_percent_fpr']:.3g} "
            "at 1 % FPR",
        )
    else:
        lines.insert(1, "  promise   none: epsilon is infinite")
    return "\n".join(lines)
