"""Fixtures of a test file about a recipe: tiny settings, and one run of them that is finished."""

import pytest


def fixtures(tiny, go):
    """`settings` from tiny(folder), and `finished`, the directory that go(settings, out) filled."""

    @pytest.fixture(scope="module", name="settings")
    def settings_of_all(tmp_path_factory):
        return tiny(tmp_path_factory.mktemp("sets"))

    @pytest.fixture(scope="module", name="finished")
    def one_whole_run(settings, tmp_path_factory):
        out = tmp_path_factory.mktemp("runs") / "whole"
        go(settings, out)
        return out

    return settings_of_all, one_whole_run
