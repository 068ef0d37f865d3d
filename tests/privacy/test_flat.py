import pytest
import torch

from sfumato.errors import PrivacyError
from sfumato.privacy.flat import Sums


def some(dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)

    def draw(*shape):
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)

    return {
        "conv": draw(4, 3, 2, 2).contiguous(memory_format=torch.channels_last),
        "scalar": draw(),
        "turned": draw(5, 7).T,
        "gaps": draw(6, 6)[::2, ::3],
        "spread": draw(3, 1).expand(3, 4),
        "none": draw(0, 3),
        "row": draw(9),
    }


def test_every_number_lies_in_the_flat_vector_once():
    given = some()
    sums = Sums.of(given)
    (flat,) = sums.flats
    assert flat.numel() == sum(t.numel() for t in given.values())
    assert list(sums) == list(given)
    for name, tensor in given.items():
        assert torch.equal(sums[name], tensor)
    flat.fill_(7.0)
    assert all((tensor == 7).all() for tensor in sums.values())
    for name in sums:
        sums[name].zero_()
    assert not flat.any()


def test_tensors_keep_their_layout_and_follow_the_order_of_the_mapping():
    given = some()
    sums = Sums.of(given)
    for name in ("conv", "turned", "row"):
        assert sums[name].stride() == given[name].stride()
    backwards = Sums.of(dict(reversed(given.items())))
    assert torch.equal(backwards.flats[0][:9], given["row"])
    assert sums.layout.description != backwards.layout.description


def test_types_have_a_flat_vector_each():
    given = {"a": torch.ones(2), "b": torch.ones(3, dtype=torch.float64), "c": torch.ones(4)}
    sums = Sums.of(given)
    assert [(flat.dtype, len(flat)) for flat in sums.flats] == [
        (torch.float32, 6),
        (torch.float64, 3),
    ]
    assert {name: t.dtype for name, t in sums.items()} == {n: t.dtype for n, t in given.items()}


def test_sums_that_are_given_again_are_not_copied():
    sums = Sums.of(some())
    assert Sums.of(sums) is sums


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_parts_are_added_however_they_lie(dtype):
    given = some(dtype)
    sums = Sums.zeros(given)
    turned = {n: t.clone(memory_format=torch.contiguous_format) for n, t in given.items()}
    sums.add(given)
    sums.add(turned)
    sums.add({"row": given["row"]})
    sums.add({})
    for name, tensor in given.items():
        torch.testing.assert_close(sums[name], (3 if name == "row" else 2) * tensor)
    others = sums.layout.zeros()
    assert not any(tensor.any() for tensor in others.values())
    assert sums["row"].any(), "they lie elsewhere"


def test_what_is_not_among_the_first_parts_begins_at_zero():
    given = some()
    sums = Sums.zeros(given)
    sums.add({"row": given["row"]})
    sums.add(given)
    for name, tensor in given.items():
        torch.testing.assert_close(sums[name], (2 if name == "row" else 1) * tensor)


@pytest.mark.parametrize("before", [0, 1])
def test_a_part_of_another_shape_is_refused_and_leaves_the_sums_as_they_were(before):
    given = some()
    sums = Sums.zeros(given)
    for _ in range(before):
        sums.add(given)
    wrong = given | {"row": given["row"].new_ones(1)}
    with pytest.raises(PrivacyError, match=r'"row" is a sum of shape \(9,\), .* of shape \(1,\)'):
        sums.add(wrong)
    with pytest.raises(PrivacyError, match='"other" is none of these sums: conv, scalar'):
        sums.add(given | {"other": given["row"]})
    for name, tensor in given.items():
        assert torch.equal(sums[name], before * tensor)


def test_sums_of_narrow_numbers_are_taken_in_float32():
    sums = Sums.zeros({"w": torch.ones(3, dtype=torch.bfloat16)})
    assert sums["w"].dtype == torch.float32
