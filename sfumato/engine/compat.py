"""The words that people know from private_vision, and what they are called here.

The engine takes them as they are typed there. A word that is unknown is refused, and so is one that
would guarantee more privacy than there is.
"""

from sfumato.clipping.factors import CLIP_STYLES, Clipping
from sfumato.errors import ConfigError
from sfumato.privacy.accounting import Accountant

ACCOUNTANTS: dict[str, list[Accountant]] = {
    "pld": ["pld"],
    "rdp": ["rdp"],
    "glw": ["pld"],
    "rdp_cks": ["rdp"],
    "all": ["pld", "rdp"],
}

CLIP_FUNCTIONS: dict[str, str] = {
    "vanilla": "vanilla",
    "autos": "automatic",
    "autov": "auto-v",
    "global": "global",
}


def accountants(accounting_mode: str) -> list[Accountant]:
    """Those that are asked, the first for the epsilon; unknown ones, and gdp, are refused."""
    if accounting_mode == "gdp":
        raise ConfigError(
            'accounting_mode "gdp" is an approximation that reports too small an epsilon: 1 for '
            "2.11, in one of its own examples. Use pld or rdp."
        )
    if accounting_mode not in ACCOUNTANTS:
        raise ConfigError(
            f'accounting_mode "{accounting_mode}": there are {", ".join(ACCOUNTANTS)}.'
        )
    return ACCOUNTANTS[accounting_mode]


def clipping(
    clip_function: str, max_grad_norm: float, numerical_stability_constant: float | None
) -> Clipping:
    """How contributions are bounded; a clip function that is unknown is refused."""
    styles = {style: style for style in CLIP_STYLES} | CLIP_FUNCTIONS
    if clip_function not in styles:
        raise ConfigError(f'clip_function "{clip_function}": {", ".join(styles)}.')
    stability = 0.01 if numerical_stability_constant is None else numerical_stability_constant
    style = styles[clip_function]
    return Clipping(max_norm=max_grad_norm, style=style, stability=stability)


def mode(ghost_clipping: bool, mixed: bool) -> str:
    """The name of one of `clipper.layout.MODES`."""
    return ("ghost_mixed" if mixed else "ghost") if ghost_clipping else "non-ghost"
