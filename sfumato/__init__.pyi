# The public names, each with the module it is loaded from; `__init__.py` reads this list.
from sfumato.attacks.retraining_audit import audit_trainer as audit_trainer
from sfumato.clipping.admit import admit as admit
from sfumato.clipping.admit import clipped_gradient as clipped_gradient
from sfumato.clipping.clip import GradientClipper as GradientClipper
from sfumato.clipping.factors import Clipping as Clipping
from sfumato.clipping.method_choice import explain as explain
from sfumato.commands.load_model import load_model as load_model
from sfumato.data.augment import Augmentation as Augmentation
from sfumato.data.images import Images as Images
from sfumato.data.load import load_images as load_images
from sfumato.engine import PrivacyEngine as PrivacyEngine
from sfumato.engine import make_private as make_private
from sfumato.errors import ConfigError as ConfigError
from sfumato.errors import DataError as DataError
from sfumato.errors import PrivacyError as PrivacyError
from sfumato.errors import RunError as RunError
from sfumato.errors import SfumatoError as SfumatoError
from sfumato.errors import SfumatoWarning as SfumatoWarning
from sfumato.errors import UnsupportedLayer as UnsupportedLayer
from sfumato.privacy.accounting import epsilon as epsilon
from sfumato.privacy.budget import Budget as Budget
from sfumato.privacy.budget import Plan as Plan
from sfumato.privacy.budget import make_plan as make_plan
from sfumato.privacy.ledger import Ledger as Ledger
from sfumato.privacy.ledger import LedgerHeader as LedgerHeader
from sfumato.privacy.noise import privatize as privatize
from sfumato.privacy.releases import Release as Release
from sfumato.privacy.sampling import poisson_batches as poisson_batches
from sfumato.privacy.session_key import SessionKey as SessionKey
from sfumato.runs import Run as Run
from sfumato.runs import open_run as open_run

__version__: str

RENAMED: dict[str, str]
