"""The smallest GANs that can be trained against the target of stripes."""

import torch
from toy_target import access_to_toy, some_images

from sfumato.attacks.gan_state import GanSettings, GanTask, new_gan
from sfumato.attacks.inversion_loss import InversionLoss
from sfumato.attacks.random_views import Views

METHODS = ("plg", "gmi", "ked")


def rng(seed=0):
    return torch.Generator().manual_seed(seed)


def new_lesson(method="plg", **settings):
    """Twelve images of noise with labels, and a target that can be asked."""
    small = {
        "iterations": 9,
        "gan_batch": 8,
        "d_steps": 2,
        "gan_width": 2,
        "latent": 4,
        "look_every": 3,
        "patience": 0,
    }
    images = some_images()
    return GanTask(
        images.pixels,
        images.labels,
        access_to_toy(),
        InversionLoss("margin", 0.5),
        Views(),
        method,
        GanSettings(**(small | settings)),
        torch.float32,
    )


def small_gan(task, seed=0):
    return new_gan(task.method, task.access, task.settings, seed)


def batch(n=8):
    """Codes and classes."""
    return torch.randn(n, 4, generator=rng(7)), torch.arange(n) % 3


def weights(net):
    return {name: value.detach().clone() for name, value in net.state_dict().items()}


def same(some, others):
    return some.keys() == others.keys() and all(torch.equal(some[k], others[k]) for k in some)
