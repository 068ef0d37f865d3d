from sfumato.data.example_rng import seed_of


def test_a_seed_by_name_is_the_same_on_every_machine_and_python():
    assert seed_of(0, 1, "a") == 1575865806123013661


def test_other_names_have_other_seeds_that_torch_and_numpy_take():
    names = [(a, b) for a in range(-3, 30) for b in range(-3, 30)] + [(1,), (), ("1",), (1, 2, 3)]
    seeds = {seed_of(*name) for name in names}
    assert len(seeds) == len(names)
    assert 0 <= min(seeds) <= max(seeds) < 2**63
