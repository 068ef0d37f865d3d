"""benchmarks/gpu.py on a CPU, with models of toy size: it runs, and its findings become a table."""

import gc
import json
import subprocess
import sys
import weakref
from dataclasses import replace
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))
import gpu_checks
import gpu_layers
import gpu_loop
import gpu_measure
import gpu_steps
import gpu_table
from gpu_cases import TINY, WAYS

from sfumato.clipping import contract, sums
from sfumato.clipping.clip import GradientClipper
from sfumato.clipping.factors import Clipping
from sfumato.privacy.sampling import Chunk

pytestmark = pytest.mark.filterwarnings("ignore")
CPU, SCRIPT = torch.device("cpu"), Path(gpu_table.__file__).with_name("gpu.py")


def test_a_run_leaves_a_line_for_each_method_and_a_table(tmp_path):
    out = tmp_path / "gpu.jsonl"
    words = ["--tiny", "--cases", "tiny-vit", "--ways", "bf16", "--methods", "plain", "private"]
    command = [sys.executable, str(SCRIPT), *words, "--out", str(out)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    records = [json.loads(line) for line in out.read_text().splitlines()]
    assert [r["method"] for r in records] == ["plain", "private"]
    assert all(r["trained"] == 1 and r["ms"] > 0 for r in records)
    assert len({r["run"] for r in records}) == 1
    table = gpu_table.tables(records, str(out))
    wanted = records[1]["ms"] / records[0]["ms"]
    assert f"| {records[1]['ms']:.1f} ms / 0 MB | {wanted:.2f}x | - |" in table


def test_the_checks_notice_a_norm_that_is_too_small(monkeypatch):
    (right,) = gpu_checks.check_case(TINY["tiny-vit"], WAYS["bf16"], CPU)
    assert right["added"] < 1e-5
    assert right["of_bound"] <= 1
    assert right["norms"] < 1e-3
    found = sums._measure

    def too_small(*args):
        squares, left = found(*args)
        return 0.98 * squares, left

    monkeypatch.setattr(sums, "_measure", too_small)
    (wrong,) = gpu_checks.check_case(TINY["tiny-vit"], WAYS["bf16"], CPU)
    assert wrong["added"] > 5e-3
    assert wrong["of_bound"] > 1.005
    assert wrong["norms"] > 5e-3


def test_collinear_tokens_keep_their_norm():
    found = gpu_checks.check_collinear(CPU)
    assert found["lowest"] >= 0.999


def finding(case, way, method, ms, mb, run=1, **others):
    where = {"kind": "time", "case": case, "way": way, "method": method, "run": run}
    measured = {"ms": ms, "mb": mb, "trained": 1} if ms else {}
    return {**where, "batch": 8, **measured, **others}


def test_the_table_has_each_way_with_ratios_and_says_how_often_private_bf16_wins():
    compiled = "bf16+compile+graphs"
    records = [
        finding("vit-b", compiled, "plain", 27.0, 5000, run=3),
        finding("vit-b", compiled, "private", 36.0, 5500, run=3),
        finding("vit-b", "tf32", "plain", 80.0, 10000),
        finding("vit-b", "tf32", "private", 100.0, 10500),
        finding("vit-b", "tf32", "Opacus", 160.0, 30000, trained=0.99),
        finding("vit-b", "bf16+graphs", "private", 90.0, 7000, run=2),
        finding("wrn16-4", "tf32", "plain", 50.0, 100),
        {**finding("wrn16-4", "tf32", "private", 0, 0), "error": "out of memory"},
        finding("wrn16-4", compiled, "private", 64.0, 90, run=5),
    ]
    table = gpu_table.tables(records, "")
    for row in (
        "| case (batch) | way | plain | private | time | memory | Opacus |",
        "| ViT-B/16, 224 (8) | tf32 | 80.0 ms / 10,000 MB | 100.0 ms / 10,500 MB | 1.25x | 1.05x |"
        " 160.0 ms / 30,000 MB, 2.00x, 3.00x, trains 99 % |",
        "| ViT-B/16, 224 (8) | bf16+graphs | - | 90.0 ms / 7,000 MB | - | - | - |",
        f"| ViT-B/16, 224 (8) | {compiled} | 27.0 ms / 5,000 MB | 36.0 ms / 5,500 MB | 1.33x |"
        " 1.10x | - |",
        "| WRN-16-4, 32, 16 views (8) | tf32 | 50.0 ms / 100 MB | out of memory | - | - | - |",
        "Private bf16 is faster than plain, eager TF32: compiled in 1 of 2 cases, "
        "eager in 0 of 1 cases; in processes of their own.",
        f"| ViT-B/16, 224 | 80.0 ms / 10,000 MB | 36.0 ms / 5,500 MB ({compiled}) | 0.45x |"
        " 0.55x |",
        "| case | way | plain | private |",
        "| WRN-16-4, 32, 16 views | tf32 | 2,560 | - |",
        f"| WRN-16-4, 32, 16 views | {compiled} | - | 2,000 |",
    ):
        assert row in table.splitlines(), row
    assert table.index("80.0 ms / 10,000 MB |") < table.index("27.0 ms / 5,000 MB |")


@pytest.mark.parametrize("room", [1, 2, 3, 7, 8, 39, 64, 100, 1000])
def test_the_largest_batch_is_found_to_one_part_in_eight(room):
    tried = []

    def fits(size):
        tried.append(size)
        return size <= room

    found = gpu_measure.largest(fits, 512)
    assert min(room, 512) * 7 / 8 - 1 <= found <= min(room, 512)
    assert len(tried) == len(set(tried)) <= 14


def test_a_method_that_fails_does_not_stop_the_others(monkeypatch):
    def new_step(method, *_):
        if method == "private":
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 196.00 GiB.")
        return (lambda: None), 1.0

    monkeypatch.setattr(gpu_measure, "new_step", new_step)
    plain, private = gpu_measure.measure_times(
        TINY["tiny-vit"], WAYS["tf32"], ["plain", "private"], CPU, 60
    )
    assert plain["ms"] >= 0
    assert private["error"] == "out of memory (196.00 GiB asked)"


@pytest.mark.parametrize("method", ["plain", "private"])
def test_a_step_of_three_physical_batches_has_three_times_the_gradient(method, monkeypatch):
    seen = []

    def keep(parameters, gradient):
        return lambda: seen.append([part.clone() for part in gradient()])

    def exact(total, *_, **__):
        return {name: part.clone() for name, part in total.items()}

    monkeypatch.setattr(gpu_steps, "with_optimizer", keep)
    monkeypatch.setattr(gpu_steps, "privatize", exact)
    for chunks in (1, 3):
        step, _ = gpu_steps.new_step(method, TINY["tiny-wrn"], WAYS["tf32"], CPU, 4, chunks)
        step()
        step()
    for one, other, three, more in zip(*seen, strict=True):
        torch.testing.assert_close(three, 3 * one)
        assert torch.equal(one, other)
        assert torch.equal(three, more)


def test_what_no_kernel_fills_is_counted_once():
    assert gpu_measure.gaps([(5, 9), (0, 1), (2, 4), (3, 5), (6, 7)]) == 1
    assert gpu_measure.gaps([]) == 0


@pytest.mark.parametrize(
    ("kernel", "kind"),
    [
        ("tap_tile", "ours"),
        ("triton_red_fused_native_layer_norm_12", "fused by the compiler"),
        ("sm90_xmma_fprop_implicit_gemm_bf16bf16_bf16f32_f32_nhwckrsc_nhwc", "convolution"),
        ("nvjet_tst_256x128_64x4_1x2_h_bz_coopA_NNT", "product"),
        ("void at::native::(anonymous namespace)::vectorized_layer_norm_kernel", "normalisation"),
        ("at::native::distribution_elementwise_grid_stride_kernel<float, normal>", "noise"),
        ("void pytorch_flash::flash_bwd_dq_dk_dv_loop_seqk_parallel_kernel", "attention"),
        ("at::native::unrolled_elementwise_kernel<direct_copy_kernel_cuda>", "copy"),
        ("Memcpy DtoD (Device -> Device)", "copy"),
    ],
)
def test_kernels_are_known_by_their_names(kernel, kind):
    assert gpu_measure.kind_of(kernel) == kind


def test_a_batch_that_does_not_fit_leaves_nothing_behind_for_the_next_trial(monkeypatch):
    held, seen = [], []

    class Holder:
        """Something a step makes, in a circle as models are."""

        def __init__(self):
            self.circle, self.tensor = self, torch.ones(3)
            held.append(weakref.ref(self))

    def new_step(method, case, way, device, batch):
        gc.disable()  # only what is asked for
        seen.append(sum(one() is not None for one in held))
        holder = Holder()

        def step():
            deep = Holder()
            if batch > 4:
                try:
                    raise torch.OutOfMemoryError("CUDA out of memory.")
                except RuntimeError as problem:
                    raise RuntimeError("CUDA out of memory, once more.") from problem
            return deep, holder

        return step, 1.0

    monkeypatch.setattr(gpu_measure, "new_step", new_step)
    try:
        case = replace(TINY["tiny-vit"], batch=8)
        found = list(gpu_measure.measure_largest(case, WAYS["tf32"], ["plain", "private"], CPU, 1))
    finally:
        gc.enable()
    assert [record["largest"] for record in found] == [4, 4]
    assert len(seen) > 8
    assert not any(seen)


@pytest.mark.parametrize(("case", "layers"), [("tiny-vit", 10), ("tiny-resnet", 16)])
@pytest.mark.parametrize("way", ["tf32", "bf16"])
def test_each_layer_is_measured_and_what_is_timed_is_the_gradient(case, layers, way):
    (record,) = gpu_layers.measure_layers(TINY[case], WAYS[way], CPU)
    assert sum(group["count"] for group in record["groups"]) == layers
    assert all(group[time] > 0 for group in record["groups"] for time in ("plain", "norms", "sums"))
    for layer in {layer for layer, _ in gpu_layers.layers_of(TINY[case], WAYS[way], CPU)}:
        assert layer.x[2] == (torch.float32 if way == "tf32" else torch.bfloat16)
        assert layer.examples == TINY[case].batch
        x, weight = (gpu_layers.like(one, CPU).float() for one in (layer.x, layer.weight))
        g = torch.randn(contract.output_shape(x, weight, layer.geometry))
        norms, sums = gpu_layers.private_work(layer, x, g, torch.ones(layer.examples), weight)
        plain = gpu_layers.plain_gradient(x, g, weight, layer.geometry)
        torch.testing.assert_close(sums(), plain, rtol=1e-3, atol=1e-3)
        each = contract.per_example_gradients(x, g, weight, layer.geometry, layer.examples)
        squares = norms() if layer.method == "store" else norms()[0]
        torch.testing.assert_close(squares, each.flatten(1).square().sum(dim=1), rtol=1e-3, atol=0)


def test_the_layer_that_costs_most_comes_first_in_its_table():
    sizes = {"method": "ghost", "T": 197, "D": 768, "P": 3072, "G": 1, "gflop": 20.0}
    groups = [
        {"layer": "little", "count": 1, "plain": 1.0, "norms": 1.0, "sums": 1.5, **sizes},
        {"layer": "much", "count": 12, "plain": 0.5, "norms": 0.2, "sums": 0.6, **sizes},
    ]
    table = gpu_table.layer_table({"batch": 96, "groups": groups})
    *_, first, second, total = table.splitlines()
    assert first.startswith("| much | 12 | ghost | 197 | 768 | 3072 | 240 | 0.500 | 0.800 (0.200")
    assert first.endswith("| 3.60 | 100 |")
    assert second.endswith("| 1.50 | 20 |")
    assert "| 7.00 | 12.10 (3.40 + 8.70) | 5.10 |" in total


def test_the_layers_stand_beside_the_steps_they_explain():
    steps = [("vit-b", "bf16", "plain", 36.0), ("vit-b", "bf16", "private", 48.5)]
    records = [finding(*step, 1) for step in steps]
    layers = {"kind": "layers", "case": "vit-b", "way": "bf16", "method": "private"}
    table = gpu_table.tables([*records, {**layers, "batch": 8, "groups": []}], "")
    assert "## Layers of ViT-B/16, 224, bf16" in table
    assert table.endswith("The whole step, bf16: 12.5 ms above 36.0 ms.")


@pytest.mark.parametrize("way", ["tf32+graphs", "bf16+graphs"])
def test_the_steps_of_training_leave_the_gradient_that_the_others_make(way, monkeypatch):
    def exact(total, plan, *_, **__):
        for part in total.values():
            part.div_(plan.expected_batch)

    monkeypatch.setattr("sfumato.training.noisy_gradient.privatize", exact)
    monkeypatch.setattr(torch.optim.SGD, "zero_grad", lambda _: None)
    case, way = TINY["tiny-wrn"], WAYS[way]
    inputs = gpu_loop.random_inputs(case, way, CPU, 4)
    chunk = Chunk(torch.arange(4), torch.ones(4, dtype=torch.bool))
    for method in gpu_steps.LOOPS:
        model, step = gpu_loop.loop_step(method, case, way, CPU, 4, 2)
        step()
        found = [p.grad for p in model.parameters()]
        if method == "plain loop":
            losses = inputs.losses(model, *inputs.tensors(chunk, 0))
            wanted = torch.autograd.grad(losses.mean(), list(model.parameters()))
        else:
            clipper = GradientClipper(model, clipping=Clipping(max_norm=1.0))
            total = clipper.clip(inputs.losses, inputs.tensors(chunk, 0), 4).total
            wanted = [total[name] / 4 for name, _ in model.named_parameters()]
        for one, other in zip(found, wanted, strict=True):
            torch.testing.assert_close(one, other, rtol=2e-2 if way.low else 1e-4, atol=1e-5)
