"""What is chosen before the first step: devices, parameters, batch sizes; and advice on memory."""

import logging
from dataclasses import replace
from urllib.error import URLError

import pytest
import timm
import torch
from people import portraits
from torch import nn
from torchvision import models

from sfumato.clipping import sums
from sfumato.clipping.admit import check_contributions
from sfumato.clipping.clip import GradientClipper
from sfumato.clipping.factors import Clipping
from sfumato.errors import ConfigError, PrivacyError, SfumatoWarning
from sfumato.models.ema import new_average, new_half_life_average
from sfumato.models.wrn import tanh_cnn
from sfumato.models.zoo import build_model, head_parameters, pixel_statistics
from sfumato.training import memory
from sfumato.training.chunks import ChunkSizes
from sfumato.training.inputs import Inputs
from sfumato.training.process_group import ProcessGroup
from sfumato.training.setup import choose_parameters, make_optimizer, make_schedule, pick_device


@pytest.mark.parametrize("wrapping", ["state_dict", "model_state_dict", "model"])
@pytest.mark.parametrize("prefix", ["module.", "_orig_mod.module.", ""])
def test_checkpoints_of_training_scripts_are_unwrapped(tmp_path, wrapping, prefix):
    donor = build_model("group-cnn-small", classes=3, shape=(1, 8, 8))
    state = {f"{prefix}{name}": value for name, value in donor.state_dict().items()}
    torch.save({wrapping: state, "epoch": 3, "optimizer": {"lr": 0.1}}, tmp_path / "net.pt")
    made = build_model(
        "group-cnn-small", classes=3, shape=(1, 8, 8), weights=tmp_path / "net.pt"
    ).state_dict()
    assert all(torch.equal(made[name], value) for name, value in donor.state_dict().items())


def test_weights_of_a_larger_model_are_warned_of(tmp_path):
    larger = build_model("resnet34", classes=5, shape=(3, 32, 32))
    torch.save(larger.state_dict(), tmp_path / "larger.pt")
    with pytest.warns(SfumatoWarning, match=r'larger.pt has 80 tensors .* "layer1.2.conv1.weight"'):
        build_model("resnet18", classes=3, shape=(3, 32, 32), weights=tmp_path / "larger.pt")


def test_a_checkpoint_without_a_state_dict_is_refused(tmp_path):
    torch.save({"epoch": 3, "weights": [1.0]}, tmp_path / "net.pt")
    with pytest.raises(ConfigError, match="no state dict of plain tensors"):
        build_model("group-cnn-small", classes=3, shape=(1, 8, 8), weights=tmp_path / "net.pt")


def small_net():
    return nn.Sequential(nn.Conv2d(1, 4, 3), nn.Tanh(), nn.Flatten(), nn.Linear(400, 3))


def learning(model):
    return [name for name, p in model.named_parameters() if p.requires_grad]


def inputs():
    return Inputs(portraits(), torch.device("cpu"), (0.5,), (0.5,))


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_a_gpu_that_is_not_there_is_named():
    with pytest.raises(ConfigError, match="torch finds no GPU"):
        pick_device("cuda")
    with pytest.raises(ConfigError, match='device "gpu"'):
        pick_device("gpu")
    assert pick_device("auto").type == "cpu"


def test_only_the_head_or_the_biases_learn():
    model = timm.create_model("xcit_nano_12_p16_224", num_classes=5)
    choose_parameters(model, "head")
    assert set(learning(model)) == {"head.weight", "head.bias"}
    model = timm.create_model("resnet18", num_classes=5)
    choose_parameters(model, "bias")
    assert "layer1.0.bn1.bias" in learning(model)
    assert "fc.weight" in learning(model)
    assert "layer1.0.conv1.weight" not in learning(model)


def test_patterns_freeze_and_misspelt_ones_are_errors():
    model = small_net()
    choose_parameters(model, "all", ("0.*",))
    assert learning(model) == ["3.weight", "3.bias"]
    with pytest.raises(ConfigError, match=r"fits no parameter\. Patterns"):
        choose_parameters(small_net(), "all", ("blocks.9.*",))
    with pytest.raises(ConfigError, match="nothing to learn"):
        choose_parameters(small_net(), "all", ("*",))


def test_models_read_images_as_their_checkpoints_want():
    mean, _ = pixel_statistics(timm.create_model("resnet18"), 3)
    assert mean == (0.485, 0.456, 0.406)
    assert pixel_statistics(tanh_cnn(10), 1) == ((0.5,), (0.5,))
    assert len(pixel_statistics(timm.create_model("resnet18", in_chans=1), 1)[0]) == 1
    assert head_parameters(small_net()) == {"3.weight", "3.bias"}


def test_a_fresh_head_starts_at_zero(tmp_path):
    donor = timm.create_model("resnet18", num_classes=7)
    torch.save(donor.state_dict(), tmp_path / "weights.pt")
    shape, weights = (3, 32, 32), tmp_path / "weights.pt"
    fresh = build_model("resnet18", classes=5, shape=shape, weights=weights)
    assert not fresh.fc.weight.any()
    same = build_model("resnet18", classes=7, shape=shape, weights=weights)
    torch.testing.assert_close(same.fc.weight, donor.fc.weight)


def test_published_weights_that_cannot_be_had_or_used_are_refused(monkeypatch):
    def without_weights(name, weights):
        if name == "resnet18":
            raise URLError("no route to host")
        return models.SqueezeNet()

    monkeypatch.setattr(models, "get_model", without_weights)
    options = {"classes": 3, "shape": (3, 64, 64), "pretrained": True}
    with pytest.raises(ConfigError, match=r'"torchvision:resnet18" could not be fetched .URLError'):
        build_model("torchvision:resnet18", **options)
    with pytest.raises(ConfigError, match='"torchvision:squeezenet1_0" has no linear layer'):
        build_model("torchvision:squeezenet1_0", **options)


def test_weights_fit_a_layer_whose_size_follows_from_the_images(tmp_path):
    shape, weights = (1, 28, 28), tmp_path / "weights.pt"
    donor = build_model("tanh-cnn", classes=7, shape=shape)
    torch.save(donor.state_dict(), weights)
    same = build_model("tanh-cnn", classes=7, shape=shape, weights=weights)
    for name, value in donor.state_dict().items():
        assert torch.equal(same.state_dict()[name], value)


def test_the_average_forgets_the_first_weights_of_a_short_training():
    model = nn.Linear(1, 1, bias=False)
    average = new_average(model, 0.999)
    for value in range(20):
        nn.init.constant_(model.weight, float(value))
        average.update_parameters(model)
    assert 15 < average.module.weight.item() < 19
    with pytest.raises(ConfigError, match="below 1"):
        new_average(model, 1.5)


def test_the_half_life_average_follows_its_formula():
    model = nn.Linear(1, 1, bias=False)
    average = new_half_life_average(model, batch_size=32, half_life=100, ramp=0.25)
    values = torch.randn(60, generator=torch.Generator().manual_seed(0)).tolist()
    expected = 0.0
    for step, value in enumerate(values):
        nn.init.constant_(model.weight, value)
        average.update_parameters(model)
        seen = 32 * step  # before this step: at first there is nothing to remember
        decay = 0.5 ** (32 / min(100, 0.25 * seen)) if seen else 0.0
        expected = decay * expected + (1 - decay) * value
        assert average.module.weight.item() == pytest.approx(expected, abs=1e-5)


def test_half_of_the_memory_is_gone_after_the_half_life():
    model = nn.Linear(1, 1, bias=False)
    average = new_half_life_average(model, batch_size=10, half_life=1000, ramp=0.5)
    nn.init.ones_(model.weight)
    for _ in range(200):  # the ramp ends here
        average.update_parameters(model)
    assert average.module.weight.item() == 1
    nn.init.zeros_(model.weight)
    for _ in range(100):
        average.update_parameters(model)
    assert average.module.weight.item() == pytest.approx(0.5, rel=1e-4)


def test_a_half_life_that_means_nothing_is_refused():
    model = nn.Linear(1, 1)
    assert new_half_life_average(model, batch_size=8, half_life=0) is None
    for wrong in ({"half_life": -1.0}, {"half_life": 5.0, "ramp": 0.0}):
        with pytest.raises(ConfigError, match="half-life must be at least 0"):
            new_half_life_average(model, batch_size=8, **wrong)


def rates(kind, steps, warmup=0):
    """The learning rate of every step, in units of the one asked for."""
    optimizer = make_optimizer(small_net(), "sgd", lr=0.3, momentum=0.0, weight_decay=0.0)
    schedule = make_schedule(optimizer, kind, steps, warmup)
    found = []
    for _ in range(steps):
        found.append(optimizer.param_groups[0]["lr"] / 0.3)
        optimizer.step()
        schedule.step()
    return found


@pytest.mark.parametrize("steps", [5, 10, 35, 385])
def test_stairs_go_down_to_a_tenth_and_a_hundredth(steps):
    wanted = [1.0] * (3 * steps // 5) + [0.1] * (steps // 5) + [0.01] * (steps // 5)
    assert rates("stairs", steps) == pytest.approx(wanted)


def test_a_warm_up_leads_into_every_schedule():
    assert rates("stairs", 10, warmup=1) == pytest.approx([0.5, *rates("stairs", 10)[1:]])
    assert rates("constant", 4, warmup=3) == pytest.approx([0.25, 0.5, 0.75, 1.0])
    assert rates("cosine", 4) == pytest.approx([1.0, 0.853553, 0.5, 0.146447], abs=1e-5)


def test_auto_takes_what_fits_and_no_more_than_the_batch(monkeypatch):
    clipper = GradientClipper(small_net())
    each = memory.bytes_per_example(clipper, inputs())
    assert 12 * 12 * 4 < each < 100_000
    monkeypatch.setattr(memory, "free_bytes", lambda _: 40 * each)
    large, small = ChunkSizes(1000.0, 32.0), ChunkSizes(10.0, 3.0)
    assert memory.fitting_batch(clipper, inputs(), "auto", large, ProcessGroup()) == 32
    assert memory.fitting_batch(clipper, inputs(), "auto", small, ProcessGroup()) == 13
    assert memory.fitting_batch(clipper, inputs(), 64, large, ProcessGroup()) == 64
    assert (
        memory.fitting_batch(clipper, inputs(), 64, replace(large, shapes=1), ProcessGroup()) == 64
    )


def test_running_out_of_memory_says_what_fits(monkeypatch):
    clipper = GradientClipper(small_net())
    each = memory.bytes_per_example(clipper, inputs())
    monkeypatch.setattr(memory, "free_bytes", lambda _: 20 * each)
    advice = r"with 256 examples at once\. 16 fit.*--physical-batch"
    with pytest.raises(ConfigError, match=advice), memory.memory_advice(clipper, inputs(), 256):
        raise torch.OutOfMemoryError("CUDA out of memory")
    with (
        pytest.raises(RuntimeError, match="something else"),
        memory.memory_advice(clipper, inputs(), 256),
    ):
        raise RuntimeError("something else")


def test_the_runtime_check_notices_a_norm_that_is_too_small(monkeypatch):
    read = inputs()
    tensors = read.trial(4)
    clipper = GradientClipper(small_net(), clipping=Clipping(max_norm=1e-3))
    check_contributions(clipper, lambda mask: clipper.clip(read.losses, tensors, 4, mask), 4)
    right = sums._measure

    def too_small(*args):
        squares, left = right(*args)
        return squares * 0.9, left

    monkeypatch.setattr(sums, "_measure", too_small)
    with pytest.raises(PrivacyError, match=r"beyond the bound 0\.001"):
        check_contributions(clipper, lambda mask: clipper.clip(read.losses, tensors, 4, mask), 4)


def test_a_name_that_is_the_beginning_of_a_model_is_understood_as_such():
    with pytest.raises(ConfigError, match="vit_tiny_patch16_224"):
        build_model("vit_tiny", classes=3, shape=(3, 32, 32))


def test_weights_that_cannot_be_fetched_are_one_message(monkeypatch):
    def without_network(*_, **__):
        logging.getLogger("huggingface_hub.utils._http").warning("Retrying in 1s [Retry 1/5].")
        raise OSError("no route to host")

    said = []
    handler = logging.Handler()
    handler.emit = said.append
    monkeypatch.setattr(timm.models._builder, "load_pretrained", without_network)
    monkeypatch.setattr(logging.getLogger("huggingface_hub"), "handlers", [handler])
    with pytest.raises(ConfigError, match=r'"resnet18".*--weights'):
        build_model("resnet18", classes=3, shape=(3, 32, 32), pretrained=True)
    assert not said
