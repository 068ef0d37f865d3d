"""Public gradients in private steps: each against autograd, one example at a time.

And what must not change: how far one example moves the sum, the noise, and the ledger.
"""

import math
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import extensions
import pytest
import torch
import torch.nn.functional as F
from extensions import KINDS, NETS, PRIVATE, batch_of, book, gradients, net, public
from oracle import norm_of, norms_of
from samples import sampled
from teachers import PUBLIC, faces, inputs_of
from torch.func import functional_call

from sfumato.clipping import sums
from sfumato.clipping.admit import admit, one_at_a_time
from sfumato.clipping.clip import GradientClipper
from sfumato.clipping.factors import Clipping
from sfumato.data.augment import Augmentation
from sfumato.errors import PrivacyError
from sfumato.training import private_step as steps
from sfumato.training.extenders import Dope, PublicGradient, WeightMultiplicity
from sfumato.training.hooks import with_hooks
from sfumato.training.private_step import PrivacyContext, private_step

VIEWS = replace(PRIVATE, views=3, augmentation=Augmentation(crop=2, flip=True))
STYLES = ["vanilla", "automatic", "auto-v", "global"]


def minus(rows, shift):
    return [{name: row[name] - shift[name] for name in row} for row in rows]


def weighted(rows, factors):
    return {name: sum(f * r[name] for f, r in zip(factors, rows, strict=True)) for name in rows[0]}


def tensors(inputs, places=range(12)):
    return inputs.tensors(batch_of(list(places)).chunks[0], 0)


@pytest.mark.parametrize("name", NETS)
def test_norms_and_sums_are_those_of_gradients_less_the_public_one(name):
    model = net(name).double()
    x, y = tensors(PRIVATE)
    dope = Dope(public(model))
    dope.shift = {n: torch.randn_like(p) for n, p in model.named_parameters()}
    changed = replace(PRIVATE, wrap_loss=dope.wrap_loss)
    rows = minus(one_at_a_time(model, PRIVATE.losses, (x.double(), y)), dope.shift)
    norms = norms_of(rows)
    clipper = GradientClipper(model, clipping=Clipping(max_norm=float(norms.median())))
    mask = torch.arange(12) % 4 != 1
    found = clipper.clip(changed.losses, (x.double(), y), 12, mask)
    torch.testing.assert_close(found.norms, norms, rtol=1e-6, atol=0)
    factors = torch.where(mask, (clipper.clipping.max_norm * (1 - 1e-5) / norms).clamp(max=1), 0)
    assert 0 < int((factors == 1).sum()) < int(mask.sum())
    for n, wanted in weighted(rows, factors).items():
        torch.testing.assert_close(found.total[n], wanted, rtol=1e-6, atol=1e-9)
    plain = PRIVATE.losses(model, x.double(), y)
    torch.testing.assert_close(found.losses, plain.detach().to(found.losses.dtype))


NEAR = {"itself": 0.0, "a last bit away": 1e-7, "a little away": 1e-5, "far away": 1e-1}


@sampled(near=list(NEAR), style=STYLES, precision=[torch.float32, torch.bfloat16])
def test_a_gradient_near_the_public_one_does_not_escape_the_bound(near, style, precision):
    # |g|^2 - 2 <g, p> + |p|^2 is lost in rounding here: it may come out zero, or below.
    model = net()
    inputs = replace(PRIVATE, precision=precision)
    x, y = tensors(inputs)
    rows = one_at_a_time(model, inputs.losses, (x, y))
    generator = torch.Generator().manual_seed(1)
    dope = Dope(public(model))
    for one in (2, 7):
        length = norm_of(rows[one])
        for name, part in rows[one].items():
            noise = torch.randn(part.shape, generator=generator) * NEAR[near] * part.abs().mean()
            dope.shift[name].copy_(part + noise)
        bound = 1e-6 * length
        clipper = GradientClipper(model, clipping=Clipping(max_norm=bound, style=style))
        losses = replace(inputs, wrap_loss=dope.wrap_loss).losses
        whole = clipper.clip(losses, (x, y), 12).total
        for i in (2, 7, 9):
            alone = torch.arange(12) == i
            assert norm_of(clipper.clip(losses, (x, y), 12, alone).total) <= bound
            without = clipper.clip(losses, (x, y), 12, ~alone).total
            moved = {name: whole[name] - without[name] for name in whole}
            assert norm_of(moved) <= bound * (1 + 1e-4)


@sampled(kind=list(KINDS), name=list(NETS))
def test_no_example_moves_the_sum_by_more_than_the_bound(kind, name):
    model = net(name)
    extender = KINDS[kind](model, 3)
    extender.begin(2)
    inputs = replace(VIEWS, wrap_loss=extender.wrap_loss)
    clipper = GradientClipper(model, clipping=Clipping(max_norm=0.05))
    admit(clipper, inputs.losses, inputs.trial(), 3)
    everybody = list(range(6))
    whole = clipper.clip(inputs.losses, tensors(inputs, everybody), 6).total
    for one in everybody:
        rest = [i for i in everybody if i != one]
        without = clipper.clip(inputs.losses, tensors(inputs, rest), 5).total
        moved = norm_of({n: whole[n] - without[n] for n in whole})
        assert 0.025 < moved <= 0.05 * (1 + 1e-4)


@pytest.mark.parametrize("padding", [0, 3])
def test_a_step_of_dope_is_the_formula_and_padding_adds_nothing(padding):
    model, (plan, ledger, secret) = net(), book(max_norm=0.2)
    extender = Dope(public(model))
    clipper = GradientClipper(model, clipping=Clipping(max_norm=0.2))
    inputs = replace(PRIVATE, wrap_loss=extender.wrap_loss)
    step = with_hooks(
        private_step(clipper, inputs, PrivacyContext(plan, ledger, secret)), [extender]
    )
    batch = batch_of([1, 4, 5, 8, 11], step=3, padding=padding)
    numbers = step(batch)
    shift = public(model)(3)
    x, y = tensors(PRIVATE, [1, 4, 5, 8, 11])
    rows = minus(one_at_a_time(model, PRIVATE.losses, (x, y)), shift)
    factors = (0.2 * (1 - 1e-5) / norms_of(rows)).clamp(max=1)
    for name, total in weighted(rows, factors).items():
        torch.testing.assert_close(gradients(model)[name], total / 4 + shift[name])
    assert numbers["batch"] == 5
    plain = PRIVATE.losses(model, x, y).mean().detach()
    assert numbers["loss"] == pytest.approx(float(plain), rel=1e-5)


def test_a_step_of_mirror_mixes_as_published():
    model, batch = net(), batch_of([1, 2, 3], step=4)
    private_step(GradientClipper(model), PRIVATE, PrivacyContext(*book(noise=0.5)))(batch)
    noisy = gradients(model)
    step = private_step(GradientClipper(model), PRIVATE, PrivacyContext(*book(noise=0.5)))
    with_hooks(step, [KINDS["mirror"](model, 1)])(batch)
    beta, known = math.cos(math.pi * (4 / 5) / 20), public(model)(4)
    for name, part in gradients(model).items():
        torch.testing.assert_close(part, beta * noisy[name] + (1 - beta) * known[name])
    assert 0.98 < beta < 0.999


@pytest.mark.parametrize("name", NETS)
def test_each_view_has_the_gradient_of_its_own_weights(name):
    model = net(name).double()
    extender = WeightMultiplicity(public(model), 3, 0.3)
    extender.public = lambda step, turn: {
        n: torch.randn_like(p) for n, p in model.named_parameters()
    }
    extender.begin(0)
    assert [norm_of(move) for move in extender.moves] == pytest.approx([0.3] * 3)
    x, y = tensors(VIEWS)
    x = x.double()
    rows = []
    for i in range(12):
        total = {n: torch.zeros_like(p) for n, p in model.named_parameters()}
        for k, move in enumerate(extender.moves):
            weights = {n: (p + move[n]).detach() for n, p in model.named_parameters()}
            weights = {n: w.requires_grad_() for n, w in weights.items()}
            answer = functional_call(model, weights, (x[3 * i + k : 3 * i + k + 1],))
            loss = F.cross_entropy(answer.float(), y[i : i + 1])
            found = torch.autograd.grad(loss, list(weights.values()))
            for n, part in zip(weights, found, strict=True):
                total[n] += part / 3
        rows.append(total)
    norms = norms_of(rows)
    clipper = GradientClipper(model, clipping=Clipping(max_norm=float(norms.median())))
    losses = replace(VIEWS, wrap_loss=extender.wrap_loss).losses
    found = clipper.clip(losses, (x, y), 12)
    torch.testing.assert_close(found.norms, norms, rtol=1e-6, atol=0)
    for n, wanted in weighted(rows, found.factors[0]).items():
        torch.testing.assert_close(found.total[n], wanted, rtol=1e-6, atol=1e-7)
    still = GradientClipper(model).clip(VIEWS.losses, (x, y), 12).norms
    assert float((still / norms - 1).abs().max()) > 1e-3, "the weights were moved"


def test_each_view_has_a_public_batch_of_its_own():
    model = net()
    extender = WeightMultiplicity(public(model), 3, 0.3)
    extender.begin(2)
    for turn, move in enumerate(extender.moves):
        gradient = public(model)(2, turn)
        for name, part in move.items():
            torch.testing.assert_close(part, 0.3 * gradient[name] / norm_of(gradient))


@pytest.mark.parametrize("kind", KINDS)
def test_noise_and_ledger_are_those_of_a_step_without_an_extender(kind):
    # Of an empty batch nothing is left but noise, and what is public.
    left, paid = {}, {}
    for way in ("without", "with"):
        model, (plan, ledger, secret) = net(), book(noise=2.0)
        extender = KINDS[kind](model, 1)
        inputs = replace(PRIVATE, wrap_loss=extender.wrap_loss) if way == "with" else PRIVATE
        step = private_step(GradientClipper(model), inputs, PrivacyContext(plan, ledger, secret))
        step = with_hooks(step, [extender]) if way == "with" else step
        for number, places in enumerate(([], [3, 5])):
            step(batch_of(places, step=number))
            if number == 0:
                left[way] = gradients(model)
        paid[way] = [replace(release, tag="", ledger="") for release in ledger.releases]
    assert paid["with"] == paid["without"]
    known = public(net())(0)
    for name, noise in left["without"].items():
        shift = known[name] if kind == "dope" else 0.0
        torch.testing.assert_close(left["with"][name], noise + shift)


def test_a_norm_that_is_too_small_is_found_out_while_training(monkeypatch):
    model, (plan, ledger, secret) = net(), book(max_norm=0.01)
    extender = Dope(public(model))
    inputs = replace(PRIVATE, wrap_loss=extender.wrap_loss)
    clipper = GradientClipper(model, clipping=Clipping(max_norm=0.01))
    step = private_step(clipper, inputs, PrivacyContext(plan, ledger, secret))
    step = with_hooks(step, [extender])
    step(batch_of([1, 2, 3]))
    monkeypatch.setattr(steps, "contributions_due", lambda _: True)
    honest = sums.square_norm
    monkeypatch.setattr(sums, "square_norm", lambda gradient: honest(gradient) / 4)
    with pytest.raises(PrivacyError, match="beyond the bound"):
        step(batch_of([1, 2, 3], step=1))
    assert len(ledger.releases) == 1


def test_a_step_whose_effect_is_lost_stays_lost():
    model = net()
    step = with_hooks(lambda batch: {"loss": 0.0}, [Dope(public(model))])
    step(batch_of([1]))
    assert all(p.grad is None for p in model.parameters())


def test_a_public_gradient_depends_on_seed_step_and_turn_alone():
    model = net()
    first = public(model)(3, 1)
    torch.manual_seed(99)
    again = PublicGradient(model, PUBLIC, 8)(3, 1)
    assert all(torch.equal(first[name], part) for name, part in again.items())
    others = [public(model)(3), public(model)(4, 1), PublicGradient(model, PUBLIC, 8, seed=1)(3, 1)]
    for other in others:
        assert not any(torch.allclose(first[name], part) for name, part in other.items())
    whole = public(model, size=1000)(0)
    loss = PUBLIC.losses(model, *tensors(PUBLIC, range(50))).mean()
    wanted = torch.autograd.grad(loss, list(model.parameters()))
    for part, right in zip(whole.values(), wanted, strict=True):
        torch.testing.assert_close(part, right)
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.full
@pytest.mark.parametrize("kind", ["dope", "weight-multiplicity"])
def test_a_compiled_step_sees_the_public_gradient_of_each_step(kind):
    # In a process of its own: the run-time type checks of the tests would be traced along.
    script = Path(extensions.__file__)
    done = subprocess.run([sys.executable, str(script), kind], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]


def test_a_gradient_of_private_images_is_refused():
    with pytest.raises(PrivacyError, match="a public gradient would read"):
        PublicGradient(net(), inputs_of(faces(12)))
