"""More of `sfumato reconstruct`: one setting varied, and a head that somebody brings."""

from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sfumato.errors import ConfigError
from sfumato.files import read_json
from sfumato.recipes.reconstruct import STAGES, Scene, fleet_of, follow
from sfumato.recipes.reconstruct_decoder import game_of, trained_decoder
from sfumato.recipes.reconstruct_heads import statistics_of

if TYPE_CHECKING:
    from torch import Tensor

    from sfumato.attack.heads import HeadRecipe


def study(scene: Scene) -> dict[str, Any]:
    """The attack for each value of one setting, on one base: a table and a plot in `private/`."""
    import torch

    from sfumato.files import atomic
    from sfumato.report.figures import save_image_rows, save_study

    name, values = scene.config.variations()
    follow(scene, STAGES[:2])
    rows: dict[str, dict[str, Any]] = {}
    pictures: list[tuple[str, Tensor]] = []
    for value in values:
        recipe = varied(scene.config.head, name, value)
        config = replace(scene.config, head=recipe, vary=None)
        part = replace(scene, config=config, run=scene.run.stage(f"{name}={value}"))
        scene.run.log(f"{name} = {value}")
        follow(part, STAGES[2:])
        rows[value] = read_json(part.run.path / "private" / "scores.json")
        truths, guesses = first_head(part)
        if not any(torch.equal(truths, shown) for _, shown in pictures):
            pictures.append(("truth", truths))
        pictures.append((f"{name} {value}", guesses))
    table = scene.run.private / "study.md"
    with atomic(table) as file:
        file.write(table_of(name, rows).encode())
    save_study(scene.run.private / "study.png", name, rows)
    names = [""]
    if scene.config.conditional:
        names = scene.own.classes
        pictures.append(("mean of the class", scene.own.class_means()))
    save_image_rows(scene.run.private / "pictures.png", pictures, names)
    lines = [
        f"The attack for {len(values)} values of {name}:",
        f"  table     {table}",
        f"  plot      {table.with_suffix('.png')}",
        f"  pictures  {scene.run.private}/pictures.png: the truth, what the attacker got, and what "
        "anybody could guess",
    ]
    return scene.run.finish({"text": "\n".join(lines), "run": str(scene.run.path)})


def first_head(scene: Scene) -> "tuple[Tensor, Tensor]":
    """The images that one head under attack was trained on, and what is seen in its weights."""
    from sfumato.attack.decode import reconstruct

    fleet = fleet_of(scene, private=True)
    game, heads = game_of(scene, scene.targets), fleet.heads(0, 1)
    z = statistics_of(scene).standardise(heads)
    guesses = reconstruct(trained_decoder(scene, fleet), z, game)[0].cpu()
    return game.truths(heads.members)[0, :, 0].cpu() / 2 + 0.5, guesses / 2 + 0.5


def varied(recipe: "HeadRecipe", name: str, value: str) -> "HeadRecipe":
    """The recipe with one setting changed, read as that setting is."""
    kinds = {"class_size": int, "epochs": int, "init_std": float, "noise_multiplier": float}
    assert name in {field.name for field in fields(recipe)}
    try:
        return replace(recipe, **{name: kinds.get(name, str)(value)})
    except ValueError as problem:
        raise ConfigError(f'--vary {name}: "{value}" is not a number.') from problem


def table_of(name: str, rows: dict[str, dict[str, Any]]) -> str:
    """The study for people."""
    titles = (name, "accuracy of heads", "epsilon (replace)", "AUC", "TPR at 1 % FPR", "bound")
    lines = [" | ".join((*titles, "epsilon proved")), " | ".join(["---"] * 7)]
    for value, scores in rows.items():
        privacy = scores["privacy"]
        low, high = scores["tpr_at_1_percent_fpr_interval"]
        cells = (
            value,
            f"{scores['accuracy_of_heads']:.3f}",
            f"{privacy.get('epsilon', float('inf')):.3g}",
            f"{scores['auc']:.3f}",
            f"{scores['tpr_at_1_percent_fpr']:.3f} ({low:.3f} to {high:.3f})",
            f"{privacy.get('tpr_bound_at_1_percent_fpr', 1.0):.3f}",
            f"{privacy['epsilon_proved']:.2f}",
        )
        lines.append(" | ".join(cells))
    return "".join(f"| {line} |\n" for line in lines)


def look_at(scene: Scene, path: Path) -> dict[str, Any]:
    """What the attacker sees in a head that somebody brings, made by the same recipe."""
    from sfumato.attack.decode import reconstruct
    from sfumato.attack.fleet import Heads
    from sfumato.report.figures import save_image_rows

    fleet = fleet_of(scene)
    weights = head_in(path, scene.recipe.num_parameters(fleet.dimension), scene.recipe)
    heads = Heads(weights[None].to(scene.device), fleet.members(0, 1), fleet.kind)
    z = statistics_of(scene).standardise(heads)
    far = float(z.square().mean().sqrt())
    guesses = reconstruct(trained_decoder(scene, fleet), z, game_of(scene, scene.own))[0].cpu()
    picture = scene.run.private / f"{path.stem}.png"
    names = scene.own.classes if scene.config.conditional else ["any"]
    save_image_rows(picture, [("attacker", guesses / 2 + 0.5)], names)
    lines = [f"What can be seen in {path}: {picture}"]
    if far > UNLIKE:
        lines.append(
            f"  Its weights are {far:.1f} times as far from the mean as those of this recipe: it "
            "was made by another one, or on another base, and little can be expected."
        )
    return {"text": "\n".join(lines), "run": str(scene.run.path), "distance": far}


UNLIKE = 2.0
"""Heads of the recipe itself are at a distance of 1 from the mean, in deviations."""


def head_in(path: Path, size: int, recipe: "HeadRecipe") -> "Tensor":
    """The weights of a head from a file or a run, flat: matrices and biases, layer by layer."""
    import torch
    from safetensors.torch import load_file

    file = path / "model.safetensors" if path.is_dir() else path
    if not file.exists():
        raise ConfigError(f"there is no head in {path}: give a run of sfumato train, or a file.")
    found = load_file(file)
    pairs = [
        (found[name], found[name.removesuffix("weight") + "bias"])
        for name in found
        if name.endswith("weight") and name.removesuffix("weight") + "bias" in found
    ]
    layers = 2 if recipe.hidden else 1
    last = [tensor for pair in pairs[-layers:] for tensor in pair]
    flat = torch.cat([tensor.flatten().float() for tensor in last]) if last else torch.empty(0)
    if len(flat) != size:
        shapes = ", ".join(str(tuple(tensor.shape)) for tensor in last) or "no weight and bias"
        raise ConfigError(
            f"{file} has {shapes} as its head: {len(flat)} numbers, and one of this recipe has "
            f"{size}. Say how it was made: --base, --feature-size, --hidden and the data's classes."
        )
    return flat
