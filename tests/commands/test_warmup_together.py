"""sfumato warmup generator and sample by several processes: one run, and the images of one."""

import json
import shutil
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from several import command
from warmups import MADE, same, tiny, warm

from sfumato.cli import main
from sfumato.commands.warmup import command as warmup
from sfumato.commands.warmup import generator as warmup_generator
from sfumato.commands.warmup.context import make_context
from sfumato.config import to_json
from sfumato.data.example_rng import seed_of
from sfumato.diffusion import generator
from sfumato.diffusion.generator_data import evaluate_denoiser
from sfumato.errors import ConfigError
from sfumato.files import read_lines
from sfumato.runs import open_run
from sfumato.training.cuda_graph import WARM
from sfumato.training.process_group import ProcessGroup, leave_processes


@pytest.fixture(scope="module")
def settings(tmp_path_factory):
    guided = {"guide_weight": 1.0, "guide_epochs": 1.0}
    return replace(tiny(tmp_path_factory.mktemp("sets")), stage="sample", epsilon=None, **guided)


@pytest.fixture(scope="module")
def two(settings, tmp_path_factory):
    """A run whose generator two processes made, and drew from."""
    return together(settings, tmp_path_factory.mktemp("runs") / "two", "sample")


def together(settings, out, *words):
    """Take a stage by two processes, in a directory that remembers the settings."""
    out.mkdir(exist_ok=True)
    record = {"verb": "warmup", "config": to_json(settings)}
    if not (out / "config.json").exists():
        (out / "config.json").write_text(json.dumps(record))
    done = command(2, "warmup", *words, "--out", out)
    assert done.returncode == 0, done.stderr[-9000:]
    return out


def by_hand(settings, folder):
    """The steps of two processes, one after the other: their parts of the gradient added up."""
    with open_run(settings, verb="warmup", out=folder) as run:
        context = make_context(settings, run)
    data, diffusion = warmup_generator.generator_data_of(context), settings.diffusion
    start = warmup_generator.make_denoiser(context)
    train_state = generator.new_train_state(start, diffusion, context.device)
    weights = list(train_state.denoiser.parameters())
    for step in range(diffusion.steps):
        parts = []
        for rank in (0, 1):
            seed = seed_of(settings.seed, step, rank)
            torch.manual_seed(seed)
            rng = torch.Generator().manual_seed(seed)
            generator.accumulate_gradient(
                train_state, data, diffusion, torch.float32, rng, ProcessGroup(rank, 2)
            )
            parts.append([weight.grad.clone() for weight in weights])
        for weight, *pair in zip(weights, *parts, strict=True):
            weight.grad = sum(pair)
        generator.set_rate(train_state.optimizer, diffusion.rate(step))
        train_state.optimizer.step()
        train_state.average.update_parameters(train_state.denoiser)
        if step % 2:
            found, _ = evaluate_denoiser(train_state.average.module, data, torch.float32)
            generator.record_evaluation(train_state, found)
    return train_state


def test_two_processes_step_along_one_gradient(settings, two, tmp_path):
    wanted = by_hand(settings, tmp_path / "look")
    found = load_file(two / "stages/generator/model.safetensors")
    for name, value in wanted.best.items():
        torch.testing.assert_close(found[name], value, rtol=1e-4, atol=1e-5)
    lines = read_lines(two / "stages/generator/metrics.jsonl")
    assert [line["images"] for line in lines] == [32, 64, 96]
    losses = [look["held_out_loss"] for look in wanted.looks]
    assert [line["held_out_loss"] for line in lines] == pytest.approx(losses, rel=1e-4)


@pytest.mark.parametrize(("size", "batch"), [(1, 4), (2, 4), (3, 7)])
def test_the_parts_of_a_batch_weigh_as_one(settings, tmp_path, monkeypatch, size, batch):
    def one_each(denoiser, images, *_, **__):
        return sum(part.sum() for part in denoiser.parameters()).expand(len(images))

    monkeypatch.setattr(generator, "denoising_losses", one_each)
    diffusion = replace(settings.diffusion, gen_batch=batch)
    with open_run(settings, verb="warmup", out=tmp_path / "run") as run:
        context = make_context(settings, run)
    data = warmup_generator.generator_data_of(context)
    train_state = generator.new_train_state(
        warmup_generator.make_denoiser(context), diffusion, context.device
    )
    total = 0
    for rank in range(size):
        rng = torch.Generator().manual_seed(rank)
        generator.accumulate_gradient(
            train_state, data, diffusion, torch.float32, rng, ProcessGroup(rank, size)
        )
        total += next(train_state.denoiser.parameters()).grad
    torch.testing.assert_close(total, torch.ones_like(total))


@pytest.mark.full
def test_a_run_that_one_process_began_goes_on_with_two(settings, tmp_path, monkeypatch):
    original, calls = generator.accumulate_gradient, []

    def cut(*arguments):
        calls.append(0)
        if len(calls) == 4:
            raise KeyboardInterrupt
        original(*arguments)

    with monkeypatch.context() as patched:
        patched.setattr(generator, "accumulate_gradient", cut)
        with pytest.raises(KeyboardInterrupt):
            warm(replace(settings, stage="generator"), tmp_path / "run")
    begun = read_lines(tmp_path / "run/stages/generator/metrics.jsonl")
    together(settings, tmp_path / "run", "generator")
    lines = read_lines(tmp_path / "run/stages/generator/metrics.jsonl")
    assert [line["images"] for line in lines] == [32, 64, 96]
    assert lines[0] == begun[0]
    done = json.loads((tmp_path / "run/stages/generator/done.json").read_text())
    assert done["images_seen"] == 96


@pytest.mark.full
def test_two_processes_draw_the_file_of_one(two, tmp_path):
    flags = ("--number", 2100, "--solver", "dpm", "--sample-steps", 2, "--device", "cpu")
    words = ["warmup", "sample", "--run", two, *flags, "--out"]
    with pytest.raises(SystemExit) as stopped:
        main([str(word) for word in (*words, tmp_path / "one.npz")])
    assert stopped.value.code == 0
    done = command(2, *words, tmp_path / "two.npz")
    assert done.returncode == 0, done.stderr[-9000:]
    assert done.stdout.count("nothing is guaranteed") == 1
    assert (tmp_path / "one.npz").read_bytes() == (tmp_path / "two.npz").read_bytes()
    assert len(list(tmp_path.iterdir())) == 2


def test_the_stage_draws_by_two_what_it_draws_by_one(settings, two, tmp_path):
    names = [path.name for path in (two / "stages").iterdir()]
    assert sorted(names) == ["generator", "guide", "sample", "split"]
    shutil.copytree(two, tmp_path / "run")
    shutil.rmtree(tmp_path / "run/stages/sample")
    warm(settings, tmp_path / "run")
    assert same(tmp_path / "run", two, MADE[:3]) == dict.fromkeys(MADE[:3], True)


@pytest.mark.parametrize("stage", ["all", "warmup", "train", "evaluate"])
def test_later_stages_are_for_one_process(settings, monkeypatch, stage):
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(
        ConfigError, match=r"is for one process\. With torchrun, take sfumato warmup"
    ):
        warmup.run(replace(settings, stage=stage, epsilon=8.0), None)


@pytest.mark.full
def test_a_mistake_is_told_and_no_process_hangs(tmp_path):
    out = tmp_path / "images.npz"
    done = command(2, "warmup", "sample", "--run", tmp_path, "--out", out, "--device", "cpu")
    assert done.returncode != 0
    assert "is no run directory" in done.stderr
    assert "Broken pipe" not in done.stderr


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_a_step_in_two_recordings_is_the_step(settings, tmp_path, device):
    settings = replace(settings, device=device)
    with open_run(settings, verb="warmup", out=tmp_path / "run") as run:
        context = make_context(settings, run)
    data, processes = warmup_generator.generator_data_of(context), ProcessGroup(0, 2)
    ours, theirs = (
        generator.new_train_state(
            warmup_generator.make_denoiser(context).eval(), settings.diffusion, context.device
        )
        for _ in range(2)
    )
    backend = "nccl" if device == "cuda" else "gloo"
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    try:
        turn = generator.new_turn(ours, data, settings.diffusion, torch.float32, processes)
        for step in range(WARM + 4):
            turn(5, step)
            rng = torch.Generator(context.device).manual_seed(seed_of(5, step))
            generator.accumulate_gradient(
                theirs, data, settings.diffusion, torch.float32, rng, processes
            )
            theirs.optimizer.step()
    finally:
        leave_processes()
    for name, value in theirs.denoiser.state_dict().items():
        torch.testing.assert_close(ours.denoiser.state_dict()[name], value, rtol=1e-3, atol=1e-4)
