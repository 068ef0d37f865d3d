"""Shadow models side by side are the models that they would be alone."""

import copy

import pytest
import torch
import torch.nn.functional as F
from audits import noise_images
from torch import nn

from sfumato.attacks.shadow_models import draw_halves, shadow_batches, train_copies
from sfumato.errors import ConfigError
from sfumato.training.inputs import Inputs


def some_images(count=24, seed=0):
    return noise_images(count, size=6, seed=seed)


def networks(count, *layers):
    torch.manual_seed(0)
    return [
        nn.Sequential(nn.Conv2d(1, 4, 3), nn.GroupNorm(2, 4), nn.Tanh(), *copy.deepcopy(layers),
                      nn.Flatten(), nn.Linear(64, 3))
        for _ in range(count)
    ]  # fmt: skip


def optimize(kind, **options):
    def make(tensors):
        optimizer = kind(tensors, **options)
        return optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5)

    return make


SGD = optimize(torch.optim.SGD, lr=0.3, momentum=0.9, weight_decay=1e-2)


def read(images):
    return Inputs(images, torch.device("cpu"), (0.5,), (0.5,))


def alone(model, inputs, batches, make):
    optimizer, schedule = make([p for p in model.parameters() if p.requires_grad])
    for batch in batches:
        x = inputs.normalise(inputs.scale(batch))
        optimizer.zero_grad()
        F.cross_entropy(model(x), inputs.images.labels[batch]).backward()
        optimizer.step()
        schedule.step()
    return model


@pytest.mark.parametrize("make", [SGD, optimize(torch.optim.Adam, lr=0.01)], ids=["sgd", "adam"])
@pytest.mark.parametrize("at_once", [3, 100])
def test_each_copy_is_the_model_that_is_trained_alone_on_its_batches(make, at_once):
    inputs, models = read(some_images()), networks(4)
    models[0][0].bias.requires_grad_(False)  # what does not learn, learns in no copy
    for model in models[1:]:
        model[0].bias.requires_grad_(False)
    inside = draw_halves(4, 24, seed=5)
    batches = torch.stack(
        [shadow_batches(inside[k], steps=5, size=8, seed=5, number=k) for k in range(4)]
    )
    copies = train_copies(copy.deepcopy(models), inputs, batches, make, at_once=at_once)
    answers = copies.logits(inputs, at_once=7)
    for k, model in enumerate(models):
        model = alone(model, inputs, batches[k], make)
        for name, value in model.named_parameters():
            assert torch.allclose(copies.weights[name][k], value, atol=2e-5), name
        expected = model(inputs.normalise(inputs.scale(slice(None))))
        assert torch.allclose(answers[k], expected, atol=1e-4)


def test_halves_come_in_pairs_and_batches_stay_inside():
    inside = draw_halves(8, 25, seed=1)
    assert torch.equal(inside.sum(0), torch.full((25,), 4))
    assert set(inside.sum(1).tolist()) == {12, 13}
    assert torch.equal(draw_halves(4, 25, seed=1), inside[:4])  # of its own number alone
    batches = shadow_batches(inside[3], steps=7, size=5, seed=1, number=3)
    assert bool(inside[3][batches].all())
    counts = torch.bincount(batches.flatten(), minlength=25)[inside[3]]
    assert int(counts.max()) - int(counts.min()) <= 1
    assert not torch.equal(batches, shadow_batches(inside[3], steps=7, size=5, seed=1, number=4))


@pytest.mark.parametrize("count", [0, 1, 3])
def test_shadow_models_that_are_not_pairs_are_refused(count):
    with pytest.raises(ConfigError, match="come in pairs"):
        draw_halves(count, 10, 0)


def test_a_batch_norm_that_learns_is_refused_by_name_and_a_frozen_one_is_not():
    inputs, models = read(some_images()), networks(2, nn.BatchNorm2d(4))
    batches = torch.zeros(2, 1, 4, dtype=torch.int64)
    with pytest.raises(ConfigError, match='"3" is a BatchNorm'):
        train_copies(models, inputs, batches, SGD)
    for model in models:
        model[3].eval()
    copies = train_copies(models, inputs, batches, SGD)
    assert bool(copies.buffers["3.num_batches_tracked"].eq(0).all())


def test_dropout_differs_from_copy_to_copy_and_ends_with_training():
    model = networks(1, nn.Dropout(0.5))[0]
    batches = torch.arange(8).expand(2, 1, 8)
    inputs = read(some_images())
    copies = train_copies([model, copy.deepcopy(model)], inputs, batches, SGD)
    weight = copies.weights["5.weight"]
    assert not torch.allclose(weight[0], weight[1])
    assert torch.equal(copies.logits(inputs), copies.logits(inputs))
