"""Who has what in `sfumato release`, and the one ledger of it all."""

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import nn

from sfumato.commands.origin import (
    note_start,
    require_covered,
    require_no_ledger,
    require_other_data,
)
from sfumato.commands.release.budget import NoiseShares, share_budget
from sfumato.commands.stages import log_ignored_settings, read_given_run, refuse_ignored_settings
from sfumato.commands.train import command as train
from sfumato.commands.train.privacy_setup import draw_secret, header_of
from sfumato.commands.train.train_state import group_by_person
from sfumato.data.fingerprint import require_same_data
from sfumato.data.images import Images
from sfumato.data.load import load_images, load_splits
from sfumato.data.overlap import require_alike
from sfumato.errors import ConfigError, PrivacyError
from sfumato.files import read_lines
from sfumato.models.observe import observed
from sfumato.models.zoo import load_weights
from sfumato.privacy.budget import default_delta
from sfumato.privacy.ledger import Ledger
from sfumato.privacy.session_key import SessionKey
from sfumato.runs import Run
from sfumato.settings.release import ReleaseSettings
from sfumato.training.inputs import Inputs
from sfumato.training.process_group import ProcessGroup
from sfumato.training.setup import pick_device, quick_precision


@dataclass(frozen=True)
class Context:
    """Who has what."""

    config: ReleaseSettings
    run: Run
    device: torch.device
    private: Images
    test: Images
    public: Images
    teacher: train.Config
    """The settings of the teacher that is there already, or of the one to train."""
    book: Ledger | None
    """The ledger of the teacher that is there already."""

    @cached_property
    def units(self) -> int:
        """How many images, or people, the guarantee is about."""
        people = group_by_person(self.teacher, self.private)
        return len(self.private) if people is None else len(people)

    @property
    def student(self) -> str:
        """The student's model."""
        return self.config.student or self.teacher.model

    @property
    def precision(self) -> torch.dtype:
        """What public images are moved and trained on in."""
        return quick_precision(self.device)

    @property
    def delta(self) -> float:
        """The chance that the guarantee fails."""
        given = self.config.delta
        if given is None and self.book is not None:
            given = self.book.header.delta
        return default_delta(self.units) if given is None else given

    @cached_property
    def shares(self) -> NoiseShares:
        """The noise of everything."""
        spent = None if self.book is None else self.book.releases
        length = len_of_moments(self) if self.config.k else 0
        return share_budget(
            self.config,
            size=self.units,
            delta=self.delta,
            length=length,
            classes=len(self.private.classes),
            spent=spent,
        )


def make_context(config: ReleaseSettings, run: Run) -> Context:
    """Load images, and refuse at once what cannot be released from."""
    settings, book = (
        read_given_teacher(config, run) if config.teacher else (config.train.alone, None)
    )
    if book is not None:  # one guarantee: the one that the teacher was trained under
        config = replace(
            config,
            relation=book.header.relation,
            unit=settings.unit,
            people=settings.people,
            images_per_person=settings.images_per_person,
        )
    if book is None:
        require_covered(config.train)
    private, test = load_splits(settings.data, people=settings.people, **settings.source.loading)
    # What is said here goes before what a given teacher was told.
    own = {name: value for name, value in config.train.source.loading.items() if value}
    if book is None:
        require_other_data(config.train, private)
    require_same_data(private, run)
    taught = config.teacher and config.teacher / "model.safetensors"
    note_start(taught or config.weights, run)
    require_no_ledger(config.public, private.name)
    public = load_images(
        config.public, "train", private=False, **{**settings.source.loading, **own}
    )
    public = replace(public, people=None)
    if config.public_images is not None and config.public_images < len(public):
        public, _ = public.split(config.public_images / len(public), seed=config.seed)
    for own in (private, test):  # public images that are test images would flatter every score
        require_alike(own, public)
    context = Context(
        config, run, pick_device(config.device), private, test, public, settings, book
    )
    if config.k and not len_of_moments(context):
        raise ConfigError(
            f'the teacher "{settings.model}" has no normalisation layer, so there are no '
            "statistics to match. Take a model that has (--model group-cnn), or --k 0."
        )
    return context


def read_given_teacher(config: ReleaseSettings, run: Run) -> tuple[train.Config, Ledger]:
    """Settings and ledger of a finished run of `sfumato train`."""
    assert config.teacher is not None
    settings, _, ledger = read_given_run(config.teacher, config.train)
    refuse_ignored_settings(config.teacher, config, settings)
    # Public images are framed as is said here, and the guarantee for all has its own delta.
    used = {*config.train.source.loading, "delta", "secure"}
    log_ignored_settings(config.teacher, config, settings, run, used)
    if ledger is None:
        raise PrivacyError(
            f"{config.teacher} has no ledger.jsonl, so nobody knows what its model gives away. A "
            "teacher without a ledger cannot be released from."
        )
    if config.secure and ledger.header.noise != "chacha20":
        raise ConfigError(
            f"--secure, and the noise of {config.teacher} came from {ledger.header.noise}. Train "
            "it with --secure too, or leave that out."
        )
    return settings, ledger


def teacher_of(context: Context) -> tuple[nn.Module, Inputs]:
    """The teacher, and how it reads private images."""
    train_state, inputs = train.prepare_classifier(context.teacher, context.private, context.device)
    folder = context.config.teacher or context.run.stage("teacher").path
    load_weights(train_state.model, folder / "model.safetensors")
    return train_state.model.eval(), replace(inputs, views=1)


def len_of_moments(context: Context) -> int:
    """How many numbers the teacher's statistics have, counted on noise."""
    train_state, inputs = train.prepare_classifier(
        context.teacher, context.private.select([0]), torch.device("cpu")
    )
    with observed(train_state.model.eval()) as found, torch.no_grad():
        train_state.model(inputs.trial(1)[0])
    return sum(2 * pair.shape[2] for pair in found)


def open_book(context: Context) -> tuple[Ledger, SessionKey]:
    """The ledger of everything, with the teacher's lines in it."""
    secret = draw_secret(context.config.train, context.run, ProcessGroup())
    header = header_of(context.config.train, context.private, context.delta, secret)
    ledger = Ledger.resume(context.run.ledger_records(), header, context.run.write_ledger)
    path = context.run.stage("teacher").path / "ledger.jsonl"
    ledger.inherit(context.book or Ledger.from_records(read_lines(path)))
    return ledger, secret


def finished_book(context: Context) -> Ledger:
    """The ledger when all is charged. It needs no secret, which a finished run has thrown away."""
    return Ledger.from_records(context.run.ledger_records())


def release_guarantee(context: Context) -> dict[str, Any]:
    """What the ledger says in the end."""
    return {
        **finished_book(context).guarantee(),
        "public": context.public.name,
        "k": context.config.k,
        "images": len(context.public),
        "model": context.teacher.model,
    }
