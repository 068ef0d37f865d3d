"""Training of a GAN against a target: looks, falls, cuts, patience, averages."""

import pytest
import torch
from gan_tasks import METHODS, new_lesson, same, small_gan, weights
from samples import sampled

from sfumato.attacks import gan_training
from sfumato.attacks.gan_training import train_gan
from sfumato.errors import SfumatoError
from sfumato.runs import Run


class Cut(Exception):
    """The machine went down."""


def train(task, path, say=lambda _: None, seed=3):
    path.mkdir(exist_ok=True)
    gan = small_gan(task)
    return gan, train_gan(gan, task, Run(path), seed=seed, say=say)


def instead(monkeypatch, take):
    """Take iterations so: `take` gets the GAN, how one is taken, and the seed, step and luck."""
    original = gan_training.train_iteration

    def iteration(gan, task):
        turn = original(gan, task)
        return lambda *place: take(gan, turn, place)

    monkeypatch.setattr(gan_training, "train_iteration", iteration)
    return original


def poison(monkeypatch, *places, net="generator"):
    """NaN in a weight after the step at each place: a step and the luck it was taken with."""
    taken = []

    def poisoned(gan, turn, place):
        taken.append(place[1:])
        turn(*place)
        if place[1:] in places:
            with torch.no_grad():
                next(getattr(gan, net).parameters()).view(-1)[0] = torch.nan

    instead(monkeypatch, poisoned)
    return taken


def script(monkeypatch, found):
    """Looks that find what they are told; returns the generator's weights at each."""
    left, seen = iter(found), []

    def told(gan, task, seed):
        net = gan.generator if gan.average is None else gan.average.module
        seen.append(weights(net))
        return next(left)

    monkeypatch.setattr(gan_training, "evaluate_gan", told)
    return seen


@pytest.mark.parametrize("method", METHODS)
def test_training_takes_its_iterations_and_gives_a_generator_that_is_frozen(method, tmp_path):
    task, said = new_lesson(method, iterations=8), []
    gan, made = train(task, tmp_path, said.append)
    assert gan.step == 8
    assert len(gan.looks) == len(said) == 3  # after 3, 6, and at the end
    assert not made.training
    assert not any(p.requires_grad for p in made.parameters())
    assert all(v.isfinite().all() for v in made.state_dict().values())


def test_the_target_becomes_convinced_of_fakes(tmp_path):
    task = new_lesson(iterations=80, look_every=20, gan_lr=5e-3, alpha=1.0, gan_width=4)
    gan, made = train(task, tmp_path)
    assert max(gan.looks) > gan.looks[0] + 0.2
    assert max(gan.looks) > 0
    gan.generator = made
    assert gan_training.evaluate_gan(gan, task, 3) == pytest.approx(max(gan.looks), abs=1e-5)


def test_training_is_a_function_of_its_seed(tmp_path):
    first, second, other = (
        weights(train(new_lesson(), tmp_path / name, seed=seed)[1])
        for name, seed in (("a", 1), ("b", 1), ("c", 2))
    )
    assert same(first, second)
    assert not same(first, other)


@pytest.mark.parametrize("net", ["generator", "discriminator"])
def test_a_planted_nan_goes_back_to_the_last_good_look_and_says_so(net, tmp_path, monkeypatch):
    taken = poison(monkeypatch, (4, 0), net=net)
    task, said = new_lesson(), []
    gan, made = train(task, tmp_path, said.append)
    assert said[1] == "the GAN diverged before iteration 6; back to 3"
    assert taken == [(i, 0) for i in range(6)] + [(i, 1) for i in range(3, 9)]
    assert gan.step == 9
    assert len(gan.looks) == 3
    for part in (made, gan.discriminator):
        assert all(v.isfinite().all() for v in part.state_dict().values())
    assert all(
        v.isfinite().all() for o in gan.optimizers for s in o.state.values() for v in s.values()
    )


def test_what_it_goes_back_to_is_what_was_there(tmp_path, monkeypatch):
    """With the luck of the second attempt from the start of it, all comes out the same."""
    poison(monkeypatch, (4, 0))
    _, fallen = train(new_lesson(gan_ema=0.5), tmp_path / "fallen")

    def lucky(gan, turn, place):
        turn(place[0], place[1], 0 if place[1] < 3 else 1)

    monkeypatch.undo()
    instead(monkeypatch, lucky)
    _, straight = train(new_lesson(gan_ema=0.5), tmp_path / "straight")
    assert same(weights(fallen), weights(straight))


def test_a_fall_before_the_first_look_begins_again(tmp_path, monkeypatch):
    taken = poison(monkeypatch, (0, 0))
    said = []
    train(new_lesson(), tmp_path, said.append)
    assert said[0] == "the GAN diverged before iteration 3; back to 0"
    assert taken[3] == (0, 1)


def test_three_falls_in_a_row_are_an_error(tmp_path, monkeypatch):
    poison(monkeypatch, *((5, luck) for luck in range(3)))
    with pytest.raises(SfumatoError, match=r"diverged three times in a row.*--gan-lr"):
        train(new_lesson(), tmp_path)


def test_falls_apart_from_each_other_are_forgiven(tmp_path, monkeypatch):
    taken = poison(monkeypatch, (1, 0), (1, 1), (4, 2), (4, 3), (7, 4))
    gan, _ = train(new_lesson(), tmp_path)
    assert gan.step == 9
    assert gan.luck == 5
    assert taken[-1] == (8, 5)


@sampled(way=[("plg", 0.0), ("plg", 0.9), ("gmi", 0.0), ("ked", 0.0)], fallen=[False, True])
def test_a_run_that_was_cut_goes_on_to_the_same_generator(way, fallen, tmp_path, monkeypatch):
    method, ema = way
    task = new_lesson(method, gan_ema=ema, iterations=12)
    bad = [(1, 0)] if fallen else []
    taken = poison(monkeypatch, *bad)
    whole, wanted = train(task, tmp_path / "whole")

    def cut(gan, turn, place):
        if place[1:] == (8, len(bad)):
            raise Cut
        turn(*place)

    original = instead(monkeypatch, cut)
    with pytest.raises(Cut):
        train(task, tmp_path / "cut")
    monkeypatch.setattr(gan_training, "train_iteration", original)
    taken.clear()
    gan, found = train(task, tmp_path / "cut")
    assert taken[0] == (6, len(bad))
    assert same(weights(found), weights(wanted))
    assert same(weights(gan.discriminator), weights(whole.discriminator))
    assert gan.looks == whole.looks


def test_patience_stops_and_the_best_look_is_returned(tmp_path, monkeypatch):
    seen = script(monkeypatch, [1.0, 3.0, 2.0, 3.0, 9.0])
    gan, made = train(new_lesson(iterations=15, patience=2), tmp_path)
    assert gan.looks == [1.0, 3.0, 2.0, 3.0]
    assert gan.step == 12
    assert same(weights(made), seen[1])  # the first of two that are equal
    assert not same(seen[1], seen[3])


def test_a_run_that_lost_its_patience_does_not_go_on_when_it_was_cut(tmp_path, monkeypatch):
    seen = script(monkeypatch, [3.0, 2.0, 1.0])
    task = new_lesson(iterations=15, patience=2)
    train(task, tmp_path)
    script(monkeypatch, [99.0])
    gan, made = train(task, tmp_path)
    assert gan.step == 9
    assert same(weights(made), seen[0])


def test_without_patience_it_goes_on_to_the_end(tmp_path, monkeypatch):
    seen = script(monkeypatch, [5.0, 4.0, 3.0, 2.0, 1.0])
    gan, made = train(new_lesson(iterations=15, patience=0), tmp_path)
    assert gan.step == 15
    assert same(weights(made), seen[0])


def test_with_an_average_it_is_the_average_that_is_looked_at_and_returned(tmp_path, monkeypatch):
    seen, steps = script(monkeypatch, [1.0, 2.0, 0.0]), []

    def watched(gan, turn, place):
        turn(*place)
        steps.append(weights(gan.generator)["first.weight"])

    instead(monkeypatch, watched)
    _, made = train(new_lesson(gan_ema=0.6), tmp_path)
    average = steps[0]
    for count, value in enumerate(steps[1:6], start=1):
        decay = min(0.6, (1 + count) / (10 + count))
        average = decay * average + (1 - decay) * value
    torch.testing.assert_close(weights(made)["first.weight"], average)
    assert same(weights(made), seen[1])
    assert not torch.equal(average, steps[5])
