"""A small private training run that a test kills over and over: logistic regression by DP-SGD.

`python killed.py OUT KILLS SEED` trains in a child process, kills it with SIGKILL at random
instants KILLS times, starts it again each time, and at last lets it finish. The parent imports
torch once, so that the children spend their time in training.
"""

import os
import random
import signal
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from sfumato.privacy.budget import make_plan
from sfumato.privacy.ledger import Ledger, LedgerHeader
from sfumato.privacy.moments import clip_rows
from sfumato.privacy.noise import privatize
from sfumato.privacy.sampling import poisson_batches
from sfumato.privacy.session_key import SessionKey
from sfumato.runs import open_run


@dataclass(frozen=True, kw_only=True)
class Config:
    steps: int = 60
    checkpoint_every: int = 7


def train(out: Path) -> None:
    config = Config()
    run = open_run(config, verb="train", out=out)
    if run.finished:
        return
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(300, 8, generator=generator)
    targets = (inputs[:, 0] > 0).float()
    plan = make_plan(
        size=300, batch_size=30, steps=config.steps, noise_multiplier=1.0, max_norm=0.5
    )
    # The key is made once, as a real run makes it, but by a seed, so that two runs can be compared.
    secret = SessionKey(run.secret(lambda: SessionKey.from_seed(3).key), fixed=True)
    header = LedgerHeader(data="blobs", delta=1e-3, fixed_seed=True, secret=secret.commitment)
    ledger = Ledger.resume(run.ledger_records(), header, run.write_ledger)
    model = torch.nn.Linear(8, 1, bias=False)
    torch.nn.init.zeros_(model.weight)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    average = torch.optim.swa_utils.AveragedModel(
        model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9)
    )
    jitter = torch.Generator().manual_seed(1)
    state = run.load_checkpoint() or {"step": 0}
    if state["step"]:
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        average.load_state_dict(state["average"])
        jitter.set_state(state["jitter"])
    for batch in poisson_batches(
        plan, 300, ledger, secret, stage="train", chunk_size=16, start=state["step"]
    ):
        total = torch.zeros(8, dtype=torch.float64)
        for chunk in batch.chunks:
            x = inputs[chunk.indices] + 0.1 * torch.randn(16, 8, generator=jitter)
            error = torch.sigmoid(model(x).detach().squeeze(1)) - targets[chunk.indices]
            gradients = clip_rows(error[:, None] * x, plan.max_norm)
            total += gradients[chunk.mask].sum(dim=0)
        noisy = privatize({"w": total}, plan, ledger, secret, step=batch.step, stage="train")
        model.weight.grad = noisy["w"].float()[None]
        optimizer.step()
        average.update_parameters(model)
        run.measure(batch.step, weight=float(model.weight.detach().sum()))
        done = batch.step + 1
        if done % config.checkpoint_every == 0:
            run.save_checkpoint(
                {
                    "step": done,
                    "model": model.state_dict(),
                    "optimizer": optimizer.state_dict(),
                    "average": average.state_dict(),
                    "jitter": jitter.get_state(),
                }
            )
    run.save_tensors("model.safetensors", {"w": model.weight, "average": average.module.weight})
    run.finish({"epsilon": ledger.epsilon()})


def start(work: Callable[[], object]) -> int:
    child = os.fork()
    if child == 0:
        try:
            work()
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    return child


def kill_over_and_over(work: Callable[[], object], kills: int, seed: int, longest: float) -> int:
    """Kill work at random instants, then let it finish; how often it was killed before its end."""
    chance = random.Random(seed)
    killed = 0
    for _ in range(kills):
        child = start(work)
        time.sleep(chance.uniform(0.0, longest))
        os.kill(child, signal.SIGKILL)
        _, status = os.waitpid(child, 0)
        killed += os.WIFSIGNALED(status)
    _, status = os.waitpid(start(work), 0)
    assert status == 0
    return killed


def main() -> None:
    out, kills, seed = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    torch.set_num_threads(1)
    print(kill_over_and_over(lambda: train(out), kills, seed, 0.12))


if __name__ == "__main__":
    main()
