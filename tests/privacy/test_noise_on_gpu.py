"""`privatize` where the sums lie on a GPU: its guarantee, and that it equals the CPU."""

import pytest
import torch
from scipy import stats

from sfumato.errors import PrivacyError
from sfumato.privacy.budget import Plan
from sfumato.privacy.flat import Sums
from sfumato.privacy.ledger import Ledger, LedgerHeader
from sfumato.privacy.noise import privatize
from sfumato.privacy.seal import tag_of
from sfumato.privacy.secure import grid_noise
from sfumato.privacy.session_key import SessionKey
from sfumato.training.setup import make_optimizer

pytestmark = pytest.mark.gpu
PLAN = Plan(noise_multiplier=1.5, max_norm=4.0, expected_batch=20, rate=0.1, steps=50)
SOURCES = ["philox", "chacha20"]
SEED = SessionKey.from_seed(0)


def ledger(noise, secret=SEED):
    settings = {"fixed_seed": secret.fixed, "secret": secret.commitment}
    return Ledger(LedgerHeader(data="faces", delta=1e-5, noise=noise, **settings))


def some(device="cuda"):
    generator = torch.Generator().manual_seed(0)
    conv = torch.randn(64, 32, 3, 3, generator=generator)
    given = {
        "conv": conv.contiguous(memory_format=torch.channels_last),
        "fc": torch.randn(1001, 301, generator=generator),
        "bias": torch.randn(7, generator=generator),
    }
    return {name: tensor.to(device) for name, tensor in given.items()}


def release(sums, noise, *, book=None, secret=SEED):
    book = ledger(noise, secret) if book is None else book
    return privatize(sums, PLAN, book, secret, step=0, stage="train")


def test_secure_noise_is_that_of_the_cpu():
    found, wanted = release(some(), "chacha20"), release(some("cpu"), "chacha20")
    grid, _ = grid_noise(PLAN, sum(t.numel() for t in wanted.values()))
    for name, tensor in wanted.items():
        assert found[name].stride() == tensor.stride()
        apart = (found[name].cpu() - tensor).abs() * PLAN.expected_batch
        assert float(apart.max()) <= 1.01 * grid + 1e-6 * float(tensor.abs().max())
        assert int((apart > 0).sum()) <= 1, "another grid step, once in 10^9"


@pytest.mark.parametrize("noise", SOURCES)
def test_noise_of_a_gpu_has_the_right_scale_and_two_thirds_of_it_is_rejected(noise):
    zeros = {"a": torch.zeros(999, 201, device="cuda"), "b": torch.zeros(3, device="cuda")}
    drawn = release(zeros, noise)["a"].double().cpu().numpy().ravel() * PLAN.expected_batch
    wanted = stats.norm(0, PLAN.noise_deviation)
    assert stats.kstest(drawn, wanted.cdf).pvalue > 1e-3
    for wrong in (2 / 3, 3 / 2, 0.95, 1.05):
        other = stats.norm(0, wrong * PLAN.noise_deviation)
        assert stats.kstest(drawn, other.cdf).pvalue < 1e-6
    assert (drawn != 0).all()


@pytest.mark.parametrize("noise", SOURCES)
def test_a_repeated_step_is_the_same_release_and_another_sum_has_other_noise(noise):
    secret = SessionKey.draw()
    book = ledger(noise, secret)
    first = release(Sums.of(some()), noise, book=book, secret=secret)
    resumed = Ledger.from_records(book.records())
    again = release(some(), noise, book=resumed, secret=secret)
    assert len(resumed.releases) == 1
    assert all(torch.equal(first[name], again[name]) for name in first)
    changed = some()
    changed["bias"].view(torch.int32)[-1] ^= 1
    other = release(changed, noise, book=Ledger.from_records(book.records()), secret=secret)
    assert not (other["fc"] == first["fc"]).all()
    assert float((other["fc"] - first["fc"]).std()) > PLAN.noise_deviation / PLAN.expected_batch


def test_tags_repeat_and_tell_every_bit():
    first = tag_of(some(), SEED, ("book", "a", 0))
    assert all(tag_of(some(), SEED, ("book", "a", 0)) == first for _ in range(20))
    assert tag_of(some(), SEED, ("book", "a", 1)) != first
    assert tag_of(some("cpu"), SEED, ("book", "a", 0)) != first
    for name in some():
        for place in (0, -1):
            changed = some()
            flat = changed[name].permute(0, 2, 3, 1) if name == "conv" else changed[name]
            flat.reshape(-1).view(torch.int32)[place] ^= 1
            assert tag_of(changed, SEED, ("book", "a", 0)) != first


@pytest.mark.parametrize("noise", SOURCES)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("place", [0, 123_456, -1])
def test_of_what_is_not_finite_nothing_is_shown_and_the_ledger_says_so(noise, bad, place):
    sums = some()
    sums["fc"].view(-1)[place] = bad
    book = ledger(noise)
    found = release(sums, noise, book=book)
    assert all(tensor.isnan().all() for tensor in found.values())
    with pytest.raises(PrivacyError, match="of train, step 0, are not finite"):
        book.epsilon()


@pytest.mark.parametrize("noise", SOURCES)
def test_a_release_does_not_wait_for_the_gpu(noise):
    sums, secret = Sums.of(some()), SessionKey.draw()
    book = ledger(noise, secret)
    release(Sums.of(some()), noise, secret=secret)  # kernels are compiled now
    busy = torch.randn(8192, 8192, device="cuda")
    torch.cuda.synchronize()
    for _ in range(60):
        busy = busy @ busy
    worked = torch.cuda.Event()
    worked.record()
    release(sums, noise, book=book, secret=secret)
    assert not worked.query(), "it came back while the GPU was at work"
    (line,) = book.releases
    assert worked.query(), "the tag could only be told by then"
    assert line.tag == tag_of(some(), secret, (book.header.id, "train", 0))


@pytest.mark.parametrize("kind", ["sgd", "adam", "adamw"])
def test_one_kernel_for_all_parameters_moves_them_as_the_cpu_does(kind):
    def moved(device):
        torch.manual_seed(0)
        net = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), torch.nn.Conv2d(8, 4, 1))
        net = net.to(device, memory_format=torch.channels_last)
        optimizer = make_optimizer(net, kind, lr=0.1, momentum=0.9, weight_decay=0.01)
        for step in range(3):
            named = dict(net.named_parameters())
            sums = Sums.zeros(named)
            sums.add({n: torch.full_like(p, 0.1 * (step + 1)) for n, p in named.items()})
            for name, parameter in named.items():
                parameter.grad = sums[name]
            optimizer.step()
        return [parameter.detach().cpu() for parameter in net.parameters()]

    for found, wanted in zip(moved("cuda"), moved("cpu"), strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-6)
