"""The losses of each method: what they read, what they teach, and what they leave alone."""

import pytest
import torch
from gan_tasks import METHODS, batch, new_lesson, rng, small_gan

from sfumato.attacks import gan_training
from sfumato.attacks.gan_losses import hinge_discriminator, real_or_fake, soft_cross_entropy
from sfumato.attacks.gan_training import (
    discriminator_loss,
    evaluate_gan,
    generator_loss,
    run_iteration,
)
from sfumato.attacks.inversion_loss import margins
from sfumato.attacks.random_views import random_view

OTHER = torch.tensor([1, 2, 0])
"""Another class for each."""


def still(task):
    """Networks that do not change by being asked."""
    gan = small_gan(task)
    gan.generator.eval()
    gan.discriminator.eval()
    return gan


def test_plg_tells_real_from_fake_under_labels():
    task = new_lesson("plg")
    gan, (z, y) = still(task), batch()
    fake = gan.generator(z, y).detach()
    found = discriminator_loss(gan, task, fake, y, rng())
    real, labels = task.real(len(fake), rng())
    judge = gan.discriminator
    torch.testing.assert_close(found, hinge_discriminator(judge(real, labels), judge(fake, y)))
    assert found != discriminator_loss(gan, task, fake, OTHER[y], rng())
    assert task.access.asked == 0


def test_gmi_reads_no_label_and_asks_no_target():
    task = new_lesson("gmi")
    gan, (z, y) = still(task), batch()
    fake = gan.generator(z).detach()
    found = discriminator_loss(gan, task, fake, y, rng())
    real, _ = task.real(len(fake), rng())
    judge = gan.discriminator
    torch.testing.assert_close(found, hinge_discriminator(judge(real), judge(fake)))
    assert found == discriminator_loss(gan, task, fake, OTHER[y], rng())
    drawn = generator_loss(gan, task, z, y, rng())
    torch.testing.assert_close(drawn, -judge(gan.generator(z)).mean())
    assert drawn == generator_loss(gan, task, z, OTHER[y], rng())
    run_iteration(gan, task, rng())
    assert task.access.asked == 0


def test_ked_repeats_the_soft_answers_of_the_target():
    task = new_lesson("ked")
    gan, (z, y) = still(task), batch()
    fake = gan.generator(z).detach()
    found = discriminator_loss(gan, task, fake, y, rng())
    assert task.access.asked == len(fake)  # the real ones alone
    real, _ = task.real(len(fake), rng())
    on_real, on_fake = gan.discriminator(real), gan.discriminator(fake)
    answers = task.access.logits(real).softmax(dim=1)
    wanted = soft_cross_entropy(on_real, answers) + 0.5 * real_or_fake(on_real, on_fake)
    torch.testing.assert_close(found, wanted)
    assert found == discriminator_loss(gan, task, fake, OTHER[y], rng())


def test_the_generator_of_ked_matches_features_and_is_decided():
    task = new_lesson("ked")
    gan, (z, y) = still(task), batch()
    real, _ = task.real(len(z), rng())
    fake, judge = gan.generator(z), gan.discriminator
    apart = (judge.features(real).mean(dim=0) - judge.features(fake).mean(dim=0)).abs().mean()
    torn = torch.distributions.Categorical(logits=judge(fake)).entropy().mean()
    found = generator_loss(gan, task, z, y, rng())
    torch.testing.assert_close(found, apart + 1e-4 * torn)
    assert task.access.asked == 0


def test_the_generator_of_plg_passes_and_is_named_by_the_target():
    task = new_lesson("plg", alpha=0.7)
    gan, (z, y) = still(task), batch()
    fake = gan.generator(z, y)
    named = task.inversion_loss(task.access.logits(random_view(task.views, fake, rng())), y)
    wanted = -gan.discriminator(fake, y).mean() + 0.7 * named
    torch.testing.assert_close(generator_loss(gan, task, z, y, rng()), wanted)


def test_alpha_0_leaves_the_adversarial_loss():
    task = new_lesson("plg", alpha=0.0)
    gan, (z, y) = still(task), batch()
    wanted = -gan.discriminator(gan.generator(z, y), y).mean()
    torch.testing.assert_close(generator_loss(gan, task, z, y, rng()), wanted)


@pytest.mark.parametrize("method", METHODS)
def test_a_generator_step_leaves_no_gradient_on_discriminator_or_target(method, monkeypatch):
    task = new_lesson(method)
    gan, judged = small_gan(task), []

    def without_traces(gan, *rest):
        judged.append([p.grad is not None for p in gan.discriminator.parameters()])
        gan.optimizers[1].zero_grad(set_to_none=True)
        return generator_loss(gan, *rest)

    monkeypatch.setattr(gan_training, "generator_loss", without_traces)
    run_iteration(gan, task, rng())
    assert all(judged[0])  # it was trained just before
    assert all(p.grad is None for p in gan.discriminator.parameters())
    # The gain of a class that no fake had is not pulled, but has a gradient of 0.
    assert all(p.grad is not None for p in gan.generator.parameters())


@pytest.mark.parametrize("method", METHODS)
def test_discriminator_steps_see_new_images_and_teach_the_generator_nothing(method, monkeypatch):
    task = new_lesson(method, d_steps=4)
    gan, seen = small_gan(task), []
    before = [p.detach().clone() for p in gan.generator.parameters()]

    def watched(gan, task, fake, label, generator):
        assert not fake.requires_grad
        assert all(map(torch.equal, gan.generator.parameters(), before))
        assert all(p.grad is None for p in gan.generator.parameters())
        seen.append((fake, label))
        return discriminator_loss(gan, task, fake, label, generator)

    monkeypatch.setattr(gan_training, "discriminator_loss", watched)
    run_iteration(gan, task, rng())
    assert [len(fake) for fake, _ in seen] == [8, 8, 8, 8]
    assert len(torch.cat([fake for fake, _ in seen]).flatten(1).unique(dim=0)) == 32
    assert len(torch.cat([label for _, label in seen]).unique()) == 3
    assert not all(map(torch.equal, gan.generator.parameters(), before))


def test_the_generator_learns_from_codes_that_no_discriminator_step_saw():
    task = new_lesson()
    gan, seen = small_gan(task), []
    gan.generator.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    run_iteration(gan, task, rng())
    assert [len(z) for z in seen] == [16, 8]
    assert len(torch.cat(seen).unique(dim=0)) == 24


def test_how_often_an_iteration_asks_the_target():
    for method, wanted in {"plg": 8, "gmi": 0, "ked": 8 * 2}.items():
        task = new_lesson(method)
        run_iteration(small_gan(task), task, rng())
        assert task.access.asked == wanted


def test_real_images_are_public_bytes_with_the_noise_that_rounding_took():
    task = new_lesson()
    real, labels = task.real(200, rng())
    assert 0 <= real.min() < real.max() < 1
    drawn = (real * 256).floor().to(torch.uint8)
    known = {tuple(image.tolist()): i for i, image in enumerate(task.pixels.flatten(1))}
    places = torch.tensor([known[tuple(image.tolist())] for image in drawn.flatten(1)])
    assert torch.equal(labels, task.labels[places])
    assert len(places.unique()) == len(task.pixels)
    assert (real * 256 - drawn).std() == pytest.approx(12**-0.5, rel=0.05)


@pytest.mark.parametrize("method", METHODS)
def test_a_look_is_the_median_lead_in_fakes_of_codes_that_stay_the_same(method):
    task = new_lesson(method)
    gan = small_gan(task)
    before = {k: v.clone() for k, v in gan.generator.state_dict().items()}
    found = evaluate_gan(gan, task, 5)
    assert task.access.asked == 256
    assert found == evaluate_gan(gan, task, 5)
    assert gan.generator.training
    assert all(torch.equal(v, before[k]) for k, v in gan.generator.state_dict().items())
    z, y = gan_training.draw_codes(task, 256, torch.Generator().manual_seed(5))
    logits = task.access.logits(gan.generator.eval()(z, y)) / task.inversion_loss.scale
    wanted = y if method == "plg" else logits.argmax(dim=1)
    leads = sorted(margins(logits, wanted).tolist())
    assert leads[127] <= found <= leads[128]


def test_an_infinite_answer_is_no_success():
    task = new_lesson()
    gan = small_gan(task)
    ask = task.access._ask
    task.access._ask = lambda pixels: ask(pixels).index_fill(1, torch.tensor([0]), torch.inf)
    _, y = gan_training.draw_codes(task, 256, torch.Generator().manual_seed(0))
    assert evaluate_gan(gan, task, 0) is None
    task.access._ask = lambda pixels: ask(pixels).scatter(1, y[:, None], torch.inf)
    assert evaluate_gan(gan, task, 0) is None
