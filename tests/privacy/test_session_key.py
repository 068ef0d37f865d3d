"""The secret of a run: it does not show itself, and chance for two purposes is not shared."""

import pytest

from sfumato.errors import PrivacyError
from sfumato.privacy.session_key import SessionKey


def test_a_short_secret_is_refused():
    with pytest.raises(PrivacyError, match="32 bytes"):
        SessionKey(b"")


def test_secrets_differ_and_do_not_show_themselves():
    one, other = SessionKey.draw(), SessionKey.draw()
    assert one.key != other.key
    assert len(one.key) == 32
    assert not one.fixed
    assert repr(one.key) not in repr(one)
    assert SessionKey.from_seed(5) == SessionKey.from_seed(5)
    assert SessionKey.from_seed(5).fixed


def test_purposes_that_read_alike_give_different_bytes():
    secret = SessionKey.from_seed(0)
    purposes = [("a", 1, 2), ("a 1", 2), ("a", "1", 2), ("a", 12), ("a1", 2), ("a", 1), ("a",)]
    assert len({secret.derive(purpose, 16) for purpose in purposes}) == len(purposes)


def test_ledgers_have_scopes_of_their_own_and_a_fixed_seed_repeats_in_all_of_them():
    assert SessionKey.draw().scope("one") == ("one",)
    assert SessionKey.from_seed(0).scope("one") == SessionKey.from_seed(0).scope("other") == ()
