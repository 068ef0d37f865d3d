"""Networks that are called like a UNet2DModel of diffusers, for machines that do not have it."""

from types import SimpleNamespace

from torch import nn


class StandIn(nn.Module):
    """What diffusers' UNet2DModel is called like, and the part of its config that matters."""

    def __init__(self, **config):
        super().__init__()
        usual = {
            "sample_size": 8,
            "in_channels": 3,
            "out_channels": 3,
            "time_embedding_type": "positional",
            "class_embed_type": None,
            "num_class_embeds": 2,
        }
        self.config = SimpleNamespace(**{**usual, **config})
        channels, count = self.config.in_channels, self.config.num_class_embeds
        self.class_embedding = None if count is None else nn.Embedding(count, channels)
        self.conv = nn.Conv2d(channels, self.config.out_channels, 3, padding=1)

    def forward(self, sample, timestep, class_labels=None):
        if (self.class_embedding is None) != (class_labels is None):
            raise ValueError("class_labels and class_embedding go together")
        out = self.conv(sample) + timestep[:, None, None, None]
        if self.class_embedding is not None:
            out = out + self.class_embedding(class_labels)[:, :, None, None]
        return SimpleNamespace(sample=out)


def grey(classes):
    """As --denoiser calls it: for grey images of 8 pixels."""
    return StandIn(in_channels=1, out_channels=1, num_class_embeds=classes)


def colour(classes):
    """For images that digits are not."""
    return StandIn(num_class_embeds=classes)


def of_two_classes(classes):
    """For other classes."""
    return StandIn(in_channels=1, out_channels=1)


def plain(classes):
    """A network that says nothing of itself."""
    return nn.Conv2d(1, 1, 3, padding=1)


def needs_a_package(classes):
    import a_package_that_nobody_has  # noqa: F401


def breaks(classes):
    raise RuntimeError("16 channels are no 5 groups")
