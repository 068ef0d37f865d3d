"""Made-up judges of an inversion attack, and the four sets of images that they saw."""

import torch

from sfumato.metrics.judges import JudgedSets, JudgeOutput

NAMES, WIDTH = 10, 6


def cloud(labels, seed):
    """Features around a centre for each class: the same centres whatever the seed."""
    centres = 4 * torch.randn(NAMES, WIDTH, generator=torch.Generator().manual_seed(99))
    noise = torch.randn(len(labels), WIDTH, generator=torch.Generator().manual_seed(seed))
    return centres[labels] + noise


def answers(labels, seed, sure=2.0):
    """Logits of a judge that is right more often the surer it is."""
    noise = torch.randn(len(labels), NAMES, generator=torch.Generator().manual_seed(seed))
    return noise + sure * torch.nn.functional.one_hot(labels, NAMES)


def context(classes=5, each=(8, 12, 9, 7), seed=0, sure=2.0):
    """Labels of the four sets, in no order, and what one judge says of them."""
    generator = torch.Generator().manual_seed(seed)
    found = []
    for count in each:
        labels = torch.arange(classes).repeat(count)
        found.append(labels[torch.randperm(len(labels), generator=generator)])
    labels = JudgedSets(*found)
    seeds = iter(range(100 * seed, 100 * seed + 8))
    judged = labels.each(
        lambda some: JudgeOutput(answers(some, next(seeds), sure), cloud(some, next(seeds)))
    )
    return labels, judged
