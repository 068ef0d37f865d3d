"""Heads in batches against one head at a time, and the dual against the primal."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from one_head import flat, network, train_one

from sfumato.attacks.batched_heads import head_clip_factors, train_primal
from sfumato.attacks.batched_linear_heads import draw_noise, gather_noise, run_recursion, train_dual
from sfumato.attacks.head_randomness import HeadRandomness, draw_chance
from sfumato.attacks.heads import HeadRecipe, labels_of

ODD = (1, 3, 5, 7, 9)
PRIVATE = {"noise_multiplier": 0.7, "max_norm": 2.0, "rate": 0.5}


def case(recipe, d=12, heads=3, seed=0, dtype=torch.float64):
    """Features, start, masks and the noise of every step, of `heads` heads."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(shape, generator=generator, dtype=dtype)

    x = normal(heads, recipe.images, d).relu()
    start = 0.1 * normal(heads, recipe.num_parameters(d))
    masks = None
    if recipe.rate < 1:
        masks = torch.rand(heads, recipe.steps, recipe.images, generator=generator) < recipe.rate
        masks[0, recipe.steps // 2] = False  # An empty batch.
    noise = normal(recipe.steps, heads, recipe.num_parameters(d))
    return x, start, masks, noise


def feed(start, masks, noise):
    """Chance that hands out this noise, step by step."""
    steps = iter(noise)
    return HeadRandomness(start, masks, lambda shape: next(steps))


def relative(found, wanted):
    return float((found - wanted).abs().max() / wanted.abs().max())


@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
@pytest.mark.parametrize("kind", [{}, {"hidden": 5, "positive": ODD}])
@pytest.mark.parametrize("privacy", [{}, PRIVATE, {"max_norm": 0.5}, {"rate": 0.5}])
def test_heads_in_a_batch_are_those_of_a_plain_loop(optimizer, kind, privacy):
    recipe = HeadRecipe(optimizer=optimizer, epochs=4, weight_decay=0.1, lr=0.1, **kind, **privacy)
    x, start, masks, noise = case(recipe)
    found = train_primal(recipe, x, labels_of(recipe), feed(start, masks, noise))
    for k in range(len(x)):
        wanted = train_one(
            recipe, x[k], labels_of(recipe), start[k],
            None if masks is None else masks[k],
            noise[:, k] if recipe.noise_multiplier else None,
        )  # fmt: skip
        assert relative(found[k], wanted) < 1e-11


@pytest.mark.parametrize("size", [1, 4])
@pytest.mark.parametrize("privacy", [{}, PRIVATE, {"max_norm": 1.0}, {"rate": 0.5}])
@pytest.mark.parametrize("decay", [0.0, 0.3])
def test_the_dual_gives_the_primals_heads_from_the_same_noise(size, privacy, decay):
    recipe = HeadRecipe(class_size=size, weight_decay=decay, **privacy)
    x, start, masks, noise = case(recipe, d=64, heads=5)
    if recipe.rate < 1:
        assert not masks[0, recipe.steps // 2].any(), "an empty batch must be among them"
    wanted = train_primal(recipe, x, labels_of(recipe), feed(start, masks, noise))
    seen = gather_noise(recipe, x, noise) if recipe.noise_multiplier else None
    assert relative(run_recursion(recipe, x, labels_of(recipe), start, masks, seen), wanted) < 1e-12


@settings(deadline=None, max_examples=25)
@given(
    st.integers(2, 5), st.integers(1, 3), st.integers(1, 9), st.integers(1, 6),
    st.floats(0.05, 1.0), st.none() | st.floats(0.01, 10), st.integers(0, 2**31),
)  # fmt: skip
def test_dual_and_primal_agree_whatever_the_recipe(classes, size, d, epochs, rate, norm, seed):
    recipe = HeadRecipe(
        classes=classes, class_size=size, epochs=epochs, rate=rate, max_norm=norm, lr=0.2,
        weight_decay=0.1, noise_multiplier=0.0 if norm is None else 0.5,
    )  # fmt: skip
    x, start, masks, noise = case(recipe, d=d, heads=2, seed=seed)
    x[0, -1] = x[0, 0]
    wanted = train_primal(recipe, x, labels_of(recipe), feed(start, masks, noise))
    seen = gather_noise(recipe, x, noise) if recipe.noise_multiplier else None
    assert relative(run_recursion(recipe, x, labels_of(recipe), start, masks, seen), wanted) < 1e-11


def test_in_float32_dual_and_primal_agree_to_its_precision():
    recipe = HeadRecipe(**PRIVATE)
    x, start, masks, noise = case(recipe, d=64, heads=5, dtype=torch.float32)
    wanted = train_primal(recipe, x, labels_of(recipe), feed(start, masks, noise))
    found = run_recursion(
        recipe, x, labels_of(recipe), start, masks, gather_noise(recipe, x, noise)
    )
    assert found.dtype == torch.float32
    assert relative(found, wanted) < 1e-5


def test_logits_beyond_the_range_of_exp_do_no_harm():
    recipe = HeadRecipe()
    x, start, masks, noise = case(recipe, dtype=torch.float32)
    wanted = train_primal(recipe, 300 * x, labels_of(recipe), feed(start, masks, noise))
    found = run_recursion(recipe, 300 * x, labels_of(recipe), start, masks, None)
    assert found.isfinite().all()
    assert relative(found, wanted) < 1e-4


@pytest.mark.parametrize("train", [train_primal, train_dual])
@pytest.mark.parametrize("size", [1, 4])
def test_without_noise_the_data_part_has_rank_nine_and_sums_to_zero_over_classes(train, size):
    recipe = HeadRecipe(class_size=size, weight_decay=0.01)
    x, start, masks, noise = case(recipe, d=64)
    weights = train(recipe, x, labels_of(recipe), feed(start, masks, noise))
    data = weights - (1 - recipe.lr * recipe.weight_decay) ** recipe.steps * start
    weight, bias = data[:, :640].view(-1, 10, 64), data[:, 640:]
    assert weight.sum(1).abs().max() < 1e-13
    assert bias.sum(1).abs().max() < 1e-13
    values = torch.linalg.svdvals(torch.cat([weight, bias[..., None]], 2))
    assert (values[:, 9] < 1e-13 * values[:, 0]).all()
    assert (values[:, 8] > 1e-6 * values[:, 0]).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("d", "duplicate"), [(5, False), (5, True), (2, False)])
def test_drawn_noise_has_the_covariance_of_gathered_noise(d, duplicate, dtype):
    """Both halves together: what inputs see in each step, and what the weights carry at the end."""
    recipe = HeadRecipe(classes=2, class_size=2, epochs=3, lr=0.5, weight_decay=0.6,
                        noise_multiplier=1.0, max_norm=1.0)  # fmt: skip
    heads, steps, p = 60_000, recipe.steps, recipe.num_parameters(d)
    one = torch.randn(4, d, generator=torch.Generator().manual_seed(3), dtype=dtype)
    if duplicate:
        one[3] = one[2]
    x = one.expand(heads, 4, d)
    generator = torch.Generator().manual_seed(4)
    drawn = draw_noise(
        recipe, x, lambda shape: torch.randn((heads, *shape), generator=generator, dtype=dtype)
    )
    # The map from all steps' noise to what the dual needs is linear: its covariance, exactly.
    basis = torch.eye(steps * p, dtype=dtype).view(steps * p, steps, p).transpose(0, 1)
    gathered = gather_noise(recipe, one.expand(steps * p, 4, d), basis)
    columns = torch.cat([gathered.seen.flatten(1), gathered.total], 1).double()
    wanted = columns.T @ columns
    values = torch.cat([drawn.seen.flatten(1), drawn.total], 1).double()
    found = values.T @ values / heads
    scale = wanted.diagonal().sqrt()
    error = ((found - wanted) / (scale[:, None] * scale)).abs().max()
    # The deviation of an entry is at most sqrt(2 / heads); of 1,300 entries none is at 5 of them.
    assert error < 5 * (2 / heads) ** 0.5
    assert values.mean(0).div(scale).abs().max() < 5 / heads**0.5
    # Inputs see of the total what the steps showed them: the two halves are of one noise.
    decay = (1 - recipe.lr * recipe.weight_decay) ** torch.arange(steps - 1, -1, -1)
    shown = torch.einsum("t,mtkn->mkn", decay.to(dtype), drawn.seen)
    weight, bias = drawn.total[:, : 2 * d].view(-1, 2, d), drawn.total[:, 2 * d :]
    seen = weight @ x.mT + bias[..., None]
    torch.testing.assert_close(seen, shown, rtol=0, atol=1e-4 if dtype == torch.float32 else 1e-6)


def test_heads_of_the_dual_spread_under_noise_as_those_of_the_primal():
    recipe = HeadRecipe(**{**PRIVATE, "noise_multiplier": 50.0})
    x = case(recipe, d=8, heads=1)[0].expand(512, 10, 8)
    chance = draw_chance(recipe, 8, 0, range(2), x)
    plain = train_primal(recipe, x, labels_of(recipe), draw_chance(recipe, 8, 0, range(2), x))
    found = train_dual(recipe, x, labels_of(recipe), chance)
    ratio = float(found.std() / plain.std())
    assert 0.95 < ratio < 1.05


def test_clipping_keeps_within_the_bound_and_leaves_short_gradients_alone():
    squares = torch.tensor([0.0, 0.25, 4.0, 1e30], dtype=torch.float64)
    factors = head_clip_factors(squares, 1.0, None)
    assert factors.tolist() == pytest.approx([1.0, 1.0, 0.5, 1e-15])
    present = torch.tensor([True, False, True, False])
    assert head_clip_factors(squares, 1.0, present).tolist() == pytest.approx([1.0, 0.0, 0.5, 0.0])


@pytest.mark.filterwarnings("ignore:Full backward hook:UserWarning")
def test_heads_of_opacus_are_ours_on_the_same_masks_and_noise():
    pytest.importorskip("opacus", reason="opacus is not a dependency: pip install it beside")
    from opacus.grad_sample import GradSampleModule
    from opacus.optimizers import DPOptimizer

    recipe = HeadRecipe(epochs=8, **PRIVATE)
    x, start, masks, noise = case(recipe, d=32, heads=1, dtype=torch.float32)
    found = run_recursion(
        recipe, x, labels_of(recipe), start, masks, gather_noise(recipe, x, noise)
    )
    net = GradSampleModule(network(recipe, 32, start[0]))
    inner = torch.optim.SGD(net.parameters(), lr=recipe.lr, weight_decay=recipe.weight_decay)
    optimizer = DPOptimizer(
        inner, noise_multiplier=0.0, max_grad_norm=recipe.max_norm, expected_batch_size=None,
        loss_reduction="sum",
    )  # fmt: skip
    for step in range(recipe.steps):
        optimizer.zero_grad()
        present = masks[0, step]
        loss = torch.nn.functional.cross_entropy(
            net(x[0][present]), labels_of(recipe)[present], reduction="sum"
        )
        loss.backward()
        optimizer.clip_and_accumulate()
        at = 0
        for p in net.parameters():
            z = noise[step, 0, at : at + p.numel()].view_as(p)
            total = p.summed_grad + recipe.noise_multiplier * recipe.max_norm * z
            p.grad = total / recipe.divisor
            at += p.numel()
        inner.step()
    assert relative(found[0], flat(net)) < 1e-5
