"""Distillation: the loss against its formula, whose answers are learned, and a student that does.

Also the plain training around it: shuffled epochs, and a run that was cut.
"""

from dataclasses import replace

import pytest
import torch
from people import portraits
from teachers import PUBLIC, inputs_of, teacher
from torch import nn

from sfumato.data.augment import Augmentation
from sfumato.privacy.sampling import Batch, Chunk
from sfumato.runs import Run
from sfumato.training.distil import cached, distil_step, distillation_loss
from sfumato.training.evaluate import logits_of
from sfumato.training.plain import inputs_of as plain_inputs_of
from sfumato.training.plain import shuffled_batches, train_plainly
from sfumato.training.plain_step import plain_step


def logits(seed, n=6, classes=5, scale=3.0):
    generator = torch.Generator().manual_seed(seed)
    return scale * torch.randn(n, classes, generator=generator)


def by_hand(student, wanted, temperature):
    """T^2 sum p log(p / q), in float64, image by image."""
    total = torch.zeros((), dtype=torch.float64)
    for z, t in zip(student, wanted, strict=True):
        q, p = ((row / temperature).exp() for row in (z, t))
        q, p = q / q.sum(), p / p.sum()
        total = total + (p * (p / q).log()).sum()
    return temperature**2 * total / len(student)


@pytest.mark.parametrize("temperature", [0.5, 1.0, 4.0, 30.0])
def test_loss_and_gradient_are_those_of_the_formula(temperature):
    z, t = logits(0).double().requires_grad_(), logits(1).double()
    wanted = by_hand(z, t, temperature)
    (gradient,) = torch.autograd.grad(wanted, z)
    other = z.detach().clone().requires_grad_()
    found = distillation_loss(other, t, temperature)
    found.backward()
    torch.testing.assert_close(found.detach(), wanted.detach())
    torch.testing.assert_close(other.grad, gradient)
    soft = [(row / temperature).softmax(dim=1) for row in (z.detach(), t)]
    torch.testing.assert_close(gradient, temperature * (soft[0] - soft[1]) / 6)


def test_at_a_high_temperature_it_is_a_regression_of_centred_logits():
    z, t = logits(0, n=50), logits(1, n=50)
    gap = (z - z.mean(dim=1, keepdim=True)) - (t - t.mean(dim=1, keepdim=True))
    regression = float(gap.square().sum(dim=1).mean() / (2 * 5))
    assert float(distillation_loss(z, t, 100.0)) == pytest.approx(regression, rel=0.02)
    assert float(distillation_loss(z, t, 1.0)) != pytest.approx(regression, rel=0.2)


def test_equal_answers_cost_nothing_and_others_something():
    assert float(distillation_loss(logits(0), logits(0), 4.0)) == 0
    assert float(distillation_loss(logits(0) + 7, logits(0), 4.0)) == pytest.approx(0, abs=1e-5)
    assert float(distillation_loss(logits(0), logits(1), 4.0)) > 0


def batch_of(places, step=0):
    places = torch.as_tensor(places)
    return Batch(step, (Chunk(places, torch.ones(len(places), dtype=torch.bool)),))


def linear(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Flatten(), nn.Linear(144, 3))


def tensors(inputs, places):
    return inputs.normalise(inputs.scale(torch.as_tensor(places)))


def test_answers_that_were_written_down_belong_to_their_images():
    student, order = linear(), [7, 3, 40, 3, 11]
    kept = logits(2, n=50, classes=3)
    step = distil_step(student, PUBLIC, cached(kept), temperature=4.0)
    numbers = step(batch_of(order))
    with torch.no_grad():
        right = distillation_loss(student(tensors(PUBLIC, order)), kept[order], 4.0)
        wrong = distillation_loss(student(tensors(PUBLIC, order)), kept[sorted(order)], 4.0)
    assert numbers["loss"] == pytest.approx(float(right), rel=1e-5)
    assert numbers["loss"] != pytest.approx(float(wrong), rel=1e-3)
    assert numbers["batch"] == 5


def test_a_step_leaves_the_gradient_of_the_mean_loss_and_nothing_older():
    student = linear()
    kept = logits(2, n=50, classes=3)
    step = distil_step(student, PUBLIC, cached(kept), temperature=4.0)
    step(batch_of([1, 2, 3]))
    step(batch_of([4, 5]))
    found = student[1].weight.grad.clone()
    student.zero_grad()
    distillation_loss(student(tensors(PUBLIC, [4, 5])), kept[[4, 5]], 4.0).backward()
    torch.testing.assert_close(found, student[1].weight.grad)


def test_labels_are_never_looked_at():
    other = inputs_of(replace(PUBLIC.images, labels=2 - PUBLIC.images.labels))
    kept = logits(2, n=50, classes=3)
    steps = [distil_step(linear(), r, cached(kept), temperature=4.0) for r in (PUBLIC, other)]
    assert steps[0](batch_of([1, 2, 3])) == steps[1](batch_of([1, 2, 3]))


def test_answers_to_all_images_are_in_order_without_dropout_and_leave_the_mode_alone():
    model = teacher(nn.Dropout(0.5)).train()
    model[2].eval()
    modes = [module.training for module in model.modules()]
    found = logits_of(model, PUBLIC, batch_size=7)
    assert [module.training for module in model.modules()] == modes
    assert not found.requires_grad
    with torch.no_grad():
        torch.testing.assert_close(found, model.eval()(tensors(PUBLIC, range(50))))


def run_at(path):
    path.mkdir(exist_ok=True)
    return Run(path)


def test_a_student_learns_what_a_linear_teacher_says(tmp_path):
    images = replace(portraits(400), private=False)
    inputs, master, student = inputs_of(images), linear(5), linear(6)
    with torch.no_grad():
        kept = master(tensors(inputs, range(400)))
    step = distil_step(student, inputs, cached(kept), temperature=10.0)
    train_plainly(student, 400, step, run_at(tmp_path), epochs=30, lr=0.03, batch_size=50)
    fresh = tensors(inputs_of(portraits(400, seed=9)), range(400))
    with torch.no_grad():
        agreed = (student(fresh).argmax(dim=1) == master(fresh).argmax(dim=1)).float().mean()
    assert float(agreed) > 0.95


class Cut(Exception):
    pass


@pytest.mark.parametrize("kind", ["distil", "plain"])
def test_a_student_that_was_cut_ends_with_the_same_weights(tmp_path, kind):
    # Dropout and BatchNorm as well: what is drawn depends on the step, what is averaged is kept.
    kept, taken = logits(2, n=50, classes=3), []
    inputs = plain_inputs_of(linear(), PUBLIC.images, torch.device("cpu"), seed=3, shift=2)
    assert inputs.augmentation == Augmentation(crop=2)

    def train(path, cut_at=None):
        torch.manual_seed(0)
        layers = nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.Dropout(), nn.Flatten()
        student = nn.Sequential(*layers, nn.Linear(400, 3))
        torch.manual_seed(torch.seed())
        step = distil_step(student, inputs, cached(kept), temperature=4.0)
        step = plain_step(student, inputs) if kind == "plain" else step

        def cut(batch):
            if batch.step == cut_at:
                raise Cut
            taken.append(batch.step)
            return step(batch)

        train_plainly(student, 50, cut, run_at(path), epochs=3, lr=0.01, batch_size=10)
        return student.state_dict()

    whole = train(tmp_path / "whole")
    with pytest.raises(Cut):
        train(tmp_path / "cut", cut_at=7)
    again = train(tmp_path / "cut")
    assert taken == [*range(15), *range(15)], "no step is taken twice"
    for name, tensor in whole.items():
        torch.testing.assert_close(again[name], tensor, rtol=0, atol=0, msg=name)


def places_of(batches):
    return [batch.indices.tolist() for batch in batches]


def test_an_epoch_takes_every_image_once_in_another_order_each_time():
    epochs = [places_of(shuffled_batches(12, 4, 3 * e, 3 * e + 3, seed=0)) for e in range(3)]
    orders = [[place for batch in epoch for place in batch] for epoch in epochs]
    assert all(sorted(order) == list(range(12)) for order in orders)
    assert len({tuple(order) for order in orders}) == 3


def test_what_is_left_over_by_one_epoch_is_not_left_over_for_ever():
    seen = places_of(shuffled_batches(11, 4, 0, 40, seed=0))
    assert {len(batch) for batch in seen} == {4}
    assert {place for batch in seen for place in batch} == set(range(11))


def test_batches_are_a_function_of_the_step():
    whole = list(shuffled_batches(10, 3, 0, 12, seed=1))
    rest = list(shuffled_batches(10, 3, 7, 12, seed=1))
    assert [batch.step for batch in rest] == [7, 8, 9, 10, 11]
    assert places_of(whole[7:]) == places_of(rest)
    assert places_of(shuffled_batches(10, 3, 7, 12, seed=2)) != places_of(rest)


def test_fewer_images_than_a_batch_are_one_batch(tmp_path):
    assert [len(b.indices) for b in shuffled_batches(3, 64, 0, 2, seed=0)] == [3, 3]
    steps = []

    def step(batch):
        steps.append(len(batch.indices))
        return {"loss": 0.0, "batch": 3.0}

    train_plainly(linear(), 3, step, run_at(tmp_path), epochs=4, lr=0.1)
    assert steps == [3] * 4
