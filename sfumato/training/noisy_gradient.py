"""The tail of every private step: clipped sums go in, and a noisy gradient comes out.

`sfumato train` and `PrivacyEngine` share it, so there is one place where sums of all processes are
added up, the ledger is charged, noise is added, and the result is handed to the parameters.
"""

from collections.abc import Callable, Mapping

from torch import Tensor, nn

from sfumato.privacy.budget import Plan
from sfumato.privacy.flat import Layout, Sums
from sfumato.privacy.ledger import Ledger
from sfumato.privacy.noise import privatize
from sfumato.privacy.session_key import SessionKey
from sfumato.training.process_group import ProcessGroup


class NoisyGradient:
    """Adds up clipped sums, and releases their noisy mean as the gradient of the parameters.

    Guarantee: what `release` leaves is `privatize` of all that was added since `begin`, by all
    processes together. The line is in the ledger first, and noise is added once, by the process
    that leads. Nothing added means a sum of zeros: it is noised and charged like any other.
    """

    def __init__(
        self,
        parameters: Callable[[], Mapping[str, nn.Parameter]],
        *,
        stage: str = "train",
        processes: ProcessGroup | None = None,
    ) -> None:
        self.parameters = parameters
        self.stage = stage
        self.processes = ProcessGroup() if processes is None else processes
        self._layout: tuple[object, Layout] | None = None
        self._sums: Sums | None = None

    def begin(self) -> None:
        """Forget what was added.

        The next sums lie elsewhere: what was released lies where the last were, and anyone who kept
        a gradient would see the sums of this step before they have their noise.
        """
        self._sums = None

    @property
    def sums(self) -> Sums:
        """What was added; zeros at first, which lie where the parameters are now."""
        if self._sums is None:
            self._sums = self._layout_now().zeros()
        return self._sums

    def add(self, total: Mapping[str, Tensor]) -> None:
        """Add the clipped sums of a chunk."""
        self.sums.add(total)

    def all_reduce(self, **more: Tensor) -> None:
        """Add up the sums of all processes, and other numbers on the way."""
        self.processes.all_reduce({**self.sums, **{f" {name}": t for name, t in more.items()}})

    def release(
        self, step: int, plan: Plan, ledger: Ledger, secret: SessionKey, *, family: str = ""
    ) -> None:
        """Charge, add noise, and leave the noisy mean on the parameters. Sums were added up."""
        noisy = self.sums
        if self.processes.leads:
            privatize(noisy, plan, ledger, secret, step=step, stage=self.stage, family=family)
        self.processes.broadcast(noisy)
        for name, parameter in self.parameters().items():
            parameter.grad = noisy[name]
        self.begin()

    def _layout_now(self) -> Layout:
        """How sums lie. It is kept until the model moves: to make it takes time."""
        named = self.parameters()
        kind = [(p.shape, p.stride(), p.dtype, p.device) for p in named.values()]
        if self._layout is None or self._layout[0] != kind:
            self._layout = kind, Layout.of(named)
        return self._layout[1]
