"""What an attacker is granted, and that it is no more."""

import pytest
import torch
from torch import Tensor, nn
from toy_target import SHAPE, access_to_toy, linear_target, some_images

from sfumato.errors import ConfigError


def reachable(thing, depth=3):
    """Everything that names without underscores around them lead to, and items of tuples."""
    yield thing
    if depth:
        names = [name for name in dir(thing) if not name.startswith("__")]
        inside = [getattr(thing, name) for name in names]
        for part in [*inside, *(thing if isinstance(thing, tuple | list) else ())]:
            yield from reachable(part, depth - 1)


def moody_target():
    """A model whose answers depend on its mode, and whose statistics drift in training."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.Dropout(0.5), nn.Flatten(), nn.Linear(144, 3)
    )


def test_no_attribute_leads_to_the_model_or_its_weights():
    access = access_to_toy()
    access.logits(torch.rand(2, *SHAPE))
    assert not [thing for thing in reachable(access) if isinstance(thing, nn.Module | Tensor)]
    assert any(isinstance(thing, Tensor) for thing in reachable(linear_target()[1]))
    with pytest.raises(AttributeError):
        access.model = linear_target()  # pyright: ignore


def test_answers_are_those_of_the_model():
    model, images = linear_target(), some_images(7)
    wanted = model((images.pixels / 255 - 0.5) / 0.5)
    access = access_to_toy(model)
    torch.testing.assert_close(access.logits(images.pixels / 255), wanted)
    for batch_size in (1, 3, 1000):
        found = access.answers(images.pixels, batch_size)
        torch.testing.assert_close(found, wanted)
        assert not found.requires_grad


def test_gradients_flow_to_pixels_and_are_those_of_the_model():
    model, pixels = linear_target(), torch.rand(2, *SHAPE, requires_grad=True)
    access_to_toy(model).logits(pixels)[:, 1].sum().backward()
    wanted = (model[1].weight[1] / 0.5).reshape(SHAPE).expand(2, *SHAPE)
    torch.testing.assert_close(pixels.grad, wanted)


def test_the_target_is_frozen_and_in_evaluation_mode_and_stays_so():
    model = moody_target().train()
    access = access_to_toy(model)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    pixels = torch.rand(4, *SHAPE, requires_grad=True)
    access.logits(pixels).square().sum().backward()
    assert pixels.grad.any()
    assert not any(module.training for module in model.modules())
    assert not any(p.requires_grad or p.grad is not None for p in model.parameters())
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name])
    # Neither dropout nor the other images of a batch have a say.
    torch.testing.assert_close(access.logits(pixels)[:1], access.logits(pixels[:1]))


@pytest.mark.parametrize("shape", [(3, 8, 8), (1, 8, 9), (1, 16, 16)])
def test_images_of_another_shape_are_refused_and_not_counted(shape):
    access = access_to_toy()
    with pytest.raises(ConfigError, match=r"takes images of \(1, 8, 8\).*--image-size"):
        access.logits(torch.zeros(2, *shape))
    with pytest.raises(ConfigError, match="takes images"):
        access.answers(torch.zeros(2, *shape, dtype=torch.uint8))
    assert access.asked == 0


def test_every_image_that_was_shown_is_counted():
    access = access_to_toy()
    assert access.asked == 0
    access.logits(torch.zeros(4, *SHAPE))
    access.answers(some_images(7).pixels, batch_size=3)
    assert access.asked == 11


def test_a_target_of_other_classes_is_refused():
    with pytest.raises(ConfigError, match="knows 5 classes, and the private data has 3"):
        access_to_toy(nn.Sequential(nn.Flatten(), nn.Linear(64, 5)))


def test_a_target_of_low_precision_answers_in_float32():
    access = access_to_toy(precision=torch.bfloat16)
    assert access.logits(torch.rand(2, *SHAPE)).dtype == torch.float32
