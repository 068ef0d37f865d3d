"""One budget for teacher, statistics and card: how it is shared, and that it is kept."""

import math
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from people import portraits
from planted import replace_everywhere
from releases import clouds, guaranteeing, ledger_of, make, moved, stages_of, tiny

from sfumato.commands.release.budget import (
    USUAL_CARD_NOISE,
    USUAL_MOMENTS_NOISE,
    best_share,
    moments_noise,
    share_budget,
)
from sfumato.commands.release.command import Config
from sfumato.errors import ConfigError, PrivacyError
from sfumato.files import append_line, read_json, read_lines
from sfumato.metrics import quality
from sfumato.privacy import noise
from sfumato.privacy.accounting import price
from sfumato.privacy.budget import Budget, make_plan
from sfumato.privacy.releases import Mechanism
from sfumato.sharing.bundle import verify_bundle
from sfumato.sharing.feature_matching import Matching

DELTA = 1e-5


@pytest.fixture(scope="module")
def settings(tmp_path_factory):
    return tiny(tmp_path_factory.mktemp("sets"))


def asked(**changes):
    return Config(**{"epsilon": 2.0, "batch_size": 200, "steps": 50, **changes})


def share(config, size=2000, length=160, **others):
    return share_budget(config, size=size, delta=DELTA, length=length, classes=10, **others)


def cost_of(config, shares, size=2000):
    """What all three cost together, counted by hand."""
    mechanisms = Counter({Mechanism(config.batch_size / size, shares.teacher): config.steps})
    mechanisms.update(Mechanism(1.0, noise) for noise in (shares.moments, shares.card) if noise)
    return price(mechanisms, DELTA, config.relation)


def whole(config, size=2000):
    """The noise of a single release that spends everything."""
    budget = Budget(epsilon=config.epsilon, delta=DELTA)
    return make_plan(budget, size=size, relation=config.relation).noise_multiplier


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"moments_share": 0.05},
        {"moments_share": 0.6},
        {"moments_noise": 9.0},
        {"matching": Matching(k=0)},
        {"per_class": True, "epsilon": 8.0},
        {"relation": "replace"},
    ],
)
def test_epsilon_is_the_total_and_hardly_any_of_it_is_left(changes):
    config = asked(**changes)
    shares = share(config)
    assert 0.97 * config.epsilon <= cost_of(config, shares) <= config.epsilon


def test_a_share_by_hand_is_a_share_of_what_one_release_may_cost():
    config = asked(moments_share=0.25)
    assert share(config).moments == pytest.approx(2 * whole(config))
    assert share(asked(moments_noise=9.0)).moments == 9.0


@pytest.mark.parametrize("error", [1e-4, 0.01, 0.1, 1.0, 10.0])
def test_the_best_share_is_the_best_on_a_grid(error):
    grid = np.geomspace(1e-4, 0.5, 4001)
    losses = 1 / np.sqrt(1 - grid) + error / np.sqrt(grid)
    found = best_share(error)
    assert 1e-4 <= found <= 0.5
    assert 1 / math.sqrt(1 - found) + error / math.sqrt(found) <= losses.min() * (1 + 1e-4)


def test_statistics_of_few_images_or_many_numbers_get_a_larger_share():
    def part(length, rows):
        return (8.0 / moments_noise(asked(), 8.0, length, rows)) ** 2

    assert 0.5 > part(160, 500) > part(160, 2000) > part(160, 60_000) > 1e-4
    assert part(9600, 2000) > part(160, 2000)


def test_statistics_of_each_class_get_more_the_fewer_images_a_class_has():
    few = share(asked(per_class=True)).moments
    many = share_budget(asked(per_class=True), size=2000, delta=DELTA, length=160, classes=2)
    assert few < many.moments < share(asked()).moments


def test_without_matching_the_teacher_gets_what_the_statistics_would():
    alone = share(asked(matching=Matching(k=0)))
    assert alone.moments is None
    assert alone.teacher < share(asked(moments_share=0.2)).teacher


def test_noise_chosen_by_hand_needs_no_budget():
    config = asked(epsilon=None, noise_multiplier=1.5)
    shares = share(config)
    assert (shares.moments, shares.card) == (USUAL_MOMENTS_NOISE, USUAL_CARD_NOISE)
    assert shares.teacher == 1.5
    assert share(replace(config, moments_noise=4.0)).moments == 4.0


def test_after_a_teacher_the_statistics_get_the_rest():
    config = asked(teacher=Path("run"))
    plan = make_plan(size=2000, batch_size=200, steps=50, noise_multiplier=3.0)
    releases = [plan.release("train", step) for step in range(50)]
    shares = share(config, spent=releases)
    assert shares.teacher is None
    total = cost_of(config, replace(shares, teacher=3.0))
    assert 0.97 * config.epsilon <= total <= config.epsilon
    with pytest.raises(ConfigError, match=r"after the teacher at least"):
        share(replace(config, moments_noise=shares.moments / 2), spent=releases)
    assert share(replace(config, moments_noise=50.0), spent=releases).moments == 50.0
    with pytest.raises(ConfigError, match=r"--epsilon 0.1 is for teacher, statistics and card"):
        share(replace(config, epsilon=0.1), spent=releases)
    with pytest.raises(ConfigError, match=r"--epsilon 0.1 .* with the teacher"):
        share(replace(config, epsilon=0.1, matching=Matching(k=0)), spent=releases)


@pytest.mark.parametrize(
    "changes", [{"moments_noise": 0.5}, {"moments_noise": 0.0}, {"moments_share": 0.9999}]
)
def test_statistics_that_leave_nothing_for_the_teacher_are_refused(changes):
    with pytest.raises(ConfigError, match="spent before the rest has a share"):
        share(asked(**changes))


def test_a_delta_as_large_as_one_in_all_images_is_refused():
    for config in (asked(), asked(epsilon=None, noise_multiplier=1.0)):
        with pytest.raises(ConfigError, match="not below 1/2000"):
            share_budget(config, size=2000, delta=0.01, length=160, classes=10)


@pytest.mark.parametrize("relation", ["add-or-remove", "replace"])
def test_a_run_pays_for_teacher_statistics_and_card_and_keeps_its_guarantee(
    settings, tmp_path, relation
):
    make(guaranteeing(settings, 2.0, stage="match", relation=relation), tmp_path / "run")
    ledger = ledger_of(tmp_path / "run")
    assert stages_of(tmp_path / "run") == {"train": 5, "moments": 1, "card": 1}
    assert 0.97 * 2 <= ledger.epsilon() <= 2
    assert ledger.header.relation == relation
    noises = {release.stage: release.noise_multiplier for release in ledger.releases}
    assert noises["card"] > noises["moments"] > noises["train"]
    kept = {release.max_norm for release in ledger.releases if release.stage == "moments"}
    assert kept != {1.0}  # the bound that the sums were clipped to, not a nominal one
    assert verify_bundle(tmp_path / "run" / "bundle").ok
    assert "noise multipliers: teacher" in (tmp_path / "run" / "log.txt").read_text()


def test_a_run_without_matching_has_no_event_for_statistics(settings, tmp_path):
    make(guaranteeing(moved(settings, 0), 2.0, stage="match"), tmp_path / "run")
    assert stages_of(tmp_path / "run") == {"train": 5, "card": 1}
    assert 0.97 * 2 <= ledger_of(tmp_path / "run").epsilon() <= 2
    assert not (tmp_path / "run/stages/moments/moments.safetensors").exists()


def test_noise_by_hand_is_what_the_ledger_says(settings, tmp_path):
    make(replace(settings, stage="moments", moments_noise=7.0), tmp_path / "run")
    noises = {e.stage: e.noise_multiplier for e in ledger_of(tmp_path / "run").releases}
    assert noises == {"train": 2.0, "moments": 7.0}


@pytest.mark.parametrize("k", [0, 2])
def test_a_bundle_beyond_the_budget_is_not_packed(settings, tmp_path, k):
    config, out = guaranteeing(moved(settings, k), 2.0), tmp_path / "run"
    make(replace(config, stage="teacher"), out)
    path = out / "stages/teacher/ledger.jsonl"
    for last in [record for record in read_lines(path) if "event" in record]:
        # As after a crash, where a step was taken again with other sums.
        append_line(path, {"event": {**last["event"], "tag": "another"}}, durable=False)
    with pytest.raises(PrivacyError, match="nothing is released"):
        make(config, out)
    assert not (out / "bundle").exists()


def test_near_copies_count_people_and_not_their_images(settings, tmp_path, monkeypatch):
    portraits(120, 30).save_npz(tmp_path / "faces.npz", portraits(30, 8, seed=1))
    clouds(size=12).save_npz(tmp_path / "clouds.npz", clouds(9, size=12))
    config = replace(
        moved(settings, 0), data=str(tmp_path / "faces.npz"), unit="person", images_per_person=2,
        public=str(tmp_path / "clouds.npz"), batch_size=10, stage="match",
    )  # fmt: skip
    counted, real, far = [], noise.privatize, quality.nearest_distances

    def listen(total, *arguments, stage, **others):
        counted.extend([float(total["count"])] if stage == "card" else [])
        return real(total, *arguments, stage=stage, **others)

    def all_near(of, among, itself=False):
        return far(of, among, itself=itself) if itself else torch.zeros(len(of))

    replace_everywhere(monkeypatch, noise, "privatize", listen)
    replace_everywhere(monkeypatch, quality, "nearest_distances", all_near)
    make(config, tmp_path / "run")
    assert counted == [30.0]


def test_people_are_counted_once_each_whatever_they_have_of_images(settings, tmp_path):
    portraits(120, 30).save_npz(tmp_path / "faces.npz", portraits(30, 8, seed=1))
    clouds(size=12).save_npz(tmp_path / "clouds.npz", clouds(9, size=12))
    config = replace(
        settings, data=str(tmp_path / "faces.npz"), public=str(tmp_path / "clouds.npz"),
        unit="person", images_per_person=2, batch_size=10,
    )  # fmt: skip
    make(replace(config, stage="match"), tmp_path / "run")
    ledger = ledger_of(tmp_path / "run")
    assert ledger.header.unit == "person"
    assert {e.divisor for e in ledger.releases if e.stage != "train"} == {30}
    near = read_json(tmp_path / "run/stages/match/near_copies.json")
    assert near["standard_error"] == USUAL_CARD_NOISE / 30
    assert 0 <= near["share"] <= 1
    assert "all images of one person" in (tmp_path / "run/bundle/card.md").read_text()
    with pytest.raises(ConfigError, match="a person may be in several"):
        replace(config, per_class=True)


def test_doubles_among_public_images_do_not_make_near_copies_impossible(settings, tmp_path):
    some = clouds()
    twice = replace(some, pixels=some.pixels[torch.arange(60) % 50])
    twice.save_npz(tmp_path / "clouds.npz", clouds(9, seed=1))
    config = moved(settings, 0, public=str(tmp_path / "clouds.npz"), stage="match")
    make(config, tmp_path / "run")
    assert read_json(tmp_path / "run/stages/match/near_copies.json")["threshold"] > 1
