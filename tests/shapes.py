"""How `make test` checks shapes and types at run time: jaxtyping with this beartype."""

from beartype import BeartypeConf, beartype

# As in Python's own type rules, a whole number may stand for a float.
check = beartype(conf=BeartypeConf(is_pep484_tower=True))
