"""Networks that are called like those of libraries which need not be installed."""

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
        count = self.config.num_class_embeds
        self.class_embedding = None if count is None else nn.Embedding(count, 3)
        self.conv = nn.Conv2d(self.config.in_channels, self.config.out_channels, 3, padding=1)

    def forward(self, sample, timestep, class_labels=None):
        if (self.class_embedding is None) != (class_labels is None):
            raise ValueError("class_labels and class_embedding go together")
        out = self.conv(sample) + timestep[:, None, None, None]
        if self.class_embedding is not None:
            out = out + self.class_embedding(class_labels)[:, :, None, None]
        return SimpleNamespace(sample=out)
