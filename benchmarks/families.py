"""Model names of the coverage sweep, by family.

LISTED stands for the models that private_vision says it can train, and the three DenseNets of the
same paper: 83 names over all its families, old names (tv_, gluon_, ssl_, jx_) as people type them.
EXPECTED are families that such a list leaves out, and that a library for vision must know.
"""

# ruff: noqa: SIM905 (lists this long are easier to read as text)

LISTED = """
beit_base_patch16_224 beit_large_patch16_224
vit_tiny_patch16_224 vit_small_patch16_224 vit_base_patch16_224 vit_large_patch16_224
vit_base_patch32_224 deit_tiny_patch16_224 deit_small_patch16_224 deit_base_patch16_224
deit3_small_patch16_224 deit3_base_patch16_224 pit_b_224 cait_xxs24_224 cait_s24_224
convit_tiny convit_small convit_base convnext_base convnext_large
crossvit_9_240 crossvit_15_240 crossvit_18_240 crossvit_tiny_240 crossvit_small_240
crossvit_base_240 xcit_small_12_p16_224 xcit_medium_24_p16_224 xcit_large_24_p16_224
jx_nest_base volo_d1_224 twins_pcpvt_base twins_svt_base pvt_v2_b1 visformer_small
mixer_b16_224 mixer_l16_224 vgg11 vgg13 vgg16 vgg19 vgg11_bn
resnet18 resnet34 resnet50 resnet101 resnet152 wide_resnet50_2 wide_resnet101_2
gluon_resnet18_v1b gluon_resnet50_v1b gluon_resnet101_v1b gluon_resnet152_v1b gluon_resnet50_v1d
tv_resnet34 tv_resnet50 tv_resnet101 tv_resnet152
ssl_resnet18 ssl_resnet50 swsl_resnet18 swsl_resnet50
legacy_seresnet18 legacy_seresnet50 legacy_seresnet152 seresnet50 dla34 dla102 hrnet_w18
res2net50_26w_4s res2next50 ecaresnet50d resnext50_32x4d resnext101_32x8d ig_resnext101_32x8d
seresnext50_32x4d senet154 resnest50d xception inception_v3
densenet121 densenet161 densenet201
""".split()

EXPECTED = """
swin_tiny_patch4_window7_224 swinv2_tiny_window8_256 swinv2_cr_tiny_ns_224
maxvit_rmlp_pico_rw_256 maxvit_tiny_tf_224 coatnet_nano_rw_224 davit_tiny tiny_vit_5m_224
levit_128s efficientformer_l1 efficientformerv2_s0 mvitv2_tiny nfnet_l0 dm_nfnet_f0
resnetv2_50x1_bit resnetv2_50 eva02_tiny_patch14_224 vit_small_patch14_dinov2
vit_base_patch16_siglip_224 aimv2_large_patch14_224 poolformer_s12 poolformerv2_s12
focalnet_tiny_srf hiera_tiny_224 mobilenetv2_100 mobilenetv3_small_100 mobilenetv4_conv_small
efficientnet_b0 tf_efficientnet_lite0 regnetx_002 regnety_002
edgenext_xx_small gcvit_xxtiny repvit_m0_9 convmixer_768_32 convnextv2_atto fastvit_t8
mobilevit_xxs ghostnet_100 vit_relpos_small_patch16_224 coat_tiny sequencer2d_s gmlp_s16_224
resmlp_12_224 inception_v4 cspresnet50
""".split()

REFUSED = {
    "gcvit_xxtiny": "timm tiles its global queries so that windows of an image get those of others",
    "sequencer2d_s": "an LSTM has no rule",
}
"""Models that no per-example gradient exists for, or that no rule covers, and why."""
