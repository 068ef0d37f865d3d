"""The names a user imports from `sfumato` itself, old ones included, and what errors carry."""

import pickle

import pytest

import sfumato


def test_every_public_name_can_be_loaded():
    assert all(getattr(sfumato, name) is not None for name in dir(sfumato))
    with pytest.raises(AttributeError, match="privatise"):
        sfumato.privatise  # noqa: B018


def test_a_name_of_the_last_version_still_works_and_says_what_it_is_now(monkeypatch):
    monkeypatch.setitem(sfumato.RENAMED, "Allowance", "Budget")
    with pytest.warns(DeprecationWarning, match=r"sfumato\.Budget"):
        assert getattr(sfumato, "Allowance") is sfumato.Budget  # noqa: B009
    assert "Allowance" not in dir(sfumato)


@pytest.mark.parametrize("old", sfumato.RENAMED)
def test_what_was_renamed_is_public_today(old):
    assert old not in dir(sfumato)
    assert sfumato.RENAMED[old] in dir(sfumato)


def test_an_error_says_which_field_it_is_about_and_can_be_pickled():
    problem = sfumato.ConfigError("--delta 2 must be below 1.", field="--delta")
    assert pickle.loads(pickle.dumps(problem)).field == "--delta"
    assert sfumato.ConfigError("no").field is None
