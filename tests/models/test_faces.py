"""The networks of model inversion: of the published size, and fit for private training."""

import pickle

import pytest
import torch
from oracle import compare
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from sfumato.clipping.admit import admit
from sfumato.clipping.clip import GradientClipper
from sfumato.errors import ConfigError
from sfumato.models.faces import IrNet, VggFace, mcnn, scnn
from sfumato.models.normalise import BatchNorm, apply_norm_policy
from sfumato.models.zoo import MODELS, build_model, head_parameters, load_weights

PUBLISHED = {
    ("vgg16-face", 64): (16.8e6, 2.51e9),
    ("ir-152", 64): (62.6e6, 8.04e9),
    ("ir-50", 64): (35.4e6, 4.11e9),
    ("ir-50", 112): (44.1e6, 12.6e9),
}


@pytest.mark.parametrize(("name", "size"), PUBLISHED)
def test_a_face_network_has_the_weights_and_the_work_of_the_published_one(name, size):
    weights, work = PUBLISHED[name, size]
    with torch.device("meta"), FlopCounterMode(display=False) as counted:
        model = MODELS[name](1000, 3).eval()
        assert model(torch.zeros(1, 3, size, size)).shape == (1, 1000)
    assert sum(p.numel() for p in model.parameters()) == pytest.approx(weights, rel=3e-3)
    assert counted.get_total_flops() == pytest.approx(work, rel=3e-3)


@pytest.mark.parametrize("name", ["vgg16-face", "ir-50", "ir-152", "mcnn", "scnn"])
@pytest.mark.parametrize(("channels", "size"), [(1, 32), (3, 64), (3, 112)])
def test_each_network_takes_grey_and_colour_images_of_several_sizes(name, channels, size):
    with torch.device("meta"):
        model = MODELS[name](5, channels)
        assert model(torch.zeros(2, channels, size, size)).shape == (2, 5)
    assert {len(model.get_parameter(n)) for n in head_parameters(model)} == {5}


def test_the_body_of_the_vgg_takes_weights_by_the_names_torchvision_gives_them():
    from torchvision.models import vgg16_bn

    with torch.device("meta"):
        published, ours = vgg16_bn(weights=None).state_dict(), VggFace(7).state_dict()
    shapes = [
        {n: t.shape for n, t in state.items() if n.startswith("features")}
        for state in (published, ours)
    ]
    assert shapes[0] == shapes[1]


def test_the_vgg_is_as_it_is_described():
    model = VggFace(7)
    model.norm.eval()
    x = torch.rand(2, 3, 64, 64, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        maps = model.features(x)
        assert maps.shape == (2, 512, 2, 2)
        torch.testing.assert_close(model(x), model.head(model.norm(maps.flatten(1))))


def test_the_shifts_before_the_last_layer_of_the_vgg_never_learn():
    with torch.device("meta"):
        model = VggFace(7)
        frozen = [n for n, p in model.named_parameters() if not p.requires_grad]
        assert frozen == ["norm.bias"]
        apply_norm_policy(model, "group")
    assert [n for n, p in model.named_parameters() if not p.requires_grad] == frozen
    assert bool((VggFace(7).norm.bias == 0).all())


def test_the_first_unit_of_each_stage_halves_the_map():
    with torch.device("meta"):
        model = MODELS["ir-152"](5, 3)
        x, sides = model.stem(torch.zeros(1, 3, 64, 64)), []
        for unit in model.body:
            x = unit(x)
            sides.append(x.shape[-1])
    assert sides == [32] * 3 + [16] * 8 + [8] * 36 + [4] * 3


def test_a_shortcut_without_weights_takes_every_second_pixel():
    unit = IrNet(2, units=(1, 1, 1, 1)).body[0]
    x = torch.randn(2, 64, 6, 6)
    assert torch.equal(unit.shortcut(x), x[:, :, ::2, ::2])


def test_weights_for_another_image_size_are_refused_by_name(tmp_path):
    file = tmp_path / "ir.pt"
    small, large = (IrNet(3, 1, units=(1, 1, 1, 1)).eval() for _ in range(2))
    small(torch.zeros(1, 1, 16, 16))
    large(torch.zeros(1, 1, 32, 32))
    torch.save(small.state_dict(), file)
    with pytest.raises(ConfigError, match=r'The first that does not is "embed.3.weight"'):
        load_weights(large, file)


def test_the_target_for_digits_mixes_no_examples_as_it_is_made():
    model = build_model("mcnn", classes=3, shape=(1, 8, 8))
    x = torch.randn(3, 1, 8, 8)
    torch.testing.assert_close(model(x), torch.cat([model(one[None]) for one in x]))


def grouped(model, size):
    """The network as it is trained with privacy: no BatchNorm, and here no chance either."""
    with torch.no_grad():
        model.eval()(torch.zeros(2, 1, size, size))
    model = apply_norm_policy(model.train(), "group").double()
    assert not any(isinstance(m, BatchNorm) for m in model.modules())
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.eval()
    return model


SMALL = {
    "mcnn": (mcnn, 8),
    "scnn": (scnn, 16),
    "ir": (lambda classes, channels: IrNet(classes, channels, units=(1, 1, 1, 2)), 16),
}


@pytest.mark.parametrize("name", SMALL)
@pytest.mark.parametrize("mode", ["ghost_mixed", "non-ghost"])
def test_gradients_of_single_examples_are_exact(name, mode):
    torch.manual_seed(0)
    make, size = SMALL[name]
    model = grouped(make(3, 1), size)
    compare(model, torch.randn(3, 1, size, size, dtype=torch.float64), 3, mode=mode)


def test_the_vgg_passes_the_test_before_private_training():
    torch.manual_seed(0)
    model = apply_norm_policy(VggFace(3, 1).train(), "group")
    # The body costs seconds in double precision and has only layers that are tested elsewhere.
    for parameter in model.features.parameters():
        parameter.requires_grad_(False)
    loss = nn.functional.cross_entropy
    admit(
        GradientClipper(model),
        lambda m, x, y: loss(m(x), y, reduction="none"),
        (torch.randn(2, 1, 32, 32), torch.arange(2)),
        2,
    )


CONTENTS = {"rubbish": b"rubbish", "code": pickle.dumps({"w": print}), "a list": pickle.dumps([1])}


@pytest.mark.parametrize("content", CONTENTS)
def test_a_file_that_holds_no_weights_is_refused_in_our_own_words(tmp_path, content):
    file = tmp_path / "weights.pt"
    file.write_bytes(CONTENTS[content])
    with pytest.raises(ConfigError, match="no state dict of plain tensors") as found:
        load_weights(nn.Linear(2, 3), file)
    assert "weights_only" not in str(found.value), "nobody is told how to run what is in a file"
