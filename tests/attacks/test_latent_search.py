"""The search of codes: every class and restart, and a target that ends convinced."""

from dataclasses import replace

import pytest
import torch
from toy_target import SHAPE, access_to_toy, linear_target, stripes

from sfumato.attacks.inversion_loss import LOSSES, InversionLoss, margins
from sfumato.attacks.latent_search import Search, search_codes
from sfumato.attacks.random_views import Views

SEARCH = Search(restarts=4, z_steps=30, z_lr=0.1)
STILL = Views(least_area=1.0, degrees=0.0, jitter=0.0, mirror=False)


def draw_pixels(codes, labels):
    return codes.sigmoid()


def grey(count, generator):
    return 0.1 * torch.randn(count, *SHAPE, generator=generator)


def draw_few(codes, labels):
    """A generator without classes: sums of six fixed pictures."""
    pictures = torch.randn(6, 64, generator=torch.Generator().manual_seed(5))
    return (codes @ pictures).sigmoid().reshape(-1, *SHAPE)


def normal(count, generator):
    return torch.randn(count, 6, generator=generator)


def run(
    draw=draw_few, begin=normal, inversion_loss=None, views=None, search=SEARCH, access=None, **more
):
    access = access or access_to_toy()
    return search_codes(
        draw, begin, access, inversion_loss or InversionLoss(), views or Views(), search, **more
    )


def test_there_is_an_image_for_every_restart_of_every_class():
    found = run(search=replace(SEARCH, z_steps=2))
    assert found.labels.tolist() == [0] * 4 + [1] * 4 + [2] * 4
    assert found.images.shape == (12, *SHAPE)
    assert len(found.images.flatten(1).unique(dim=0)) == 12


@pytest.mark.parametrize("z_batch", [1000, 5, 1])
def test_it_begins_from_its_own_code_in_every_piece(z_batch):
    found = run(search=replace(SEARCH, z_steps=0, z_batch=z_batch))
    assert len(found.images.flatten(1).unique(dim=0)) == 12


def test_margins_are_those_of_the_images_in_the_unit_of_the_wish():
    access = access_to_toy()
    found = run(inversion_loss=InversionLoss("margin", 2.5), access=access)
    wanted = margins(access.logits(found.images) / 2.5, found.labels)
    torch.testing.assert_close(found.margins, wanted)


def test_how_often_the_target_is_asked():
    access = access_to_toy()
    run(access=access)
    assert access.asked == 12 * (2 * 30 + 1)  # two views a step, and the result


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize(("draw", "begin"), [(draw_few, normal), (draw_pixels, grey)])
def test_the_target_ends_convinced(draw, begin, name):
    # All logits lie above 0: Poincare divides by their size, and where the wanted one is negative
    # it gets stuck. A shift of all alike, which no probability shows, is the difference.
    model = linear_target()
    model[1].bias.data.fill_(1.0)
    access = access_to_toy(model)
    before = run(draw, begin, InversionLoss(name), access=access, search=replace(SEARCH, z_steps=0))
    after = run(draw, begin, InversionLoss(name), access=access, search=replace(SEARCH, z_steps=80))
    assert (before.margins > 0).float().mean() < 0.7
    # The wanted logit alone may lift a neighbour's with it.
    assert (after.margins > 0).float().mean() > (0.6 if name == "logit" else 0.9)
    assert after.margins.mean() > before.margins.mean() + 0.3


def test_pixels_become_what_the_target_likes_best():
    found = run(draw_pixels, grey, search=replace(SEARCH, z_steps=100), views=STILL)
    means = found.images.unflatten(0, (3, 4)).mean(dim=1)
    for image, likes in zip(means, stripes(), strict=True):
        assert image[likes == 1].min() > 0.8
        assert image[likes == 1].mean() > image[likes == 0].mean() + 0.3


def test_the_class_reaches_the_generator():
    seen = []

    def draw(codes, labels):
        seen.append(labels.clone())
        return draw_few(codes, labels)

    found = run(draw, search=replace(SEARCH, z_steps=1, z_batch=7))
    assert torch.equal(torch.cat([seen[0], seen[2]]), found.labels)


def test_what_else_is_asked_of_codes_and_images_is_heeded():
    def short(codes, images):
        return 20 * codes.square().sum(dim=1).mean()

    def dark(codes, images):
        return 50 * images.mean()

    free = run(draw_pixels, grey)
    tame = run(draw_pixels, grey, extra=short)
    night = run(draw_pixels, grey, extra=dark)
    assert (tame.images - 0.5).abs().mean() < 0.2 * (free.images - 0.5).abs().mean()
    assert night.images.mean() < 0.2


def test_a_result_is_a_function_of_the_seed():
    first, again, other = run(seed=1), run(seed=1), run(seed=2)
    assert torch.equal(first.images, again.images)
    assert not torch.equal(first.images, other.images)


def test_seeds_that_are_neighbours_share_no_start():
    search = replace(SEARCH, z_steps=0, z_batch=4)
    both = torch.cat([run(search=search, seed=seed).images for seed in (0, 1, 2)])
    assert len(both.flatten(1).unique(dim=0)) == 36


@pytest.mark.parametrize("extra", [None, lambda codes, images: images.square().mean()])
@pytest.mark.parametrize("z_batch", [1, 5])
def test_the_same_starts_and_views_lead_to_the_same_images_in_pieces_of_any_size(z_batch, extra):
    """What the size of a piece does change are the draws: each piece has its own generator."""
    starts = normal(12, torch.Generator().manual_seed(0))
    # Gradients of the size of Adam's epsilon: a mean over the piece would be drowned in it.
    quiet = InversionLoss("margin", 1e6)

    def run_pieces(size):
        left = iter(starts.split(size))
        search = replace(SEARCH, z_batch=size)
        return run(
            begin=lambda n, g: next(left).clone(),
            inversion_loss=quiet,
            views=STILL,
            search=search,
            extra=extra,
        )

    whole, pieces = run_pieces(12), run_pieces(z_batch)
    torch.testing.assert_close(pieces.images, whole.images, atol=1e-4, rtol=0)
    drawn = [run(search=replace(SEARCH, z_batch=size)).images for size in (12, z_batch)]
    assert not torch.equal(*drawn)


def test_the_first_step_of_each_code_is_one_learning_rate():
    """Adam's first step: so no image waits for others, and none runs ahead."""
    kept = []

    def draw(codes, labels):
        kept.append(codes.detach().clone())
        return codes.sigmoid()

    run(draw, grey, search=replace(SEARCH, z_steps=1, z_lr=0.03), views=STILL)
    moved = (kept[1] - kept[0]).abs()
    torch.testing.assert_close(moved[moved > 1e-3], torch.full_like(moved[moved > 1e-3], 0.03))
    assert (moved > 1e-3).float().mean() > 0.5


def test_the_target_is_left_as_it_was():
    model = linear_target()
    before = [p.clone() for p in model.parameters()]
    run(access=access_to_toy(model))
    assert all(map(torch.equal, model.parameters(), before))
    assert all(p.grad is None for p in model.parameters())
