"""Real architectures, one of each family, small: norms and sums are those of autograd.

The functions are those of benchmarks/coverage.py. The whole list, at full depth, takes half an
hour and waits for `pytest -m sweep`.
"""

import sys
from functools import partial
from pathlib import Path

import pytest
import torch
from timm.layers import GatedMlp, StdConv2d
from timm.models.mlp_mixer import MlpMixer, SpatialGatingBlock
from timm.models.mvitv2 import MultiScaleVit, MultiScaleVitCfg
from timm.models.resnetv2 import ResNetV2
from timm.models.volo import VOLO

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
import coverage
from families import EXPECTED, LISTED, REFUSED

from sfumato.errors import UnsupportedLayer

pytestmark = pytest.mark.filterwarnings("ignore")

HEADS = {"embed_dim": 48, "num_heads": 3}
STAGES = {"depths": (1, 1, 1, 1)}
MIXER = {"img_size": 64, "num_classes": 10, "num_blocks": 2, "embed_dim": 24}
SMALL = {
    "beit_base_patch16_224": {"depth": 1, **HEADS},
    "cait_xxs24_224": {"depth": 1},
    "convit_tiny": {"depth": 2, "local_up_to_layer": 1},
    "convnextv2_atto": {**STAGES, "dims": (8, 16, 24, 32)},
    "crossvit_tiny_240": {"depth": ((1, 1, 0),) * 2, "embed_dim": (24, 48)},
    "deit3_small_patch16_224": {"depth": 1, **HEADS},
    "densenet121": {"block_config": (1, 1, 1, 1)},
    "edgenext_xx_small": {"depths": (1, 1, 2, 1)},
    "hiera_tiny_224": {"stages": (1, 1, 1, 1), "embed_dim": 24},
    "levit_128s": {"depth": (1, 1, 1)},
    "pit_ti_224": {"depth": (1, 1, 1)},
    "poolformer_s12": {"layers": (1, 1, 1, 1), "embed_dims": (8, 16, 24, 32)},
    "pvt_v2_b0": STAGES,
    "res2net50_26w_4s": {"layers": (1, 1, 1, 1)},
    "resnest14d": {},
    "swin_tiny_patch4_window7_224": {"depths": (2, 1, 1, 1), "embed_dim": 24},
    "swinv2_tiny_window8_256": {"depths": (2, 1, 1, 1), "embed_dim": 24},
    "tiny_vit_5m_224": {**STAGES, "embed_dims": (16, 32, 32, 64), "num_heads": (1, 2, 2, 4)},
    "twins_svt_small": {"depths": (1, 1, 2, 1), "embed_dims": (16, 32, 48, 64)},
    "vit_base_patch16_siglip_224": {"depth": 1, **HEADS},
    "xcit_nano_12_p16_224": {"depth": 1},
    "test_byobnet": {},
    "test_efficientnet": {},
    "test_nfnet": {},
    "test_resnet": {},
    "mixer": partial(MlpMixer, **MIXER),
    "gmlp": partial(
        MlpMixer, **MIXER, mlp_ratio=2, block_layer=SpatialGatingBlock, mlp_layer=GatedMlp
    ),
    "mvitv2": lambda: MultiScaleVit(MultiScaleVitCfg(depths=(1, 1, 1, 1), embed_dim=24), 64, 3, 10),
    "resnetv2_bit": lambda: ResNetV2((1, 1), (128, 256), 10, conv_layer=StdConv2d),
    "volo": lambda: VOLO(
        [1, 1, 1, 1], 64, num_classes=10, embed_dims=[24, 48, 48, 48], num_heads=[1, 2, 2, 2]
    ),
}


FIRST = [
    "beit_base_patch16_224", "convit_tiny", "convnextv2_atto", "densenet121", "levit_128s",
    "swinv2_tiny_window8_256", "xcit_nano_12_p16_224", "test_byobnet", "test_efficientnet",
    "test_nfnet", "gmlp", "resnetv2_bit",
]  # fmt: skip
"""Those that between them have all the rest is made of; the others wait for make test-all."""


def build(name):
    small = SMALL[name]
    return coverage.build(name, **small) if isinstance(small, dict) else (_own(small), 64)


def _own(make):
    torch.manual_seed(0)
    return coverage.prepare(make())


@pytest.mark.parametrize(
    "name", [*FIRST, *(pytest.param(n, marks=pytest.mark.full) for n in SMALL if n not in FIRST)]
)
def test_a_family_is_exact_and_trains_whole(name):
    torch.set_default_dtype(torch.float64)
    try:
        model, size = build(name)
        coverage.settle(model, size)
        found = coverage.compare(model, torch.randn(2, 3, size, size))
    finally:
        torch.set_default_dtype(torch.float32)
    assert found["norms"] < 1e-9
    assert found["sums"] < 1e-9
    assert found["trained"] == sum(p.numel() for p in model.parameters())


@pytest.mark.sweep
@pytest.mark.parametrize("name", dict.fromkeys(map(coverage.architecture, LISTED + EXPECTED)))
def test_every_model_of_the_list_is_exact_or_refused_by_name(name):
    if name in REFUSED:
        with pytest.raises(UnsupportedLayer, match=r'^".*" .*freeze'):
            coverage.check(name)
        return
    row = coverage.check(name)
    assert not row["mixes"]
    assert row["share"] == 1
    assert row["norms64"] < 1e-9
    assert row["sums64"] < 1e-9
    assert row["sums"] < max(coverage.GOAL, 3 * row.get("autograd", 0.0))
