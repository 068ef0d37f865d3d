"""Pictures and tables of inversion attacks: what is shown, where it stands, and what is refused."""

import math

import pytest
import torch

from sfumato.errors import ConfigError
from sfumato.metrics.judges import JudgedSets, JudgeOutput
from sfumato.reporting import figures, inversion_figures
from sfumato.reporting.inversion_figures import (
    SweepRow,
    contact_sheet,
    mean_log_probability,
    sweep_plots,
    sweep_table,
)


def row(target="DP, each image", epsilon=8.0, attack=0.6, interval=(0.4, 0.8), **others):
    facts = {"seed": 0, "test_accuracy": 0.9, "control": False, **others}
    return SweepRow(
        target=target,
        epsilon=epsilon,
        attack={"mean": attack, "interval": interval},
        floor={"mean": facts.pop("floor", 0.05), "interval": None},
        gap={"mean": 0.01, "interval": [-0.2, 0.3]},
        **facts,
    )


ROWS = [
    row("no privacy", math.inf, 1.0, (1.0, 1.0), test_accuracy=0.99),
    row(epsilon=8.0),
    row(epsilon=1.0, attack=0.3, interval=None, test_accuracy=0.8, floor=0.07),
    row("stopped early", 1.0, 0.35, (0.2, 0.5), control=True, test_accuracy=0.81),
]


def judged(rows):
    """A judge of one class in two, the log odds of which are given."""
    logits = torch.tensor(rows)[:, None] * torch.tensor([1.0, 0.0])
    seen = JudgeOutput(logits, logits)
    return JudgedSets(seen, seen, seen, seen)


def labels_of(guesses, members):
    empty = torch.zeros(0, dtype=torch.int64)
    return JudgedSets(torch.tensor(guesses), torch.tensor(members), empty, empty)


def handed(monkeypatch, name):
    """What is handed on to a function at the door of matplotlib."""
    found, real = {}, getattr(figures, name)

    def keep(*arguments, **settings):
        found.update(arguments=arguments[1:], settings=settings)
        return real(*arguments, **settings)

    monkeypatch.setattr(inversion_figures, name, keep)
    return found


def flat(*levels):
    return torch.tensor(levels)[:, None, None, None].expand(-1, 1, 4, 4)


def test_log_probabilities_are_averaged_over_judges():
    labels = labels_of([0, 1], [0, 1])
    found = mean_log_probability(labels, {"a": judged([2.0, 2.0]), "b": judged([0.0, -1.0])})
    right, wrong = -math.log1p(math.exp(-2)), -math.log1p(math.exp(2))
    assert found[0] == pytest.approx((right - math.log(2)) / 2)
    assert found[1] == pytest.approx((wrong - math.log1p(math.exp(-1))) / 2)


def test_a_sheet_shows_the_best_the_median_and_the_worst_of_each_class(tmp_path, monkeypatch):
    found = handed(monkeypatch, "save_image_rows")
    labels = labels_of([1, 0, 0, 1, 0], [0, 1, 0, 0])
    judges = {"a": judged([5.0, 1.0, 3.0, -5.0, 2.0])}  # in favour of class 0
    guesses, members = flat(0.1, 0.2, 0.3, 0.4, 0.5), flat(0.6, 0.7, 0.8, 0.9)
    path = contact_sheet(tmp_path / "sheet.png", members, guesses, labels, judges, ["no", "yes"])
    assert path.read_bytes()[:4] == b"\x89PNG"
    rows, columns = found["arguments"]
    assert columns == ["no", "yes"]
    levels = [images[:, 0, 0, 0].tolist() for _, images in rows]
    wanted = [[0.6, 0.7], [0.8, 1.0], [0.3, 0.4], [0.5, 0.1], [0.2, 0.1]]
    assert torch.allclose(torch.tensor(levels), torch.tensor(wanted))


def test_a_sheet_of_many_classes_shows_the_first_and_one_guess_is_enough(tmp_path, monkeypatch):
    found, count = handed(monkeypatch, "save_image_rows"), 23
    labels = labels_of(list(range(count)), list(range(count)))
    seen = JudgeOutput(torch.eye(count), torch.eye(count))
    pictures = torch.rand(count, 3, 4, 4)
    judged = {"a": JudgedSets(seen, seen, seen, seen)}
    contact_sheet(
        tmp_path / "sheet.png", pictures, pictures, labels, judged,
        [f"number {i}" for i in range(count)],
    )  # fmt: skip
    rows, columns = found["arguments"]
    assert columns == [f"number {i}" for i in range(20)]
    best, median, worst = (images for _, images in rows[2:])
    assert torch.equal(best, median)
    assert torch.equal(best, worst)


def test_a_sweep_has_infinity_at_the_right_end_and_controls_hollow(tmp_path, monkeypatch):
    found = handed(monkeypatch, "save_panels")
    path = sweep_plots(tmp_path / "sweep.png", ROWS)
    assert path.read_bytes()[:4] == b"\x89PNG"
    over_epsilon, over_accuracy = found["arguments"][0]
    assert list(over_epsilon.ticks.values()) == ["1", "8", "inf"]
    assert list(over_epsilon.ticks) == sorted(over_epsilon.ticks)
    (infinite,), private, (control,) = over_epsilon.series.values()
    assert infinite[0] == pytest.approx(max(over_epsilon.ticks), rel=0.1)
    assert [point[0] for point in private] == pytest.approx([8, 1], rel=0.2)
    assert control[0] == pytest.approx(1, rel=0.2)
    assert control[1:] == (0.35, 0.2, 0.5)
    assert private[1][1:] == (0.3, 0.3, 0.3), "without an interval a mark stands alone"
    assert [p[0] for p in over_accuracy.series["DP, each image"]] == [0.9, 0.8]
    assert found["settings"]["hollow"] == {"stopped early (control)"}
    assert found["settings"]["floor"][1] == 0.07


def test_a_target_and_its_control_of_one_name_are_two_series(tmp_path, monkeypatch):
    found = handed(monkeypatch, "save_panels")
    sweep_plots(tmp_path / "sweep.png", [row("net"), row("net", control=True)])
    assert [len(panel.series) for panel in found["arguments"][0]] == [2, 2]


def test_a_sweep_without_privacy_or_with_one_row_is_drawn(tmp_path):
    for rows in (ROWS[:1], ROWS[1:2]):
        assert sweep_plots(tmp_path / "sweep.png", rows).exists()


@pytest.mark.parametrize("rows", [[], [row(epsilon=0.0)], [row(epsilon=math.nan)]])
def test_a_sweep_without_an_epsilon_is_refused(tmp_path, rows):
    with pytest.raises(ConfigError, match="above 0"):
        sweep_plots(tmp_path / "sweep.png", rows)


def test_the_table_says_what_a_control_is_and_gives_intervals():
    lines = sweep_table(ROWS).splitlines()
    assert len(lines) == 2 + len(ROWS)
    assert len({line.count("|") for line in lines}) == 1
    assert "| inf | 0 | 0.990 | 1 [1, 1] | 0.050 | 0.01 [-0.2, 0.3] |" in lines[2]
    assert "| 0.3 |" in lines[4]
    assert "stopped early (control) | inf, stopped as 1 |" in lines[5]
