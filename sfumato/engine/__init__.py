"""`PrivacyEngine`, the familiar cover over `clipper` and `privacy`, and what keeps it honest."""

from sfumato.engine.make_private import make_private as make_private
from sfumato.engine.privacy_engine import PrivacyEngine as PrivacyEngine
