"""The privacy defects of the published statistics, planted one by one: a check sees each of them.

Soufleri et al. 2024 draw noise and do not add it, clamp single activations and call that the
sensitivity, average with momentum, and average batch by batch. Every check here passes on the code
as it is, and each planted defect is caught by the check that is named with it.
"""

import shutil
from dataclasses import replace

import pytest
import torch
from planted import replace_everywhere
from releases import ledger_of, make, tiny
from safetensors.torch import load_file
from scipy import stats

from sfumato.commands.release.context import make_context, teacher_of
from sfumato.commands.release.stages import moments
from sfumato.privacy import moments as sums
from sfumato.privacy import noise
from sfumato.runs import open_run
from sfumato.sharing import moments as synth

SLACK = 0.3
"""Far below what is usual, so that every image is clipped and the bound is felt."""


@pytest.fixture(scope="module")
def settings(tmp_path_factory):
    return tiny(tmp_path_factory.mktemp("sets"), moments_slack=SLACK, moments_noise=2.0)


@pytest.fixture(scope="module")
def taught(settings, tmp_path_factory):
    """A run whose teacher is trained, and nothing else was done."""
    out = tmp_path_factory.mktemp("runs") / "taught"
    make(replace(settings, stage="teacher"), out)
    return out


@pytest.fixture(scope="module")
def eyes(settings, taught):
    """The teacher, how it reads private images, and the gauge that public ones fix."""
    with open_run(settings, verb="release", out=taught) as run:
        context = make_context(settings, run)
        model, inputs = teacher_of(context)
    public = replace(inputs, images=context.public)
    return model, inputs, synth.make_gauge(model, public, SLACK)


def release_moments(settings, taught, out):
    """What the recipe releases of the statistics, with what it was exactly; both in full."""
    shutil.copytree(taught, out)
    kept, real = {}, noise.privatize

    def listen(total, plan, *arguments, **others):
        kept["exact"], kept["plan"] = total["table"], plan
        kept["noisy"] = real(total, plan, *arguments, **others)["table"] * plan.expected_batch
        return {"table": kept["noisy"] / plan.expected_batch}

    with pytest.MonkeyPatch.context() as patched:
        replace_everywhere(patched, noise, "privatize", listen)
        make(replace(settings, stage="moments"), out)
    return kept


def check_noise(settings, taught, tmp_path):
    """What is released is off by noise of the deviation that the ledger states."""
    kept = release_moments(settings, taught, tmp_path / "run")
    (release,) = [e for e in ledger_of(tmp_path / "run").releases if e.stage == "moments"]
    off = (kept["noisy"] - kept["exact"]) / (release.noise_multiplier * release.max_norm)
    chance = stats.chi2.cdf(float(off.square().sum()), off.numel())
    assert 1e-6 < chance < 1 - 1e-6


def check_secrets(settings, taught, tmp_path):
    """Two runs on the same images, with a secret each, release different numbers."""
    means = []
    for name in ("one", "two"):
        release_moments(settings, taught, tmp_path / name)
        means.append(load_file(tmp_path / name / "stages/moments/moments.safetensors")["means"])
    assert (means[0] != means[1]).float().mean() > 0.9


def add_up(eyes, places=None, **others):
    """The recipe's sums, over all private images or those at some places."""
    model, inputs, gauge = eyes
    if places is not None:
        inputs = replace(inputs, images=inputs.images.select(places))
    return synth.sum_moments(model, inputs, gauge, **others)


def check_bound(eyes):
    """One image more or less moves the sums by no more than the bound that noise was made for."""
    model, inputs, gauge = eyes
    images, before = inputs.images, add_up(eyes)
    for place in (0, 100, 239):
        # An image unlike all others, who comes last.
        pixels = torch.cat([images.pixels, 255 - images.pixels[[place]]])
        more = replace(images, pixels=pixels, labels=torch.cat([images.labels, torch.tensor([0])]))
        after = add_up((model, replace(inputs, images=more), gauge))
        assert float((after - before).norm()) <= gauge.max_norm * (1 + 1e-5)


def check_weights(eyes):
    """Every image has the same weight, wherever it stands: sums are those of one at a time."""
    places = torch.arange(0, 240, 8)
    alone = sum(add_up(eyes, [int(place)]) for place in places)
    torch.testing.assert_close(add_up(eyes, places), alone, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(add_up(eyes, places.flip(0)), alone, rtol=1e-4, atol=1e-4)


def check_batches(eyes):
    """How many images are in memory at once changes nothing."""
    small = add_up(eyes, batch_size=7)
    torch.testing.assert_close(small, add_up(eyes), rtol=1e-4, atol=1e-4)


CHECKS = {
    "noise": check_noise,
    "secrets": check_secrets,
    "bound": check_bound,
    "weights": check_weights,
    "batches": check_batches,
}


def noise_is_drawn_and_not_added(monkeypatch):
    monkeypatch.setattr(noise, "to_philox_mean", lambda total, _, divisor, key: total.div_(divisor))


def two_thirds_of_the_noise(monkeypatch):
    real = noise.to_philox_mean
    monkeypatch.setattr(noise, "to_philox_mean", lambda t, d, *rest: real(t, d * 2 / 3, *rest))


def single_numbers_are_clamped(monkeypatch):
    clamped = lambda rows, bound: rows.double().clamp(-bound, bound)  # noqa: E731
    monkeypatch.setattr(sums, "clip_rows", clamped)


def layers_are_clipped_one_by_one(monkeypatch):
    real = sums.clip_rows

    def by_parts(rows, bound):
        return torch.cat([real(part, bound) for part in rows.tensor_split(4, dim=1)], dim=1)

    monkeypatch.setattr(sums, "clip_rows", by_parts)


def a_running_average_with_momentum(monkeypatch):
    @torch.no_grad()
    def running(model, inputs, gauge, groups=None, num_groups=1, batch_size=8):
        average = 0.0
        for _, found in synth.observe_features(model, inputs, batch_size):
            rows = sums.with_counter(gauge.vectors(found).double(), gauge.weight)
            average = 0.9 * average + 0.1 * sums.clip_rows(rows, gauge.max_norm).mean(dim=0)
        return len(inputs) * average[None]

    monkeypatch.setattr(synth, "sum_moments", running)


def statistics_of_a_batch_and_not_of_an_image(monkeypatch):
    real = synth.observe_features

    def together(*arguments):
        for units, found in real(*arguments):
            yield units, [pair.mean(dim=1, keepdim=True).expand_as(pair) for pair in found]

    monkeypatch.setattr(synth, "observe_features", together)


CAUGHT = {
    noise_is_drawn_and_not_added: ("noise", "secrets"),
    two_thirds_of_the_noise: ("noise",),
    single_numbers_are_clamped: ("bound",),
    layers_are_clipped_one_by_one: ("bound",),
    a_running_average_with_momentum: ("bound", "weights"),
    statistics_of_a_batch_and_not_of_an_image: ("weights", "batches"),
}


def look_for(name, settings, taught, eyes, tmp_path):
    if name in ("noise", "secrets"):
        CHECKS[name](settings, taught, tmp_path / name)
    else:
        CHECKS[name](eyes)


@pytest.mark.parametrize("name", CHECKS)
def test_the_code_as_it_is_passes(name, settings, taught, eyes, tmp_path):
    look_for(name, settings, taught, eyes, tmp_path)


@pytest.mark.parametrize(
    ("defect", "name"), [(defect, name) for defect, names in CAUGHT.items() for name in names]
)
def test_a_planted_defect_is_caught(defect, name, settings, taught, eyes, tmp_path, monkeypatch):
    defect(monkeypatch)
    with pytest.raises(AssertionError):
        look_for(name, settings, taught, eyes, tmp_path)


def test_units_and_bound_come_from_public_images_alone(settings, taught, tmp_path):
    found = []
    for name, turned in (("one", False), ("two", True)):
        shutil.copytree(taught, tmp_path / name)
        with open_run(settings, verb="release", out=tmp_path / name) as run:
            context = make_context(settings, run)
            pixels = 255 - context.private.pixels if turned else context.private.pixels
            context = replace(context, private=replace(context.private, pixels=pixels))
            moments(context, run.stage("moments"))
        found.append(load_file(tmp_path / name / "stages/moments/moments.safetensors"))
    assert not torch.equal(found[0]["means"], found[1]["means"])
    for name in ("units", "max_norm", "variances"):
        assert torch.equal(found[0][name], found[1][name])


def test_sums_in_many_batches_are_one_event(settings, taught, tmp_path, monkeypatch):
    real = synth.sum_moments
    monkeypatch.setattr(synth, "sum_moments", lambda *a: real(*a, batch_size=16))
    release_moments(settings, taught, tmp_path / "run")
    assert [e.stage for e in ledger_of(tmp_path / "run").releases].count("moments") == 1


def test_images_are_clipped_as_hard_as_the_bound_says(eyes):
    # Otherwise the checks above would pass on sums that were never clipped.
    _, _, gauge = eyes
    lengths = [float(add_up(eyes, [place]).norm()) for place in range(0, 240, 16)]
    assert min(lengths) == pytest.approx(gauge.max_norm, rel=1e-5)
    assert max(lengths) == pytest.approx(gauge.max_norm, rel=1e-5)
