"""The attack of `sfumato reconstruct`: whole, for each value of a setting, or on your own head."""

from collections.abc import Mapping
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sfumato.attacks.heads import HeadRecipe
from sfumato.attacks.shadow_heads import Heads
from sfumato.attacks.weight_decoder_training import reconstruct
from sfumato.commands.reconstruct.base import base_network, features
from sfumato.commands.reconstruct.context import LEARNT, Context, shadow_heads_of, statistics_of
from sfumato.commands.reconstruct.decoder import shadow, stats, task_of, train, trained_decoder
from sfumato.commands.reconstruct.evaluate import DELTA, at_most, evaluate
from sfumato.errors import ConfigError
from sfumato.files import atomic, read_json
from sfumato.models.zoo import read_state
from sfumato.reporting.figures import save_image_rows, save_study
from sfumato.reporting.scores import keep_findings
from sfumato.reporting.words import round_down, round_up
from sfumato.runs import Run
from sfumato.stages import Stage, run_stages

SHARED = ("base", "features")
"""Stages that may belong to another run: several attacks have one base."""


def attack_weights(context: Context, asked: str) -> dict[str, Any]:
    """Run the stages up to this one."""
    stages = (
        Stage(name="base", run=base_network),
        Stage(name="features", run=features),
        Stage(name="shadow", run=shadow),
        Stage(name="stats", run=stats),
        Stage(name="train", run=train),
        Stage(name="evaluate", run=evaluate),
    )

    def place(name: str) -> Run:
        return (context.public if name in SHARED else context.run).stage(name)

    return run_stages(context, stages, asked, place)


def study(context: Context) -> dict[str, Any]:
    """The attack for each value of one setting, on one base: a table and a plot in `private/`."""
    name, _ = context.config.varied
    attack_weights(context, "features")
    rows: dict[str, dict[str, Any]] = {}
    pictures: list[tuple[str, Tensor]] = []
    for value, recipe in context.config.variations().items():
        config = replace(context.config, head=recipe, vary=None)
        part = replace(context, config=config, run=context.run.stage(f"{name}={value}"))
        context.run.log(f"{name} = {value}")
        attack_weights(part, "evaluate")
        rows[value] = read_json(part.run.path / "private" / "scores.json")
        truths, guesses = first_head(part)
        if not any(torch.equal(truths, shown) for _, shown in pictures):
            pictures.append(("truth", truths))
        pictures.append((f"{name.replace('_', ' ')} {value}", guesses))
    table = context.run.private / "study.md"
    with atomic(table) as file:
        file.write(table_of(name, rows).encode())
    save_study(context.run.private / "study.png", name, rows)
    names = [""]
    if context.config.conditional:
        names = context.own.classes
        pictures.append(("mean of the class", context.own.class_means()))
    save_image_rows(context.run.private / "pictures.png", pictures, names)
    keep_findings(context.run, "reconstruct")
    lines = [
        f"The attack for {len(rows)} values of {name}:",
        f"  table     {table}",
        f"  plot      {table.with_suffix('.png')}",
        f"  pictures  {context.run.private}/pictures.png: the truth, what the attacker got, and "
        "what anybody could guess",
        f"  the rest  {context.run.path}: {LEARNT}",
    ]
    return context.run.finish({"text": "\n".join(lines), "run": str(context.run.path)})


def first_head(context: Context) -> tuple[Tensor, Tensor]:
    """The images that one head under attack was trained on, and what is seen in its weights."""
    shadow_heads = shadow_heads_of(context, private=True)
    task, heads = task_of(context, context.targets), shadow_heads.heads(0, 1)
    z = statistics_of(context).standardise(heads)
    guesses = reconstruct(trained_decoder(context, shadow_heads), z, task)[0].cpu()
    return task.truths(heads.members)[0, :, 0].cpu() / 2 + 0.5, guesses / 2 + 0.5


def table_of(name: str, rows: dict[str, dict[str, Any]]) -> str:
    """The study for people."""
    at = f"at delta {DELTA:.2g}"
    titles = (
        name,
        "accuracy of heads",
        f"epsilon {at}, one image replaced",
        "AUC",
        "TPR at 1 % FPR",
        "bound",
        f"epsilon proved {at}",
    )
    lines = [" | ".join(titles), " | ".join(["---"] * len(titles))]
    for value, scores in rows.items():
        privacy = scores["privacy"]
        low, high = scores["tpr_at_1_percent_fpr_interval"]
        cells = (
            value,
            f"{scores['accuracy_of_heads']:.3f}",
            round_up(privacy.get("epsilon", float("inf"))),
            f"{scores['auc']:.3f}",
            f"{scores['tpr_at_1_percent_fpr']:.3f} ({low:.3f} to {high:.3f})",
            at_most(privacy.get("tpr_bound_at_1_percent_fpr", 1.0)),
            round_down(privacy["epsilon_proved"]),
        )
        lines.append(" | ".join(cells))
    return "".join(f"| {line} |\n" for line in lines)


def attack_brought_head(context: Context, path: Path) -> dict[str, Any]:
    """What the attacker sees in a head that you bring, made by the same recipe."""
    shadow_heads = shadow_heads_of(context)
    weights = head_in(path, context.recipe, shadow_heads.dimension)
    heads = Heads(weights[None].to(context.device), shadow_heads.members(0, 1), shadow_heads.kind)
    z = statistics_of(context).standardise(heads)
    far = float(z.square().mean().sqrt())
    guesses = reconstruct(trained_decoder(context, shadow_heads), z, task_of(context, context.own))[
        0
    ].cpu()
    # Heads of one name are different heads, and one head has one picture.
    digest = sha256(weights.numpy().tobytes()).hexdigest()
    picture = context.run.private / f"target-{path.stem}-{digest[:8]}.png"
    names = context.own.classes if context.config.conditional else ["any"]
    save_image_rows(picture, [("attacker", guesses / 2 + 0.5)], names)
    lines = [f"What can be seen in {path}: {picture}"]
    trained_on = examples_trained_on(path)
    if trained_on not in (None, context.recipe.images):
        lines.append(
            f"  It was trained on {trained_on} examples, and heads of this recipe "
            f"{context.recipe.images}, so little can be expected. Attack it by a run with "
            f"--images {trained_on}."
        )
    if far > UNLIKE:
        lines.append(
            f"  Its weights are {far:.1f} times as far from the mean as those of this recipe: it "
            "was made by another one, or on another base, and little can be expected."
        )
    return {"text": "\n".join(lines), "run": str(context.run.path), "distance": far}


def examples_trained_on(path: Path) -> int | None:
    """How many examples a run of sfumato train was trained on; None of a file, which does not
    say."""
    if not (path / "plan.json").exists():
        return None
    plan = read_json(path / "plan.json")
    return round(plan["expected_batch"] / plan["rate"])


UNLIKE = 2.0
"""Heads of the recipe itself are at a distance of 1 from the mean, in deviations."""


def head_in(path: Path, recipe: HeadRecipe, d: int) -> Tensor:
    """The weights of a head from a file or a run, flat: matrices and biases, layer by layer.

    A model's head is known by its shape: the last weight of that shape that has a bias.
    """
    found = tensors_in(path)
    flat: list[Tensor] = []
    for rows, columns in recipe.layers(d):
        stems = [
            name.removesuffix("weight")
            for name, tensor in found.items()
            if name.endswith("weight") and tuple(tensor.shape) == (rows, columns)
        ]
        stems = [stem for stem in stems if f"{stem}bias" in found]
        if not stems:
            shapes = sorted({str(tuple(t.shape)) for t in found.values() if t.ndim == 2})
            raise ConfigError(
                f"{path} has no layer of {rows} x {columns} with a bias, and so no head of this "
                f"recipe; it has {', '.join(shapes) or 'no matrix at all'}. Say how it was made: "
                "--base, --feature-size, --hidden and the data's classes."
            )
        flat += [found[f"{stems[-1]}weight"].flatten(), found[f"{stems[-1]}bias"]]
    whole = torch.cat(flat).float()
    if not bool(whole.isfinite().all()):
        raise ConfigError(f"the head in {path} has weights that are not finite: nothing is seen.")
    return whole


def tensors_in(path: Path) -> Mapping[str, Tensor]:
    """The tensors of a run's model, or of a file."""
    file = path / "model.safetensors" if path.is_dir() else path
    if not file.exists():
        raise ConfigError(f"there is no head in {path}: give a run of sfumato train, or a file.")
    return read_state(file)
