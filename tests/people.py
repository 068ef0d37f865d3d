"""Images of a few people, for guarantees about them."""

import torch

from sfumato.data.images import Images


def portraits(n=60, people=12, seed=0):
    """Images of a few people, an unequal number of each."""
    generator = torch.Generator().manual_seed(seed)
    pixels = torch.randint(0, 256, (n, 1, 12, 12), generator=generator, dtype=torch.uint8)
    ids = torch.cat(
        [torch.arange(people), torch.randint(people, (n - people,), generator=generator)]
    )
    return Images(
        pixels=pixels, labels=torch.arange(n) % 3, classes=("a", "b", "c"), name="portraits",
        private=True, people=ids,
    )  # fmt: skip
