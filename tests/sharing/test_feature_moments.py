"""Feature statistics: what one record can change, and in what units they are measured."""

import numpy as np
import pytest
import torch
from people import portraits
from safetensors.torch import load, save
from teachers import (
    PUBLIC,
    Explosive,
    faces,
    gauge_of,
    inputs_of,
    largest_move,
    sums_with,
    teacher,
    vectors_of,
)  # fmt: skip
from torch import nn

from sfumato.data.people import People
from sfumato.errors import ConfigError, PrivacyError
from sfumato.models.observe import normalisation_layers
from sfumato.privacy.moments import weighted_means, with_counter
from sfumato.sharing.moments import (
    LEAST_VARIANCE,
    MomentScale,
    make_gauge,
    observe_features,
    sum_moments,
)


@pytest.mark.parametrize("first", [None, Explosive()])
@pytest.mark.parametrize("slack", [0.3, 1.0, 3.0])
def test_no_record_moves_the_table_by_more_than_the_bound(first, slack):
    model, gauge = teacher(first), gauge_of(teacher(), slack)
    moved = largest_move(sums_with(model, gauge), faces())
    assert moved <= gauge.max_norm * (1 + 1e-6)
    if slack < 1:
        assert moved > 0.99 * gauge.max_norm, "the bound is used, and not just never reached"


def test_the_bound_holds_for_all_groups_together():
    model, gauge, images = teacher(Explosive()), gauge_of(teacher()), faces()

    def by_class(some):
        return sum_moments(model, inputs_of(some), gauge, some.labels, 3, batch_size=5)

    assert largest_move(by_class, images) <= gauge.max_norm * (1 + 1e-6)
    whole = sums_with(model, gauge)(images)
    torch.testing.assert_close(by_class(images).sum(dim=0), whole[0])
    for label in range(3):
        alone = images.select(torch.nonzero(images.labels == label).flatten())
        torch.testing.assert_close(by_class(images)[label], sums_with(model, gauge)(alone)[0])


@pytest.mark.parametrize("most", [1, 3, 8])
def test_no_person_moves_the_table_by_more_than_the_bound(most):
    # Of a person with more images than are taken, the same ones whatever others are there.
    model, gauge, images = teacher(), gauge_of(teacher()), portraits()

    def table(some):
        return sum_moments(model, inputs_of(some, people=People(some.people, most)), gauge)

    whole = table(images)
    for person in range(12):
        rest = images.select(torch.nonzero(images.people != person).flatten())
        assert float((whole - table(rest)).norm()) <= gauge.max_norm * (1 + 1e-6)
    every = sums_with(model, gauge)(images)
    assert float(whole[0, -1]) < float(every[0, -1]) / 2, "a person counts once, not once an image"


def test_a_person_has_the_mean_of_the_images_that_are_taken():
    model, gauge, images = teacher(), gauge_of(teacher(), slack=1e3), portraits()
    people = People(images.people, 3)
    found = sum_moments(model, inputs_of(images, people=people), gauge, batch_size=5)
    each = vectors_of(model, images, gauge)
    taken = [each[people.pick(torch.tensor([who]), 0, 0)].mean(dim=0) for who in range(12)]
    torch.testing.assert_close(found[0, :-1], sum(taken), rtol=1e-5, atol=1e-5)


def test_people_cannot_be_counted_by_class():
    images = portraits()
    inputs = inputs_of(images, people=People(images.people, 2))
    with pytest.raises(ConfigError, match="a person may be in several"):
        sum_moments(teacher(), inputs, gauge_of(teacher()), images.labels, 3)


def test_an_image_that_breaks_the_model_counts_as_nobody():
    model, gauge, images = teacher(Explosive()), gauge_of(teacher()), faces()
    without = images.select([0, *range(2, 24)])
    whole = sums_with(model, gauge)(images)
    assert whole.isfinite().all()
    torch.testing.assert_close(whole, sums_with(model, gauge)(without))


def test_the_table_does_not_depend_on_batches():
    model, gauge, images = teacher(), gauge_of(teacher()), faces()
    tables = [sums_with(model, gauge, batch_size=size)(images) for size in (1, 5, 24, 512)]
    for other in tables[1:]:
        torch.testing.assert_close(tables[0], other, rtol=1e-6, atol=1e-6)


def test_the_table_is_that_of_a_slow_loop_over_records():
    model, gauge, images = teacher(), gauge_of(teacher(), 1.0), faces()
    total = np.zeros(2 * (4 + 6) + 1)
    for pixels in images.pixels:
        x = (pixels[None].float() / 255 - 0.5) / 0.5
        first = model[1](x)
        second = model[4](model[3](model[2](first)))
        row = []
        for entered in (first, second):
            maps = entered[0].detach().double().numpy()
            row.append(maps.mean(axis=(1, 2)) / float(gauge.units[len(row)]))
            row.append((maps**2).mean(axis=(1, 2)) / float(gauge.units[len(row)]))
        vector = np.concatenate([*row, [gauge.max_norm / 4]])
        total += vector * min(1.0, gauge.max_norm / np.linalg.norm(vector))
    found = sums_with(model, gauge)(images)
    np.testing.assert_allclose(found[0].numpy(), total, rtol=1e-5, atol=1e-5)


def test_a_model_is_looked_at_in_evaluation_mode_and_left_as_it_was():
    torch.manual_seed(0)
    norms = nn.BatchNorm2d(2), nn.BatchNorm2d(2)
    model = nn.Sequential(nn.Dropout(), nn.Conv2d(1, 2, 3), *norms, nn.Flatten()).eval()
    calm = make_gauge(model, PUBLIC, 1.0)
    model.train()[2].eval()
    excited = make_gauge(model, PUBLIC, 1.0)
    torch.testing.assert_close(calm.units, excited.units)
    assert [m.training for m in model] == [True, True, False, True, True]
    assert not norms[1].running_mean.any()
    passes = observe_features(model, PUBLIC, batch_size=10)
    next(passes)
    passes.close()
    assert [m.training for m in model] == [True, True, False, True, True]
    assert not any(m._forward_pre_hooks for m in model.modules())


def test_the_gauge_reads_public_images_alone():
    with pytest.raises(PrivacyError, match='would read "faces", which is private'):
        make_gauge(teacher(), inputs_of(faces()), 1.0)


def test_a_teacher_without_normalisation_is_refused():
    with pytest.raises(ConfigError, match=r"no normalisation layer.*--k 0"):
        make_gauge(nn.Sequential(nn.Flatten(), nn.Linear(144, 3)), PUBLIC, 1.0)


def test_public_blocks_have_the_unit_as_their_usual_norm():
    model = teacher()
    gauge = gauge_of(model, slack=1.0)
    vectors = vectors_of(model, PUBLIC.images, gauge)
    for block in vectors.split(gauge.blocks, dim=1):
        assert float(block.norm(dim=1).median()) == pytest.approx(1.0, rel=1e-4)
    counted = with_counter(vectors, gauge.weight).norm(dim=1)
    assert float(counted.median()) == pytest.approx(gauge.max_norm, rel=1e-4)
    assert gauge_of(model, slack=3.0).max_norm == pytest.approx(3 * gauge.max_norm)


@pytest.mark.parametrize("slack", [0.3, 1.0, 10.0])
def test_batches_are_summarised_just_as_the_release_is(slack):
    model, gauge = teacher(), gauge_of(teacher(), slack)
    table = sums_with(model, gauge)(faces())
    released = weighted_means(table / 24, gauge.weight, least=1 / 24)[0].float()
    batch = gauge.mean(vectors_of(model, faces(), gauge).float())
    torch.testing.assert_close(batch, released, rtol=1e-4, atol=1e-5)


def test_statistics_are_mean_and_variance_over_all_positions():
    model, gauge = teacher(), gauge_of(teacher(), slack=1e3)
    found = gauge.statistics(gauge.mean(vectors_of(model, faces(), gauge).float()))
    first = model[1](inputs_of(faces()).normalise(faces().pixels.float() / 255)).detach()
    second = model[4](model[3](model[2](first))).detach()
    for layer, entered in enumerate((first, second)):
        mean, variance = entered.mean(dim=(0, 2, 3)), entered.var(dim=(0, 2, 3), correction=0)
        a, b = gauge.units[2 * layer : 2 * layer + 2]
        torch.testing.assert_close(found[2 * layer] * a, mean, rtol=1e-3, atol=1e-4)
        torch.testing.assert_close(found[2 * layer + 1] * b, variance, rtol=1e-3, atol=1e-4)


def test_a_variance_that_noise_made_negative_is_lifted_to_its_floor():
    gauge = gauge_of(teacher())
    mean = torch.cat(
        [torch.full((c,), v) for c, v in zip(gauge.blocks, (1.0, 0.0, 1.0, -5.0), strict=True)]
    )
    public = gauge.variances.split(gauge.channels)
    found = gauge.statistics(mean)
    for layer in range(2):
        least = found[2 * layer + 1] * gauge.units[2 * layer + 1]
        torch.testing.assert_close(least, LEAST_VARIANCE * public[layer])
        assert (least > 0).all()


def test_gradients_flow_through_vectors_and_not_through_their_weights():
    gauge = gauge_of(teacher(), slack=0.5)
    vectors = torch.randn(5, 20, generator=torch.Generator().manual_seed(0)).mul(3).requires_grad_()
    gauge.mean(vectors)[3].backward()
    lengths = torch.cat([vectors.detach(), torch.full((5, 1), gauge.weight)], dim=1).norm(dim=1)
    weights = (gauge.max_norm / lengths).clamp(max=1)
    torch.testing.assert_close(vectors.grad[:, 3], weights / weights.sum())
    assert not vectors.grad[:, :3].any()


def test_a_gauge_comes_back_from_a_file_as_it_was():
    gauge = gauge_of(teacher())
    again = MomentScale.load(load(save(gauge.state())), torch.device("cpu"))
    assert again.channels == gauge.channels == (4, 6)
    assert again.max_norm == gauge.max_norm, "the noise is for the very bound of the sums"
    assert torch.equal(again.units, gauge.units)
    assert torch.equal(again.variances, gauge.variances)
    assert len(normalisation_layers(teacher())) == len(again.channels)
