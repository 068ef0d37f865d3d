"""A tiny reconstruction, for tests."""

from sfumato.attacks.heads import HeadRecipe
from sfumato.commands.reconstruct import command as reconstruct
from sfumato.commands.reconstruct.command import Config
from sfumato.runs import open_run

TINY = Config(
    head=HeadRecipe(lr=0.1), feature_norm=10.0, base_epochs=0.2, steps=4, batch_heads=8, width=8,
    stats_heads=256, trials=60, base_share=0.1,
)  # fmt: skip


def attack(config, out):
    """All of its stages."""
    with open_run(config, verb="reconstruct", out=out) as run:
        return reconstruct.run(config, run)
