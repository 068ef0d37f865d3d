"""What sfumato invert refuses, before anything is trained."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from inversions import attack, digits, learn, own_net, save, task, tiny
from safetensors.torch import save_file

from sfumato.attacks.gan_state import GanSettings
from sfumato.attacks.latent_search import Search
from sfumato.cli import main
from sfumato.commands.invert.command import Config
from sfumato.data.images import Images
from sfumato.errors import ConfigError, DataError, RunError, SfumatoError
from sfumato.setting_groups import defaults


@pytest.fixture(scope="module")
def settings(tmp_path_factory):
    return tiny(tmp_path_factory.mktemp("sets"))


@pytest.fixture(scope="module")
def target(settings, tmp_path_factory):
    """A run of sfumato train on all of the private images."""
    return learn(task(settings.data), tmp_path_factory.mktemp("runs") / "target")


def refused(config, out, kind, message):
    """Refused for this reason, with nothing trained and nothing in the way of a better command."""
    with pytest.raises(kind, match=message):
        attack(config, out)
    assert not (out / "private/stages").exists()
    assert not list(out.rglob("*.safetensors"))


def saved(path, images):
    return str(images.save_npz(path, images))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"n": 181}, "has 180 images, and --n 181 are wanted"),
        ({"public": "digits@1-3", "image_size": 16}, "share classes: 1, 2"),
        ({"public": "digit@5-9"}, 'Did you mean "digits"'),
        ({"data": "nowhere.npz"}, "nowhere"),
        ({"image_size": 22}, "--image-size 20 or 24"),
        ({"image_size": 7}, "7 pixels"),
        ({"model": "resnet81"}, "Did you mean"),
        ({"judges": ("group-cnn", "scnm")}, "Did you mean"),
        ({"judge": (Path("nowhere"),)}, "nowhere is no finished run of sfumato train"),
        ({"target": "nowhere"}, "is no folder of a run"),
        ({"target": "inversions:own_net", "weights": Path("nowhere.pt")}, "there is no file"),
        ({"batch_size": 91}, "at most 90"),
        ({"delta": 0.1, "mode": "ghost_mixed", "epsilon": 3.0}, "not below 1/90"),
        ({"unit": "person"}, "nobody knows who"),
        ({"judge_share": 0.99}, 'no image of class "0" is left for the target'),
        ({"judge_share": 0.01}, "is left for judges"),
    ],
)  # fmt: skip
def test_orders_that_cannot_work_are_refused_with_their_reason(
    settings, tmp_path, changes, message
):
    refused(replace(settings, **changes), tmp_path / "run", SfumatoError, message)
    attack(replace(settings, stage="target", steps=1), tmp_path / "run")


def test_shared_classes_can_be_allowed_and_shared_images_cannot(settings, tmp_path):
    late = digits("0-2", "train", 100).select([*range(60, 100), *range(160, 200)])
    public = saved(tmp_path / "public.npz", late)
    other = replace(settings, public=public)
    refused(other, tmp_path / "run", DataError, "share classes: 0, 1, 2")
    refused(replace(settings, public=settings.data, shared_classes=True), tmp_path / "run",
            DataError, "90 images of .* are among the public images")  # fmt: skip
    held_out = digits("0-2", "test", 20)
    seen = replace(settings, public=saved(tmp_path / "seen.npz", held_out), shared_classes=True)
    refused(seen, tmp_path / "run", DataError, "60 images of .* are among the public images")
    attack(replace(other, shared_classes=True, stage="select"), tmp_path / "run")


def test_pictures_that_are_not_square_need_no_generator_or_another_size(settings, tmp_path):
    def wide(images):
        return replace(images, pixels=torch.cat([images.pixels, images.pixels], dim=3))

    files = {
        name: saved(tmp_path / f"{name}.npz", wide(digits(classes, "train", 20)))
        for name, classes in (("data", "0-2"), ("public", "5-7"))
    }
    # Test images of their own: the same would be among the members.
    wide(digits("0-2", "train", 20)).save_npz(files["data"], wide(digits("0-2", "test", 20)))
    config = replace(settings, **files)
    refused(config, tmp_path / "run", DataError, "32 x 16 pixels, and a generator draws squares")
    attack(replace(config, method="pixels"), tmp_path / "run")


def test_a_target_must_fit_the_images_that_it_is_said_to_have_learnt(settings, tmp_path):
    weights = tmp_path / "own.safetensors"
    save_file(own_net(4).state_dict(), weights)
    own = replace(settings, target="inversions:own_net", weights=weights)
    out = tmp_path / "run"
    refused(own, out, ConfigError, "made for other classes than the 3 of .* with --data")
    save_file(own_net(3).state_dict(), weights)
    colours = Images(
        pixels=torch.randint(256, (60, 3, 16, 16), dtype=torch.uint8),
        labels=torch.arange(60) % 3, classes=("a", "b", "c"), name="colours", private=True,
    )  # fmt: skip
    others = replace(
        colours,
        pixels=torch.randint(256, (60, 3, 16, 16), dtype=torch.uint8),
        classes=("d", "e", "f"),
    )
    files = {
        "data": saved(tmp_path / "colours.npz", colours),
        "public": saved(tmp_path / "others.npz", others),
    }
    refused(replace(own, **files), out, ConfigError, "does not take images of 3 x 16 x 16")
    small = replace(own, image_size=8, target="inversions:own_net")
    attack(replace(small, stage="select"), tmp_path / "small")  # this one takes any size
    torch.save({"weight": torch.zeros(2)}, tmp_path / "odd.pt")
    refused(replace(own, weights=tmp_path / "odd.pt"), out, ConfigError, "does not fit this model")


def test_a_target_of_another_size_is_refused(settings, tmp_path, monkeypatch):
    import inversions

    def stiff(classes):
        return torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, classes))

    monkeypatch.setattr(inversions, "stiff", stiff, raising=False)
    save_file(stiff(3).state_dict(), tmp_path / "stiff.safetensors")
    config = replace(settings, target="inversions:stiff", weights=tmp_path / "stiff.safetensors")
    refused(config, tmp_path / "run", ConfigError, "does not take images of 1 x 16 x 16")
    attack(replace(config, image_size=8, stage="select"), tmp_path / "run")


def test_weights_without_the_statistics_of_batch_norm_are_refused(settings, tmp_path):
    state = own_net(3).state_dict()
    kept = {name: value for name, value in state.items() if "running" not in name}
    save_file(kept, tmp_path / "own.safetensors")
    own = replace(settings, target="inversions:own_net", weights=tmp_path / "own.safetensors")
    refused(own, tmp_path / "run", ConfigError, 'no "1.running_mean".* say --norm group')
    attack(replace(own, norm="group", stage="select"), tmp_path / "run")


def test_a_target_of_another_verb_or_unfinished_is_refused(settings, target, tmp_path):
    (tmp_path / "half").mkdir()
    (tmp_path / "half/config.json").write_bytes((target / "config.json").read_bytes())
    half = replace(settings, target=str(tmp_path / "half"))
    refused(half, tmp_path / "run", RunError, "no finished run of sfumato train: done.json")
    attack(replace(settings, stage="target"), tmp_path / "other")
    other = replace(settings, target=str(tmp_path / "other"))
    refused(other, tmp_path / "run", RunError, "is a run of sfumato invert: one of")


def test_a_run_knows_its_pixels(settings, target, tmp_path):
    config = replace(settings, target=str(target), target_pixels=(0.0, 1.0))
    refused(config, tmp_path / "run", ConfigError, "knows its pixels")


def test_the_target_cannot_be_its_own_judge(settings, target, tmp_path):
    config = replace(settings, judge=(target,))
    refused(config, tmp_path / "run", ConfigError, "knows the classes 0, 1, 2. It should know 0, 1")


def test_a_judge_that_met_the_targets_images_is_refused(settings, tmp_path):
    both = saved(tmp_path / "both.npz", six_classes(digits("0-2", "train", 60)))
    judge = learn(task(both), tmp_path / "judge")
    config = replace(settings, judge=(judge,))
    refused(config, tmp_path / "run", DataError, "trained on 90 of the images .* another judge")


def test_a_judge_that_met_the_images_it_is_compared_on_is_refused(settings, tmp_path):
    held_out = saved(tmp_path / "held.npz", six_classes(digits("0-2", "test", 20)))
    config = replace(settings, judge=(learn(task(held_out), tmp_path / "judge"),))
    refused(config, tmp_path / "run", DataError, "trained on 60 of the images that nobody may know")


def test_a_judge_with_two_heads_is_refused(settings, tmp_path):
    config = replace(settings, judges=("inversions:two_heads",))
    refused(config, tmp_path / "run", ConfigError, "needs one last layer")


def test_a_target_of_ones_own_needs_the_images_that_it_learnt(settings, tmp_path):
    data = defaults(Config)["data"]
    config = replace(settings, target="inversions:own_net", weights=Path("x.pt"), data=data)
    refused(config, tmp_path / "run", ConfigError, "which images did .* --data")


@pytest.mark.parametrize(
    "flags",
    [
        ["--least-area", "-1"], ["--degrees", "nan"], ["--jitter", "nan"], ["--z-lr", "-1"],
        ["--gan-lr", "nan"], ["--alpha", "nan"], ["--patience", "-5"],
    ],
)  # fmt: skip
def test_numbers_that_make_no_sense_are_refused_at_once(flags, capsys, tmp_path):
    with pytest.raises(SystemExit) as stopped:
        main(["invert", "--preset", "digits-cpu", *flags, "--out", str(tmp_path / "run")])
    assert stopped.value.code == 2
    assert flags[0].strip("-").replace("-", "_") in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_a_judge_with_weights_of_the_target_is_refused(settings, target, tmp_path):
    fresh = [
        k for k in range(240) if k % 80 >= 60
    ]  # neither among the images of the target nor scored on
    others = saved(tmp_path / "others.npz", six_classes(digits("0-2", "train", 80).select(fresh)))
    weights = target / "model.safetensors"
    judge = learn(task(others, weights=weights), tmp_path / "fine-tuned")
    config = replace(settings, target=str(target), judges=(), judge=(judge,))
    attack(config, tmp_path / "fine")  # what it began with is not what it is
    judge = learn(task(others, weights=weights, freeze=("3.weight",)), tmp_path / "frozen")
    config = replace(config, judge=(judge,))
    refused(
        config, tmp_path / "run", DataError, 'shares weights .*"3.weight", 1 tensor.* another judge'
    )


def six_classes(private):
    """Private images, and public ones beside them, as a judge should learn them."""
    public = digits("5-7", "train", 60)
    return replace(
        private, pixels=torch.cat([private.pixels, public.pixels]),
        labels=torch.cat([private.labels, public.labels + 3]),
        classes=(*private.classes, *public.classes),
    )  # fmt: skip


def test_a_judge_whose_classes_have_another_order_is_refused(settings, tmp_path):
    judge = learn(task("digits@5-7,0-2", image_size=16), tmp_path / "judge")
    config = replace(settings, judge=(judge,))
    refused(config, tmp_path / "run", ConfigError, "knows the classes 5, 6, 7, 0.* in this order")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"judges": ()}, "who judges"),
        ({"judge_share": 0.0}, "between 0 and 1"),
        ({"judge_share": 1.0}, "between 0 and 1"),
        ({"judge_epochs": 0.0}, "above 0"),
        ({"judge_epochs": float("nan")}, "above 0"),
        ({"n": 0}, "at least 1"),
        ({"seeds": 0}, "at least 1"),
        ({"mode": "ghost_mixed"}, "neither of --epsilon"),
        ({"epsilon": 3.0}, "leave --epsilon out"),
        ({"target": "run", "epsilon": 3.0}, "the target has its own"),
        ({"shared_classes": True, "other_classes": True}, "give one of them"),
        ({"target_pixels": (0.0, 1.0)}, "are for a --target of your own"),
        ({"target": "a:b", "target_pixels": (1.0, 0.0)}, "black below white"),
        ({"sweep": True, "epsilon": 3.0}, "a sweep chooses it"),
        ({"sweep": True, "target": "run"}, "leave --target out"),
        ({"sweep": True, "stage": "select"}, "leave --stage out"),
        ({"sweep": True, "epsilons": ("8", "many")}, '--epsilons "many"'),
        ({"sweep": True, "epsilons": ("0",)}, '--epsilons "0"'),
        ({"sweep": True, "epsilons": ("-1",)}, '--epsilons "-1"'),
        ({"sweep": True, "epsilons": ("nan",)}, '--epsilons "nan"'),
        ({"sweep": True, "epsilons": ("Infinity",)}, '--epsilons "Infinity"'),
        ({"sweep": True, "epsilons": ()}, "at least one of --epsilons"),
        ({"sweep": True, "units": ()}, "one of --units"),
    ],
)
def test_settings_that_contradict_themselves_are_refused(changes, message):
    with pytest.raises(ConfigError, match=message):
        Config(**{"mode": "non-private", **changes})


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        (GanSettings, {"iterations": 0}), (GanSettings, {"look_every": 0}),
        (GanSettings, {"d_steps": 0}), (GanSettings, {"gan_ema": 1.0}),
        (Search, {"restarts": 0}), (Search, {"z_steps": -1}), (Search, {"z_batch": 0}),
    ],
)  # fmt: skip
def test_an_attack_without_steps_or_images_is_refused(kind, changes):
    with pytest.raises(ConfigError, match=f"{next(iter(changes))}=.* must be"):
        kind(**changes)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["selct", "--preset", "digits-cpu"], 'has no "selct". Did you mean "select"?'),
        (["swep", "--preset", "digits-cpu"], 'Did you mean "sweep"?'),
        (["--preset", "digit-cpu"], 'has no preset "digit-cpu". There are: digits-cpu, s1'),
        (["--preset", "digits-cpu", "--method", "plgm"], "plgm"),
        (["--preset", "digits-cpu", "--los", "margin"], "--los"),
        (["--preset", "digits-cpu", "--judges"], "who judges"),
        (["sweep", "--preset", "digits-cpu", "--epsilons", "8", "x"], '--epsilons "x"'),
    ],
)
def test_words_that_mean_nothing_end_with_code_two(words, message, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as stopped:
        main(["invert", *words])
    assert stopped.value.code == 2
    assert message in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_other_settings_in_the_same_place_are_refused_by_name(settings, tmp_path):
    attack(replace(settings, stage="target"), tmp_path / "run")
    with pytest.raises(RunError, match=r"config\.n: 20 -> 21"):
        attack(replace(settings, n=21), tmp_path / "run")


def test_public_images_may_be_exactly_as_many_as_are_wanted(settings, tmp_path):
    few = save(tmp_path / "few.npz", "5-7", train_each=5)
    attack(replace(settings, public=few, n=15, stage="select"), tmp_path / "run")
